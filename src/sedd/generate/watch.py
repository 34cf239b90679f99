"""Texts as they form: the states of a sampler on a console."""

from collections.abc import Iterator
from itertools import groupby

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from sedd.factory import LoadedModel
from sedd.generate.display import separator
from sedd.samplers import Prompt, State
from sedd.terminal import visible


def watch_states(
    states: Iterator[State], prompt: Prompt, loaded: LoadedModel, console: Console, first: int = 0
) -> State:
    """Show the texts of a batch as they form, masks as dots; return the last state.

    On a terminal live, replaced at the end; else a line for each text at steps 1, 2, 4, 8, …

    Args:
        states: As `SamplingRun.states` yields them.
        prompt: What they were made from.
        loaded: The model, for its tokenizer.
        console: Where to show them.
        first: The index of the first text.
    """
    last, lengths = next(states), prompt.text_lengths.tolist()
    if console.is_terminal:
        with Live(console=console, refresh_per_second=20, transient=True) as live:
            for last in states:
                live.update(_render_all(_texts(last, lengths), loaded, first))
        return last
    for last in states:
        if last.step & (last.step - 1) == 0:
            for number, row in enumerate(_texts(last, lengths), first + 1):
                line = f"step {last.step}, sample {number}: {visible(_render(row, loaded).plain, line_ends=False)}"
                console.print(line, markup=False, highlight=False, soft_wrap=True)
    return last


def _texts(state: State, lengths: list[int]) -> list[list[int]]:
    return [row[:length] for row, length in zip(state.x.tolist(), lengths, strict=True)]


def _render(row: list[int], loaded: LoadedModel) -> Text:
    mask = loaded.process.mask if loaded.process.has_mask else None
    text = Text()
    for masked, run in groupby(row, lambda token: token == mask):
        ids = list(run)
        shown = "·" * len(ids) if masked else visible(loaded.tokenizer.decode(ids))
        text.append(shown, style="dim" if masked else "")
    return text


def _render_all(rows: list[list[int]], loaded: LoadedModel, first: int) -> Group:
    heads = [Text(separator(first + i), style="dim") for i in range(1, len(rows) + 1)]
    texts = [part for head, row in zip(heads, rows, strict=True) for part in (head, _render(row, loaded))]
    return Group(*(texts if len(rows) > 1 else texts[1:]))
