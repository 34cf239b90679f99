"""The sampler of autoregressive models, so that the baseline is used as the others are."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import ClassVar, final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from sedd import exact
from sedd.diffusion import categorical
from sedd.diffusion.rng import CounterRNG
from sedd.sampling.base import Prompt, Sampler, State
from sedd.sampling.caching import Asked
from sedd.sampling.warping import Warping


@final
@dataclass(frozen=True)
class LeftToRight(Sampler):
    """One token after another, each given those before it; a beginning may be given."""

    assumes: ClassVar[str] = "an autoregressive model"
    endless: ClassVar[bool] = True
    warping: Warping = field(default_factory=Warping)

    @property
    def order(self) -> float:
        """Exact."""
        return torch.inf

    def run(self, prompt: Prompt, times: Float[Tensor, " n"], chance: CounterRNG, asked: Asked) -> Iterator[State]:
        """A state for every token; the grid is not used."""
        blank = prompt.blank
        before_text = blank[:, :-1] & ~blank[:, 1:]
        if (before_text if prompt.valid is None else before_text & prompt.valid[:, 1:]).any():
            raise ValueError("an autoregressive model goes on from a beginning; it cannot fill a gap before a text")
        x = torch.where(blank, 0, prompt.given)
        u, when = chance(x.shape[-1])[..., 0], torch.zeros_like(x)
        told = torch.zeros(len(x), device=x.device)
        yield State(x, when, 0)
        for i in range(x.shape[-1]):
            if not (here := blank[:, i]).any():
                continue
            hidden = asked.fresh(x[:, : i + 1], told)[:, i]
            log_p = asked.model.log_next_at(hidden)  # type: ignore[attr-defined]
            p = self.warping(log_p).exp()
            x, when = x.clone(), when.clone()
            x[:, i] = torch.where(here, categorical.invert(p, u[:, i]), x[:, i])
            when[:, i] = torch.where(here, i + 1, 0)
            yield State(x, when, i + 1)

    def law(self, given: Int[Tensor, " L"], times: Float[Tensor, " n"]) -> Float[Tensor, " states"]:
        """Π p(x_i | x_1 … x_{i−1}) over what is not given."""
        x = exact.every(self.process.vocab_size, len(given))
        log_p = self.model.log_next(x).flatten(0, 1)  # type: ignore[attr-defined]
        p = self.warping(log_p).exp().view(*x.shape, -1).gather(-1, x[..., None]).squeeze(-1)
        return torch.where(given < 0, p, (x == given).to(p.dtype)).prod(-1)

    def expected_calls(self, times: Float[Tensor, " n"], blanks: int) -> float:
        """One a token."""
        return float(blanks)
