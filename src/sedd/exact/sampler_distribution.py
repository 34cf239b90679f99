"""The distribution of a sampler's output by enumeration, derived from what the sampler uses to draw.

Nothing is drawn. A distribution is a vector over `all_sequences` of states. For samplers with factorised
steps the weights of a step are enough; for the others it takes their stages, rates, choice of positions or plan.
"""

import math
from functools import singledispatch
from itertools import pairwise, permutations
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import one_hot, softplus

from sedd.exact.distribution import all_sequences, expm, neighbours, propagate
from sedd.process import Process, at_token
from sedd.reverse import denoising_table, normalize_probs
from sedd.samplers.confidence import ConfidenceSampler, Confident, EntropyBounded
from sedd.samplers.correction import Gibbs, Remask
from sedd.samplers.first_hitting import FirstHitting, LeftToRight, Ordered
from sedd.samplers.grid import FactorizedSampler, Theta
from sedd.samplers.loop import GridSampler, Sampler, Steps, sigma_of_masked_fraction


@singledispatch
def sample_distribution(
    sampler: Sampler, model: Any, given: Int[Tensor, " L"], steps: Steps
) -> Float[Tensor, " states"]:
    """Return the distribution that ``sampler.sample`` draws from where −1 in ``given`` is to be filled.

    Another kind of sampler is added by ``sample_distribution.register``, or by ``step_distribution.register`` for a
    `GridSampler`. ``steps`` are those of `Sampler.trajectory`.
    """
    raise ValueError(f"{type(sampler).__name__} has no enumeration; add one by sample_distribution.register")


@singledispatch
def step_distribution(
    sampler: GridSampler,
    model: Any,
    p: Float[Tensor, " states"],
    blank: Bool[Tensor, " L"],
    t: Float[Tensor, " states"],
    s: Float[Tensor, " states"],
) -> Float[Tensor, " states"]:
    """Return the distribution after one ``sampler.step`` from time t to s, given the one before it."""
    raise ValueError(f"{type(sampler).__name__} has no enumeration; add one by step_distribution.register")


@sample_distribution.register
def _grid(sampler: GridSampler, model: Any, given: Tensor, steps: Steps) -> Tensor:
    """Propagate through all steps of a grid, the last of which draws from p(x_0 | x)."""
    sampler.check(model)
    p, x, _ = _start(model, given)
    grid = sampler.grid(sampler.times(steps))
    for t, s in list(pairwise(grid))[:-1]:
        p = step_distribution(sampler, model, p, given < 0, t.expand(len(x)), s.expand(len(x)))
    return _last_step(model, p, given < 0, grid[-2])


def _start(model: Any, given: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the distribution a sampler starts from, noise at −1 and the given tokens; the sequences; their noise."""
    x, masks = _noisy(model, given < 0)
    noise = model.process.log_prior(x, torch.tensor(torch.inf, dtype=torch.float64).expand(x.shape)).exp()
    return torch.where(given < 0, noise, (x == given).double()).prod(-1), x, masks


def _noisy(model: Any, blank: Tensor) -> tuple[Tensor, Tensor]:
    """Return every sequence, and where in it blank positions are noise."""
    x = all_sequences(model.process.num_states, len(blank))
    return x, blank & model.process.is_noisy(x)


def _denoised(model: Any, x: Tensor, sigma: Tensor) -> Tensor:
    """Return the probabilities of the step to σ = 0 from every sequence."""
    return denoising_table(model, model.process, x, sigma.expand(len(x)))


def propagate_free(p: Tensor, table: Tensor, free: Tensor) -> Tensor:
    """Return the distribution after a step in which free positions follow the table and all others stay."""
    stay = one_hot(all_sequences(table.shape[-1], table.shape[-2]), table.shape[-1]).to(table.dtype)
    return propagate(p, torch.where(free[..., None], table, stay))


def _last_step(model: Any, p: Tensor, blank: Tensor, t: Tensor) -> Tensor:
    x, noisy = _noisy(model, blank)
    return propagate_free(p, _denoised(model, x, model.schedule.sigma(t)), noisy)


def transition_table(
    sampler: FactorizedSampler, model: Any, x: Int[Tensor, "*b L"], t: Float[Tensor, "*b"], s: Float[Tensor, "*b"]
) -> Float[Tensor, "*b L n"]:
    """Return the probabilities of every state of every position in the step from time t to s."""
    sigma = model.schedule.sigma(t)
    output = (model(x, sigma) if sampler.uses_score else model.log_mean(x, sigma)).flatten(0, -2)
    t, s = (a[..., None].expand(x.shape).reshape(-1) for a in (t, s))
    p = sampler.weights(model, output, x.reshape(-1), t, s).clamp_min(0).view(*x.shape, -1)
    stay = one_hot(x, model.process.num_states).to(p.dtype)
    p = torch.where(model.process.is_noisy(x)[..., None], p, stay)
    return p / p.sum(-1, keepdim=True)


@step_distribution.register
def _factorized(sampler: FactorizedSampler, model: Any, p: Tensor, blank: Tensor, t: Tensor, s: Tensor) -> Tensor:
    return propagate_free(p, transition_table(sampler, model, _noisy(model, blank)[0], t, s), blank)


@step_distribution.register
def _theta(sampler: Theta, model: Any, p: Tensor, blank: Tensor, t: Tensor, s: Tensor) -> Tensor:
    """Enumerate starts and midpoints: the second stage depends on both."""
    x, free = _noisy(model, blank)
    log_score_t, log_score_m = (model(x, model.schedule.sigma(a)) for a in (t, sampler.midpoint(t, s)))
    stay = one_hot(x, log_score_t.shape[-1]).to(log_score_t.dtype)
    first = torch.where(free[..., None], normalize_probs(sampler.first_stage(model, log_score_t, x, t, s)), stay)
    start, middle = torch.cartesian_prod(torch.arange(len(x)), torch.arange(len(x))).unbind(-1)
    weight = p[start] * at_token(first[start], x[middle]).prod(-1)
    second = normalize_probs(
        sampler.second_stage(model, log_score_t[start], log_score_m[middle], x[middle], t[start], s[start])
    )
    return propagate(weight, torch.where(free[middle, :, None], second, stay[middle]))


@step_distribution.register
def _gibbs(sampler: Gibbs, model: Any, p: Tensor, blank: Tensor, t: Tensor, s: Tensor) -> Tensor:
    """Apply the predictor, then ``sites`` times the mean over positions of one Gibbs update."""
    p, x = step_distribution(sampler.predictor, model, p, blank, t, s), _noisy(model, blank)[0]
    table = normalize_probs(model(x, model.schedule.sigma(s)).exp())
    for _ in range(sampler.sites if blank.any() else 0):
        p = torch.stack([propagate_free(p, table, site) for site in torch.eye(len(blank)).bool()[blank]]).mean(0)
    return p


@step_distribution.register
def _remask(sampler: Remask, model: Any, p: Tensor, blank: Tensor, t: Tensor, s: Tensor) -> Tensor:
    x, noisy = _noisy(model, torch.ones_like(blank))
    remasked, revealed = (a[..., None, None] for a in sampler.rates(model, t, s))
    mask, token = (one_hot(state, model.process.num_states) for state in (torch.full_like(x, model.process.mask), x))
    of_mask = revealed * _denoised(model, x, model.schedule.sigma(t)) + (1 - revealed) * mask
    return propagate_free(p, torch.where(noisy[..., None], of_mask, (1 - remasked) * token + remasked * mask), blank)


def _mask_uncertainty(sampler: ConfidenceSampler, model: Any, table: Tensor, masks: Tensor) -> Tensor:
    """Return the uncertainty at the masks of every sequence, from the table of p(x_0 | x)."""
    uncertainty = sampler.ranked_uncertainty(table[..., : model.process.vocab_size])
    return sampler.without_offset(torch.where(masks, uncertainty, math.inf))


@step_distribution.register
def _confident(sampler: Confident, model: Any, p: Tensor, blank: Tensor, t: Tensor, s: Tensor) -> Tensor:
    """Enumerate sequences, each with the positions that it would choose."""
    x, masks = _noisy(model, blank)
    table, left = _denoised(model, x, model.schedule.sigma(t)), sampler.masks_left(model, blank.sum().expand(len(x)), s)
    return propagate_free(p, table, sampler.choose(_mask_uncertainty(sampler, model, table, masks), left))


@sample_distribution.register
def _first_hitting(sampler: FirstHitting, model: Any, given: Tensor, steps: Steps) -> Tensor:
    """Each step reveals a mask with the probability of the plan; without a grid, in a random order."""
    sampler.check(model)
    times = sampler.times(steps)
    if not len(times):
        return sample_distribution(Ordered(), model, given, None)
    p, x, masks = _start(model, given)
    # the masked share at the start of each step
    masked = sampler.reveal_probabilities(model, times).flip(0).cumsum(0).flip(0)
    for k, t in enumerate(times[:-2]):
        revealed = 1 - masked[k + 1] / masked[k]
        table = _denoised(model, x, model.schedule.sigma(t)) * revealed
        table[..., -1] = 1 - revealed
        p = propagate_free(p, table, masks)
    return _last_step(model, p, given < 0, times[-2])


@sample_distribution.register
def _ordered(sampler: Ordered, model: Any, given: Tensor, steps: Steps) -> Tensor:
    """Average over all orders of positions."""
    sampler.check(model)
    start, x, masks = _start(model, given)
    times, blanks = sampler.times(steps), (given < 0).nonzero().squeeze(-1).tolist()
    groups = min(len(times) - 1, len(blanks)) if len(times) else len(blanks)
    orders = {"random": list(permutations(blanks)), "forward": [tuple(blanks)], "backward": [tuple(blanks[::-1])]}
    distributions = []
    for order in orders[sampler.direction]:
        p, left = start, len(order)
        for group in range(groups):
            now = torch.tensor([i for rank, i in enumerate(order) if rank * groups // len(order) == group])
            sigma = sigma_of_masked_fraction(torch.tensor(left / len(given), dtype=torch.float64), model.schedule)
            p = propagate_free(p, _denoised(model, x, sigma), masks & torch.zeros_like(masks).index_fill(1, now, True))
            left -= len(now)
        distributions.append(p)
    return torch.stack(distributions).mean(0)


@sample_distribution.register
def _entropy_bounded(sampler: EntropyBounded, model: Any, given: Tensor, steps: Steps) -> Tensor:
    """Enumerate entropy-bounded sampling; one call per open position always suffices."""
    sampler.check(model)
    p, x, masks = _start(model, given)
    table = _denoised(model, x, sigma_of_masked_fraction(masks.sum(-1) / len(given), model.schedule))
    chosen = sampler.choose(_mask_uncertainty(sampler, model, table, masks))
    for _ in range(int((given < 0).sum())):
        p = propagate_free(p, table, chosen)
    return p


@sample_distribution.register
def _left_to_right(sampler: LeftToRight, model: Any, given: Tensor, steps: Steps) -> Tensor:
    """Π p(x_i | x_1 … x_{i−1}) over the tokens that are not given, over sequences of tokens."""
    x = all_sequences(model.process.vocab_size, len(given))
    p = at_token(model.log_next(x).exp(), x)
    return torch.where(given < 0, p, (x == given).to(p.dtype)).prod(-1)


def reverse_distribution(
    model: Any, process: Process, length: int, *, sigma_max: float = 20.0, sigma_min: float = 1e-16, steps: int = 120
) -> Float[Tensor, " sequences"]:
    """Return p(x_0) of every clean sequence under the reverse process of ``model``, from pure noise.

    Per unit of noise, x jumps to its neighbour with x_i → y at rate Q(x_i, y)·s(x)_{i,y}. The equation of the
    probabilities is solved by the fourth-order Magnus method (Blanes et al. 2008, arXiv 0810.5488) in
    v = log(e^σ − 1), for which rates are bounded at both ends. The schedule changes the speed, not the path. Of the
    data e^−``sigma_max`` is left at the start, and a denoiser leaves about a share ``sigma_min`` of the tokens noisy.
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
    sigma = softplus(v, threshold=100.0)
    x = all_sequences(process.num_states, length)
    rows = x.repeat(len(v), 1), sigma.repeat_interleave(len(x))
    with torch.no_grad():
        score = model(*rows).double().exp().view(len(v), *x.shape, process.num_states)
    rates = process.rate(x[..., None], torch.arange(process.num_states)).scatter(-1, x[..., None], 0)
    rates = torch.where(rates > 0, rates * score, 0) * -torch.expm1(-sigma)[:, None, None, None]
    total, source = torch.zeros(len(v), len(x), len(x), dtype=torch.float64), torch.arange(len(x))
    target = neighbours(x, process.num_states)
    total[:, target, source[:, None, None]] = rates  # each pair of neighbours once, and 0 from a sequence to itself
    return total - torch.diag_embed(total.sum(1))
