"""What a person sees: progress without a terminal, texts, labels of plots, pictures, help."""

import functools
import itertools
import re
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.text import Text
from typer.testing import CliRunner

from sedd.cli import app
from sedd.evaluation.quality.plots import plot_quality
from sedd.terminal import visible
from sedd.trace import TracedToken, save_trace_png, separator, split_texts
from sedd.training import progress

# Progress --------------------------------------------------------------------------------------------------


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """A clock that is set by hand."""
    now = 0.0

    def advance(seconds: float) -> None:
        nonlocal now
        now += seconds

    monkeypatch.setattr(progress, "LineTimer", functools.partial(progress.LineTimer, lambda: now))
    return advance


@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=60))
def test_lines_are_neither_too_frequent_nor_too_rare(waits: list[float]) -> None:
    times = list(itertools.accumulate(waits))
    now = 0.0
    timer = progress.LineTimer(lambda: now)
    printed = [0.0]
    for time in times:
        now = time
        if timer.is_due(time / times[-1]):
            printed.append(time)
        else:
            assert now - printed[-1] < progress.MAX_SECONDS
    assert all(b - a >= progress.MIN_SECONDS for a, b in itertools.pairwise(printed))


def test_training_prints_lines_without_a_terminal(
    clock: Callable[[float], None], capsys: pytest.CaptureFixture[str]
) -> None:
    """Bits per character of text, nats per token of anything else; notes and bounds come at once.

    The time left is that at the speed of this process: a tenth was done before it began, as in a run that is resumed.
    """
    record = {"step": 3, "loss": 2.0, "tokens_per_second": 1000}
    with progress.progress_bar() as (on_event, _):
        on_event("note", {"text": "records are padded [model]"})
        on_event("log", {"spent": 0.1, **record, "bits_per_char": 1.5})
        clock(20)
        on_event("log", {"spent": 0.2, "step": 4, "tokens": 9})
        on_event("log", {"spent": 0.3, "step": 5, "tokens": 10})
        clock(20)
        on_event("log", {"spent": 0.5, **record, "bound": 1.25, "bound_stderr": 0.1})
        on_event("log", {"spent": 1.0, "step": 9, "tokens": 18})
    assert capsys.readouterr().err.splitlines() == [
        "records are padded [model]",
        "20%, 2 min 40 s left: step 3  1.500 bits/char  1,000 tok/s",
        "step 3: validation bound 1.250 nats/token",
        "50%, 50.0 s left: step 3  2.000 nats/token  1,000 tok/s",
        "100%: step 3  2.000 nats/token  1,000 tok/s",
    ]


def test_other_work_prints_lines_without_a_terminal(
    clock: Callable[[float], None], capsys: pytest.CaptureFixture[str]
) -> None:
    with progress.progress_on_stderr("evaluating") as on_progress:
        for done in range(1, 5):
            clock(6)
            on_progress(done, 4)
    assert capsys.readouterr() == ("", "evaluating: 50%, 12.0 s left\nevaluating: 100%\n")


# Texts -----------------------------------------------------------------------------------------------------


@given(st.text())
def test_shown_texts_cannot_control_a_terminal(text: str) -> None:
    shown = visible(text)
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", shown)
    assert "\n" not in visible(text, line_ends=False)
    if not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]", text):
        assert shown == text


@given(st.lists(st.text(st.sampled_from("ab\n─ ")), min_size=1, max_size=4))
def test_separated_texts_are_read_back(texts: list[str]) -> None:
    content = "".join(f"{separator(number)}\n{text}\n" for number, text in enumerate(texts, 1))
    assert split_texts(content) == texts
    assert split_texts("one\ntwo\n") is None


# Pictures --------------------------------------------------------------------------------------------------


def crowded(count: int) -> Iterator[dict[str, Any]]:
    """Results of a sweep that lie close together."""
    for i in range(count):
        yield {
            **{
                "source": "run",
                "steps": 2**i,
                "nfe": 60 + i,
                "entropy_nats": 3 + 1e-3 * i,
                "gen_ppl_by_token": 20 + i / 9,
            },
            **{"stderr_entropy_nats": 0.01, "stderr_gen_ppl_by_token": 1.0, "judge": "j", "first_token": "skipped"},
        }


def test_labels_of_a_sweep_do_not_overlap() -> None:
    """Nor do the numbers of network calls below the other panel; every point has its label."""
    figure = plot_quality([*crowded(12)], ["steps"])
    figure.draw_without_rendering()
    cost, entropy = figure.axes
    boxes = [Text.get_window_extent(text) for text in entropy.texts]  # without the line to its point
    assert [text.get_text() for text in entropy.texts] == [str(2**i) for i in range(12)]
    ticks = [tick.get_window_extent() for tick in cost.get_xticklabels() if tick.get_text()]
    assert ticks
    for group in (boxes, ticks):
        assert not [pair for pair in itertools.combinations(group, 2) if pair[0].overlaps(pair[1])]


def test_labels_that_are_simply_written_beside_points_would_overlap() -> None:
    """Mutant: the same points, labelled without looking for room."""
    figure = plot_quality([*crowded(12)], ["steps"])
    for text in figure.axes[1].texts:
        text.set_position((4, 4))
    figure.draw_without_rendering()
    boxes = [Text.get_window_extent(text) for text in figure.axes[1].texts]
    assert [pair for pair in itertools.combinations(boxes, 2) if pair[0].overlaps(pair[1])]


def test_a_trace_is_as_wide_as_its_longest_line(tmp_path: Path) -> None:
    def size(length: int) -> tuple[int, int]:
        save_trace_png([[TracedToken("a", 1)] * length], "A text", tmp_path / "a.png")
        width, height = struct.unpack(">II", (tmp_path / "a.png").read_bytes()[16:24])
        return width, height

    assert size(10)[0] < size(100)[0] < size(140)[0]
    assert size(280)[0] == size(140)[0]
    assert size(280)[1] > size(140)[1]


# Help ------------------------------------------------------------------------------------------------------


def commands(group: Any, words: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, command in group.commands.items():
        yield from commands(command, (*words, name)) if hasattr(command, "commands") else [((*words, name), command)]


def test_help_shows_square_brackets() -> None:
    """Rich takes text in square brackets for markup and would leave it out."""
    found = []
    for words, command in commands(typer.main.get_command(app)):
        texts = [command.help or "", *(getattr(parameter, "help", None) or "" for parameter in command.params)]
        if bracketed := re.findall(r"\[[^\]\n]*\]", " ".join(texts)):
            shown = CliRunner().invoke(app, [*words, "--help"], env={"COLUMNS": "400", "TERM": "dumb"}).output
            found += bracketed
            assert [text for text in bracketed if text not in shown] == []
    assert found
