"""A model made bolder or narrower: temperature, top-k and top-p on p(x_0 | x_t), never on rates.  [§9]"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from sedd.diffusion.parameterization import HiddenStateDenoiser, HiddenStateModel
from sedd.diffusion.process import Process
from sedd.diffusion.reverse import denoised


@final
@dataclass(frozen=True)
class Warping:
    """How a law of tokens is sharpened: temperature first, then top-k, then top-p."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None

    def __post_init__(self) -> None:
        if not 0 < self.temperature < torch.inf:
            raise ValueError(f"temperature is {self.temperature}; it must be above 0 (near 0 is the likeliest token)")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}; it is a share and must lie in (0, 1]")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k is {self.top_k}; at least 1 token must be left to draw")

    @property
    def none(self) -> bool:
        """Whether a law is left as it is."""
        return self == Warping()

    def __call__(self, log_p: Float[Tensor, "k N"]) -> Float[Tensor, "k N"]:
        """log p^(1/temperature), of the k likeliest tokens, and of the fewest whose share reaches top_p."""
        log_p = (log_p / self.temperature).log_softmax(-1)
        if self.top_k is not None and self.top_k < log_p.shape[-1]:
            least = log_p.topk(self.top_k, -1).values[:, -1:]
            log_p = log_p.masked_fill(log_p < least, -torch.inf).log_softmax(-1)
        if self.top_p < 1:
            ordered = log_p.sort(-1, descending=True)
            before = ordered.values.exp().cumsum(-1) - ordered.values.exp()
            dropped = torch.zeros_like(before, dtype=torch.bool).scatter(-1, ordered.indices, before >= self.top_p)
            log_p = log_p.masked_fill(dropped, -torch.inf).log_softmax(-1)
        return log_p


@final
@dataclass(frozen=True)
class Tempered:
    """A model whose prediction of the clean token is sharpened; masks are revealed at the pace they were.

    It samples another law than the model's, on purpose.
    """

    model: HiddenStateModel
    process: Process
    warping: Warping

    @property
    def depends_on_sigma(self) -> bool:
        """As the model's."""
        return self.model.depends_on_sigma

    def hidden(
        self, x_t: Int[Tensor, "b L"], sigma: Float[Tensor, " b"], valid: Bool[Tensor, "b L"] | None = None
    ) -> Float[Tensor, "b L h"]:
        """As the model's."""
        return self.model.hidden(x_t, sigma, valid)

    def log_mean_at(
        self, hidden: Float[Tensor, "k h"], x_t: Int[Tensor, " k"], sigma: Float[Tensor, " k"]
    ) -> Float[Tensor, "k N"]:
        """The tempered law of the clean token."""
        if isinstance(self.model, HiddenStateDenoiser):
            return self.warping(self.model.log_mean_at(hidden, x_t, sigma))
        log_score = self.model.log_score_at(hidden, x_t, sigma)
        return self.warping(denoised(self.process, log_score[:, None], x_t[:, None], sigma)[:, 0].log())

    def log_score_at(
        self, hidden: Float[Tensor, "k h"], x_t: Int[Tensor, " k"], sigma: Float[Tensor, " k"]
    ) -> Float[Tensor, "k n"]:
        """The score of the tempered law."""
        log_mean, log_score = self.log_mean_at(hidden, x_t, sigma), self.model.log_score_at(hidden, x_t, sigma)
        return self.process.retold(log_score[:, None], log_mean[:, None], x_t[:, None], sigma)[:, 0]

    def __call__(self, x_t: Int[Tensor, "*b L"], sigma: Float[Tensor, "*b"]) -> Float[Tensor, "*b L n"]:
        """The score of the tempered law, everywhere: for proofs."""
        return everywhere(self.model.hidden, self.log_score_at, x_t, sigma)

    def log_mean(self, x_t: Int[Tensor, "*b L"], sigma: Float[Tensor, "*b"]) -> Float[Tensor, "*b L N"]:
        """The tempered law of the clean token, everywhere: for proofs."""
        return everywhere(self.model.hidden, self.log_mean_at, x_t, sigma)


def everywhere(
    look: Callable[..., Tensor], read: Callable[..., Tensor], x_t: Int[Tensor, "*b L"], sigma: Float[Tensor, "*b"]
) -> Float[Tensor, "*b L _"]:
    """What a reader says of every position."""
    rows, length = x_t.reshape(-1, x_t.shape[-1]), x_t.shape[-1]
    hidden = look(rows, sigma.reshape(-1)).flatten(0, 1)
    return read(hidden, rows.flatten(), sigma.reshape(-1).repeat_interleave(length)).view(*x_t.shape, -1)
