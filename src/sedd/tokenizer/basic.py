"""Tokenizers of bytes, characters and integers."""

import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, final

import numpy as np
from jaxtyping import UInt
from numpy.typing import ArrayLike

from sedd.schema import MAX_VOCABULARY, check_count
from sedd.tokenizer.base import Ids, Tokenizer, utf8

_INTEGER = re.compile(r"-?[0-9]+(\.0*)?")
PART = 2**16
"""Characters encoded at a time: the code points of a whole text would take four times its memory, and more time."""


@final
@dataclass(frozen=True, kw_only=True)
class Bytes(Tokenizer):
    """One token per UTF-8 byte: 256 ids, any text, nothing to fit. Bytes that are not UTF-8 are tokens too."""

    kind = "bytes"
    is_lossless = True
    keeps_bytes = True
    extra_files: ClassVar[Mapping[str, bytes]] = MappingProxyType({})
    base_size = 256

    def __post_init__(self) -> None:
        self._check_specials()

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        """Return one id per byte."""
        return [np.frombuffer(utf8(text, keeps_bytes=True), np.uint8).astype(np.int64) for text in texts]

    def settings(self) -> dict[str, Any]:
        """Return no further settings."""
        return {}

    @classmethod
    def restore(cls, folder: Path, config: Mapping[str, Any]) -> "Bytes":
        """Rebuild from the special ids."""
        return cls(eos=config["eos"], pad=config["pad"])

    def _decode(self, ids: Ids) -> str:
        return self._decode_bytes(ids).decode(errors="replace")  # samples need not be valid UTF-8

    def _decode_bytes(self, ids: Ids) -> bytes:
        return ids.astype(np.uint8).tobytes()

    def _piece(self, id: int) -> str:
        return chr(id) if id < 128 else f"\\x{id:02x}"


@final
@dataclass(frozen=True, kw_only=True)
class Characters(Tokenizer):
    """One token per character of a fixed alphabet, in the order of code points."""

    kind = "chars"
    is_lossless = True
    extra_files: ClassVar[Mapping[str, bytes]] = MappingProxyType({})
    alphabet: str

    def __post_init__(self) -> None:
        if not self.alphabet or list(self.alphabet) != sorted(set(self.alphabet)):
            raise ValueError(
                f"the alphabet is {self.alphabet!r}; each character must occur once, in order of code points"
            )
        self._check_specials()

    @classmethod
    def fit(cls, texts: Iterable[str]) -> "Characters":
        """Collect the alphabet of ``texts``."""
        seen = np.zeros(sys.maxunicode + 1, bool)
        for text in texts:
            seen[_points(text)] = True
        if not seen.any():
            raise ValueError("the texts hold no character; a character tokenizer must be fitted to some text")
        return cls(alphabet="".join(map(chr, np.flatnonzero(seen))))

    @property
    def base_size(self) -> int:
        """One id per character."""
        return len(self.alphabet)

    @cached_property
    def _id_of(self) -> Ids:
        """Code point → id, −1 if there is none; the last entry stands for all larger code points."""
        points = _points(self.alphabet)
        table = np.full(int(points[-1]) + 2, -1, np.int64)
        table[points] = np.arange(self.base_size)
        return table

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        """Return one id per character."""
        return [self._ids(text) for text in texts]

    def _ids(self, text: str) -> Ids:
        ids: Ids = np.empty(len(text), np.int64)
        for i in range(0, len(text), PART):
            self._id_of.take(_points(text[i : i + PART]), mode="clip", out=ids[i : i + PART])
        if ids.min(initial=0) < 0:
            position = int(np.flatnonzero(ids < 0)[0])
            raise ValueError(
                f"character {text[position]!r} at position {position} is not among the {self.base_size} of this "
                "tokenizer; fit it to this text too, or use bytes, which encode every character"
            )
        return ids

    def settings(self) -> dict[str, Any]:
        """Return the alphabet."""
        return {"alphabet": self.alphabet}

    @classmethod
    def restore(cls, folder: Path, config: Mapping[str, Any]) -> "Characters":
        """Rebuild from the alphabet."""
        return cls(alphabet=config["alphabet"], eos=config["eos"], pad=config["pad"])

    def _decode(self, ids: Ids) -> str:
        points: bytes = _points(self.alphabet)[ids].tobytes()
        return points.decode("utf-32-le", "surrogatepass")

    def _piece(self, id: int) -> str:
        return self.alphabet[id]


@final
@dataclass(frozen=True, kw_only=True)
class Integers(Tokenizer):
    """Consecutive integers (counts, notes, pixels), from 0 on or from a negative one; as text, separated by spaces."""

    kind = "ints"
    is_lossless = True  # on texts such as "0 1 2"
    extra_files: ClassVar[Mapping[str, bytes]] = MappingProxyType({})
    size: int
    low: int = 0
    """The integer with id 0: 0, or the least if that is negative, such as −1 for a rest."""

    def __post_init__(self) -> None:
        check_count("size", self.size, most=MAX_VOCABULARY)
        if not -(2**63) <= self.low <= 0:
            raise ValueError(f"low is {self.low}; it must lie in −2⁶³..0")
        self._check_specials()

    @classmethod
    def fit(cls, texts: Iterable[str]) -> "Integers":
        """Choose the smallest vocabulary that holds every integer of ``texts``."""
        low, top = 0, -(2**63)
        for text in texts:
            if (found := _integers(text)).size:
                low, top = min(low, int(found.min())), max(top, int(found.max()))
        if top == -(2**63):
            raise ValueError("the texts hold no integer; an integer vocabulary must be fitted to some")
        return cls(size=top - low + 1, low=low)

    @property
    def base_size(self) -> int:
        """One id per integer."""
        return self.size

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        """Parse the integers."""
        return [self._encode(_integers(text), self.size) for text in texts]

    def encode_integers(self, values: ArrayLike) -> Ids:
        """Return the ids of integers; special ids may be among them."""
        return self._encode(np.asarray(values).reshape(-1), self.vocab_size)

    def _encode(self, values: Ids, count: int) -> Ids:
        top = self.low + count - 1
        if (bad := (values < self.low) | (values > top)).any():
            raise ValueError(
                f"integer {values[bad][0]} is not one of {self.low}..{top}, those of this tokenizer; ints without a "
                "size is fitted to the data"
            )
        return values.astype(np.int64) - self.low

    def settings(self) -> dict[str, Any]:
        """Return the vocabulary size, and the least integer if that is negative."""
        return {"size": self.size, **({"low": self.low} if self.low else {})}

    @classmethod
    def restore(cls, folder: Path, config: Mapping[str, Any]) -> "Integers":
        """Rebuild from the vocabulary size."""
        return cls(size=config["size"], low=config.get("low", 0), eos=config["eos"], pad=config["pad"])

    def _decode(self, ids: Ids) -> str:
        return " ".join(map(str, (ids + self.low).tolist()))

    def _piece(self, id: int) -> str:
        return str(id + self.low)


def _points(text: str) -> UInt[np.ndarray, " characters"]:
    """Return the code points of a text."""
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), "<u4")


def _integers(text: str) -> Ids:
    words = text.split()
    others = (word for word in words if not (word.isascii() and word.isdigit()))
    if strange := next((word for word in others if not _INTEGER.fullmatch(word)), None):
        raise ValueError(
            f"the text holds {strange!r}; write integers, such as 67 and -1, separated by spaces or line ends"
        )
    if "." in text:
        words = [word.partition(".")[0] for word in words]
    try:
        return np.array(words, dtype=np.int64) if words else np.zeros(0, np.int64)
    except (ValueError, OverflowError):
        raise ValueError("the text holds an integer outside −2⁶³..2⁶³ − 1, which has no token id") from None
