"""Temperature, top-k and top-p (nucleus) sampling, applied to p(x_0 | x_t) and never to rates.  [§9]"""

from dataclasses import dataclass
from typing import Any, final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from sedd.parameterization import PerRow
from sedd.samplers.model import Hidden, TableAt, TokenAt, Wrapper, implied_probs_at, is_denoiser, log_score_at
from sedd.sampling_settings import check_warping

COLDEST = 1e-30  # lower temperatures give the same distribution, but log p divided by them may exceed float32


@final
@dataclass(frozen=True)
class Warping:
    """A transformation of distributions over tokens: temperature, then top-k, then top-p.

    Samples of a warped model do not have the model's distribution. Masks are revealed at the same rate as before.

    References: top-k, Fan et al. 2018, "Hierarchical Neural Story Generation", arXiv 1805.04833; top-p, Holtzman et al.
    2019, "The Curious Case of Neural Text Degeneration", arXiv 1904.09751.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None

    def __post_init__(self) -> None:
        check_warping(self.temperature, self.top_p, self.top_k)

    def __call__(self, log_p: TableAt) -> TableAt:
        """Return log p^(1/temperature), limited to the top_k likeliest tokens and to the fewest that reach top_p."""
        log_p = (log_p / max(self.temperature, COLDEST)).log_softmax(-1)
        if self.top_k is not None and self.top_k < log_p.shape[-1]:
            least = log_p.topk(self.top_k, -1).values[:, -1:]
            log_p = log_p.masked_fill(log_p < least, -torch.inf).log_softmax(-1)
        if self.top_p < 1:
            ordered = log_p.sort(-1, descending=True)
            before = ordered.values.exp().cumsum(-1) - ordered.values.exp()
            # in float32 the least top_p are 0; the likeliest token, before which there is nothing, always stays
            outside = (before >= self.top_p) & (before > 0)
            dropped = torch.zeros_like(before, dtype=torch.bool).scatter(-1, ordered.indices, outside)
            log_p = log_p.masked_fill(dropped, -torch.inf).log_softmax(-1)
        return log_p


@final
class Warped(Wrapper):
    """A model with a temperature, top-p or top-k: ``Warped(model, temperature=0.8)``.

    p(x_0 | x) is warped, and the log-score follows from it. Without masks that is the score of a denoiser; masks are
    revealed at the rate of the model's own score.

    Args:
        model: The model, of noisy tokens or autoregressive.
        temperature: Above 0; below 1 it sharpens the distribution.
        top_p: Draw from the fewest tokens whose probabilities reach this sum.
        top_k: Draw from this many tokens at most.
    """

    def __init__(self, model: Any, temperature: float = 1.0, top_p: float = 1.0, top_k: int | None = None) -> None:
        super().__init__(model)
        self.warping = Warping(temperature, top_p, top_k)
        self.is_denoiser = True  # its score follows from p(x_0 | x)

    def log_mean_at(self, hidden: Hidden, x_t: TokenAt, sigma: PerRow) -> TableAt:
        if is_denoiser(self.model):
            return self.warping(self.model.log_mean_at(hidden, x_t, sigma))
        return self.warping(implied_probs_at(self.model, hidden, x_t, sigma).log())

    def log_score_at(self, hidden: Hidden, x_t: TokenAt, sigma: PerRow) -> TableAt:
        """Return the log-score that follows from the warped p(x_0 | x_t).

        Where only masks are noise it is s_y = S·p_y with the sum S = Σ_y s_y of the model's score, which a score model
        is free to choose: masks are revealed at the same rate as before.
        """
        log_mean = self.log_mean_at(hidden, x_t, sigma)
        if not self.process.only_masks:
            return self.process.mean_score(log_mean[:, None], x_t[:, None], sigma)[:, 0]
        log_score = log_score_at(self.model, hidden, x_t, sigma)
        return torch.cat([log_mean + log_score[..., :-1].logsumexp(-1, keepdim=True), log_score[..., -1:]], -1)

    def log_next_at(self, hidden: Hidden) -> TableAt:
        return self.warping(self.model.log_next_at(hidden))

    def log_next(self, x_0: Int[Tensor, "*b L"]) -> Float[Tensor, "*b L N"]:
        log_p: Tensor = self.model.log_next(x_0)
        return self.warping(log_p.flatten(0, -2)).view(log_p.shape)
