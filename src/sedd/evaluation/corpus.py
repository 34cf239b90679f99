"""Corpora: the token sequences that are scored, read from files as a protocol prescribes or from a run's own data."""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import final

import numpy as np

from sedd.data import Index, TextEncoding, TokenBlocks, is_prepared
from sedd.data.readers import expand_sources, has_several_documents, read_chunks
from sedd.data.tables import TextOrIds
from sedd.evaluation.continuation import encode, encode_texts, pad_records
from sedd.evaluation.protocols import DATASETS, Eos, Protocol, suite_datasets
from sedd.loading import LoadedModel
from sedd.terminal import warn
from sedd.tokenizer import Ids, Integers, Tokenizer
from sedd.tokenizer.base import utf8
from sedd.training import checkpoint
from sedd.training.datasets import find_sources, prepare_data, require_sources


@final
@dataclass(frozen=True)
class Corpus:
    """Token sequences of any length, and facts about the text they encode."""

    sequences: Sequence[Ids]
    characters_per_token: float | None  # None where the tokens are not text
    bytes_per_token: float | None
    source: str
    split: str
    sha256: str  # of the text before tokenization, or of the prepared data
    dataset: str | None = None
    by_record: bool = False  # whether each sequence is a text of its own, not a part of a stream that was packed

    def __post_init__(self) -> None:
        if not self.sequences:
            raise ValueError(f"{self.source} holds nothing to score; name a text that does")


def load_corpora(
    loaded: LoadedModel,
    data: str | None,
    protocol: Protocol,
    *,
    suite: str | None = None,
    datasets: Sequence[str] = (),
    column: str | None = None,
    encoding: str = "utf-8",
    advice: str = "sedd eval RUN DATA --protocol held-out",
) -> Iterator[Corpus]:
    """Yield the corpora of a suite, the validation split of the run's own data, or the text ``data``.

    Args:
        data: The folder of a suite, a text, or where the data of the run is now; None: where it was.
        datasets: The benchmarks of the suite, by default all; or the benchmark that ``data`` belongs to.
        column: The column of a table that holds the text.
        advice: What to type where the run's data is not found.
    """
    if suite is None and len(datasets) > 1:
        raise ValueError(f"dataset is {' and '.join(datasets)}; name one for a file, several only with --suite")
    for name in datasets:
        protocol.check_dataset(name)
    if suite is not None:
        names = suite_datasets(suite, protocol, datasets)
        for name, path in [(name, protocol.find_file(Path(data or "."), name)) for name in names]:
            yield read_corpus(str(path), protocol, loaded, name, column, encoding)
    elif protocol.uses_validation_split:
        config = find_sources(loaded.config, loaded.folder)
        if data is not None:
            config = replace(config, data=replace(config.data, sources=[data]))
        require_sources(config, loaded.folder, advice)
        yield validation_corpus(prepare_data(config), replace(loaded, config=config))
    elif data is not None:
        yield read_corpus(data, protocol, loaded, next(iter(datasets), None), column, encoding)
    else:
        raise ValueError(f"protocol {protocol.name} needs data: name a file, or leave protocol out")


def read_corpus(
    source: str,
    protocol: Protocol,
    loaded: LoadedModel,
    dataset: str | None = None,
    column: str | None = None,
    encoding: str = "utf-8",
) -> Corpus:
    """Read a file, a folder or prepared data; a benchmark is ``dataset``, or identified by the name of its file."""
    if is_prepared(source):
        return _prepared_corpus(Path(source), protocol, loaded)
    if protocol.benchmarks and dataset is None:
        dataset = protocol.identify_dataset(Path(source))
    elif dataset is not None:
        protocol.check_dataset(dataset)
    tokenizer, packing = loaded.tokenizer, loaded.config.data.packing
    if packing == "lines" and (protocol.length or protocol.benchmarks):
        raise ValueError(f"this model reads records, and protocol {protocol.name} packs text; use protocol strict")
    texts = _read_texts(source, column, packing, TextEncoding.for_tokenizer(tokenizer, encoding))
    if packing == "lines":
        records = pad_records(encode(source, texts, tokenizer), loaded)
        return _text_corpus(records, texts, tokenizer, source, protocol.split)
    if dataset is not None:
        texts = _detokenized_rows(source, texts, dataset)
    if protocol.char_range is not None:
        texts = [_char_range(source, texts, protocol)]
    rows = _add_eos(encode(source, texts, tokenizer), protocol, tokenizer)
    length, tokens = sequence_length(protocol, loaded), sum(map(len, rows))
    if protocol.alphabet and tokens != sum(map(len, texts)):
        raise ValueError(f"protocol {protocol.name} counts characters; train a model with --tokenizer chars")
    sequences = protocol.packing(rows, length)
    if tokens and not sequences:
        raise ValueError(
            f"{source} holds {tokens} tokens, and protocol {protocol.name} drops what does not fill {length} "
            f"({protocol.packing.description}); give more, or use protocol strict"
        )
    corpus = _text_corpus(rows, texts, tokenizer, source, protocol.split_for(dataset))
    return replace(corpus, sequences=sequences, dataset=dataset, by_record=False)


def text_corpora(texts: Sequence[str], loaded: LoadedModel) -> list[Corpus]:
    """Return a corpus for each text; see `encode_texts`."""
    rows = zip(encode_texts(texts, loaded), texts, strict=True)
    return [_text_corpus([row], [text], loaded.tokenizer, "text", "this text") for row, text in rows]


def sample_corpus(rows: Sequence[Ids], loaded: LoadedModel, seed: int) -> Corpus:
    """Return the corpus of a model's own samples."""
    texts = [loaded.tokenizer.decode(row) for row in rows]
    split = f"{len(rows)} samples of the model, seed {seed}"
    corpus = _text_corpus(rows, texts, loaded.tokenizer, "samples of the model", split)
    if any("\ufffd" in text for text in texts):  # bytes that are not text have no characters
        return replace(corpus, characters_per_token=None, bytes_per_token=None)
    return corpus


def validation_corpus(folder: Path, loaded: LoadedModel) -> Corpus:
    """Return the validation split of the prepared data in ``folder``, as the run itself reads it.

    If the model is bound to a label, only sequences with that label are included.
    """
    length, fraction = loaded.config.model.seq_len, loaded.config.data.val_fraction
    sources = ", ".join(loaded.config.data.sources)
    blocks = TokenBlocks.open(folder, length, "validation", fraction, name=sources)
    if loaded.data_sha256 not in (None, blocks.index.sha256):
        raise ValueError(
            f"{sources} is not what {checkpoint.run_folder(loaded.folder)} was trained on, so no part of it was held "
            "out; name the data of the run, or evaluate all of the text with --protocol strict"
        )
    sha256 = hashlib.sha256(f"{blocks.index.sha256} {length} {fraction}".encode()).hexdigest()
    by_record, indices = blocks.index.packing == "lines", np.arange(len(blocks))
    split = f"the last {fraction:.2%} of {'records' if by_record else 'blocks'}"
    if loaded.label is not None:
        split += f" that are {loaded.label}"
        has_label = np.array([*blocks.labels, ""]) == loaded.label  # the last entry stands for no label
        indices = indices[has_label[blocks.label_ids(indices)]]
    rows = _read_blocks(blocks, indices, sources, loaded)
    sizes = blocks.text_per_token(indices) if rows else (None, None)
    return Corpus(rows, *sizes, sources, split, sha256, by_record=by_record)


def sequence_length(protocol: Protocol, loaded: LoadedModel) -> int:
    """Return the tokens per sequence; reject a length above the one the model was trained on."""
    trained = loaded.config.model.seq_len
    if protocol.length is not None and protocol.length > trained:
        raise ValueError(
            f"protocol {protocol.name} scores sequences of {protocol.length} tokens, and the model was trained on "
            f"{trained}; use protocol strict, which takes the model's length"
        )
    return protocol.length or trained


def _prepared_corpus(folder: Path, protocol: Protocol, loaded: LoadedModel) -> Corpus:
    """Return all sequences of a prepared folder."""
    if protocol.benchmarks or protocol.char_range:
        raise ValueError(f"{folder} is prepared data, and protocol {protocol.name} starts from text; give that")
    index = Index.read(folder)
    packed = index.packing == "packed"
    blocks = TokenBlocks.open(folder, index.tokens if packed else loaded.config.model.seq_len, "all", check=True)
    rows = _read_blocks(blocks, np.arange(len(blocks)), str(folder), loaded)
    rows = protocol.packing(rows, sequence_length(protocol, loaded)) if packed else rows
    return Corpus(rows, *blocks.text_per_token(), str(folder), protocol.split, index.sha256, by_record=not packed)


def _read_blocks(blocks: TokenBlocks, indices: Ids, name: str, loaded: LoadedModel) -> list[Ids]:
    if blocks.index.tokenizer != loaded.tokenizer.fingerprint():
        raise ValueError(f"{name} was prepared with another tokenizer than {loaded.tokenizer.kind}; give the text")
    rows, valid = blocks.read(indices)
    return [row[: mask.sum()] for row, mask in zip(rows, valid, strict=True)]  # padding is at the end


def _read_texts(source: str, column: str | None, packing: str, encoding: TextEncoding) -> list[TextOrIds]:
    """Read the documents of a source, or its lines for a model trained on lines."""
    documents: list[list[TextOrIds]] = []
    for chunk in read_chunks(expand_sources([source]), column, packing, encoding=encoding):
        pieces = [[text] for text in chunk.texts]
        if chunk.continues:
            documents[-1] += pieces.pop(0)
        documents += pieces
    for message in encoding.messages():
        warn(message)
    return ["".join(pieces) if isinstance(pieces[0], str) else np.concatenate(pieces) for pieces in documents]  # type: ignore[arg-type]


def _detokenized_rows(source: str, texts: Sequence[TextOrIds], dataset: str) -> list[TextOrIds]:
    """Return the detokenized rows of a benchmark: the rows of a table, or the lines of a text file."""
    benchmark, is_table = DATASETS[dataset], has_several_documents(expand_sources([source]))
    strings = [text for text in texts if isinstance(text, str)]
    if len(strings) < len(texts):
        raise ValueError(f"{source} holds integers; a benchmark is text")
    return [*(map(benchmark.detokenize, strings) if is_table else benchmark.split_rows(strings[0]))]


def _char_range(source: str, texts: Sequence[TextOrIds], protocol: Protocol) -> str:
    start, stop = protocol.char_range or (0, 0)
    text = texts[0] if len(texts) == 1 and isinstance(texts[0], str) else ""
    if len(text) < stop:
        raise ValueError(f"{source} is not one text of {stop:,} characters; {protocol.name} scores {protocol.split}")
    part = text[start:stop]
    if unknown := sorted(set(part) - set(protocol.alphabet or part)):
        raise ValueError(f"{source} holds {unknown[0]!r}; protocol {protocol.name} allows only {protocol.alphabet!r}")
    return part


def _add_eos(rows: list[Ids], protocol: Protocol, tokenizer: Tokenizer) -> list[Ids]:
    """Add end-of-text tokens where the protocol places them."""
    if protocol.eos is Eos.NONE or (protocol.eos is Eos.BETWEEN and tokenizer.eos is None):
        return rows
    if tokenizer.eos is None:
        raise ValueError(f"{tokenizer.kind} has no end-of-text token, as {protocol.name} needs; use protocol strict")
    ended = [np.append(row, tokenizer.eos) for row in rows]
    return ended if protocol.eos is Eos.AFTER else [*ended[:-1], rows[-1]]


def _text_corpus(
    rows: Sequence[Ids], texts: Sequence[TextOrIds], tokenizer: Tokenizer, source: str, split: str
) -> Corpus:
    """Return the corpus of texts that are one sequence each."""
    tokens, digest = sum(map(len, rows)), hashlib.sha256()
    sizes: tuple[float | None, float | None] = None, None
    if tokens and not isinstance(tokenizer, Integers):
        strings = [text for text in texts if isinstance(text, str)]
        sizes = sum(map(len, strings)) / tokens, sum(len(utf8(text, keeps_bytes=True)) for text in strings) / tokens
    for text in texts:
        content = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else np.asarray(text, "<i8").tobytes()
        digest.update(f"{len(content)}\n".encode() + content)
    return Corpus(rows, *sizes, source, split, digest.hexdigest(), by_record=True)
