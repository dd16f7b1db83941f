"""What no file and no screen may show, a save that is killed while it waits, and the command line that vLLM gets."""

import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest
from launch import ROOT, in_fork, run_process
from serve_load import serving

from trainer.checkpoints import checkpoint_store as store
from trainer.datasets.demos.demo import make_demo

ESC = "\x1b[2J\x1b]0;title\x07"
FAKE_VLLM = """
import json, os, sys

def main():
    seen = {"argv": sys.argv, "environment": dict(os.environ)}
    from trainer.rollout.engines.on_vllm import server_guard
    seen["has_guard"] = hasattr(server_guard, server_guard.NAME.rpartition(".")[2])
    print("SEEN " + json.dumps(seen), flush=True)
    os._exit(0)
"""


@pytest.fixture(scope="module")
def demo(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("hidden") / "demo"
    make_demo(str(folder))
    return folder


def train_ppo(demo: Path, output: Path, url: str) -> tuple[int, str]:
    flags = [
        "--pretrain",
        f"{demo}/model",
        "--dataset",
        f"{demo}/prompts.jsonl",
        "--label_key",
        "label",
        "--max_steps",
        "1",
    ]
    flags += [
        "--remote_rm_url",
        url,
        "--remote_rm_retries",
        "0",
        "--param_dtype",
        "fp32",
        "--max_samples",
        "4",
        "--no_save",
    ]
    flags += [
        "--prompt_max_len",
        "64",
        "--generate_max_len",
        "4",
        "--rollout_batch_size",
        "2",
        "--train_batch_size",
        "4",
    ]
    flags += ["--n_samples_per_prompt", "2", "--micro_train_batch_size", "2", "--advantage_estimator", "group_norm"]
    flags += ["--save_steps", "1", "--output_dir", str(output)]
    return in_fork("-m", "trainer.cli.train_ppo", *flags)


def test_a_password_of_an_address_is_in_no_file_and_on_no_screen(demo, tmp_path):
    with serving(lambda prompts, responses, finished: [float(len(text)) for text in responses]) as port:
        url = f"http://127.0.0.1:{port}/score?pwd=s3same&n=1"
        code, output = train_ppo(demo, tmp_path / "run", url)
    assert code == 0, output[-3000:]
    files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    names = {path.name for path in files}
    assert names >= {"config.yaml", "metrics.jsonl", "state.json", "rollouts.jsonl"}
    held = {str(path): path.read_bytes() for path in files} | {"screen": output.encode()}
    assert [name for name, data in held.items() if b"s3same" in data] == []
    assert b"***" in held[str(tmp_path / "run/config.yaml")] and b"***" in held[str(tmp_path / "run/metrics.jsonl")]
    code, output = train_ppo(demo, tmp_path / "gone", url)  # nobody answers any more
    [line] = [line for line in output.splitlines() if line.startswith("error: ")]
    assert code == 2 and "pwd=***" in line and "s3same" not in output
    code, output = train_ppo(demo, tmp_path / "refused", url.replace("//", "//me:pa55word@"))
    assert code == 2 and "address with a user or a password" in output and "pa55word" not in output
    held = [path.read_bytes() for path in (tmp_path / "gone").rglob("*") if path.is_file()]
    assert held and not any(b"s3same" in data for data in held)


def test_a_slow_save_that_is_killed_leaves_the_older_checkpoint(tmp_path):
    """The disk takes the second half of a file never. A hash of the whole is still there for the older one."""
    root = tmp_path / "checkpoints"
    (root / "step_1.tmp").mkdir(parents=True)
    (root / "step_1.tmp/weights").write_bytes(b"old")
    store.commit(str(root / "step_1.tmp"), str(root / "step_1"), {})

    def parts():
        yield b"half"
        (tmp_path / "half").touch()
        time.sleep(600)
        yield b"never"

    pid = os.fork()
    if not pid:
        try:
            (root / "step_2.tmp").mkdir()
            entry = store.write_parts(str(root / "step_2.tmp/weights"), parts())
            store.commit(str(root / "step_2.tmp"), str(root / "step_2"), {"weights": entry})
        finally:
            os._exit(1)
    deadline = time.monotonic() + 60
    while not (tmp_path / "half").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert store.list_checkpoints(str(root)) == [str(root / "step_1")]  # while it waits
    os.kill(pid, signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    assert (root / "step_2.tmp/weights").exists()
    store.remove_temporaries(str(root))
    assert os.listdir(root) == ["step_1"] and store.find_damage(str(root / "step_1")) is None


@pytest.mark.parametrize("what", ["model", "data", "metric"])
def test_no_name_drives_the_terminal(demo, tmp_path, what):
    if what == "metric":
        rows = [{"event": "start", "config": {"pretrain": ESC, "dataset": ESC}, "total_steps": 2}]
        rows += [{"step": 1, "loss": 1.0, f"eval_{ESC}": 1.0, "step_time": 1.0}]
        (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        command = ["watch", str(tmp_path), "--once"]
    else:
        (tmp_path / f"rows{ESC}.jsonl").write_text('{"text": "a"}\nno row\n')
        model = f"{tmp_path}/model{ESC}" if what == "model" else f"{demo}/model"
        command = ["train_sft", "--pretrain", model, "--dataset", f"{tmp_path}/rows{ESC}.jsonl"]
        command += ["--output_dir", str(tmp_path / "run"), "--no_save"]
    code, output = in_fork("-m", f"trainer.cli.{command[0]}", *command[1:])
    assert code == (0 if what == "metric" else 2), output
    assert "\x1b[2J" not in output and "\x1b]0" not in output and "\x07" not in output
    assert what == "metric" or "\\x1b[2J" in output


def test_vllm_gets_the_guard_and_not_the_key(demo, tmp_path):
    """As far as it goes without vLLM: another package of this name notes what it is started with."""
    place = tmp_path / "fake/vllm/entrypoints/launchers/api_server"
    place.mkdir(parents=True)
    for folder in [place, *list(place.parents)[:3]]:
        (folder / "__init__.py").touch()
    (place / "entry.py").write_text(FAKE_VLLM)
    (tmp_path / "key").write_text("s3same\n")
    command = [sys.executable, "-m", "trainer.cli.serve_engine", "--pretrain", f"{demo}/model"]
    command += ["--host", "0.0.0.0", "--port", "8123", "--api_key", str(tmp_path / "key"), "--max_len", "64"]
    code, output = run_process(command, PYTHONPATH=f"{ROOT}:{tmp_path / 'fake'}")
    [line] = [line for line in output.splitlines() if line.startswith("SEEN ")]
    seen = json.loads(line.removeprefix("SEEN "))
    flags = seen["argv"]
    assert code == 0 and seen["has_guard"]
    assert flags[flags.index("--middleware") + 1].startswith("trainer.rollout.engines.on_vllm.server_guard")
    assert flags[flags.index("--host") + 1] == "0.0.0.0" and flags[flags.index("--port") + 1] == "8123"
    assert "s3same" not in json.dumps(flags) and "s3same" not in output.replace(line, "")
