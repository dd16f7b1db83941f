"""Rollout servers without vLLM: threads that speak the HTTP of serve_engine and receive weights as it does.

The tokens of a response are a function of its prompt and its seed, so it does not matter which server answers. Its log-probs
also tell which weights it is from, see `mark_of`.
"""

import hashlib
import json
import secrets
import threading
import time

from quiet_server import QuietHandler, QuietServer

from trainer.rollout.engines.checksum import Checksum
from trainer.rollout.engines.weight_stream import WeightStream

VOCABULARY = 90


def mark_of(checksum: str) -> int:
    """A number below 2^15 that tells weights apart."""
    return int.from_bytes(hashlib.blake2b(checksum.encode(), digest_size=2).digest()) >> 1


def mark_in(token: int, log_prob: float) -> int:
    """The mark of the weights that generated a token."""
    return round((-1 - token / 128 - log_prob) * 2**22)


class FakeServer:
    """`dies_after` requests for tokens, it answers nothing for `gone` seconds, and has lost its weights then."""

    def __init__(
        self,
        dtype: str = "float32",
        seconds=0.0,
        dies_after: int = 0,
        gone: float = 1.0,
        workers=1,
        ends_after: int = 0,
        drafts: int = 0,
    ):
        """`seconds` of a response are a number, or a function of its seed. It ends by itself at `ends_after` tokens."""
        self.checksum, self.dtype, self.workers, self._seconds = "", dtype, workers, seconds
        self._drafts = drafts
        self._ends_after, self.refusal = ends_after, ""  # why the last worker takes no weights
        self._aborts, self._id = threading.Condition(), secrets.token_hex(8)
        self._dies_after, self._gone, self._back_at, self._lock = dies_after, gone, 0.0, threading.Lock()
        self.asked: list[tuple[tuple[int, ...], int]] = []  # prompt and seed of each request that was answered
        self.read: list[tuple] = []  # of each one: mark, checksum, text, length of the prompt
        self.kept: list[dict] = [{} for _ in range(workers)]  # tensors of the last sync, by worker
        self.in_flight = self.most_in_flight = self.syncs = 0
        outer = self

        class Handler(QuietHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                answer = outer.answer(self.path, body)
                if answer is None:  # as a process that is killed
                    self.connection.close()
                    return
                self.reply(200, answer)

        self.url = QuietServer(Handler).url

    def die(self, seconds: float) -> None:
        self.checksum, self._back_at = "", time.monotonic() + seconds
        self.kept = [{} for _ in range(self.workers)]

    def answer(self, path: str, body: dict):
        """The JSON of an answer. None: it is gone."""
        if time.monotonic() < self._back_at:
            return None
        if path == "/inference/v1/generate":
            return self._generate(body)
        if path == "/abort_requests":
            with self._aborts:
                self._aborts.notify_all()
            return {}
        if body["method"] == "facts_for_trainer":
            facts = {"dtype": self.dtype, "max_len": 128, "vocab_size": VOCABULARY, "workers": self.workers}
            facts |= {"checksum": self.checksum, "speculative_tokens": self._drafts}
            return {"results": [{**facts, "id": f"{self._id}-{worker}"} for worker in range(self.workers)]}
        host, port, token, keeps = json.loads(body["args"][0])
        return {"results": self._receive(host, port, token, keeps)}

    def _receive(self, host: str, port: int, token: str, keeps: bool) -> list[dict]:
        found = [None] * self.workers

        def receive(worker: int) -> None:
            came, kept = Checksum(), self.kept[worker] if keeps else None
            for name, tensor in WeightStream(host, port, 1 + worker, 1 + self.workers, token).received(kept):
                came.add(name, tensor)
            found[worker] = {"checksum": came.hexdigest(), "bytes": 0}
            if self.refusal and worker == self.workers - 1:
                found[worker] = {"refused": self.refusal}

        threads = [threading.Thread(target=receive, args=(worker,), daemon=True) for worker in range(self.workers)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.checksum, self.syncs = "" if self.refusal else found[0]["checksum"], self.syncs + 1
        return found

    @staticmethod
    def _likely(sampled: int, params: dict) -> list[dict]:
        """As many tokens as asked for, the sampled one first. The `top_k` first ones are kept."""
        tokens = [(sampled + n) % VOCABULARY for n in range(params["logprobs"])]
        return [{"token_id": t, "logprob": -1.0 if n < params["top_k"] else -9999.0} for n, t in enumerate(tokens)]

    def _reason(self, count: int, most: int) -> str:
        if count == most:
            return "length"
        return "stop" if 0 < count == self._ends_after else "abort"

    def _generate(self, body: dict):
        prompt, params, held = body["token_ids"], body["sampling_params"], self.checksum
        with self._lock:
            self.in_flight += 1
            self.most_in_flight = max(self.most_in_flight, self.in_flight)
        seconds = self._seconds(params["seed"]) if callable(self._seconds) else self._seconds
        began, count = time.monotonic(), min(params["max_tokens"], self._ends_after or params["max_tokens"])
        with self._aborts:
            if self._aborts.wait(seconds):
                count = min(count, int(count * (time.monotonic() - began) / seconds))
        with self._lock:
            self.in_flight -= 1
            if self._dies_after and len(self.asked) >= self._dies_after:
                self._dies_after = 0
                self.die(self._gone)
            if self.checksum != held or not held:
                return None
            self.asked.append((tuple(prompt), params["seed"]))
        digest = hashlib.blake2b(f"{prompt} {params['seed']}".encode()).digest()
        ids = [5 + byte % (VOCABULARY - 5) for byte in digest[:count]]
        with self._lock:
            self.read.append((body["cache_salt"], held, (*prompt, *ids), len(prompt)))
        mark = mark_of(held) / 2**22  # less than 1 / 128, and exact in fp32
        steps = [{"logprob": -1 - byte / 128 - mark, "top_logprobs": self._likely(byte, params)} for byte in ids]
        return {
            "choices": [
                {
                    "token_ids": ids,
                    "logprobs": {"content": steps},
                    "finish_reason": self._reason(count, params["max_tokens"]),
                }
            ]
        }
