"""The distribution that a model's reverse process generates in continuous time, by enumeration.  [§3]

References: the reverse process, Campbell et al. 2022, "A Continuous Time Framework for Discrete Denoising Models",
arXiv 2205.14987; the integrator, Blanes et al. 2008, "The Magnus expansion and some of its applications",
arXiv 0810.5488.
"""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from sedd.exact.distribution import all_sequences, expm, index_of
from sedd.process import Process


def reverse_distribution(
    model: Any, process: Process, length: int, *, sigma_max: float = 20.0, sigma_min: float = 1e-16, steps: int = 120
) -> Float[Tensor, " sequences"]:
    """Return p(x_0) of every clean sequence under the reverse process of ``model``, from pure noise.

    Per unit of noise, x jumps to its neighbour with x_i → y at rate Q(x_i, y)·s(x)_{i,y}. The equation of the
    probabilities is solved by the fourth-order Magnus method in v = log(e^σ − 1), for which rates are bounded at both
    ends. The schedule does not matter: it changes the speed, not the path.

    Args:
        model: A model of log-scores.
        process: Its noise process.
        length: Tokens per sequence.
        sigma_max: The noise to start from; of the data e^−20 is left in it.
        sigma_min: The noise to end at; a denoiser leaves about that share of tokens noisy.
        steps: Steps of the solver.
    """
    ends = torch.tensor([sigma_max, sigma_min], dtype=torch.float64)
    first, last = torch.log(torch.expm1(ends)).tolist()
    h = (last - first) / steps
    middle = first + h * (torch.arange(steps, dtype=torch.float64) + 0.5)
    a, b = (_generators(model, process, length, middle + sign * h * 3**0.5 / 6) for sign in (-1, 1))
    x = all_sequences(process.num_states, length)
    p = process.log_prior(x, torch.full(x.shape, torch.inf, dtype=torch.float64)).sum(-1).exp()
    for propagator in expm(-h / 2 * (a + b) + 3**0.5 / 12 * h**2 * (b @ a - a @ b)):
        p = propagator @ p
    return p[(x < process.vocab_size).all(-1)]


def _generators(model: Any, process: Process, length: int, v: Float[Tensor, " n"]) -> Float[Tensor, "n states states"]:
    """Return, at each v, the rates per unit of v from every sequence (columns) to every other, and minus their sums."""
    sigma = torch.nn.functional.softplus(v, threshold=100.0)
    x = all_sequences(process.num_states, length)
    rows = x.repeat(len(v), 1), sigma.repeat_interleave(len(x))
    with torch.no_grad():
        score = model(*rows).double().exp().view(len(v), *x.shape, process.num_states)
    rates = process.rates_into(x, torch.float64).scatter(-1, x[..., None], 0)
    rates = torch.where(rates > 0, rates * score, 0) * -torch.expm1(-sigma)[:, None, None, None]
    total, source = torch.zeros(len(v), len(x), len(x), dtype=torch.float64), torch.arange(len(x))
    for i in range(length):
        for y in range(process.num_states):
            target = x.index_fill(1, torch.tensor([i]), y)
            total[:, index_of(target, process.num_states), source] += rates[:, :, i, y]
    return total - torch.diag_embed(total.sum(1))
