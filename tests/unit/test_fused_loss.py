"""The fused loss: the same numbers as the objective's definition, in a small part of the memory."""

import itertools
import subprocess
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from sedd import exact, reverse
from sedd.evaluation.audit_losses import build_audited_process
from sedd.nn.transformer import Modern, Reference, Transformer
from sedd.objectives import (
    D3PM,
    AnyOrder,
    Autoregressive,
    DenoisingScoreEntropy,
    LambdaDCE,
    MeanCrossEntropy,
    Objective,
    TimeDCE,
)
from sedd.ops import fused_loss as fused_loss_module
from sedd.ops.block_ops import gather, pack_tokens
from sedd.ops.fused_loss import (
    CrossEntropyLoss,
    EntropySums,
    EntropyTerms,
    HeadLoss,
    LinearLossBackend,
    ScoreEntropyLoss,
    fused_loss,
    linear_loss,
)
from sedd.parameterization import (
    CausalModel,
    DiscreteModel,
    MeanModel,
    ScoreModel,
)
from sedd.process import Absorbing, Process, Uniform
from sedd.registry import PARAMETERIZATIONS
from sedd.schedule import Geometric, LogLinear, Schedule
from sedd.training.config import NOT_FOR_TRAINING, OBJECTIVES, PROCESSES

N, B, L = 13, 5, 7
NOISE = LogLinear()
TRAINABLE = [name for name in OBJECTIVES.built_in if name not in NOT_FOR_TRAINING]


class FusedCase(NamedTuple):
    """An objective and what it trains."""

    objective: Objective
    wrapper: type[DiscreteModel]
    process: Process = Absorbing(N)
    schedule: Schedule = NOISE

    def model(self, architecture: type[Transformer]) -> DiscreteModel:
        network = build_network(architecture, self.process.num_states, causal=self.wrapper is CausalModel)
        return self.wrapper(network, self.process, self.schedule)


CASES = {
    "score, absorbing": FusedCase(DenoisingScoreEntropy(), ScoreModel),
    "score, uniform": FusedCase(DenoisingScoreEntropy(), ScoreModel, Uniform(N)),
    "score, uniform, geometric": FusedCase(DenoisingScoreEntropy(t_min=0.1), ScoreModel, Uniform(N), Geometric()),
    "mean by score entropy": FusedCase(DenoisingScoreEntropy(), MeanModel),
    "t-dce": FusedCase(TimeDCE(), MeanModel, schedule=Geometric(1e-2, 4.0)),
    "lambda-dce": FusedCase(LambdaDCE(), MeanModel),
    "any-order": FusedCase(AnyOrder(), MeanModel),
    "mean, absorbing": FusedCase(MeanCrossEntropy(), MeanModel),
    "d3pm": FusedCase(D3PM(steps=20), MeanModel),
    "autoregressive": FusedCase(Autoregressive(), CausalModel),
}
cases = pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))


def build_network(architecture: type[Transformer], states: int, **options: Any) -> Transformer:
    """Return a small network in which no weight is 0, in float64."""
    network = architecture(
        **({"states": states, "width": 12, "depth": 1, "heads": 2, "cond_dim": 4} | options)
    ).double()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.normal_(0, 0.5, generator=generator)
    return network


class NoisyBatch(NamedTuple):
    x_t: Tensor
    x_0: Tensor
    t: Tensor
    weight: Tensor


def noisy_batch(case: FusedCase) -> NoisyBatch:
    generator = torch.Generator().manual_seed(1)
    times = case.objective.times(torch.rand(B, generator=generator, dtype=torch.float64))
    x_0 = torch.randint(N, (B, L), generator=generator)
    weight = times.weight * torch.rand(B, generator=generator, dtype=torch.float64)
    return NoisyBatch(case.objective.corrupt(case, x_0, times.t, generator), x_0, times.t, weight)


def gradients(network: nn.Module, loss: Tensor) -> list[Tensor]:
    grads = torch.autograd.grad(loss, list(network.parameters()), allow_unused=True)
    return [torch.zeros_like(p) if g is None else g for p, g in zip(network.parameters(), grads, strict=True)]


def by_definition(objective: Objective, model: Any, batch: NoisyBatch, valid: Tensor | None = None) -> Tensor:
    """Return weight·loss at every position, 0 at padding."""
    loss = batch.weight[:, None] * objective.loss(model.bind(valid=valid), batch.x_t, batch.x_0, batch.t)
    return loss if valid is None else torch.where(valid, loss, 0)


@pytest.mark.parametrize("architecture", [Reference, Modern])
@pytest.mark.parametrize("padded", [False, True])
@cases
def test_fused_loss_equals_the_definition(case: FusedCase, padded: bool, architecture: type[Transformer]) -> None:
    """Losses at every position and gradients of every weight, with a bias in the head and without, to rounding."""
    objective, model, batch = case.objective, case.model(architecture), noisy_batch(case)
    valid = torch.arange(L) < torch.tensor([[L], [3], [1], [L - 1], [2]]) if padded else None
    expected = by_definition(objective, model, batch, valid)
    loss = fused_loss(objective, model, *batch, valid=valid)
    torch.testing.assert_close(loss.positions, expected.detach(), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(loss.total, expected.sum().detach(), rtol=1e-10, atol=0)
    pairs = zip(gradients(model.network, loss.total), gradients(model.network, expected.sum()), strict=True)
    for got, want in pairs:
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-11)
    assert loss.overflow_count == 0


@pytest.mark.parametrize("t", [0.0, 1.0])
@cases
def test_no_token_or_every_token_masked(case: FusedCase, t: float) -> None:
    """A batch without a mask has loss and gradient 0; one of masks only is like any other."""
    objective, model = case.objective, case.model(Reference)
    network = model.network
    generator = torch.Generator().manual_seed(2)
    x_0 = torch.randint(N, (B, L), generator=generator)
    masked = torch.full_like(x_0, case.process.num_states - 1)  # under uniform noise an ordinary token
    time = torch.full((B,), 0.4, dtype=torch.float64)
    batch = NoisyBatch(x_0 if t == 0 else masked, x_0, time, torch.ones(B, dtype=torch.float64))
    loss, expected = fused_loss(objective, model, *batch), by_definition(objective, model, batch)
    torch.testing.assert_close(loss.positions, expected.detach(), rtol=1e-10, atol=1e-12)
    for got, want in zip(gradients(network, loss.total), gradients(network, expected.sum()), strict=True):
        # entries that should be 0 are rounding of sums of the largest
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-14 * want.abs().max().item())
    if t == 0 and objective.counts(model, batch.x_t) is not None:
        assert loss.total == 0
        assert not any(g.any() for g in gradients(network, fused_loss(objective, model, *batch).total))


@cases
def test_the_number_of_positions_that_count_may_be_given(case: FusedCase) -> None:
    objective, model, batch = case.objective, case.model(Modern), noisy_batch(case)
    valid = torch.ones(B, L, dtype=torch.bool)
    counts = objective.counts(model, batch.x_t)
    count = int((valid if counts is None else counts).sum())
    counted, given = (fused_loss(objective, model, *batch, valid, number) for number in (None, count))
    assert all(torch.equal(a, b) for a, b in zip(counted, given, strict=True))


DENOISERS = {"mean", "d3pm", "t-dce", "lambda-dce", "any-order", "score-entropy"}
FUSED = {
    *(("absorbing", "mean", objective) for objective in DENOISERS),
    *((process, "score", "score-entropy") for process in ("absorbing", "uniform")),
    *((process, "causal", "autoregressive") for process in PROCESSES.built_in),
}
"""Process, parameterization and objective of every fused loss; `CASES` has each pair of the last two."""


@pytest.mark.parametrize("process_name", PROCESSES.built_in)
def test_no_other_loss_is_fused(process_name: str) -> None:
    """Of all objectives that a model fits; logits alone do not determine the others."""
    process, found = build_audited_process(process_name, N), set()
    for parameterization, objective_name in itertools.product(PARAMETERIZATIONS.names, TRAINABLE):
        states = N + 1 if parameterization == "causal" else process.num_states
        model = PARAMETERIZATIONS.build(parameterization, build_network(Modern, states), process)
        objective = OBJECTIVES.build(objective_name)
        try:
            objective.check(model)
        except ValueError:
            continue
        case = FusedCase(objective, type(model), process)
        if fused_loss(objective, model, *noisy_batch(case)) is not None:
            found.add((process_name, parameterization, objective_name))
    assert found == {loss for loss in FUSED if loss[0] == process_name}


def test_a_network_without_a_head_has_no_fused_loss() -> None:
    case = CASES["score, absorbing"]
    assert fused_loss(case.objective, ScoreModel(exact.Table(N + 1, 1), case.process), *noisy_batch(case)) is None


def test_a_head_with_too_few_entries_is_refused(refuses: Callable[..., None]) -> None:
    loss = CrossEntropyLoss(5, torch.zeros(1, dtype=torch.long), torch.ones(1))
    refuses(lambda: linear_loss(torch.ones(1, 2), torch.ones(4, 2), None, loss), "4", "5")


# The linear loss -------------------------------------------------------------------------------------------


class Case(NamedTuple):
    """Inputs of a head, their loss, and the same loss by its definition, entry by entry."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor
    loss: HeadLoss
    plain: Callable[[Tensor], Tensor]
    """From the logits, in any dtype, to the loss of every row."""

    def leaves(self, dtype: torch.dtype) -> list[Tensor]:
        return [a.detach().to(dtype).requires_grad_() for a in (self.hidden, self.weight, self.bias)]


def head_case(
    kind: str, n: int = 37, states: int = 150, width: int = 16, sigma: float = 0.7, sharp: float = 1.0
) -> Case:
    generator = torch.Generator().manual_seed(3)
    process: Process = Uniform(states) if kind == "uniform" else Absorbing(states)
    hidden = torch.randn(n, width, generator=generator, dtype=torch.float64)
    weight = sharp * torch.randn(process.num_states, width, generator=generator, dtype=torch.float64) / width**0.5
    bias = 0.3 * torch.randn(process.num_states, generator=generator, dtype=torch.float64)
    x_0 = torch.randint(states, (n,), generator=generator)
    x_t = torch.randint(states, (n,), generator=generator) if kind == "uniform" else torch.full((n,), states)
    x_t[: n // 3] = x_0[: n // 3] if kind == "uniform" else x_t[: n // 3]
    weights = torch.rand(n, generator=generator, dtype=torch.float64)
    noise = torch.full((n,), sigma, dtype=torch.float64)
    if kind == "mean":
        loss: HeadLoss = CrossEntropyLoss(states, x_0, weights.float())
        return Case(hidden, weight, bias, loss, lambda z: -weights.to(z.dtype) * _log_softmax(z[:, :states], x_0))
    log_data, log_rest = (
        None if a is None else a.flatten().float() for a in process.ratios(x_t[:, None], x_0[:, None], noise)
    )
    assert log_data is not None
    scale = reverse.log_score_shift(process, noise).float()
    loss = ScoreEntropyLoss(states, x_t if kind == "uniform" else None, x_0, scale, log_data, log_rest, weights.float())

    def plain(z: Tensor) -> Tensor:
        log_s = (z + reverse.log_score_shift(process, noise.to(z.dtype))[:, None]).scatter(-1, x_t[:, None], 0)
        loss = process.score_entropy(log_s[:, None], x_t[:, None], x_0[:, None], noise)
        return weights.to(z.dtype) * loss[:, 0] / reverse.incoming_rate(process)

    return Case(hidden, weight, bias, loss, plain)


def _log_softmax(z: Tensor, x: Tensor) -> Tensor:
    return z.log_softmax(-1).gather(-1, x[:, None])[:, 0]


kinds = pytest.mark.parametrize("kind", ["absorbing", "uniform", "mean"])


def loss_and_grads(total: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    return [total.detach().double(), *(g.double() for g in torch.autograd.grad(total, leaves))]


def relative_errors(got: list[Tensor], truth: list[Tensor]) -> list[float]:
    return [((a - b).norm() / b.norm()).item() for a, b in zip(got, truth, strict=True)]


@kinds
def test_no_less_accurate_than_plain_pytorch(kind: str) -> None:
    """Verification step 9: in bfloat16, loss and gradients are as near to the float64 truth as the plain path's."""
    case = head_case(kind, n=64, states=500, width=32)
    exact, half = case.leaves(torch.float64), case.leaves(torch.float32)
    truth = loss_and_grads(case.plain(torch.nn.functional.linear(*exact)).sum(), exact)
    with torch.autocast("cpu", torch.bfloat16):
        z = torch.nn.functional.linear(*half)
    plain = relative_errors(loss_and_grads(case.plain(z.float()).sum(), half), truth)
    loss = linear_loss(*half, case.loss, dtype=torch.bfloat16, block_rows=20)
    fused = relative_errors(loss_and_grads(loss.total, half), truth)
    for ours, theirs in zip(fused, plain, strict=True):
        assert ours <= theirs * 1.1 + 1e-4
    assert max(plain[1:]) > 1e-3  # bfloat16 matters: the comparison is not of two exact results
    single = relative_errors(loss_and_grads(linear_loss(*half, case.loss, block_rows=20).total, half), truth)
    assert max(single) < 1e-5


@kinds
@pytest.mark.parametrize("block", [1, 5, 37, 1000])
def test_blocks_change_nothing(kind: str, block: int) -> None:
    case = head_case(kind)
    leaves = case.leaves(torch.float32)
    unsplit = loss_and_grads(linear_loss(*leaves, case.loss).total, leaves)
    split = loss_and_grads(linear_loss(*leaves, case.loss, block_rows=block).total, leaves)
    assert max(relative_errors(split, unsplit)) < 1e-6


@kinds
def test_same_bits_twice(kind: str) -> None:
    case = head_case(kind)
    leaves = case.leaves(torch.float32)
    first, second = (loss_and_grads(linear_loss(*leaves, case.loss, block_rows=10).total, leaves) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@kinds
def test_upstream_gradients_and_no_gradients(kind: str) -> None:
    """The gradient of 3·total is three times as large; without a gradient the loss is the same."""
    case = head_case(kind)
    leaves = case.leaves(torch.float32)
    once, thrice = (loss_and_grads(k * linear_loss(*leaves, case.loss).total, leaves) for k in (1, 3))
    assert max(relative_errors(thrice, [3 * a for a in once])) < 1e-6
    with torch.no_grad():
        output = linear_loss(*leaves, case.loss)
    assert not output.total.requires_grad
    torch.testing.assert_close(output.total.double(), once[0])


class LargestTensor(TorchDispatchMode):
    """Dispatch mode that stores the size of the largest tensor that an operation returns."""

    entries = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        for tensor in output if isinstance(output, tuple | list) else [output]:
            if isinstance(tensor, Tensor):
                self.entries = max(self.entries, tensor.numel())
        return output


def test_the_logits_never_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    """No tensor of rows × vocabulary is made in the forward or backward pass; the plain path makes one."""
    monkeypatch.setitem(fused_loss_module.MAX_LOGITS, "cpu", 2**15)
    process = Absorbing(400)
    objective, network = DenoisingScoreEntropy(), build_network(Reference, 401).float()
    model = ScoreModel(network, process)
    generator = torch.Generator().manual_seed(0)
    x_0 = torch.randint(400, (60, 40), generator=generator)
    t = torch.rand(60, generator=generator)
    batch = NoisyBatch(objective.corrupt(model, x_0, t, generator), x_0, t, torch.ones(60))
    largest = {}
    variants: dict[str, Callable[[], Tensor]] = {
        "fused": lambda: fused_loss(objective, model, *batch).total,
        "plain": lambda: by_definition(objective, model, batch).sum(),
    }
    for name, compute in variants.items():
        with LargestTensor() as mode:
            compute().backward()
        largest[name] = mode.entries
    assert largest["plain"] >= 60 * 40 * 401
    assert largest["fused"] <= 60 * 40 * 4 * 12  # the widest activation of the network


def test_overflowing_scores_are_counted() -> None:
    """The loss is infinite, gradients are finite, a row of weight 0 stays at 0, and overflows are counted."""
    for kind in ("absorbing", "uniform"):
        case = head_case(kind)
        assert isinstance(case.loss, ScoreEntropyLoss)
        leaves = case.leaves(torch.float32)
        with torch.no_grad():
            leaves[2][7] = 100.0  # the bias of one token
        x_t = case.loss.x_t
        overflows = torch.ones(37, dtype=torch.bool) if x_t is None else x_t != 7
        loss = case.loss._replace(weight=case.loss.weight.clone())
        loss.weight[4] = 0
        output = linear_loss(*leaves, loss, block_rows=10)
        assert output.overflow_count == overflows.sum() > 0
        assert output.total == torch.inf
        assert output.positions[4] == 0
        assert (output.positions.isinf() == (overflows & (loss.weight > 0))).all()
        assert all(g.isfinite().all() for g in torch.autograd.grad(output.total, leaves))


def test_nan_is_not_hidden() -> None:
    for kind in ("absorbing", "uniform", "mean"):
        case = head_case(kind)
        leaves = case.leaves(torch.float32)
        with torch.no_grad():
            leaves[0][3] = torch.nan
        assert linear_loss(*leaves, case.loss).total.isnan()


def test_float32_near_the_minimum() -> None:
    """At the true ratios under much uniform noise the loss is tiny; Σ_y z_y from a column sum would cancel."""
    states, width, n = 2000, 8, 16
    process, noise = Uniform(states), torch.full((n, 1), 6.0, dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(states, (n, 1), generator=generator)
    x_0 = torch.randint(states, (n, 1), generator=generator)
    hidden = torch.randn(n, width, generator=generator, dtype=torch.float64)
    weight = 1e-4 * torch.randn(states, width, generator=generator, dtype=torch.float64)
    log_s = (hidden @ weight.T)[:, None].scatter(-1, x[..., None], 0)
    truth = process.score_entropy(log_s, x, x_0, noise[:, 0])[:, 0] / reverse.incoming_rate(process)
    ratio = process.ratios(x, x_0, noise[:, 0])
    assert ratio.log_rest is not None
    one = torch.ones(n)
    loss = ScoreEntropyLoss(
        states,
        x[:, 0],
        x_0[:, 0],
        0 * one,
        ratio.log_data[:, 0].float(),
        ratio.log_rest.flatten().float(),
        one,
    )
    output = linear_loss(hidden.float(), weight.float(), None, loss)
    assert ((truth - output.positions).abs() / truth).max() < 1e-4

    z = hidden.float() @ weight.float().T
    a = ratio.log_rest.flatten().float().exp()
    by_columns = z.exp().sum(-1) - a * (hidden.float() @ weight.float().sum(0)) + states * (torch.xlogy(a, a) - a)
    assert ((by_columns - truth).abs() / truth).max() > 1e-2  # the mutant: the same sum, term by term in float32


def test_a_cpu_never_loads_triton() -> None:
    code = """
import sys, torch
from sedd.ops.fused_loss import CrossEntropyLoss, linear_loss
loss = CrossEntropyLoss(3, torch.zeros(2, dtype=torch.long), torch.ones(2))
linear_loss(torch.ones(2, 4, requires_grad=True), torch.ones(3, 4), None, loss).total.backward()
print(any(name.split('.')[0] == 'triton' or name == 'sedd.ops.fused_loss_triton' for name in sys.modules))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == "False\n", done.stderr


# Mutants ---------------------------------------------------------------------------------------------------


def _drop_skip(terms: EntropyTerms) -> EntropyTerms:
    return terms._replace(skip=None)


def _no_data(terms: EntropyTerms) -> EntropyTerms:
    return terms._replace(grad_at_data=torch.zeros_like(terms.grad_at_data))


def _no_weight(terms: EntropyTerms) -> EntropyTerms:
    return terms._replace(weight=torch.ones_like(terms.weight))


def _no_ratio(terms: EntropyTerms) -> EntropyTerms:
    return terms._replace(log_rest=None)


class Mutant(LinearLossBackend):
    def __init__(self, change: Callable[[EntropyTerms], EntropyTerms]) -> None:
        self.change = change

    def entropy_and_grad_(self, z: Tensor, terms: EntropyTerms) -> EntropySums:
        return super().entropy_and_grad_(z, self.change(terms))


@pytest.mark.parametrize("mutant", [_drop_skip, _no_data, _no_weight, _no_ratio])
def test_mutants_are_caught(mutant: Callable[[EntropyTerms], EntropyTerms]) -> None:
    """A wrong backend changes the gradients, so the comparison shows which backend ran."""
    case = head_case("uniform")
    leaves = case.leaves(torch.float32)
    truth = loss_and_grads(case.plain(torch.nn.functional.linear(*leaves)).sum(), leaves)
    right = loss_and_grads(linear_loss(*leaves, case.loss).total, leaves)
    wrong = loss_and_grads(linear_loss(*leaves, case.loss, backend=Mutant(mutant)).total, leaves)
    assert max(relative_errors(right, truth)) < 1e-5 < 1e-3 < max(relative_errors(wrong, truth))


# Packed tokens ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
def test_gather(share: float) -> None:
    """`gather` is indexing by a mask, and so is its gradient."""
    generator = torch.Generator().manual_seed(0)
    mask = torch.rand(6, 9, generator=generator) < share
    hidden = torch.randn(6, 9, 4, generator=generator, requires_grad=True)
    packed = pack_tokens(mask)
    assert torch.equal(gather(hidden, packed), hidden[mask])
    upstream = torch.randn(int(mask.sum()), 4, generator=generator)
    (got,) = torch.autograd.grad(gather(hidden, packed), hidden, upstream)
    (want,) = torch.autograd.grad(hidden[mask], hidden, upstream)
    assert torch.equal(got, want)
