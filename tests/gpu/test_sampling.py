"""On a GPU: fused samplers draw the enumerated distributions, rare tokens too; CUDA graphs change nothing."""

import math
import sys
from pathlib import Path
from typing import Any

import pytest
import scipy.stats
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1] / "exact"))
import test_sampler_distributions as distributions

from sedd import exact, reverse, samplers
from sedd.draws import AffineWeights, CounterRNG
from sedd.loading import prepare_for_inference
from sedd.nn.transformer import Modern, Reference, Transformer
from sedd.ops.categorical import HeadLogits, sample_categorical
from sedd.ops.categorical_triton import sample_categorical_triton
from sedd.parameterization import MeanModel, ScoreModel
from sedd.process import Absorbing
from sedd.registry import PARAMETERIZATIONS
from sedd.runtime.cuda_graphs import GraphedBackbone
from sedd.samplers import Prompt, SamplingModel
from sedd.training.config import PROCESSES

pytestmark = pytest.mark.gpu
FUSED = [
    (name, kind, at)
    for name, kind, at in distributions.CASES
    if name in ("first-hitting", "tweedie", "euler", "ancestral", "any-order")
    and distributions.SETTINGS[at][0].has_fused_forms
]
COUNT = 100_000


@pytest.fixture(autouse=True)
def _no_grad() -> Any:
    with torch.no_grad():
        yield


@pytest.mark.parametrize(("name", "kind", "at"), FUSED)
def test_draws_have_the_enumerated_distribution(name: str, kind: str, at: int) -> None:
    """Verification steps 2 and 3: 100,000 draws by the production path, family-wise false alarm 1e-6.

    Power: a distribution off by 2.5 % in half of its outcomes is noticed with more than 0.99 (`test_power`).
    """
    sampler, model = distributions.make(name, kind, at)
    truth = {
        given: exact.sample_distribution(sampler, model, given, 5)
        for given in (distributions.BLANK, distributions.MIDDLE)
    }
    if kind == "true":
        model_class = MeanModel if name == "ancestral" else ScoreModel
        model = model_class(ExactOnCpu(model, mean=model_class is MeanModel), model.process, model.schedule)
    else:
        model.network = TableOnCpu(model.network)
    assert SamplingModel(model.cuda()).fused
    for given, distribution in truth.items():
        x = distributions.run(sampler, model, Prompt(given.expand(COUNT, -1)), 5)
        assert (x < 3).all()
        assert distributions.p_value(x, distribution, model.process.num_states) > distributions.FAMILY / (
            2 * len(FUSED)
        )


class ExactOnCpu(torch.nn.Module):
    """The exact score of a distribution as a network, computed on the CPU."""

    def __init__(self, truth: exact.Score, mean: bool = False) -> None:
        super().__init__()
        self.truth, self.mean = truth, mean

    def forward(self, x: Tensor, sigma: Tensor) -> Tensor:
        process = self.truth.process
        x_cpu, sigma_cpu = x.cpu(), sigma.cpu().double()
        if self.mean:
            log_mean = self.truth.log_mean(x_cpu, sigma_cpu)
            logits = log_mean - process.add_log_likelihood(torch.zeros_like(log_mean), x_cpu, sigma_cpu)
            output = torch.nn.functional.pad(logits, (0, process.num_states - 3))
        else:
            output = self.truth(x_cpu, sigma_cpu) - reverse.log_score_shift(process, sigma_cpu)[:, None, None]
        return output.float().to(x.device)


class TableOnCpu(torch.nn.Module):
    """A table of logits on the CPU."""

    def __init__(self, table: torch.nn.Module) -> None:
        super().__init__()
        self.table = table

    def forward(self, x: Tensor, sigma: Tensor) -> Tensor:
        return self.table(x.cpu(), sigma.cpu()).float().to(x.device)


def test_power() -> None:
    threshold = scipy.stats.chi2.isf(distributions.FAMILY / (2 * len(FUSED)), 26)
    assert scipy.stats.ncx2.sf(threshold, 26, 3 * COUNT * 0.025**2) > 0.99


def test_rare_tokens_of_a_large_vocabulary_are_drawn() -> None:
    """Verification step 5: probabilities over nine decades at 50,257 tokens; each decade has its frequency.

    Chi-square over decades at 1e-6 with two million draws; a sampler with 24-bit uniforms loses the rarest decade.
    """
    n, draws, batch = 50_257, 2_000_000, 50_000
    decade = torch.arange(n, device="cuda") % 9
    weights = 10.0 ** -decade.double()
    p = torch.zeros(9, dtype=torch.float64, device="cuda").index_add(0, decade, weights)
    p = (p / p.sum()).cpu()
    z = weights.log().float().expand(batch, n)
    counts = torch.zeros(9, dtype=torch.long)
    one, mask = torch.ones(batch, dtype=torch.float64, device="cuda"), torch.full((batch,), n, device="cuda")
    affine = AffineWeights(one)
    for seed in range(draws // batch):
        u = CounterRNG(seed, torch.arange(batch, device="cuda"))(1)[:, 0]
        head = HeadLogits(z, n, torch.zeros_like(one).float(), False)
        tokens = sample_categorical(head, mask, affine, u).tokens
        counts += torch.bincount(decade[tokens], minlength=9).cpu()
    expected = p * draws
    assert expected[-1] < 1  # the rarest decade is expected less than once, so rare decades are pooled
    common = expected > 5
    observed = torch.cat([counts[common], counts[~common].sum()[None]])
    expected = torch.cat([expected[common], expected[~common].sum()[None]])
    assert scipy.stats.chisquare(observed.numpy(), (expected * draws / expected.sum()).numpy()).pvalue > 1e-6


def test_masks_are_revealed_with_the_probability_of_the_step() -> None:
    """Verification step 5: a step probability of 1e-4 at 50,257 tokens, to five standard errors of 4 million trials."""
    n, k, step = 50_257, 40_000, 1e-4
    z = torch.randn(k, n, device="cuda", generator=torch.Generator("cuda").manual_seed(0)).bfloat16()
    total = z.float().exp().double().sum(-1)
    affine = AffineWeights(step / total, torch.ones_like(total), -step / total)
    head, mask, revealed = HeadLogits(z, n, torch.zeros(k, device="cuda"), True), torch.full((k,), n, device="cuda"), 0
    for seed in range(100):
        u = CounterRNG(seed, torch.arange(k, device="cuda"))(1)[:, 0]
        revealed += int((sample_categorical_triton(head, mask, affine, u).tokens != n).sum())
    trials = 100 * k
    assert abs(revealed - trials * step) < 5 * math.sqrt(trials * step)


def build_network(architecture: type[Transformer], time_conditioning: bool, states: int = 32) -> Transformer:
    network = architecture(states=states, width=64, depth=2, heads=2, time_conditioning=time_conditioning)
    generator = torch.Generator().manual_seed(0)
    for parameter in network.parameters():
        parameter.normal_(0, 0.12, generator=generator)
    return network


@pytest.mark.parametrize("time_conditioning", [True, False])
@pytest.mark.parametrize("architecture", [Reference, Modern])
def test_graphed_hidden_states(architecture: type[Transformer], time_conditioning: bool) -> None:
    """At several batch sizes, padded or not, and again after others were captured."""
    network = prepare_for_inference(build_network(architecture, time_conditioning), "cuda", "bfloat16")
    graphed = GraphedBackbone(network)
    for _ in range(2):
        for rows in (1, 2, 5, 16, 7):
            generator = torch.Generator().manual_seed(rows)
            x = torch.randint(32, (rows, 40), generator=generator).cuda()
            sigma = torch.rand(rows, generator=generator).cuda()
            valid = (torch.arange(40) < torch.randint(1, 41, (rows, 1), generator=generator)).cuda()
            for mask in (None, valid):
                ours, theirs = graphed.hidden(x, sigma, mask), network.hidden(x, sigma, mask)
                rows_and_positions = slice(None) if mask is None else mask
                torch.testing.assert_close(
                    ours[rows_and_positions].float(), theirs[rows_and_positions].float(), rtol=2e-2, atol=2e-2
                )


SAME = [
    ("absorbing", kind, name) for kind in ("mean", "score") for name in ("first-hitting", "tweedie", "euler", "theta")
]
SAME += [("uniform", kind, name) for kind in ("mean", "score") for name in ("tweedie", "euler", "theta")]
SAME += [(noise, "mean", "ancestral") for noise in ("absorbing", "uniform")]


@pytest.mark.parametrize(("noise", "parameterization", "name"), SAME)
def test_the_same_tokens_as_on_a_cpu(noise: str, parameterization: str, name: str) -> None:
    """In float32: CUDA graphs, kernels and draws together."""
    process, tokens = PROCESSES.build(noise, 31), []
    for device in ("cpu", "cuda"):
        network = build_network(Reference, True, process.num_states)
        prepared_network = prepare_for_inference(network, device, "float32")
        graphed = GraphedBackbone(prepared_network) if device == "cuda" else None
        model: Any = PARAMETERIZATIONS.build(parameterization, prepared_network, process, graphed=graphed)
        sampler = samplers.build_sampler(name, model)
        tokens.append(sampler.sample(model, samplers.empty(24, 48, device), seed=3, steps=16).cpu())
    same = (tokens[0] == tokens[1]).all(-1).float().mean()
    assert same >= 0.95  # a row may differ where a uniform is within float32 rounding of a boundary


def test_a_planned_run_does_not_synchronize() -> None:
    """Once it is planned, steps follow each other without waiting for the device."""
    network = prepare_for_inference(build_network(Reference, time_conditioning=False), "cuda", "bfloat16")
    model: Any = PARAMETERIZATIONS.build("mean", network, Absorbing(31), graphed=GraphedBackbone(network))
    for mode in ("default", "error"):  # the first run captures and compiles
        states = samplers.FirstHitting().trajectory(model, samplers.empty(4, 48, "cuda"), steps=16)
        next(states)
        next(states)  # planned
        torch.cuda.set_sync_debug_mode(mode)
        try:
            *_, last = states
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert (last.x < 31).all()
