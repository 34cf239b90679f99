"""Counter-based random numbers: uniforms as a function of (seed, row, position, step, event), on any device.

A row's draws depend neither on the other rows of its batch nor on the device. The function is
Philox4x32 with ten rounds (Salmon et al. 2011, "Parallel Random Numbers: As Easy as 1, 2, 3",
doi:10.1145/2063384.2063405), in integers that every device computes alike.
"""

import hashlib
from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from sedd.schema import check_seed

_LOW = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)

PRECISION = "float64"
"""The precision of the uniforms of every draw; published samples were drawn with float32.  [§9]"""


def derive_seed(seed: int, key: str) -> int:
    """Return the seed of one of many independent streams under one seed: a hash of the seed and the stream's name."""
    digest = hashlib.blake2b(f"{seed}\n{key}".encode("utf-8", "surrogatepass"), digest_size=8)
    return int.from_bytes(digest.digest()) >> 1


Words = tuple[Tensor, Tensor, Tensor, Tensor]


def philox(counter: Words, key: tuple[int | Tensor, int | Tensor]) -> Words:
    """Return four random 32-bit words, in int64, for a counter of four words and a key of two."""
    a, b, c, d = counter
    for i in range(10):
        k, m = ((word + i * weyl) & _LOW for word, weyl in zip(key, _WEYL, strict=True))
        p, q = a * _MULTIPLIERS[0], c * _MULTIPLIERS[1]  # int64 overflow wraps around, as intended
        a, b, c, d = (q >> 32 & _LOW) ^ b ^ k, q & _LOW, (p >> 32 & _LOW) ^ d ^ m, p & _LOW
    return a, b, c, d


def _uniform(high: Tensor, low: Tensor) -> Tensor:
    """Return the midpoint of one of 2⁵² equal parts of (0, 1): 53 bits, never 0 or 1."""
    return ((high << 20 | low >> 12).double() + 0.5) * 2.0**-52


@final
@dataclass(frozen=True)
class CounterRNG:
    """The random numbers of some rows; ``rows`` are their numbers among all rows of their seed."""

    seed: int | Int[Tensor, " b"]
    """One for all rows, or one for each."""
    rows: Int[Tensor, " b"]

    def __post_init__(self) -> None:
        if isinstance(self.seed, int):
            check_seed(self.seed)

    def __call__(self, length: int, step: int | Int[Tensor, " b"] = 0, event: int = 0) -> Float[Tensor, "b length 2"]:
        """Return two uniforms per position for the decision ``event`` of step ``step``, of all rows or of each."""
        place = torch.arange(length, device=self.rows.device).expand(len(self.rows), length)
        row = (self.rows[:, None] & _LOW).expand_as(place)
        steps = step[:, None].expand_as(place) if isinstance(step, Tensor) else torch.full_like(place, step)
        seed = self.seed[:, None] if isinstance(self.seed, Tensor) else self.seed
        words = (place, row, steps, torch.full_like(place, event))
        a, b, c, d = philox(words, (seed & _LOW, seed >> 32))
        return torch.stack([_uniform(a, b), _uniform(c, d)], -1)

    def __getitem__(self, index: slice | Tensor) -> "CounterRNG":
        """Select rows."""
        return CounterRNG(self.seed[index] if isinstance(self.seed, Tensor) else self.seed, self.rows[index])
