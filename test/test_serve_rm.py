"""serve_rm under load, its limits, its key, and what it tells about itself."""

import asyncio
import json
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
import torch
from launch import ROOT, _environment, run_process
from serve_load import TEXTS, ask, load, message, request, serving

from trainer.cli import train_ppo
from trainer.datasets.demos.demo import make_demo
from trainer.errors import UserError
from trainer.models.reward import make_initial_reward_model
from trainer.rollout.rewards.model_scorer import ModelScorer


@pytest.fixture(scope="module")
def reward_model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("serve")
    make_demo(str(folder / "demo"))
    make_initial_reward_model(str(folder / "demo/model"), str(folder / "rm"), 1)
    (folder / "key").write_text("secret\n")
    return folder


def resident_mb(process: subprocess.Popen) -> float:
    status = Path(f"/proc/{process.pid}/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) / 1024


STATUSES = {"half a body": 408, "half a head": 0, "broken": 400, "oversized": 413, "no key": 401, "no lists": 400}
STATUSES |= {"surrogate": 400, "long text": 413, "deep": 400, "numbers": 400, "idle": 0, "garbage": 400}


def test_two_hundred_clients_of_which_some_are_bad(reward_model):
    """Every good request gets the right scores, every bad one its status, and the server ends well on SIGTERM."""
    folder = reward_model
    line = [
        "--reward_pretrain",
        str(folder / "rm"),
        "--port",
        "0",
        "--host",
        "0.0.0.0",
        "--api_key",
        str(folder / "key"),
    ]
    line += [
        "--param_dtype",
        "fp32",
        "--device",
        "cpu",
        "--read_timeout",
        "3",
        "--max_body_mb",
        "1",
        "--max_text_kb",
        "16",
    ]
    command = [sys.executable, "-m", "trainer.cli.serve_rm", *line]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=ROOT, env=_environment(), **streams) as process:
        try:
            port = int(process.stdout.readline().rsplit(":", 1)[1])
            # everything is used once before memory is measured
            asyncio.run(asyncio.wait_for(load(port, 200, 2, "secret", bad_every=20), 120))
            before = resident_mb(process)
            answers, _ = asyncio.run(asyncio.wait_for(load(port, 200, 6, "secret", bad_every=7), 240))
            grown = resident_mb(process) - before
            half = asyncio.run(_metrics_while_a_client_is_slow(port))
        finally:
            process.send_signal(signal.SIGTERM)
            _, errors = process.communicate(timeout=60)
    assert process.returncode == 0 and "Traceback" not in errors, errors
    direct = ModelScorer(str(folder / "rm"), dtype=torch.float32, device="cpu")
    expected = direct.score(*map(list, zip(*TEXTS)))
    assert len(answers) == 1200 and sum(kind != "good" for kind, *_ in answers) == 172
    for kind, number, status, answer in answers:
        if kind == "good":
            right = [expected[(number + i) % len(TEXTS)] for i in range(1 + number % 3)]
            assert status == 200 and answer["rewards"] == pytest.approx(right, rel=1e-4, abs=1e-5)
        else:
            assert status == STATUSES[kind], (kind, status, answer)
    assert grown < 30, f"memory grew by {grown:.0f} MB"
    assert 'serve_rm_answers_total{status="401"}' in half and "serve_rm_queued_texts 0" in half
    texts, batches = (int(half.split(f"\nserve_rm_{name}_total ")[1].split()[0]) for name in ("texts", "batches"))
    assert texts > 4 * batches, "requests share forward passes"


async def _metrics_while_a_client_is_slow(port: int) -> str:
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(message(b"{", "secret", 100))
    head = "GET /metrics HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer secret\r\n\r\n"
    reader, other = await asyncio.open_connection("127.0.0.1", port)
    other.write(head.encode())
    answer = (await asyncio.wait_for(reader.read(), 30)).decode()
    writer.close()
    other.close()
    return answer


def test_the_queue_is_bounded_and_the_gone_are_not_scored():
    scored = []

    def slow(prompts, responses, finished):
        scored.extend(responses)
        time.sleep(0.3)
        return [float(len(text)) for text in responses]

    body = json.dumps({"prompts": ["p"] * 6, "responses": ["r"] * 6}).encode()

    async def run(port: int) -> list:
        first = asyncio.ensure_future(ask(port, message(body, None)))
        await asyncio.sleep(0.1)  # four are being scored, two wait
        gone = asyncio.ensure_future(ask(port, message(body.replace(b'"r"', b'"gone"'), None)))
        await asyncio.sleep(0.1)
        refused = await ask(port, message(body, None))
        gone.cancel()
        await asyncio.gather(gone, return_exceptions=True)
        await asyncio.sleep(0.1)
        small = await ask(port, message(body, None))
        return [await first, refused, small]

    with serving(slow, max_queue=8) as port:
        first, refused, small = asyncio.run(asyncio.wait_for(run(port), 60))
    assert first == small == (200, {"rewards": [1.0] * 6})
    assert refused[0] == 503 and "--max_queue is 8" in refused[1]["error"]
    assert scored.count("gone") <= 2, "what was in a batch already"


def test_texts_that_lose_their_beginning_are_told(reward_model, capfd):
    scorer = ModelScorer(str(reward_model / "rm"), dtype=torch.float32, device="cpu", max_len=12)
    texts = ["Sort: 3 1", "Sort: 9 8 7 6 5 4 3 2 1 0"], ["1 3", "0 1 2 3 4 5 6 7 8 9"]
    short, long = (scorer.input_ids(*pair) for pair in zip(*texts))
    scorer.max_len = len(short)
    scores, cuts = scorer.score_and_cuts(*texts)
    assert len(long) > len(short) and cuts == [False, True] and scores == scorer.score(*texts)
    with serving(scorer.score_and_cuts) as port:
        body = json.dumps(dict(zip(("prompts", "responses"), texts))).encode()
        answers = [asyncio.run(ask(port, message(body, None))) for _ in range(3)]
        counts = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30).read().decode()
    for status, answer in answers:
        assert status == 200 and answer["truncated"] == [False, True]
        assert answer["rewards"] == pytest.approx(scores, rel=1e-4)
    assert "serve_rm_truncated_texts_total 3" in counts and "serve_rm_texts_total 6" in counts
    said = capfd.readouterr().out
    assert said.count("longer than --max_len") == 1 and "warning: 1 text was longer" in said, said


def test_texts_beyond_the_positions_of_a_reward_model_or_a_critic_are_refused(reward_model, tmp_path):
    shutil.copytree(reward_model / "rm", tmp_path / "rm")
    config = json.loads((tmp_path / "rm/config.json").read_text())
    (tmp_path / "rm/config.json").write_text(json.dumps(config | {"max_position_embeddings": 64}))
    line = [
        "--pretrain",
        f"{reward_model}/demo/model",
        "--dataset",
        f"{reward_model}/demo/prompts.jsonl",
        "--train_batch_size",
        "8",
    ]
    line += ["--reward_pretrain", f"{tmp_path}/rm", "--output_dir", f"{tmp_path}/run", "--prompt_max_len", "40"]
    with pytest.raises(UserError, match=r"40 \+ 30 tokens, more than --reward_pretrain .*/rm's 64 positions"):
        train_ppo.check([*line, "--generate_max_len", "30"])
    assert train_ppo.check([*line, "--generate_max_len", "24"])
    with pytest.raises(UserError, match="--max_len: 65, more than the model's 64 positions"):
        ModelScorer(str(tmp_path / "rm"), dtype=torch.float32, device="cpu", max_len=65)
    assert ModelScorer(str(tmp_path / "rm"), dtype=torch.float32, device="cpu").max_len == 64
    line[line.index("--reward_pretrain")] = "--critic_pretrain"
    with pytest.raises(UserError, match=r"40 \+ 30 tokens, more than --critic_pretrain's 64 positions"):
        train_ppo.check([*line, "--generate_max_len", "30", "--reward_func", "math", "--label_key", "label"])


def test_a_text_that_cannot_be_scored_fails_its_own_request_only():
    """Good requests that wait with it share its batch."""

    def score(prompts, responses, finished):
        time.sleep(0.05)
        if any("poison" in text for text in responses):
            raise TypeError("TextEncodeInput must be ...")
        return [float(len(text)) for text in responses]

    async def run(port: int) -> list:
        bodies = [
            {"prompts": ["p"] * 3, "responses": ["r", "poison" if n % 4 == 0 else "rr", "rrr"]} for n in range(24)
        ]
        return await asyncio.gather(*(ask(port, message(json.dumps(body).encode(), None)) for body in bodies))

    with serving(score, batch_size=16, max_queue=1000) as port:
        answers = asyncio.run(asyncio.wait_for(run(port), 60))
    for number, (status, answer) in enumerate(answers):
        assert status == (500 if number % 4 == 0 else 200), (number, answer)
        assert number % 4 == 0 or answer == {"rewards": [1.0, 2.0, 3.0]}


def test_idle_connections_do_not_fill_the_server():
    """Many more than it may have, none of them with a request."""

    async def run(port: int) -> tuple:
        idle = [await asyncio.open_connection("127.0.0.1", port) for _ in range(60)]
        answer = await ask(port, message(request(0), None))
        for _, writer in idle:
            writer.close()
        return answer

    with serving(lambda p, responses, f: [1.0] * len(responses), max_connections=16, read_timeout=60.0) as port:
        assert asyncio.run(asyncio.wait_for(run(port), 60)) == (200, {"rewards": [1.0]})


def test_a_body_of_millions_of_values_holds_up_nobody():
    bombs = [b"[" + inner * ((16 << 20) // len(inner)) + b"0]" for inner in (b"[],", b'"",', b"{},", b"1,")]

    async def run(port: int) -> list:
        return [await ask(port, message(bomb, None)) for bomb in bombs]

    with serving(lambda p, responses, f: [1.0] * len(responses), max_body=32 << 20) as port:
        started = time.process_time()  # of the server too, which is a thread here
        answers = asyncio.run(asyncio.wait_for(run(port), 60))
        assert time.process_time() - started < 4
    assert all(
        status == 413 and "more than 1000000 values; send fewer" in answer["error"] for status, answer in answers
    )


def test_a_scoring_that_fails_is_told_and_the_server_goes_on():
    def score(prompts, responses, finished):
        if "bad" in responses:
            raise RuntimeError("no memory\nat all")
        return [float("nan")] * len(responses)

    with serving(score) as port:
        bad = json.dumps({"prompts": ["p"], "responses": ["bad"]}).encode()
        status, answer = asyncio.run(ask(port, message(bad, None)))
        assert status == 500 and answer == {"error": "scoring failed: RuntimeError: no memory at all"}
        of_a_page = message(request(0), None).replace(b"Host: x", b"Host: x\r\nOrigin: null")
        status, answer = asyncio.run(ask(port, of_a_page))
        assert status == 403 and answer["error"].startswith("a web page may not ask")
        status, answer = asyncio.run(ask(port, message(request(0), None)))
        assert status == 200 and str(answer["rewards"]) == "[nan]", "the client names it"


@pytest.mark.parametrize(
    "more, expected",
    [
        (
            ["--host", "0.0.0.0"],
            "error: --host 0.0.0.0 without --api_key: others can reach this address. Add --api_key FILE",
        ),
        (["--port", "99999"], "error: --port: 99999 (allowed: a port from 0 to 65535)"),
        (["--api_key", "/nowhere"], "error: --api_key: /nowhere: No such file or directory"),
        (["--api_key", "/dev/null"], "error: --api_key: /dev/null holds no key"),
    ],
)
def test_what_is_refused(more, expected, reward_model):
    code, output = run_process(
        [sys.executable, "-m", "trainer.cli.serve_rm", "--reward_pretrain", str(reward_model / "rm"), *more]
    )
    assert code == 2 and expected in output and "Traceback" not in output, output
