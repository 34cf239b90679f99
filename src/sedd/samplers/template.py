"""Templates for infilling: ``The {8} sat on the {12}.`` has a gap of eight tokens and one of twelve."""

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from sedd.parameterization import CausalModel
from sedd.samplers.loop import Prompt
from sedd.schema import MAX_SAMPLES, check_count
from sedd.tokenizer import Tokenizer

if TYPE_CHECKING:
    from sedd.loading import LoadedModel

_PARTS = re.compile(r"((?:[^{}]++|\{\{|\}\})++)|(\{[^{}]*\}|[{}])")
"""A text, in which braces are doubled; or a gap, or a brace that belongs to nothing."""
_DIGITS = 18
"""Most digits of a gap: Python does not parse numbers of thousands of digits."""


def parse_template(template: str, longest: int = MAX_SAMPLES) -> list[str | int]:
    """Split a template into texts and gap lengths; ``{{`` and ``}}`` are literal braces.

    Args:
        template: The template.
        longest: Tokens that all gaps together may have: at most the model's sequence length.
    """
    parts: list[str | int] = []
    total = 0
    for found in _PARTS.finditer(template):
        text, gap = found.groups()
        part: str | int
        if text:
            part = text.replace("{{", "{").replace("}}", "}")
        elif (digits := gap[1:-1]).isdecimal() and len(digits) <= _DIGITS and (length := int(digits)) > 0:
            check_count("a gap of the template", length, most=MAX_SAMPLES)
            part, total = length, total + length
        else:
            raise ValueError(
                f"the template holds {gap[:80]!r}; a gap is a number of tokens in braces, as in {{8}}, and a brace "
                "itself is written twice"
            )
        if total <= longest:
            parts.append(part)
    if not total:
        raise ValueError(
            f"the template {template[:80]!r} has no gap; write {{8}} where eight tokens are to be filled in"
        )
    if total > longest:
        raise ValueError(
            f"the gaps of the template add up to {total} tokens; the model takes up to {longest}: write shorter gaps"
        )
    return parts


def template_ids(template: str, tokenizer: Tokenizer, longest: int = MAX_SAMPLES) -> list[int]:
    """Return the token ids of a template, −1 in its gaps; each text between gaps is encoded by itself.

    Where words include the space before them, as in BPE, one space before a gap is left to its first token: a space by
    itself occurs in no text there.

    Args:
        template: The template.
        tokenizer: Encodes its texts.
        longest: The longest row that the model takes.
    """
    row: list[int] = []
    count, parts = 0, parse_template(template, longest)
    for part, following in zip(parts, [*parts[1:], ""], strict=True):
        if isinstance(part, int):
            ids = np.full(part, -1)
        else:
            leaves_space = isinstance(following, int) and part.endswith(" ") and tokenizer.words_include_space
            ids = tokenizer.encode(part[:-1] if leaves_space else part)
        count += len(ids)
        if count <= longest:
            row += ids.tolist()
    if count > longest:
        raise ValueError(f"a template has {count} tokens with its gaps; the model takes up to {longest}")
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
    process, model, length = loaded.process, loaded.model, loaded.config.model.seq_len
    pad = None if isinstance(model, CausalModel) else loaded.learned_pad
    sums = process.only_masks and not model.depends_on_sigma
    return prompt_from_ids(rows, length, process.vocab_size, pad, process.vocab_size if sums else -1)


def prompt_from_ids(
    rows: list[list[int]], length: int, vocab_size: int, pad: int | None = None, unknown: int = -1
) -> Prompt:
    """Build a prompt from rows of token ids, in which −1 is to be filled.

    Args:
        rows: Token ids; lengths may differ.
        length: The longest row that the model takes.
        vocab_size: Ids must be below it.
        pad: The padding token of a model trained on padded records: rows are then padded to ``length`` with given
            tokens. None: shorter rows are not padded.
        unknown: What rows that end in a gap are continued by instead of padding: the mask, or −1, to be filled.
    """
    for row in rows:
        if len(row) > length:
            raise ValueError(f"a template has {len(row)} tokens with its gaps; the model takes up to {length}")
        if bad := next((id for id in row if id >= vocab_size or id < -1), None):
            mask = " (that is the mask, which no text contains)" if bad == vocab_size else ""
            raise ValueError(f"the template holds token {bad}{mask}; tokens lie in 0..{vocab_size - 1}")
    width = max((len(row) for row in rows), default=0) if pad is None else length
    given = np.full((len(rows), width), 0 if pad is None else pad, dtype=np.int64)
    is_open = [pad is not None and row[-1:] == [-1] for row in rows]
    for i, row in enumerate(rows):
        if is_open[i]:
            given[i] = unknown
        given[i, : len(row)] = row
    lengths = torch.tensor([len(row) for row in rows])
    whole = pad is not None or bool((lengths == width).all())
    kept = torch.where(torch.tensor(is_open), lengths, width) if any(is_open) else None
    return Prompt(torch.from_numpy(given), None if whole else torch.arange(width) < lengths[:, None], kept)


def without_stop(text: str, stops: Sequence[str], start: int = 0, may_go_on: bool = False) -> str:
    """Return the text before the first of the stop strings that begins at ``start`` or later.

    Args:
        text: The text.
        stops: Strings that end it; they are not part of it.
        start: Where the search begins.
        may_go_on: Leave out, too, an end that could be the beginning of a stop string.
    """
    ends = [at for stop in stops if (at := text.find(stop, start)) >= 0]
    if may_go_on:
        beginnings = [stop[:count] for stop in stops for count in range(1, len(stop))]
        ends += [len(text) - len(part) for part in beginnings if text.endswith(part, start)]
    return text[: min(ends, default=len(text))]
