"""A draw at every row of a head's output, by a law that is affine in the scores: the definition, in torch.

`picks` is its twin in Triton: the output is read and nothing of its size is written.
"""

from typing import NamedTuple, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from sedd.diffusion import categorical
from sedd.diffusion.categorical import AffineWeights
from sedd.diffusion.rng import CounterRNG
from sedd.runtime import device as card


class Drawn(NamedTuple):
    """The next token of every row, and how many of their laws had to be made laws."""

    y: Int[Tensor, " k"]
    clamped: Int[Tensor, ""]


class Scores(NamedTuple):
    """What a head says of some positions: log s_y = z_y + scale for the tokens y < ``vocab_size``."""

    z: Float[Tensor, "k m"]
    vocab_size: int
    scale: Float[Tensor, " k"]
    relative: bool
    """Whether s is a ratio to x, so that s_x = 1; else s_x is what is said of x, and 0 for a mask."""


@runtime_checkable
class Choose(Protocol):
    """`choose`, here or in `picks`."""

    def __call__(self, said: Scores, x: Tensor, law: AffineWeights, u: Tensor) -> Drawn:
        """The next token of every row."""
        ...


def chosen(device: str) -> Choose:
    """The twin in Triton on CUDA, where it runs."""
    if device == "cuda" and card.has_triton():
        from sedd.ops import categorical_triton

        return categorical_triton.choose
    return choose


def uniforms(chance: CounterRNG, length: int, step: int, event: int) -> Float[Tensor, "b length 2"]:
    """``chance(length, step, event)``, on CUDA by one kernel."""
    if chance.rows.device.type == "cuda" and card.has_triton():
        from sedd.ops import philox_triton

        return philox_triton.uniforms(chance, length, step, event)
    return chance(length, step, event)


def choose(said: Scores, x: Int[Tensor, " k"], law: AffineWeights, u: Float[Tensor, "k 2"]) -> Drawn:
    """The first uniform of a row decides whether it moves, the second where to."""
    states = max(said.vocab_size, int(x.max()) + 1) if len(x) else said.vocab_size
    weights = weigh(said, x, law, states)
    total = weights.sum(-1, dtype=torch.float64)
    clamped = weights.amin(-1) < -1e-5 * total.abs().clamp_min(1e-30)
    return Drawn(categorical.step(x, weights.clamp_min(0), u), clamped.sum())


def weigh(said: Scores, x: Int[Tensor, " k"], law: AffineWeights, states: int) -> Float[Tensor, "k states"]:
    """The weights of all ``states``, entries below 0 kept."""
    log_s = said.z[:, : said.vocab_size].double() + said.scale[:, None].double()
    token = (x < said.vocab_size)[:, None]
    at = x.clamp_max(said.vocab_size - 1)[:, None]
    own = torch.zeros_like(at, dtype=torch.float64) if said.relative else log_s.gather(-1, at)
    own = own if said.relative else torch.where(token, own, -torch.inf)
    log_s = torch.where(token, log_s.scatter(-1, at, -torch.inf), log_s)
    most = torch.maximum(log_s.amax(-1, keepdim=True), own)
    s, own = torch.exp(log_s - most), torch.exp(own - most)
    total = s.sum(-1, keepdim=True)
    weights = law.go.double()[:, None] * s
    stays = torch.zeros_like(total)
    if law.stay is not None and law.stay_sum is not None:
        stays = law.stay.double()[:, None] * own + law.stay_sum.double()[:, None] * total
    if law.by_sum is not None and law.by_own is not None:
        weights = weights + law.by_sum[:, None] * total + law.by_own[:, None] * own
    weights = torch.nn.functional.pad(weights, (0, states - said.vocab_size))
    return weights.scatter(-1, x[:, None], stays)
