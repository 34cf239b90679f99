"""Byte pair encoding, by the `tokenizers` library.

References: Sennrich et al. 2015, "Neural Machine Translation of Rare Words with Subword Units", arXiv 1508.07909; of
bytes, as in GPT-2, Radford et al. 2019, "Language Models are Unsupervised Multitask Learners".
"""

import base64
import itertools
import json
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, final

import numpy as np
import tokenizers
from numpy.typing import ArrayLike
from tokenizers import decoders, models, pre_tokenizers, trainers

from sedd.files import parse_json, read_text
from sedd.schema import check_count
from sedd.tokenizer.base import DEFINITION, Ids, Tokenizer, utf8

SECONDS = 30.0  # time that a call with regular expressions from a file may take, beside that for its text
SPEED = 10_000  # characters per second that are the least for such a call
PART = 2**16  # least characters of the parts of a long text, which are encoded in parallel
MAX_DEFINITION = 2**26  # bytes of a definition; one of a million tokens has fewer
STEPS = ("version", "normalizer", "pre_tokenizer", "decoder")  # what changes a text in a definition
MAX_GROWTH = 64  # how many times as long a tokenizer may make a text; published ones reach 40 at worst
# the most characters that a step of the Unicode standard, or of bytes, makes of one
UNICODE = {"NFC": 3, "NFD": 4, "NFKC": 18, "NFKD": 18, "Lowercase": 2, "BertNormalizer": 12, "ByteLevel": 4}
INSERTED = {"Replace": "content", "Prepend": "prepend", "Metaspace": "replacement"}  # the text put in
EMPTY = {"type": "BPE", "vocab": {}, "merges": []}
EOS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>")
PAD = ("<|padding|>", "<|pad|>", "<pad>", "[PAD]")
_BETWEEN_WORDS = re.compile("(?<=[A-Za-z]) (?=[A-Za-z])")
_ODD_BYTES = re.compile("([\udc80-\udcff]+)")  # bytes that are not UTF-8, as Python's ``surrogateescape`` decodes them


@final
@dataclass(frozen=True, kw_only=True)
class BPE(Tokenizer):
    """Byte pair encoding defined by a ``tokenizer.json`` of the `tokenizers` library.

    Tokenizers trained here and GPT-2's are lossless. Others may normalize a text before they split it (lower case,
    merged spaces); see `is_lossless`. Lossless ones encode a byte that is not UTF-8 as the token of this byte.
    """

    kind = "bpe"
    definition: str = field(metadata={"file": DEFINITION})

    def __post_init__(self) -> None:
        check_count("the vocabulary of the tokenizer", self.base_size, 0)  # the library makes lists of this length
        super().__post_init__()

    @classmethod
    def train(cls, texts: Iterator[str], vocab_size: int) -> "BPE":
        """Train byte-level BPE; the vocabulary may be smaller than ``vocab_size`` if ``texts`` repeat too little."""
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())  # one per byte
        check_count("the vocab_size of bpe", vocab_size, len(alphabet))
        model = _byte_level(models.BPE())
        trainer = trainers.BpeTrainer(vocab_size=vocab_size, initial_alphabet=alphabet, show_progress=False)
        clean = (part for text in texts for part in _ODD_BYTES.split(text)[::2])  # the library takes Unicode only
        model.train_from_iterator(clean, trainer)
        return cls(definition=model.to_str())

    @classmethod
    def read(cls, path: Path) -> "BPE":
        """Read a ``tokenizer.json``; its own end-of-text and padding tokens become the special ids."""
        with _explain_errors(str(path)):
            tokenizer = cls(definition=read_text(path, MAX_DEFINITION))
        added = tokenizer._model.get_added_tokens_decoder().items()
        special = {token.content: id for id, token in added if token.special}
        eos, pad = (next((special[name] for name in names if name in special), None) for names in (EOS, PAD))
        return replace(tokenizer, eos=eos, pad=pad)

    @classmethod
    def gpt2(cls, vocab: Path, merges: Path) -> "BPE":
        """Build GPT-2's tokenizer from its two published files, ``encoder.json`` and ``vocab.bpe``."""
        for path in (vocab, merges):
            read_text(path, MAX_DEFINITION)
        with _explain_errors(f"{vocab} and {merges} are not GPT-2's vocabulary and merges"):
            model = _byte_level(models.BPE.from_file(str(vocab), str(merges)))
        model.add_special_tokens(["<|endoftext|>"])
        return cls(definition=model.to_str(), eos=model.token_to_id("<|endoftext|>"))

    @cached_property
    def _model(self) -> tokenizers.Tokenizer:
        with _explain_errors("the definition of the tokenizer is damaged or cannot be used"):
            parts = {name: part for name, part in parse_json(self.definition).items() if name in STEPS}
            # without its added tokens, which the library normalizes as it reads them
            steps = tokenizers.Tokenizer.from_str(json.dumps({**parts, "model": EMPTY}))
            _check_growth(json.loads(steps.to_str()))
            model = tokenizers.Tokenizer.from_str(self.definition)
        model.no_padding()
        model.no_truncation()
        model.post_processor = None  # it could repeat a text; the special tokens that it adds are left out anyway
        model.encode_special_tokens = True  # "<|endoftext|>" inside a text is encoded as text
        return model

    @cached_property
    def base_size(self) -> int:
        """One more than the largest id in the definition."""
        return 1 + max(self._model.get_vocab(with_added_tokens=True).values(), default=0)

    @cached_property
    def _parts(self) -> dict[str, Any]:
        """What the definition says beside the model; parts that it leaves out are empty."""
        return {name: part or {} for name, part in json.loads(self._model.to_str()).items() if name != "model"}

    @cached_property
    def is_lossless(self) -> bool:  # type: ignore[override]
        """Whether it is byte-level without normalization and without a prefix space."""
        splitter = self._parts["pre_tokenizer"]
        steps = splitter.get("pretokenizers", [splitter])
        return (
            not self._parts["normalizer"]
            and self._parts["decoder"].get("type") == "ByteLevel"
            and any(step.get("type") == "ByteLevel" for step in steps)
            and not any(step.get("add_prefix_space") for step in steps)
        )

    @cached_property
    def keeps_bytes(self) -> bool:  # type: ignore[override]
        return self.is_lossless and bool((self._byte_ids >= 0).all())

    @cached_property
    def _byte_ids(self) -> Ids:
        """Byte → id of its token, −1 if there is none; characters above 255 stand for the bytes that do not print."""
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        others = (character for character in alphabet if ord(character) > 255)
        names = [chr(byte) if chr(byte) in alphabet else next(others) for byte in range(256)]
        found = map(self._model.token_to_id, names)
        return np.array([-1 if id is None else id for id in found], np.int64)

    @cached_property
    def _bytes_of(self) -> list[bytes]:
        """The bytes of each token, where bytes are kept."""
        byte_of = {self._model.id_to_token(id): byte for byte, id in enumerate(self._byte_ids.tolist())}
        added = self._model.get_added_tokens_decoder()

        def piece(id: int) -> bytes:
            if (token := added.get(id)) is not None:
                return b"" if token.special else utf8(token.content)
            return bytes(byte_of[character] for character in self._model.id_to_token(id) or "")

        return [piece(id) for id in range(self.base_size)]

    @cached_property
    def words_include_space(self) -> bool:  # type: ignore[override]
        return any(len(piece) > 1 and piece[0] in "Ġ▁" for piece in self._model.get_vocab(with_added_tokens=False))

    @cached_property
    def _splits_words(self) -> bool:
        """Whether a text is split before every space that stands between letters, whatever else it holds.

        So it is by the pattern of GPT-2 alone: no match of it holds a space after a letter.
        """
        splitter = self._parts["pre_tokenizer"]
        return (
            not self._parts["normalizer"]
            and splitter.get("type") == "ByteLevel"
            and splitter["use_regex"]
            and not splitter["add_prefix_space"]
            # others are found in a text before words are
            and all(token["special"] for token in self._parts["added_tokens"])
        )

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        """Encode texts; the library releases the GIL, so threads run in parallel."""
        for text in texts:
            utf8(text, self.keeps_bytes)
        # parts that are encoded in parallel, and between them the ids of bytes that are not UTF-8
        rows: list[list[str | Ids]] = []
        for text in texts:
            rows.append([])
            for number, span in enumerate([text] if text.isascii() else _ODD_BYTES.split(text)):
                if number % 2:
                    rows[-1].append(self._byte_ids[np.frombuffer(utf8(span, keeps_bytes=True), np.uint8)])
                else:
                    rows[-1] += _cut(span) if len(span) > PART and self._splits_words else [span]
        strings = [part for part in itertools.chain(*rows) if isinstance(part, str)]
        encode = partial(self._model.encode_batch_fast, strings, add_special_tokens=False)
        has_patterns = '"Regex"' in self.definition  # which another author wrote; those of this package are linear
        encodings = _within(SECONDS + sum(map(len, texts)) / SPEED, encode) if has_patterns else encode()
        ids = (np.array(encoding.ids, np.int64) for encoding in encodings)
        found = [[next(ids) if isinstance(part, str) else part for part in row] for row in rows]
        return [row[0] if len(row) == 1 else np.concatenate(row) for row in found]

    @classmethod
    def restore(cls, folder: Path, config: Mapping[str, Any]) -> "Tokenizer":
        return super().restore(folder, {**config, "definition": read_text(folder / DEFINITION, MAX_DEFINITION)})

    def files(self) -> dict[str, bytes]:
        return {**super().files(), DEFINITION: self.definition.encode()}

    def _decode(self, ids: Ids) -> str:
        return str(self._model.decode(ids.tolist(), skip_special_tokens=True))

    def decode_bytes(self, ids: ArrayLike) -> bytes:
        if not self.keeps_bytes:
            return super().decode_bytes(ids)
        return b"".join([self._bytes_of[id] for id in self.check_ids(ids, skip_specials=True).tolist()])

    def _shown(self, id: int, text: str) -> str:
        return self._model.id_to_token(id) or ""  # part of a character, or a special token


@contextmanager
def _explain_errors(what: str) -> Iterator[None]:
    """Turn errors of the library into ValueError, also panics in Rust, which are no Exception."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        raise ValueError(f"{what}: {error}") from None


def _within(seconds: float, call: Callable[[], list[tokenizers.Encoding]]) -> list[tokenizers.Encoding]:
    """Return the result of a call that searches for regular expressions from a file, which may take exponential time.

    The library gives up some searches with a panic; the others are left to a thread that ends with the process.
    """
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(call())
        except BaseException as error:  # a panic in Rust is no Exception
            found.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    result = found[0] if found else f"it takes more than {seconds:.0f} seconds"
    if not isinstance(result, list):
        raise ValueError(f"a regular expression of the tokenizer fails on this text: {result}; use another tokenizer")
    return result


def _cut(text: str) -> list[str]:
    """Cut a text into parts of at least `PART` characters, each before a space between letters."""
    cuts = [0]
    while found := _BETWEEN_WORDS.search(text, cuts[-1] + PART):
        cuts.append(found.start())
    return [text[start:end] for start, end in itertools.pairwise([*cuts, len(text)])]


def _byte_level(model: models.BPE) -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _check_growth(definition: dict[str, Any]) -> None:
    """Reject steps that may multiply a text; the JSON is as the `tokenizers` library writes it."""
    for part in ("normalizer", "pre_tokenizer"), ("decoder",):
        growth = _growth([step for name in part for step in _steps(definition.get(name))])
        if growth > MAX_GROWTH:
            shown = f"{growth:,.0f}" if growth < 1e12 else "over 10^12"
            what = f"the {' and the '.join(part)} in {DEFINITION} may make a text {shown} times as long"
            raise ValueError(f"{what}; {MAX_GROWTH} times is the most")


def _growth(steps: list[dict[str, Any]]) -> float:
    """Return the most characters that these steps may make of one.

    The length afterwards is at most factor · length + constant. A step of the standard counts after the author of the
    file has put in other characters than ASCII: in a text of your own it seldom finds anything that grows.
    """
    factor, constant, is_foreign = 1.0, 0.0, False
    for step in steps:
        kind, ratio, added = str(step.get("type")), 1.0, float(bool(step.get("add_prefix_space")))
        inserted = str(step.get(INSERTED.get(kind, ""), ""))
        match kind:
            case "Replace":
                pattern = step["pattern"].get("String", "")
                # a regular expression may match the empty text between any two characters
                ratio = max(1.0, len(inserted) / len(pattern)) if pattern else 1.0 + len(inserted)
            case "Precompiled":  # a map of SentencePiece: a trie after its size, then texts that end in zero
                charsmap = base64.b64decode(step["precompiled_charsmap"])
                texts = charsmap[4 + int.from_bytes(charsmap[:4], "little") :].split(b"\0")
                inserted = max((text.decode(errors="replace") for text in texts), key=len)
                ratio = max(1.0, len(inserted))
            case "Prepend":
                added = len(inserted)
            case "Metaspace" | "WordPiece":
                added = 1.0
            case "BPEDecoder" | "CTC":
                ratio = 2.0  # what they replace by a space may be empty
            case _:
                ratio = UNICODE.get(kind, 1) if is_foreign else 1.0
        factor, constant = factor * ratio, constant * ratio + added
        is_foreign = is_foreign or not inserted.isascii() or kind == "ByteLevel"
    return factor + constant


def _steps(component: dict[str, Any] | None) -> list[dict[str, Any]]:
    """Return the steps of a component, which may be a sequence of sequences."""
    step = component or {}
    if step.get("type") != "Sequence":
        return [step]
    inner = (step.get(name, []) for name in ("normalizers", "pretokenizers", "decoders"))
    return [found for part in itertools.chain(*inner) for found in _steps(part)]
