"""Ladder steps 2, 3, 6 and 7: every sampler, run as in production, against its distribution by enumeration."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
import scipy.stats
import torch
from toys import random_distribution, random_model, tensor

from sedd import exact, sampling
from sedd.diffusion import reverse
from sedd.diffusion.parameterization import MeanModel, ScoreModel
from sedd.diffusion.process import Absorbing, Process, Uniform
from sedd.diffusion.rng import CounterRNG
from sedd.diffusion.schedule import Geometric, LogLinear, Schedule
from sedd.exact import sampler_distribution
from sedd.sampling import (
    Ancestral,
    Confident,
    EntropyBounded,
    Euler,
    FirstHitting,
    Gibbs,
    GridSampler,
    LeftToRight,
    Ordered,
    Prompt,
    Remask,
    Sampler,
    SamplingModel,
    StepContext,
    Theta,
    Tweedie,
    Warping,
    uniform_grid,
)

FAMILY = 1e-6
"""The probability that any of the chi-square tests below fails although all is right, each taking an equal share."""
COUNT = 20_000
SETTINGS: list[tuple[Process, Schedule]] = [
    (Absorbing(3), LogLinear()),
    (Uniform(3), LogLinear(1e-2)),
    (Uniform(3), Geometric(1e-3, 8.0)),
]
EVERYWHERE: dict[str, Callable[..., Sampler]] = {
    "tweedie": Tweedie,
    "euler": Euler,
    "theta": Theta,
    "theta-early": lambda *parts: Theta(*parts, theta=0.3),
    "ancestral": Ancestral,
}
MASKS: dict[str, Callable[..., Sampler]] = {
    "first-hitting": FirstHitting,
    "any-order": Ordered,
    "forward": lambda *parts: Ordered(*parts, direction="forward"),
    "backward": lambda *parts: Ordered(*parts, direction="backward"),
    "cap": lambda *parts: Remask(*parts, eta=0.2),
    "rescale": lambda *parts: Remask(*parts, strategy="rescale", eta=0.3),
    "loop": lambda *parts: Remask(*parts, strategy="loop", eta=0.3),
    "confidence": Confident,
    "entropy": lambda *parts: EntropyBounded(*parts, bound=1.0),
    "confidence, padding last": lambda *parts: Confident(*parts, pad=0),
    "entropy, padding last": lambda *parts: EntropyBounded(*parts, bound=1.0, pad=0),
}
TOKENS: dict[str, Callable[..., Sampler]] = {"gibbs": lambda *parts: Gibbs(*parts, sites=2)}
NO_GRID = torch.zeros(0, dtype=torch.float64)
BLANK, MIDDLE, ENDS = torch.tensor([-1, -1, -1]), torch.tensor([-1, 2, -1]), torch.tensor([1, -1, 0])


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


def models(process: Process) -> dict[str, object]:
    """Return the true score of a distribution, and two wrong models that are consistent with no distribution."""
    return {
        "true": exact.Score(random_distribution(3, 3, 0), process),
        "score": random_model(ScoreModel, process, 3),
        "mean": random_model(MeanModel, process, 3),
    }


def cases() -> list[tuple[str, str, int]]:
    found = []
    for at, (process, _) in enumerate(SETTINGS):
        names = [name for name in EVERYWHERE if name != "theta-early"]  # its order is tested below
        names += MASKS if isinstance(process, Absorbing) else TOKENS
        found += [(n, m, at) for n in names for m in ("true", "score", "mean") if (n, m) != ("ancestral", "score")]
    return found


CASES = cases()


def make(name: str, kind: str, at: int) -> Sampler:
    process, schedule = SETTINGS[at]
    return (EVERYWHERE | MASKS | TOKENS)[name](models(process)[kind], process, schedule)


def run(
    chosen: Sampler,
    prompt: Prompt,
    times: torch.Tensor,
    seed: int = 0,
    cached: bool = True,
    fused: bool | None = None,
    device: str = "cpu",
) -> torch.Tensor:
    model = SamplingModel.of(chosen.model)
    model.cached, model.fused = model.cached and cached, fused
    rows = CounterRNG(seed, torch.arange(len(prompt.given), device=device))
    *_, last = chosen.run(prompt.to(device), times.to(device), rows, model)
    return last.x.cpu()


def p_value(x: torch.Tensor, distribution: torch.Tensor, num_states: int) -> float:
    """Chi-square of draws against a distribution; outcomes expected less than five times are one."""
    counts = torch.bincount(exact.index_of(x, num_states), minlength=len(distribution)).double()
    assert counts[distribution < 1e-12].sum() == 0  # what cannot happen did not
    expected = distribution * len(x)
    rare = expected < 5
    seen, due = (torch.cat([a[~rare], a[rare].sum()[None]]) for a in (counts, expected))
    if due[-1] < 5:  # even together: into the rarest of the others
        at = due[:-1].argmin()
        seen, due = (a[:-1].index_add(0, at[None], a[-1:]) for a in (seen, due))
    return float(scipy.stats.chisquare(seen.numpy(), due.numpy()).pvalue)


@pytest.mark.parametrize(("name", "kind", "at"), CASES)
def test_draws_have_the_enumerated_distribution(name: str, kind: str, at: int) -> None:
    """Nothing given, one token given, two given; family-wise false alarm 1e-6.

    Power: with 20,000 draws an error of 5 % in every outcome (total variation 0.025) is detected with probability above
    0.99: see `test_power`.
    """
    chosen = make(name, kind, at)
    for given in (BLANK, MIDDLE, ENDS):
        distribution = exact.sample_distribution(chosen, given, uniform_grid(5))
        assert math.isclose(distribution.sum(), 1, rel_tol=1e-9)
        x = run(chosen, Prompt(given.expand(COUNT, -1)), uniform_grid(5))
        assert (x < 3).all()  # no mask survives
        assert (x == given)[:, given >= 0].all()  # given tokens are kept
        assert p_value(x, distribution, chosen.process.num_states) > FAMILY / (3 * len(CASES))


@pytest.mark.parametrize(("name", "kind", "at"), [case for case in CASES if case[1] != "true"])
def test_fused_draws_are_those_of_the_table(name: str, kind: str, at: int) -> None:
    """Draws by affine weights of the logits give the same tokens as draws from a table of probabilities."""
    chosen = make(name, kind, at)
    for given in (BLANK, MIDDLE):
        prompt = Prompt(given.expand(500, -1))
        fused, by_table = (run(chosen, prompt, uniform_grid(5), fused=fused) for fused in (True, False))
        assert torch.equal(fused, by_table)


def test_power() -> None:
    """27 outcomes, each off by ±5 %: noncentrality count·0.05²."""
    threshold = scipy.stats.chi2.isf(FAMILY / (3 * len(CASES)), 26)
    assert scipy.stats.ncx2.sf(threshold, 26, 3 * COUNT * 0.05**2) > 0.99
    distribution = torch.full((27,), 1 / 27, dtype=torch.float64)
    off = distribution * (1 + 0.1 * (-1) ** torch.arange(27))
    x = exact.all_sequences(3, 3)[torch.multinomial(off, COUNT, True, generator=torch.Generator().manual_seed(0))]
    assert p_value(x, distribution, 3) < FAMILY / (3 * len(CASES))  # and an error of 10 % is detected


def same_everywhere(self: CounterRNG, length: int, step: int = 0, event: int = 0) -> torch.Tensor:
    """The mutant: all positions of a row share their uniforms."""
    return RIGHT(self, 1, step, event).expand(-1, length, -1)


def same_every_step(self: CounterRNG, length: int, step: int = 0, event: int = 0) -> torch.Tensor:
    """The mutant: every step has the uniforms of the first."""
    return RIGHT(self, length, 0, event)


RIGHT = CounterRNG.__call__
MUTANTS: dict[str, tuple[str, object]] = {
    "one uniform for all positions": ("sedd.diffusion.rng.CounterRNG.__call__", same_everywhere),
    "one uniform for all steps": ("sedd.diffusion.rng.CounterRNG.__call__", same_every_step),
    "the likeliest token": ("sedd.diffusion.categorical.sample_inverse_cdf", lambda weights, u: weights.argmax(-1)),
}


@pytest.mark.parametrize("mutant", MUTANTS)
@pytest.mark.parametrize("name", ["tweedie", "theta", "remask"])
def test_wrong_draws_are_caught(name: str, mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests of the test: each of these mutants gives samples that look right."""
    process, schedule = SETTINGS[0]
    kinds = {"tweedie": Tweedie, "theta": Theta, "remask": lambda *parts: Remask(*parts, strategy="rescale", eta=0.3)}
    chosen = kinds[name](models(process)["true"], process, schedule)
    distribution = exact.sample_distribution(chosen, BLANK, uniform_grid(5))
    monkeypatch.setattr(*MUTANTS[mutant])
    x = run(chosen, Prompt(BLANK.expand(COUNT, -1)), uniform_grid(5))
    assert p_value(x, distribution, 4) < FAMILY / (3 * len(CASES))


# The distribution of the samples and that of the data ------------------------------------------------------


def total_variation(p: torch.Tensor, q: torch.Tensor) -> float:
    return (p - q).abs().sum().item() / 2


def mild_distribution(seed: int = 0) -> exact.Distribution:
    """A distribution in which conditionals change, but by less than a factor of two."""
    p = torch.exp(0.25 * torch.randn((3, 3, 3), generator=torch.Generator().manual_seed(seed), dtype=torch.float64))
    return exact.Distribution(p / p.sum())


def error(chosen: GridSampler, distribution: exact.Distribution, steps: int) -> float:
    """Return the total variation to the data of a run from the true distribution at t = 1: the steps' error alone."""
    times, x = uniform_grid(steps), exact.all_sequences(chosen.process.num_states, 3)
    p, blank = distribution.at(chosen.process, chosen.schedule.sigma(times[0])), BLANK < 0
    for t, s in list(pairwise(times))[:-1]:
        p = exact.step_distribution(chosen, p, blank, t.expand(len(x)), s.expand(len(x)))
    sigma = chosen.schedule.sigma(times[-2]).expand(len(x))
    p = exact.propagate(p, reverse.denoising_table(chosen.model, chosen.process, x, sigma))
    return total_variation(p, distribution.at(chosen.process, tensor(0.0)))


ORDERS = [(name, at) for name in EVERYWHERE for at in range(3) if not (name.startswith("theta") and at)]


def gain(chosen: GridSampler, distribution: exact.Distribution, steps: int) -> float:
    """Return the factor by which the error falls when the steps are doubled."""
    return error(chosen, distribution, steps) / error(chosen, distribution, 2 * steps)


@pytest.mark.parametrize(("name", "at"), ORDERS)
def test_the_error_falls_at_the_declared_order(name: str, at: int) -> None:
    process, schedule = SETTINGS[at]
    distribution = mild_distribution()
    chosen = EVERYWHERE[name](exact.Score(distribution, process), process, schedule)
    assert 0.85 * 2**chosen.order < gain(chosen, distribution, 32 if chosen.order == 2 else 64) < 1.15 * 2**chosen.order


@pytest.mark.parametrize("theta", [0.3, 0.5])
@pytest.mark.parametrize("at", [1, 2])
def test_under_uniform_noise_only_clamps_keep_theta_from_the_second_order(
    at: int, theta: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    process, schedule = SETTINGS[at]
    distribution = mild_distribution()
    chosen = Theta(exact.Score(distribution, process), process, schedule, theta)
    assert chosen.order == 1
    assert gain(chosen, distribution, 32) > 2
    plain = error(Tweedie(chosen.model, process, schedule), distribution, 64)  # at as many calls
    assert error(chosen, distribution, 32) < plain / 2
    for module in ("sedd.sampling.theta", "sedd.exact.sampler_distribution"):  # probabilities below 0
        monkeypatch.setattr(f"{module}.normalize_probs", lambda p: p / p.sum(-1, keepdim=True))
    assert 0.85 * 4 < gain(chosen, distribution, 32) < 1.15 * 4


def test_theta_without_the_score_at_t_is_of_the_first_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutant: the second stage uses the score at ρ alone, without subtracting that at t."""
    process, schedule = SETTINGS[0]
    distribution = mild_distribution()

    def by_mid_score(
        self: Theta, before: object, now: torch.Tensor, x: torch.Tensor, *times: torch.Tensor
    ) -> torch.Tensor:
        middle, s = schedule.sigma(self.midpoint(*times)), schedule.sigma(times[1])
        return reverse.analytic_weights(process, now, x, middle, s)

    chosen = Theta(exact.Score(distribution, process), process, schedule)
    assert 0.85 * 4 < gain(chosen, distribution, 32) < 1.15 * 4
    monkeypatch.setattr(Theta, "second_stage", by_mid_score)
    assert 0.85 * 2 < gain(chosen, distribution, 32) < 1.15 * 2


@pytest.mark.parametrize("steps", [1, 2, 5, 16])
@pytest.mark.parametrize("given", [BLANK, MIDDLE, ENDS], ids=str)
def test_first_hitting_has_the_distribution_of_tweedie(steps: int, given: torch.Tensor) -> None:
    """For a normalised absorbing model, at every number of steps and on any grid."""
    process, schedule = SETTINGS[0]
    for model in (models(process)["true"], models(process)["mean"]):
        for times in (uniform_grid(steps), sampling.cosine_grid(steps)):
            distributions = [
                exact.sample_distribution(kind(model, process, schedule), given, times)
                for kind in (FirstHitting, Tweedie, Ancestral)
            ]
            assert total_variation(distributions[0], distributions[1]) <= 1e-12
            assert total_variation(distributions[0], distributions[2]) <= 1e-12
    score = models(process)[
        "score"
    ]  # not normalised: Tweedie reveals at the rate of the score, and the distributions differ
    differ = [
        exact.sample_distribution(kind(score, process, schedule), BLANK, uniform_grid(16))
        for kind in (FirstHitting, Tweedie)
    ]
    assert total_variation(*differ) > 1e-3


@pytest.mark.parametrize("at", [1, 2])
def test_ancestral_has_the_distribution_of_tweedie_under_uniform_noise(at: int) -> None:
    process, schedule = SETTINGS[at]
    model = models(process)["mean"]
    distributions = [
        exact.sample_distribution(kind(model, process, schedule), BLANK, uniform_grid(6))
        for kind in (Ancestral, Tweedie)
    ]
    assert total_variation(*distributions) <= 1e-12


@pytest.mark.parametrize("direction", ["random", "forward", "backward"])
def test_one_position_per_call_samples_the_data(direction: str) -> None:
    """With the true score every order is the chain rule; so is the first-hitting sampler."""
    process, schedule = SETTINGS[0]
    distribution = random_distribution(3, 3, 0)
    score = exact.Score(distribution, process)
    truth = distribution.at(process, tensor(0.0))
    assert (
        total_variation(exact.sample_distribution(Ordered(score, process, schedule, direction), BLANK, NO_GRID), truth)
        <= 1e-12
    )
    assert (
        total_variation(exact.sample_distribution(FirstHitting(score, process, schedule), BLANK, NO_GRID), truth)
        <= 1e-12
    )
    few = exact.sample_distribution(Ordered(score, process, schedule, direction), BLANK, uniform_grid(2))
    assert total_variation(few, truth) > 1e-3  # two at once is not the chain rule


def test_infilling_is_the_conditional_under_absorbing_noise_and_nearly_so_under_uniform() -> None:
    distribution = random_distribution(3, 3, 0)
    for at, worst in ((0, 1e-12), (1, 0.1), (2, 0.1)):
        process, schedule = SETTINGS[at]
        score = exact.Score(distribution, process)
        truth = distribution.given(MIDDLE).at(process, tensor(0.0))
        if at == 0:
            found = exact.sample_distribution(FirstHitting(score, process, schedule), MIDDLE, NO_GRID)
        else:
            found = exact.sample_distribution(Tweedie(score, process, schedule), MIDDLE, uniform_grid(128))
            assert total_variation(found, truth) > 1e-3  # an approximation, as documented
        assert total_variation(found, truth) <= worst


def test_remasking_keeps_the_share_of_tokens() -> None:
    """A step masks again as much as it reveals in excess: P(token at s) = α_s for every η."""
    process, schedule = SETTINGS[0]
    t, s = tensor(0.6), tensor(0.5)
    for strategy in ("cap", "rescale"):
        masked, revealed = Remask(models(process)["true"], process, schedule, strategy, eta=0.4).rates(t, s)
        kept_t, kept_s = (torch.exp(-schedule.sigma(a)) for a in (t, s))
        assert masked > 0.1
        torch.testing.assert_close(kept_t * (1 - masked) + (1 - kept_t) * revealed, kept_s, rtol=1e-12, atol=0)


def test_remasking_approaches_the_data_as_it_fades() -> None:
    """η of 1/steps: the error falls like 1/steps. With a fixed η it falls more slowly."""
    process, schedule = SETTINGS[0]
    distribution = random_distribution(3, 3, 0)
    score, truth = exact.Score(distribution, process), distribution.at(process, tensor(0.0))
    fading, fixed = (
        [
            total_variation(
                exact.sample_distribution(Remask(score, process, schedule, eta=e(n)), BLANK, uniform_grid(n)), truth
            )
            for n in (64, 128)
        ]
        for e in (lambda n: 1 / n, lambda n: 0.2)
    )
    assert 1.8 < fading[0] / fading[1] < 2.2
    assert fixed[0] / fixed[1] < 1.7


@pytest.mark.parametrize("at", [1, 2])
def test_gibbs_corrections_keep_the_distribution_and_reduce_errors(at: int) -> None:
    process, schedule = SETTINGS[at]
    distribution = random_distribution(3, 3, 0)
    score, x = exact.Score(distribution, process), exact.all_sequences(3, 3)
    sigma = schedule.sigma(tensor(0.3))
    right = distribution.at(process, sigma)
    table = reverse.normalize_probs(score(x, sigma.expand(len(x))).exp())
    for site in range(3):
        free = (torch.arange(3) == site).expand(x.shape)
        torch.testing.assert_close(
            sampler_distribution.propagate_free(right, table, x, free), right, rtol=1e-12, atol=0
        )
    everywhere = sampler_distribution.propagate_free(right, table, x, torch.ones(x.shape, dtype=torch.bool))
    assert total_variation(everywhere, right) > 1e-3  # the mutant: all positions at once change it
    assert gain(Gibbs(score, process, schedule, sites=2), distribution, 16) > 0.85 * 2  # the declared order, or better
    truth = distribution.at(process, tensor(0.0))
    plain = exact.sample_distribution(Tweedie(score, process, schedule), BLANK, uniform_grid(16))
    mended = exact.sample_distribution(Gibbs(score, process, schedule, sites=4), BLANK, uniform_grid(16))
    assert total_variation(mended, truth) < total_variation(plain, truth) / 3


BY_CONFIDENCE = {
    "confidence": Confident,
    "entropy": lambda *parts: EntropyBounded(*parts, bound=0.0),
    "confidence, padding last": lambda *parts: Confident(*parts, pad=2),
    "entropy, padding last": lambda *parts: EntropyBounded(*parts, bound=0.0, pad=2),
}


@pytest.mark.parametrize("name", BY_CONFIDENCE)
@pytest.mark.parametrize("given", [BLANK, MIDDLE], ids=["blank", "infilling"])
def test_one_position_at_a_time_has_the_models_distribution_in_any_adaptive_order(
    name: str, given: torch.Tensor
) -> None:
    """With exact conditionals; the order is chosen anew after every token, and differs between sequences."""
    process, schedule = SETTINGS[0]
    distribution = random_distribution(3, 3, 0)
    chosen = BY_CONFIDENCE[name](exact.Score(distribution, process), process, schedule)
    blanks = int((given < 0).sum())
    found = exact.sample_distribution(chosen, given, uniform_grid(blanks))
    x = exact.all_sequences(process.num_states, 3)
    right = distribution.at(process, tensor(0.0)) * ((given < 0) | (x == given)).all(-1)
    assert total_variation(found, right / right.sum()) < 1e-15
    if name == "confidence" and blanks > 2:  # two positions in one step: the mutant that the law must catch
        assert total_variation(exact.sample_distribution(chosen, given, uniform_grid(2)), right) > 1e-2


@pytest.mark.parametrize("name", BY_CONFIDENCE)
def test_choosing_by_confidence_is_not_a_random_order_of_a_wrong_model(name: str) -> None:
    """Whose conditionals are not those of one distribution: even one at a time, so the declared order is 0."""
    process, schedule = SETTINGS[0]
    model = models(process)["mean"]
    distribution = exact.sample_distribution(Ordered(model, process, schedule), BLANK, NO_GRID)
    chosen = BY_CONFIDENCE[name](model, process, schedule)
    assert chosen.order == 0
    assert total_variation(exact.sample_distribution(chosen, BLANK, uniform_grid(64)), distribution) > 1e-2


@pytest.mark.parametrize("name", ["confidence", "entropy"])
def test_padding_is_revealed_last(name: str, refuses: Callable[..., None]) -> None:
    """Of records that are mostly padding: certain, so revealed first unless its id is given; then after all else."""
    process, schedule = SETTINGS[0]
    pad = process.vocab_size - 1
    weights = torch.tensor([0.1, 0.02, 0.88], dtype=torch.float64)  # the first token is never padding
    first = torch.tensor([0.5, 0.5, 0.0], dtype=torch.float64)
    model = exact.Score(exact.Distribution(torch.einsum("i,j,k->ijk", first, weights, weights)), process)
    kind: Any = {"confidence": Confident, "entropy": EntropyBounded}[name]
    options = {"bound": 0.0} if name == "entropy" else {}

    def first_revealed(**extra: Any) -> torch.Tensor:
        states = kind(model, process, schedule, **options, **extra).run(
            Prompt(torch.full((64, 3), -1)), uniform_grid(3), CounterRNG(0, torch.arange(64))
        )
        *_, last = states
        revealed: torch.Tensor = last.reveal_step.argmin(-1)
        return revealed

    assert (first_revealed() != 0).all()
    assert (first_revealed(pad=pad) == 0).all()
    wrong = random_model(MeanModel, process, 3)
    plain, *last = (
        exact.sample_distribution(kind(wrong, process, schedule, **options, pad=id), BLANK, uniform_grid(2))
        for id in (-1, 0, 1, 2)
    )
    # of a wrong model: the order decides, and the enumeration has it
    assert max(total_variation(plain, other) for other in last) > 1e-3
    refuses(lambda: kind(model, process, schedule, pad=3), "pad is 3", "0..2", "-1")


# Randomness, caching, counting -----------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "kind", "at"), [c for c in CASES if c[1] == "mean"])
def test_a_row_does_not_depend_on_its_batch(name: str, kind: str, at: int) -> None:
    """Batches of 1, 3 and 12 rows; rows shuffled; given tokens that differ from row to row."""
    chosen, times = make(name, kind, at), uniform_grid(6)
    given = torch.full((12, 3), -1)
    given[::2, 1], given[::3, 0] = 1, 2
    whole = run(chosen, Prompt(given), times)

    def some(rows: torch.Tensor) -> torch.Tensor:
        *_, last = chosen.run(Prompt(given[rows]), times, CounterRNG(0, rows))
        return last.x

    for size in (1, 3):
        assert torch.equal(torch.cat([some(rows) for rows in torch.arange(12).split(size)]), whole)
    shuffled = torch.randperm(12, generator=torch.Generator().manual_seed(1))
    assert torch.equal(some(shuffled), whole[shuffled])
    assert not torch.equal(run(chosen, Prompt(given), times, seed=1), whole)


class TimeFree(torch.nn.Module):
    """A network in two parts that does not depend on σ, so that its hidden states can be cached."""

    def __init__(self, num_states: int, timed: bool = False) -> None:
        super().__init__()
        self.depends_on_sigma, self.head = timed, torch.nn.Identity()
        self.table = exact.Table(num_states, 3)
        self.table.weight.data.normal_(generator=torch.Generator().manual_seed(3))

    def hidden(self, x: torch.Tensor, sigma: torch.Tensor, valid: torch.Tensor | None = None) -> torch.Tensor:
        return self.table(x, sigma)

    def forward(self, x: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
        return self.hidden(x, sigma)


@pytest.mark.parametrize("name", [*(n for n in EVERYWHERE if "early" not in n), *MASKS])
def test_cached_and_uncached_runs_give_the_same_tokens(name: str) -> None:
    process, schedule = SETTINGS[0]
    model = MeanModel(TimeFree(4), process)
    chosen = (EVERYWHERE | MASKS)[name](model, process, schedule)
    prompt, times = Prompt(torch.full((50, 3), -1)), uniform_grid(20)
    views = {cached: SamplingModel(model, cached=cached) for cached in (True, False)}
    ends = {c: list(chosen.run(prompt, times, CounterRNG(0, torch.arange(50)), views[c]))[-1].x for c in views}
    assert torch.equal(ends[True], ends[False])
    assert views[True].rows <= views[False].rows
    if name in ("tweedie", "euler", "theta", "ancestral"):
        assert views[True].rows < 0.3 * views[False].rows  # three positions: at most four different inputs per row
    assert not SamplingModel(
        MeanModel(TimeFree(4, timed=True), process)
    ).cached  # hidden states that depend on σ are not cached


@pytest.mark.parametrize("steps", [1, 4, 20])
def test_first_hitting_is_the_uncached_loop_over_all_steps(steps: int) -> None:
    """The slow reference: every step computes every row at its noise level, and reveals the positions of the plan."""
    process, schedule = SETTINGS[0]
    score, times = models(process)["true"], uniform_grid(steps)
    chosen, prompt, rng = (
        FirstHitting(score, process, schedule),
        Prompt(torch.full((200, 3), -1)),
        CounterRNG(4, torch.arange(200)),
    )
    plan, u = chosen.plan(prompt, times, rng), rng(3, 0, 1)[..., 1]
    x = torch.full((200, 3), process.mask)
    for k in range(steps):
        p = score.log_mean(x, schedule.sigma(times[k]).expand(200)).exp()
        fresh = (p.cumsum(-1) < u[..., None]).sum(-1)
        x = torch.where(plan.reveal_step == k + 1, fresh, x)
    assert torch.equal(run(chosen, prompt, times, seed=4), x)
    assert int(plan.calls.max()) <= min(steps, 3)


@pytest.mark.parametrize("length", [16, 256, 1024])
@pytest.mark.parametrize("steps", [16, 128, 1024])
def test_the_number_of_calls_is_known_beforehand(steps: int, length: int) -> None:
    """n(1 − (1 − 1/n)^L) within 2 %, by plans alone; and the plan's number is the one that is made."""
    process, schedule = Absorbing(3), LogLinear()
    chosen = FirstHitting(random_model(MeanModel, process, 1), process, schedule)
    times, rows = uniform_grid(steps), 2_000_000 // (steps * length) + 400
    plan = chosen.plan(sampling.empty(rows, length), times, CounterRNG(0, torch.arange(rows)))
    due = steps * (1 - (1 - 1 / steps) ** length)
    assert math.isclose(chosen.expected_calls(times, length), due, rel_tol=2e-3)  # ε of the schedule
    assert math.isclose(plan.calls.double().mean().item(), due, rel_tol=0.02)


def test_calls_are_those_of_the_plan() -> None:
    process, schedule = SETTINGS[0]
    chosen, prompt = FirstHitting(models(process)["mean"], process, schedule), Prompt(torch.full((300, 3), -1))
    for times in (uniform_grid(7), NO_GRID):
        model, rng = SamplingModel(chosen.model), CounterRNG(0, torch.arange(300))
        plan = chosen.plan(prompt, times, rng)
        *_, last = chosen.run(prompt, times, rng, model)
        assert model.rows == int(plan.calls.sum())
        assert model.calls == int(plan.calls.max())
        assert torch.equal(last.reveal_step, plan.reveal_step)
    assert (plan.calls == 3).all()


def test_clamps_are_counted() -> None:
    process, schedule = SETTINGS[1]
    for model, some in ((models(process)["true"], False), (models(process)["score"], True)):
        chosen = Tweedie(model, process, schedule)
        view = SamplingModel(model)
        list(chosen.run(Prompt(torch.full((100, 3), -1)), uniform_grid(6), CounterRNG(0, torch.arange(100)), view))
        assert bool(view.clamped > 0) == some


def test_left_to_right_is_the_chain_rule() -> None:
    """The baseline, with nothing given and with a beginning; a gap before a text is refused."""
    distribution, process, schedule = random_distribution(3, 3, 0), Absorbing(3), LogLinear()
    model = Chain(exact.Score(distribution, process))
    chosen = LeftToRight(model, process, schedule)
    for given in (BLANK, torch.tensor([2, -1, -1])):
        truth = distribution.given(given).probabilities if given[0] >= 0 else distribution.probabilities
        assert total_variation(exact.sample_distribution(chosen, given, NO_GRID), truth) <= 1e-12
        x = run(chosen, Prompt(given.expand(COUNT, -1)), NO_GRID)
        assert p_value(x, truth, 3) > FAMILY
    with pytest.raises(ValueError, match="cannot fill a gap before a text"):
        run(chosen, Prompt(MIDDLE.expand(2, -1)), NO_GRID)


class Chain:
    """The true distribution, one token after another."""

    depends_on_sigma = False

    def __init__(self, score: exact.Score) -> None:
        self.score, self.log_next, self.process = score, score.log_next, score.process

    def __call__(self, x: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
        return self.score(x, sigma)

    def hidden(self, x: torch.Tensor, sigma: torch.Tensor, valid: torch.Tensor | None = None) -> torch.Tensor:
        return self.log_next(torch.nn.functional.pad(x, (0, 3 - x.shape[-1])))[:, : x.shape[-1]]

    def log_next_at(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden


# A third-party sampler ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class HalfSteps(GridSampler):
    """A third-party sampler: two Tweedie steps in place of each, by `step` alone."""

    order = 1.0
    assumes = "nothing"

    def step(self, x: torch.Tensor, t: torch.Tensor, s: torch.Tensor, context: StepContext) -> torch.Tensor:
        tweedie, middle = Tweedie(self.model, self.process, self.schedule), (t + s) / 2
        first, second = (context._replace(step=1000 + 2 * context.step + half) for half in (0, 1))  # unused numbers
        return tweedie.step(tweedie.step(x, t, middle, first), middle, s, second)


def test_a_sampler_is_written_by_its_step_alone() -> None:
    process, schedule = SETTINGS[1]
    chosen = HalfSteps(models(process)["true"], process, schedule)
    assert chosen.expected_calls(uniform_grid(3), 5) == 3
    times = torch.tensor([1, 0.75, 0.5, 0.25, 0], dtype=torch.float64)  # the last step is one of the loop
    fine = torch.tensor([1, 0.875, 0.75, 0.625, 0.5, 0.375, 0.25, 0], dtype=torch.float64)
    right = exact.sample_distribution(Tweedie(chosen.model, process, schedule), MIDDLE, fine)
    x = run(chosen, Prompt(MIDDLE.expand(COUNT, -1)), times)
    assert p_value(x, right, 3) > FAMILY
    with pytest.raises(ValueError, match="HalfSteps has no enumeration"):
        exact.sample_distribution(chosen, MIDDLE, times)


# Temperature and nucleus -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["true", "score", "mean"])
@pytest.mark.parametrize("at", range(3))
def test_temperature_acts_on_the_clean_token_alone(kind: str, at: int) -> None:
    """p(x_0 | x) is p^(1/T) of what it was; masks are revealed at the same rate as before."""
    process, schedule = SETTINGS[at]
    model = models(process)[kind]
    x = exact.all_sequences(process.num_states, 3)
    sigma = schedule.sigma(tensor(0.4)).expand(len(x))
    plain = reverse.denoised_probs(process, model(x, sigma), x, sigma)
    sharp = SamplingModel(model, warping=Warping(temperature=0.5))
    found = reverse.denoised_probs(process, sharp(x, sigma), x, sigma)
    free = process.is_noisy(x)
    torch.testing.assert_close(found[free], reverse.normalize_probs(plain**2)[free], rtol=1e-7, atol=1e-9)
    if isinstance(process, Absorbing):
        paces = (m(x, sigma)[..., :3].exp().sum(-1)[free] for m in (model, sharp))
        torch.testing.assert_close(*paces, rtol=1e-9, atol=0)


def test_temperature_one_changes_nothing_and_the_distributions_follow() -> None:
    """Warped models are sampled too: one position per call draws Π p^(1/T), normalised step by step."""
    process, schedule = SETTINGS[0]
    model = models(process)["true"]
    distribution = exact.sample_distribution(FirstHitting(model, process, schedule), BLANK, uniform_grid(5))
    warped = FirstHitting(SamplingModel(model, warping=Warping()), process, schedule)
    same = exact.sample_distribution(warped, BLANK, uniform_grid(5))
    assert total_variation(distribution, same) <= 1e-12
    cold = SamplingModel(model, warping=Warping(temperature=0.7, top_k=2))
    chosen = FirstHitting(cold, process, schedule)
    x = run(chosen, Prompt(BLANK.expand(COUNT, -1)), uniform_grid(5))
    assert p_value(x, exact.sample_distribution(chosen, BLANK, uniform_grid(5)), 4) > FAMILY
    assert total_variation(exact.sample_distribution(chosen, BLANK, uniform_grid(5)), distribution) > 0.05


def test_top_k_and_top_p_keep_the_likeliest() -> None:
    p = torch.tensor([[0.5, 0.3, 0.15, 0.05], [0.25, 0.25, 0.4, 0.1]], dtype=torch.float64)

    def kept(**options: float) -> list[list[float]]:
        return Warping(**options)(p.log()).exp().tolist()

    assert kept(top_k=1) == [pytest.approx([1, 0, 0, 0]), pytest.approx([0, 0, 1, 0])]
    assert kept(top_p=0.75) == [
        pytest.approx([0.625, 0.375, 0, 0]),
        pytest.approx([0.25 / 0.9, 0.25 / 0.9, 0.4 / 0.9, 0]),
    ]
    assert kept(top_p=1e-9) == kept(top_k=1)  # one is always left
    p = p.float()
    assert kept(top_p=5e-324) == kept(temperature=5e-324) == kept(top_k=1)  # both are 0 in float32


# Refusals --------------------------------------------------------------------------------------------------


def test_bad_settings_are_refused(refuses: Callable[..., None]) -> None:
    masks, tokens, schedule = Absorbing(3), Uniform(3), LogLinear()
    score = models(masks)["score"]
    refuses(lambda: FirstHitting(models(tokens)["true"], tokens, schedule), "uniform", "tweedie")
    refuses(lambda: Gibbs(score, masks, schedule), "absorbing", "remask")
    refuses(lambda: Remask(models(tokens)["true"], tokens, schedule), "uniform", "gibbs")
    refuses(lambda: Remask(score, masks, schedule, strategy="often"), "often", "rescale")
    refuses(lambda: Remask(score, masks, schedule, eta=2.0), "eta is 2.0")
    refuses(lambda: Remask(score, masks, schedule, t_on=0.1, t_off=0.2), "t_on is 0.1")
    refuses(lambda: Theta(score, masks, schedule, theta=1.0), "theta is 1.0")
    refuses(lambda: Ordered(score, masks, schedule, direction="up"), "direction is 'up'")
    refuses(lambda: EntropyBounded(score, masks, schedule, bound=-1.0), "bound is -1")
    refuses(lambda: Gibbs(models(tokens)["true"], tokens, schedule, sites=0), "sites is 0")
    refuses(lambda: Warping(temperature=0.0), "temperature is 0")
    refuses(lambda: Warping(top_p=0.0), "top_p is 0")
    refuses(lambda: Warping(top_k=0), "top_k is 0")
    refuses(lambda: uniform_grid(0), "steps is 0")
    refuses(lambda: sampling.given_grid([0.5, 0.0]), "0.5", "from 1 to 0")
    refuses(lambda: sampling.given_grid([1.0, 0.2, 0.3, 0.0]), "fall")
    ancestral = Ancestral(score, masks, schedule)
    refuses(lambda: run(ancestral, sampling.empty(1, 3), uniform_grid(3)), "denoiser", "tweedie")
