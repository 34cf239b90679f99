"""What is scored: sequences of tokens, made of files as a protocol says, or kept by a run from its training."""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import final

import numpy as np

from sedd.data import Index, TokenBlocks, is_prepared
from sedd.data.readers import TextOrIds, expand_sources, has_several_documents, read_chunks
from sedd.evaluation.protocols import DATASETS, Eos, Protocol
from sedd.factory import LoadedModel
from sedd.tokenizer import Ids, Integers, Tokenizer


@final
@dataclass(frozen=True)
class Corpus:
    """Sequences of any lengths, and the text they stand for."""

    rows: Sequence[Ids]
    characters_per_token: float | None
    """None where the tokens are no text."""
    bytes_per_token: float | None
    source: str
    split: str
    sha256: str
    """Of the text before it became tokens, or of the prepared data."""
    dataset: str | None = None

    def __post_init__(self) -> None:
        if not self.rows:
            raise ValueError(f"{self.source} holds nothing to score; name a text that does")

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def tokens(self) -> int:
        """In all sequences."""
        return sum(map(len, self.rows))


def given(
    source: str, protocol: Protocol, loaded: LoadedModel, dataset: str | None = None, column: str | None = None
) -> Corpus:
    """A file, a folder or prepared data, as ``protocol`` reads it."""
    if is_prepared(source):
        return _prepared(Path(source), protocol, loaded)
    dataset = _benchmark(source, protocol, dataset)
    if loaded.config.data.packing == "lines":
        return _lines(source, protocol, loaded, column)
    texts = _texts(source, column, "packed")
    if dataset is not None:
        texts = _rows(source, texts, dataset)
    if protocol.characters is not None:
        texts = [_part(source, texts, protocol)]
    rows = _ended(_encoded(source, texts, loaded.tokenizer), protocol, loaded.tokenizer)
    length, tokens = length_of(protocol, loaded), sum(map(len, rows))
    if protocol.alphabet and tokens != sum(map(len, texts)):
        raise ValueError(
            f"protocol {protocol.name} counts characters, and this model's tokenizer {loaded.tokenizer.kind} has other "
            "tokens; train one with --tokenizer chars"
        )
    sequences = protocol.packing(rows, length)
    if tokens and not sequences:
        raise ValueError(
            f"{source} holds {tokens} tokens, and protocol {protocol.name} drops what does not fill {length} "
            f"({protocol.packing}); give more, or use protocol strict"
        )
    sizes = _sizes(texts, tokens, loaded.tokenizer)
    return Corpus(sequences, *sizes, source, protocol.split_for(dataset), _hash(texts), dataset)


def _benchmark(source: str, protocol: Protocol, dataset: str | None) -> str | None:
    """The benchmark that a source is, where a protocol is made for benchmarks."""
    if protocol.benchmarks and dataset is None:
        return protocol.dataset_of(Path(source))
    if dataset is not None and dataset not in protocol.benchmarks:
        known = f"knows {', '.join(protocol.benchmarks)}" if protocol.benchmarks else "takes any text as it is"
        raise ValueError(f"dataset is {dataset!r}; protocol {protocol.name} {known}")
    return dataset


def _lines(source: str, protocol: Protocol, loaded: LoadedModel, column: str | None) -> Corpus:
    """The records of a file, for a model that reads records."""
    if protocol.length or protocol.benchmarks:
        raise ValueError(
            f"this model reads records, one a line, and protocol {protocol.name} packs text; use protocol strict"
        )
    texts = _texts(source, column, "lines")
    rows = _filled(_encoded(source, texts, loaded.tokenizer), loaded)
    sizes = _sizes(texts, sum(map(len, rows)), loaded.tokenizer)
    return Corpus(rows, *sizes, source, protocol.split, _hash(texts))


def alone(texts: Sequence[str], loaded: LoadedModel) -> list[Corpus]:
    """Every text by itself, none longer than the model was trained on."""
    if not texts or not all(texts):
        raise ValueError("a text is empty; there is nothing to score in it")
    rows = _encoded("the text", texts, loaded.tokenizer)
    length = loaded.config.model.seq_len
    for text, row in zip(texts, rows, strict=True):
        if len(row) > length:
            raise ValueError(
                f"the text {text[:40]!r} … has {len(row)} tokens and the model was trained on {length}; shorten it, or "
                "put it into a file for sedd eval, whose protocol strict cuts it into windows"
            )
    if loaded.config.data.packing == "lines":
        rows = _filled(rows, loaded)
    return [
        Corpus([row], *_sizes([text], len(row), loaded.tokenizer), "text", "this text", _hash([text]))
        for text, row in zip(texts, rows, strict=True)
    ]


def held_out(folder: Path, loaded: LoadedModel) -> Corpus:
    """What a run kept from its training, as it reads it there; of a model that is told a label, what has that label."""
    length, share = loaded.config.model.seq_len, loaded.config.data.val_fraction
    blocks = TokenBlocks.open(folder, length, "validation", share)
    _same_tokenizer(folder, blocks.index, loaded)
    sha256 = hashlib.sha256(f"{blocks.index.sha256} {length} {share}".encode()).hexdigest()
    split = f"the last {share:.2%} of blocks"
    if loaded.label is not None:
        split += f" that are {loaded.label}"
    return Corpus(
        _read(blocks, loaded.label), *_known(blocks, loaded), ", ".join(loaded.config.data.sources), split, sha256
    )


def length_of(protocol: Protocol, loaded: LoadedModel) -> int:
    """Tokens in a sequence; what is longer than the model was trained on is refused."""
    own = loaded.config.model.seq_len
    if protocol.length is not None and protocol.length > own:
        raise ValueError(
            f"protocol {protocol.name} scores sequences of {protocol.length} tokens, and the model was trained on "
            f"{own}; use protocol strict, which takes the model's length"
        )
    return protocol.length or own


def _prepared(folder: Path, protocol: Protocol, loaded: LoadedModel) -> Corpus:
    """All of a prepared folder."""
    if protocol.benchmarks or protocol.characters:
        raise ValueError(f"{folder} is prepared data, and protocol {protocol.name} starts from text; give that")
    index = Index.read(folder)
    _same_tokenizer(folder, index, loaded)
    packed = index.packing == "packed"
    blocks = TokenBlocks.open(folder, index.tokens if packed else loaded.config.model.seq_len, "all", check=True)
    rows = _read(blocks)
    rows = protocol.packing(rows, length_of(protocol, loaded)) if packed else rows
    return Corpus(rows, *_known(blocks, loaded), str(folder), protocol.split, index.sha256)


def _same_tokenizer(folder: Path, index: Index, loaded: LoadedModel) -> None:
    if index.tokenizer != loaded.tokenizer.fingerprint():
        raise ValueError(
            f"{folder} was prepared with another tokenizer than the model's ({loaded.tokenizer.kind}); "
            "give the text itself, or prepare it with the model's"
        )


def _read(blocks: TokenBlocks, label: str | None = None) -> list[Ids]:
    numbers = np.arange(len(blocks))
    if label is not None:
        known = blocks.label_ids(numbers)
        numbers = numbers[(np.array([*blocks.labels, ""]) == label)[known]]  # the last is no label
    rows, valid = blocks.read(numbers)
    return [row[: mask.sum()] for row, mask in zip(rows, valid, strict=True)]  # padding is at the end


def _known(blocks: TokenBlocks, loaded: LoadedModel) -> tuple[float | None, float | None]:
    """Characters and bytes a token, where there are any."""
    if isinstance(loaded.tokenizer, Integers):
        return None, None
    return blocks.chars_per_token, blocks.bytes_per_token


def _texts(source: str, column: str | None, records: str) -> list[TextOrIds]:
    """The documents of a source, or the records of a model that reads lines."""
    found: list[list[TextOrIds]] = []
    for chunk in read_chunks(expand_sources([source]), column, records):
        pieces = [[text] for text in chunk.texts]
        if chunk.continues:
            found[-1] += pieces.pop(0)
        found += pieces
    return [_joined(pieces) for pieces in found]


def _joined(pieces: list[TextOrIds]) -> TextOrIds:
    strings = [piece for piece in pieces if isinstance(piece, str)]
    return "".join(strings) if strings else np.concatenate([np.asarray(piece) for piece in pieces])


def _rows(source: str, texts: Sequence[TextOrIds], dataset: str) -> list[TextOrIds]:
    """The detokenized rows of a benchmark: those of a table, or the lines of a text file."""
    known, table = DATASETS[dataset], has_several_documents(expand_sources([source]))
    strings = [text for text in texts if isinstance(text, str)]
    if len(strings) < len(texts):
        raise ValueError(f"{source} holds integers; a benchmark is text")
    return [known.detokenize(text) for text in strings] if table else list(known.rows(strings[0]))


def _part(source: str, texts: Sequence[TextOrIds], protocol: Protocol) -> str:
    start, stop = protocol.characters or (0, 0)
    text = texts[0] if len(texts) == 1 and isinstance(texts[0], str) else ""
    if len(text) < stop:
        raise ValueError(
            f"{source} is no text of {stop:,} characters or more; protocol {protocol.name} scores {protocol.split}"
        )
    part = text[start:stop]
    if strange := sorted(set(part) - set(protocol.alphabet or part)):
        raise ValueError(f"{source} holds {strange[0]!r}; protocol {protocol.name} knows {protocol.alphabet!r} alone")
    return part


def _encoded(source: str, texts: Sequence[TextOrIds], tokenizer: Tokenizer) -> list[Ids]:
    strings = [text for text in texts if isinstance(text, str)]
    try:
        if len(strings) == len(texts):
            return tokenizer.encode_batch(strings)
        if not isinstance(tokenizer, Integers):
            raise ValueError(f"it holds integers, and the model's tokenizer is {tokenizer.kind}")
        return [tokenizer.check_ids(text) for text in texts]
    except ValueError as error:
        raise ValueError(f"the model's tokenizer cannot read {source}: {error}") from None


def _ended(rows: list[Ids], protocol: Protocol, tokenizer: Tokenizer) -> list[Ids]:
    """The rows with end-of-text tokens where the protocol has them."""
    if protocol.eos is Eos.NONE or (protocol.eos is Eos.BETWEEN and tokenizer.eos is None):
        return rows
    if tokenizer.eos is None:
        raise ValueError(
            f"protocol {protocol.name} puts an end-of-text token after every row, and the model's tokenizer "
            f"{tokenizer.kind} has none; use protocol strict, or a model trained on several documents"
        )
    ended = [np.append(row, tokenizer.eos) for row in rows]
    return ended if protocol.eos is Eos.AFTER else [*ended[:-1], rows[-1]]


def _filled(rows: Iterable[Ids], loaded: LoadedModel) -> list[Ids]:
    """Records as the model knows them: filled up, where it learned to fill them up."""
    length, pad = loaded.config.model.seq_len, loaded.tokenizer.pad
    pad = pad if loaded.config.data.pad == "model" else None
    found = []
    for row in rows:
        if len(row) > length:
            raise ValueError(f"a record has {len(row)} tokens and the model was trained on {length}; shorten it")
        found.append(row if pad is None else np.pad(row, (0, length - len(row)), constant_values=pad))
    return found


def _sizes(texts: Sequence[TextOrIds], tokens: int, tokenizer: Tokenizer) -> tuple[float | None, float | None]:
    """Characters and bytes a token, where there is text."""
    strings = [text for text in texts if isinstance(text, str)]
    if isinstance(tokenizer, Integers) or not tokens:
        return None, None
    return sum(map(len, strings)) / tokens, sum(len(text.encode()) for text in strings) / tokens


def _hash(texts: Sequence[TextOrIds]) -> str:
    digest = hashlib.sha256()
    for text in texts:
        content = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else np.asarray(text, "<i8").tobytes()
        digest.update(f"{len(content)}\n".encode() + content)
    return digest.hexdigest()
