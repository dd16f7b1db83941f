"""Which prompts form which rollout: a pure function of the data, the seed and the sizes. Its position can be saved.

With a curriculum, it is also a function of the scores so far. They are part of the position.
"""

import hashlib
import math

import torch

from trainer.datasets.batches.global_batches import epoch_order

WRONG_AND_RIGHT = (0.0, 1.0)  # scores of a wrong and of a right response, if --reward_range does not give them
UNKNOWN = 0.5  # the pass rate of a prompt without one: nothing says whether it is easy or hard
SPARE = 1 / 40  # of the weight of each prompt in `learnable`, so that none is lost; the largest weight is 1/4


class PromptOrder:
    """Hands out prompts, episode after episode. An episode's permutation depends only on the seed and its number.

    With a `curriculum`, later episodes also depend on pass rates. The pass rate p of a prompt is the mean of its last
    scores, on a scale where `reward_range` is 0 to 1, each clipped to it. `easy_first` sorts by p. `learnable` samples prompts with weights p (1 - p), with
    replacement (Foster et al. 2025, Learning to reason at the frontier of learnability). An episode uses the rates from
    before it began.

    With a `delay` of K, batch b is taken by the scores of the batches up to b - K - 1. So up to K + 1 batches may be taken
    before the scores of the first of them are noted, and when they are noted changes nothing.
    """

    def __init__(
        self,
        prompts,
        *,
        batch_size: int,
        seed: int,
        shuffle: bool,
        curriculum="none",
        reward_range=WRONG_AND_RIGHT,
        delay: int = 0,
    ):
        self.prompts, self.batch_size, self.seed, self.shuffle = prompts, batch_size, seed, shuffle
        self.episode, self.next_index = 0, 0
        self.curriculum, self.reward_range = curriculum, reward_range
        # dicts and tuples here are replaced, never changed: a copy has a position of its own
        self.rates: dict[int, float] = {}  # by row
        self._rates_before: dict[int, float] = {}  # when the episode began
        self.delay, self._num_ahead = delay, 0  # batches that are taken and not noted
        self._later: tuple[dict[int, float], ...] = ()  # rates of the newest batches that are noted, not in `rates` yet

    def take(self, count: int) -> list[dict]:
        """The next `count` prompts of the episode, or all that are left. Then the next episode begins."""
        order = self._order()
        chosen = order[self.next_index : self.next_index + count]
        self.next_index += len(chosen)
        if self.next_index >= len(order):
            self.episode, self.next_index = self.episode + 1, 0
        self._num_ahead += 1
        self._use_rates()
        return [self.prompts[index] for index in chosen]

    def _order(self):
        order = epoch_order(len(self.prompts), self.seed, self.episode, self.shuffle)
        if self.curriculum == "none":
            return order
        if self.next_index == 0:
            self._rates_before = self.rates
        if not self._rates_before:
            return order
        rates = torch.tensor([self._rates_before.get(row, UNKNOWN) for row in self.prompts["row"]], dtype=torch.float64)
        if self.curriculum == "easy_first":
            return order[torch.argsort(rates[torch.from_numpy(order).long()], descending=True, stable=True).numpy()]
        cumulative = (rates * (1 - rates) + SPARE).cumsum(0)
        digest = hashlib.blake2b(f"{self.seed}/{self.episode}/curriculum".encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
        targets = torch.rand(len(rates), dtype=torch.float64, generator=generator) * cumulative[-1]
        return torch.searchsorted(cumulative, targets, right=True).clamp(max=len(rates) - 1).numpy()

    def note(self, samples: list) -> None:
        """Measure the pass rates of the prompts of the next batch that was taken, if there is a curriculum.

        Samples without a score count for nothing.
        """
        if self.curriculum == "none":
            return
        scores: dict[int, list[float]] = {}
        wrong, right = self.reward_range
        for sample in (sample for sample in samples if not (sample.failed or math.isnan(sample.score))):
            scores.setdefault(sample.row, []).append(min(max((sample.score - wrong) / (right - wrong), 0.0), 1.0))
        self._later = (*self._later, {row: sum(found) / len(found) for row, found in scores.items()})
        self._num_ahead = max(self._num_ahead - 1, 0)
        self._use_rates()

    def _use_rates(self) -> None:
        """Add the rates of the batches that decide the next one."""
        while len(self._later) > max(self.delay - self._num_ahead, 0):
            first, *later = self._later
            self.rates, self._later = self.rates | first, tuple(later)

    def position(self) -> dict:
        """Where a resumed run goes on. All batches that were taken are noted."""
        rates = {}
        if self.curriculum != "none":
            rates["rates"] = [list(self.rates.items()), list(self._rates_before.items())]
        if self._later:
            rates["later_rates"] = [list(of_batch.items()) for of_batch in self._later]
        return {"episode": self.episode, "next_index": self.next_index, **rates}

    def go_to(self, position: dict) -> None:
        self.episode, self.next_index = position["episode"], position["next_index"]
        if self.next_index >= len(self.prompts):  # --allow_change dataset: there are fewer now
            self.episode, self.next_index = self.episode + 1, 0
        self.rates, self._rates_before = (dict(map(tuple, pairs)) for pairs in position.get("rates", ([], [])))
        self._later, self._num_ahead = tuple(dict(map(tuple, pairs)) for pairs in position.get("later_rates", ())), 0
        self._use_rates()  # --allow_change max_staleness: more of them count now

    def digest(self) -> str:
        return hashlib.blake2b("".join(self.prompts["digest"]).encode(), digest_size=8).hexdigest()
