"""Left-to-right sampling of autoregressive models, with the same interface as the diffusion samplers."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, final

import torch
from jaxtyping import Float
from torch import Tensor

from sedd import draws
from sedd.draws import CounterRNG
from sedd.parameterization import HasNoise
from sedd.samplers.loop import Prompt, Sampler, State
from sedd.samplers.model import SamplingModel


@final
@dataclass(frozen=True)
class LeftToRight(Sampler):
    """One token after another, each given those before it; the beginning may be given."""

    order: ClassVar[float] = torch.inf
    assumes: ClassVar[str] = "an autoregressive model"
    supports_infinite_steps: ClassVar[bool] = True

    def _states(
        self, model: SamplingModel, prompt: Prompt, times: Float[Tensor, " n"], rng: CounterRNG
    ) -> Iterator[State]:
        """Yield a state for every token; the grid is not used."""
        blank = prompt.blank
        before_text = blank[:, :-1] & ~blank[:, 1:]
        if (before_text if prompt.valid is None else before_text & prompt.valid[:, 1:]).any():
            raise ValueError("an autoregressive model goes on from a beginning; it cannot fill a gap before a text")
        x = torch.where(blank, 0, prompt.given)
        u, reveal_step = rng(x.shape[-1])[..., 0], torch.zeros_like(x)
        sigma = torch.zeros(len(x), device=x.device)
        yield State(x, reveal_step, 0)
        for i in range(x.shape[-1]):
            if not (is_open := blank[:, i]).any():
                continue
            hidden = model.compute_hidden(x[:, : i + 1], sigma)[:, i]
            p = model.log_next_at(hidden).exp()
            x, reveal_step = x.clone(), reveal_step.clone()
            x[:, i] = torch.where(is_open, draws.sample_inverse_cdf(p, u[:, i]), x[:, i])
            reveal_step[:, i] = torch.where(is_open, i + 1, 0)
            yield State(x, reveal_step, i + 1)

    def expected_calls(self, model: HasNoise, times: Float[Tensor, " n"], blanks: int) -> float:
        """Return one call per token."""
        return float(blanks)
