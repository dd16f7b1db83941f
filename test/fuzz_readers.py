"""Random damage to data files, images, requests and answers: python test/fuzz_readers.py [--minutes 60] [--seed 0]

A case is right if it ends in time and in bounded memory, and is

- read: rows, an image or a completion of the right form; or
- noticed: one line (UserError). A server answers with a status below 500, or closes the connection, and then
  answers a good request.
"""

import argparse
import asyncio
import contextlib
import gzip
import io
import json
import resource
import shutil
import socket
import sys
import tarfile
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import SimpleQueue

import datasets
import numpy as np
from PIL import Image
from random_damage import Cases, damage, run_in_rank
from serve_load import ask, message, request, serving

from trainer.cli import train_sft
from trainer.compare.machines.forked_ranks import import_libraries
from trainer.datasets.demos.demo import make_demo
from trainer.datasets.files import image_files
from trainer.datasets.samples.streaming import start_of_epoch
from trainer.models.model_loading import load_tokenizer
from trainer.rollout.engines.on_vllm.vllm_server import VLLMServerEngine
from trainer.rollout.engines.sampling import Sampling
from trainer.rollout.engines.sglang_server import SGLangServerEngine
from trainer.rollout.rewards.http_service import HTTPLimits, server_of
from trainer.runs.api.api_service import Offer, TrainingService
from trainer.runs.features.streamed_run import open_stream
from trainer.runs.run_data import load_sft

MEMORY = 6 << 30  # of this process, in bytes
STREAMED = (".tar", ".tar.gz", ".jsonl.gz")  # tar files are read as a stream only
PICTURES = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM")
SAMPLING = Sampling(1.0, 8, (2,), top_k=4)
TOKEN = {"logprob": -1.5, "top_logprobs": [{"token_id": number, "logprob": -1.5 - number} for number in range(40)]}
OF_SGLANG = {"output_ids": [0, 2], "meta_info": {"finish_reason": {"type": "stop", "matched": 2}, "weight_version": "", "output_token_logprobs": [[-1.5, 0, None], [-3.5, 2, None]], "output_token_sampling_mask": [[0, 1], [2]], "output_token_sampling_logprobs": [-0.5, 0.0]}}  # fmt: skip
COMPLETION = {"choices": [{"token_ids": [0, 2], "logprobs": {"content": [TOKEN, TOKEN | {"logprob": -3.5}]}, "finish_reason": "stop"}]}  # fmt: skip


def make_files(folder: Path) -> list[Path]:
    """Good data files of every kind."""
    lines = (folder / "demo/sft.jsonl").read_text().splitlines(keepends=True)[:6]
    rows = [json.loads(line) for line in lines]
    (folder / "a.jsonl").write_text("".join(lines))
    (folder / "b.json").write_text(json.dumps(rows))
    (folder / "c.csv").write_text('question,response\n"1, 2",3\n"4\n5",6\n')
    datasets.Dataset.from_list(rows).to_parquet(str(folder / "d.parquet"))
    (folder / "e.jsonl.gz").write_bytes(gzip.compress("".join(lines).encode()))
    for name in ("f.tar", "g.tar.gz"):
        with tarfile.open(folder / name, "w:gz" if name.endswith("gz") else "w") as tar:
            for number, line in enumerate(lines):
                member = tarfile.TarInfo(f"rows/{number}.json")
                member.size = len(line.encode())
                tar.addfile(member, io.BytesIO(line.encode()))
    return sorted(folder.glob("?.*"))


def make_pictures(folder: Path) -> list[Path]:
    pixels = np.random.default_rng(0).integers(0, 256, (24, 32, 3), dtype=np.uint8)
    for kind in PICTURES:
        Image.fromarray(pixels).save(folder / f"picture.{kind.lower()}", kind)
    return sorted(folder.glob("picture.*"))


@contextlib.contextmanager
def training_service() -> Iterator[int]:
    """The service of serve_train, with ranks that answer everything. Gives its port."""
    jobs: SimpleQueue = SimpleQueue()

    def ranks() -> None:
        while (job := jobs.get()).method != "end":
            job.answer(({}, {}) if job.method == "forward_backward" else {})

    service = TrainingService(jobs, Offer("base", 64, 2, (2,), 100, "nowhere", 0, True),
                              limits := HTTPLimits(max_body=2 << 20, max_connections=64, read_timeout=2.0))  # fmt: skip
    listening = socket.create_server(("127.0.0.1", 0))
    server = server_of(service.app(), limits)
    for work in (ranks, lambda: server.run(sockets=[listening])):
        threading.Thread(target=work, daemon=True).start()
    yield listening.getsockname()[1]
    server.should_exit = True


@contextlib.contextmanager
def answering(answers: list[bytes]) -> Iterator[str]:
    """A rollout server that sends the last of `answers`, whatever is asked. Gives its address."""
    listening = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            connection, _ = listening.accept()
            with connection, contextlib.suppress(OSError):
                connection.settimeout(5)
                connection.recv(1 << 16)
                connection.sendall(answers[-1])

    threading.Thread(target=serve, daemon=True).start()
    yield f"http://127.0.0.1:{listening.getsockname()[1]}"


def to_train(path: str, body: bytes) -> bytes:
    return f"POST /api/v1/{path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body  # fmt: skip


TRAIN = {
    "create_session": {"tags": [], "user_metadata": {}, "sdk_version": "0.38.0"},
    "create_model": {"session_id": "session-1", "model_seq_id": 1, "base_model": "base", "lora_config": {"rank": 4}},
    "optim_step": {"model_id": "session-1:train:1", "seq_id": 1, "adam_params": {"learning_rate": 1e-4}},
    "retrieve_future": {"request_id": "x"},
    "asample": {"sampling_session_id": "x", "seq_id": 1, "num_samples": 1, "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1]}]}, "sampling_params": {"max_tokens": 4}},
    "forward_backward": {"model_id": "session-1:train:1", "seq_id": 1, "forward_backward_input": {"data": [], "loss_fn": "cross_entropy"}},
}  # fmt: skip


class ReaderCases(Cases):
    """Cases of one reader each. `work` is a folder for damaged files."""

    work: Path
    demo: Path

    def damaged(self, content: bytes, name: str) -> tuple[bytes, str]:
        path = self.work / name
        path.write_bytes(content)
        what = damage(self.dice, path)
        return path.read_bytes(), what

    def data(self, files: list[Path]) -> None:
        source = self.dice.choice(files)
        streamed = source.name.endswith(STREAMED) or (source.suffix != ".csv" and self.dice.random() < 0.5)
        path = self.work / source.name
        is_gzip = source.name.endswith("gz") and self.dice.random() < 0.5
        inner = gzip.decompress(source.read_bytes()) if is_gzip else source.read_bytes()
        content, what = self.damaged(inner, source.name.removesuffix(".gz") if is_gzip else source.name)
        path.write_bytes(gzip.compress(content) if is_gzip else content)
        flags = ["--pretrain", str(self.demo / "model"), "--dataset", str(path), "--max_steps", "5", "--allow_no_stop"]
        flags += ["--streaming"] * streamed + ["--input_key", "question", "--output_key", "response"] * (".csv" in path.name)  # fmt: skip

        def read() -> str:
            args, _ = train_sft.parse(flags)
            tokenizer = load_tokenizer(str(self.demo / "model"), False)
            if streamed:
                for row in open_stream(args, tokenizer).read(start_of_epoch(0)):
                    assert row["input_ids"] is not None
            else:
                samples = load_sft(args, tokenizer, str(path), "train", "--dataset")[0]
                assert len(samples[:]["input_ids"]) == len(samples)
            return "read"

        self.case(f"data {'streamed ' * streamed}{''.join(source.suffixes)}", what, read)
        path.unlink()

    def picture(self, pictures: list[Path]) -> None:
        source = self.dice.choice(pictures)
        content, what = self.damaged(source.read_bytes(), source.name)

        def read() -> str:
            assert image_files.decode(str(self.work / source.name), content).mode == "RGB"
            return "read"

        self.case("image", f"{what}, {source.name}", read)

    def asked(self, kind: str, port: int, body: bytes, whole: Callable[[bytes], bytes], good: bytes) -> None:
        """A request with a damaged body, or damaged as a whole, and then a good one."""
        if self.dice.random() < 0.5:
            content, what = self.damaged(body, "body.json")
            content = whole(content)
        else:
            content, what = self.damaged(whole(body), "request")

        def read() -> str:
            status = asyncio.run(ask(port, content))[0]
            again = asyncio.run(ask(port, good))[0]
            return f"status {status}, then {again}" if status >= 500 or again != 200 else "noticed"

        self.case(kind, what, read)

    def replied(self, url: str, answers: list[bytes]) -> None:
        kind, completion = self.dice.choice([(VLLMServerEngine, COMPLETION), (SGLangServerEngine, OF_SGLANG)])
        body = json.dumps(completion).encode()
        head = "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n"
        if self.dice.random() < 0.6:
            content, what = self.damaged(body, "body.json")
            answers.append(head.format(len(content)).encode() + content)
        else:
            content, what = self.damaged(head.format(len(body)).encode() + body, "reply")
            answers.append(content)
        del answers[:-1]
        engine = object.__new__(kind)
        engine._key, engine._vocab_size, engine._checksum, engine._num_aborts = None, 64, "", 0
        engine._mark = "mark"

        def read() -> str:
            found = engine._complete(url, SAMPLING, [1], 0, 8)
            assert all(0 <= token < 64 for token in found.token_ids) and len(found.token_ids) == len(found.log_probs)
            return "read"

        self.case("answer of a rollout server", what, read)


def run_cases(folder: Path, count: int, seconds: float, seed: int) -> None:
    cases, started = ReaderCases(seed), time.monotonic()
    cases.work, cases.demo = folder / "work", folder / "demo"
    cases.work.mkdir()
    files, pictures, answers = make_files(folder), make_pictures(folder), []
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    health = b"GET /api/v1/healthz HTTP/1.1\r\nHost: x\r\n\r\n"

    def score(prompts: list[str], responses: list[str], finished: list[bool]) -> list[float]:
        return [1.0] * len(responses)

    with serving(score, read_timeout=1.0) as rm, training_service() as trained, answering(answers) as url:
        asked = asyncio.run(ask(trained, to_train("create_session", json.dumps(TRAIN["create_session"]).encode())))
        bodies = {path: json.dumps(body).replace("session-1", asked[1]["session_id"]) for path, body in TRAIN.items()}
        while cases.endings.total() < count or time.monotonic() - started < seconds:
            number = cases.endings.total()
            if number % 4 == 0:
                datasets.config.HF_DATASETS_CACHE = cases.work / "cache"
                cases.data(files)
                shutil.rmtree(cases.work / "cache", ignore_errors=True)
            elif number % 4 == 1:
                cases.picture(pictures)
            elif number % 8 == 2:
                cases.asked("request to serve_rm", rm, request(number), lambda body: message(body, None), message(request(1), None))  # fmt: skip
            elif number % 8 == 6:
                path = cases.dice.choice(list(TRAIN))
                cases.asked(f"request to serve_train {path}", trained, bodies[path].encode(),
                            lambda body, path=path: to_train(path, body), health)  # fmt: skip
            else:
                cases.replied(url, answers)
        cases.report(time.monotonic() - started)


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=1000, help="at least this many cases")
    parser.add_argument("--minutes", type=float, default=0, help="at least this long")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    import_libraries()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_demo(str(folder / "demo"))
        work = (folder, args.count, args.minutes * 60, args.seed)
        run_in_rank(lambda: run_cases(*work), folder / "cases", 500 + 70 * args.minutes)


if __name__ == "__main__":
    main(sys.argv[1:])
