"""Ladder steps 2, 3, 6 and 7: every sampler, run as in production, against its distribution by enumeration."""

import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
import scipy.stats
import torch
from toys import random_distribution, random_model, tensor

from sedd import exact, reverse, samplers
from sedd.draws import CounterRNG
from sedd.exact import sampler_distribution
from sedd.parameterization import MeanModel, ScoreModel
from sedd.process import Absorbing, Frequency, Hybrid, Process, Uniform
from sedd.samplers import (
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
    Rows,
    Sampler,
    SamplingModel,
    Steps,
    Theta,
    Tweedie,
    Warped,
    Warping,
    uniform_grid,
)
from sedd.schedule import Geometric, LogLinear, Schedule

FAMILY = 1e-6
"""The probability that any of the chi-square tests below fails although all is right, each taking an equal share."""
COUNT = 20_000
SETTINGS: list[tuple[Process, Schedule]] = [
    (Absorbing(3), LogLinear()),
    (Uniform(3), LogLinear(1e-2)),
    (Uniform(3), Geometric(1e-3, 8.0)),
    (Hybrid(3, 0.6), LogLinear(1e-2)),
    (Frequency(3, (1, 2, 3)), LogLinear(1e-2)),
]
TOKEN_NOISES = range(1, len(SETTINGS))
"""Numbers of the settings in which tokens are noise, not masks alone."""
EVERYWHERE: dict[str, Any] = {
    "tweedie": Tweedie(),
    "euler": Euler(),
    "theta": Theta(),
    "theta-early": Theta(theta=0.3),
    "ancestral": Ancestral(),
}
MASKS: dict[str, Any] = {
    "first-hitting": FirstHitting(),
    "any-order": Ordered(),
    "forward": Ordered(direction="forward"),
    "backward": Ordered(direction="backward"),
    "cap": Remask(eta=0.2),
    "rescale": Remask(strategy="rescale", eta=0.3),
    "loop": Remask(strategy="loop", eta=0.3),
    "confidence": Confident(),
    "entropy": EntropyBounded(bound=1.0),
    "confidence, padding last": Confident(pad=0),
    "entropy, padding last": EntropyBounded(bound=1.0, pad=0),
}
TOKENS: dict[str, Any] = {"gibbs": Gibbs(sites=2)}
BLANK, MIDDLE, ENDS = torch.tensor([-1, -1, -1]), torch.tensor([-1, 2, -1]), torch.tensor([1, -1, 0])


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


def models(process: Process, schedule: Schedule = LogLinear()) -> dict[str, Any]:
    """Return the true score of a distribution, and two wrong models that are consistent with no distribution."""
    return {
        "true": exact.Score(random_distribution(3, 3, 0), process, schedule),
        "score": random_model(ScoreModel, process, 3, schedule=schedule),
        "mean": random_model(MeanModel, process, 3, schedule=schedule),
    }


def cases() -> list[tuple[str, str, int]]:
    found = []
    for at, (process, _) in enumerate(SETTINGS):
        names = [name for name in EVERYWHERE if name != "theta-early"]  # its order is tested below
        names += MASKS if process.only_masks else TOKENS
        found += [(n, m, at) for n in names for m in ("true", "score", "mean") if (n, m) != ("ancestral", "score")]
    return found


CASES = cases()


def make(name: str, kind: str, at: int) -> tuple[Sampler, Any]:
    return (EVERYWHERE | MASKS | TOKENS)[name], models(*SETTINGS[at])[kind]


def run(
    chosen: Sampler,
    model: Any,
    prompt: Prompt,
    steps: Steps,
    seed: int = 0,
    fused: bool | None = None,
) -> torch.Tensor:
    return chosen.sample(SamplingModel(model, fused=fused), prompt, seed=seed, steps=steps).cpu()


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
    chosen, model = make(name, kind, at)
    for given in (BLANK, MIDDLE, ENDS):
        distribution = exact.sample_distribution(chosen, model, given, 5)
        assert math.isclose(distribution.sum(), 1, rel_tol=1e-9)
        x = run(chosen, model, Prompt(given.expand(COUNT, -1)), 5)
        assert (x < 3).all()  # no mask survives
        assert (x == given)[:, given >= 0].all()  # given tokens are kept
        assert p_value(x, distribution, model.process.num_states) > FAMILY / (3 * len(CASES))


@pytest.mark.parametrize(("name", "kind", "at"), [case for case in CASES if case[1] != "true"])
def test_fused_draws_are_those_of_the_table(name: str, kind: str, at: int) -> None:
    """Draws by affine weights of the logits give the same tokens as draws from a table of probabilities."""
    chosen, model = make(name, kind, at)
    for given in (BLANK, MIDDLE):
        prompt = Prompt(given.expand(500, -1))
        fused, by_table = (run(chosen, model, prompt, 5, fused=fused) for fused in (True, False))
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
    "one uniform for all positions": ("sedd.draws.CounterRNG.__call__", same_everywhere),
    "one uniform for all steps": ("sedd.draws.CounterRNG.__call__", same_every_step),
    "the likeliest token": ("sedd.draws.sample_inverse_cdf", lambda weights, u: weights.argmax(-1)),
}


@pytest.mark.parametrize("mutant", MUTANTS)
@pytest.mark.parametrize("name", ["tweedie", "theta", "rescale"])
def test_wrong_draws_are_caught(name: str, mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests of the test: each of these mutants gives samples that look right."""
    chosen, model = make(name, "true", 0)
    distribution = exact.sample_distribution(chosen, model, BLANK, 5)
    monkeypatch.setattr(*MUTANTS[mutant])
    x = run(chosen, model, Prompt(BLANK.expand(COUNT, -1)), 5)
    assert p_value(x, distribution, 4) < FAMILY / (3 * len(CASES))


# The distribution of the samples and that of the data ------------------------------------------------------


def total_variation(p: torch.Tensor, q: torch.Tensor) -> float:
    return (p - q).abs().sum().item() / 2


def mild_distribution(seed: int = 0) -> exact.Distribution:
    """A distribution in which conditionals change, but by less than a factor of two."""
    p = torch.exp(0.25 * torch.randn((3, 3, 3), generator=torch.Generator().manual_seed(seed), dtype=torch.float64))
    return exact.Distribution(p / p.sum())


def error(chosen: GridSampler, model: exact.Score, steps: int) -> float:
    """Return the total variation to the data of a run from the true distribution at t = 1: the steps' error alone."""
    process, schedule, p_data = model.process, model.schedule, model.distribution
    times, x = uniform_grid(steps), exact.all_sequences(process.num_states, 3)
    p, blank = p_data.at(process, schedule.sigma(times[0])), BLANK < 0
    for t, s in list(pairwise(times))[:-1]:
        p = exact.step_distribution(chosen, model, p, blank, t.expand(len(x)), s.expand(len(x)))
    p = exact.propagate(p, reverse.denoising_table(model, process, x, schedule.sigma(times[-2]).expand(len(x))))
    return total_variation(p, p_data.at(process, tensor(0.0)))


ORDERS = [(name, at) for name in EVERYWHERE for at in range(len(SETTINGS)) if not (name.startswith("theta") and at)]


def gain(chosen: GridSampler, model: exact.Score, steps: int) -> float:
    """Return the factor by which the error falls when the steps are doubled."""
    return error(chosen, model, steps) / error(chosen, model, 2 * steps)


@pytest.mark.parametrize(("name", "at"), ORDERS)
def test_the_error_falls_at_the_declared_order(name: str, at: int) -> None:
    chosen, model = EVERYWHERE[name], exact.Score(mild_distribution(), *SETTINGS[at])
    assert 0.85 * 2**chosen.order < gain(chosen, model, 32 if chosen.order == 2 else 64) < 1.15 * 2**chosen.order


@pytest.mark.parametrize("theta", [0.3, 0.5])
@pytest.mark.parametrize("at", TOKEN_NOISES)
def test_where_tokens_are_noise_only_clamps_keep_theta_from_the_second_order(
    at: int, theta: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen, model = Theta(theta), exact.Score(mild_distribution(), *SETTINGS[at])
    assert gain(chosen, model, 32) > 2
    assert error(chosen, model, 32) < error(Tweedie(), model, 64) / 2  # at as many calls
    for module in ("sedd.samplers.grid", "sedd.exact.sampler_distribution"):  # probabilities below 0
        monkeypatch.setattr(f"{module}.normalize_probs", lambda p: p / p.sum(-1, keepdim=True))
    assert 0.85 * 4 < gain(chosen, model, 32) < 1.15 * 4


def test_theta_without_the_score_at_t_is_of_the_first_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutant: the second stage uses the score at ρ alone, without subtracting that at t."""
    process, schedule = SETTINGS[0]

    def by_mid_score(
        self: Theta, model: object, before: object, now: torch.Tensor, x: torch.Tensor, *times: torch.Tensor
    ) -> torch.Tensor:
        middle, s = schedule.sigma(self.midpoint(*times)), schedule.sigma(times[1])
        return reverse.analytic_weights(process, now, x, middle, s)

    chosen, model = Theta(), exact.Score(mild_distribution(), process, schedule)
    assert 0.85 * 4 < gain(chosen, model, 32) < 1.15 * 4
    monkeypatch.setattr(Theta, "second_stage", by_mid_score)
    assert 0.85 * 2 < gain(chosen, model, 32) < 1.15 * 2


@pytest.mark.parametrize("steps", [1, 2, 5, 16])
@pytest.mark.parametrize("given", [BLANK, MIDDLE, ENDS], ids=str)
def test_first_hitting_has_the_distribution_of_tweedie(steps: int, given: torch.Tensor) -> None:
    """For a normalised absorbing model, at every number of steps and on any grid."""
    found = models(*SETTINGS[0])
    for kind in ("true", "mean"):
        for times in (uniform_grid(steps), samplers.cosine_grid(steps)):
            distributions = [
                exact.sample_distribution(chosen, found[kind], given, times)
                for chosen in (FirstHitting(), Tweedie(), Ancestral())
            ]
            assert total_variation(distributions[0], distributions[1]) <= 1e-12
            assert total_variation(distributions[0], distributions[2]) <= 1e-12
    # a score is not normalised: Tweedie reveals at its rate, and the distributions differ
    differ = [exact.sample_distribution(chosen, found["score"], BLANK, 16) for chosen in (FirstHitting(), Tweedie())]
    assert total_variation(*differ) > 1e-3


@pytest.mark.parametrize("at", TOKEN_NOISES)
def test_ancestral_has_the_distribution_of_tweedie_where_tokens_are_noise(at: int) -> None:
    model = models(*SETTINGS[at])["mean"]
    distributions = [exact.sample_distribution(chosen, model, BLANK, 6) for chosen in (Ancestral(), Tweedie())]
    assert total_variation(*distributions) <= 1e-12


@pytest.mark.parametrize("direction", ["random", "forward", "backward"])
def test_one_position_per_call_samples_the_data(direction: str) -> None:
    """With the true score every order is the chain rule; so is the first-hitting sampler."""
    distribution = random_distribution(3, 3, 0)
    score = exact.Score(distribution, *SETTINGS[0])
    truth = distribution.at(score.process, tensor(0.0))
    for chosen in (Ordered(direction), FirstHitting()):
        assert total_variation(exact.sample_distribution(chosen, score, BLANK, None), truth) <= 1e-12
    few = exact.sample_distribution(Ordered(direction), score, BLANK, 2)
    assert total_variation(few, truth) > 1e-3  # two at once is not the chain rule


def test_infilling_is_the_conditional_under_absorbing_noise_and_nearly_so_under_uniform() -> None:
    distribution = random_distribution(3, 3, 0)
    for at, worst in ((0, 1e-12), *((at, 0.1) for at in TOKEN_NOISES)):
        score = exact.Score(distribution, *SETTINGS[at])
        truth = distribution.given(MIDDLE).at(score.process, tensor(0.0))
        if at == 0:
            found = exact.sample_distribution(FirstHitting(), score, MIDDLE, None)
        else:
            found = exact.sample_distribution(Tweedie(), score, MIDDLE, 128)
            assert total_variation(found, truth) > 1e-3  # an approximation, as documented
        assert total_variation(found, truth) <= worst


def test_remasking_keeps_the_share_of_tokens() -> None:
    """A step masks again as much as it reveals in excess: P(token at s) = α_s for every η."""
    model, schedule = models(*SETTINGS[0])["true"], SETTINGS[0][1]
    t, s = tensor(0.6), tensor(0.5)
    for strategy in ("cap", "rescale"):
        masked, revealed = Remask(strategy, eta=0.4).rates(model, t, s)
        kept_t, kept_s = (torch.exp(-schedule.sigma(a)) for a in (t, s))
        assert masked > 0.1
        torch.testing.assert_close(kept_t * (1 - masked) + (1 - kept_t) * revealed, kept_s, rtol=1e-12, atol=0)


def test_remasking_approaches_the_data_as_it_fades() -> None:
    """η of 1/steps: the error falls like 1/steps. With a fixed η it falls more slowly."""
    distribution = random_distribution(3, 3, 0)
    score = exact.Score(distribution, *SETTINGS[0])
    truth = distribution.at(score.process, tensor(0.0))
    fading, fixed = (
        [total_variation(exact.sample_distribution(Remask(eta=e(n)), score, BLANK, n), truth) for n in (64, 128)]
        for e in (lambda n: 1 / n, lambda n: 0.2)
    )
    assert 1.8 < fading[0] / fading[1] < 2.2
    assert fixed[0] / fixed[1] < 1.7


@pytest.mark.parametrize("at", TOKEN_NOISES)
def test_gibbs_corrections_keep_the_distribution_and_reduce_errors(at: int) -> None:
    process, schedule = SETTINGS[at]
    distribution = random_distribution(3, 3, 0)
    score, x = exact.Score(distribution, process, schedule), exact.all_sequences(process.num_states, 3)
    sigma = schedule.sigma(tensor(0.3))
    right = distribution.at(process, sigma)
    table = reverse.normalize_probs(score(x, sigma.expand(len(x))).exp())
    for site in range(3):
        free = (torch.arange(3) == site).expand(x.shape)
        torch.testing.assert_close(sampler_distribution.propagate_free(right, table, free), right, rtol=1e-12, atol=0)
    everywhere = sampler_distribution.propagate_free(right, table, torch.ones(x.shape, dtype=torch.bool))
    assert total_variation(everywhere, right) > 1e-3  # the mutant: all positions at once change it
    assert gain(Gibbs(sites=2), score, 16) > 0.85 * 2  # the declared order, or better
    truth = distribution.at(process, tensor(0.0))
    plain = exact.sample_distribution(Tweedie(), score, BLANK, 16)
    mended = exact.sample_distribution(Gibbs(sites=4), score, BLANK, 16)
    assert total_variation(mended, truth) < total_variation(plain, truth) / 3


BY_CONFIDENCE: dict[str, Any] = {
    "confidence": Confident(),
    "entropy": EntropyBounded(bound=0.0),
    "confidence, padding last": Confident(pad=2),
    "entropy, padding last": EntropyBounded(bound=0.0, pad=2),
}


@pytest.mark.parametrize("name", BY_CONFIDENCE)
@pytest.mark.parametrize("given", [BLANK, MIDDLE], ids=["blank", "infilling"])
def test_one_position_at_a_time_has_the_models_distribution_in_any_adaptive_order(
    name: str, given: torch.Tensor
) -> None:
    """With exact conditionals; the order is chosen anew after every token, and differs between sequences."""
    process, schedule = SETTINGS[0]
    distribution = random_distribution(3, 3, 0)
    chosen, model = BY_CONFIDENCE[name], exact.Score(distribution, process, schedule)
    blanks = int((given < 0).sum())
    found = exact.sample_distribution(chosen, model, given, blanks)
    x = exact.all_sequences(process.num_states, 3)
    right = distribution.at(process, tensor(0.0)) * ((given < 0) | (x == given)).all(-1)
    assert total_variation(found, right / right.sum()) < 1e-15
    if name == "confidence" and blanks > 2:  # two positions in one step: the mutant that the law must catch
        assert total_variation(exact.sample_distribution(chosen, model, given, 2), right) > 1e-2


@pytest.mark.parametrize("name", BY_CONFIDENCE)
def test_choosing_by_confidence_is_not_a_random_order_of_a_wrong_model(name: str) -> None:
    """Whose conditionals are not those of one distribution: even one at a time, so the declared order is 0."""
    chosen, model = BY_CONFIDENCE[name], models(*SETTINGS[0])["mean"]
    distribution = exact.sample_distribution(Ordered(), model, BLANK, None)
    assert chosen.order == 0
    assert total_variation(exact.sample_distribution(chosen, model, BLANK, 64), distribution) > 1e-2


@pytest.mark.parametrize("name", ["confidence", "entropy"])
def test_padding_is_revealed_last(name: str, refuses: Callable[..., None]) -> None:
    """Of records that are mostly padding: certain, so revealed first unless its id is given; then after all else."""
    process, schedule = SETTINGS[0]
    pad = process.vocab_size - 1
    weights = torch.tensor([0.1, 0.02, 0.88], dtype=torch.float64)  # the first token is never padding
    first = torch.tensor([0.5, 0.5, 0.0], dtype=torch.float64)
    model = exact.Score(exact.Distribution(torch.einsum("i,j,k->ijk", first, weights, weights)), process, schedule)
    kind: Any = {"confidence": Confident, "entropy": EntropyBounded}[name]
    options = {"bound": 0.0} if name == "entropy" else {}

    def first_revealed(**extra: Any) -> torch.Tensor:
        *_, last = kind(**options, **extra).trajectory(model, 64, 3, steps=3)
        revealed: torch.Tensor = last.reveal_step.argmin(-1)
        return revealed

    assert (first_revealed() != 0).all()
    assert (first_revealed(pad=pad) == 0).all()
    wrong = random_model(MeanModel, process, 3)
    plain, *last = (exact.sample_distribution(kind(**options, pad=id), wrong, BLANK, 2) for id in (-1, 0, 1, 2))
    # of a wrong model: the order decides, and the enumeration has it
    assert max(total_variation(plain, other) for other in last) > 1e-3
    refuses(lambda: kind(pad=3).sample(model, 1, 3), "pad is 3", "0..2", "-1")


# Randomness, caching, counting -----------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "kind", "at"), [c for c in CASES if c[1] == "mean"])
def test_a_row_does_not_depend_on_its_batch(name: str, kind: str, at: int) -> None:
    """Batches of 1, 3 and 12 rows; rows shuffled; given tokens that differ from row to row."""
    chosen, model = make(name, kind, at)
    given = torch.full((12, 3), -1)
    given[::2, 1], given[::3, 0] = 1, 2
    whole = run(chosen, model, Prompt(given), 6)

    def some(rows: torch.Tensor) -> torch.Tensor:
        *_, last = chosen.trajectory(model, given[rows], steps=6, rows=rows)
        return last.x

    for size in (1, 3):
        assert torch.equal(torch.cat([some(rows) for rows in torch.arange(12).split(size)]), whole)
    shuffled = torch.randperm(12, generator=torch.Generator().manual_seed(1))
    assert torch.equal(some(shuffled), whole[shuffled])
    assert not torch.equal(run(chosen, model, Prompt(given), 6, seed=1), whole)


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
    process, chosen = SETTINGS[0][0], (EVERYWHERE | MASKS)[name]
    model = MeanModel(TimeFree(4), process)
    views = {cached: SamplingModel(model) for cached in (True, False)}
    assert views[True].cached
    views[False].cached = False
    ends = {cached: chosen.sample(view, 50, 3, steps=20) for cached, view in views.items()}
    assert torch.equal(ends[True], ends[False])
    assert views[True].stats.row_calls <= views[False].stats.row_calls
    if name in ("tweedie", "euler", "theta", "ancestral"):
        assert (
            views[True].stats.row_calls < 0.3 * views[False].stats.row_calls
        )  # three positions: at most four different inputs per row
    assert not SamplingModel(
        MeanModel(TimeFree(4, timed=True), process)
    ).cached  # hidden states that depend on σ are not cached


@pytest.mark.parametrize("steps", [1, 4, 20])
def test_first_hitting_is_the_uncached_loop_over_all_steps(steps: int) -> None:
    """The slow reference: every step computes every row at its noise level, and reveals the positions of the plan."""
    process, schedule = SETTINGS[0]
    score, times = models(process)["true"], uniform_grid(steps)
    chosen, prompt, rng = FirstHitting(), Prompt(torch.full((200, 3), -1)), CounterRNG(4, torch.arange(200))
    plan, u = chosen.plan(score, prompt, times, rng), rng(3, 0, 1)[..., 1]
    x = torch.full((200, 3), process.mask)
    for k in range(steps):
        p = score.log_mean(x, schedule.sigma(times[k]).expand(200)).exp()
        fresh = (p.cumsum(-1) < u[..., None]).sum(-1)
        x = torch.where(plan.step.gather(-1, plan.event) == k + 1, fresh, x)
    assert torch.equal(run(chosen, score, prompt, times, seed=4), x)
    assert int(plan.event.max()) < min(steps, 3)


@pytest.mark.parametrize("length", [16, 256, 1024])
@pytest.mark.parametrize("steps", [16, 128, 1024])
def test_the_number_of_calls_is_known_beforehand(steps: int, length: int) -> None:
    """n(1 − (1 − 1/n)^L) within 2 %, by plans alone; and the plan's number is the one that is made."""
    chosen, model = FirstHitting(), random_model(MeanModel, Absorbing(3), 1)
    times, rows = uniform_grid(steps), 2_000_000 // (steps * length) + 400
    plan = chosen.plan(model, samplers.empty(rows, length), times, CounterRNG(0, torch.arange(rows)))
    due = steps * (1 - (1 - 1 / steps) ** length)
    assert math.isclose(chosen.expected_calls(model, times, length), due, rel_tol=2e-3)  # ε of the schedule
    assert math.isclose(plan.event.amax(-1).double().mean().item() + 1, due, rel_tol=0.02)


def test_calls_are_those_of_the_plan() -> None:
    chosen, prompt = FirstHitting(), Prompt(torch.full((300, 3), -1))
    for steps in (7, None):
        model = SamplingModel(models(*SETTINGS[0])["mean"])
        plan = chosen.plan(model, prompt, chosen.times(steps), CounterRNG(0, torch.arange(300)))
        *_, last = chosen.trajectory(model, prompt, steps=steps)
        calls = plan.event.amax(-1) + 1
        assert (model.stats.row_calls, model.stats.batch_calls) == (int(calls.sum()), int(calls.max()))
        assert torch.equal(last.reveal_step, plan.step.gather(-1, plan.event))
    assert (calls == 3).all()


def test_clamps_are_counted() -> None:
    for kind, some in (("true", False), ("score", True)):
        view = SamplingModel(models(*SETTINGS[1])[kind])
        Tweedie().sample(view, 100, 3, steps=6)
        assert bool(view.stats.clamped > 0) == some


def test_left_to_right_is_the_chain_rule() -> None:
    """The baseline, with nothing given and with a beginning; a gap before a text is refused."""
    distribution, chosen = random_distribution(3, 3, 0), LeftToRight()
    model = Chain(exact.Score(distribution, Absorbing(3)))
    for given in (BLANK, torch.tensor([2, -1, -1])):
        truth = distribution.given(given).probabilities if given[0] >= 0 else distribution.probabilities
        assert total_variation(exact.sample_distribution(chosen, model, given, None), truth) <= 1e-12
        x = run(chosen, model, Prompt(given.expand(COUNT, -1)), None)
        assert p_value(x, truth, 3) > FAMILY
    with pytest.raises(ValueError, match="cannot fill a gap before a text"):
        run(chosen, model, Prompt(MIDDLE.expand(2, -1)), None)


class Chain:
    """The true distribution, one token after another."""

    depends_on_sigma = False

    def __init__(self, score: exact.Score) -> None:
        self.score, self.log_next, self.process, self.schedule = score, score.log_next, score.process, score.schedule

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

    def step(self, x: torch.Tensor, t: torch.Tensor, s: torch.Tensor, rows: Rows) -> torch.Tensor:
        tweedie, middle = Tweedie(), (t + s) / 2
        x = tweedie.step(x, t, middle, rows)
        second = copy.copy(rows)
        second.seed = rows.seed + 1  # unused numbers
        return tweedie.step(x, middle, s, second)


def test_a_sampler_is_written_by_its_step_alone() -> None:
    chosen, model = HalfSteps(), models(*SETTINGS[1])["true"]
    assert chosen.expected_calls(model, uniform_grid(3), 5) == 3
    times = torch.tensor([1, 0.75, 0.5, 0.25, 0], dtype=torch.float64)  # the last step is one of the loop
    fine = torch.tensor([1, 0.875, 0.75, 0.625, 0.5, 0.375, 0.25, 0], dtype=torch.float64)
    right = exact.sample_distribution(Tweedie(), model, MIDDLE, fine)
    x = run(chosen, model, Prompt(MIDDLE.expand(COUNT, -1)), times)
    assert p_value(x, right, 3) > FAMILY
    with pytest.raises(ValueError, match="HalfSteps has no enumeration"):
        exact.sample_distribution(chosen, model, MIDDLE, times)


# Temperature and nucleus -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["true", "score", "mean"])
@pytest.mark.parametrize("at", range(len(SETTINGS)))
def test_temperature_acts_on_the_clean_token_alone(kind: str, at: int) -> None:
    """p(x_0 | x) is p^(1/T) of what it was; masks are revealed at the same rate as before."""
    process, schedule = SETTINGS[at]
    model = models(process, schedule)[kind]
    x = exact.all_sequences(process.num_states, 3)
    sigma = schedule.sigma(tensor(0.4)).expand(len(x))
    plain = reverse.denoised_probs(process, model(x, sigma), x, sigma)
    sharp = Warped(model, temperature=0.5)
    found = reverse.denoised_probs(process, sharp(x, sigma), x, sigma)
    free = process.is_noisy(x)
    torch.testing.assert_close(found[free], reverse.normalize_probs(plain**2)[free], rtol=1e-7, atol=1e-9)
    if process.only_masks:
        paces = (m(x, sigma)[..., :3].exp().sum(-1)[free] for m in (model, sharp))
        torch.testing.assert_close(*paces, rtol=1e-9, atol=0)


def test_temperature_one_changes_nothing_and_the_distributions_follow() -> None:
    """Warped models are sampled too: one position per call draws Π p^(1/T), normalised step by step."""
    chosen, model = FirstHitting(), models(*SETTINGS[0])["true"]
    distribution = exact.sample_distribution(chosen, model, BLANK, 5)
    same = exact.sample_distribution(chosen, Warped(model), BLANK, 5)
    assert total_variation(distribution, same) <= 1e-12
    cold = Warped(model, temperature=0.7, top_k=2)
    x = run(chosen, cold, Prompt(BLANK.expand(COUNT, -1)), 5)
    assert p_value(x, exact.sample_distribution(chosen, cold, BLANK, 5), 4) > FAMILY
    assert total_variation(exact.sample_distribution(chosen, cold, BLANK, 5), distribution) > 0.05


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
    masks, tokens = models(Absorbing(3))["true"], models(Uniform(3))["true"]
    for chosen, model, *words in (
        (FirstHitting(), tokens, "tokens change", "tweedie"),
        (Gibbs(), masks, "only masks", "remask"),
        (Remask(), tokens, "tokens change", "gibbs"),
    ):
        refuses(lambda chosen=chosen, model=model: chosen.sample(model, 1, 3), *words)
        refuses(lambda chosen=chosen, model=model: exact.sample_distribution(chosen, model, BLANK, 5), *words)
    refuses(lambda: Remask(strategy="often"), "often", "rescale")
    refuses(lambda: Remask(eta=2.0), "eta is 2.0")
    refuses(lambda: Remask(t_on=0.1, t_off=0.2), "t_on is 0.1")
    refuses(lambda: Theta(theta=1.0), "theta is 1.0")
    refuses(lambda: Ordered(direction="up"), "direction is 'up'")
    refuses(lambda: EntropyBounded(bound=-1.0), "bound is -1")
    refuses(lambda: Gibbs(sites=0), "sites is 0")
    refuses(lambda: Warping(temperature=0.0), "temperature is 0")
    refuses(lambda: Warping(top_p=0.0), "top_p is 0")
    refuses(lambda: Warping(top_k=0), "top_k is 0")
    refuses(lambda: uniform_grid(0), "steps is 0")
    refuses(lambda: Tweedie().times([0.5, 0.0]), "0.5", "from 1 to 0")
    refuses(lambda: Tweedie().times([1.0, 0.2, 0.3, 0.0]), "fall")
    score = models(Absorbing(3))["score"]
    refuses(lambda: Ancestral().sample(score, 1, 3, steps=3), "denoiser", "tweedie")


# The short forms -------------------------------------------------------------------------------------------


def test_a_sample_is_the_end_of_a_trajectory() -> None:
    """Without gradients; the same seed gives the same tokens, another seed others; a prompt keeps its tokens."""
    chosen, model = Tweedie(), models(*SETTINGS[0])["score"]
    with torch.enable_grad():
        *states, last = chosen.trajectory(model, 20, 3, seed=1, steps=4)
        x = chosen.sample(model, 20, 3, seed=1, steps=4)
    assert (len(states), last.step, x.shape, x.dtype) == (4, 4, (20, 3), torch.int64)
    assert torch.equal(last.x, x)
    assert not torch.equal(chosen.sample(model, 20, 3, steps=4), x)
    for steps in ([1, 0.75, 0.5, 0.25, 0], uniform_grid(4)):  # the same grid
        assert torch.equal(chosen.sample(model, 20, 3, seed=1, steps=steps), x)
    given = MIDDLE.expand(20, -1)
    filled = chosen.sample(model, given, steps=4)
    assert torch.equal(filled[:, 1], given[:, 1])
    assert torch.equal(filled, chosen.sample(model, Prompt(given), steps=4))


class Recorder(torch.nn.Module):
    """A network that notes whether gradients were on."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.grad = torch.nn.Parameter(torch.zeros(4)), []

    def forward(self, x: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
        self.grad.append(torch.is_grad_enabled())
        return self.weight.expand(*x.shape, 4)


def test_gradients_are_off_within_a_step_and_on_between_two() -> None:
    network = Recorder()
    with torch.enable_grad():
        for _ in Tweedie().trajectory(MeanModel(network, Absorbing(3)), 2, 3, steps=2):
            assert torch.is_grad_enabled()
    assert network.grad == [False, False]


def test_wrong_arguments_are_named(refuses: Callable[..., None]) -> None:
    model = models(Absorbing(3))["mean"]
    with pytest.raises(TypeError, match=r"Recorder is not a model.*MeanModel"):
        Tweedie().sample(Recorder(), 1, 3)
    with pytest.raises(TypeError, match="no process; pass"):
        Tweedie().trajectory(TimeFree(4), 1, 3)
    refuses(lambda: Tweedie().sample(model, 4), "4 sequences of length None")
    refuses(lambda: Tweedie().sample(model, 0, 3), "0 sequences")
    refuses(lambda: Tweedie().sample(model, BLANK), "shape (3,)")
    refuses(lambda: Tweedie().sample(model, torch.zeros(2, 3)), "float32")
    refuses(lambda: Tweedie().sample(model, BLANK[None], 3), "leave length out")
    refuses(lambda: Tweedie().sample(model, 1, 3, steps=0), "steps is 0")
    refuses(lambda: Tweedie().sample(model, 1, 3, steps=None), "steps is inf", "first-hitting")
    refuses(lambda: Tweedie().sample(model, 1, 3, steps=torch.tensor([0.0, 1.0])), "must fall from 1 to 0")
    refuses(lambda: Tweedie().sample(model, 1, 3, steps=[1, 0.5]), "must fall from 1 to 0")
    refuses(lambda: Tweedie().sample(model, 1, 3, seed=-1), "seed is -1")
