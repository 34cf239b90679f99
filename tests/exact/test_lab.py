"""What the demonstrations show is true: each law on its own terms, each with a wrong version that it catches."""

import math
from collections.abc import Callable
from pathlib import Path

import matplotlib
import pytest
import torch
from scipy import stats

from sedd import exact, plot, registry
from sedd.demos import all_masked, one_step, ratios, samplers, sentences
from sedd.diffusion import categorical
from sedd.diffusion.parameterization import MeanModel
from sedd.sampling import Tweedie

# Ratios ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=[0, 1, 2])
def learnt(request: pytest.FixtureRequest) -> tuple[torch.Tensor, dict[str, list[ratios.Learnt]]]:
    found = list(ratios.learn(states=8, steps=100, seed=request.param))
    by_name = {name: [row for row in found if row.objective == name] for name in ratios.OBJECTIVES}
    return ratios.true_log_ratios(8, request.param), by_name


Learnt = tuple[torch.Tensor, dict[str, list[ratios.Learnt]]]


def test_score_entropy_and_concrete_score_find_the_ratios(learnt: Learnt) -> None:
    _, found = learnt
    first, last = ({name: rows[i].error for name, rows in found.items()} for i in (0, -1))
    assert last["score-entropy"] < 0.03 * first["score-entropy"]
    assert last["score-entropy"] < last["concrete-score"] < 0.3 * first["concrete-score"]


def test_softmax_linear_cannot(learnt: Learnt) -> None:
    """Its rows sum to 1, those of the ratios to 1/p(x): some entry of each is off by log(1/p(x) − 1) or more.

    And it is linear: its loss falls, while all mass of a row goes to the likeliest state.
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


def test_what_softmax_linear_fails_score_entropy_passes(learnt: Learnt) -> None:
    """The test above would fail for an objective that works."""
    truth, found = learnt
    score = found["score-entropy"][-1].log_score.exp()
    torch.testing.assert_close(score.sum(-1), truth.exp().sum(-1), rtol=0.05, atol=0)
    assert (score.sum(-1) > 1.5).all()


# One step --------------------------------------------------------------------------------------------------


class Smeared:
    """The exact posterior, mixed with random words: a model that has not quite learnt."""

    def log_mean(self, x_t: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
        return (0.9 * one_step.exact_score().log_mean(x_t, sigma).exp() + 0.1 / len(sentences.WORDS)).log()


@pytest.mark.parametrize("touched", [0.25, 0.9])
def test_enumerated_shares_are_those_of_draws(touched: float, generator: torch.Generator) -> None:
    """Within 5 standard errors of 20,000 draws: a false alarm in 10^6 at most. The argmax of it is caught."""
    model, count, sigma = Smeared(), 20_000, one_step.sigma_of(touched)
    table = one_step.posterior(model, sigma)
    x_0 = sentences.draw(count, generator)
    x_t = one_step.PROCESS.corrupt(x_0, sigma.expand(count), generator)
    said = categorical.draw(table[exact.index_of(x_t, len(sentences.WORDS))], generator)
    grammatical = (said[:, None] == sentences.sentences()).all(-1).any(-1).double().mean().item()
    recovered = (said == x_0).all(-1).double().mean().item()

    def agree(row: one_step.Share) -> bool:
        pairs = ((row.grammatical, grammatical), (row.recovered, recovered))
        return all(abs(p - seen) < 5 * math.sqrt(p * (1 - p) / count) + 1e-12 for p, seen in pairs)

    assert agree(one_step.share(table, touched, "draw"))
    assert not agree(one_step.share(one_step.certain(table), touched, "argmax"))


def test_the_exact_posterior_is_grammatical_and_has_another_law() -> None:
    """Every mix of the sentences' words is a sentence, so words drawn apart are grammatical. They do not go together.

    Where noise has left nothing, they are independent: the product of the shares of subject and object.
    """
    for touched in (0.1, 0.9999):
        table = one_step.posterior(one_step.exact_score(), one_step.sigma_of(touched))
        draw, argmax = (one_step.share(t, touched, "exact") for t in (table, one_step.certain(table)))
        assert min(draw.grammatical, argmax.grammatical) > 1 - 1e-9
        assert 0.003 < draw.distance < argmax.distance
    p = sentences.shares().view(3, 2)  # subject, object
    apart = p.sum(1, keepdim=True) * p.sum(0)
    assert draw.distance == pytest.approx((apart - p).abs().sum().item() / 2, abs=1e-3)
    assert argmax.distance == pytest.approx(1 - p.max().item())  # one sentence for ever


@pytest.mark.parametrize("touched", [0.1, 0.5, 0.9])
def test_nothing_recovers_more_than_the_likeliest_sentence(touched: float) -> None:
    """Σ_{x_t} max p(x_t, x_0) is the most that any answer can recover; the exact argmax is within 2 % of it."""
    sigma = one_step.sigma_of(touched)
    x, said = exact.every(len(sentences.WORDS), sentences.LENGTH), sentences.sentences()
    P = exact.transition_matrix(one_step.PROCESS, sigma)
    most = (sentences.shares() * P[x[:, None], said].prod(-1)).amax(-1).sum().item()
    table = one_step.posterior(one_step.exact_score(), sigma)
    best = one_step.share(one_step.certain(table), touched, "argmax").recovered
    assert 0.98 * most < best <= most + 1e-9
    assert one_step.share(table, touched, "draw").recovered < best


def test_learning_brings_grammar() -> None:
    model = one_step.network(seed=0)
    before = [row for row in one_step.shares(model, [0.25]) if row.way.startswith("model")]
    losses = list(one_step.learn(model, steps=100, seed=0))
    after = [row for row in one_step.shares(model, [0.25]) if row.way.startswith("model")]
    assert sum(losses[-20:]) < 0.5 * sum(losses[:20])
    assert all(row.grammatical < 0.05 for row in before)
    assert all(row.grammatical > 0.8 for row in after)


# All masked ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model() -> MeanModel:
    model = all_masked.network(seed=0)
    for _ in all_masked.learn(model, steps=400, seed=0):
        pass
    return model


def test_sentences_out_of_masks_follow_the_corpus_unless_drawn_at_once_or_by_argmax(model: MeanModel) -> None:
    """Chi-square on 2,000 draws at 1e-4, where draws from the corpus itself would fail in 1 of 10^4.

    Its power: one step, which draws words apart, has a total variation of 0.185 and a noncentrality of 360, and is
    caught all but surely. The argmax says one sentence for ever.
    """
    many, one, argmax = all_masked.said(model, steps=48, draws=2000, seed=0)
    assert many.p_value > 1e-4
    assert many.distance < 0.05
    assert many.astray < 0.005
    assert one.p_value < 1e-9
    assert one.distance > 0.12
    assert argmax.shares["I love NLP ."] == 1
    assert argmax.p_value < 1e-9


def test_the_tally_is_a_chi_square_test(generator: torch.Generator) -> None:
    """As scipy has it; and draws from the corpus pass at 1e-6."""
    x = sentences.draw(3000, generator)
    found = all_masked.tally("corpus", x)
    counts = torch.tensor([*found.shares.values()], dtype=torch.float64) * 3000
    expected = stats.chisquare(counts.numpy(), 3000 * sentences.shares().numpy())
    assert found.chi_square == pytest.approx(expected.statistic)
    assert found.p_value == pytest.approx(expected.pvalue)
    assert found.p_value > 1e-6
    strayed = all_masked.tally("half", torch.cat([x, torch.zeros_like(x)]))
    assert strayed.astray == 0.5
    assert strayed.distance == pytest.approx(found.distance / 2 + 0.5, abs=0.02)
    nothing = all_masked.tally("nothing", torch.zeros_like(x))
    assert (nothing.astray, nothing.distance) == (1, 1)


# Samplers --------------------------------------------------------------------------------------------------


def wrong(score: exact.Score, *noise: object) -> Tweedie:
    """Tweedie with log-ratios a tenth too small: however many the steps, an error is left."""
    return Tweedie(lambda x, sigma: 0.9 * score(x, sigma), *noise)


@pytest.mark.parametrize("schedule", ["log-linear", "geometric"])
def test_errors_fall_at_the_declared_order(schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samplers, "SAMPLERS", {**samplers.SAMPLERS, "wrong": wrong})
    found = samplers.curves(list(samplers.errors(3, 3, schedule, most=128, seed=0)))
    assert len(found) == 2 * len(samplers.SAMPLERS)
    for (process, name), curve in found.items():
        slope = samplers.slope(curve)
        assert slope is not None
        if (process, name) == ("uniform", "theta"):  # between the first, far out, and the second: see its docstring
            assert 1.2 < slope < 2.1
        else:
            assert (abs(slope - samplers.order(process, name)) < 0.15) is (name != "wrong")


def test_under_absorbing_log_linear_noise_euler_is_tweedie() -> None:
    """Δt·σ'(t)/(e^σ − 1) = Δt/t = (e^Δσ − 1)/(e^σ − 1); under uniform noise they differ."""
    found = samplers.curves(list(samplers.errors(3, 2, "log-linear", most=8, seed=0)))
    pairs = {
        process: [
            abs(a.error - b.error) for a, b in zip(found[process, "Euler"], found[process, "Tweedie"], strict=True)
        ]
        for process in registry.PROCESSES.built_in
    }
    assert max(pairs["absorbing"]) < 1e-12
    assert max(pairs["uniform"]) > 1e-3


def test_tweedie_is_exact_for_one_token_and_has_no_slope() -> None:
    found = samplers.curves(list(samplers.errors(4, 1, "log-linear", most=16, seed=0)))
    assert max(row.error for row in found["uniform", "Tweedie"]) < 1e-12
    assert samplers.slope(found["uniform", "Tweedie"]) is None
    assert samplers.slope(found["uniform", "Euler"]) is not None


def test_settings_that_show_nothing_are_refused(refuses: Callable[..., None]) -> None:
    refuses(lambda: next(ratios.learn(1, 5, 0)), "vocab_size is 1")
    refuses(lambda: next(ratios.learn(99, 5, 0)), "states is 99")
    refuses(lambda: next(ratios.learn(3, 0, 0)), "steps is 0")
    refuses(lambda: next(one_step.learn(one_step.network(0), 0, 0)), "steps is 0")
    refuses(lambda: one_step.sigma_of(0.0), "noise is 0")
    refuses(lambda: all_masked.refuse(1, 4000), "sampling steps are 1")
    refuses(lambda: all_masked.refuse(64, 9), "draws is 9")
    refuses(lambda: next(samplers.errors(3, 9, "log-linear", 8, 0)), "length 9")
    refuses(lambda: next(samplers.errors(3, 2, "fast", 8, 0)), "schedule is 'fast'")
    refuses(lambda: samplers.step_counts(3), "most is 3")
    refuses(lambda: plot.save_png(plot.figure(1.0, 1.0), Path("/dev/null/x.png")), "cannot be written to")


# Pictures --------------------------------------------------------------------------------------------------


def test_pictures_show_what_was_found(tmp_path: Path) -> None:
    """Every matrix, bar and point of a picture is one that was found; and a picture is a file."""
    learnt, truth = list(ratios.learn(states=3, steps=10, seed=0)), ratios.true_log_ratios(3, 0)
    drawn = ratios.picture(learnt, truth)
    images = [ax.images[0].get_array() for ax in drawn.subfigs[0].axes if ax.images]
    expected = []
    for name in ratios.OBJECTIVES:
        expected += [row.log_score for row in learnt if row.objective == name and row.step in (0, 2, 4, 6, 8, 10)]
        expected.append(truth)
    for image, matrix in zip(images, expected, strict=True):
        assert image.tolist() == matrix.tolist()

    said = [all_masked.tally(way, sentences.draw(200, torch.Generator().manual_seed(0))) for way in all_masked.WAYS]
    bars = [[bar.get_height() for bar in group] for group in all_masked.picture(said).axes[0].containers]
    assert bars == [[*sentences.shares().tolist(), 0.0], *([*row.shares.values(), row.astray] for row in said)]

    shares = list(one_step.shares(Smeared(), [0.2, 0.6]))
    for ax, what in zip(one_step.picture(shares).axes, one_step.MEASURES, strict=True):
        points = {line.get_label(): line.get_ydata() for line in ax.lines}
        for way in one_step.WAYS:
            assert list(points[way]) == [getattr(row, what) for row in shares if row.way == way]

    found = list(samplers.errors(2, 2, "log-linear", most=8, seed=0))
    curves = [list(line.get_ydata()) for ax in samplers.picture(found).axes for line in ax.lines]
    assert curves == [[row.error for row in curve] for curve in samplers.curves(found).values()]
    assert plot.save_png(drawn, tmp_path / "deep" / "ratios.png").read_bytes().startswith(b"\x89PNG")


def test_a_picture_leaves_the_users_own_style_alone(tmp_path: Path) -> None:
    before = dict(matplotlib.rcParams)
    plot.save_png(samplers.picture(list(samplers.errors(2, 1, "log-linear", most=8, seed=0))), tmp_path / "a.png")
    assert dict(matplotlib.rcParams) == before
