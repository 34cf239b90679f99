"""Token files of Megatron, datatrove and dolma, written byte by byte: they are read as they are, or refused."""

import contextlib
import gzip
import itertools
import json
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sedd import data
from sedd.data import TokenBlocks, token_files
from sedd.tokenizer import BPE, Bytes, Integers

Refuses = Callable[..., None]
Write = Callable[..., Path]
DOCUMENTS = [[5, 6, 7, 0], [8, 0], [9, 10, 11, 12, 300, 0]]
"""Each ends with the end-of-text token, 0."""
STREAM = [id for document in DOCUMENTS for id in document]


def megatron(folder: Path, documents: list[list[int]] = DOCUMENTS, width: int = 2, name: str = "corpus") -> Path:
    """Two sequences per document, as of sentences; the first has one token."""
    pieces = [piece for document in documents for piece in (document[:1], document[1:])]
    code, form = {2: (8, "H"), 4: (4, "i"), 8: (5, "q")}[width]
    ids = b"".join(struct.pack(f"<{len(piece)}{form}", *piece) for piece in pieces)
    starts = np.cumsum([0, *(len(piece) for piece in pieces)])[:-1]
    index = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, code, len(pieces), len(documents) + 1)
    index += struct.pack(f"<{len(pieces)}i", *map(len, pieces))
    index += struct.pack(f"<{len(pieces)}q", *(int(start) * width for start in starts))
    index += struct.pack(f"<{len(documents) + 1}q", *range(0, len(pieces) + 1, 2))
    (folder / f"{name}.idx").write_bytes(index)
    (folder / f"{name}.bin").write_bytes(ids)
    return folder / f"{name}.bin"


def datatrove(folder: Path, documents: list[list[int]] = DOCUMENTS, width: int = 2, name: str = "corpus") -> Path:
    ids = [id for document in documents for id in document]
    path = folder / f"{name}.ds"
    path.write_bytes(struct.pack(f"<{len(ids)}{'H' if width == 2 else 'I'}", *ids))
    ends = np.cumsum([len(document) for document in documents])
    (folder / f"{name}.ds.index").write_bytes(struct.pack(f"<{len(ends)}Q", *map(int, ends)))
    (folder / f"{name}.ds.metadata").write_text(f"openai-community/gpt2|{width}\n{len(ids)}\n{len(ids)} T")
    return path


def dolma(folder: Path, documents: list[list[int]] = DOCUMENTS, width: int = 2, name: str = "corpus") -> Path:
    ids = [id for document in documents for id in document]
    (folder / f"{name}.npy").write_bytes(struct.pack(f"<{len(ids)}{'H' if width == 2 else 'I'}", *ids))
    ends = [0, *map(int, np.cumsum([len(document) for document in documents]))]
    rows = "".join(f"{a},{b},id,a/b.json.gz,{i}\r\n" for i, (a, b) in enumerate(itertools.pairwise(ends)))
    (folder / f"{name}.csv.gz").write_bytes(gzip.compress(rows.encode()))
    return folder / f"{name}.npy"


WRITERS = {"megatron": megatron, "datatrove": datatrove, "dolma": dolma}


@pytest.fixture(params=WRITERS)
def write(request: pytest.FixtureRequest) -> Write:
    return WRITERS[request.param]


def tokens(folder: Path) -> list[int]:
    blocks = TokenBlocks.open(folder, 1, "all", check=True)
    return [int(id) for id in blocks.read(np.arange(len(blocks)))[0].reshape(-1)]


@pytest.mark.parametrize("width", [2, 4])
def test_the_stream_is_kept_as_it_is(write: Write, tmp_path: Path, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In pieces too; of several files, without a token between them."""
    monkeypatch.setattr("sedd.data.readers.PIECE", 5)
    first, second = (write(tmp_path, width=width, name=name) for name in "ab")
    index = data.prepare([first], tmp_path / "one", Integers(size=301))
    assert (index.tokens, index.vocab_size) == (len(STREAM), 301)
    assert tokens(tmp_path / "one") == STREAM
    data.prepare([first, second], tmp_path / "two", Integers(size=301, eos=0))
    assert tokens(tmp_path / "two") == STREAM * 2
    folder = tmp_path / "folder"
    folder.mkdir()
    write(folder, width=width)
    data.prepare([folder], tmp_path / "three", Integers(size=301))
    assert tokens(tmp_path / "three") == STREAM


def test_documents_are_records(write: Write, tmp_path: Path) -> None:
    data.prepare([write(tmp_path)], tmp_path / "out", Integers(size=301), packing="lines", pad="ignore")
    rows, valid = (blocks := TokenBlocks.open(tmp_path / "out", None, "all")).read(np.arange(len(blocks)))
    assert [row[mask].tolist() for row, mask in zip(rows, valid, strict=True)] == DOCUMENTS


def test_ids_of_a_tokenizer(write: Write, tmp_path: Path, refuses: Refuses) -> None:
    """They are those of the tokenizer that is named; one that would be fitted to them is refused, and ids beyond it."""
    path = write(tmp_path)
    definition = {"model": {"type": "BPE", "vocab": {f"t{i}": i for i in range(301)}, "merges": []}, "version": "1.0"}
    tokenizer = BPE(definition=json.dumps({**definition, "added_tokens": []}), eos=0)
    data.prepare([path], tmp_path / "out", tokenizer)
    assert tokens(tmp_path / "out") == STREAM
    refuses(lambda: data.prepare([path], tmp_path / "x", Bytes()), "choose ints", "tokenizer.json")
    refuses(lambda: data.prepare([path], tmp_path / "x", Integers(size=200)), "integer 300 is not one of 0..199")
    for name in ("chars", "bpe:300"):
        refuses(lambda name=name: token_files.refuse_fitting([path], name), "holds token ids", "ints:50257")
    token_files.refuse_fitting([path], "ints")


def test_files_of_megatron_come_in_pairs(tmp_path: Path, refuses: Refuses) -> None:
    megatron(tmp_path)
    refuses(lambda: data.expand_sources([tmp_path / "corpus"]), "corpus.bin")
    (tmp_path / "corpus.bin.gz").touch()
    refuses(lambda: data.expand_sources([tmp_path / "corpus.bin.gz"]), "decompress it")
    (tmp_path / "corpus.idx").unlink()
    refuses(lambda: data.prepare([tmp_path / "corpus.bin"], tmp_path / "x", Integers(size=9)), "corpus.idx beside it")
    refuses(lambda: data.expand_sources([tmp_path]), "holds no file")  # a .bin may be anything


def test_an_array_with_a_header_is_an_array(tmp_path: Path) -> None:
    """Also beside a table of its name."""
    np.save(tmp_path / "corpus.npy", np.array(STREAM))
    (tmp_path / "corpus.csv.gz").write_bytes(gzip.compress(b"a,b\r\n"))
    data.prepare([tmp_path / "corpus.npy"], tmp_path / "out", Integers(size=301))
    assert tokens(tmp_path / "out") == STREAM


def test_the_cache_notices_another_index(tmp_path: Path) -> None:
    """The same bytes with another index are other tokens."""
    path, cache = megatron(tmp_path, [[1, 0, 2, 0]]), tmp_path / "cache"
    first = data.prepare_cached([path], "ints:301", lambda: Integers(size=301), cache=cache)
    header = bytearray((tmp_path / "corpus.idx").read_bytes())
    assert tokens(first) == [1, 0, 2, 0]
    megatron(tmp_path, [[1, 2]], width=4)
    assert path.read_bytes() == struct.pack("<4H", 1, 0, 2, 0)
    assert bytes(header) != (tmp_path / "corpus.idx").read_bytes()
    assert tokens(data.prepare_cached([path], "ints:301", lambda: Integers(size=301), cache=cache)) == [1, 2]


def replace(at: int, form: str, value: int) -> Callable[[bytes], bytes]:
    return lambda content: content[:at] + struct.pack(form, value) + content[at + struct.calcsize(form) :]


@pytest.mark.parametrize(
    ("write", "name", "change", "words"),
    [
        (megatron, "corpus.idx", lambda c: b"X" + c[1:], "is not an index of Megatron"),
        (megatron, "corpus.idx", lambda c: b"", "is not an index of Megatron"),
        (megatron, "corpus.idx", replace(9, "<Q", 2), "is not an index of Megatron"),
        (megatron, "corpus.idx", replace(17, "<B", 7), "dtype code 7"),
        (megatron, "corpus.idx", replace(18, "<Q", 2**63), "its header describes"),
        (megatron, "corpus.idx", replace(26, "<Q", 2**62), "its header describes"),
        (megatron, "corpus.idx", lambda c: c[:-1], "its header describes"),
        (megatron, "corpus.idx", replace(34, "<i", -1), "one after the other"),
        (megatron, "corpus.idx", replace(34 + 24, "<q", 2), "one after the other"),
        (megatron, "corpus.idx", replace(34 + 72, "<q", 1), "do not cover sequences 0"),
        (megatron, "corpus.idx", replace(34 + 72 + 8, "<q", 2**40), "do not cover sequences 0"),
        (megatron, "corpus.bin", lambda c: c[:-1], "its index describes"),
        (megatron, "corpus.bin", lambda c: c + b"\0\0", "its index describes"),
        (datatrove, "corpus.ds", lambda c: c[:-2], "its index describes"),
        (datatrove, "corpus.ds.index", lambda c: c[:-1], "lists where documents end"),
        (datatrove, "corpus.ds.index", replace(0, "<Q", 2**64 - 1), "ends after"),
        (datatrove, "corpus.ds.index", replace(0, "<Q", 7), "end before they begin"),
        (datatrove, "corpus.ds.metadata", lambda c: b"gpt2|3\n", "'3' bytes per token"),
        (datatrove, "corpus.ds.metadata", lambda c: b"\xff", "could not be read"),
        (dolma, "corpus.npy", lambda c: c[:-1], "its index describes"),
        (dolma, "corpus.csv.gz", lambda c: c[:-9], "list of documents"),
        (dolma, "corpus.csv.gz", lambda c: b"start,end", "list of documents"),
        (dolma, "corpus.csv.gz", lambda c: gzip.compress(b"0,4\r\n5,6\r\n"), "line 2 does not begin with 4"),
        (dolma, "corpus.csv.gz", lambda c: gzip.compress(b"0," + b"9" * 30), "list of documents"),
        (dolma, "corpus.csv.gz", lambda c: gzip.compress(b""), "its index describes"),
    ],
)
def test_files_that_do_not_fit(
    tmp_path: Path, refuses: Refuses, write: Write, name: str, change: Callable[[bytes], bytes], words: str
) -> None:
    path = write(tmp_path)
    (tmp_path / name).write_bytes(change((tmp_path / name).read_bytes()))
    refuses(lambda: data.prepare([path], tmp_path / "out", Integers(size=301)), words)
    assert not (tmp_path / "out").exists()


@settings(max_examples=60)
@given(st.sampled_from(list(WRITERS.items())), st.integers(0, 10**6), st.integers(1, 255), st.booleans())
def test_a_changed_byte_is_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, writer: tuple[str, Write], at: int, change: int, in_index: bool
) -> None:
    """Whatever byte it is, of the tokens or of what describes them."""
    folder = tmp_path_factory.mktemp("flipped")
    path = writer[1](folder)
    file = token_files.companions(path)[0] if in_index else path
    content = bytearray(file.read_bytes())
    content[at % len(content)] ^= change
    file.write_bytes(content)
    with contextlib.suppress(ValueError):
        assert data.prepare([path], folder / "out", Integers(size=2**16)).tokens == len(STREAM) or in_index
