"""SGLang servers, see `ServerEngine`. Requests go to `/generate`, and weights through a folder that both sides see.

One rank of a machine writes the weights as safetensors, under published names, and the servers of all its ranks read them. In
lock step, this is the first rank. With --max_staleness, it is the first that comes. The checksum of the weights is the
`weight_version` of the servers. Every answer names it. No server tells which bits it holds. So whether the weights arrived as
they are is shown by the log-probs of the answers only: see --max_logprob_diff.

The forms are those of SGLang 0.5.23, `srt/managers/io_struct.py` and `srt/sampling/sampling_params.py`.
"""

import contextlib
import os
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Optional

import torch
import torch.distributed as dist

from trainer.distributed.collectives import local_rank, together
from trainer.errors import UserError
from trainer.metrics import counted, in_words
from trainer.model_folders.model_writer import save_safetensors_shards
from trainer.rollout.engines.checksum import Checksum
from trainer.rollout.engines.sampling import SPARE_LOGPROBS, Completion, Sampling
from trainer.rollout.engines.servers import (
    DTYPES,
    FACTS_TIMEOUT,
    FLAG,
    TOKEN_BYTES,
    TOKEN_VALUES,
    LostServer,
    RefusingServer,
    ServerEngine,
    is_token,
    log_prob,
)
from trainer.rollout.engines.weight_folders import WeightFolders

MAX_SHARD_BYTES = 2 << 30
NO_LIMIT = -1  # of top_k
# flags of a server that give other samples or weights than those asked for, with the values that do not
PLAIN = {
    "quantization": (None,),
    "speculative_algorithm": (None,),
    "disaggregation_mode": (None, "null"),
    "preferred_sampling_params": (None, ""),
}


class SGLangServerEngine(ServerEngine):
    """`ServerEngine` for servers of SGLang."""

    kind = "a server of SGLang"
    longer, one_dtype = "room for {:token} there: --context-length of 2 more, and memory", "servers of one --dtype"

    def __init__(self, urls: Sequence[str], *, folder: str, published: Callable[[Iterator], Iterable], **options):
        """`folder` is for the weights of all ranks, with a number behind it for each machine. `published` turns (name, CPU tensor)
        pairs of the policy into those that its model folder has.

        Raises UserError also if a server has a flag that changes samples or weights.
        """
        self.are_seeded = True  # the servers draw by the seeds of samples
        super().__init__(urls, **options)
        first = dist.get_rank() - local_rank()  # of this machine
        self._folders, self._published = WeightFolders(f"{os.path.abspath(folder)}-{first}"), published
        self._writes = dist.get_rank() == first and bool(
            self.own
        )  # if the machine has a rank with servers, the first is one
        if self._writes:
            self._folders.clear()
        if self.own:
            weakref.finalize(self, self._folders.leave)

    def update_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> tuple[str, int]:
        """Write (name, full tensor) pairs, and let this rank's servers read them. Returns (checksum, bytes) of the tensors.

        It is collective over the world, unless `own_only` is set. A server that is gone is left out. Raises UserError if all
        servers of the rank refuse the weights, and, on all ranks in lock step, if the folder cannot be written.
        """
        came, num_bytes = Checksum(), 0
        self._forget()

        def watched() -> Iterator[tuple[str, torch.Tensor]]:
            nonlocal num_bytes
            for name, value in self._cast(tensors):
                came.add(name, value)
                num_bytes += value.nbytes
                yield name, value

        self.sync_facts, source = {"sync_sent_bytes": 0}, watched()
        allowed = "a folder with room, and with locks of files"
        if not self.own_only:  # all ranks are here, and gathering a tensor needs all of them
            together(lambda: self._write_now(source, came), "--sync_folder", self._folders.path, allowed)
            self._checksum = came.hexdigest()
            reading = self._folders.begin_reading(self._checksum) if self.own else contextlib.nullcontext()
        else:  # ranks come at any time, with tensors that can be read again
            deque(source, maxlen=0)
            self._checksum = came.hexdigest()
            try:
                reading = self._write_once(tensors) if self.own else contextlib.nullcontext()
            except OSError as error:
                raise UserError("--sync_folder", f"{self._folders.path}: {error.strerror}", allowed) from None
        with reading:
            if self.own:
                self._let_read(self._folders.folder_of(self._checksum))
        return self._checksum, num_bytes

    def _cast(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in tensors:
            yield name, tensor.to(self.dtype) if tensor.is_floating_point() else tensor

    def _write_now(self, pairs: Iterator[tuple[str, torch.Tensor]], came: Checksum) -> None:
        """Iterate all pairs. The first rank of a machine writes them."""

        def fill(folder: str) -> str:
            self._save(pairs, folder)
            deque(pairs, maxlen=0)  # those that have no published name
            return came.hexdigest()

        try:
            if self._writes:
                with self._folders.turn():
                    self._folders.write(fill)
        finally:
            deque(pairs, maxlen=0)

    def _write_once(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> contextlib.AbstractContextManager:
        """Write the weights, unless another rank of the machine has. They stay until the context ends."""

        def fill(folder: str) -> str:
            self._save(self._cast(tensors), folder)
            return self._checksum

        with self._folders.turn():
            if not self._folders.has(self._checksum):
                self._folders.write(fill)
            return self._folders.begin_reading(self._checksum)

    def _save(self, pairs: Iterator[tuple[str, torch.Tensor]], folder: str) -> None:
        on_cpu = ((name, value.detach().cpu().contiguous()) for name, value in pairs)
        save_safetensors_shards(self._published(on_cpu), folder, MAX_SHARD_BYTES)

    def _let_read(self, folder: str) -> None:
        """Each of this rank's servers reads the weights. Raises UserError if all of them refuse."""
        size, problems = sum(entry.stat().st_size for entry in os.scandir(folder)), []
        with ThreadPoolExecutor(len(self.own)) as pool:
            for url, read in [(url, pool.submit(self._read, url, folder)) for url in self.own]:
                try:
                    read.result()
                    self.sync_facts["sync_sent_bytes"] += size
                    self._note_back(url)
                except LostServer as error:
                    self._note_gone(url, error)
                    problems.append(error)
        if len(problems) == len(self.own) and all(isinstance(problem, RefusingServer) for problem in problems):
            raise UserError(*problems[0].args)  # waiting helps nothing

    def _read(self, url: str, folder: str) -> None:
        body = {"model_path": folder, "load_format": "safetensors", "weight_version": self._checksum}
        body |= {"flush_cache": True, "abort_all_requests": True}  # those that run were given up here
        answer = self._request(url, "/update_weights_from_disk", body)
        if not isinstance(answer, dict) or answer.get("success") is not True:
            raise LostServer(FLAG, f"{url}: the weights of {folder} were not read: {str(answer)[:200]}")

    def _facts(self, url: str) -> list[dict]:
        info = self._request(url, "/server_info", None, FACTS_TIMEOUT)
        if not isinstance(info, dict) or type(info.get("max_req_input_len")) is not int:
            raise LostServer(FLAG, f"{url}: an answer of a wrong form", f"{self.kind} that runs")
        for name, values in PLAIN.items():
            if info.get(name) not in values:
                raise UserError(FLAG, f"{url} has {flag_of(name)} {str(info[name])[:80]}", "a server without this flag")
        if info.get("dtype") not in DTYPES:
            raise UserError(FLAG, f"{url} has --dtype {info.get('dtype')}", f"--dtype {' or '.join(DTYPES)} there")
        self.are_seeded &= bool(info.get("enable_deterministic_inference"))
        return [{"max_len": info["max_req_input_len"] + 4, "dtype": info["dtype"]}]  # it keeps room for 5 new ones

    def _checksums_of(self, url: str) -> set[str]:
        info = self._request(url, "/model_info", None, FACTS_TIMEOUT)
        return {str(info.get("weight_version"))} if isinstance(info, dict) else set()

    def _abort_on(self, url: str) -> None:
        self._request(
            url, "/abort_request", {"abort_all": True}, FACTS_TIMEOUT
        )  # its answer is empty, which is no JSON

    def _complete(
        self, url: str, sampling: Sampling, prompt: Sequence[int], seed: Optional[int], limit: int
    ) -> Completion:
        body = {"input_ids": list(prompt), "sampling_params": params_of(sampling, seed, limit), "return_logprob": True}
        body |= {"return_sampling_mask": True} if sampling.gives_sets else {}
        tokens, began = limit * (2 + (sampling.top_k + SPARE_LOGPROBS) * sampling.gives_sets) + 1000, self._num_aborts
        sizes = {"max_bytes": tokens * TOKEN_BYTES, "max_values": tokens * TOKEN_VALUES}
        answer = self._request(url, "/generate", body, **sizes)
        try:
            reason, held = answer["meta_info"]["finish_reason"], answer["meta_info"]["weight_version"]
            completion = _completion(answer, limit, self._vocab_size, sampling.gives_sets)
            kind, matched = reason["type"], reason.get("matched")
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise LostServer(FLAG, f"{url}: an answer of a wrong form: {type(error).__name__}: {error}") from None
        if held != self._checksum:
            raise LostServer(FLAG, f"{url} has weights of the version {str(held)[:40]!r}, which are not this run's")
        if kind == "abort" and self._num_aborts == began:
            raise LostServer(FLAG, f"{url}: a request was aborted: {str(reason.get('message'))[:200]}")
        if kind == "stop" and type(matched) is int and matched not in sampling.stop_ids:
            found = f"{url} ended a response at token {matched}, which ends none here"
            raise RefusingServer(FLAG, found, "a server whose model folder has the eos tokens of --pretrain")
        if kind == "length" and len(completion.token_ids) < limit:
            found = f"{url} ended a response after {len(completion.token_ids)} of {counted(limit, 'token')}"
            raise RefusingServer(FLAG, found, in_words(self.longer, len(prompt) + limit))
        return completion


def flag_of(name: str) -> str:
    return "--" + name.replace("_", "-")


def params_of(sampling: Sampling, seed: Optional[int], limit: int) -> dict:
    """SGLang's SamplingParams, with at most `limit` new tokens. Only seeded servers look at `sampling_seed`."""
    return {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or NO_LIMIT,
        "min_p": sampling.min_p,
        "max_new_tokens": limit,
        "stop_token_ids": list(sampling.stop_ids),
        "stop": list(sampling.stop_texts),
        "ignore_eos": False,  # else SGLang would not look at stop_token_ids either
        "skip_special_tokens": False,
        "no_stop_trim": True,
    } | ({} if seed is None else {"sampling_seed": seed})


def _completion(answer: Any, limit: int, vocab_size: int, gives_sets: bool) -> Completion:
    """The completion of an answer. Its log-probs are those after the temperature, and with sets after truncation.

    Raises ValueError, TypeError, LookupError or AttributeError for a wrong form, an id beyond the vocabulary, and a number
    that is no log-probability.
    """
    ids, info = answer["output_ids"], answer["meta_info"]
    if not isinstance(ids, list) or not all(is_token(token, vocab_size) for token in ids):
        raise ValueError(f"output_ids are no list of numbers below {vocab_size}")
    steps = info.get("output_token_logprobs") or []
    if [step[1] for step in steps] != ids or len(ids) > limit:
        raise ValueError(f"{counted(len(ids), 'token')} with {len(steps)} log-probs, at most {limit} asked")
    log_probs, kept_ids = [step[0] for step in steps], []
    if gives_sets:
        kept_ids, log_probs = info["output_token_sampling_mask"] or [], info["output_token_sampling_logprobs"] or []
        if len(kept_ids) != len(ids) or len(log_probs) != len(ids):
            raise ValueError(f"{counted(len(ids), 'token')} with {counted(len(kept_ids), 'set')} of tokens")
        for token, kept in zip(ids, kept_ids):
            if token not in kept or not all(is_token(one, vocab_size) for one in kept):
                raise ValueError(f"token {token} is not in the set that it was sampled from")
    finished = info["finish_reason"]["type"] == "stop"
    if finished and not ids:
        raise ValueError("a response that ended has no token")
    return Completion(ids, [log_prob(value) for value in log_probs], finished, kept_ids)
