"""The figures of the documentation show today's data, mathematics and code."""

import itertools
import re
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from demos import samplers, sentences

from sedd import process, schedule
from sedd.cli import quality as cli_quality

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


@pytest.fixture
def pictures(experiment: Callable[[str], ModuleType]) -> ModuleType:
    return experiment("pictures")


@pytest.fixture
def figures(pictures: ModuleType) -> ModuleType:
    return sys.modules["figures"]


def test_the_figures_are_up_to_date(pictures: ModuleType) -> None:
    assert pictures.stale() == []


def test_a_figure_of_other_data_is_stale(pictures: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutants: a bound that is off in its third digit, a changed style sheet of a page that is on a screenshot."""
    bounds, page = (pictures.FIGURES[name] for name in ("pictures-bounds", "page"))
    changed = bounds.data() | {"exact score": 2.0999}
    monkeypatch.setitem(pictures.FIGURES, "pictures-bounds", bounds._replace(data=lambda: changed))
    style = page.data() | {"serve/page/style.css": "0"}
    monkeypatch.setitem(pictures.FIGURES, "page", page._replace(data=lambda: style))
    assert pictures.stale() == [
        "pictures-bounds.svg shows other data; run make pictures",
        "page.png shows other data; run make pictures",
    ]


def test_every_picture_of_the_documentation_is_drawn_by_code(
    pictures: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No picture is made by hand: the files below docs/ are those that the script writes. Mutant: one it does not."""
    assert pictures.unknown() == []
    others = {name: picture for name, picture in pictures.FIGURES.items() if name != "sweep"}
    monkeypatch.setattr(pictures, "FIGURES", others)
    assert pictures.unknown() == ["docs/images/sweep.png is drawn by no code; add it to FIGURES or delete it"]


def test_the_introduction_and_every_concept_page_show_figures(pictures: ModuleType) -> None:
    shown = re.findall(r"images/(pictures-\w+)\.svg", (DOCS / "pictures.md").read_text())
    assert sorted(shown) == sorted(name for name in pictures.FIGURES if name.startswith("pictures-"))
    for page in (DOCS / "concepts").glob("*.md"):
        assert re.search(r"!\[[^\]]+\]\(\.\./images/[\w-]+\.svg\)", page.read_text()), page.name


def test_figures_are_whole_and_load_nothing(pictures: ModuleType) -> None:
    """An SVG in an img tag loads nothing from elsewhere; so ours must not refer to anything, nor run scripts."""
    for file in sorted((DOCS / "images").glob("*.svg")):
        text = file.read_text()
        root = ElementTree.fromstring(text)
        assert root.tag.endswith("svg"), file.name
        assert "<script" not in text, file.name
        assert not re.search(r'(?:href|src)="(?!#)', text), file.name
        assert not re.search(r"url\((?!#)|@import", text), file.name
        assert len(text) < 160_000, file.name


# The moving picture ----------------------------------------------------------------------------------------


def test_the_moving_picture_is_small_and_ends_with_the_text(figures: ModuleType) -> None:
    text = (DOCS / "images/denoising.svg").read_text()
    assert len(text) < 150_000
    still, moving = text.split("@media (prefers-reduced-motion:no-preference)")
    assert re.search(r"\.m\{[^}]*opacity:0", still)  # without motion no mask is seen
    record = figures.animation.stored()["sample"]
    steps = [step for _, step in record["tokens"]]
    for step in set(steps):
        begin, end = re.search(rf"@keyframes r{step}\{{0%,([\d.]+)%\{{opacity:0[^}}]*\}}([\d.]+)%", moving).groups()  # type: ignore[union-attr]
        assert float(begin) < float(end), step  # equal ones would make the token fade in from the beginning
    order = [float(re.search(rf"@keyframes r{s}\{{0%,([\d.]+)%", moving)[1]) for s in sorted(set(steps))]  # type: ignore[index]
    assert order == sorted(order)


def test_stored_texts_are_those_of_the_model_in_the_box(figures: ModuleType) -> None:
    record = figures.animation.stored()
    assert record["weights_sha256"] == figures.animation.weights_digest()
    for part in ("sample", "infilling"):
        text = "".join(token for token, _ in record[part]["tokens"])
        assert text.replace("\\n", "\n").strip() == record[part]["text"].strip()
    assert record["infilling"]["template"] == figures.animation.TEMPLATE
    given = "".join(token if not step else "\0" for token, step in record["infilling"]["tokens"])
    expected = re.sub(r"\{(\d+)\}", lambda gap: "\0" * int(gap[1]), record["infilling"]["template"])
    assert given == expected


def test_lines_break_between_words(figures: ModuleType) -> None:
    placed = figures.animation.place(
        [("One", 1), (" two", 2), ("s", 3), (",", 4), (" three", 5), ("\\n", 6), ("x", 7)], 9
    )
    assert [(token.text, token.column, token.line) for token in placed] == [
        ("One", 0, 0),
        ("two", 4, 0),
        ("s", 7, 0),
        (",", 8, 0),
        ("three", 0, 1),
        ("↵", 5, 1),
        ("x", 0, 2),
    ]


# What the guides show --------------------------------------------------------------------------------------


def read_page(name: str) -> str:
    """Return the text of a guide, each run of white space as one space."""
    return " ".join((DOCS / "guides" / name).read_text().split())


def test_tables_beside_figures_show_the_recorded_runs(figures: ModuleType) -> None:
    """Commands and numbers of the comparison and of the sweep are those of the stored runs."""
    stored, likelihood, quality = figures.guides.stored(), read_page("likelihood.md"), read_page("quality.md")
    for page, part in ((likelihood, "compare"), (quality, "sweep")):
        assert stored[part]["commands"] == getattr(figures.guides, part.upper())
        assert [line for line in stored[part]["commands"] if line not in page] == []
    shown = ("run", "objective", "parameters", "trained_tokens", "bits", "stderr_bits", "ppl_bound", "is_exact")
    for row in stored["compare"]["rows"]:
        assert f"| {' | '.join(str(row[name]) for name in shown)} |" in likelihood
    for row in stored["sweep"]["rows"]:
        fields = ("steps", "temperature", "gen_ppl_by_token", "entropy_nats", "self_repetition_4", "nfe")
        cells = (cli_quality._format(row[name], row.get(f"stderr_{name}")) for name in fields)
        assert f"| {' | '.join(cells)} |" in quality


def test_the_captions_of_the_sweep_hold(figures: ModuleType) -> None:
    """A lower temperature has the lower perplexity and the lower entropy; over the steps, intervals overlap."""
    rows = figures.guides.stored()["sweep"]["rows"]
    cold, warm = ([row for row in rows if row["temperature"] == value] for value in (0.7, 1))
    for name in ("gen_ppl_by_token", "entropy_nats"):
        assert max(row[name] for row in cold) < min(row[name] for row in warm)
    for group in (cold, warm):
        low, high = (
            [row["gen_ppl_by_token"] + sign * 1.96 * row["stderr_gen_ppl_by_token"] for row in group]
            for sign in (-1, 1)
        )
        assert max(low) < min(high)


def test_the_trace_is_that_of_the_command(figures: ModuleType) -> None:
    record = figures.guides.stored()["trace"]
    assert record["weights_sha256"] == figures.animation.weights_digest()
    assert (record["template"], record["settings"]) == (figures.guides.TEMPLATE, figures.guides.TRACE)
    command = (
        f'sedd trace stories "{record["template"]}" --temperature {record["settings"]["temperature"]} --out trace.html'
    )
    assert command in read_page("sampling.md")
    given = "".join(token if not step else "\0" for token, step in record["tokens"])
    expected = re.sub(r" \{(\d+)\}", lambda gap: "\0" * int(gap[1]), record["template"])
    assert given == expected


def test_recorded_demonstrations_are_those_of_the_code_and_of_the_page(figures: ModuleType) -> None:
    """Errors of samplers are computed again for few steps; the tables of the page show what is stored."""
    stored, page = figures.guides.stored(), read_page("demos.md")
    errors = {(row["process"], row["sampler"], row["steps"]): row["error"] for row in stored["samplers"]}
    for row in samplers.sampler_errors(3, 3, "log-linear", 8, seed=0):
        assert errors[row[:3]] == pytest.approx(row.error, rel=1e-9)
    for steps in (1, 4, 16, 64, 256):
        cells = (f"{errors['absorbing', name, steps]:.2e}" for name in samplers.SAMPLERS)
        assert f"{steps} {' '.join(cells)}" in page
    rows = stored["all-masked"]
    for text in rows[0]["frequencies"]:
        cells = (f"{row['frequencies'][text]:.3f}" for row in rows)
        assert f"{text} {sentences.CORPUS[text] / 100:.3f} {' '.join(cells)}" in page
    for name, field, digits in (("total variation", "total_variation", 3), ("chi-square, 5 degrees", "chi_square", 1)):
        assert f"{name} {' '.join(f'{row[field]:.{digits}f}' for row in rows)}" in page
    examples = [" ".join(row) for row in stored["one-step examples"]]
    assert len([row for row in examples if row in page]) == 3
    for row in figures.guides.found_ratios():
        if row.step == 100:
            assert re.search(rf"{row.objective} ([\d.]+ ){{5}}{row.error:.4f}", page), row.objective


# What the figures show is true -----------------------------------------------------------------------------


def test_the_noise_of_the_figure_is_that_of_the_processes(figures: ModuleType) -> None:
    """From 0 to a time and from one time to the next, as many letters are unchanged as the transition matrix says.

    Sixteen comparisons of at most 4 standard errors: a false alarm in one of a thousand seeds. Mutant: under uniform
    noise a letter that was replaced once keeps its new value.
    """
    letters, times = len(figures.introduction.ALPHABET), (0.25, 0.5, 0.75, 0.9)
    x_0 = torch.full((100_000,), 3)
    paths = figures.introduction.noise_paths(x_0, times, seed=0)
    sigma = schedule.LogLinear().sigma(torch.tensor((0, *times), dtype=torch.float64))

    def deviation(noise: process.Process, x_u: torch.Tensor, x_t: torch.Tensor, passed: torch.Tensor) -> float:
        """Return the excess of unchanged letters in standard errors."""
        expected = float(noise.transition_matrix(passed[None])[0][0, 0])
        same = (x_t == x_u)[x_u < letters].double()
        return (float(same.mean()) - expected) / (expected * (1 - expected) / len(same)) ** 0.5

    for noise, path in ((process.Absorbing(letters), paths["absorbing"]), (process.Uniform(letters), paths["uniform"])):
        for k, (x_u, x_t) in enumerate(itertools.pairwise([x_0, *path])):
            assert abs(deviation(noise, x_0, x_t, sigma[k + 1] - sigma[0])) < 4
            assert abs(deviation(noise, x_u, x_t, sigma[k + 1] - sigma[k])) < 4
    first, last = paths["uniform"][0], paths["uniform"][-1]
    frozen = torch.where(first != x_0, first, last)
    assert deviation(process.Uniform(letters), first, frozen, sigma[-1] - sigma[1]) > 4
    rows = figures.introduction.forward()["uniform"]
    assert any(len(set(column)) > 2 for column in zip(*rows, strict=True))


def test_samples_of_the_figures_are_words(figures: ModuleType) -> None:
    """Every letter appears once and stays; the exact score writes words, one letter at a time."""
    states = figures.introduction.sampling_steps()["states"]
    assert set(states[0]) == {"___"}
    for before, after in itertools.pairwise(states):
        for old, new in zip(before, after, strict=True):
            assert all(a in ("_", b) for a, b in zip(old, new, strict=True))
    for words in figures.introduction.infilling().values():
        assert sum(drawn for _, drawn in words.values()) == pytest.approx(1)
        assert all(abs(drawn - exact) < 5 * (exact / 4000) ** 0.5 for exact, drawn in words.values())


def test_the_captions_of_the_objectives_hold(figures: ModuleType) -> None:
    """Forms of score entropy differ by constants; every objective but softmax-linear has its minimum at the truth."""
    data = figures.concepts.minima()
    for other in ("score-entropy", "implicit-score-entropy"):
        differences = [row[other] - row["explicit-score-entropy"] for row in data["scales"]]
        assert max(differences) - min(differences) < 1e-3
    truth = figures.concepts.POWERS.index(1.0)
    assert data["powers"][truth]["score-entropy"] == pytest.approx(data["entropy"], abs=1e-3)
    for row in data["powers"]:
        for name in ("score-entropy", "lambda-dce", "any-order"):
            assert row[name] == pytest.approx(row["t-dce"], abs=1e-3)
    names = set(data["powers"][0]) - {"softmax-linear"}
    assert all(min(range(len(data["powers"])), key=lambda k: data["powers"][k][n]) == truth for n in names)
    softmax_linear = [row["softmax-linear"] for row in data["powers"]]
    assert softmax_linear == sorted(softmax_linear, reverse=True)


def test_the_captions_of_the_samplers_hold(figures: ModuleType) -> None:
    errors = figures.concepts.sampler_errors()
    log_linear, geometric = (errors[f"absorbing noise, {name} schedule"] for name in ("log-linear", "geometric"))
    assert log_linear["euler"] == pytest.approx(log_linear["tweedie"], rel=1e-3)
    assert all(e > 1.04 * t for e, t in zip(geometric["euler"][1:], geometric["tweedie"][1:], strict=True))
    for curves in (log_linear, geometric):
        assert curves["first-hitting"] == pytest.approx(curves["tweedie"], rel=1e-3)
        assert curves["ordered"][2:] == [0.0] * (len(curves["ordered"]) - 2)
        assert 3.5 < curves["theta"][-2] / curves["theta"][-1] < 4.5
    uniform = errors["uniform noise, geometric schedule"]
    at = figures.concepts.STEPS.index(8)
    assert all(e < t for e, t in zip(uniform["euler"][at:], uniform["tweedie"][at:], strict=True))
    assert log_linear["remask"][-1] > log_linear["tweedie"][-1]
    assert uniform["gibbs"][-1] < 0.1 * uniform["tweedie"][-1]


def test_the_wrong_sampler_of_the_figure_is_refuted(figures: ModuleType) -> None:
    data = figures.concepts.verification()
    assert data["as written"]["chi_square"] < 27.9 < data["argmax in the last step"]["chi_square"]  # p = 0.001


def test_a_diagram_with_a_name_that_does_not_exist_is_refused(
    figures: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    diagrams = figures.diagrams
    with pytest.raises((ValueError, AttributeError)):
        diagrams.resolve("loss", "training.trainer.Trainer.no_such_loss")
    rows = (*diagrams.ARCHITECTURES["modern"][:2], ("QKV", "no_such_weight"), *diagrams.ARCHITECTURES["modern"][3:])
    monkeypatch.setitem(diagrams.ARCHITECTURES, "modern", rows)
    with pytest.raises(ValueError, match=r"modern has no weights blocks\.0\.no_such_weight"):
        diagrams.network.__wrapped__()
