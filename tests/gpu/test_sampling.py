"""On a GPU: the fast samplers draw the laws that enumeration says, recordings change nothing, rare tokens are drawn."""

import dataclasses
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import scipy.stats
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1] / "exact"))
import test_sampler_distributions as laws

from sedd import exact, factory, sampling
from sedd.diffusion.categorical import AffineWeights
from sedd.diffusion.parameterization import MeanModel, ScoreModel
from sedd.diffusion.process import Absorbing
from sedd.diffusion.rng import CounterRNG
from sedd.nn.transformer import Modern, Reference, Transformer
from sedd.ops import Scores, categorical_triton, chosen
from sedd.runtime.cuda_graphs import GraphedBackbone
from sedd.sampling import Prompt, SamplingModel, uniform_grid

pytestmark = pytest.mark.gpu
FAST = [case for case in laws.CASES if case[0] in ("first-hitting", "tweedie", "euler", "ancestral", "any-order")]
COUNT = 100_000


@pytest.fixture(autouse=True)
def _no_grad() -> Any:
    with torch.no_grad():
        yield


@pytest.mark.parametrize(("name", "kind", "at"), FAST)
def test_draws_have_the_law_that_enumeration_says(name: str, kind: str, at: int) -> None:
    """Ladder steps 2 and 3: 100,000 draws by the production path, family-wise false alarm 1e-6.

    Power: a law off by 2.5 % in half of its outcomes is seen with more than 0.99 (`test_power`).
    """
    chosen_one = laws.make(name, kind, at)
    truth = {
        given: exact.sample_distribution(chosen_one, given, uniform_grid(5)) for given in (laws.BLANK, laws.MIDDLE)
    }
    model: Any = chosen_one.model
    if kind == "true":
        kind_of = MeanModel if name == "ancestral" else ScoreModel
        model = kind_of(OnCpu(model, mean=kind_of is MeanModel), model.process)
    else:
        model.network = TableOnCpu(model.network)
    assert SamplingModel(model).fused_model(torch.device("cuda")) is model
    chosen_one = dataclasses.replace(chosen_one, model=model)
    for given, law in truth.items():
        x = laws.run(chosen_one, Prompt(given.expand(COUNT, -1)), uniform_grid(5), device="cuda")
        assert (x < 3).all()
        assert laws.p_value(x, law, chosen_one.process.num_states) > laws.FAMILY / (2 * len(FAST))


class OnCpu(torch.nn.Module):
    """The true score of a law as a network: tables are looked up on the CPU."""

    def __init__(self, truth: exact.Score, mean: bool = False) -> None:
        super().__init__()
        self.truth, self.mean = truth, mean

    def forward(self, x: Tensor, sigma: Tensor) -> Tensor:
        process = self.truth.process
        told = sigma.cpu().double()
        if self.mean:
            said = torch.nn.functional.pad(self.truth.log_mean(x.cpu(), told), (0, process.num_states - 3))
        else:
            said = self.truth(x.cpu(), told) - process.log_score_shift(told)[:, None, None]
        return said.float().to(x.device)


class TableOnCpu(torch.nn.Module):
    """A table, looked up on the CPU."""

    def __init__(self, table: torch.nn.Module) -> None:
        super().__init__()
        self.table = table

    def forward(self, x: Tensor, sigma: Tensor) -> Tensor:
        return self.table(x.cpu(), sigma.cpu()).float().to(x.device)


def test_power() -> None:
    threshold = scipy.stats.chi2.isf(laws.FAMILY / (2 * len(FAST)), 26)
    assert scipy.stats.ncx2.sf(threshold, 26, 3 * COUNT * 0.025**2) > 0.99


def test_rare_tokens_of_a_large_vocabulary_are_drawn() -> None:
    """Ladder step 5: probabilities over nine decades at 50,257 tokens; each decade as often as it should be.

    Chi-square over decades at 1e-6. Two million draws; the mutant that counts in 24 bits loses the rarest decade.
    """
    n, draws, batch = 50_257, 2_000_000, 50_000
    decade = torch.arange(n, device="cuda") % 9
    weights = 10.0 ** -decade.double()
    p = torch.zeros(9, dtype=torch.float64, device="cuda").index_add(0, decade, weights)
    p = (p / p.sum()).cpu()
    z = weights.log().float().expand(batch, n)
    counts = torch.zeros(9, dtype=torch.long)
    one, mask = torch.ones(batch, dtype=torch.float64, device="cuda"), torch.full((batch,), n, device="cuda")
    law = AffineWeights(one)
    for seed in range(draws // batch):
        u = CounterRNG(seed, torch.arange(batch, device="cuda"))(1)[:, 0]
        drawn = chosen("cuda")(Scores(z, n, torch.zeros_like(one).float(), False), mask, law, u).y
        counts += torch.bincount(decade[drawn], minlength=9).cpu()
    due = p * draws
    assert due[-1] < 1  # two million draws see what has probability 1e-6 in all; below that, nothing
    kept = due > 5
    seen = torch.cat([counts[kept], counts[~kept].sum()[None]])
    expected = torch.cat([due[kept], due[~kept].sum()[None]])
    assert scipy.stats.chisquare(seen.numpy(), (expected * draws / expected.sum()).numpy()).pvalue > 1e-6


def test_masks_are_revealed_at_the_pace_of_the_step() -> None:
    """Ladder step 5: a step probability of 1e-4 at 50,257 tokens, within five standard errors of 4 million trials."""
    n, k, step = 50_257, 40_000, 1e-4
    z = torch.randn(k, n, device="cuda", generator=torch.Generator("cuda").manual_seed(0)).bfloat16()
    total = z.float().exp().double().sum(-1)
    law = AffineWeights(step / total, torch.ones_like(total), -step / total)
    mask, moved = torch.full((k,), n, device="cuda"), 0
    for seed in range(100):
        u = CounterRNG(seed, torch.arange(k, device="cuda"))(1)[:, 0]
        y = categorical_triton.choose(Scores(z, n, torch.zeros(k, device="cuda"), True), mask, law, u).y
        moved += int((y != n).sum())
    trials = 100 * k
    assert abs(moved - trials * step) < 5 * math.sqrt(trials * step)


def made(style: type[Transformer], timed: bool, states: int = 32) -> Transformer:
    network = style(states=states, width=64, depth=2, heads=2, time_conditioning=timed)
    generator = torch.Generator().manual_seed(0)
    for parameter in network.parameters():
        parameter.normal_(0, 0.12, generator=generator)
    return network


@pytest.mark.parametrize("timed", [True, False])
@pytest.mark.parametrize("style", [Reference, Modern])
def test_a_recording_is_what_it_records(style: type[Transformer], timed: bool) -> None:
    """At every size of batch, padded or not, and again after others were recorded."""
    network = factory.prepare_for_inference(made(style, timed), "cuda", "bfloat16")
    recorded = GraphedBackbone(network)
    for _ in range(2):
        for rows in (1, 2, 5, 16, 7):
            generator = torch.Generator().manual_seed(rows)
            x = torch.randint(32, (rows, 40), generator=generator).cuda()
            sigma = torch.rand(rows, generator=generator).cuda()
            valid = (torch.arange(40) < torch.randint(1, 41, (rows, 1), generator=generator)).cuda()
            for seen in (None, valid):
                ours, theirs = recorded.hidden(x, sigma, seen), network.hidden(x, sigma, seen)
                kept = slice(None) if seen is None else seen
                torch.testing.assert_close(ours[kept].float(), theirs[kept].float(), rtol=2e-2, atol=2e-2)


SAME = [
    ("absorbing", kind, name) for kind in ("mean", "score") for name in ("first-hitting", "tweedie", "euler", "theta")
]
SAME += [("uniform", kind, name) for kind in ("mean", "score") for name in ("tweedie", "euler", "theta")]
SAME += [(noise, "mean", "ancestral") for noise in ("absorbing", "uniform")]


@pytest.mark.parametrize(("noise", "parameterization", "name"), SAME)
def test_the_same_tokens_as_on_a_cpu(noise: str, parameterization: str, name: str) -> None:
    """In float32: recordings, kernels and draws together."""
    process, schedule = factory.build_process(noise, 31), factory.build_schedule("log-linear")
    found = []
    for device in ("cpu", "cuda"):
        network = made(Reference, True, process.num_states)
        served = factory.prepare_for_inference(network, device, "float32")
        graphed = GraphedBackbone(served) if device == "cuda" else None
        model: Any = factory.build_parameterization(parameterization, served, process, graphed=graphed)
        job = factory.build_sampler(name, model, process, schedule)
        rows = CounterRNG(3, torch.arange(24, device=device))
        *_, last = job.run(sampling.empty(24, 48, device), uniform_grid(16).to(device), rows)
        found.append(last.x.cpu())
    same = (found[0] == found[1]).all(-1).float().mean()
    assert same >= 0.95  # a row may part where a uniform lies within float32 of a boundary


def test_a_planned_run_never_waits() -> None:
    """Once it is planned, events follow each other without a question to the device."""
    process, schedule = Absorbing(31), factory.build_schedule("log-linear")
    network = factory.prepare_for_inference(made(Reference, time_conditioning=False), "cuda", "bfloat16")
    model: Any = factory.build_parameterization("mean", network, process, graphed=GraphedBackbone(network))
    job = factory.build_sampler("first-hitting", model, process, schedule)
    for mode in ("default", "error"):  # the first run records and compiles
        rows = CounterRNG(0, torch.arange(4, device="cuda"))
        states = job.run(sampling.empty(4, 48, "cuda"), uniform_grid(16).cuda(), rows)
        next(states)
        next(states)  # planned
        torch.cuda.set_sync_debug_mode(mode)
        try:
            *_, last = states
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert (last.x < 31).all()
