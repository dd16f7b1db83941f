"""The sample of a rollout: a prompt, a response to it, and the result of the reward."""

from dataclasses import dataclass, field, replace
from typing import Optional

import torch

from trainer.datasets.conversations.tokens import digest_of


@dataclass(frozen=True)
class Sizes:
    """What every rank knows about the tokens of a sample."""

    tokens: int  # of prompt and response
    response: int  # tokens after the prompt
    generated: int  # tokens of the response that the engine generated
    turns: int
    histories: int
    digest: str  # of all tokens


@dataclass(frozen=True)
class Held:
    """Which ranks have the tokens of a sample. See `placement.py`."""

    here: bool = True
    by: Optional[int] = None  # the rank that has them; None: every rank
    sizes: Optional[Sizes] = None  # None: not measured yet


@dataclass
class Sample:
    """Every run uses the first nine fields. Each later one belongs to one feature and is empty without it."""

    number: int  # within the rollout; samples of one prompt have adjacent numbers
    row: int  # of the prompt in its dataset
    prompt_ids: list[int]
    response_ids: list[int]
    log_probs: list[float]  # of the generated tokens, by the rollout engine
    finished: bool  # True if a stop token or stop text ended it, not the token limit
    label: Optional[str]
    score: float = float("nan")
    metrics: dict[str, float] = field(default_factory=dict)
    # truncated sampling (--top_p, --top_k, --min_p): for each generated token, the ids that it was sampled from
    kept_ids: list[list[int]] = field(default_factory=list)
    # reward functions with more parameters: the columns of the prompt's row
    columns: dict = field(default_factory=dict)
    # --env: [start, end) in response_ids of each turn of the model; the environment wrote the other tokens
    turns: list[list[int]] = field(default_factory=list)
    # --env: where in response_ids a new history begins. The model reads no token before the newest one
    starts: list[int] = field(default_factory=list)
    # --env: the reward of each turn; the score is their sum
    turn_rewards: list[float] = field(default_factory=list)
    # --max_staleness: [start, version] in response_ids; from `start` on, this version of the policy generated the tokens
    versions: list[list[int]] = field(default_factory=list)
    # --routing_replay: the experts of each token of prompt and response that the engine read, (tokens, layers, k), int16.
    # The last ones have no row, and the last token of an older history has -1
    experts: Optional[torch.Tensor] = field(default=None, compare=False)
    # why an environment or a server gave no score. Such a sample is as if it had not been sampled; its score is NaN
    failed: str = ""
    # --env: what ended the episode: one of `one_episode.ENDS`
    end: str = ""
    held: Held = field(default_factory=Held, compare=False)

    @property
    def version(self) -> Optional[int]:
        """The oldest version of the policy that generated a token, with --max_staleness."""
        return min((version for _, version in self.versions), default=None)

    def size(self) -> Sizes:
        if self.held.sizes is None:
            ids, response = self.prompt_ids + self.response_ids, len(self.response_ids)
            counts = sum(len(range(*span)) for span in self._spans()), len(self.turns), len(self.starts) + 1
            sizes = Sizes(len(ids), response, *counts, digest_of(ids))
            self.held = replace(self.held, sizes=sizes)
        return self.held.sizes

    def with_response(self, ids: list[int]) -> "Sample":
        """The same sample with another response."""
        return replace(self, response_ids=ids, held=Held())

    def ids_and_mask(self) -> tuple[list[int], list[int]]:
        """The ids of prompt and response, and a mask that is 1 on generated tokens."""
        mask = [0] * (len(self.prompt_ids) + len(self.response_ids))
        first = len(self.prompt_ids)
        for start, end in self._spans():
            mask[first + start : first + end] = [1] * (end - start)
        return self.prompt_ids + self.response_ids, mask

    def generated(self) -> list[int]:
        """The positions in response_ids that the engine generated. Only these have log-probs, advantages and a loss."""
        return [position for start, end in self._spans() for position in range(start, end)]

    def _spans(self) -> list[list[int]]:
        return self.turns or [[0, len(self.response_ids)]]
