"""The tokenizer interface."""

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from jaxtyping import Int
from numpy.typing import ArrayLike

CONFIG = "tokenizer_config.json"
DEFINITION = "tokenizer.json"
FORMAT = 1
PAD_TEXT = "<pad>"
"""Padding among printable tokens."""

Ids = Int[np.ndarray, " _"]


@dataclass(frozen=True, kw_only=True)
class Tokenizer(ABC):
    """A base vocabulary with optional special ids ``eos`` (end of text) and ``pad``."""

    kind: ClassVar[str]
    eos: int | None = None
    pad: int | None = None

    @property
    @abstractmethod
    def base_size(self) -> int:
        """Number of ids without appended special ids."""

    @property
    @abstractmethod
    def is_lossless(self) -> bool:
        """Whether ``decode(encode(text)) == text`` for every text that can be encoded."""

    @property
    @abstractmethod
    def extra_files(self) -> Mapping[str, bytes]:
        """Further files of the saved form, name to content, beside tokenizer_config.json."""

    @abstractmethod
    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        """Encode texts; special ids are never produced."""

    @abstractmethod
    def settings(self) -> dict[str, Any]:
        """Return the entries of tokenizer_config.json other than kind and special ids."""

    @classmethod
    @abstractmethod
    def restore(cls, folder: Path, config: Mapping[str, Any]) -> "Tokenizer":
        """Rebuild the tokenizer saved in ``folder``; raise KeyError or TypeError if ``config`` is damaged."""

    @abstractmethod
    def _decode(self, ids: Ids) -> str:
        """Decode ids of the base vocabulary."""

    @abstractmethod
    def _piece(self, id: int) -> str:
        """Return the text of one id of the base vocabulary, printable or not."""

    @property
    def keeps_bytes(self) -> bool:
        """Whether bytes that are not UTF-8, decoded with ``surrogateescape``, have tokens."""
        return False

    @property
    def words_include_space(self) -> bool:
        """Whether tokens of words include the space before them."""
        return False

    @property
    def vocab_size(self) -> int:
        """Number of ids, special ids included; the mask is not counted."""
        return self.base_size + len({id for id in (self.eos, self.pad) if id is not None and id >= self.base_size})

    def with_specials(self, eos: bool, pad: bool) -> "Tokenizer":
        """Return this tokenizer with the given special ids; missing ones are appended, ``eos`` first."""
        tokenizer: Tokenizer = self
        if eos and tokenizer.eos is None:
            tokenizer = replace(tokenizer, eos=tokenizer.vocab_size)
        if pad and tokenizer.pad is None:
            tokenizer = replace(tokenizer, pad=tokenizer.vocab_size)
        return tokenizer

    def encode(self, text: str) -> Ids:
        """Encode a text; special ids are never produced."""
        return self.encode_batch([text])[0]

    def decode(self, ids: ArrayLike) -> str:
        """Decode ids; special ids are skipped."""
        return self._decode(self._without_specials(ids))

    def decode_bytes(self, ids: ArrayLike) -> bytes:
        """Decode ids to UTF-8, and to other bytes where the tokenizer keeps them; special ids are skipped."""
        return self._decode_bytes(self._without_specials(ids))

    def _decode_bytes(self, ids: Ids) -> bytes:
        """Decode ids of the base vocabulary to bytes."""
        return utf8(self._decode(ids))

    def _without_specials(self, ids: ArrayLike) -> Ids:
        row = self.check_ids(ids)
        specials = [id for id in (self.eos, self.pad) if id is not None]
        return row[~np.isin(row, specials)] if specials else row

    def tokens(self, ids: ArrayLike) -> list[str]:
        """Return one printable string per id."""
        special = {self.pad: PAD_TEXT, self.eos: "<eos>"}
        return [special.get(id) or _printable(self._piece(id)) for id in self.check_ids(ids).tolist()]

    def check_ids(self, ids: ArrayLike) -> Ids:
        """Return ``ids`` as a vector of int64; raise ValueError if one is not an id of this tokenizer."""
        row = np.asarray(ids).reshape(-1)
        if row.size and row.dtype.kind not in "iu":
            raise ValueError(f"ids are of type {row.dtype}; they must be integers")
        bad = (row < 0) | (row >= self.vocab_size)
        if bad.any():
            id = int(row[bad][0])
            mask = " (the mask, which has no text)" if id == self.vocab_size else ""
            raise ValueError(f"id {id}{mask} is not a token id; ids must lie in 0..{self.vocab_size - 1}")
        return row.astype(np.int64)

    def files(self) -> dict[str, bytes]:
        """Return the saved form, file name to content; equal tokenizers give equal bytes."""
        config = {"format": FORMAT, "kind": self.kind, "eos": self.eos, "pad": self.pad, **self.settings()}
        return {CONFIG: (json.dumps(config, indent=1, sort_keys=True) + "\n").encode(), **self.extra_files}

    def save(self, folder: Path) -> None:
        """Write the saved form into ``folder``, creating it if needed."""
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in self.files().items():
            (folder / name).write_bytes(content)

    def fingerprint(self) -> str:
        """Return the SHA-256 of the saved form."""
        digest = hashlib.sha256()
        for name, content in sorted(self.files().items()):
            digest.update(f"{name} {len(content)}\n".encode() + content)
        return digest.hexdigest()

    def _check_specials(self) -> None:
        for name, id in (("eos", self.eos), ("pad", self.pad)):
            if id is not None and not 0 <= id < self.vocab_size:
                raise ValueError(f"{name} is {id}; special ids must lie in 0..{self.vocab_size - 1}")


def utf8(text: str, keeps_bytes: bool = False) -> bytes:
    """Encode as UTF-8; raise ValueError at half of a surrogate pair.

    With ``keeps_bytes``, bytes that were not UTF-8 when they were decoded with ``surrogateescape`` are restored.
    """
    try:
        return text.encode(errors="surrogateescape" if keeps_bytes else "strict")
    except UnicodeEncodeError as error:
        raise ValueError(
            f"the text holds {text[error.start]!r} at position {error.start}, half of a surrogate pair, which UTF-8 "
            "cannot store; repair the text"
        ) from None


def _printable(text: str) -> str:
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
