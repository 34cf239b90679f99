"""Tokenizers: text to token ids and back, without loss.

The ids of a tokenizer are 0 … vocab_size − 1. The mask of the absorbing process is not among them: it is a state of the
process, comes after them, and no tokenizer ever emits it. No torch here, so that preparing data does not wait for it.
"""

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, final

import numpy as np
import tokenizers
from jaxtyping import Int
from numpy.typing import ArrayLike
from tokenizers import decoders, models, pre_tokenizers, trainers

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


@final
@dataclass(frozen=True, kw_only=True)
class Bytes(Tokenizer):
    """The bytes of UTF-8: any text, nothing to fit, 256 ids."""

    kind = "bytes"
    is_exact = True
    attached: ClassVar[Mapping[str, bytes]] = MappingProxyType({})
    base_size = 256

    def __post_init__(self) -> None:
        self._check_specials()

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        """One id a byte."""
        return [np.frombuffer(_utf8(text), np.uint8).astype(np.int64) for text in texts]

    def settings(self) -> dict[str, Any]:
        """None."""
        return {}

    @classmethod
    def restore(cls, folder: Path, config: Mapping[str, Any]) -> "Bytes":
        """From its specials alone."""
        return cls(eos=config["eos"], pad=config["pad"])

    def _decode(self, ids: Ids) -> str:
        return ids.astype(np.uint8).tobytes().decode(errors="replace")  # samples need not be valid UTF-8

    def _piece(self, id: int) -> str:
        return chr(id) if id < 128 else f"\\x{id:02x}"


@final
@dataclass(frozen=True, kw_only=True)
class Characters(Tokenizer):
    """The characters of one corpus, in the order of their code points."""

    kind = "chars"
    is_exact = True
    attached: ClassVar[Mapping[str, bytes]] = MappingProxyType({})
    alphabet: str

    def __post_init__(self) -> None:
        if not self.alphabet or list(self.alphabet) != sorted(set(self.alphabet)):
            raise ValueError(f"the alphabet is {self.alphabet!r}; it must hold characters, each once and in order")
        self._check_specials()

    @classmethod
    def fit(cls, texts: Iterable[str]) -> "Characters":
        """The alphabet that ``texts`` use."""
        seen: set[str] = set()
        for text in texts:
            seen.update(text)
        if not seen:
            raise ValueError("the texts hold no character; a tokenizer of characters needs some text to be fitted to")
        return cls(alphabet="".join(sorted(seen)))

    @property
    def base_size(self) -> int:
        """One id a character."""
        return len(self.alphabet)

    @cached_property
    def _points(self) -> Ids:
        return np.array([ord(character) for character in self.alphabet], np.int64)

    @cached_property
    def _id_of(self) -> Ids:
        """Code point → id, −1 where there is none; one entry more stands for all points above."""
        table = np.full(self._points[-1] + 2, -1, np.int64)
        table[self._points] = np.arange(self.base_size)
        return table

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        """One id a character."""
        return [self._ids(text) for text in texts]

    def _ids(self, text: str) -> Ids:
        points = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), "<u4")
        ids: Ids = self._id_of[np.minimum(points, len(self._id_of) - 1)]
        if (unknown := np.flatnonzero(ids < 0)).size:
            at = int(unknown[0])
            raise ValueError(
                f"character {text[at]!r} at position {at} is not among the {self.base_size} of this tokenizer; "
                "fit it to this text too, or use bytes, which know every character"
            )
        return ids

    def settings(self) -> dict[str, Any]:
        """The alphabet."""
        return {"alphabet": self.alphabet}

    @classmethod
    def restore(cls, folder: Path, config: Mapping[str, Any]) -> "Characters":
        """From its alphabet."""
        return cls(alphabet=config["alphabet"], eos=config["eos"], pad=config["pad"])

    def _decode(self, ids: Ids) -> str:
        points: Ids = self._points[ids]
        return points.astype("<u4").tobytes().decode("utf-32-le", "surrogatepass")

    def _piece(self, id: int) -> str:
        return self.alphabet[id]


@final
@dataclass(frozen=True, kw_only=True)
class Integers(Tokenizer):
    """Plain integers 0 … size − 1: counts, notes, cells of a board. As text they stand with spaces between them."""

    kind = "ints"
    is_exact = True  # on the texts it writes: "0 1 2"
    attached: ClassVar[Mapping[str, bytes]] = MappingProxyType({})
    size: int

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"size is {self.size}; a vocabulary of integers needs at least 1")
        self._check_specials()

    @classmethod
    def fit(cls, texts: Iterable[str]) -> "Integers":
        """The smallest vocabulary that holds every integer of ``texts``."""
        top = max((int(ids.max()) for text in texts if (ids := _integers(text)).size), default=-1)
        if top < 0:
            raise ValueError("the texts hold no integer; a vocabulary of integers needs some to be fitted to")
        return cls(size=top + 1)

    @property
    def base_size(self) -> int:
        """One id an integer."""
        return self.size

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        """The integers themselves."""
        return [self._ids(text) for text in texts]

    def _ids(self, text: str) -> Ids:
        ids = _integers(text)
        if ids.size and ids.max() >= self.size:
            raise ValueError(f"integer {ids.max()} is too large for this tokenizer; it knows 0..{self.size - 1}")
        return ids

    def settings(self) -> dict[str, Any]:
        """How many integers there are."""
        return {"size": self.size}

    @classmethod
    def restore(cls, folder: Path, config: Mapping[str, Any]) -> "Integers":
        """From its size."""
        return cls(size=config["size"], eos=config["eos"], pad=config["pad"])

    def _decode(self, ids: Ids) -> str:
        return " ".join(map(str, ids.tolist()))

    def _piece(self, id: int) -> str:
        return str(id)


@final
@dataclass(frozen=True, kw_only=True)
class BPE(Tokenizer):
    """Frequent runs of bytes: a ``tokenizer.json`` as the `tokenizers` library defines it.

    One that is trained here, and GPT-2's, loses nothing. A file from elsewhere may change a text before it splits it
    (lower case, joined spaces); `is_exact` says whether it can.
    """

    kind = "bpe"
    definition: str

    def __post_init__(self) -> None:
        _ = self._model  # a damaged definition is refused here, not at the first text
        self._check_specials()

    @classmethod
    def train(cls, texts: Iterator[str], vocab_size: int) -> "BPE":
        """A byte-level vocabulary of ``vocab_size`` runs at most, fewer where ``texts`` do not repeat themselves."""
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        if vocab_size < len(alphabet):
            raise ValueError(f"vocab_size is {vocab_size}; byte-level BPE needs {len(alphabet)} or more, one a byte")
        model = _byte_level(models.BPE())
        trainer = trainers.BpeTrainer(vocab_size=vocab_size, initial_alphabet=alphabet, show_progress=False)
        model.train_from_iterator(texts, trainer)
        return cls(definition=model.to_str())

    @classmethod
    def read(cls, path: Path) -> "BPE":
        """Any ``tokenizer.json``; its own end-of-text and padding tokens are used where it has them."""
        made = cls(definition=_text(path))
        special = {token.content: id for id, token in made._model.get_added_tokens_decoder().items() if token.special}
        eos = [special[name] for name in ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>") if name in special]
        pad = [special[name] for name in ("<|padding|>", "<|pad|>", "<pad>", "[PAD]") if name in special]
        return replace(made, eos=eos[0] if eos else None, pad=pad[0] if pad else None)

    @classmethod
    def gpt2(cls, vocab: Path, merges: Path) -> "BPE":
        """GPT-2's tokenizer from its two published files, ``encoder.json`` and ``vocab.bpe``."""
        for path in (vocab, merges):
            _text(path)
        try:
            model = _byte_level(models.BPE.from_file(str(vocab), str(merges)))
        except Exception as error:  # the library raises nothing narrower
            raise ValueError(f"{vocab} and {merges} are no vocabulary and merges of GPT-2: {error}") from None
        model.add_special_tokens(["<|endoftext|>"])
        return cls(definition=model.to_str(), eos=model.token_to_id("<|endoftext|>"))

    @cached_property
    def _model(self) -> tokenizers.Tokenizer:
        try:
            model = tokenizers.Tokenizer.from_str(self.definition)
        except Exception as error:  # the library raises nothing narrower
            raise ValueError(f"the definition of the tokenizer is damaged or of an unknown kind: {error}") from None
        model.no_padding()
        model.no_truncation()
        model.encode_special_tokens = True  # "<|endoftext|>" inside a text is text
        return model

    @property
    def attached(self) -> Mapping[str, bytes]:
        """The definition, as other programs read it."""
        return {DEFINITION: self.definition.encode()}

    @cached_property
    def base_size(self) -> int:
        """One more than the largest id of the definition."""
        return 1 + max(self._model.get_vocab(with_added_tokens=True).values(), default=0)

    @cached_property
    def is_exact(self) -> bool:
        """Byte level, nothing normalised, no space put in front."""
        parts = json.loads(self.definition)
        splitter = parts["pre_tokenizer"] or {}
        steps = splitter.get("pretokenizers", [splitter])
        return (
            parts["normalizer"] is None
            and (parts["decoder"] or {}).get("type") == "ByteLevel"
            and any(step.get("type") == "ByteLevel" for step in steps)
            and not any(step.get("add_prefix_space") for step in steps)
        )

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        """The ids of the runs; the library leaves Python's lock alone meanwhile, so that threads do help."""
        for text in texts:
            _utf8(text)
        found = self._model.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(one.ids, np.int64) for one in found]

    def settings(self) -> dict[str, Any]:
        """None beside the definition, which is a file of its own."""
        return {}

    @classmethod
    def restore(cls, folder: Path, config: Mapping[str, Any]) -> "BPE":
        """From its definition."""
        return cls(definition=_text(folder / DEFINITION), eos=config["eos"], pad=config["pad"])

    def _decode(self, ids: Ids) -> str:
        text: str = self._model.decode(ids.tolist(), skip_special_tokens=True)
        return text

    def _piece(self, id: int) -> str:
        text: str = self._model.decode([id], skip_special_tokens=False)
        return self._model.id_to_token(id) or "" if "\ufffd" in text else text  # part of a character


KINDS: Mapping[str, type[Tokenizer]] = {kind.kind: kind for kind in (Bytes, Characters, BPE, Integers)}


def load(folder: Path) -> Tokenizer:
    """The tokenizer saved in ``folder``; a Hugging Face folder with a ``tokenizer.json`` will do too."""
    config = _json(folder / CONFIG)
    if "kind" not in config and (folder / DEFINITION).exists():
        return BPE.read(folder / DEFINITION)
    if config.get("format") != FORMAT or config.get("kind") not in KINDS:
        raise ValueError(
            f"{folder / CONFIG} is of kind {config.get('kind')!r}, format {config.get('format')!r}; "
            f"this version reads {', '.join(KINDS)} in format {FORMAT}"
        )
    try:
        return KINDS[config["kind"]].restore(folder, config)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{folder / CONFIG} is damaged: {error}; save the tokenizer again") from None


def _byte_level(model: models.BPE) -> tokenizers.Tokenizer:
    made = tokenizers.Tokenizer(model)
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return made


def _utf8(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"the text holds {text[error.start]!r} at position {error.start}, half of a surrogate pair, which UTF-8 "
            "cannot store; repair the text where it was made"
        ) from None


def _integers(text: str) -> Ids:
    words = text.split()
    if strange := next((word for word in words if not (word.isascii() and word.isdigit())), None):
        raise ValueError(f"the text holds {strange!r}; integers are digits with spaces or line ends between them")
    try:
        return np.array(words, dtype=np.int64) if words else np.zeros(0, np.int64)
    except (ValueError, OverflowError):
        raise ValueError("the text holds an integer above 2⁶³ − 1, which is no token id") from None


def _printable(text: str) -> str:
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} could not be read as text: {error}") from None


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(_text(path))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is no JSON: {error}; save the tokenizer again") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path} holds a {type(found).__name__}, not an object; save the tokenizer again")
    return found
