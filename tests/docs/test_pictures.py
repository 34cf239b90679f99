"""The figures of the introduction show today's mathematics."""

import importlib
import itertools
import re
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def pictures(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "experiments"))
    return importlib.import_module("pictures")


def test_the_figures_are_up_to_date(pictures: ModuleType) -> None:
    assert pictures.stale() == []


def test_a_figure_of_other_data_is_stale(pictures: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutant: a bound that is off in its third digit."""
    changed = pictures.bounds() | {"exact score": 2.0999}
    monkeypatch.setitem(pictures.FIGURES, "bounds", (lambda: changed, pictures.draw_bounds))
    assert pictures.stale() == ["pictures-bounds.svg shows other data; run make pictures"]


def test_the_page_shows_every_figure_once(pictures: ModuleType) -> None:
    shown = re.findall(r"images/pictures-(\w+)\.svg", (ROOT / "docs/pictures.md").read_text())
    assert sorted(shown) == sorted(pictures.FIGURES)


def test_samples_of_the_figures_are_words(pictures: ModuleType) -> None:
    """Every letter appears once and stays; the exact score writes words, one letter at a time."""
    states = pictures.sampling_steps()["states"]
    assert set(states[0]) == {"___"}
    for before, after in itertools.pairwise(states):
        for old, new in zip(before, after, strict=True):
            assert all(a in ("_", b) for a, b in zip(old, new, strict=True))
    for words in pictures.infilling().values():
        assert sum(drawn for _, drawn in words.values()) == pytest.approx(1)
        assert all(abs(drawn - exact) < 5 * (exact / 4000) ** 0.5 for exact, drawn in words.values())
