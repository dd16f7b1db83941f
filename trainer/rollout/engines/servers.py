"""An engine in other processes: servers that speak HTTP, on any machine. Input and output are tokens.

Their number, tensor parallelism and dtype do not depend on the layout of training. Rank r owns the servers r, r + R, r + 2 R
of a run with R ranks, and gives them the weights. Every rank uses all servers, by load (`routing.py`). With --max_staleness,
it uses only its own. A server that is gone gets no weights, and its requests go to the others. Each sync tries it again, so a
server that is back is used again. Before ranks use a server, they ask which weights it holds. So no server ever generates with
older weights.

A kind of server is a subclass. It has `update_weights`, and the methods at the end of `ServerEngine`.
"""

import contextlib
import http.client
import threading
import time
import urllib.error
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any, Optional

import torch
import torch.distributed as dist

from trainer.errors import UserError
from trainer.metrics import in_words
from trainer.rollout.engines.routing import Router
from trainer.rollout.engines.sampling import Completion, Sampling
from trainer.rollout.peers import get_json, post_json

FLAG = "--engine_urls"
TIMEOUT = 3600  # seconds for a response; a server that hangs is given up then
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 30.0  # seconds between two tries while no server is left
HELD_SECONDS = 0.5  # a server takes longer to start again
LOOK_SECONDS = 0.05  # between two looks at whether requests shall be interrupted
DTYPES = ("bfloat16", "float32")
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


class ServerEngine:
    """A rollout engine, with `generate`, `update_weights`, `sleep` and `wake`. No method communicates with other ranks."""

    ranks_per_engine = 1
    slices = None  # it sends full tensors
    kind = "a server"  # in errors
    longer, one_dtype = "{:token} or more there", "servers of one dtype"  # what a user must do, in errors

    def __init__(
        self,
        urls: Sequence[str],
        *,
        device: torch.device,
        batch_size: int,
        max_len: int,
        key: Optional[str] = None,
        vocab_size: Optional[int] = None,
    ):
        """`batch_size` is the number of requests that a rank has in flight on a server.

        Answers have ids below `vocab_size`, that of the model that trains. Without it, the servers' own number counts.

        Raises UserError if a server does not answer, is named twice, takes shorter sequences, or has another dtype than the
        others.
        """
        self._key = key
        rank, urls = dist.get_rank(), [url.rstrip("/") for url in urls]
        first = rank % len(urls)
        self.own = urls[rank :: dist.get_world_size()]  # the servers that this rank gives weights to
        self.sync_facts: dict[
            str, float
        ] = {}  # of the last update; the bytes are the sum over the servers of this rank
        self.own_only = False  # use no other rank's servers: their weights may change at any time
        self._urls = urls[first:] + urls[:first]
        self.device, self._batch_size = device, batch_size
        self._checksum, self._held_until = "", {}  # of the weights of the last update; by server
        self._router, self._aborting, self._num_aborts = Router(batch_size), threading.Lock(), 0
        self._gone: dict[str, UserError] = {}  # servers that are not used, and why
        found: dict[str, str] = {}  # a URL of each dtype
        known: dict[str, str] = {}  # a URL of each worker
        self.drafting: list[str] = []  # servers with --speculative_tokens
        for url in self._urls:
            [facts, *_] = workers = self._facts(url)
            for other in {known.setdefault(worker["id"], url) for worker in workers if "id" in worker} - {url}:
                raise UserError(FLAG, f"{' and '.join(sorted([other, url]))} are one server", "each server once")
            self._vocab_size = vocab_size or facts["vocab_size"]
            found.setdefault(facts["dtype"], url)
            self.drafting += [url] * bool(facts.get("speculative_tokens"))
            if facts["max_len"] < max_len:
                raise UserError(FLAG, f"{url} takes {facts['max_len']} tokens", in_words(self.longer, max_len))
        if len(found) > 1:
            shown = ", ".join(f"{url} computes in {dtype}" for dtype, url in sorted(found.items()))
            raise UserError(FLAG, shown, self.one_dtype)
        self.dtype = getattr(torch, *found)

    def _forget(self) -> str:
        """Other weights come: no server holds them, and none knows a prompt. Returns the checksum of those before."""
        before, self._checksum = self._checksum, ""
        self._held_until, self._router = {}, Router(self._batch_size)
        return before

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
                url, text = router.take(one[0], usable), []
                try:
                    completion = self._complete(url, sampling, *one)
                    text = [*one[0], *completion.token_ids]
                    return completion
                except LostServer as error:
                    self._note_gone(url, error)
                finally:
                    router.give(url, text)
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
        self._num_aborts += 1
        with contextlib.ExitStack() as stack:
            stack.callback(self._aborting.release)
            for url in urls:
                with contextlib.suppress(UserError):
                    self._abort_on(url)

    def _holds(self, url: str) -> bool:
        """Whether the server has the weights of the last update. It is not asked twice in HELD_SECONDS."""
        if url not in self._gone and time.monotonic() < self._held_until.get(url, 0.0):
            return True
        try:
            held = self._checksums_of(url)
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

    def _request(self, url: str, path: str, body: Optional[dict], timeout: float = TIMEOUT, **sizes: int) -> Any:
        """The JSON of the server's answer to a POST, or to a GET if there is no `body`. `sizes` are those of `post_json`."""
        try:
            if body is None:
                return get_json(url + path, timeout, self._key, **sizes)
            return post_json(url + path, body, timeout, self._key, **sizes)
        except urllib.error.HTTPError as error:
            kind = LostServer if error.code >= 500 else RefusingServer
            raise kind(FLAG, f"{url}{path}: status {error.code} {error.reason}", self.kind) from None
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise LostServer(FLAG, f"{url}{path}: {error}", f"{self.kind} that runs") from None

    # --- of each kind of server. All raise LostServer

    def _facts(self, url: str) -> list[dict]:
        """What each worker of a server reports about itself: `max_len`, `dtype`, perhaps `vocab_size`, `speculative_tokens` and
        `id`. No other worker has its `id`."""
        raise NotImplementedError

    def _checksums_of(self, url: str) -> set[str]:
        """The checksums of the weights that a server holds. There is one, unless its workers differ."""
        raise NotImplementedError

    def _complete(
        self, url: str, sampling: Sampling, prompt: Sequence[int], seed: Optional[int], limit: int
    ) -> Completion:
        """The server's completion of one prompt."""
        raise NotImplementedError

    def _abort_on(self, url: str) -> None:
        """End all requests on a server."""
        raise NotImplementedError


def is_token(token: Any, vocab_size: int) -> bool:
    return type(token) is int and 0 <= token < vocab_size


def log_prob(value: Any) -> float:
    """Raises ValueError for what is no log-probability. Rounding may bring one above 0."""
    if type(value) not in (int, float) or not CUT_OFF <= value <= ROUNDING:
        raise ValueError("a log-prob is no number up to 0")
    return float(value)
