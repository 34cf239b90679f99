"""Templates: text with gaps. ``The {8} sat on the {12}.`` has a gap of eight tokens and one of twelve."""

import re
from collections.abc import Sequence

import numpy as np
import torch

from sedd.factory import LoadedModel
from sedd.sampling import Prompt
from sedd.tokenizer import Tokenizer

_PARTS = re.compile(r"\{\{|\}\}|\{[^{}]*\}|[{}]|[^{}]+")


def parse(template: str) -> list[str | int]:
    """Texts and gaps in turn; ``{{`` and ``}}`` are braces."""
    parts: list[str | int] = []
    for found in _PARTS.findall(template):
        if found in ("{{", "}}") or found[0] not in "{}":
            text = found[0] if found[0] in "{}" else found
            if parts and isinstance(parts[-1], str):
                parts[-1] += text
            else:
                parts.append(text)
        elif found[1:-1].isdecimal() and int(found[1:-1]) > 0:
            parts.append(int(found[1:-1]))
        else:
            raise ValueError(
                f"the template holds {found!r}; a gap is a number of tokens in braces, as in {{8}}, and a brace itself "
                "is written twice"
            )
    if not any(isinstance(part, int) for part in parts):
        raise ValueError(f"the template {template!r} has no gap; write {{8}} where eight tokens are to be filled in")
    return parts


def ids(template: str, tokenizer: Tokenizer) -> list[int]:
    """The token ids of a template, −1 in its gaps. Each text between gaps is encoded by itself."""
    row: list[int] = []
    for part in parse(template):
        row += [-1] * part if isinstance(part, int) else tokenizer.encode(part).tolist()
    return row


def around(templates: Sequence[str], loaded: LoadedModel) -> Prompt:
    """Templates side by side, as a model reads them."""
    data, tokenizer = loaded.config.data, loaded.tokenizer
    pad = tokenizer.pad if data.packing == "lines" and data.pad == "model" else None
    rows = [ids(text, tokenizer) for text in templates]
    return prompt(rows, loaded.config.model.seq_len, loaded.process.vocab_size, pad)


def prompt(rows: list[list[int]], length: int, vocab_size: int, pad: int | None = None) -> Prompt:
    """Rows of ids and −1 side by side.

    With ``pad`` a row is a whole record, and padding up to ``length`` is given behind it; else it ends where it ends.
    """
    for row in rows:
        if len(row) > length:
            raise ValueError(f"a template has {len(row)} tokens with its gaps; the model goes up to {length}")
        if bad := next((id for id in row if id >= vocab_size or id < -1), None):
            mask = " (that is the mask, which no text holds)" if bad == vocab_size else ""
            raise ValueError(f"the template holds token {bad}{mask}; tokens lie in 0..{vocab_size - 1}")
    width = max((len(row) for row in rows), default=0) if pad is None else length
    given = np.full((len(rows), width), 0 if pad is None else pad, dtype=np.int64)
    for i, row in enumerate(rows):
        given[i, : len(row)] = row
    lengths = torch.tensor([len(row) for row in rows])[:, None]
    whole = pad is not None or bool((lengths == width).all())
    return Prompt(torch.from_numpy(given), None if whole else torch.arange(width) < lengths)
