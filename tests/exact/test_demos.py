"""The demonstrations: each claim is tested, and each test fails for a wrong version."""

import math
from collections.abc import Callable
from pathlib import Path

import matplotlib
import pytest
import torch
from demos import all_masked, one_step, ratios, samplers, sentences
from scipy import stats

from sedd import draws, exact, plot
from sedd.parameterization import MeanModel
from sedd.samplers import FactorizedSampler, Tweedie

# Ratios ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=[0, 1, 2])
def learnt(request: pytest.FixtureRequest) -> tuple[torch.Tensor, dict[str, list[ratios.RatioEstimate]]]:
    found = list(ratios.learn_ratios(states=8, steps=100, seed=request.param))
    by_name = {name: [row for row in found if row.objective == name] for name in ratios.COLOURS}
    return ratios.true_log_ratios(8, request.param), by_name


Estimates = tuple[torch.Tensor, dict[str, list[ratios.RatioEstimate]]]


def test_score_entropy_and_concrete_score_learn_the_ratios(learnt: Estimates) -> None:
    _, found = learnt
    first, last = ({name: rows[i].error for name, rows in found.items()} for i in (0, -1))
    assert last["score-entropy"] < 0.03 * first["score-entropy"]
    assert last["score-entropy"] < last["concrete-score"] < 0.3 * first["concrete-score"]


def test_softmax_linear_cannot_learn_the_ratios(learnt: Estimates) -> None:
    """Its rows sum to 1, those of the ratios to 1/p(x): some entry of each is off by log(1/p(x) − 1) or more.

    Its loss is linear: it falls while all mass of a row goes to the most probable state.
    """
    truth, found = learnt
    p = 1 / truth.exp().sum(-1)
    rows, others = found["softmax-linear"], ~torch.eye(len(p), dtype=torch.bool)
    assert rows[-1].loss < rows[0].loss
    assert rows[-1].error > 1.5 * rows[0].error
    for row in rows:
        worst = (row.log_score - truth).abs().where(others, 0).amax(-1)
        assert (worst >= (1 / p - 1).log() - 1e-9).all()
    likeliest = int(p.argmax())
    elsewhere = [x for x in range(len(p)) if x != likeliest]
    assert (rows[-1].log_score[elsewhere, likeliest].exp() > 0.9).all()


def test_score_entropy_passes_where_softmax_linear_fails(learnt: Estimates) -> None:
    """The test above would fail for an objective that works."""
    truth, found = learnt
    score = found["score-entropy"][-1].log_score.exp()
    torch.testing.assert_close(score.sum(-1), truth.exp().sum(-1), rtol=0.05, atol=0)
    assert (score.sum(-1) > 1.5).all()


# One step --------------------------------------------------------------------------------------------------


class Smeared:
    """The exact posterior mixed with random words, as a model that is not fully trained."""

    def log_mean(self, x_t: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
        return (0.9 * one_step.exact_score().log_mean(x_t, sigma).exp() + 0.1 / len(sentences.WORDS)).log()


@pytest.mark.parametrize("level", [0.25, 0.9])
def test_enumerated_probabilities_agree_with_draws(level: float, generator: torch.Generator) -> None:
    """Within 5 standard errors of 20,000 draws: false alarms below 10^−6. The argmax fails the test."""
    model, count, sigma = Smeared(), 20_000, one_step.sigma_at(level)
    table = one_step.posterior(model, sigma)
    x_0 = sentences.draw_sentences(count, generator)
    x_t = one_step.PROCESS.corrupt(x_0, sigma.expand(count), generator)
    reconstructed = draws.sample(table[exact.index_of(x_t, len(sentences.WORDS))], generator)
    grammatical = (reconstructed[:, None] == sentences.corpus_ids()).all(-1).any(-1).double().mean().item()
    recovered = (reconstructed == x_0).all(-1).double().mean().item()

    def agree(row: one_step.Reconstruction) -> bool:
        pairs = ((row.grammatical, grammatical), (row.recovered, recovered))
        return all(abs(p - seen) < 5 * math.sqrt(p * (1 - p) / count) + 1e-12 for p, seen in pairs)

    assert agree(one_step.evaluate_reconstruction(table, level, "draw"))
    assert not agree(one_step.evaluate_reconstruction(one_step.argmax_table(table), level, "argmax"))


def test_the_exact_posterior_is_grammatical_but_has_another_distribution() -> None:
    """Every combination of subject and object is a sentence, so independent words are grammatical.

    At full noise they are independent: the product of the frequencies of subject and object.
    """
    for level in (0.1, 0.9999):
        table = one_step.posterior(one_step.exact_score(), one_step.sigma_at(level))
        draw, argmax = (
            one_step.evaluate_reconstruction(t, level, "exact") for t in (table, one_step.argmax_table(table))
        )
        assert min(draw.grammatical, argmax.grammatical) > 1 - 1e-9
        assert 0.003 < draw.total_variation < argmax.total_variation
    p = sentences.corpus_frequencies().view(3, 2)  # subject, object
    independent = p.sum(1, keepdim=True) * p.sum(0)
    assert draw.total_variation == pytest.approx((independent - p).abs().sum().item() / 2, abs=1e-3)
    assert argmax.total_variation == pytest.approx(1 - p.max().item())  # always the same sentence


@pytest.mark.parametrize("level", [0.1, 0.5, 0.9])
def test_nothing_recovers_more_than_the_most_probable_sentence(level: float) -> None:
    """Σ_{x_t} max p(x_t, x_0) is the most that any method can recover; the exact argmax is within 2 % of it."""
    sigma = one_step.sigma_at(level)
    x, targets = exact.all_sequences(len(sentences.WORDS), sentences.LENGTH), sentences.corpus_ids()
    P = exact.transition_matrix(one_step.PROCESS, sigma)
    most = (sentences.corpus_frequencies() * P[x[:, None], targets].prod(-1)).amax(-1).sum().item()
    table = one_step.posterior(one_step.exact_score(), sigma)
    best = one_step.evaluate_reconstruction(one_step.argmax_table(table), level, "argmax").recovered
    assert 0.98 * most < best <= most + 1e-9
    assert one_step.evaluate_reconstruction(table, level, "draw").recovered < best


def test_training_makes_reconstructions_grammatical() -> None:
    model = sentences.build_denoiser(one_step.PROCESS, 0, one_step.SCHEDULE)
    before = {row.method: row for row in one_step.evaluate_reconstructions(model, [0.25])}
    losses = list(sentences.train_denoiser(model, one_step.OBJECTIVE, 100, 0))
    after = [row for row in one_step.evaluate_reconstructions(model, [0.25]) if row.method.startswith("model")]
    assert sum(losses[-20:]) < 0.5 * sum(losses[:20])
    # untrained, with a head of zeros, it is Bayes' rule with equal words: the likeliest word is the one that is there
    assert before["model, argmax"].grammatical == pytest.approx(before["noisy input"].grammatical)
    assert before["model, draw"].grammatical < before["model, argmax"].grammatical < 0.5
    assert all(row.grammatical > 0.8 for row in after)


# All masked ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model() -> MeanModel:
    model = sentences.build_denoiser(all_masked.PROCESS, 0, all_masked.SCHEDULE)
    for _ in sentences.train_denoiser(model, all_masked.OBJECTIVE, 400, 0):
        pass
    return model


def test_many_steps_follow_the_corpus_and_one_step_and_argmax_do_not(model: MeanModel) -> None:
    """Chi-square test on 2,000 draws at level 1e-5.

    Its power: one step, which draws words independently, has a total variation of 0.185 and a noncentrality of 360,
    and fails almost surely. The argmax always gives the same sentence.
    """
    many, one, argmax = all_masked.sample_sentences(model, steps=48, draws=2000, seed=0)
    assert many.p_value > 1e-5
    assert many.total_variation < 0.05
    assert many.other < 0.005
    assert one.p_value < 1e-9
    assert one.total_variation > 0.12
    assert argmax.frequencies["I love NLP ."] == 1
    assert argmax.p_value < 1e-9


def test_counts_are_tested_by_chi_square(generator: torch.Generator) -> None:
    """As in scipy; and draws from the corpus pass at 1e-6."""
    x = sentences.draw_sentences(3000, generator)
    found = all_masked.count_sentences("corpus", x)
    counts = torch.tensor([*found.frequencies.values()], dtype=torch.float64) * 3000
    expected = stats.chisquare(counts.numpy(), 3000 * sentences.corpus_frequencies().numpy())
    assert found.chi_square == pytest.approx(expected.statistic)
    assert found.p_value == pytest.approx(expected.pvalue)
    assert found.p_value > 1e-6
    half = all_masked.count_sentences("half", torch.cat([x, torch.zeros_like(x)]))
    assert half.other == 0.5
    assert half.total_variation == pytest.approx(found.total_variation / 2 + 0.5, abs=0.02)
    nothing = all_masked.count_sentences("nothing", torch.zeros_like(x))
    assert (nothing.other, nothing.total_variation) == (1, 1)


# Samplers --------------------------------------------------------------------------------------------------


class Wrong(FactorizedSampler):
    """Tweedie with log-ratios a tenth too small, whose error does not vanish with the number of steps."""

    uses_score = True

    def weights(self, model: object, output: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        return Tweedie().weights(model, 0.9 * output, *rest)

    affine_weights = None


@pytest.mark.parametrize("schedule", ["log-linear", "geometric"])
def test_errors_fall_at_the_declared_order(schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samplers, "SAMPLERS", {**samplers.SAMPLERS, "wrong": Wrong})
    found = samplers.group_curves(list(samplers.sampler_errors(3, 3, schedule, max_steps=128, seed=0)))
    assert len(found) == 2 * len(samplers.SAMPLERS)
    for (process, name), curve in found.items():
        slope = samplers.fitted_slope(curve)
        assert slope is not None
        if (process, name) == ("uniform", "theta"):  # between first and second order: see its docstring
            assert 1.2 < slope < 2.1
        else:
            assert (abs(slope - samplers.declared_order(process, name)) < 0.15) is (name != "wrong")


def test_under_absorbing_log_linear_noise_euler_is_tweedie() -> None:
    """Δt·σ'(t)/(e^σ − 1) = Δt/t = (e^Δσ − 1)/(e^σ − 1); under uniform noise they differ."""
    found = samplers.group_curves(list(samplers.sampler_errors(3, 2, "log-linear", max_steps=8, seed=0)))
    pairs = {
        process: [
            abs(a.error - b.error) for a, b in zip(found[process, "Euler"], found[process, "Tweedie"], strict=True)
        ]
        for process in samplers.NOISES
    }
    assert max(pairs["absorbing"]) < 1e-12
    assert max(pairs["uniform"]) > 1e-3


def test_tweedie_is_exact_for_one_token_and_has_no_slope() -> None:
    found = samplers.group_curves(list(samplers.sampler_errors(4, 1, "log-linear", max_steps=16, seed=0)))
    assert max(row.error for row in found["uniform", "Tweedie"]) < 1e-12
    assert samplers.fitted_slope(found["uniform", "Tweedie"]) is None
    assert samplers.fitted_slope(found["uniform", "Euler"]) is not None


def test_a_picture_that_cannot_be_written_is_one_sentence(refuses: Callable[..., None]) -> None:
    refuses(lambda: plot.save_png(plot.figure(1.0, 1.0), Path("/dev/null/x.png")), "cannot be written to")


# Pictures --------------------------------------------------------------------------------------------------


def test_pictures_show_what_was_found(tmp_path: Path) -> None:
    """Every matrix, bar and point of a picture is a result; and pictures are saved."""
    learnt, truth = list(ratios.learn_ratios(states=3, steps=10, seed=0)), ratios.true_log_ratios(3, 0)
    drawn = ratios.plot_ratios(learnt, truth)
    images = [ax.images[0].get_array() for ax in drawn.subfigs[0].axes if ax.images]
    expected = []
    for name in ratios.COLOURS:
        expected += [row.log_score for row in learnt if row.objective == name and row.step in (0, 2, 4, 6, 8, 10)]
        expected.append(truth)
    for image, matrix in zip(images, expected, strict=True):
        assert image.tolist() == matrix.tolist()

    counted = [
        all_masked.count_sentences(method, sentences.draw_sentences(200, torch.Generator().manual_seed(0)))
        for method in all_masked.METHODS
    ]
    bars = [[bar.get_height() for bar in group] for group in all_masked.plot_all_masked(counted).axes[0].containers]
    assert bars == [
        [*sentences.corpus_frequencies().tolist(), 0.0],
        *([*row.frequencies.values(), row.other] for row in counted),
    ]

    reconstructions = list(one_step.evaluate_reconstructions(Smeared(), [0.2, 0.6]))
    for ax, field in zip(one_step.plot_one_step(reconstructions).axes, one_step.MEASURES, strict=True):
        points = {line.get_label(): line.get_ydata() for line in ax.lines}
        for method in one_step.METHODS:
            assert list(points[method]) == [getattr(row, field) for row in reconstructions if row.method == method]

    found = list(samplers.sampler_errors(2, 2, "log-linear", max_steps=8, seed=0))
    curves = [list(line.get_ydata()) for ax in samplers.plot_samplers(found).axes for line in ax.lines]
    assert curves == [[row.error for row in curve] for curve in samplers.group_curves(found).values()]
    assert plot.save_png(drawn, tmp_path / "deep" / "ratios.png").read_bytes().startswith(b"\x89PNG")


def test_a_picture_leaves_the_users_own_style_alone(tmp_path: Path) -> None:
    before = dict(matplotlib.rcParams)
    plot.save_png(
        samplers.plot_samplers(list(samplers.sampler_errors(2, 1, "log-linear", max_steps=8, seed=0))),
        tmp_path / "a.png",
    )
    assert dict(matplotlib.rcParams) == before
