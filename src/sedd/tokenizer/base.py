"""What every tokenizer has in common."""

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

Ids = Int[np.ndarray, " _"]


@dataclass(frozen=True, kw_only=True)
class Tokenizer(ABC):
    """A base vocabulary, and the special ids ``eos`` and ``pad`` where there are any."""

    kind: ClassVar[str]
    eos: int | None = None
    pad: int | None = None

    @property
    @abstractmethod
    def base_size(self) -> int:
        """How many ids there are without appended specials."""

    @property
    @abstractmethod
    def is_exact(self) -> bool:
        """Whether decode undoes encode on every text that encode takes."""

    @property
    @abstractmethod
    def attached(self) -> Mapping[str, bytes]:
        """The files of the saved form beside its settings."""

    @abstractmethod
    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        """The ids of each text, specials never among them."""

    @abstractmethod
    def settings(self) -> dict[str, Any]:
        """What `load` needs to make this tokenizer again, but for its kind, specials and attached files."""

    @classmethod
    @abstractmethod
    def restore(cls, folder: Path, config: Mapping[str, Any]) -> "Tokenizer":
        """The tokenizer of these settings, saved in ``folder``; KeyError and TypeError mean damage."""

    @abstractmethod
    def _decode(self, ids: Ids) -> str:
        """The text of base ids."""

    @abstractmethod
    def _piece(self, id: int) -> str:
        """One base id as text, printable or not."""

    @property
    def vocab_size(self) -> int:
        """How many ids there are, specials included and the mask not."""
        return self.base_size + len({id for id in (self.eos, self.pad) if id is not None and id >= self.base_size})

    def with_specials(self, eos: bool, pad: bool) -> "Tokenizer":
        """This tokenizer with the specials asked for; those it lacks come after its other ids, eos first."""
        made: Tokenizer = self
        if eos and made.eos is None:
            made = replace(made, eos=made.vocab_size)
        if pad and made.pad is None:
            made = replace(made, pad=made.vocab_size)
        return made

    def encode(self, text: str) -> Ids:
        """The ids of ``text``, specials never among them."""
        return self.encode_batch([text])[0]

    def decode(self, ids: ArrayLike) -> str:
        """The text of ``ids``; specials have none and are skipped."""
        known = self.checked(ids)
        specials = [id for id in (self.eos, self.pad) if id is not None]
        return self._decode(known[~np.isin(known, specials)] if specials else known)

    def tokens(self, ids: ArrayLike) -> list[str]:
        """One printable piece for each id."""
        special = {self.pad: "<pad>", self.eos: "<eos>"}
        return [special.get(id) or _printable(self._piece(id)) for id in self.checked(ids).tolist()]

    def checked(self, ids: ArrayLike) -> Ids:
        """``ids`` as a row of int64, refused where they are no ids of this tokenizer."""
        row = np.asarray(ids).reshape(-1)
        if row.size and row.dtype.kind not in "iu":
            raise ValueError(f"ids are of type {row.dtype}; they must be integers")
        bad = (row < 0) | (row >= self.vocab_size)
        if bad.any():
            id = int(row[bad][0])
            mask = " (that is the mask, which has no text)" if id == self.vocab_size else ""
            raise ValueError(f"id {id}{mask} is no token; ids must lie in 0..{self.vocab_size - 1}")
        return row.astype(np.int64)

    def files(self) -> dict[str, bytes]:
        """The saved form, file by file: the same bytes for the same tokenizer, always."""
        config = {"format": FORMAT, "kind": self.kind, "eos": self.eos, "pad": self.pad, **self.settings()}
        return {CONFIG: (json.dumps(config, indent=1, sort_keys=True) + "\n").encode(), **self.attached}

    def save(self, folder: Path) -> None:
        """Write the saved form into ``folder``, which is made where it is missing."""
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in self.files().items():
            (folder / name).write_bytes(content)

    def fingerprint(self) -> str:
        """SHA-256 of the saved form: equal for equal tokenizers, wherever they lie."""
        digest = hashlib.sha256()
        for name, content in sorted(self.files().items()):
            digest.update(f"{name} {len(content)}\n".encode() + content)
        return digest.hexdigest()

    def _check_specials(self) -> None:
        for name, id in (("eos", self.eos), ("pad", self.pad)):
            if id is not None and not 0 <= id < self.vocab_size:
                raise ValueError(f"{name} is {id}; special ids must lie in 0..{self.vocab_size - 1}")


def utf8(text: str) -> bytes:
    """The bytes of a text; half of a surrogate pair is refused."""
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"the text holds {text[error.start]!r} at position {error.start}, half of a surrogate pair, which UTF-8 "
            "cannot store; repair the text where it was made"
        ) from None


def _printable(text: str) -> str:
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def read_text(path: Path) -> str:
    """The text of a file, or a sentence."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} could not be read as text: {error}") from None
