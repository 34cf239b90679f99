"""The expected value of every objective by its definition, as a sum over all data and noise.  [§4, §6]

Each is at one noise level; `exact.integrate` and a schedule's rate give the integrals. The training code in
`objectives` is tested against these sums.
"""

import itertools
from typing import Any

import torch
from torch import Tensor

from sedd.exact import Distribution, all_sequences, expect, index_of, pairs, transition_matrix
from sedd.exact.distribution import Scalar, neighbours
from sedd.exact.objectives import denoising_score_entropy as denoising_score_entropy
from sedd.process import Process, at_token


def _scores(model: Any, p_data: Distribution, process: Process, sigma: Scalar) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x, p_σ(x), log s(x) and Q(x_i, y) without its diagonal, for every noisy sequence x."""
    x = all_sequences(process.num_states, p_data.length)
    rates = process.rate_matrix()
    rates = rates - rates.diagonal().diag()
    return x, p_data.at(process, sigma), model(x, sigma.expand(len(x))), rates[x]


def _mean(p: Tensor, values: Tensor) -> Tensor:
    """Return Σ_x p(x)·Σ values(x) over x of positive probability."""
    values = values.flatten(1).sum(-1)
    return torch.where(p > 0, p * values, 0).sum()


def _score_entropy(log_s: Tensor, a: Tensor) -> Tensor:
    return log_s.exp() - torch.where(a > 0, a * log_s, 0) + torch.xlogy(a, a) - a


def _square(log_s: Tensor, a: Tensor) -> Tensor:
    return (log_s.exp() - a) ** 2 / 2


def _explicit(model: Any, p_data: Distribution, process: Process, sigma: Scalar, each: Any) -> Scalar:
    x, p, log_s, rates = _scores(model, p_data, process, sigma)
    values = each(log_s, p[neighbours(x, process.num_states)] / p[:, None, None])
    return _mean(p, torch.where(rates > 0, rates * values, 0))


def explicit_score_entropy(model: Any, p_data: Distribution, process: Process, sigma: Scalar) -> Scalar:
    """Σ_x p(x) Σ_i Σ_{y≠x_i} Q(x_i, y)·[s_y − a_y log s_y + K(a_y)], a the true ratios."""
    return _explicit(model, p_data, process, sigma, _score_entropy)


def explicit_concrete_score(model: Any, p_data: Distribution, process: Process, sigma: Scalar) -> Scalar:
    """Σ_x p(x) Σ_i Σ_{y≠x_i} Q(x_i, y)·½(s_y − a_y)², a the true ratios."""
    return _explicit(model, p_data, process, sigma, _square)


def implicit_score_entropy(model: Any, p_data: Distribution, process: Process, sigma: Scalar) -> Scalar:
    """Σ_x p(x) Σ_i Σ_{y≠x_i} [Q(x_i, y)·s(x)_y − Q(y, x_i)·log s(x with x_i → y)_{x_i}], without ratios."""
    x, p, log_s, rates = _scores(model, p_data, process, sigma)
    Q, neighbour = process.rate_matrix(), neighbours(x, process.num_states)
    total = _mean(p, torch.where(rates > 0, rates * log_s.exp(), 0))
    for i, y in itertools.product(range(p_data.length), range(process.num_states)):
        back = log_s[neighbour[:, i, y], i, x[:, i]]
        weight = torch.where(x[:, i] == y, 0, Q[y, x[:, i]])
        total = total - (p * torch.where((p > 0) & (weight > 0), weight * back, 0)).sum()
    return total


def _denoising(model: Any, p_data: Distribution, process: Process, sigma: Scalar, each: Any) -> Scalar:
    _, _, log_s, rates = _scores(model, p_data, process, sigma)
    x_t, x_0, weight = pairs(p_data, process, sigma)
    P, row = transition_matrix(process, sigma), index_of(x_t, process.num_states)
    ratio = P[:, x_0].permute(1, 2, 0) / P[x_t, x_0][..., None]  # P(y, x_0)/P(x_t, x_0)
    rates, log_s = rates[row], log_s[row]
    return torch.einsum("p,piy->", weight, torch.where(rates > 0, rates * each(log_s, ratio), 0))


def denoising_concrete_score(model: Any, p_data: Distribution, process: Process, sigma: Scalar) -> Scalar:
    """E Σ_i Σ_{y≠x_i} Q(x_i, y)·½(s_y − a_y)², a_y = P_σ(y, x_0)/P_σ(x_t, x_0)."""
    return _denoising(model, p_data, process, sigma, _square)


def softmax_linear(model: Any, p_data: Distribution, process: Process, sigma: Scalar) -> Scalar:
    """As the denoising score entropy, with s = softmax of the model's log-scores, and s in place of log s."""

    def each(log_s: Tensor, a: Tensor) -> Tensor:
        s = log_s.softmax(-1)
        return s - a * s + torch.xlogy(a, a) - a

    return _denoising(model, p_data, process, sigma, each)


def ratio_matching(model: Any, p_data: Distribution, process: Process, sigma: Scalar) -> Scalar:
    """−Σ_x p(x) Σ_i log p(x_i | x_−i)."""
    x = all_sequences(process.num_states, p_data.length)
    return -_mean(p_data.at(process, sigma), at_token(model.log_conditional(x, sigma.expand(len(x))), x))


def _cross_entropy(model: Any, x_t: Tensor, x_0: Tensor, sigma: Tensor, process: Process) -> Tensor:
    """−Σ_i log p(x_0 at i | x_t), over positions that noise may have changed."""
    log_p = at_token(model.log_mean(x_t, sigma.expand(len(x_t))), x_0)
    unknown = (process.rate_matrix() > 0).any(-1)[x_t]  # states that noise leads into
    return -torch.where(unknown, log_p, 0).sum(-1)


def mean_cross_entropy(model: Any, p_data: Distribution, process: Process, sigma: Scalar) -> Scalar:
    """−E Σ_i log p(x_0 at i | x_t), over positions that noise may have changed."""
    return expect(lambda x_t, x_0: _cross_entropy(model, x_t, x_0, sigma, process), p_data, process, sigma)


def t_dce(model: Any, p_data: Distribution, process: Process, sigma: Scalar) -> Scalar:
    """−E Σ_{masked} log p(x_0 at i | x_t) / (e^σ − 1)."""
    return mean_cross_entropy(model, p_data, process, sigma) / (sigma.exp() - 1)


def d3pm(model: Any, p_data: Distribution, process: Process, sigma_s: Scalar, sigma_t: Scalar) -> Scalar:
    """E Σ_i KL(q(x_s | x_t, x_0) ‖ Σ_{x_0'} q(x_s | x_t, x_0')·p(x_0' | x_t)), q by Bayes' rule."""
    x_t, x_0, weight = pairs(p_data, process, sigma_t)
    P_s, P_t, step = (transition_matrix(process, s) for s in (sigma_s, sigma_t, sigma_t - sigma_s))
    tokens = torch.arange(p_data.vocab_size)
    # q[x_t, x_s, x_0]; where P_t(x_t, x_0) = 0 the pair never happens
    q = (step[:, :, None] * P_s[None, :, tokens] / P_t[:, None, tokens]).nan_to_num(0, 0, 0)
    mean = model.log_mean(x_t, sigma_t.expand(len(x_t))).exp()
    p = torch.einsum("pisv,piv->pis", q[x_t], mean)
    q_0 = q[x_t, :, x_0]
    unknown = (process.rate_matrix() > 0).any(-1)[x_t][..., None]
    kl = torch.where((q_0 > 0) & unknown, torch.xlogy(q_0, q_0 / p), 0)
    return torch.einsum("p,pis->", weight, kl)


def _masked(model: Any, p_data: Distribution, process: Process, hidden: tuple[int, ...]) -> Scalar:
    """−E Σ_{i hidden} log p(x_0 at i | the rest)."""
    x_t = p_data.sequences.clone()
    x_t[:, list(hidden)] = process.num_states - 1
    sigma = torch.ones((), dtype=torch.float64)  # any: a mask's posterior does not depend on it
    return (p_data.probabilities * _cross_entropy(model, x_t, p_data.sequences, sigma, process)).sum()


def lambda_dce(model: Any, p_data: Distribution, process: Process, masked: Scalar) -> Scalar:
    """−1/λ · E Σ_{masked} log p(x_0 at i | the rest), each position masked with probability λ."""
    total, length = torch.zeros((), dtype=torch.float64), p_data.length
    for k in range(1, length + 1):
        for hidden in itertools.combinations(range(length), k):
            probability = masked**k * (1 - masked) ** (length - k)
            total = total + probability / masked * _masked(model, p_data, process, hidden)
    return total


def any_order(model: Any, p_data: Distribution, process: Process, k: int) -> Scalar:
    """−L/k · E Σ_{masked} log p(x_0 at i | the rest), exactly k positions masked."""
    subsets = list(itertools.combinations(range(p_data.length), k))
    losses = torch.stack([_masked(model, p_data, process, hidden) for hidden in subsets])
    return p_data.length / k * losses.mean()


def autoregressive(model: Any, p_data: Distribution) -> Scalar:
    """−E Σ_i log p(x_i | x_1 … x_{i−1})."""
    log_p = at_token(model.log_next(p_data.sequences), p_data.sequences)
    return -(p_data.probabilities * log_p.sum(-1)).sum()
