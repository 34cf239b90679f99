"""Read texts from files, folders and Hugging Face datasets, a chunk at a time."""

import lzma
import re
import zlib
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple, final

from sedd.data import tables
from sedd.data.tables import LONGEST_LINE, LONGEST_WHOLE, Row, TextOrIds
from sedd.data.text_file import COMPRESSED, TextEncoding, TextFile, import_optional, open_decompressed
from sedd.data.token_files import companions, is_token_file, read_array, read_token_file

PIECE = 1 << 18  # bytes read, and characters encoded, at a time; at four times as many a BPE needs twice the memory
TABLES = (".jsonl", ".json", ".csv", ".parquet")
SMILES = (".smi", ".smiles")
FASTA = (".fa", ".fasta", ".fna", ".faa")
KINDS = (".txt", ".tokens", *TABLES, *SMILES, *FASTA, ".npy", ".bin", ".ds")
_LAST_LINE_END = re.compile(r".*\S\n(?=\S)", re.DOTALL)  # between words; found from the end


@final
class Source(NamedTuple):
    """A source and its files; a dataset of the Hugging Face Hub has none."""

    name: str
    files: tuple[Path, ...]

    @property
    def size(self) -> int:
        """Bytes on disk."""
        return sum(file.stat().st_size for file in self.files)


@final
class Chunk(NamedTuple):
    """Consecutive texts of one source, about ``PIECE`` characters."""

    texts: Sequence[TextOrIds]
    continues: bool = False  # the first text continues the last document of the previous chunk
    labels: Sequence[str | None] = ()  # one per text; empty without a label column
    source: str = ""
    first: int = 1  # number of the first text among the records of the file
    done: int = 0  # bytes of all sources read so far


def read_documents(
    sources: Sequence[str | Path],
    column: str | None = None,
    packing: str = "packed",
    encoding: TextEncoding | None = None,
) -> Iterator[str]:
    """Yield the texts of ``sources`` (files, folders or ``hf:NAME``) in order, long files in pieces.

    Args:
        column: The column of a table that holds the text; None: recognized by its name.
        packing: ``packed``, or ``lines`` for one text per line or row.
    """
    for chunk in read_chunks(expand_sources(sources), column, packing, encoding=encoding):
        for text in chunk.texts:
            yield text if isinstance(text, str) else " ".join(map(str, text.tolist()))


def expand_sources(sources: Sequence[str | Path]) -> list[Source]:
    """Find the files of each source, those of a folder sorted by path."""
    if not sources:
        raise ValueError(f"no source was given; name files ({', '.join(KINDS)}), folders, or hf:NAME")
    return [Source(str(source), tuple(_files(source))) for source in sources]


def _files(source: str | Path) -> list[Path]:
    if str(source).startswith("hf:"):
        return []
    path = Path(source)
    if path.is_dir():
        kinds = set(KINDS) - {".json"}  # in a folder of data these mostly describe it
        files = sorted(file for file in path.rglob("*") if file.is_file() and file_kind(file) in kinds)
        described = {table for file in files for table in companions(file)}
        files = [file for file in files if file not in described and (file_kind(file) != ".bin" or companions(file))]
        if not files:
            raise ValueError(f"the folder {path} holds no file that ends in {', '.join(KINDS)}; name one that does")
        return files
    if not path.exists() and Path(f"{path}.idx").is_file():  # Megatron names both files without their endings
        raise ValueError(f"{path} is the name of two files of Megatron; name {path}.bin")
    if not path.exists():
        raise ValueError(f"{path} does not exist; name a file, a folder, or hf:NAME for a Hugging Face dataset")
    kind = file_kind(path)
    if kind not in (*KINDS, ""):
        raise ValueError(f"{path} ends in {kind}; supported are {', '.join(KINDS)}, and then {', '.join(COMPRESSED)}")
    if kind in (".bin", ".ds") and path.suffix.lower() != kind:
        raise ValueError(f"{path} is compressed; decompress it: a file of tokens is read beside its index")
    return [path]


def file_kind(path: Path) -> str:
    """Return the file name's ending without that of a compression."""
    return Path(path.stem).suffix.lower() if path.suffix.lower() in COMPRESSED else path.suffix.lower()


def has_several_documents(sources: Sequence[Source]) -> bool:
    """Return whether the sources may hold more than one document."""
    files = [file for source in sources for file in source.files]
    if files and all(map(is_token_file, files)):
        return False  # their ids have end-of-text tokens already
    return len(files) != 1 or file_kind(files[0]) in (*TABLES, *SMILES, *FASTA)


def read_chunks(
    sources: Sequence[Source],
    column: str | None,
    packing: str,
    label: str | None = None,
    encoding: TextEncoding | None = None,
) -> Iterator[Chunk]:
    """Yield the texts of ``sources`` in order, a chunk at a time.

    Args:
        column: The column of a table that holds the text; by default one of `TEXT_COLUMNS`, or the only one of strings.
        packing: Text files are read line by line (``lines``) or as one document in pieces (``packed``).
        label: The column of a table that holds the labels.
        encoding: The encoding of text files, JSON lines and CSV; it counts what is no plain text.
    """
    encoding = encoding or TextEncoding()
    done, is_first = 0, True
    for source in sources:
        empty = True
        parts = [(str(file), _file_chunks(file, column, packing, label, encoding)) for file in source.files]
        for name, chunks in parts or [(source.name, _hub_chunks(source.name, column, label))]:
            first, is_stream = 1, packing == "packed" and is_token_file(Path(name))
            for chunk in chunks:
                continues = chunk.continues or (is_stream and not is_first)
                yield chunk._replace(source=name, first=first, done=done + chunk.done, continues=continues)
                first += len(chunk.texts)
                is_first = empty = False
            done += Path(name).stat().st_size if source.files else 0
        if empty:
            raise ValueError(f"{source.name} holds no text; name a source that does")
    encoding.check()


def _hub_chunks(name: str, column: str | None, label: str | None) -> Iterator[Chunk]:
    datasets = import_optional("datasets", name)
    path, _, split = name.removeprefix("hf:").partition(":")

    def rows() -> Iterator[Any]:
        try:
            yield from datasets.load_dataset(path, split=split or "train", streaming=True)
        except Exception as error:  # the library raises many types, while opening and while iterating
            raise ValueError(f"{name} could not be loaded: {error}") from None

    yield from _group_rows(tables.records(name, rows(), column, label), label)


def _file_chunks(
    path: Path, column: str | None, packing: str, label: str | None, encoding: TextEncoding
) -> Iterator[Chunk]:
    try:
        with path.open("rb") as raw, open_decompressed(path, raw) as stream:
            for chunk in _read(TextFile(path, stream, encoding), column, packing, label):
                yield chunk._replace(done=raw.tell())
    except (EOFError, lzma.LZMAError, zlib.error, OSError) as error:
        raise ValueError(f"{path} could not be read: {error}; it may be damaged") from None


def _read(file: TextFile, column: str | None, packing: str, label: str | None) -> Iterator[Chunk]:
    path, stream, kind = file.path, file.stream, file_kind(file.path)
    if kind not in TABLES:
        tables.reject_columns(str(path), column, label)
    lines = _lines(file)
    match kind:
        case ".jsonl":
            rows = tables.records(str(path), tables.parse_lines(path, lines), column, label)
        case ".json":
            text = _join(path, file.decode(PIECE), "", "write it as .jsonl")
            rows = tables.records(str(path), iter(tables.parse_array(path, text)), column, label)
        case ".csv":
            rows = tables.records(str(path), tables.parse_csv(path, lines), column, label, is_typed=False)
        case ".parquet":
            rows = tables.parquet_rows(path, stream, column, label)
        case ".smi" | ".smiles":  # a molecule, which its name may follow; "smiles" is the head of a column
            words = (line.split(maxsplit=1)[:1] for line in lines)
            rows = ((word[0], None) for word in words if word and word[0].lower() != "smiles")
        case ".fa" | ".fasta" | ".fna" | ".faa":
            rows = _fasta_rows(path, lines)
        case ".bin" | ".ds" | ".npy":
            read = read_token_file if is_token_file(path) else read_array
            return (Chunk(ids, continues) for ids, continues in read(path, stream, packing, PIECE))
        case _ if packing == "packed":
            return _document_pieces(file)
        case _:
            rows = ((line.removesuffix("\n").removesuffix("\r"), None) for line in lines)
    return _group_rows(rows, label)


def _group_rows(rows: Iterator[Row], label: str | None) -> Iterator[Chunk]:
    """Group non-empty texts into pieces."""
    group: list[TextOrIds] = []
    labels: list[str | None] = []
    size = 0
    for text, row_label in rows:
        if text is not None and len(text):
            group.append(text)
            labels += [] if label is None else [row_label]
            size += len(text)
        if size >= PIECE:
            yield Chunk(group, labels=labels)
            group, labels, size = [], [], 0
    if group:
        yield Chunk(group, labels=labels)


def _document_pieces(file: TextFile) -> Iterator[Chunk]:
    """Yield one document in pieces whose concatenation is the document."""
    rest, continues = "", False
    for text in file.decode_running_text(PIECE):
        if rest:
            # after a line end between words, else before the last space, where it changes tokens least, else at the end
            line_end = _LAST_LINE_END.match(rest)
            cut = line_end.end() if line_end else rest.rfind(" ", 1)
            cut = cut if cut > 0 else len(rest)
            yield Chunk([rest[:cut]], continues)
            rest, continues = rest[cut:], True
        rest += text
    if rest:
        yield Chunk([rest], continues)


def _lines(file: TextFile) -> Iterator[str]:
    """Yield all lines with their line ends."""
    rest = ""
    for text in file.decode(PIECE):
        *whole, rest = (rest + text).split("\n")
        if len(rest) > LONGEST_LINE:
            raise ValueError(f"{file.path} has a line of more than {LONGEST_LINE} characters; rename it to .txt")
        yield from [line + "\n" for line in whole]
    if rest:
        yield rest


def _fasta_rows(path: Path, lines: Iterator[str]) -> Iterator[Row]:
    """Yield the sequences of a FASTA file: the lines after each line that begins with ">", joined."""
    for is_head, group in groupby(lines, lambda line: line.startswith((">", ";"))):
        if not is_head:
            yield _join(path, ("".join(line.split()) for line in group), "a sequence of ", "split it"), None


def _join(path: Path, pieces: Iterable[str], what: str, advice: str) -> str:
    """Join what must be in memory as a whole."""
    joined, size = [], 0
    for piece in pieces:
        joined.append(piece)
        size += len(piece)
        if size > LONGEST_WHOLE:
            raise ValueError(f"{path} has {what}more than {LONGEST_WHOLE:,} characters; {advice}")
    return "".join(joined)
