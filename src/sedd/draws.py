"""Random draws: counter-based uniforms, and categorical sampling that is exact for any vocabulary.  [§9]

`CounterRNG` gives uniforms as a function of (seed, row, position, step, event), on any device: a row's draws depend
neither on the other rows of its batch nor on the device. It is Philox4x32 with ten rounds (Salmon et al. 2011,
"Parallel Random Numbers: As Easy as 1, 2, 3", doi:10.1145/2063384.2063405), in integers that all devices compute alike.

A float32 uniform has 24 bits. In a vocabulary of 50,257 at a step probability of 1e-4 a token may have probability
1e-9, which such a uniform cannot express: Gumbel noise made of it never draws those tokens, which silently lowers the
temperature (Zheng et al. 2024, "Masked Diffusion Models are Secretly Time-Agnostic Masked Models and Exploit Inaccurate
Categorical Sampling", arXiv 2409.02908). Here every decision uses 53 bits, and float64 is used for some rows at a time:
no float64 tensor of the size of the input is allocated.
"""

import hashlib
import math
from dataclasses import dataclass
from typing import NamedTuple, final

import torch
from jaxtyping import Float, Int
from torch import Tensor

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
        k, m = (key[0] + i * _WEYL[0]) & _LOW, (key[1] + i * _WEYL[1]) & _LOW
        p, q = a * _MULTIPLIERS[0], c * _MULTIPLIERS[1]  # int64 overflow wraps around, as intended
        a, b, c, d = (q >> 32 & _LOW) ^ b ^ k, q & _LOW, (p >> 32 & _LOW) ^ d ^ m, p & _LOW
    return a, b, c, d


@final
@dataclass(frozen=True)
class CounterRNG:
    """The random numbers of some rows; ``rows`` are their numbers among all rows of their seed."""

    seed: int | Int[Tensor, " b"]
    """One for all rows, or one for each."""
    rows: Int[Tensor, " b"]

    def __call__(self, length: int, step: int | Int[Tensor, " b"] = 0, event: int = 0) -> Float[Tensor, "b length 2"]:
        """Return two uniforms per position for the decision ``event`` of step ``step``, of all rows or of each."""
        place = torch.arange(length, device=self.rows.device).expand(len(self.rows), length)
        row = (self.rows[:, None] & _LOW).expand_as(place)
        steps = step[:, None].expand_as(place) if isinstance(step, Tensor) else torch.full_like(place, step)
        seed = self.seed[:, None] if isinstance(self.seed, Tensor) else self.seed
        a, b, c, d = philox((place, row, steps, torch.full_like(place, event)), (seed & _LOW, seed >> 32))
        bits = torch.stack([a << 20 | b >> 12, c << 20 | d >> 12], -1)
        return (bits.double() + 0.5) * 2.0**-52  # midpoints of 2⁵² equal parts of (0, 1): never 0 or 1


class AffineWeights(NamedTuple):
    """Unnormalised probabilities of one position's next token as an affine function of its scores.

    With S = Σ_{y≠x} s_y over tokens, a change to a token y ≠ x and staying at x have the weights

        w_y = max(0, change_score·s_y + change_sum·S + change_own·s_x),  w_x = max(0, stay_own·s_x + stay_sum·S).

    Scores may have any common factor. The order of the fields is that of the arguments of the kernel in
    `ops.categorical_triton`.
    """

    change_score: Float[Tensor, "*s"]
    stay_own: Float[Tensor, "*s"] | None = None
    """None: 0, and so is ``stay_sum``."""
    stay_sum: Float[Tensor, "*s"] | None = None
    change_sum: Float[Tensor, "*s"] | None = None
    """None: 0, and so is ``change_own``."""
    change_own: Float[Tensor, "*s"] | None = None

    def scale_own(self, factor: Float[Tensor, "*s"]) -> "AffineWeights":
        """Return the weights in terms of scores of which s_x is still to be multiplied by ``factor``."""
        stay, change = (None if own is None else own * factor for own in (self.stay_own, self.change_own))
        return self._replace(stay_own=stay, change_own=change)


def uniforms(shape: tuple[int, ...], generator: torch.Generator) -> Float[Tensor, "..."]:
    """Draw uniforms of 53 bits in the open interval (0, 1), on the generator's device."""
    u = torch.rand(shape, generator=generator, dtype=torch.float64, device=generator.device)
    return u.clamp_min(2.0**-54)  # 0 would choose an outcome of probability 0


def sample(weights: Float[Tensor, "*s n"], generator: torch.Generator) -> Int[Tensor, "*s"]:
    """Draw one index per row of unnormalised ``weights``."""
    if not ((weights >= 0) & (weights < math.inf)).all() or not (weights.amax(-1) > 0).all():
        raise ValueError("weights must be finite and 0 or more, with at least one above 0 in each row")
    return sample_inverse_cdf(weights, uniforms(tuple(weights.shape[:-1]), generator))


def sample_inverse_cdf(weights: Float[Tensor, "*s n"], u: Float[Tensor, "*s"]) -> Int[Tensor, "*s"]:
    """Return the first index at which the cumulative sum of a row exceeds ``u`` times its total.

    Two levels: first among about √n blocks by their sums, then inside one block. Weight 0 is never returned.
    """
    rows, shares = weights.reshape(-1, weights.shape[-1]), u.reshape(-1, 1).double()
    size = math.isqrt(rows.shape[-1] - 1) + 1
    at_once = max(1, 2**22 // rows.shape[-1])  # about four million entries in float64
    if not len(rows):
        return u.new_zeros(u.shape, dtype=torch.long)
    drawn = []
    for some, share in zip(rows.split(at_once), shares.split(at_once), strict=True):
        grid = torch.nn.functional.pad(some, (0, -some.shape[-1] % size)).view(len(some), -1, size)
        sums = grid.sum(-1, dtype=torch.float64)
        block, rest = _first_above(share * sums.sum(-1, keepdim=True), sums)
        inside = grid[torch.arange(len(grid), device=grid.device), block.squeeze(-1)]
        index, _ = _first_above(rest, inside.double())
        drawn.append((block * size + index).squeeze(-1))
    return torch.cat(drawn).view(weights.shape[:-1])


def _first_above(target: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Return the first index at which the cumulative sum exceeds ``target``, and the remainder of ``target`` there."""
    sums = weights.cumsum(-1)
    end = torch.nextafter(sums[:, -1:], torch.zeros_like(target))
    target = torch.minimum(target, end)  # rounding may pass the end
    index = torch.searchsorted(sums, target, right=True).clamp_max(sums.shape[-1] - 1)  # NaN is past the end
    before = torch.where(index > 0, sums.gather(-1, (index - 1).clamp_min(0)), 0)
    return index, target - before


def sample_next(x: Int[Tensor, " k"], weights: Float[Tensor, "k n"], u: Float[Tensor, "k 2"]) -> Int[Tensor, " k"]:
    """Draw one index per row of unnormalised ``weights``, one of which is that of staying at ``x``.

    The first uniform decides whether the entry changes, the second to what.
    """
    leave = weights.scatter(-1, x[:, None], 0)
    total = leave.sum(-1, dtype=torch.float64)
    stay = weights.gather(-1, x[:, None]).squeeze(-1)
    moves = (u[:, 0] * (total + stay) < total).nonzero().squeeze(-1)
    return x.index_put((moves,), sample_inverse_cdf(leave[moves], u[moves, 1]))


def legacy_fp32(probabilities: Float[Tensor, "*s n"], generator: torch.Generator) -> Int[Tensor, "*s"]:
    """Draw as published samples were: by a float32 exponential race, **biased** for rare tokens.

    Only for reproducing published numbers; nothing uses it by default. The race is the Gumbel-max trick without its
    logarithm: Huijben et al. 2021, "A Review of the Gumbel-max Trick and its Extensions", arXiv 2110.01515.
    """
    p = probabilities.float()
    u = torch.rand(p.shape, generator=generator, dtype=torch.float32, device=generator.device)
    return (p / (1e-10 - torch.log(u + 1e-10))).argmax(-1)
