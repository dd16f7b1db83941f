"""The engine in other processes: vLLM servers that `serve_engine` has started, on any machine. Input and output are tokens.

Their number, tensor parallelism and dtype do not depend on the layout of training. Rank r owns the servers r, r + R, r + 2 R
of a run with R ranks, and sends them the weights. Every rank uses all servers, by load (`routing.py`). With --max_staleness,
it uses only its own. A server that is gone gets no weights, and its requests go to the others. Each sync tries it again, so a
server that is back is used again. Before ranks use a server, they read the checksum of its weights. So no server ever
generates with older weights.
"""

import contextlib
import functools
import http.client
import json
import socket
import threading
import time
import urllib.error
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, Optional
from urllib.parse import urlsplit

import torch
import torch.distributed as dist

from trainer.errors import UserError
from trainer.metrics import counted
from trainer.rollout.engines.checksum import Checksum
from trainer.rollout.engines.routing import Router, send_to_each
from trainer.rollout.engines.sampling import Completion, Sampling
from trainer.rollout.engines.weight_stream import LastSync, Update, WeightStream
from trainer.rollout.peers import post_json

FLAG = "--engine_urls"
TIMEOUT = 3600  # seconds for a response; a server that hangs is given up then
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 30.0  # seconds between two tries while no server is left
HELD_SECONDS = 0.5  # a server takes longer to start again
LOOK_SECONDS = 0.05  # between two looks at whether requests shall be interrupted
DTYPES = ("bfloat16", "float32")  # those of serve_engine
CUT_OFF = -9999.0  # vLLM's servers send it in place of -inf
ROUNDING = 1e-3  # a log-prob may be this much above 0
TOKEN_BYTES, TOKEN_VALUES = 1024, 64  # of a token in an answer, at most: its text, its bytes, its log-prob
FACTS_TIMEOUT = 60  # seconds for a server to report what it holds


def never() -> bool:
    return False


class LostServer(UserError):
    """A server does not answer, or its engine is dead."""


class RefusingServer(LostServer):
    """A server calls a request wrong (4xx). Another server may take it."""


class VLLMServerEngine:
    """A rollout engine, with `generate`, `update_weights`, `sleep` and `wake`. No method communicates with other ranks."""

    ranks_per_engine = 1
    slices = None  # it sends full tensors

    def __init__(
        self,
        urls: Sequence[str],
        *,
        device: torch.device,
        batch_size: int,
        max_len: int,
        key: Optional[str] = None,
        deltas: bool = False,
        vocab_size: Optional[int] = None,
    ):
        """`batch_size` is the number of requests that a rank has in flight on a server.

        Answers have ids below `vocab_size`, that of the model that trains. Without it, the servers' own number counts.

        With `deltas`, a server that has the weights of the last sync gets the values that have changed since.

        Raises UserError if a server does not answer, takes shorter sequences, or has another dtype than the others.
        """
        self._key = key
        rank, urls = dist.get_rank(), [url.rstrip("/") for url in urls]
        first = rank % len(urls)
        self.own = urls[rank :: dist.get_world_size()]  # the servers that this rank sends weights to
        self.sync_facts: dict[
            str, float
        ] = {}  # of the last update; the bytes are the sum over the servers of this rank
        self.own_only = False  # use no other rank's servers: their weights may change at any time
        self._urls = urls[first:] + urls[:first]
        self.device, self._batch_size = device, batch_size
        self._checksum, self._held_until = "", {}  # of the weights of the last update; by server
        self._router, self._aborting = Router(batch_size), threading.Lock()
        self._last = LastSync() if deltas and self.own else None
        self._gone: dict[str, UserError] = {}  # servers that are not used, and why
        found: dict[str, str] = {}  # a URL of each dtype
        for url in self._urls:
            [facts, *_] = self._facts(url)
            self._vocab_size = vocab_size or facts["vocab_size"]
            found.setdefault(facts["dtype"], url)
            if facts["max_len"] < max_len:
                raise UserError(FLAG, f"{url} takes {facts['max_len']} tokens", f"--max_len {max_len} or more there")
        if len(found) > 1:
            shown = ", ".join(f"{url} computes in {dtype}" for dtype, url in sorted(found.items()))
            raise UserError(FLAG, shown, "servers of one --param_dtype")
        self.dtype = getattr(torch, *found)

    def update_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> tuple[str, int]:
        """Send (name, full tensor) pairs to this rank's servers, one at a time. Returns (checksum, bytes) of the tensors.

        A server that is gone is left out. Raises RuntimeError if a server does not then hold, bit for bit, the tensors
        that were sent.
        """
        came, num_bytes, num_values, num_changed = Checksum(), 0, 0, 0
        before, self._checksum = self._checksum, ""
        self._held_until, self._router = {}, Router(self._batch_size)  # other weights: no server knows a prompt

        def watched() -> Iterator[Update]:
            nonlocal num_bytes, num_values, num_changed
            for name, tensor in tensors:
                value = tensor.to(self.dtype) if tensor.is_floating_point() else tensor
                came.add(name, value)
                value = value.detach().cpu().contiguous()
                update = self._last.update(name, value) if self._last else Update(name, value)
                num_bytes += value.nbytes
                num_values += value.numel()
                num_changed += value.numel() if update.changed is None else len(update.changed)
                yield update

        source, held = watched(), []
        sends = [functools.partial(self._send, url, before) for url in self.own]
        self.sync_facts = {"sync_sent_bytes": 0}
        for url, sent in zip(self.own, send_to_each(source, sends)):
            try:
                results, sent_bytes = sent.result()
                held += [result["checksum"] for result in results]
                self.sync_facts["sync_sent_bytes"] += sent_bytes
                self._note_back(url)
            except UserError as error:
                self._note_gone(url, error)
        for _ in source:  # gathering a tensor needs all ranks
            pass
        self._checksum = came.hexdigest()
        if any(checksum != self._checksum for checksum in held):
            raise RuntimeError("the rollout engine's weights are not the weights that were sent to it")
        if self._last:
            self.sync_facts["sync_density"] = num_changed / max(num_values, 1)
        return self._checksum, num_bytes

    def _send(self, url: str, before: str, updates: Iterator[Update]) -> tuple[list[dict], int]:
        """Send to one server. Returns what its workers report that they hold then, and the bytes. Raises LostServer.

        It gets whole tensors unless all its workers have the weights of the last update, with the checksum `before`.
        """
        workers = self._facts(url)
        if not before or any(facts["checksum"] != before for facts in workers):
            updates = (Update(update.name, update.value) for update in updates)
        address = self._own_address(url)
        stream = WeightStream(address, 0, 0, 1 + len(workers))
        source = json.dumps([address, stream.port, stream.token, self._last is not None])
        call = {"method": "receive_trainer_weights", "args": [source]}
        with ThreadPoolExecutor(1) as pool:
            received: Future = pool.submit(self._request, url, "/collective_rpc", call)

            def still_to_come() -> None:
                if received.done():  # it has failed, or says that it is done before anything was sent
                    received.result()
                    raise LostServer(FLAG, f"{url}: an answer of a wrong form, before the weights were sent")

            try:
                sent = stream.send(updates, while_waiting=still_to_come)
            except ConnectionError as error:
                raise received.exception() or LostServer(FLAG, f"{url}: {error}") from None
            return _results(url, received.result(), lambda result: isinstance(result.get("checksum"), str)), sent

    def sleep(self) -> None:
        """The server's memory is its own."""

    def wake(self) -> None:
        """See `sleep`."""

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        seeds: Sequence[int] = (),
        limits: Sequence[int] = (),
        interrupted: Callable[[], bool] = never,
    ) -> list[Completion]:
        """A completion of each prompt, in order. See `HFEngine.generate` for `seeds`, `limits` and `interrupted`.

        Threads may call it at the same time. Raises LostServer if no server is left that holds the weights of the last
        update, and UserError if all servers refuse the request.
        """
        own_seeds = list(seeds) if sampling.temperature else [None] * len(prompts)
        most = list(limits) or [sampling.max_new_tokens] * len(prompts)
        urls = self.own if self.own_only else self._urls
        holding, router = [url for url in urls if self._holds(url)], self._router

        def complete(one: tuple) -> Completion:
            if interrupted():
                return Completion([], [], False)
            while usable := [url for url in holding if url not in self._gone]:
                url = router.take(tuple(one[0]), usable)
                try:
                    return self._complete(url, sampling, *one)
                except LostServer as error:
                    self._note_gone(url, error)
                finally:
                    router.give(url)
            problems = [self._gone[url] for url in urls]
            if all(isinstance(problem, RefusingServer) for problem in problems):
                raise UserError(*problems[0].args)  # waiting for a server helps nothing
            raise problems[0]

        with ThreadPoolExecutor(self.concurrency) as pool:
            futures = [pool.submit(complete, one) for one in zip(prompts, own_seeds, most)]
            while wait(futures, timeout=None if interrupted is never else LOOK_SECONDS).not_done:
                if interrupted():  # a request that arrives only now is aborted the next time
                    self._abort(holding)
        return [future.result() for future in futures]

    @property
    def concurrency(self) -> int:
        """Requests that this rank has in flight at a time."""
        return self._batch_size * max(1, len(self.own))

    def _abort(self, urls: list[str]) -> None:
        """End all requests on servers. Their answers have the tokens so far. A server that is gone has no requests."""
        if not self._aborting.acquire(blocking=False):  # another thread does it
            return
        with contextlib.ExitStack() as stack:
            stack.callback(self._aborting.release)
            for url in urls:
                with contextlib.suppress(UserError):
                    self._request(url, "/abort_requests", {}, FACTS_TIMEOUT)

    def _holds(self, url: str) -> bool:
        """Whether the server has the weights of the last update. It is not asked twice in HELD_SECONDS."""
        if url not in self._gone and time.monotonic() < self._held_until.get(url, 0.0):
            return True
        try:
            held = {facts["checksum"] for facts in self._facts(url)}
        except LostServer as error:
            self._note_gone(url, error)
            return False
        if held == {self._checksum}:
            self._held_until[url] = time.monotonic() + HELD_SECONDS
            self._note_back(url)
        else:
            self._note_gone(url, LostServer(FLAG, f"{url} was started again, and has not got this run's weights yet"))
        return url not in self._gone

    def _note_gone(self, url: str, problem: UserError) -> None:
        known, self._gone[url] = self._gone.get(url), problem
        if known is None or str(known) != str(problem):
            print(f"rollout server lost, others take its requests: {problem.found}", flush=True)

    def _note_back(self, url: str) -> None:
        if self._gone.pop(url, None):
            print(f"rollout server {url} is back", flush=True)

    def _complete(self, url: str, sampling: Sampling, prompt: Sequence[int], seed: Optional[int], limit: int):
        params = sampling.for_vllm(seed, limit, self._vocab_size)
        body = {"token_ids": list(prompt), "sampling_params": params}
        tokens = limit * (params["logprobs"] + 2) + 1000  # with the likely ones of each step
        sizes = {"max_bytes": tokens * TOKEN_BYTES, "max_values": tokens * TOKEN_VALUES}
        answer = self._request(url, "/inference/v1/generate", body, **sizes)
        try:
            return _completion(answer, limit, self._vocab_size, params["logprobs"] if sampling.gives_sets else 0)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise LostServer(FLAG, f"{url}: an answer of a wrong form: {type(error).__name__}: {error}") from None

    def _facts(self, url: str) -> list[dict]:
        """What each worker of a server reports about itself, with the checksum of its weights."""
        answer = self._request(url, "/collective_rpc", {"method": "facts_for_trainer"}, FACTS_TIMEOUT)
        return _results(url, answer, _is_facts)

    def _own_address(self, url: str) -> str:
        """The address of this machine that the server's machine can reach."""
        place = urlsplit(url)
        try:
            with socket.create_connection((place.hostname, place.port or 80), timeout=30) as connection:
                return connection.getsockname()[0]
        except OSError as error:
            raise LostServer(FLAG, f"{url}: {error}") from None

    def _request(self, url: str, path: str, body: dict, timeout: float = TIMEOUT, **sizes: int) -> Any:
        """The JSON of the server's answer to a POST. `sizes` are those of `post_json`."""
        try:
            return post_json(url + path, body, timeout, self._key, **sizes)
        except urllib.error.HTTPError as error:
            kind = LostServer if error.code >= 500 else RefusingServer
            raise kind(FLAG, f"{url}{path}: status {error.code} {error.reason}", "a server of serve_engine") from None
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise LostServer(FLAG, f"{url}{path}: {error}", "a running server of serve_engine") from None


def _results(url: str, answer: Any, is_right: Callable[[dict], bool]) -> list[dict]:
    """What each worker of a server answers, each of the right form."""
    results = answer.get("results") if isinstance(answer, dict) else None
    if not (isinstance(results, list) and results and all(isinstance(one, dict) and is_right(one) for one in results)):
        raise LostServer(FLAG, f"{url}: an answer of a wrong form", "a running server of serve_engine")
    return results


def _is_facts(facts: dict) -> bool:
    return (
        all(isinstance(facts.get(name), int) for name in ("max_len", "vocab_size"))
        and facts.get("dtype") in DTYPES
        and isinstance(facts.get("checksum"), str)
    )


def _completion(answer: Any, limit: int, vocab_size: int, num_logprobs: int = 0) -> Completion:
    """The completion of an answer, with sets from `num_logprobs` tokens of each step.

    Raises ValueError, TypeError, KeyError or AttributeError for a wrong form, an id beyond the vocabulary, and a number
    that is no log-probability.
    """
    [choice] = answer["choices"]
    ids, steps = choice["token_ids"], (choice["logprobs"] or {}).get("content") or []
    if not isinstance(ids, list) or not all(_is_token(token, vocab_size) for token in ids):
        raise ValueError(f"token_ids are no list of numbers below {vocab_size}")
    if len(ids) != len(steps) or len(ids) > limit:
        raise ValueError(f"{counted(len(ids), 'token')} with {len(steps)} log-probs, at most {limit} asked")
    log_probs = [_log_prob(step["logprob"]) for step in steps]
    kept_ids = []
    if num_logprobs:
        kept_ids = [_kept(step["top_logprobs"], token, num_logprobs, vocab_size) for step, token in zip(steps, ids)]
    return Completion(ids, log_probs, choice["finish_reason"] == "stop", kept_ids)


def _is_token(token: Any, vocab_size: int) -> bool:
    return type(token) is int and 0 <= token < vocab_size


def _log_prob(value: Any) -> float:
    """Raises ValueError for what is no log-probability. Rounding may bring one above 0."""
    if type(value) not in (int, float) or not CUT_OFF <= value <= ROUNDING:
        raise ValueError("a log-prob is no number up to 0")
    return float(value)


def _kept(likely: list[dict], sampled: int, count: int, vocab_size: int) -> list[int]:
    """The tokens of a step that were not cut off. Raises ValueError if they are too few, or lack the sampled one."""
    kept = [one["token_id"] for one in likely if one["logprob"] > CUT_OFF]
    if len(likely) < count or sampled not in kept or not all(_is_token(token, vocab_size) for token in kept):
        raise ValueError(f"{counted(len(likely), 'likely token')}, {count} asked, and token {sampled} was sampled")
    return kept
