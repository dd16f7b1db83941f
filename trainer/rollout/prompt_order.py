"""Which prompts form which rollout: a pure function of the data, the seed and the sizes. Its position can be saved."""

import hashlib

from trainer.datasets.global_batches import epoch_order


class PromptOrder:
    """Hands out prompts, episode after episode. An episode's permutation depends only on the seed and its number."""

    def __init__(self, prompts, *, batch_size: int, seed: int, shuffle: bool):
        self.prompts, self.batch_size, self.seed, self.shuffle = prompts, batch_size, seed, shuffle
        self.episode, self.next_index = 0, 0

    def take(self, count: int) -> list[dict]:
        """The next `count` prompts of the episode, or all that are left. Then the next episode begins."""
        order = epoch_order(len(self.prompts), self.seed, self.episode, self.shuffle)
        chosen = order[self.next_index : self.next_index + count]
        self.next_index += len(chosen)
        if self.next_index >= len(order):
            self.episode, self.next_index = self.episode + 1, 0
        return [self.prompts[index] for index in chosen]

    def digest(self) -> str:
        return hashlib.blake2b("".join(self.prompts["digest"]).encode(), digest_size=8).hexdigest()
