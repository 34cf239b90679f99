"""Categorical sampling from the output of a head, one draw per row, from weights that are affine in the scores."""

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from sedd import draws
from sedd.draws import AffineWeights, CounterRNG
from sedd.runtime import device as devices


class HeadLogits(NamedTuple):
    """The output of a head at k positions: log s_y = logits_y + shift for the tokens y < ``vocab_size``."""

    logits: Float[Tensor, "k m"]
    vocab_size: int
    shift: Float[Tensor, " k"]
    is_score: bool
    """Whether s_y is a ratio to the probability of x, so that s_x = 1; else s_x = e^logit, and 0 for a mask."""


class SampledTokens(NamedTuple):
    """The next token of every row, and the number of rows with a weight below 0, rounding aside."""

    tokens: Int[Tensor, " k"]
    clamped_count: Int[Tensor, ""]


def sample_categorical(
    head: HeadLogits, x: Int[Tensor, " k"], weights: AffineWeights, u: Float[Tensor, "k 2"]
) -> SampledTokens:
    """Draw every row's next token: the first of its uniforms decides whether ``x`` changes, the second to which."""
    if x.is_cuda and devices.has_triton():
        from sedd.ops import categorical_triton

        return categorical_triton.sample_categorical_triton(head, x, weights, u)
    return sample_categorical_reference(head, x, weights, u)


def sample_categorical_reference(
    head: HeadLogits, x: Int[Tensor, " k"], weights: AffineWeights, u: Float[Tensor, "k 2"]
) -> SampledTokens:
    """Draw the next token of every row from a table of weights, in float64."""
    n = head.vocab_size
    log_s = head.logits[:, :n].double() + head.shift[:, None].double()
    is_token, column = (x < n)[:, None], x.clamp_max(n - 1)[:, None]  # the column of x; any for a mask
    log_s_x = torch.zeros_like(column, dtype=torch.float64) if head.is_score else log_s.gather(-1, column)
    log_s_x = log_s_x if head.is_score else torch.where(is_token, log_s_x, -torch.inf)
    log_s = torch.where(is_token, log_s.scatter(-1, column, -torch.inf), log_s)
    highest = torch.maximum(log_s.amax(-1, keepdim=True), log_s_x)
    s, s_x = torch.exp(log_s - highest), torch.exp(log_s_x - highest)
    total = s.sum(-1, keepdim=True)
    table = weights.change_score.double()[:, None] * s
    stay = torch.zeros_like(total)
    if weights.stay_own is not None and weights.stay_sum is not None:
        stay = weights.stay_own.double()[:, None] * s_x + weights.stay_sum.double()[:, None] * total
    if weights.change_sum is not None and weights.change_own is not None:
        table = table + weights.change_sum[:, None] * total + weights.change_own[:, None] * s_x
    states = max(n, int(x.max()) + 1) if len(x) else n
    table = torch.nn.functional.pad(table, (0, states - n)).scatter(-1, x[:, None], stay)
    total_weight = table.sum(-1)
    clamped = table.amin(-1) < -1e-5 * total_weight.abs().clamp_min(1e-30)
    return SampledTokens(draws.sample_next(x, table.clamp_min(0), u), clamped.sum())


def counter_uniforms(
    rng: CounterRNG, length: int, step: int | Int[Tensor, " b"], event: int
) -> Float[Tensor, "b length 2"]:
    """Return ``rng(length, step, event)``, on CUDA by one kernel."""
    if rng.rows.is_cuda and devices.has_triton():
        from sedd.ops import categorical_triton

        return categorical_triton.philox_uniforms(rng, length, step, event)
    return rng(length, step, event)
