"""A teacher on a server: vLLM's OpenAI-compatible one. It sends log-probs of the likeliest tokens at each place of given tokens.

A micro-batch gets them while it is made, in the threads of the loader, so that training seldom waits. From them `logits` makes those
of the teacher: its likeliest tokens are exact, and all others share the rest of the probability. The buckets of `distances.buckets`
with this `top_k` are then those of a teacher that is here.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Optional

import torch

from trainer.errors import UserError
from trainer.metrics import counted
from trainer.rollout.engines.servers import TOKEN_BYTES, TOKEN_VALUES, is_token, log_prob
from trainer.rollout.peers import get_json, post_json
from trainer.rollout.rewards.remote_rewards import FIRST_PAUSE_SECONDS, TROUBLE, given_up, tries, trouble_of

FLAG = "--teacher"
REQUESTS = 16  # of a rank in flight
Top = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Asking:
    """How servers are asked. `timeout` is for a whole answer, in seconds."""

    key: Optional[str] = None
    timeout: float = 60.0
    retries: int = 3
    pause: float = FIRST_PAUSE_SECONDS


class TeacherServer:
    """A server at `url`, without its /v1. It is the teacher of this `number`; `vocab_size` counts the logits of the student."""

    def __init__(self, url: str, number: int, top_k: int, vocab_size: int, asking: Asking):
        """Raises UserError if it does not answer, or is no such server."""
        self._url, self._asking, self._vocab_size = url.rstrip("/").removesuffix("/v1"), asking, vocab_size
        self._top_k = min(top_k, vocab_size - 1)
        self._names = f"teacher {number} ids", f"teacher {number} log-probs"  # in a micro-batch
        self._model, self.max_len = self._ask("/v1/models", None, _model)

    def check_vocabulary(self, tokenizer: Any) -> None:
        """Raise UserError if the server writes the ids of the tokenizer as other text."""
        ids = sorted(tokenizer.get_vocab().values())
        for start in range(0, len(ids), self.max_len - 1):
            some = ids[start : start + self.max_len - 1]
            text = self._ask("/detokenize", {"tokens": some}, lambda answer: answer["prompt"], len(some))
            if text != tokenizer.decode(some):
                raise UserError(
                    FLAG, f"{self._url} has another vocabulary than --pretrain", "a server with the same one"
                )

    def with_top(self, collate: Callable) -> Callable:
        """`collate`, whose micro-batches then have what `logits` reads, (rows, tokens, top_k) each."""

        def collated(samples: list[dict], **options) -> dict:
            batch = collate(samples, **options)
            shape = (*batch["input_ids"].shape, self._top_k)
            ids, log_probs = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape)
            texts = [list(sample["input_ids"]) for sample in samples]
            with ThreadPoolExecutor(REQUESTS) as threads:
                found, first = list(threads.map(self._top, texts)), 0
            for row, (text, top) in enumerate(zip(texts, found)):
                row, start = (0, first) if "cu_seqlens" in batch else (row, 0)
                for whole, part in zip((ids, log_probs), top):
                    whole[row, start : start + len(part)] = part
                first += len(text)
            return batch | dict(zip(self._names, (ids, log_probs)))

        return collated

    def logits(self, micro_batch: dict) -> torch.Tensor:
        """Logits (rows, tokens, vocab) in fp32, with the log-probs of the server; an equal share of the rest for other tokens."""
        ids, log_probs = (micro_batch[name] for name in self._names)
        rest = (1 - log_probs.double().exp().sum(-1)).clamp(min=torch.finfo(torch.float32).tiny)
        share = (rest / (self._vocab_size - self._top_k)).log().float()
        return share[..., None].repeat(1, 1, self._vocab_size).scatter_(-1, ids, log_probs)

    def _top(self, text: list[int]) -> Top:
        """The ids and log-probs of the likeliest tokens after each token but the last one: (tokens - 1, top_k) each."""
        body = {"prompt": text, "prompt_logprobs": self._top_k, "max_tokens": 1, "temperature": 0}
        return self._ask(
            "/v1/completions", body, lambda answer: self._read(answer, len(text)), len(text) * (self._top_k + 2)
        )

    def _read(self, answer: dict, num_tokens: int) -> Top:
        """Raises ValueError, LookupError or TypeError for an answer of a wrong form. A place also has the token that is there."""
        found = answer["choices"][0]["prompt_logprobs"]
        if len(found) != num_tokens:
            raise ValueError(f"log-probs of {counted(len(found), 'token')} instead of {num_tokens}")
        tops = []
        for place in found[1:]:  # nothing comes before the first token
            pairs = sorted((-log_prob(place[token]["logprob"]), int(token)) for token in place)[: self._top_k]
            if len(pairs) < self._top_k or not all(is_token(token, self._vocab_size) for _, token in pairs):
                raise ValueError(f"not {self._top_k} tokens with ids below {self._vocab_size}")
            tops.append(pairs)
        values = torch.tensor(tops, dtype=torch.float64).view(num_tokens - 1, self._top_k, 2)
        return values[..., 1].long(), -values[..., 0].float()

    def _ask(self, path: str, body: Optional[dict], read: Callable, num_tokens: int = 1000) -> Any:
        """What `read` finds in the answer. Failed tries are repeated after pauses that double. Raises UserError in the end."""
        where, asking, problem = f"{FLAG} {self._url}", self._asking, ""
        sizes = {"max_bytes": num_tokens * TOKEN_BYTES, "max_values": num_tokens * TOKEN_VALUES}
        for _ in tries(asking.retries, asking.pause):
            try:
                if body is None:
                    return read(get_json(self._url + path, asking.timeout, asking.key, **sizes))
                named = body | {"model": self._model}
                return read(post_json(self._url + path, named, asking.timeout, asking.key, **sizes))
            except TROUBLE as error:
                problem, refusal = trouble_of(error, where)
                if refusal:
                    raise UserError(*refusal.args) from None
        raise given_up(where, asking.retries, problem)


def _model(answer: dict) -> tuple[str, int]:
    """The name of the server's model, and how many tokens a request may have. Adapters come behind their base."""
    model = answer["data"][0]
    if type(model["max_model_len"]) is not int or model["max_model_len"] < 2:
        raise ValueError("no server of vLLM: a model without max_model_len")
    return model["id"], model["max_model_len"]


def check_lengths(servers: Sequence[TeacherServer], longest: int) -> None:
    """Raise UserError if rows of up to `longest` tokens and the one that is generated do not fit into a server."""
    for server in servers:
        if server.max_len <= longest:
            found = f"{server._url} takes {server.max_len} tokens with the one that it generates"
            raise UserError(FLAG, found, f"a --max-model-len of {longest + 1} or more there, or a smaller --max_len")
