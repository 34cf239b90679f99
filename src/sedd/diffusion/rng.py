"""Uniforms that are a function of (seed, row, position, step, event): no state, no order, no device.

A row's draws do not depend on its batch mates, on the size of the batch, or on where they are computed. The function is
Philox4x32 with ten rounds (Salmon, Moraes, Dror, Shaw: Parallel random numbers, as easy as 1, 2, 3; 2011), in integers
that every device computes alike.
"""

from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Float, Int
from torch import Tensor

_LOW = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)

PRECISION = "float64"
"""Of every uniform made here, and so of every draw of a sampler: published samples were drawn with float32.  [§9]"""

Words = tuple[Tensor, Tensor, Tensor, Tensor]


def philox(counter: Words, key: tuple[int, int]) -> Words:
    """Four random words of 32 bits, in int64, for a counter of four and a key of two."""
    a, b, c, d = counter
    for i in range(10):
        k, m = ((word + i * weyl) & _LOW for word, weyl in zip(key, _WEYL, strict=True))
        p, q = a * _MULTIPLIERS[0], c * _MULTIPLIERS[1]  # wraps round; its 64 bits are right
        a, b, c, d = (q >> 32 & _LOW) ^ b ^ k, q & _LOW, (p >> 32 & _LOW) ^ d ^ m, p & _LOW
    return a, b, c, d


def _uniform(high: Tensor, low: Tensor) -> Tensor:
    """The middle of one of 2⁵² equal parts of (0, 1): 53 bits, never an end."""
    return ((high << 20 | low >> 12).double() + 0.5) * 2.0**-52


@final
@dataclass(frozen=True)
class CounterRNG:
    """The draws of some rows under one seed; ``rows`` are their numbers among all rows ever drawn with it."""

    seed: int
    rows: Int[Tensor, " b"]

    def __post_init__(self) -> None:
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"seed is {self.seed}; it must lie in 0..2^63 − 1")

    def __call__(self, length: int, step: int = 0, event: int = 0) -> Float[Tensor, "b length 2"]:
        """Two uniforms for every position, for what ``event`` decides at ``step``."""
        row, place = self.rows[:, None], torch.arange(length, device=self.rows.device)
        row, place = (a.expand(len(self.rows), length) for a in (row, place))
        words = (place, row & _LOW, torch.full_like(row, step), torch.full_like(row, event))
        a, b, c, d = philox(words, (self.seed & _LOW, self.seed >> 32))
        return torch.stack([_uniform(a, b), _uniform(c, d)], -1)

    def __getitem__(self, index: slice | Tensor) -> "CounterRNG":
        """The draws of some of the rows."""
        return CounterRNG(self.seed, self.rows[index])
