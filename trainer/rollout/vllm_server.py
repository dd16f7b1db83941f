"""The engine of other processes: vLLM servers that `serve_engine` has started, on any machine. Input and output are tokens.

Rank r uses the server number r modulo their count. The first rank that uses a server sends it the weights.
"""

import json
import socket
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Optional
from urllib.parse import urlsplit

import torch
import torch.distributed as dist

from trainer.errors import UserError
from trainer.rollout.checksum import Checksum
from trainer.rollout.sampling import Completion, Sampling
from trainer.rollout.weight_stream import WeightStream

FLAG = "--engine_urls"
TIMEOUT = 3600  # seconds for a response; a server that hangs ends the run then


class VLLMServerEngine:
    """A rollout engine, with `generate`, `update_weights`, `sleep` and `wake`. No method communicates with other ranks."""

    ranks_per_engine = 1

    def __init__(self, urls: Sequence[str], *, dtype: torch.dtype, device: torch.device, batch_size: int, max_len: int):
        """Raises UserError if this rank's server does not answer, or has another dtype or shorter sequences."""
        rank = dist.get_rank()
        self.url, self._sends = urls[rank % len(urls)].rstrip("/"), rank < len(urls)
        self.dtype, self.device, self._batch_size = dtype, device, batch_size
        facts = self._request("/collective_rpc", {"method": "facts_for_trainer"})["results"][0]
        self._workers, expected = facts["workers"], str(dtype).removeprefix("torch.")
        if facts["dtype"] != expected:
            raise UserError(FLAG, f"{self.url} computes in {facts['dtype']}", f"{expected}, that of --param_dtype")
        if facts["max_len"] < max_len:
            raise UserError(FLAG, f"{self.url} takes {facts['max_len']} tokens", f"--max_len {max_len} or more there")

    def update_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> tuple[str, int]:
        """Send (name, full tensor) pairs to the server, one at a time. Returns (checksum, bytes) of the tensors.

        Raises RuntimeError if the server does not then hold, bit for bit, the tensors that were sent.
        """
        came, num_bytes = Checksum(), 0

        def watched() -> Iterator[tuple[str, torch.Tensor]]:
            nonlocal num_bytes
            for name, tensor in tensors:
                value = tensor.to(self.dtype) if tensor.is_floating_point() else tensor
                came.add(name, value)
                num_bytes += value.nbytes
                yield name, value

        if not self._sends:
            for _ in watched():  # gathering a tensor needs all ranks
                pass
            return came.hexdigest(), num_bytes
        self._request("/health")  # the stream would wait for a server that is gone
        stream = WeightStream(self._own_address(), 0, 0, 1 + self._workers)
        asked = {"method": "receive_trainer_weights", "args": [json.dumps([self._own_address(), stream.port])]}
        with ThreadPoolExecutor(1) as pool:
            received = pool.submit(self._request, "/collective_rpc", asked)
            try:
                stream.send(watched())
            except RuntimeError:
                received.result()  # raises what the server answered, if that is the cause
                raise
            results = received.result()["results"]
        if any(result["checksum"] != came.hexdigest() for result in results):
            raise RuntimeError("the rollout engine's weights are not the weights that were sent to it")
        return came.hexdigest(), num_bytes

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
    ) -> list[Completion]:
        """A completion of each prompt, in order. See `HFEngine.generate` for `seeds` and `limits`."""
        drawn = list(seeds) if sampling.temperature else [None] * len(prompts)
        most = list(limits) or [sampling.max_new_tokens] * len(prompts)
        with ThreadPoolExecutor(self._batch_size) as pool:
            return list(pool.map(lambda one: self._complete(sampling, *one), zip(prompts, drawn, most)))

    def _complete(self, sampling: Sampling, prompt: Sequence[int], seed: Optional[int], limit: int) -> Completion:
        params = {
            "temperature": sampling.temperature,
            "max_tokens": limit,
            "stop_token_ids": list(sampling.stop_ids),
            "stop": list(sampling.stop_texts),
            "ignore_eos": True,  # only `stop_ids` end a response
            "detokenize": bool(sampling.stop_texts),
            "skip_special_tokens": False,
            "logprobs": 0,  # of the sampled token only
            "seed": seed,
        }
        asked = {"token_ids": list(prompt), "sampling_params": params}
        [choice] = self._request("/inference/v1/generate", asked)["choices"]
        log_probs = [step["logprob"] for step in choice["logprobs"]["content"]]
        return Completion(choice["token_ids"], log_probs, choice["finish_reason"] == "stop")

    def _own_address(self) -> str:
        """The address of this machine that the server's machine can reach."""
        place = urlsplit(self.url)
        with socket.create_connection((place.hostname, place.port or 80), timeout=30) as connection:
            return connection.getsockname()[0]

    def _request(self, path: str, body: Optional[dict] = None) -> Any:
        """The JSON of the server's answer to a GET, or with `body` to a POST."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT) as answer:
                text = answer.read()
                return json.loads(text) if text else None
        except urllib.error.HTTPError as error:
            told = " ".join(error.read().decode(errors="replace").split())[:300]
            raise UserError(FLAG, f"{self.url}{path}: status {error.code} {told}", "a server of serve_engine") from None
        except (OSError, ValueError) as error:
            raise UserError(FLAG, f"{self.url}{path}: {error}", "a running server of serve_engine") from None
