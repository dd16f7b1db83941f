"""Three sums of a sample's gradient, by which two runs find the sample, the rank and the element where they part."""

from dataclasses import dataclass

import torch

WORD = 1 << 64


def sums_of(values: torch.Tensor) -> list[int]:
    """Return the sums of v, i v and i^2 v modulo 2^64. `values` are int64, and i is the place in the flat tensor.

    They are exact in any order. Of a single changed element, they tell the place and the change.
    """
    flat = values.flatten()
    places = torch.arange(flat.numel(), device=flat.device)
    return [int(found) for found in (flat.sum(), (flat * places).sum(), (flat * places * places).sum())]


@dataclass(frozen=True)
class Change:
    """What parts two gradients: one element by so many grid steps, or several elements (None)."""

    place: int | None = None
    steps: int | None = None


def change_between(a: list[int], b: list[int], size: int) -> Change | None:
    """Return what the sums of two gradients with `size` elements tell of their difference. None: there is none."""
    if a == b:
        return None
    first, second, third = (_signed(y - x) for x, y in zip(a, b))
    place = second // first if first else -1
    is_single = 0 <= place < size and second == place * first and third == _signed(place * place * first)
    return Change(place, first) if is_single else Change()


def _signed(number: int) -> int:
    """`number` modulo 2^64, between -2^63 and 2^63."""
    return (number + WORD // 2) % WORD - WORD // 2
