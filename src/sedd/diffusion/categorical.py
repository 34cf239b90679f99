"""Categorical sampling that is exact for any vocabulary, and the float32 Gumbel sampling in use that is not.  [§9]

A float32 uniform has 24 bits. In a vocabulary of 50,257 at a step probability of 1e-4 a token may have
probability 1e-9, which such a uniform cannot express: Gumbel noise made of it never draws those tokens, which
silently lowers the temperature. Here every decision uses 53 bits, and float64 is used for some rows at a time: no
float64 tensor of the size of the input is allocated.

Reference: Zheng et al. 2024, "Masked Diffusion Models are Secretly Time-Agnostic Masked Models and Exploit Inaccurate
Categorical Sampling", arXiv 2409.02908.
"""

import math
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from sedd.diffusion import validate


class AffineWeights(NamedTuple):
    """Unnormalised probabilities of one position's next token as an affine function of its scores.

    With S = Σ_{y≠x} s_y over tokens, a change to a token y ≠ x and staying at x have the weights

        w_y = max(0, change_score·s_y + change_sum·S + change_own·s_x),  w_x = max(0, stay_own·s_x + stay_sum·S).

    All are homogeneous, so scores may have any common factor. The order of the fields is that of the arguments of the
    kernel in `ops.categorical_triton`.
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
        own = {name: getattr(self, name) for name in ("stay_own", "change_own")}
        return self._replace(**{name: value * factor for name, value in own.items() if value is not None})


def uniforms(shape: tuple[int, ...], generator: torch.Generator) -> Float[Tensor, "..."]:
    """Draw uniforms of 53 bits in the open interval (0, 1), on the generator's device."""
    u = torch.rand(shape, generator=generator, dtype=torch.float64, device=generator.device)
    return u.clamp_min(2.0**-54)  # 0 would choose an outcome of probability 0


def bernoulli(probability: Float[Tensor, "*s"], generator: torch.Generator) -> Bool[Tensor, "*s"]:
    """Draw True with the given probability, elementwise."""
    return uniforms(tuple(probability.shape), generator) < probability


def sample(weights: Float[Tensor, "*s n"], generator: torch.Generator) -> Int[Tensor, "*s"]:
    """Draw one index per row of unnormalised ``weights``."""
    validate.weights(weights)
    return sample_inverse_cdf(weights, uniforms(tuple(weights.shape[:-1]), generator))


def sample_inverse_cdf(weights: Float[Tensor, "*s n"], u: Float[Tensor, "*s"]) -> Int[Tensor, "*s"]:
    """Return the first index at which the cumulative sum of a row exceeds ``u`` times its total.

    Two levels: first among about √n blocks by their sums, then inside one block. Weight 0 is never returned.
    """
    rows, shares = weights.reshape(-1, weights.shape[-1]), u.reshape(-1, 1).double()
    size = math.isqrt(rows.shape[-1] - 1) + 1
    if not len(rows):
        return u.new_zeros(u.shape, dtype=torch.long)
    drawn = [_invert(w, s, size) for w, s in zip(_pieces(rows), shares.split(_at_once(rows)), strict=True)]
    return torch.cat(drawn).view(weights.shape[:-1])


def _invert(rows: Tensor, u: Tensor, size: int) -> Tensor:
    grid = torch.nn.functional.pad(rows, (0, -rows.shape[-1] % size)).view(len(rows), -1, size)
    sums = grid.sum(-1, dtype=torch.float64)
    block, rest = _first_above(u * sums.sum(-1, keepdim=True), sums)
    inside = grid[torch.arange(len(grid), device=grid.device), block.squeeze(-1)]
    index, _ = _first_above(rest, inside.double())
    return (block * size + index).squeeze(-1)


def _first_above(target: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Return the first index at which the cumulative sum exceeds ``target``, and the remainder of ``target`` there."""
    sums = weights.cumsum(-1)
    end = torch.nextafter(sums[:, -1:], torch.zeros_like(target))
    target = torch.minimum(target, end)  # rounding may pass the end
    index = torch.searchsorted(sums, target, right=True).clamp_max(sums.shape[-1] - 1)  # NaN is past the end
    before = torch.where(index > 0, sums.gather(-1, (index - 1).clamp_min(0)), 0)
    return index, target - before


def _at_once(rows: Tensor) -> int:
    """Return how many rows are processed at once: about four million entries."""
    return max(1, 2**22 // rows.shape[-1])


def _pieces(rows: Tensor) -> tuple[Tensor, ...]:
    return tuple(rows.split(_at_once(rows)))


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
