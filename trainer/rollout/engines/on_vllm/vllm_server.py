"""vLLM servers that `serve_engine` has started, see `ServerEngine`. Each worker has our receiver of weights.

So a server proves by a checksum of all bits that it holds the weights that were sent.
"""

import functools
import json
import secrets
import socket
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Optional
from urllib.parse import urlsplit

import torch

from trainer.errors import UserError
from trainer.metrics import counted
from trainer.rollout.engines.checksum import Checksum
from trainer.rollout.engines.routing import send_to_each
from trainer.rollout.engines.sampling import Completion, Sampling
from trainer.rollout.engines.servers import (
    CUT_OFF,
    DTYPES,
    FACTS_TIMEOUT,
    FLAG,
    TOKEN_BYTES,
    TOKEN_VALUES,
    LostServer,
    ServerEngine,
    is_token,
    log_prob,
)
from trainer.rollout.engines.weight_stream import LastSync, Update, WeightStream

REFUSAL = 400  # characters of a server's reason that are shown


class VLLMServerEngine(ServerEngine):
    """`ServerEngine` for servers of `serve_engine`."""

    kind = "a server of serve_engine"
    longer, one_dtype = "--max_len {} or more there", "servers of one --param_dtype"

    def __init__(self, urls: Sequence[str], *, deltas: bool = False, mark: str = "", **options):
        """With `deltas`, a server that has the weights of the last sync gets the values that have changed since.

        `mark` is that of this start of a run, the same on all ranks. A server may still compute for a start that was killed.
        What it keeps of such requests may mix weights, and is not used.
        """
        super().__init__(urls, **options)
        self._last, self._mark = LastSync() if deltas and self.own else None, mark

    def update_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> tuple[str, int]:
        """Send (name, full tensor) pairs to this rank's servers, one at a time. Returns (checksum, bytes) of the tensors.

        A server that is gone is left out. Raises UserError if a server refuses the weights, and RuntimeError if one does not
        then hold, bit for bit, the tensors that were sent. All tensors are taken before.
        """
        came, num_bytes, num_values, num_changed = Checksum(), 0, 0, 0
        before = self._forget()

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

        source, held, refusals = watched(), [], []
        sends = [functools.partial(self._send, url, before) for url in self.own]
        self.sync_facts = {"sync_sent_bytes": 0}
        for url, sent in zip(self.own, send_to_each(source, sends)):
            try:
                results, sent_bytes = sent.result()
                held += [result["checksum"] for result in results]
                self.sync_facts["sync_sent_bytes"] += sent_bytes
                self._note_back(url)
            except LostServer as error:
                self._note_gone(url, error)
            except UserError as error:
                refusals.append(error)
        for _ in source:  # gathering a tensor needs all ranks
            pass
        if refusals:
            raise refusals[0]  # waiting helps nothing
        self._checksum = came.hexdigest()
        if any(checksum != self._checksum for checksum in held):
            raise RuntimeError("the rollout engine's weights are not the weights that were sent to it")
        if self._last:
            self.sync_facts["sync_density"] = num_changed / max(num_values, 1)
        return self._checksum, num_bytes

    def _send(self, url: str, before: str, updates: Iterator[Update]) -> tuple[list[dict], int]:
        """Send to one server. Returns what its workers report that they hold then, and the bytes.

        Raises LostServer, and UserError if the server says why it does not take the weights.
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
                    _raise_refusal(url, received.result())
                    raise LostServer(FLAG, f"{url}: an answer of a wrong form, before the weights were sent")

            try:
                sent = stream.send(updates, while_waiting=still_to_come)
            except ConnectionError as error:
                _raise_refusal(url, received.result())
                raise LostServer(FLAG, f"{url}: {error}") from None
            _raise_refusal(url, received.result())
            return _results(url, received.result(), lambda result: isinstance(result.get("checksum"), str)), sent

    def _complete(self, url: str, sampling: Sampling, prompt: Sequence[int], seed: Optional[int], limit: int):
        params = sampling.for_vllm(seed, limit, self._vocab_size)
        body = {"token_ids": list(prompt), "sampling_params": params, "cache_salt": self._cache_salt()}
        tokens = limit * (params["logprobs"] + 2) + 1000  # with the likely ones of each step
        sizes = {"max_bytes": tokens * TOKEN_BYTES, "max_values": tokens * TOKEN_VALUES}
        answer = self._request(url, "/inference/v1/generate", body, **sizes)
        try:
            return _completion(answer, limit, self._vocab_size, params["logprobs"] if sampling.gives_sets else 0)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise LostServer(FLAG, f"{url}: an answer of a wrong form: {type(error).__name__}: {error}") from None

    def _cache_salt(self) -> str:
        """A server uses what it keeps of prompts for requests with the same salt only: those of all ranks, for these weights."""
        return f"{self._mark}-{self._checksum or secrets.token_hex(8)}"

    def _facts(self, url: str) -> list[dict]:
        """What each worker of a server reports about itself, with the checksum of its weights."""
        answer = self._request(url, "/collective_rpc", {"method": "facts_for_trainer"}, FACTS_TIMEOUT)
        return _results(url, answer, _is_facts)

    def _checksums_of(self, url: str) -> set[str]:
        return {facts["checksum"] for facts in self._facts(url)}

    def _abort_on(self, url: str) -> None:
        self._request(url, "/abort_requests", {}, FACTS_TIMEOUT)

    def _own_address(self, url: str) -> str:
        """The address of this machine that the server's machine can reach."""
        place = urlsplit(url)
        try:
            with socket.create_connection((place.hostname, place.port or 80), timeout=30) as connection:
                return connection.getsockname()[0]
        except OSError as error:
            raise LostServer(FLAG, f"{url}: {error}") from None


def _results(url: str, answer: Any, is_right: Callable[[dict], bool]) -> list[dict]:
    """What each worker of a server answers, each of the right form."""
    results = answer.get("results") if isinstance(answer, dict) else None
    if not (isinstance(results, list) and results and all(isinstance(one, dict) and is_right(one) for one in results)):
        raise LostServer(FLAG, f"{url}: an answer of a wrong form", "a running server of serve_engine")
    return results


def _raise_refusal(url: str, answer: Any) -> None:
    """Raise UserError if a worker of a server says why it does not take the weights."""
    results = answer.get("results") if isinstance(answer, dict) else None
    for result in results if isinstance(results, list) else ():
        if isinstance(result, dict) and isinstance(why := result.get("refused"), str):
            raise UserError(FLAG, f"{url} refuses the weights: {why[:REFUSAL]}", "a server of the model that trains")


def _is_facts(facts: dict) -> bool:
    return (
        all(isinstance(facts.get(name), int) for name in ("max_len", "vocab_size", "speculative_tokens"))
        and facts.get("dtype") in DTYPES
        and all(isinstance(facts.get(name), str) for name in ("checksum", "id"))
    )


def _completion(answer: Any, limit: int, vocab_size: int, num_logprobs: int = 0) -> Completion:
    """The completion of an answer, with sets from `num_logprobs` tokens of each step.

    Raises ValueError, TypeError, KeyError or AttributeError for a wrong form, an id beyond the vocabulary, and a number
    that is no log-probability.
    """
    [choice] = answer["choices"]
    ids, steps = choice["token_ids"], (choice["logprobs"] or {}).get("content") or []
    if not isinstance(ids, list) or not all(is_token(token, vocab_size) for token in ids):
        raise ValueError(f"token_ids are no list of numbers below {vocab_size}")
    if len(ids) != len(steps) or len(ids) > limit:
        raise ValueError(f"{counted(len(ids), 'token')} with {len(steps)} log-probs, at most {limit} asked")
    if not ids and choice["finish_reason"] == "stop":
        raise ValueError("a response that ended has no token")
    log_probs = [log_prob(step["logprob"]) for step in steps]
    kept_ids = []
    if num_logprobs:
        kept_ids = [_kept(step["top_logprobs"], token, num_logprobs, vocab_size) for step, token in zip(steps, ids)]
    return Completion(ids, log_probs, choice["finish_reason"] == "stop", kept_ids)


def _kept(likely: list[dict], sampled: int, count: int, vocab_size: int) -> list[int]:
    """The tokens of a step that were not cut off. Raises ValueError if they are too few, or lack the sampled one."""
    kept = [one["token_id"] for one in likely if one["logprob"] > CUT_OFF]
    if len(likely) < count or sampled not in kept or not all(is_token(token, vocab_size) for token in kept):
        raise ValueError(f"{counted(len(likely), 'likely token')}, {count} asked, and token {sampled} was sampled")
    return kept
