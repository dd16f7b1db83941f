"""The responses to a batch of prompts, while each of them grows by a token at every step."""

from collections.abc import Sequence
from typing import Optional

import torch

from trainer.rollout.engines.sampling import Completion, Sampling

STOP_TEXT_TOKENS = 32  # at least this many of the last tokens are decoded to find a stop text


class Responses:
    """Tokens and log-probs of the responses, on the engine's device. A step costs a few operations, however many rows.

    `rows` are the prompts of the rows that the model still continues. `open`, by prompt, is True for responses that have not
    ended. A response that has ended may stay among `rows`. Tokens that are appended to it do not count.
    """

    def __init__(self, prompts: Sequence[Sequence[int]], limits: Sequence[int], sampling: Sampling, tokenizer, device):
        """`limits` are the largest numbers of tokens, one per prompt."""
        self.prompts, self.sampling, self.tokenizer = prompts, sampling, tokenizer
        self.limits, self.ends = torch.tensor(limits, device=device), set(limits)
        self.stop_ids = torch.tensor(sampling.stop_ids, dtype=torch.long, device=device)
        count = len(prompts)
        self.rows = torch.arange(count, device=device)
        self.open = torch.ones(count, dtype=torch.bool, device=device)
        self.finished, self.lengths = torch.zeros_like(self.open), torch.zeros_like(self.rows)
        self.tokens = torch.zeros(max(limits), count, dtype=torch.long, device=device)  # by step
        self.log_probs = torch.zeros(max(limits), count, device=device)
        self.kept_ids: list[list[list[int]]] = [[] for _ in prompts]
        self.step = 0

    def append(self, tokens: torch.Tensor, log_probs: torch.Tensor, kept: Optional[torch.Tensor]) -> int:
        """Add a token (rows,) to each row. `kept` (rows, vocab) are the tokens it was sampled from, if sampling truncates.

        Returns how many responses continue.
        """
        new = self.tokens[self.step].index_copy_(0, self.rows, tokens)
        self.log_probs[self.step].index_copy_(0, self.rows, log_probs)
        self.lengths += self.open
        if kept is not None:
            grows = self.open[self.rows].tolist()
            for row, ids in zip(self.rows[grows].tolist(), kept[grows]):
                self.kept_ids[row].append(ids.nonzero().squeeze(1).tolist())
        self.step += 1
        ended = (new[:, None] == self.stop_ids).any(1)
        if self.sampling.stop_texts:
            ended |= self._end_in_text()
        ended &= self.open
        self.finished |= ended
        self.open &= ~ended & (self.limits > self.step)
        return int(self.open.sum())

    def kept_rows(self, num_open: int) -> Optional[torch.Tensor]:
        """The positions of the rows that stay, if rows should be dropped now. `rows` are then only these.

        Ended rows are dropped once that halves the work. They are also dropped at a limit: the model may have no further
        positions there.
        """
        if self.step not in self.ends and 2 * num_open > len(self.rows):
            return None
        kept = self.open[self.rows].nonzero().squeeze(1)
        self.rows = self.rows[kept]
        return kept

    def completions(self) -> list[Completion]:
        """The responses so far, one per prompt."""
        lengths, finished = self.lengths.tolist(), self.finished.tolist()
        columns = zip(self.tokens.T.tolist(), self.log_probs.T.tolist(), lengths, finished, self.kept_ids)
        return [Completion(ids[:num], probs[:num], ends, kept) for ids, probs, num, ends, kept in columns]

    def _end_in_text(self) -> torch.Tensor:
        tails, stops = self.tokens[: self.step].T[:, -_window(self.sampling.stop_texts) :].tolist(), []
        for prompt, tail, is_open in zip(self.prompts, tails, self.open.tolist()):
            stops.append(is_open and ends_in_text(self.tokenizer, prompt, tail, self.sampling.stop_texts))
        return torch.tensor(stops, device=self.open.device)


def ends_in_text(tokenizer, prompt: Sequence[int], response: Sequence[int], stop_texts: Sequence[str]) -> bool:
    """Whether a stop text is in the last tokens of a response. They are decoded together with the token before them: the
    first decoded token may lose its leading space."""
    window = [*prompt[-1:], *response][-_window(stop_texts) :]
    text = tokenizer.decode(window).removeprefix(tokenizer.decode(window[:1]))
    return any(stop in text for stop in stop_texts)


def _window(stop_texts: Sequence[str]) -> int:
    """How many tokens are decoded to find a stop text: a token has one byte or more, and one more token comes first."""
    return 1 + max(STOP_TEXT_TOKENS, *(len(text.encode()) for text in stop_texts))
