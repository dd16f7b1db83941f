"""Certificates of real runs: clean runs verify, also on another layout and after a kill; every tampering is found.

Two launches make all runs; the tamperings then change copies of one run folder and are checked in this process.
"""

import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from launch import ROOT, _environment, in_fork, train_many

from trainer.checkpoints.checkpoint_store import MANIFEST
from trainer.compare.certificates import certificate_checks
from trainer.compare.certificates.plain_replay import certify_steps, check_replay_flags
from trainer.compare.certificates.verification import verify
from trainer.datasets.demos.demo import make_demo
from trainer.errors import UserError
from trainer.flags.common_flags import SFTArguments
from trainer.flags.parse_flags import from_flat
from trainer.flags.rules import refuse
from trainer.reports import certificate

STEPS = 6


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    """clean: 6 steps on 2 ranks, certified. killed: the same, killed after step 3 or later on 1 rank, and resumed on 2.
    other: another seed. dpo: pairs. online: pairs of own answers. kd: a teacher. plain: no certificate.
    again: `clean` trained again under DeepSpeed with tp 2 by verify_run."""
    folder = tmp_path_factory.mktemp("runs")
    make_demo(str(folder))
    line = ["--pretrain", str(folder / "model"), "--train_batch_size", "8", "--micro_train_batch_size", "4"]
    line += ["--param_dtype", "fp32", "--learning_rate", "1e-3", "--max_steps", str(STEPS)]
    sft = [*line, "--dataset", str(folder / "sft.jsonl"), "--apply_chat_template", "--save_steps", "2"]
    kept = ["--save_steps", "2", "--eval_fraction", "0.2", "--eval_steps", "3"]
    again = ["--config", str(folder / "sets/config.yaml"), "--output_dir"]
    from_sets = ["--load_checkpoint", str(folder / "sets/checkpoints/step_2")]
    killed = [*sft, "--certificate", "--output_dir", str(folder / "killed")]
    kill_after_checkpoint(killed, folder / "killed")
    lines = [
        [*sft, "--output_dir", str(folder / "clean"), "--certify", "3"],
        [*killed, "--load_checkpoint"],
        [*sft, "--output_dir", str(folder / "other"), "--seed", "7", "--certificate"],
        [
            "train_dpo",
            *line,
            "--dataset",
            str(folder / "pairs.jsonl"),
            "--output_dir",
            str(folder / "dpo"),
            "--certificate",
        ],
        ["train_dpo", *line, *online_flags(folder), "--output_dir", str(folder / "online"), "--certificate"],
        [
            "train_kd",
            *line,
            "--dataset",
            str(folder / "sft.jsonl"),
            "--teacher",
            str(folder / "model"),
            "--apply_chat_template",
            "--output_dir",
            str(folder / "kd"),
            "--certificate",
            "--max_steps",
            "2",
        ],
        [*line, "--dataset", str(folder / "sft.jsonl"), "--max_steps", "1", "--output_dir", str(folder / "plain")],
        ["--config", list_of_sets(folder), *line, *kept, "--output_dir", str(folder / "sets"), "--certify", "2"],
        [*again, str(folder / "repeated"), "--save_path", str(folder / "repeated/model")],
        [*again, str(folder / "resumed"), "--save_path", str(folder / "resumed/model"), *from_sets],
        ["verify_run", str(folder / "clean"), "--rerun", str(folder / "again"), "--"],
    ]
    lines[-1] += ["--backend", "deepspeed", "--zero_stage", "1", "--tensor_parallel_size", "2"]
    (folder / "output.txt").write_text(train_many(2, lines, folder, timeout=300))
    return folder


def online_flags(folder: Path) -> list[str]:
    (folder / "reward.py").write_text(
        "def reward_func(prompts, responses, labels):\n    return [float(len(response)) for response in responses]\n"
    )
    flags = "--online --label_key label --prompt_max_len 64 --generate_max_len 6 --rollout_batch_size 8 --max_steps 1"
    own = ["--reward_func", str(folder / "reward.py"), "--dataset", str(folder / "prompts.jsonl")]
    return [*flags.split(), "--n_samples_per_prompt", "2", *own]


def list_of_sets(folder: Path) -> str:
    """A file of --config with two sets of other shapes, as a mixture: one of 60 rows, one in a split of its own."""
    named = [{"q": f"{n} + 1?", "a": f"{n + 1}", "b": f"{n + 2}"} for n in range(40)]
    (folder / "named").mkdir()
    for split, rows in (("train", named[:1]), ("test", named)):
        (folder / f"named/{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    own = {"input_key": "q", "output_key": "a", "apply_chat_template": True, "weight": 1, "split": "test"}
    sets = [{"path": str(folder / "sft.jsonl"), "weight": 2, "max_samples": 60}, {"path": str(folder / "named"), **own}]
    (folder / "sets.yaml").write_text(json.dumps({"dataset": sets}))
    return str(folder / "sets.yaml")


def kill_after_checkpoint(flags: list[str], folder: Path) -> None:
    """Kill -9 a run of one process as soon as it has a checkpoint and a step after it. It sleeps between steps."""
    slow = "import time, trainer.training.loop as l; s = l.train_step; "
    slow += "l.train_step = lambda *a, **k: (time.sleep(0.5), s(*a, **k))[1]; "
    code = slow + "from trainer.cli.train_sft import main; main()"
    with (folder.parent / "killed.log").open("w") as log:
        command = [sys.executable, "-c", code, *flags]
        process = subprocess.Popen(command, stdout=log, stderr=log, cwd=ROOT, env=_environment())
    deadline = time.monotonic() + 200
    while process.poll() is None and time.monotonic() < deadline:
        rows = (folder / "metrics.jsonl").read_text() if (folder / "metrics.jsonl").exists() else ""
        if '"step": 3,' in rows and (folder / "checkpoints/step_2").exists():
            break
        time.sleep(0.05)
    assert process.poll() is None, (folder.parent / "killed.log").read_text()[-2000:]
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (folder / "certificate.json").exists()


def differences(results: dict) -> dict[str, list[str]]:
    return {name: found for name, found in results.items() if found}


# --- clean runs


def test_a_clean_run_verifies_and_its_certified_steps_are_those_of_the_plain_loop(runs):
    results = verify(str(runs / "clean"))
    assert differences(results) == {} and None not in results.values()
    replays = certificate.read(str(runs / "clean"))["replays"]
    assert len(replays) == 3 and {replay["step"] for replay in replays} <= {1, 3, 5}
    assert all(replay["relative_loss"] < 1e-5 and replay["relative_grad_norm"] < 1e-4 for replay in replays)


def test_a_killed_and_resumed_run_has_the_chain_of_an_uninterrupted_one(runs):
    assert differences(verify(str(runs / "killed"))) == {}
    killed, clean, other = (certificate.read(str(runs / name)) for name in ("killed", "clean", "other"))
    assert killed["resumed_after_steps"] == [2] and clean["resumed_after_steps"] == []
    assert killed["steps"]["batch_chain"] == clean["steps"]["batch_chain"] != other["steps"]["batch_chain"]
    assert killed["steps"]["losses"] == pytest.approx(clean["steps"]["losses"], rel=1e-5)


def test_another_layout_gives_the_same_curve(runs):
    output = (runs / "output.txt").read_text()
    assert "rerun: 6 steps, same chain of batches" in output and f"PASS {runs / 'clean'}" in output, output[-2000:]
    rows = certificate.final_rows(str(runs / "again"))[0]
    assert rows[-1]["mesh"]["tp"] == 2 and rows[-1]["config"]["backend"] == "deepspeed"


def test_a_run_of_preferences_verifies_too(runs):
    results = verify(str(runs / "dpo"))
    assert differences(results) == {} and results["order"] == [] and results["replays"] is None
    with pytest.raises(UserError, match="--certify: a run of train_dpo"):
        certify_steps(str(runs / "dpo"), 1, "cpu", str(runs / "model"))


def test_a_run_of_a_list_of_sets_verifies_repeats_and_resumes_only_as_it_was(runs):
    """With --eval_fraction: the batches are those of the part that is trained, also after the resume."""
    results = verify(str(runs / "sets"))
    assert differences(results) == {} and None not in results.values()
    rows = {name: certificate.final_rows(str(runs / name))[1] for name in ("sets", "repeated", "resumed")}
    found = {name: [(row["step"], row["batch_hash"], row["loss"]) for row in own] for name, own in rows.items()}
    assert len(found["sets"]) == STEPS and found["repeated"] == found["sets"] and found["resumed"] == found["sets"][2:]
    assert differences(verify(str(runs / "repeated"))) == {} == differences(verify(str(runs / "resumed")))
    start = certificate.final_rows(str(runs / "sets"))[0][0]
    order = np.random.default_rng(42).choice(2, size=1000, p=[2 / 3, 1 / 3])
    num_rows = next(n for n in range(1, 1000) if (order[:n] == 0).sum() == 60 or (order[:n] == 1).sum() == 40)
    assert start["data"]["num_rows"] == num_rows - round(0.2 * num_rows)
    own = [{"max_samples": 60}, {"input_key": "q", "output_key": "b", "apply_chat_template": True, "split": "test"}]
    line = ["--config", str(runs / "sets/config.yaml"), "--dataset_flags", json.dumps(own), "--load_checkpoint"]
    line += [str(runs / "sets/checkpoints/step_2"), "--output_dir", str(runs / "other_column")]
    line += ["--save_path", str(runs / "other_column/model")]
    code, output = in_fork("-m", "trainer.cli.train_sft", *line)
    [error] = [text for text in output.splitlines() if text.startswith("error: ")]
    assert code == 2 and "Traceback" not in output and error.startswith("error: --dataset (from --config "), output
    assert "other samples than" in error and "--dataset_flags was" in error


def test_only_a_run_that_is_told_to_writes_a_certificate(runs):
    assert not (runs / "plain/certificate.json").exists() and (runs / "plain/model/model.safetensors").exists()
    with pytest.raises(UserError, match=r"plain has no certificate\.json .*allowed: a finished run with --certificate"):
        verify(str(runs / "plain"))


def test_a_run_with_a_teacher_and_one_with_its_own_answers_verify_too(runs):
    kd, online = verify(str(runs / "kd")), verify(str(runs / "online"))
    assert differences(kd) == {} and kd["order"] == [] and kd["schedule"] == []
    assert set(certificate.read(str(runs / "kd"))["models"]) == {"pretrain", "teacher"}
    # rollouts are no rows of a file
    assert differences(online) == {} and online["order"] is None and online["data"] == []


def test_what_is_not_here_is_not_checked(runs, tmp_path):
    """Another machine: no model and no data there, only the run folder."""
    copy = shutil.copytree(runs / "clean", tmp_path / "run", symlinks=True)
    content = certificate.read(str(copy))
    content["arguments"]["pretrain"] = content["arguments"]["dataset"] = "/nowhere"
    content["data"]["files"] = {"/nowhere": content["data"]["files"].popitem()[1]}
    results = {
        "model": certificate_checks.check_models(content, None),
        "data": certificate_checks.check_data(content, None),
    }
    assert results == {"model": None, "data": None}
    # the same files elsewhere
    moved = shutil.copy(runs / "sft.jsonl", tmp_path / "moved.jsonl")
    assert differences(verify(str(copy), dataset=str(moved), model=str(runs / "model"))) == {}


# --- tampering


def edit_rows(run: Path, change) -> None:
    """Apply `change(rows)` to all rows of metrics.jsonl, in place."""
    path = run / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    change(rows)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def step_row(rows: list[dict], step: int) -> dict:
    return next(row for row in rows if row.get("step") == step)


def edit_loss(run: Path) -> None:
    edit_rows(run, lambda rows: step_row(rows, 3).update(loss=step_row(rows, 3)["loss"] * 0.999))


def drop_line(run: Path) -> None:
    edit_rows(run, lambda rows: rows.remove(step_row(rows, 3)))


def swap_steps(run: Path) -> None:
    def swap(rows: list[dict]) -> None:
        one, two = step_row(rows, 2), step_row(rows, 3)
        one["batch_hash"], two["batch_hash"] = two["batch_hash"], one["batch_hash"]

    edit_rows(run, swap)


def truncate_metrics(run: Path) -> None:
    path = run / "metrics.jsonl"
    path.write_bytes(path.read_bytes()[:-700])


def edit_number_of_tokens(run: Path) -> None:
    edit_rows(run, lambda rows: step_row(rows, 4).update(tokens=step_row(rows, 4)["tokens"] + 1))


def edit_step_time(run: Path) -> None:
    edit_rows(run, lambda rows: step_row(rows, 4).update(step_time=0.5))


def edit_version(run: Path) -> None:
    edit_rows(run, lambda rows: rows[0]["versions"].update(torch="2.12.0"))


def edit_config(run: Path) -> None:
    path = run / "config.yaml"
    path.write_text(path.read_text().replace("learning_rate: 0.001", "learning_rate: 0.002"))


def edit_certificate(run: Path) -> None:
    path = run / "certificate.json"
    path.write_text(path.read_text().replace('"machine": "', '"machine": "not '))


def truncate_certificate(run: Path) -> None:
    (run / "certificate.json").write_bytes((run / "certificate.json").read_bytes()[:-100])


def flip_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)


def change_weight(run: Path) -> None:
    flip_byte(run / "model/model.safetensors")


def change_checkpoint(run: Path) -> None:
    flip_byte(next((run / "checkpoints/step_4").glob("pieces-*.safetensors")))


def swap_checkpoint(run: Path) -> None:
    shutil.rmtree(run / "checkpoints/step_4")
    shutil.copytree(run.parent / "other/checkpoints/step_4", run / "checkpoints/step_4")


def rename_checkpoint(run: Path) -> None:
    """step_2 in the place of step_4: whole, and of this run, but the wrong one."""
    shutil.rmtree(run / "checkpoints/step_4")
    (run / "checkpoints/step_2").rename(run / "checkpoints/step_4")


def remove_last_steps(run: Path) -> None:
    edit_rows(run, lambda rows: [rows.remove(row) for row in rows[:] if row.get("step") in (5, 6)])


def add_step(run: Path) -> None:
    edit_rows(run, lambda rows: rows.append({**step_row(rows, 6), "step": 7}))


def reorder_lines(run: Path) -> None:
    path = run / "metrics.jsonl"
    start, *lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([start, *lines[::-1]]))


def fake_resume(run: Path) -> None:
    """Steps 4 to 6 count as repeated, and so as gone."""
    edit_rows(run, lambda rows: rows.append({"event": "resume", "step": 3}))


def copy_certificate(run: Path) -> None:
    shutil.copy(run.parent / "other/certificate.json", run)


def swap_model(run: Path) -> None:
    shutil.copy(run.parent / "other/model/model.safetensors", run / "model")


def add_code(run: Path) -> None:
    (run / "model/modeling_mine.py").write_text("print('runs with --trust_remote_code')")


def add_checkpoint(run: Path) -> None:
    shutil.copytree(run / "checkpoints/step_4", run / "checkpoints/step_5")


def empty_list_of_files(run: Path) -> None:
    certificate.write(str(run), {**certificate.read(str(run)), "files": {}})


def drop_hash(run: Path) -> None:
    edit_rows(run, lambda rows: step_row(rows, 3).pop("batch_hash"))


def binary_metrics(run: Path) -> None:
    (run / "metrics.jsonl").write_bytes(b"\xff\xfe\x00" * 100)


def binary_config(run: Path) -> None:
    (run / "config.yaml").write_bytes(b"\xff\xfe\x00")


def no_versions(run: Path) -> None:
    edit_rows(run, lambda rows: rows[0].pop("versions"))


def short_losses(run: Path) -> None:
    content = certificate.read(str(run))
    content["steps"]["losses"].pop()
    certificate.write(str(run), content)


def reseal(run: Path, **changes) -> None:
    """What somebody who knows the format does: all hashes of the certificate are computed again."""
    starts, rows = certificate.final_rows(str(run))
    content = {**certificate.read(str(run)), "arguments": starts[-1]["config"], **changes}
    content |= {"steps": certificate.describe_steps(rows), "files": certificate.hash_run_files(str(run))}
    certificate.write(str(run), content)


def forge_flag(run: Path, name: str, value) -> None:
    old = json.dumps(certificate.read(str(run))["arguments"][name])
    edit_rows(run, lambda rows: rows[0]["config"].update({name: value}))
    path = run / "config.yaml"
    path.write_text(path.read_text().replace(f"{name}: {old}", f"{name}: {value}"))
    reseal(run)


def forge_seed(run: Path) -> None:
    forge_flag(run, "seed", 43)


def forge_learning_rate(run: Path) -> None:
    forge_flag(run, "learning_rate", 0.002)


TAMPERINGS = {
    edit_loss: ("steps", "step 3: loss"),
    drop_line: ("steps", "metrics.jsonl has no step 3"),
    swap_steps: ("steps", "step 2: batch_hash"),
    truncate_metrics: ("steps", "metrics.jsonl"),
    edit_number_of_tokens: ("steps", "the number of tokens was edited"),
    edit_step_time: ("files", "metrics.jsonl"),
    edit_version: ("facts", "versions: torch is 2.12.0, the certificate has"),
    edit_config: ("facts", "config.yaml: learning_rate is 0.002, the certificate has 0.001"),
    edit_certificate: ("certificate", "edited"),
    change_weight: ("saved model", "model.safetensors does not have the bytes"),
    change_checkpoint: ("checkpoints", "step_4: pieces-"),
    swap_checkpoint: ("checkpoints", "step_4 is another checkpoint"),
    rename_checkpoint: ("checkpoints", "step_4 is another checkpoint"),
    remove_last_steps: ("steps", "metrics.jsonl has no step 5, 6"),
    add_step: ("steps", "steps up to 7"),
    reorder_lines: ("files", "does not have the bytes"),
    fake_resume: ("steps", "no step 4, 5, 6"),
    copy_certificate: ("facts", "arguments: seed is 42, the certificate has 7"),
    swap_model: ("saved model", "model.safetensors does not have the bytes"),
    add_code: ("saved model", "modeling_mine.py is not in the certificate"),
    add_checkpoint: ("checkpoints", "step_5 is not in the certificate"),
    empty_list_of_files: ("files", "metrics.jsonl is not in the certificate"),
    drop_hash: ("steps", "line 4: is no row of a run"),
    binary_metrics: ("steps", "line 1: is no row of a run"),
    binary_config: ("facts", "config.yaml holds no flags and values"),
    no_versions: ("facts", "has no start row with its versions"),
    short_losses: ("steps", "has another form than a run writes"),
    forge_seed: ("order", "step 1: the data, seed and sizes give another batch"),
    forge_learning_rate: ("schedule", "step 2: lr is 0.001, the flags give 0.002"),
}


@pytest.mark.parametrize("tamper", TAMPERINGS, ids=lambda tamper: tamper.__name__)
def test_tampering_is_found(tamper, runs, tmp_path):
    (tmp_path / "other").symlink_to(runs / "other")
    run = shutil.copytree(runs / "clean", tmp_path / "clean")
    tamper(run)
    check, text = TAMPERINGS[tamper]
    found = differences(verify(str(run)))
    assert any(text in line for line in found.get(check, [])), found


def test_a_certificate_that_is_cut_off_is_one_line(runs, tmp_path):
    run = shutil.copytree(runs / "clean", tmp_path / "clean")
    truncate_certificate(run)
    with pytest.raises(UserError, match="is cut off or edited"):
        verify(str(run))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("[]", "has no format that this version reads"),
        ('{"format": 1}', "has no part command"),
        ('{"format": 1, "command": "os"}', "has no part command"),
    ],
)
def test_what_is_no_certificate_is_one_line(content, message, tmp_path):
    (tmp_path / "certificate.json").write_text(content)
    with pytest.raises(UserError, match=message):
        verify(str(tmp_path))


def test_changed_data_and_a_changed_model_are_found(runs, tmp_path):
    lines = (runs / "sft.jsonl").read_text().splitlines()
    row = json.loads(lines[17])
    row["messages"][-1]["content"] = row["messages"][-1]["content"][::-1] + " 1"
    lines[17] = json.dumps(row)
    (tmp_path / "sft.jsonl").write_text("\n".join(lines) + "\n")
    model = shutil.copytree(runs / "model", tmp_path / "model")
    flip_byte(model / "model.safetensors")
    found = differences(verify(str(runs / "clean"), dataset=str(tmp_path / "sft.jsonl"), model=str(model)))
    assert "sft.jsonl" in found["data"][0] and "model.safetensors" in found["model"][0]
    assert found["order"][0] == "the tokens of the data are not the tokens of the run"


def test_a_forged_loss_with_all_hashes_is_found_by_the_plain_loop(runs, tmp_path):
    run = shutil.copytree(runs / "clean", tmp_path / "clean")
    edit_rows(run, lambda rows: step_row(rows, 5).update(loss=step_row(rows, 5)["loss"] * 0.999))
    reseal(run)
    content = certificate.read(str(run))
    certificate.write(str(run), {key: value for key, value in content.items() if key != "replays"})
    assert differences(verify(str(run))) == {}  # the seal is no signature
    # steps 1, 3 and 5 follow a checkpoint or the start
    told = certify_steps(str(run), 5, "cpu", str(runs / "model"))
    assert "not within tolerance: step 5" in told and "3 steps replayed" in told
    assert "step 5: the plain loop has loss" in differences(verify(str(run)))["replays"][0]


def test_manifests_are_what_the_certificate_hashes(runs):
    content = certificate.read(str(runs / "clean"))
    assert list(content["checkpoints"]) == ["step_2", "step_4", "step_6"]
    assert all((runs / "clean/checkpoints" / name / MANIFEST).exists() for name in content["checkpoints"])


def test_refusals():
    for flags, found in (
        ({"no_save": True}, "--certify 2 with --no_save"),
        ({"verify_resume": 2}, "--certify 2 with --verify_resume"),
        ({"lora_rank": 4}, "--certify 2 with --lora_rank"),
    ):
        with pytest.raises(UserError, match=found):
            refuse("train_sft", from_flat(SFTArguments, {"certify": 2, **flags}))
    with pytest.raises(UserError, match="--certify: a run with --lora_rank"):
        check_replay_flags({"lora_rank": 4})
