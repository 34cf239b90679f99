"""What all tokenizers share, and the tokenizers of bytes, characters and integers."""

import hashlib
import json
import re
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, final

import numpy as np
from jaxtyping import Int, UInt
from numpy.typing import ArrayLike

from sedd.schema import MAX_VOCABULARY, check_count

CONFIG = "tokenizer_config.json"
DEFINITION = "tokenizer.json"
FORMAT = 1
PAD_TEXT = "<pad>"  # padding among printable tokens
PART = 2**16  # characters encoded at a time: code points take four times the memory of a text
_INTEGER = re.compile(r"-?[0-9]+(\.0*)?")

Ids = Int[np.ndarray, " _"]


@dataclass(frozen=True, kw_only=True)
class Tokenizer(ABC):
    """A base vocabulary with optional special ids ``eos`` (end of text) and ``pad``."""

    kind: ClassVar[str]
    is_lossless = True  # whether ``decode(encode(text)) == text`` for every text that can be encoded
    keeps_bytes = False  # whether bytes that are not UTF-8, decoded with ``surrogateescape``, have tokens
    words_include_space = False  # whether tokens of words include the space before them
    eos: int | None = None
    pad: int | None = None

    def __post_init__(self) -> None:
        for name, id in (("eos", self.eos), ("pad", self.pad)):
            if id is not None and not 0 <= id < self.vocab_size:
                raise ValueError(f"{name} is {id}; special ids must lie in 0..{self.vocab_size - 1}")

    @property
    @abstractmethod
    def base_size(self) -> int:
        """Number of ids without appended special ids."""

    @abstractmethod
    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        """Encode texts; special ids are never produced."""

    @abstractmethod
    def _decode(self, ids: Ids) -> str:
        """Decode ids of the base vocabulary."""

    def _shown(self, id: int, text: str) -> str:
        """Return what stands for an id whose text is empty or holds U+FFFD, as of a part of a character."""
        return text

    @cached_property
    def vocab_size(self) -> int:
        """Number of ids, special ids included; the mask is not counted."""
        return self.base_size + len({id for id in (self.eos, self.pad) if id is not None and id >= self.base_size})

    def with_specials(self, eos: bool, pad: bool) -> "Tokenizer":
        """Return this tokenizer with the given special ids; missing ones are appended, ``eos`` first."""
        tokenizer: Tokenizer = self
        for name, wanted in (("eos", eos), ("pad", pad)):
            if wanted and getattr(tokenizer, name) is None:
                tokenizer = replace(tokenizer, **{name: tokenizer.vocab_size})
        return tokenizer

    def encode(self, text: str) -> Ids:
        """Encode a text; special ids are never produced."""
        return self.encode_batch([text])[0]

    def decode(self, ids: ArrayLike) -> str:
        """Decode ids; special ids are skipped."""
        return self._decode(self.check_ids(ids, skip_specials=True))

    def decode_bytes(self, ids: ArrayLike) -> bytes:
        """Decode ids to UTF-8, and to other bytes where the tokenizer keeps them; special ids are skipped."""
        return utf8(self.decode(ids))

    def tokens(self, ids: ArrayLike) -> list[str]:
        """Return one printable string per id."""
        special = {self.pad: PAD_TEXT, self.eos: "<eos>"}
        return [special.get(id) or self._token(id) for id in self.check_ids(ids).tolist()]

    def _token(self, id: int) -> str:
        text = self._decode(np.array([id]))
        text = self._shown(id, text) if not text or "\ufffd" in text else text
        return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)

    def check_ids(self, ids: ArrayLike, skip_specials: bool = False) -> Ids:
        """Return ``ids`` as a vector of int64; raise ValueError if one is not an id of this tokenizer."""
        row = np.asarray(ids).reshape(-1)
        if row.size and row.dtype.kind not in "iu":
            raise ValueError(f"ids are of type {row.dtype}; they must be integers")
        bad = (row < 0) | (row >= self.vocab_size)
        if bad.any():
            id = int(row[bad][0])
            mask = " (the mask, which has no text)" if id == self.vocab_size else ""
            raise ValueError(f"id {id}{mask} is not a token id; ids must lie in 0..{self.vocab_size - 1}")
        for special in (self.eos, self.pad) if skip_specials else ():
            row = row if special is None else row[row != special]
        return row.astype(np.int64)

    def files(self) -> dict[str, bytes]:
        """Return the saved form, file name to content; equal tokenizers give equal bytes."""
        config = {"format": FORMAT, "kind": self.kind, "eos": self.eos, "pad": self.pad}
        own = (field for field in fields(self) if "file" not in field.metadata)
        config |= {field.name: value for field in own if (value := getattr(self, field.name)) != field.default}
        return {CONFIG: (json.dumps(config, indent=1, sort_keys=True) + "\n").encode()}

    @classmethod
    def restore(cls, folder: Path, config: Mapping[str, Any]) -> "Tokenizer":
        """Rebuild the tokenizer saved in ``folder``; raise TypeError if ``config`` is damaged."""
        return cls(**{name: value for name, value in config.items() if name not in ("format", "kind")})

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


@final
@dataclass(frozen=True, kw_only=True)
class Bytes(Tokenizer):
    """One token per UTF-8 byte: 256 ids, any text, nothing to fit. Bytes that are not UTF-8 are tokens too."""

    kind = "bytes"
    keeps_bytes = True
    base_size = 256

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        return [np.frombuffer(utf8(text, keeps_bytes=True), np.uint8).astype(np.int64) for text in texts]

    def _decode(self, ids: Ids) -> str:
        return ids.astype(np.uint8).tobytes().decode(errors="replace")  # samples need not be valid UTF-8

    def decode_bytes(self, ids: ArrayLike) -> bytes:
        return self.check_ids(ids, skip_specials=True).astype(np.uint8).tobytes()

    def _shown(self, id: int, text: str) -> str:
        return f"\\x{id:02x}"


@final
@dataclass(frozen=True, kw_only=True)
class Characters(Tokenizer):
    """One token per character of a fixed alphabet, in the order of code points."""

    kind = "chars"
    alphabet: str

    def __post_init__(self) -> None:
        if not self.alphabet or list(self.alphabet) != sorted(set(self.alphabet)):
            raise ValueError(f"the alphabet is {self.alphabet!r}; each character must occur once, in order")
        super().__post_init__()

    @classmethod
    def fit(cls, texts: Iterable[str]) -> "Characters":
        """Collect the alphabet of ``texts``."""
        seen = np.zeros(sys.maxunicode + 1, bool)
        for text in texts:
            seen[_code_points(text)] = True
        if not seen.any():
            raise ValueError("the texts hold no character; a character tokenizer must be fitted to some text")
        return cls(alphabet="".join(map(chr, np.flatnonzero(seen))))

    @cached_property
    def base_size(self) -> int:
        return len(self.alphabet)

    @cached_property
    def _points(self) -> UInt[np.ndarray, " characters"]:
        """Id → code point."""
        return _code_points(self.alphabet)

    @cached_property
    def _id_of(self) -> Ids:
        """Code point → id, −1 if there is none; the last entry stands for all larger code points."""
        table = np.full(int(self._points[-1]) + 2, -1, np.int64)
        table[self._points] = np.arange(self.base_size)
        return table

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        rows: list[Ids] = []
        for text in texts:
            ids: Ids = np.empty(len(text), np.int64)
            for i in range(0, len(text), PART):
                self._id_of.take(_code_points(text[i : i + PART]), mode="clip", out=ids[i : i + PART])
            if ids.min(initial=0) < 0:
                position = int(np.flatnonzero(ids < 0)[0])
                raise ValueError(
                    f"character {text[position]!r} at position {position} is not among the {self.base_size} of this "
                    "tokenizer; fit it to this text too, or use bytes, which encode every character"
                )
            rows.append(ids)
        return rows

    def _decode(self, ids: Ids) -> str:
        points: bytes = self._points[ids].tobytes()
        return points.decode("utf-32-le", "surrogatepass")


@final
@dataclass(frozen=True, kw_only=True)
class Integers(Tokenizer):
    """Consecutive integers (counts, notes, pixels), from 0 on or from a negative one; as text, separated by spaces."""

    kind = "ints"
    size: int
    low: int = 0  # the integer with id 0: 0, or the least if that is negative, such as −1 for a rest

    def __post_init__(self) -> None:
        check_count("size", self.size, most=MAX_VOCABULARY)
        if not -(2**63) <= self.low <= 0:
            raise ValueError(f"low is {self.low}; it must lie in −2⁶³..0")
        super().__post_init__()

    @classmethod
    def fit(cls, texts: Iterable[str]) -> "Integers":
        """Choose the smallest vocabulary that holds every integer of ``texts``."""
        low, top = 0, -(2**63)
        for row in map(_parse_integers, texts):
            low, top = int(row.min(initial=low)), int(row.max(initial=top))
        if top == -(2**63):
            raise ValueError("the texts hold no integer; an integer vocabulary must be fitted to some")
        return cls(size=top - low + 1, low=low)

    @property
    def base_size(self) -> int:
        return self.size

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        return [self._encode(_parse_integers(text), self.size) for text in texts]

    def encode_integers(self, values: ArrayLike) -> Ids:
        """Return the ids of integers; special ids may be among them."""
        return self._encode(np.asarray(values).reshape(-1), self.vocab_size)

    def _encode(self, values: Ids, count: int) -> Ids:
        top = self.low + count - 1
        if (bad := (values < self.low) | (values > top)).any():
            raise ValueError(f"integer {values[bad][0]} is not one of {self.low}..{top}; ints is fitted to the data")
        return values.astype(np.int64) - self.low

    def _decode(self, ids: Ids) -> str:
        return " ".join(map(str, (ids + self.low).tolist()))


def utf8(text: str, keeps_bytes: bool = False) -> bytes:
    """Encode as UTF-8, with ``keeps_bytes`` also what ``surrogateescape`` decoded; reject half of a surrogate pair."""
    try:
        return text.encode(errors="surrogateescape" if keeps_bytes else "strict")
    except UnicodeEncodeError as error:
        what = f"{text[error.start]!r} at position {error.start}, half of a surrogate pair"
        raise ValueError(f"the text holds {what}, which UTF-8 cannot store; repair the text") from None


def _code_points(text: str) -> UInt[np.ndarray, " characters"]:
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), "<u4")


def _parse_integers(text: str) -> Ids:
    words = text.split()
    others = (word for word in words if not (word.isascii() and word.isdigit()))
    if strange := next((word for word in others if not _INTEGER.fullmatch(word)), None):
        raise ValueError(f"the text holds {strange!r}; write integers such as 67 and -1, with spaces between them")
    if "." in text:
        words = [word.partition(".")[0] for word in words]
    try:
        return np.array(words, dtype=np.int64)
    except (ValueError, OverflowError):
        raise ValueError("the text holds an integer outside −2⁶³..2⁶³ − 1, which has no token id") from None
