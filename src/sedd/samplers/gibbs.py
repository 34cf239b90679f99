"""The predictor–corrector sampler for noise of tokens: Tweedie steps with Gibbs corrections.  [§9]"""

from dataclasses import dataclass
from typing import Any, ClassVar, final

import torch

from sedd import draws
from sedd.parameterization import HasNoise
from sedd.samplers.grid import Tweedie
from sedd.samplers.loop import POSITION, GridSampler, Rows, Times
from sedd.samplers.model import PerSample, Sequences


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

    def check(self, model: Any) -> None:
        """Require noise under which every token may be wrong."""
        if model.process.only_masks:
            raise ValueError("sampler gibbs corrects tokens; under the model's noise only masks change: use remask")

    def expected_calls(self, model: HasNoise, times: Times, blanks: int) -> float:
        """Return 1 + ``sites`` calls in each step and one in the last."""
        return float((1 + self.sites) * (len(times) - 2) + 1) if blanks else 0.0

    def step(self, x: Sequences, t: PerSample, s: PerSample, rows: Rows) -> Sequences:
        """Draw the step and its corrections."""
        x = self.predictor.step(x, t, s, rows)
        sigma, row = rows.schedule.sigma(s), torch.arange(len(x), device=x.device)
        for k in range(self.sites):
            u = rows.rng(x.shape[-1], rows.step * self.sites + k, POSITION)
            keys = torch.where(rows.free, u[..., 0], -1.0)
            at = row, keys.argmax(-1)  # the free position with the largest of independent uniforms is a uniform choice
            score = rows.model.log_score_at(rows.hidden(x, sigma)[at], x[at], sigma).exp()
            drawn = draws.sample_inverse_cdf(score, u[at][:, 1])
            x = x.index_put(at, torch.where(rows.free[at], drawn, x[at]))
        return x
