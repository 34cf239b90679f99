"""Five losses that claim to bound −log p(x_0), for ``sedd audit examples/audited_losses.py:NAME``.

The first is a bound; the others are not, and have been used as if they were. Each is the integrand at a time t: the
claim is on its mean over t uniform in (0, 1) and over the noisy sequences x_t. Those that do not take ``schedule`` are
for the log-linear one, under which a token is masked with probability t.
"""

import torch
from torch import Tensor

from sedd.evaluation import audit
from sedd.parameterization import DiffusionModel, MeanModel
from sedd.process import Process, at_token
from sedd.schedule import Schedule


def score_entropy(
    model: DiffusionModel, x_0: Tensor, x_t: Tensor, t: Tensor, process: Process, schedule: Schedule
) -> Tensor:
    """Return the denoising score entropy and the prior term: a bound."""
    sigma, rate = schedule(t)
    diffusion = rate * process.score_entropy(model(x_t, sigma), x_t, x_0, sigma).sum(-1)
    prior = process.prior_kl(x_0, schedule.sigma(torch.ones_like(t))).sum(-1)
    return diffusion + prior


def softmax_formula(
    model: DiffusionModel, x_0: Tensor, x_t: Tensor, t: Tensor, process: Process, schedule: Schedule
) -> Tensor:
    """Return the score entropy with s = softmax of the output, and with s in place of log s."""
    sigma, rate = schedule(t)
    s, masked = model(x_t, sigma).softmax(-1), process.is_noisy(x_t)
    a = 1 / torch.expm1(sigma)[:, None]  # the ratio of the clean token; that of all others is 0
    loss = 1 - s[..., -1] - a * at_token(s, x_0) + a * (a.log() - 1)  # s sums to 1 over tokens and mask
    prior = process.prior_kl(x_0, schedule.sigma(torch.ones_like(t))).sum(-1)
    return rate * torch.where(masked, loss, 0).sum(-1) + prior


def unweighted_cross_entropy(model: MeanModel, x_0: Tensor, x_t: Tensor, t: Tensor, process: Process) -> Tensor:
    """Return the cross entropy of masked tokens with weight 1 in place of 1/t: a good loss, but no bound."""
    loss = -at_token(model.log_mean(x_t, -torch.log1p(-t)), x_0)
    return torch.where(process.is_noisy(x_t), loss, 0).sum(-1)


def dependent_model_substitution(model: MeanModel, x_0: Tensor, x_t: Tensor, t: Tensor, process: Process) -> Tensor:
    """Return λ-DCE of the model at σ = 1, whatever the time, as if it did not depend on σ.

    For a time-free model this is a bound. For a model that depends on σ it bounds the likelihood of another one, which
    may be better than the one that generates.
    """
    loss = -at_token(model.log_mean(x_t, torch.ones_like(t)), x_0) / t[:, None]
    return torch.where(process.is_noisy(x_t), loss, 0).sum(-1)


def pseudo_likelihood(model: MeanModel, x_0: Tensor, process: Process) -> Tensor:
    """Return −Σ_i log p(x_i | all others): each token is masked by itself, so dependent tokens cost nothing."""
    length, mask = x_0.shape[-1], process.num_states - 1
    alone = torch.eye(length, dtype=torch.bool)
    x_t = torch.where(alone, mask, x_0[:, None])  # b, i, L
    log_p = at_token(model.log_mean(x_t, torch.full(x_t.shape[:-1], 0.5)), x_0[:, None].expand(x_t.shape))
    return -log_p.diagonal(dim1=1, dim2=2).sum(-1)


LOSSES = (
    score_entropy,
    softmax_formula,
    unweighted_cross_entropy,
    dependent_model_substitution,
    pseudo_likelihood,
)


def main() -> None:
    """Audit all five."""
    for loss in LOSSES:
        result = audit.audit_function(loss)
        found = result.counter_example
        print(f"{loss.__name__:30s} {result.verdict}" + (f": {found.difference:+.3f} nats" if found else ""))


if __name__ == "__main__":
    main()
