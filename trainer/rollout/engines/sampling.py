"""The requests and results of every rollout engine, and the random numbers that decide a sample.

Sample number s of rollout r has its own uniform numbers, which depend only on (seed, r, s). So a sample is the same
whichever rank generates it, and with any other samples in the batch.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Optional

import torch

SPARE_LOGPROBS = 32


@dataclass(frozen=True)
class Sampling:
    """How to continue prompts. Temperature 0 takes the most likely token."""

    temperature: float
    max_new_tokens: int
    stop_ids: tuple[int, ...]  # tokens that end a response and belong to it
    stop_texts: tuple[str, ...] = ()  # texts that end a response; the token that completes them belongs to it
    top_p: float = 1.0  # these three: see models/losses/truncation.py
    top_k: int = 0
    min_p: float = 0.0
    keeps_sets: bool = True  # if it truncates: completions have the sets that tokens are from, which training needs

    @property
    def truncates(self) -> bool:
        return bool(self.temperature) and (self.top_p < 1 or self.top_k > 0 or self.min_p > 0)

    @property
    def gives_sets(self) -> bool:
        return self.truncates and self.keeps_sets

    def for_vllm(self, seed: Optional[int], limit: int, vocab_size: int) -> dict:
        """The arguments of vLLM's SamplingParams, with at most `limit` new tokens.

        Sets are the tokens with log-probs in its answers. vLLM keeps more than top_k if some are equally likely.
        """
        sets = {"logprobs": min(self.top_k + SPARE_LOGPROBS, vocab_size)} if self.gives_sets else {"logprobs": 0}
        return {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "min_p": self.min_p,
            "max_tokens": limit,
            "stop_token_ids": list(self.stop_ids),
            "stop": list(self.stop_texts),
            "ignore_eos": True,  # only `stop_ids` end a response
            "detokenize": bool(self.stop_texts),
            "skip_special_tokens": False,  # a stop text may be a special token
            "seed": seed,
            **sets,  # 0: of the sampled token only
        }


@dataclass
class Completion:
    """The tokens of a response, their log-probs under the distribution that was sampled, and whether the response ended.

    If sampling truncates, `kept_ids` has for each token the ids that it was sampled from. `experts` (tokens, layers, k), if
    the engine records them, are for each token of prompt and response except the last.
    """

    token_ids: list[int]
    log_probs: list[float]
    finished: bool
    kept_ids: list[list[int]] = field(default_factory=list)
    experts: Optional[torch.Tensor] = None
    versions: list[list[int]] = field(default_factory=list)  # as in `samples.Sample`


def sample_seed(seed: int, rollout: int, sample: int, turn: int = 0) -> int:
    text = f"{seed}/{rollout}/{sample}" + f"/{turn}" * bool(turn)
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def uniform_numbers(seeds: Sequence[int], count: int) -> torch.Tensor:
    """Numbers (samples, count), fp64, in [0, 1), with one row per seed."""
    rows = [torch.rand(count, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) for seed in seeds]
    return torch.stack(rows)


def pick_tokens(log_probs: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Tokens (rows,) from distributions (rows, vocab), by inverse transform. It takes the first token with a cumulative
    probability above the row's uniform number. Probabilities [0.2, 0.8] and 0.3 give token 1."""
    cumulative = log_probs.double().exp().cumsum(-1)
    targets = uniforms[:, None] * cumulative[:, -1:]
    return torch.searchsorted(cumulative, targets, right=True).squeeze(1).clamp(max=log_probs.shape[1] - 1)
