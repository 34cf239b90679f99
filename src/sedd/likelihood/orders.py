"""The likelihood of a time-free denoiser of masks: a mixture over orders, exactly or between two bounds.  [§8]

First-hitting sampling without a grid draws an order o of the positions and then each token given those before it, so
it generates p(x) = E_o p(x | o), the mean over all L! orders of p(x | o) = Π_j p(x at o_j | x at o_1 … o_{j−1}).

- K random orders: E[−log (1/K) Σ_k p(x | o_k)] ≥ −log p(x), decreasing in K to −log p(x) (Burda et al. 2015,
  "Importance Weighted Autoencoders", arXiv 1509.00519). K = 1 is the any-order bound.
- The order in which the model itself generated x has the distribution p(o | x). With it as one of the K orders, the
  mean of the reciprocal is 1/p(x), and E[−log (1/K) Σ_k p(x | o_k)] ≤ −log p(x), increasing in K (Grosse et al. 2015,
  "Sandwiching the marginal likelihood using bidirectional Monte Carlo", arXiv 1511.02543).
- All orders, for short sequences: Σ_o p(x | o) is a sum over paths through the 2^L sets of revealed tokens.
"""

import math
from dataclasses import dataclass
from typing import Any, ClassVar, final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from sedd.draws import CounterRNG
from sedd.likelihood.estimators import BoundTerms, Draw, Estimator, Inputs, diffusion_only
from sedd.process import Process, at_token
from sedd.schema import check_count

CHUNK = 256
"""Sets of revealed tokens that are evaluated at a time."""
Orders = int | str
"""A number of random orders, or ``all``."""
MAX_LENGTH = 16
"""Most tokens for ``all``: there are 2^L sets of revealed tokens, each of which takes one network call."""


def check_orders(orders: Orders, estimator: str | None) -> None:
    """Reject a number of orders below 1, and an estimator that has other draws."""
    if orders != "all" and (not isinstance(orders, int) or orders < 1):
        raise ValueError(f"orders is {orders!r}; give a number of 1 or more, or all")
    if isinstance(orders, int):
        check_count("orders", orders)
    if estimator not in (None, "any-order"):
        raise ValueError(f"orders are those of estimator any-order, and estimator is {estimator!r}; leave one out")


def check_mixture(denoises_masks: bool, depends_on_sigma: bool, given: str) -> None:
    """Reject a model, described by ``given``, whose distribution is not a mixture over orders."""
    if not denoises_masks or depends_on_sigma:
        given += " that depends on σ" if depends_on_sigma else ""
        raise ValueError(
            "orders is for a time-free denoiser under absorbing noise, whose distribution is a mixture over orders, "
            f"and this model is {given}; leave orders out, or train one with --objective lambda-dce"
        )


def random_orders(rng: CounterRNG, length: int, count: int) -> Int[Tensor, "b count length"]:
    """Draw ``count`` orders of the positions for each row."""
    return torch.stack([rng(length, step=k)[..., 0].argsort(-1) for k in range(count)], 1)


def log_p_in_order(
    model: Any, process: Process, x_0: Int[Tensor, "b L"], order: Int[Tensor, "b L"]
) -> Float[Tensor, " b"]:
    """Return Σ_j log p(x at o_j | x at o_1 … o_{j−1}), by one network call per token; the head runs at o_j only.

    The model is a time-free denoiser of masks, so that σ = 1 stands for every noise level.
    """
    x_t, rows = torch.full_like(x_0, process.mask), torch.arange(len(x_0), device=x_0.device)
    total = torch.zeros(len(x_0), dtype=torch.float64, device=x_0.device)
    sigma = torch.ones(len(x_0), device=x_0.device)
    for position in order.unbind(-1):
        hidden = model.hidden(x_t, sigma)[rows, position]
        log_p = model.log_mean_at(hidden, x_t[rows, position], sigma)
        token = x_0[rows, position]
        total += log_p.gather(-1, token[:, None]).squeeze(-1).double()
        x_t[rows, position] = token
    return total


def log_p_in_orders(
    model: Any, process: Process, x_0: Int[Tensor, "b L"], orders: Int[Tensor, "b K L"]
) -> Float[Tensor, "b K"]:
    """Return log p(x | o) in several orders."""
    return torch.stack([log_p_in_order(model, process, x_0, order) for order in orders.unbind(1)], -1)


def minus_log_mean(log_p: Float[Tensor, "b K"]) -> Float[Tensor, " b"]:
    """−log (1/K) Σ_k p_k."""
    return math.log(log_p.shape[-1]) - torch.logsumexp(log_p, -1)


@final
@dataclass(frozen=True)
class ImportanceWeightedEstimator(Estimator):
    """−log of the mean of p(x | o) over ``orders`` random orders: an upper bound on −log p, decreasing in their number.

    A draw is one such mean, and takes orders·L network calls. Its times are not used.
    """

    process: Process
    orders: int

    def calls_per_draw(self, length: int) -> int:
        return self.orders * length

    def inputs(self, draw: Draw) -> Inputs:
        return (random_orders(draw.rng, draw.x_0.shape[-1], self.orders),)

    def nats(self, model: Any, x_0: Int[Tensor, "b L"], *inputs: Tensor) -> BoundTerms:
        return diffusion_only(minus_log_mean(log_p_in_orders(model, self.process, x_0, inputs[0])))


@final
@dataclass(frozen=True)
class AllOrdersEstimator(Estimator):
    """−log p of the mixture over all orders: exact, with 2^L network calls, for at most 16 tokens.

    With f(S) the mean of Π p over all orders of the positions S, f(S) = (1/|S|) Σ_{i∈S} f(S∖i)·p(x_i | x at S∖i).
    """

    is_exact: ClassVar[bool] = True
    process: Process

    def draws_of(self, length: int, draws: int) -> int:
        if length > MAX_LENGTH:
            raise ValueError(
                f"orders is all, and a sequence has {length} tokens; the sum takes 2^{length} network calls, and at "
                f"most {MAX_LENGTH} tokens are allowed: give a number of orders"
            )
        return 1

    def calls_per_draw(self, length: int) -> int:
        return (1 << length) - 1  # one for each set of revealed tokens except the full one

    def inputs(self, draw: Draw) -> Inputs:
        return ()

    def nats(self, model: Any, x_0: Int[Tensor, "b L"], *inputs: Tensor) -> BoundTerms:
        return diffusion_only(torch.stack([-self._log_p(model, row) for row in x_0]))

    def _log_p(self, model: Any, x_0: Int[Tensor, " L"]) -> Float[Tensor, ""]:
        """log f of all positions; a set is the number whose bits are its positions."""
        length = len(x_0)
        log_f = torch.full((2**length,), -torch.inf, dtype=torch.float64, device=x_0.device)
        log_f[0] = 0
        bit = 2 ** torch.arange(length, device=x_0.device)
        revealed = (torch.arange(2**length, device=x_0.device)[:, None] & bit) > 0
        size = revealed.sum(-1)
        for count in range(length):
            for sets in (size == count).nonzero().squeeze(-1).split(CHUNK):
                x_t = torch.where(revealed[sets], x_0, self.process.mask)
                sigma = torch.ones(len(x_t), device=x_t.device)
                log_p = at_token(model.log_mean(x_t, sigma), x_0.expand(x_t.shape)).double()
                for i in range(length):
                    of = ~revealed[sets, i]
                    larger = sets[of] + bit[i]
                    step = log_f[sets[of]] + log_p[of, i] - math.log(count + 1)
                    log_f[larger] = torch.logaddexp(log_f[larger], step)
        return log_f[-1]


def own_sample_bounds(
    model: Any, process: Process, x_0: Int[Tensor, "b L"], order: Int[Tensor, "b L"], orders: int, rng: CounterRNG
) -> tuple[Float[Tensor, " b"], Float[Tensor, " b"]]:
    """Return a lower and an upper bound on −log p of the model's own samples, by (orders + 1)·L network calls each.

    Each holds in expectation over the orders, not for every single one. ``order`` is the order in which the model
    generated the tokens of each sample, and ``orders`` the number in each mean.
    """
    others = log_p_in_orders(model, process, x_0, random_orders(rng, x_0.shape[-1], orders))
    own = log_p_in_order(model, process, x_0, order)
    return minus_log_mean(torch.cat([own[:, None], others[:, 1:]], -1)), minus_log_mean(others)
