"""A joint distribution of short sequences, and its exact score."""

import math
from collections.abc import Callable
from typing import final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from sedd import draws, tensors
from sedd.parameterization import PerRow
from sedd.process import Process
from sedd.schedule import LogLinear, Schedule
from sedd.tensors import PerSequence, PerState, PerToken, Tokens

Scalar = Float[Tensor, ""]


def all_sequences(num_states: int, length: int) -> Int[Tensor, "count length"]:
    """Return every sequence in the order of `index_of`: the last position varies fastest."""
    return torch.cartesian_prod(*[torch.arange(num_states)] * length).view(-1, length)


def _strides(num_states: int, length: int) -> Tensor:
    return num_states ** torch.arange(length - 1, -1, -1)


def index_of(x: Int[Tensor, "*b L"], num_states: int) -> Int[Tensor, "*b"]:
    """Return the index of a sequence in `all_sequences`."""
    return (x * _strides(num_states, x.shape[-1])).sum(-1)


def neighbours(x: Int[Tensor, "*b L"], num_states: int) -> Int[Tensor, "*b L n"]:
    """Return the index of x with x_i → y, for every i and y."""
    shift = (torch.arange(num_states) - x[..., None]) * _strides(num_states, x.shape[-1])[:, None]
    return index_of(x, num_states)[..., None, None] + shift


def expm(A: Float[Tensor, "*b n n"]) -> Float[Tensor, "*b n n"]:
    """Return the matrix exponential by its series, to the last digits of float64: exp(A) = exp(A/2^k)^(2^k).

    `torch.matrix_exp` stops its series earlier where the norm is near 0.03 and is off by 2e-12 there.
    """
    norm = A.abs().sum(-2).amax().item()
    halvings = max(0, math.ceil(math.log2(norm)) + 1) if norm > 0 else 0
    A = A / 2**halvings  # norm ≤ ½, so that 18 terms leave ½^19/19! < 1e-22
    eye = torch.eye(A.shape[-1], dtype=A.dtype).expand_as(A)
    total = eye
    for n in range(18, 0, -1):
        total = eye + A @ total / n
    for _ in range(halvings):
        total = total @ total
    return total


def transition_matrix(process: Process, sigma: Float[Tensor, "*b"]) -> Float[Tensor, "*b n n"]:
    """Return exp(σQ) by the matrix exponential; σ may be negative, since exp(−σQ) undoes noise.  [§1]"""
    if not sigma.isfinite().all():
        raise ValueError(f"sigma is {sigma.flatten().tolist()}; a matrix exponential needs finite noise")
    return expm(sigma.double()[..., None, None] * process.rate_matrix())


@final
class Distribution:
    """The probability of every sequence: a tensor with one axis per position, each as long as the vocabulary."""

    def __init__(self, probabilities: Float[Tensor, "..."]) -> None:
        shape = tuple(probabilities.shape)
        if not shape or len(set(shape)) > 1:
            raise ValueError(f"the distribution has shape {shape}; it needs an axis of vocabulary size per position")
        tensors.check_vocab_size(shape[0])
        total = probabilities.sum().item()
        if not (probabilities >= 0).all() or abs(total - 1) > 1e-5:
            raise ValueError(f"the distribution sums to {total} with least entry {probabilities.min().item()}; "
                             "probabilities must be 0 or more and sum to 1")  # fmt: skip
        self.probabilities = probabilities.double().flatten() / probabilities.double().sum()
        self.vocab_size, self.length = shape[0], len(shape)
        self.sequences = all_sequences(self.vocab_size, self.length)

    @classmethod
    def random(cls, vocab_size: int, length: int, generator: torch.Generator) -> "Distribution":
        """Draw a distribution uniformly from all distributions of sequences of ``length`` tokens."""
        u = draws.uniforms((vocab_size,) * length, generator)
        return cls(-u.log() / -u.log().sum())

    def entropy(self) -> Float[Tensor, ""]:
        """−Σ p log p, in nats per sequence."""
        return -torch.xlogy(self.probabilities, self.probabilities).sum()

    def log_prob(self, x_0: Int[Tensor, "*b L"]) -> Float[Tensor, "*b"]:
        """log p(x_0)."""
        tensors.check_clean_tokens(x_0, self.vocab_size)
        return self.probabilities.log()[index_of(x_0, self.vocab_size)]

    def draw(self, count: int, generator: torch.Generator) -> Int[Tensor, "count L"]:
        """Draw ``count`` independent sequences."""
        return self.sequences[draws.sample(self.probabilities.expand(count, -1), generator)]

    def at(self, process: Process, sigma: Float[Tensor, "*b"]) -> Float[Tensor, "*b states"]:
        """p_σ: the probability of every noisy sequence, in the order of `all_sequences`."""
        self._fits(process)
        tensors.check_sigma(sigma)
        P = transition_matrix(process, sigma.reshape(-1))[..., : self.vocab_size]
        p = self.probabilities.expand(len(P), -1)
        for i in range(self.length):  # noise one position after another: left is noised, right is not yet
            p = p.reshape(len(P), process.num_states**i, self.vocab_size, -1)
            p = torch.einsum("byx,blxr->blyr", P, p)
        return p.reshape(*sigma.shape, -1)

    def given(self, fixed: Int[Tensor, " L"]) -> "Distribution":
        """Return the distribution of all positions given some: −1 in ``fixed`` leaves a position free."""
        if fixed.shape != (self.length,):
            raise ValueError(f"fixed has shape {tuple(fixed.shape)}; it needs {self.length} entries")
        agrees = ((fixed < 0) | (self.sequences == fixed)).all(-1)
        p = self.probabilities * agrees
        if not p.sum() > 0:
            raise ValueError(f"fixed tokens {fixed.tolist()} have probability 0: there is no conditional distribution")
        return Distribution((p / p.sum()).view((self.vocab_size,) * self.length))

    def _fits(self, process: Process) -> None:
        if process.vocab_size != self.vocab_size:
            raise ValueError(
                f"the distribution has {self.vocab_size} tokens and {process} has {process.vocab_size}; they must agree"
            )


@final
class Score(nn.Module):
    """The true log-score of a distribution under a process; called exactly as a model is.  [§3]

    It also predicts the clean token, the noisy token given the others, and the next token, as the models of
    `parameterization` do, so that every objective, sampler and bound can be run on it.
    """

    depends_on_sigma = True

    def __init__(self, distribution: Distribution, process: Process, schedule: Schedule = LogLinear()) -> None:
        super().__init__()
        distribution._fits(process)
        self.distribution, self.process, self.schedule = distribution, process, schedule

    def forward(self, x_t: Tokens, sigma: PerSequence) -> PerState:
        """log p_σ(x_t with position i set to y) − log p_σ(x_t)."""
        tensors.check_states(x_t, self.process.num_states)
        tensors.check_sigma(sigma)
        levels, row = torch.unique(sigma.double(), return_inverse=True)
        log_p, row, n = self.distribution.at(self.process, levels).log(), row[..., None, None], self.process.num_states
        return log_p[row, neighbours(x_t, n)] - log_p[row, index_of(x_t, n)[..., None, None]]

    def hidden(self, x_t: Tokens, sigma: PerSequence, valid: Bool[Tensor, "*b L"] | None = None) -> PerState:
        """Return the log-score: there is no head."""
        return self.forward(x_t, sigma)

    def log_score_at(self, hidden: PerState, x_t: Int[Tensor, " k"], sigma: PerRow) -> PerState:
        return hidden

    def log_mean_at(self, hidden: PerState, x_t: Int[Tensor, " k"], sigma: PerRow) -> PerToken:
        """p(x_0 = y) ∝ [exp(−σQ) s]_y · P_σ(x_t, y)."""
        levels, row = torch.unique(sigma.double(), return_inverse=True)
        back, forth = (transition_matrix(self.process, sign * levels) for sign in (-1, 1))
        p = torch.einsum("kyz,kz->ky", back[row], hidden.exp()) * forth[row, x_t]
        p = p[:, : self.distribution.vocab_size].clamp_min(0)  # rounding may leave −1e-17
        return torch.log(p / p.sum(-1, keepdim=True))

    def log_mean(self, x_t: Tokens, sigma: PerSequence) -> PerToken:
        """log p(x_0 at i | x_t), by Bayes' rule over every x_0."""
        p_data = self.distribution
        P = transition_matrix(self.process, sigma.double())[..., : p_data.vocab_size]
        rows = P.gather(-2, x_t[..., None].expand(*x_t.shape, p_data.vocab_size))  # P(x_t at i, v), for i and v
        likelihood = torch.stack([rows[..., i, p_data.sequences[:, i]] for i in range(p_data.length)]).prod(0)
        joint = p_data.probabilities * likelihood
        is_token = torch.nn.functional.one_hot(p_data.sequences, p_data.vocab_size).double()  # x_0, i, v
        p = torch.einsum("...a,aiv->...iv", joint, is_token) / joint.sum(-1)[..., None, None]
        return torch.log(p)

    def log_conditional(self, x_t: Tokens, sigma: PerSequence) -> PerState:
        """log p_σ(x_i | x_−i)."""
        return self.forward(x_t, sigma).log_softmax(-1)

    def log_next(self, x_0: Tokens) -> PerToken:
        """log p(x_i | x_1 … x_{i−1})."""
        p_data, logs = self.distribution, []
        for i in range(p_data.length):
            agrees = (p_data.sequences[:, :i] == x_0[..., None, :i]).all(-1)  # *b, a
            token = torch.nn.functional.one_hot(p_data.sequences[:, i], p_data.vocab_size).double()
            joint = (p_data.probabilities * agrees) @ token
            logs.append(torch.log(joint / joint.sum(-1, keepdim=True)))
        return torch.stack(logs, -2)


@final
class Table(nn.Module):
    """A network that is a table: one free parameter for every sequence, position and state, 0 at first."""

    def __init__(self, num_states: int, length: int) -> None:
        super().__init__()
        self.num_states = num_states
        self.weight = nn.Parameter(torch.zeros(num_states**length, length, num_states, dtype=torch.float64))

    def forward(self, x: Int[Tensor, "*b L"], sigma: Float[Tensor, "*b"]) -> Float[Tensor, "*b L n"]:
        """Return the entries of ``x``, at any noise level."""
        return self.weight[index_of(x, self.num_states)]


def expect(f: Callable[[Tensor, Tensor], Tensor], p_data: Distribution, process: Process, sigma: Scalar) -> Scalar:
    """Return E f(x_t, x_0) over x_0 from ``p_data`` and x_t at noise σ; f maps two (pairs, L) to (pairs,)."""
    x_t, x_0, weight = pairs(p_data, process, sigma)
    return (weight * f(x_t, x_0)).sum()


def pairs(
    p_data: Distribution, process: Process, sigma: Float[Tensor, ""]
) -> tuple[Int[Tensor, "p L"], Int[Tensor, "p L"], Float[Tensor, " p"]]:
    """Return every pair (x_t, x_0) of positive probability at noise σ, and that probability."""
    x_t = all_sequences(process.num_states, p_data.length)
    P = transition_matrix(process, sigma)
    joint = p_data.probabilities * P[x_t[:, None], p_data.sequences].prod(-1)  # x_t, x_0
    t, zero = torch.nonzero(joint > 0, as_tuple=True)
    return x_t[t], p_data.sequences[zero], joint[t, zero]


def propagate(p: Float[Tensor, " n"], table: Float[Tensor, "n L states"]) -> Float[Tensor, " sequences"]:
    """Return the distribution after one step of a sampler: Σ_x p(x) Π_i table[x, i, y_i], for every y.

    x are `all_sequences` of states, or anything else that determines the step.
    """
    _, length, num_states = table.shape
    joint = p[:, None]  # x, y_1 … y_i
    for i in range(length):
        joint = (joint[:, :, None] * table[:, i, None, :]).reshape(len(p), num_states ** (i + 1))
    return joint.sum(0)
