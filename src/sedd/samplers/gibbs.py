"""The predictor–corrector sampler for noise of tokens: Tweedie steps with Gibbs corrections.  [§9]"""

from dataclasses import dataclass
from typing import ClassVar, final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from sedd import draws
from sedd.parameterization import HasNoise
from sedd.samplers.grid import Tweedie
from sedd.samplers.loop import POSITION, GridSampler, StepContext


@final
@dataclass(frozen=True)
class Gibbs(GridSampler):
    """A Tweedie step, then ``sites`` corrections: a random position is drawn again given all others.

    Where every state may be noise the score at a position is its conditional up to a factor, whatever is there:
    p_s(y | x_−i) = s_y / Σ s. Drawing from it leaves p_s unchanged, so corrections only remove error. Updating all
    positions at once would change p_s.
    """

    order: ClassVar[float] = 1.0  # of the step that is corrected
    assumes: ClassVar[str] = "uniform or hybrid noise, or noise by frequency"
    sites: int = 1
    """Positions that are drawn again after each step."""

    predictor: ClassVar[Tweedie] = Tweedie()
    """The step that is corrected."""

    def __post_init__(self) -> None:
        if self.sites < 1:
            raise ValueError(f"sites is {self.sites}; there must be at least 1 correction per step")

    def check(self, model: HasNoise) -> None:
        """Require noise under which every token may be wrong."""
        if model.process.only_masks:
            raise ValueError("sampler gibbs corrects tokens; under the model's noise only masks change: use remask")

    def expected_calls(self, model: HasNoise, times: Float[Tensor, " n"], blanks: int) -> float:
        """Return 1 + ``sites`` calls in each step and one in the last."""
        return float((1 + self.sites) * (len(times) - 2) + 1) if blanks else 0.0

    def step(
        self, x: Int[Tensor, "b L"], t: Float[Tensor, " b"], s: Float[Tensor, " b"], context: StepContext
    ) -> Int[Tensor, "b L"]:
        """Draw the step and its corrections."""
        x = self.predictor.step(x, t, s, context)
        sigma, rows = context.schedule.sigma(s), torch.arange(len(x), device=x.device)
        for k in range(self.sites):
            u = context.rng(x.shape[-1], context.step * self.sites + k, POSITION)
            keys = torch.where(context.free, u[..., 0], -1.0)
            site = keys.argmax(-1)  # the free position with the largest of independent uniforms is a uniform choice
            hidden = context.model.hidden(x, sigma, context.valid)[rows, site]
            score = context.model.log_score_at(hidden, x[rows, site], sigma).exp()
            drawn = draws.sample_inverse_cdf(score, u[rows, site, 1])
            x = x.index_put((rows, site), torch.where(context.free[rows, site], drawn, x[rows, site]))
        return x
