"""Templates for infilling: ``The {8} sat on the {12}.`` has a gap of eight tokens and one of twelve."""

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from sedd.parameterization import CausalModel
from sedd.samplers.loop import Prompt
from sedd.schema import MAX_SAMPLES, check_count
from sedd.tokenizer import Tokenizer

if TYPE_CHECKING:
    from sedd.loading import LoadedModel

_PARTS = re.compile(r"((?:[^{}]++|\{\{|\}\})++)|(\{[^{}]*\}|[{}])")  # a text (braces doubled), or a gap or stray brace
_DIGITS = 18  # of a gap at most: Python does not parse numbers of thousands of digits


def parse_template(template: str, longest: int = MAX_SAMPLES) -> list[str | int]:
    """Split a template into texts and gap lengths; ``{{`` and ``}}`` are literal braces.

    All gaps together may have ``longest`` tokens: at most the model's sequence length.
    """
    parts: list[str | int] = []
    total = 0
    for found in _PARTS.finditer(template):
        text, gap = found.groups()
        part: str | int = text and text.replace("{{", "{").replace("}}", "}")
        if not text:
            if not ((digits := gap[1:-1]).isdecimal() and len(digits) <= _DIGITS and int(digits)):
                advice = "a gap is a number of tokens in braces, as in {8}, and a brace itself is written twice"
                raise ValueError(f"the template holds {gap[:80]!r}; {advice}")
            part = int(digits)
            check_count("a gap of the template", part, most=MAX_SAMPLES)
            total += part
        if total <= longest:
            parts.append(part)
    if not total:
        raise ValueError(f"the template {template[:80]!r} has no gap; write {{8}} where eight tokens are to be filled")
    if total > longest:
        raise ValueError(f"the gaps of the template add up to {total} tokens; the model takes {longest}: shorten them")
    return parts


def template_ids(template: str, tokenizer: Tokenizer, longest: int = MAX_SAMPLES) -> list[int]:
    """Return the token ids of a template, −1 in its gaps; each text between gaps is encoded by itself.

    Where words include the space before them, as in BPE, one space before a gap is left to its first token: a space by
    itself occurs in no text there.
    """
    row: list[int] = []
    parts = parse_template(template, longest)
    for part, following in zip(parts, [*parts[1:], ""], strict=True):
        if isinstance(part, int):
            row += [-1] * part
        else:
            leaves_space = isinstance(following, int) and part.endswith(" ") and tokenizer.words_include_space
            row += tokenizer.encode(part[:-1] if leaves_space else part).tolist()
    if len(row) > longest:
        raise ValueError(f"a template has {len(row)} tokens with its gaps; the model takes up to {longest}")
    return row


def template_prompt(templates: Sequence[str], loaded: "LoadedModel") -> Prompt:
    """Build the prompt of a batch of templates for a model."""
    longest = loaded.config.model.seq_len
    return build_prompt([template_ids(text, loaded.tokenizer, longest) for text in templates], loaded)


def build_prompt(rows: list[list[int]], loaded: "LoadedModel") -> Prompt:
    """Build the prompt of rows of token ids for a model.

    A row of a padded record that ends in a gap is the beginning of a record: what follows it is unknown. A time-free
    denoiser under absorbing noise sums over the unknown by masks that are never revealed. An autoregressive model does
    not read what follows. For other models it is drawn, too, and left out.
    """
    process, model = loaded.process, loaded.model
    if loaded.learned_pad is None or isinstance(model, CausalModel):
        return prompt_from_ids(rows)
    sums = process.only_masks and not model.depends_on_sigma
    return prompt_from_ids(rows, loaded.config.model.seq_len, loaded.learned_pad, process.vocab_size if sums else -1)


def prompt_from_ids(rows: list[list[int]], width: int | None = None, pad: int = 0, unknown: int = -1) -> Prompt:
    """Build a prompt from rows of token ids, in which −1 is to be filled; lengths may differ.

    Without ``width``, what follows shorter rows is not read. Else rows are continued to ``width`` tokens: by ``pad``,
    which is given, or after a gap at their end by ``unknown``, the mask or −1.
    """
    lengths = torch.tensor([len(row) for row in rows])
    length = max((len(row) for row in rows), default=0)
    given = torch.full((len(rows), width or length), pad)
    is_open = [width is not None and row[-1:] == [-1] for row in rows]
    for i, row in enumerate(rows):
        if is_open[i]:
            given[i] = unknown
        given[i, : len(row)] = torch.tensor(row)
    valid = None if width or bool((lengths == length).all()) else torch.arange(length) < lengths[:, None]
    return Prompt(given, valid, torch.where(torch.tensor(is_open), lengths, given.shape[1]) if any(is_open) else None)


def without_stop(text: str, stops: Sequence[str], start: int = 0, may_go_on: bool = False) -> str:
    """Return the text before the first of the stop strings that begins at ``start`` or later.

    Of a text that may go on, it leaves out, too, an end that could be the beginning of a stop string.
    """
    ends = [at for stop in stops if (at := text.find(stop, start)) >= 0]
    if may_go_on:
        beginnings = [stop[:count] for stop in stops for count in range(1, len(stop))]
        ends += [len(text) - len(part) for part in beginnings if text.endswith(part, start)]
    return text[: min(ends, default=len(text))]
