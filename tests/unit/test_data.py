"""Datasets: readers return the exact text, prepared folders are complete or absent, the order is reproducible."""

import bz2
import csv
import gzip
import io
import json
import lzma
import os
import random
import signal
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from sedd import data, files
from sedd.data import (
    Index,
    TextEncoding,
    TokenBlocks,
    block_order,
    prepare,
    prepare_cached,
    read_documents,
    readers,
    shards,
)
from sedd.extras import install_hint
from sedd.tokenizer import BPE, Bytes, Characters, Integers, Tokenizer, build_tokenizer, load_tokenizer

Refuses = Callable[..., None]
STORY = "".join(f"{i} once upon a time, naïvely, 漢字 🎉\n" + "\n" * (i % 3) for i in range(400))
ROWS = ["first text", "second, with a comma", 'third with "quotes"\nand a line', "naïve 漢字"]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make pieces and shards so small that everything crosses their boundaries."""
    monkeypatch.setattr(readers, "PIECE", 101)
    monkeypatch.setattr(shards, "SHARD", 1000)


def stream(folder: Path, split: str = "all") -> list[int]:
    """Read all tokens of a packed dataset in blocks of one."""
    blocks = TokenBlocks.open(folder, 1, split)
    return blocks.read(np.arange(len(blocks)))[0].ravel().tolist()


def write(path: Path, content: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def table(kind: str, columns: dict[str, list[str]]) -> bytes:
    """Return the content of a table file of this kind."""
    rows = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    if kind == ".jsonl":
        return "".join(json.dumps(row) + "\n" for row in rows).encode()
    if kind == ".csv":
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, list(columns))
        writer.writeheader()
        writer.writerows(rows)
        return text.getvalue().encode()
    import pyarrow as pa
    import pyarrow.parquet as pq

    sink = io.BytesIO()
    pq.write_table(pa.table(columns), sink)
    return sink.getvalue()


PACK: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".gz": gzip.compress,
    ".xz": lzma.compress,
    ".bz2": bz2.compress,
    ".zst": zstandard.ZstdCompressor().compress,
}

# ---- reading


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("compression", PACK)
def test_pieces_join_to_the_text(tmp_path: Path, compression: str) -> None:
    file = write(tmp_path / f"a.txt{compression}", PACK[compression](STORY.encode()))
    pieces = list(read_documents([file]))
    assert "".join(pieces) == STORY
    assert len(pieces) > 10
    assert max(map(len, pieces)) <= 2 * readers.PIECE


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(
    "text", ["x" * 1000, "é" * 999, "漢" * 500 + " " + "a" * 500, "\n" * 500, " \n" * 300, "a\r\nb" * 90]
)
def test_pieces_join_to_any_text(tmp_path: Path, text: str) -> None:
    file = write(tmp_path / "a.txt", text.encode())
    assert "".join(read_documents([file])) == text.replace("\r\n", "\n")


@pytest.mark.usefixtures("small")
@given(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1, max_size=600))
def test_pieces_join_to_arbitrary_unicode(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    file = write(tmp_path_factory.mktemp("any") / "a.txt", b"\xef\xbb\xbf" + text.encode())
    assert "".join(read_documents([file])) == text.replace("\r\n", "\n")


def test_molecules_and_sequences(tmp_path: Path) -> None:
    """With names and headers, blank lines, and a file that ends without a line end."""
    smiles = write(tmp_path / "a.smi", b"smiles id\nCCO ethanol\n\nc1ccccc1\tbenzene\r\nC")
    assert list(read_documents([smiles])) == ["CCO", "c1ccccc1", "C"]
    packed = write(tmp_path / "a.smiles.gz", gzip.compress(b"CCO\nCC\n"))
    assert list(read_documents([packed], packing="lines")) == ["CCO", "CC"]
    fasta = write(tmp_path / "a.fasta", b">one\nACGT\nAC GT\n\n>none\n>two; again\nTTT\r\nA")
    assert list(read_documents([fasta])) == ["ACGTACGT", "TTTA"]
    made = build_tokenizer("chars", lambda: read_documents([fasta]))
    index = prepare([fasta], tmp_path / "out", made, packing="lines", pad="model")
    assert (index.records, index.length) == (2, 8)


def test_json_arrays(tmp_path: Path, refuses: Callable[..., None]) -> None:
    assert list(read_documents([write(tmp_path / "a.json", b'["one", "two"]')])) == ["one", "two"]
    table = write(tmp_path / "b.json", b'[{"text": "one", "n": 1}, {"text": "two"}]')
    assert list(read_documents([table])) == ["one", "two"]
    refuses(lambda: list(read_documents([table], "words")), "'words'", "text, n")
    for name, content in (("c", b'{"text": "one"}'), ("d", b'["one", 2]'), ("e", b'["one", {"text": "two"}]')):
        file = write(tmp_path / f"{name}.json", content)
        refuses(lambda file=file: list(read_documents([file])), f"{name}.json", "[60, 62, -1]")
    lines = write(tmp_path / "f.json", b'{"text": "a"}\n{"text": "b"}')
    refuses(lambda: list(read_documents([lines])), "f.json is not JSON", "name it .jsonl")
    refuses(lambda: list(read_documents([tmp_path / "a.json"], "text")), "column is 'text'", "no columns")


@pytest.mark.usefixtures("small")
@given(st.binary(min_size=1, max_size=600).map(lambda content: content.replace(b"\0", b"\n")))
def test_a_tokenizer_of_bytes_reads_any_bytes(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    folder = tmp_path_factory.mktemp("any")
    index = prepare([write(folder / "a.txt", content + b"a")], folder / "out", Bytes())
    found = TokenBlocks.open(folder / "out", index.tokens, "all").read(np.array([0]))[0][0]
    assert bytes(found.tolist()) == (content + b"a").removeprefix(b"\xef\xbb\xbf").replace(b"\r\n", b"\n")
    assert index.bytes == index.tokens


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("before", [0, 1, 5, 700])
def test_bytes_that_are_not_utf8_are_located(tmp_path: Path, before: int, refuses: Callable[..., None]) -> None:
    """However the file is cut into pieces; with a byte order mark, which counts, and a character before."""
    lines = "".join(f"é{i}\n" for i in range(before)).encode()
    for mark in (b"", b"\xef\xbb\xbf"):
        file = write(tmp_path / "a.txt", mark + lines + b"ab\xe9cd")
        offset = len(mark) + len(lines) + 2
        refuses(lambda file=file: list(read_documents([file])), f"offset {offset:,}, in line {before + 1:,}", "0xe9")
    half = write(tmp_path / "b.txt", lines + "漢".encode()[:2])
    refuses(
        lambda: list(read_documents([half])), f"offset {len(lines):,}, in line {before + 1:,}", "--encoding latin-1"
    )


@pytest.mark.parametrize(("name", "codec"), [("latin-1", "latin-1"), ("cp1252", "cp1252"), ("UTF-16", "utf-16")])
def test_other_encodings(tmp_path: Path, name: str, codec: str, refuses: Callable[..., None]) -> None:
    text = "café au lait\n" * 50
    file = write(tmp_path / "a.txt", text.encode(codec))
    encoding = TextEncoding.for_tokenizer("chars", name)
    assert "".join(read_documents([file], encoding=encoding)) == text
    index = prepare([file], tmp_path / "out", Bytes(), encoding=name)
    assert index.bytes == len(text.encode())
    for unknown in ("klingon", "base64", "rot13"):
        refuses(lambda name=unknown: TextEncoding.for_tokenizer("chars", name), f"'{unknown}'", "latin-1")
    utf16 = TextEncoding.for_tokenizer("chars", "utf-16")
    short = write(tmp_path / "short.txt", b"abc")
    refuses(lambda: list(read_documents([short], encoding=utf16)), "short.txt is not UTF-16", "--encoding")


@pytest.mark.usefixtures("small")
def test_cuts_do_not_change_the_tokens_of_a_byte_level_bpe(tmp_path: Path) -> None:
    text = "".join(f"line {i} of it\n" for i in range(300))
    made = BPE.train(iter([text]), 300)
    pieces = list(read_documents([write(tmp_path / "a.txt", text.encode())]))
    assert np.concatenate(made.encode_batch(pieces)).tolist() == made.encode(text).tolist()


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("compression", PACK)
@pytest.mark.parametrize("kind", [".jsonl", ".csv", ".parquet"])
def test_tables_give_their_text_column(tmp_path: Path, kind: str, compression: str) -> None:
    content = table(kind, {"number": ["1", "2", "3", "4"], "text": ROWS, "name": ["a", "b", "c", "d"]})
    file = write(tmp_path / f"a{kind}{compression}", PACK[compression](content))
    assert list(read_documents([file])) == ROWS
    assert list(read_documents([file], "name")) == ["a", "b", "c", "d"]


@pytest.mark.parametrize("kind", [".jsonl", ".csv", ".parquet"])
def test_the_text_column_is_chosen_if_it_is_unambiguous(tmp_path: Path, refuses: Refuses, kind: str) -> None:
    only = write(tmp_path / f"a{kind}", table(kind, {"words": ROWS}))
    assert list(read_documents([only])) == ROWS
    obvious = write(tmp_path / f"b{kind}", table(kind, {"SPLIT": ["x"] * 4, "SMILES": ROWS}))
    assert list(read_documents([obvious])) == ROWS
    unclear = write(tmp_path / f"c{kind}", table(kind, {"left": ROWS, "right": ROWS}))
    refuses(lambda: list(read_documents([unclear])), "left, right", "column")
    refuses(lambda: list(read_documents([only], "txt")), "'txt'", "words")


def test_missing_texts_are_skipped_and_other_values_refused(tmp_path: Path, refuses: Refuses) -> None:
    file = write(tmp_path / "a.jsonl", b'{"text": "a"}\n\n{"text": null}\n{"text": ""}\n{"other": 1}\n{"text": "b"}')
    assert list(read_documents([file])) == ["a", "b"]
    refuses(
        lambda: list(read_documents([write(tmp_path / "b.jsonl", b'{"text": "a"}\n{"text": 3}')])),
        "record 2",
        "is 3",
    )
    refuses(lambda: list(read_documents([write(tmp_path / "c.jsonl", b'{"text": "a"}\n{"te')])), "line 2", "not JSON")
    refuses(lambda: list(read_documents([write(tmp_path / "d.jsonl", b"[1.5]")])), "record 1", "1.5")
    surrogate = write(tmp_path / "g.jsonl", b'{"text": "a"}\n{"text": "\\udc80"}')
    refuses(lambda: list(read_documents([surrogate])), "line 2", "surrogates")
    refuses(lambda: list(read_documents([write(tmp_path / "e.csv", b'text\n"a" b\n')])), "e.csv", "not CSV")
    refuses(lambda: list(read_documents([write(tmp_path / "f.parquet", b"PAR1 not")])), "f.parquet", "Parquet")
    numbers = write(tmp_path / "g.jsonl", b'{"text": "a", "n": 1}')
    refuses(lambda: list(read_documents([numbers], "n")), "record 1", "is 1")


def test_lines_are_records_without_line_ends(tmp_path: Path) -> None:
    file = write(tmp_path / "a.txt", b"ACGT\r\nAC\n\n  \nGT")
    assert list(read_documents([file], packing="lines")) == ["ACGT", "AC", "  ", "GT"]


def test_folders_are_read_in_order_and_by_ending(tmp_path: Path) -> None:
    for name, text in {"b.txt": "2", "a/z.txt": "1", "c.jsonl.gz": "", "d.png": "no", "e": "no"}.items():
        content = gzip.compress(b'{"text": "3"}') if name.endswith("gz") else text.encode()
        write(tmp_path / name, content)
    assert list(read_documents([tmp_path])) == ["1", "2", "3"]


def test_text_may_have_no_ending(tmp_path: Path) -> None:
    assert list(
        read_documents([write(tmp_path / "text8", b"abc"), write(tmp_path / "b.xz", lzma.compress(b"de"))])
    ) == [
        "abc",
        "de",
    ]


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("compression", PACK)
@pytest.mark.parametrize("dtype", ["u1", "<i8", ">u2"])
def test_integers_of_arrays(tmp_path: Path, compression: str, dtype: str) -> None:
    values = np.random.default_rng(0).integers(0, 99, (60, 7)).astype(dtype)
    for array in (values, values.ravel()):
        sink = io.BytesIO()
        np.save(sink, array)
        file = write(tmp_path / f"{array.ndim}.npy{compression}", PACK[compression](sink.getvalue()))
        made = build_tokenizer("ints", lambda file=file: read_documents([file]))
        assert made.vocab_size == values.max() + 1
        prepare([file], tmp_path / f"packed{array.ndim}", made)
        assert stream(tmp_path / f"packed{array.ndim}") == values.ravel().tolist()
    prepare([tmp_path / f"2.npy{compression}"], tmp_path / "lines", made, packing="lines")
    rows, valid = TokenBlocks.open(tmp_path / "lines", None, "all").read(np.arange(60))
    assert (rows == values).all()
    assert valid.all()


def test_sources_that_cannot_be_read(tmp_path: Path, refuses: Refuses) -> None:
    def read(path: Path | str, column: str | None = None) -> Callable[[], object]:
        return lambda: list(read_documents([path], column))

    refuses(lambda: list(read_documents([])), "no source", ".jsonl")
    refuses(read(tmp_path / "none.txt"), "none.txt does not exist")
    refuses(read(write(tmp_path / "a.png", b"x")), "ends in .png", ".txt", ".zst")
    refuses(read(write(tmp_path / "empty.txt", b"")), "empty.txt holds no text")
    refuses(read(write(tmp_path / "empty.jsonl", b"\n")), "holds no text")
    refuses(read(write(tmp_path / "head.csv", b"text\n")), "holds no text")
    refuses(read(write(tmp_path / "zero.txt", b"ab\0c")), "zero.txt", "not text")
    refuses(read(write(tmp_path / "latin.txt", b"caf\xe9 au lait")), "not UTF-8", "0xe9")
    refuses(read(write(tmp_path / "half.txt", "漢".encode()[:2])), "not UTF-8")
    refuses(read(write(tmp_path / "a.txt", b"abc"), "text"), "'text'", "no columns")
    (tmp_path / "bare").mkdir()
    refuses(read(tmp_path / "bare"), "the folder", "no file")
    for compression, pack in PACK.items():
        if compression:
            refuses(read(write(tmp_path / f"cut.txt{compression}", pack(STORY.encode())[:-30])), "cut.txt", "damaged")
            refuses(read(write(tmp_path / f"bad.txt{compression}", b"no such thing")), "bad.txt", "damaged")
    refuses(read(write(tmp_path / "a.npy", b"no array")), "not an .npy file")
    for array, word in [
        (np.zeros(3), "float64"),
        (np.zeros((2, 2, 2), int), "(2, 2, 2)"),
        (np.ones((2, 3), int).T, "column by"),
    ]:
        np.save(tmp_path / "b.npy", array)
        refuses(read(tmp_path / "b.npy"), word)
    np.save(tmp_path / "c.npy", np.arange(100))
    refuses(read(write(tmp_path / "d.npy", (tmp_path / "c.npy").read_bytes()[:-8])), "missing", "damaged")


def test_datasets_of_the_hub(monkeypatch: pytest.MonkeyPatch, refuses: Refuses) -> None:
    def load_dataset(path: str, *, split: str, streaming: bool) -> Iterator[dict[str, object]]:
        if path == "owner/none":
            raise RuntimeError("no such dataset")
        yield from ({"id": i, "text": f"{split} {text}"} for i, text in enumerate("ab"))
        if path == "owner/far":
            raise ConnectionError("connection lost")

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    assert list(read_documents(["hf:owner/name"])) == ["train a", "train b"]
    assert list(read_documents(["hf:owner/name:test"])) == ["test a", "test b"]
    refuses(lambda: list(read_documents(["hf:owner/none"])), "hf:owner/none", "no such dataset")
    refuses(lambda: list(read_documents(["hf:owner/far"])), "hf:owner/far", "connection lost")
    monkeypatch.setitem(sys.modules, "datasets", None)
    refuses(lambda: list(read_documents(["hf:owner/name"])), "datasets", install_hint("data"))


# ---- writing


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("spec", ["bytes", "chars", "bpe:300"])
def test_windows_of_packed_data_join_to_the_text(tmp_path: Path, spec: str) -> None:
    """For any block length, and across the boundaries of pieces and shards."""
    file = write(tmp_path / "a.txt", STORY.encode())
    made = build_tokenizer(spec, lambda: read_documents([file]))
    index = prepare([file], tmp_path / "out", made)
    assert made.decode(stream(tmp_path / "out")) == STORY
    assert (index.characters, index.bytes, index.records) == (len(STORY), len(STORY.encode()), 1)
    assert len(index.shards) > 1
    assert (index.vocab_size, load_tokenizer(tmp_path / "out")) == (made.vocab_size, made)
    for length in (1, 7, 333, 2500):
        blocks = TokenBlocks.open(tmp_path / "out", length, "all", check=True)
        rows, valid = blocks.read(np.arange(len(blocks)))
        assert rows.shape == (index.tokens // length, length)
        assert rows.ravel().tolist() == stream(tmp_path / "out")[: rows.size]
        assert rows.dtype == np.int64
        assert valid.all()
        assert blocks.text_per_token() == (index.characters / index.tokens, index.bytes / index.tokens)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("packing", ["packed", "lines"])
def test_the_number_of_workers_changes_nothing(tmp_path: Path, packing: str) -> None:
    file = write(tmp_path / "a.txt", STORY.encode())
    made = BPE.train(read_documents([file]), 300)
    for workers in (1, 2, 5):
        prepare([file, file], tmp_path / str(workers), made, packing=packing, workers=workers)
    contents = [{f.name: f.read_bytes() for f in (tmp_path / str(workers)).iterdir()} for workers in (1, 2, 5)]
    assert contents[0] == contents[1] == contents[2]


@pytest.mark.usefixtures("small")
def test_end_of_text_stands_between_documents(tmp_path: Path) -> None:
    rows = write(tmp_path / "a.jsonl", table(".jsonl", {"text": ["ab", "c" * 300, "d"]}))
    text = write(tmp_path / "b.txt", b"e\n" * 100)
    index = prepare([rows, text], tmp_path / "out", Bytes())
    pieces = "".join("|" if id == 256 else chr(id) for id in stream(tmp_path / "out")).split("|")
    assert pieces == ["ab", "c" * 300, "d", "e\n" * 100]
    assert (index.vocab_size, index.records, index.tokens) == (257, 4, 506)
    one = prepare([text], tmp_path / "one", Bytes())
    assert (one.vocab_size, one.records) == (256, 1)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("pad", ["model", "ignore", None])
def test_records_are_padded(tmp_path: Path, pad: str | None) -> None:
    texts = ["A" * n for n in range(1, 60)]
    file = write(tmp_path / "a.txt", "\n".join(texts).encode())
    index = prepare([file], tmp_path / "out", Characters.fit(["AC"]), packing="lines", pad=pad)
    assert (index.length, index.pad, index.records) == (59, pad or "model", 59)
    for length in (None, 59, 80):
        blocks = TokenBlocks.open(tmp_path / "out", length, "all")
        rows, valid = blocks.read(np.arange(59))
        inside = np.arange(length or 59) < np.arange(1, 60)[:, None]
        assert (rows[inside] == 0).all()
        assert (rows[~inside] == (0 if pad == "ignore" else 2)).all()
        assert (valid == (inside if pad == "ignore" else True)).all()
        assert blocks.vocab_size == (2 if pad == "ignore" else 3)
        assert blocks.text_per_token()[0] == pytest.approx(index.characters / valid.sum())
        assert [blocks.tokenizer.decode(row[mask]) for row, mask in zip(rows, valid, strict=True)] == texts


@pytest.mark.parametrize(
    ("spec", "expected"),
    [("chars", (3, 1, 4)), ("bytes", (3, 2, 4)), ("bpe:260", (3, 1, 4)), ("ints", (2, 1, 3))],
)
def test_a_scan_finds_the_lengths_that_preparation_finds(
    tmp_path: Path, spec: str, expected: tuple[int, int, int]
) -> None:
    """In the tokens of any tokenizer, also of prepared data; records of one length are known to be so."""
    content = "7\n\n1 2 3\n" if spec == "ints" else "é\nabca\n\néab\n"
    file = write(tmp_path / "a.txt", content.encode())
    lengths = data.scan_record_lengths([str(file)], spec)
    index = prepare(
        [file],
        tmp_path / "out",
        build_tokenizer(spec, lambda: read_documents([file], packing="lines")),
        packing="lines",
    )
    assert lengths.longest == index.length
    assert lengths.records == index.records
    if spec != "bpe:260":  # its merges decide
        assert lengths[:3] == expected
        assert lengths.padding == pytest.approx(1 - index.tokens / (index.records * index.length))
    assert data.scan_record_lengths([str(tmp_path / "out")], spec)[:3] == (index.records, None, index.length)
    prepare([write(tmp_path / "b.txt", b"abc\nabd\n")], tmp_path / "equal", Bytes(), packing="lines")
    assert str(data.scan_record_lengths([str(tmp_path / "equal")], "bytes")) == "2 records of 3 tokens each"


@pytest.mark.usefixtures("small")
def test_long_records_are_left_out_with_their_labels(tmp_path: Path) -> None:
    """Across pieces, of which some keep nothing; counts are of the records that are left."""
    rows = [("ab" * (i % 4 + 1) if i // 60 != 1 else "c" * 9, f"{i % 4}") for i in range(180)]
    file = write(tmp_path / "a.jsonl", "".join(json.dumps({"text": a, "mood": b}) + "\n" for a, b in rows).encode())
    index = prepare([file], tmp_path / "out", Bytes(), packing="lines", length=6, label="mood")
    kept = [row for row in rows if len(row[0]) <= 6]
    blocks = TokenBlocks.open(tmp_path / "out", None, "all", check=True)
    assert (
        list(zip(blocks.decode(), np.array(blocks.labels)[blocks.label_ids(np.arange(len(blocks)))], strict=True))
        == kept
    )
    assert (index.records, index.characters) == (len(kept), sum(len(text) for text, _ in kept))


@pytest.mark.parametrize("pad", ["model", "ignore", None])
def test_records_of_one_length_get_no_padding_token(tmp_path: Path, pad: str | None) -> None:
    file = write(tmp_path / "a.txt", b"ACGT\nAAAA\nCCGT")
    index = prepare([file], tmp_path / "out", Characters.fit(["ACGT"]), packing="lines", pad=pad)
    assert (index.vocab_size, index.pad) == (4, None)
    assert TokenBlocks.open(tmp_path / "out", 4, "all").padding is None


def test_records_of_one_length_need_no_padding(tmp_path: Path, refuses: Refuses) -> None:
    file = write(tmp_path / "a.txt", b"ACGT\nCCGT\n")
    index = prepare([file], tmp_path / "out", Characters.fit(["ACGT"]), packing="lines")
    assert (index.vocab_size, index.pad, index.length) == (4, None, 4)
    refuses(lambda: TokenBlocks.open(tmp_path / "out", 5, "train"), "length is 5", "4, as they have no padding")


def test_large_vocabularies_take_wider_tokens(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.array([0, 65535, 65536, 70000]))
    for size, dtype in [(65536, "<u2"), (65537, "<u4"), (70001, "<u4")]:
        np.save(tmp_path / "b.npy", np.array([0, size - 1]))
        index = prepare([tmp_path / "b.npy"], tmp_path / str(size), Integers(size=size))
        assert index.dtype == dtype
        assert stream(tmp_path / str(size)) == [0, size - 1]


def test_progress_ends_at_the_whole(tmp_path: Path) -> None:
    files = [write(tmp_path / "a.txt", STORY.encode()), write(tmp_path / "b.jsonl.gz", gzip.compress(b'{"text":"a"}'))]
    seen: list[tuple[int, int]] = []
    prepare(files, tmp_path / "out", Bytes(), on_progress=lambda done, total: seen.append((done, total)))
    assert seen == sorted(seen)
    assert seen[-1] == (sum(file.stat().st_size for file in files),) * 2


def test_failed_preparation_leaves_no_files(tmp_path: Path, refuses: Refuses) -> None:
    file = write(tmp_path / "in" / "a.txt", b"ACGT\nACGTACGT\nA")
    bad = write(tmp_path / "in" / "b.txt", b"ok\n\xff")
    np.save(tmp_path / "in" / "c.npy", np.arange(9))
    place = tmp_path / "place"
    place.mkdir()
    out = place / "out"

    def refused(source: Path, made: Tokenizer, *words: str, at: Path = out, **options: object) -> None:
        refuses(lambda: prepare([source], at, made, **options), *words)  # type: ignore[arg-type]
        assert list(place.iterdir()) == []

    refused(write(tmp_path / "in" / "d.txt", b"ACGTACGT"), Bytes(), "length is 4", "all 1", packing="lines", length=4)
    refused(file, Characters.fit(["AC"]), "a.txt", "'G'", "position 2")
    refused(file, Characters.fit(["ACG"]), "a.txt, from record 1 on", "'T'", packing="lines")
    refused(bad, Characters.fit(["ACGT"]), "b.txt", "not UTF-8")
    refused(tmp_path / "in" / "c.npy", Bytes(), "c.npy", "choose ints")
    refused(tmp_path / "in" / "c.npy", Integers(size=5), "c.npy", "0..4")
    refused(file, Bytes(), "'rows'", "packed, lines", packing="rows")
    refused(file, Bytes(), "'left'", "model, ignore", packing="lines", pad="left")
    refused(file, Bytes(), "pad applies", pad="model")
    refused(file, Bytes(), "length applies", length=3)
    refused(file, Bytes(), "length is 0", packing="lines", length=0)
    refused(file, Bytes(), "workers is 0", workers=0)
    refused(file, Bytes(), "cannot be written to", at=file / "out")
    write(tmp_path / "blank" / "a.txt", b" \n ")
    refused(tmp_path / "blank", Integers(size=3), "no token")


def test_a_folder_in_use_is_left_alone(tmp_path: Path, refuses: Refuses) -> None:
    file = write(tmp_path / "a.txt", b"text")
    kept = write(tmp_path / "out" / "thesis.tex", b"x")
    refuses(lambda: prepare([file], tmp_path / "out", Bytes()), "is not an empty folder")
    assert kept.exists()
    (tmp_path / "empty").mkdir()
    assert prepare([file], tmp_path / "empty", Bytes()).tokens == 4


FULL = """
import resource, sys
from sedd.cli import main
resource.setrlimit(resource.RLIMIT_FSIZE, (3_000_000, 3_000_000))
sys.argv = ["sedd", "data", "prepare", sys.argv[1], "--out", sys.argv[2]]
main()
"""


def test_a_full_disk_is_reported_and_leaves_no_files(tmp_path: Path) -> None:
    file = write(tmp_path / "a.txt", b"text " * 600_000)
    place = tmp_path / "place"
    done = subprocess.run(
        [sys.executable, "-c", FULL, str(file), str(place / "out")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert done.stderr.startswith(f"sedd: {place / 'out'} could not be written: File too large; ")
    assert done.stderr.count("\n") == 1
    assert not place.exists()


KILLED = """
import os, signal, sys
from sedd.data import prepare
from sedd.tokenizer import Bytes
prepare([sys.argv[1]], sys.argv[2], Bytes(), on_progress=lambda done, total: os.kill(os.getpid(), signal.SIGKILL))
"""


def test_what_killed_processes_left_is_replaced_and_a_running_one_is_not_disturbed(
    tmp_path: Path, refuses: Callable[..., None]
) -> None:
    file = write(tmp_path / "a.txt", STORY.encode())
    place = tmp_path / "place"
    done = subprocess.run([sys.executable, "-c", KILLED, str(file), str(place / "out")], check=False)
    assert done.returncode == -signal.SIGKILL
    (left,) = place.iterdir()
    assert left.name == ".writing-out"
    assert any(left.iterdir())
    with files.atomic_folder(place / "out") as busy:
        assert list(busy.iterdir()) == [busy / files.LOCK]
        refuses(lambda: prepare([file], place / "out", Bytes()), f"{place / 'out'} is in use by process {os.getpid()}")
    assert list(place.iterdir()) == []
    prepare([file], place / "out", Bytes())
    assert list(place.iterdir()) == [place / "out"]
    assert not (place / "out" / files.LOCK).exists()


def test_the_cache_key_covers_content_and_options(tmp_path: Path) -> None:
    calls: list[str] = []

    def get(source: Path, spec: str = "bytes", **options: object) -> Path:
        def make() -> Tokenizer:
            calls.append(spec)
            return build_tokenizer(spec, lambda: read_documents([source]))

        return prepare_cached([source], spec, make, cache=tmp_path / "cache", **options)  # type: ignore[arg-type]

    file = write(tmp_path / "a.txt", b"one\ntwo\n")
    first = get(file)
    assert bytes(stream(first)) == b"one\ntwo\n"
    assert get(file) == first
    assert get(write(tmp_path / "elsewhere" / "a.txt", b"one\ntwo\n")) == first
    assert calls == ["bytes"]
    others = {get(file, "chars"), get(file, packing="lines"), get(file, packing="lines", pad="ignore")}
    write(file, b"one\nsix\n")
    assert len({first, *others, get(file)}) == 5
    made = tmp_path / "mine"
    Characters.fit(["onesix\n"]).save(made)
    before = get(file, str(made))
    Characters.fit(["onesixABC\n"]).save(made)
    assert get(file, str(made)) != before


# ---- blocks


@pytest.fixture
def letters(tmp_path: Path) -> Path:
    """A prepared folder of 1000 tokens, no two blocks of ten alike."""
    content = bytes(random.Random(0).choices(range(65, 75), k=1000))
    prepare([write(tmp_path / "a.txt", content)], tmp_path / "letters", Bytes())
    return tmp_path / "letters"


@pytest.mark.parametrize(
    ("length", "val_fraction", "expected"),
    [(10, 0.05, 5), (10, 0.001, 1), (500, 0.9, 1), (10, 0.3, 30), (10, 0.056, 6), (10, 0.054, 5), (10, 0.997, 99)],
)
def test_validation_is_the_tail(letters: Path, length: int, val_fraction: float, expected: int) -> None:
    train, validation, every = (
        TokenBlocks.open(letters, length, split, val_fraction) for split in ("train", "validation", "all")
    )
    assert (len(validation), len(train)) == (expected, len(every) - expected)
    parts = [part.read(np.arange(len(part)))[0] for part in (train, validation)]
    assert (np.concatenate(parts) == every.read(np.arange(len(every)))[0]).all()


def test_blocks_are_read_by_index(letters: Path, refuses: Refuses) -> None:
    blocks, text = TokenBlocks.open(letters, 3, "train"), (letters.parent / "a.txt").read_text()
    rows, _ = blocks.read(np.array([5, 0, 5]))
    assert [blocks.tokenizer.decode(row) for row in rows] == [text[15:18], text[:3], text[15:18]]
    assert blocks.read(np.zeros(0, int))[0].shape == (0, 3)
    for number in (-1, len(blocks)):
        refuses(lambda number=number: blocks.read(np.array([number])), f"{number}..{number}", f"0..{len(blocks) - 1}")


def test_impossible_blocks_are_refused(letters: Path, refuses: Refuses, tmp_path: Path) -> None:
    refuses(lambda: TokenBlocks.open(letters, 501, "train"), "1000 tokens", "1 blocks", "500 at most")
    refuses(lambda: TokenBlocks.open(letters, 1001, "all"), "0 blocks")
    assert len(TokenBlocks.open(letters, 1000, "all")) == 1
    refuses(lambda: TokenBlocks.open(letters, None, "train"), "give the block length")
    refuses(lambda: TokenBlocks.open(letters, 0, "train"), "length is 0")
    refuses(lambda: TokenBlocks.open(letters, 10, "test"), "'test'", "train, validation, all")
    refuses(lambda: TokenBlocks.open(letters, 10, "train", 1.0), "val_fraction is 1.0")
    refuses(lambda: TokenBlocks.open(tmp_path, 10, "train"), "not a prepared dataset", "sedd data prepare")
    prepare([write(tmp_path / "one.txt", b"a record")], tmp_path / "one", Bytes(), packing="lines")
    refuses(lambda: TokenBlocks.open(tmp_path / "one", None, "train"), "add records")
    refuses(lambda: TokenBlocks.open(tmp_path / "one", 7, "all"), "length is 7", "need 8")


def test_damage_is_found_and_named(letters: Path, refuses: Refuses, tmp_path: Path) -> None:
    shard, index = letters / "tokens-00000.bin", letters / "index.json"
    content, entries = shard.read_bytes(), index.read_text()
    write(shard, content[:-2])
    refuses(lambda: TokenBlocks.open(letters, 10, "train"), str(shard), "1998 bytes, not 2000")
    shard.unlink()
    refuses(lambda: TokenBlocks.open(letters, 10, "train"), str(shard), "0 bytes")
    write(shard, content[:-2] + b"\x01\x00")
    TokenBlocks.open(letters, 10, "train")
    refuses(lambda: TokenBlocks.open(letters, 10, "train", check=True), str(shard), "SHA-256")
    write(shard, content)
    for old, new, word in [
        ('"format": 2', '"format": 9', "format is 9"),
        ('"tokens": 1000', '"tokens": 999', "SHA-256"),
        ("{", "", "damaged"),
        ('"packing"', '"mode"', "damaged"),
    ]:
        index.write_text(entries.replace(old, new, 1))
        refuses(lambda: TokenBlocks.open(letters, 10, "train"), str(index), word)
    index.write_text(entries)
    Bytes().with_specials(True, False).save(letters)
    refuses(lambda: TokenBlocks.open(letters, 10, "train"), "tokenizer")
    prepare([write(tmp_path / "b.txt", b"a\nbc\nd")], tmp_path / "b", Bytes(), packing="lines")
    write(tmp_path / "b" / "lengths.bin", np.array([1, 1, 1], "<u4").tobytes())
    refuses(lambda: TokenBlocks.open(tmp_path / "b", None, "train"), "lengths.bin", "add up")


def test_the_index_round_trips(letters: Path) -> None:
    index = Index.read(letters)
    assert index.sha256 == index.content_hash()
    assert index == TokenBlocks.open(letters, 10, "all").index


# ---- order


@given(st.integers(0, 2**64 - 1), st.integers(0, 200), st.integers(1, 30), st.lists(st.integers(0, 40), max_size=6))
def test_order_is_a_function_of_seed_and_sample_alone(seed: int, start: int, size: int, batches: list[int]) -> None:
    """For any batch sizes, and wherever a run resumes."""
    whole = block_order(seed, start, sum(batches), size)
    data.packing._permutation.cache_clear()
    at, parts = start, [np.zeros(0, np.int64)]
    for count in batches:
        parts.append(block_order(seed, at, count, size))
        at += count
    assert np.concatenate(parts).tolist() == whole.tolist()
    assert whole.tolist() == [int(block_order(seed, i, 1, size)[0]) for i in range(start, at)]


@given(st.integers(0, 2**64 - 1), st.integers(0, 5), st.integers(1, 50))
def test_every_epoch_visits_every_block_once(seed: int, epoch: int, size: int) -> None:
    assert sorted(block_order(seed, epoch * size, size, size).tolist()) == list(range(size))


def test_orders_differ_by_seed_and_epoch_and_are_uniform() -> None:
    size = 1000
    assert (block_order(0, 0, size, size) != block_order(1, 0, size, size)).mean() > 0.9
    assert (block_order(0, 0, size, size) != block_order(0, size, size, size)).mean() > 0.9
    # the first of 4 blocks over 4000 seeds: each 1000 ± 27.4; 5 deviations, false alarm 2e-6 and fixed anyway
    counts = np.bincount([block_order(seed, 0, 1, 4)[0] for seed in range(4000)], minlength=4)
    assert np.abs(counts - 1000).max() < 137


def test_the_order_does_not_change_between_releases() -> None:
    assert block_order(7, 0, 12, 5).tolist() == [4, 1, 3, 2, 0, 3, 1, 2, 4, 0, 4, 0]


# ---- the command


THRICE = """
import json, sys
from sedd.cli import main
for words in json.loads(sys.argv[1]):
    sys.argv = ["sedd", *words]
    try:
        main()
    except SystemExit as end:
        print("code", end.code)
assert "torch" not in sys.modules, "preparing data must not import torch"
"""


def test_the_command_prepares(tmp_path: Path) -> None:
    """As JSON, as lines, and not twice into the same folder; torch, slow to import, is not imported."""
    file = write(tmp_path / "a.csv", table(".csv", {"id": ["1", "2"], "SMILES": ["CCO", "c1ccccc1"]}))
    words = ["data", "prepare", str(file), "--tokenizer", "chars", "--packing", "lines", "--out"]
    one, two = f"{tmp_path}/one", f"{tmp_path}/two"
    calls = json.dumps([[*words, one, "--json"], [*words, two], [*words, two]])
    done = subprocess.run([sys.executable, "-c", THRICE, calls], capture_output=True, text=True, check=False)
    record, first, *lines, second, third = done.stdout.splitlines()
    row = json.loads(record)
    assert (row["tokens"], row["records"], row["length"], row["pad"], row["vocab_size"]) == (11, 2, 8, "model", 5)
    assert row["sha256"] == Index.read(tmp_path / "one").sha256 == Index.read(tmp_path / "two").sha256
    shown = dict(line.split(maxsplit=1) for line in lines)
    assert (shown["folder"], shown["tokens"], shown["records"], shown["length"]) == (two, "11", "2", "8")
    assert (first, second, third) == ("code 0", "code 0", "code 2")
    assert f"{two} exists and is not an empty folder" in done.stderr
    assert done.returncode == 0


# ---- real corpora


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("dna-encode-test.txt.xz", {"packing": "lines"}, (4565, 4, 200, None)),
        ("moses-test.csv.gz", {"packing": "lines"}, (4999, 26, 50, "model")),
        ("tinyshakespeare.txt.xz", {}, (1, 65, None, None)),
    ],
)
def test_corpora(
    corpora: Path, tmp_path: Path, name: str, options: dict[str, str], expected: tuple[object, ...]
) -> None:
    file = corpora / "domains" / name
    if name.endswith("csv.gz"):  # a part is enough
        with gzip.open(file) as rows:
            file = write(tmp_path / name, gzip.compress(b"".join(islice(rows, 5000))))
    packing = options.get("packing", "packed")
    made = build_tokenizer("chars", lambda: read_documents([file], packing=packing))
    index = prepare([file], tmp_path / "out", made, packing=packing)
    assert (index.records, index.vocab_size, index.length, index.pad) == expected
    blocks = TokenBlocks.open(tmp_path / "out", index.length or 256, "validation", check=True)
    rows, _ = blocks.read(np.arange(len(blocks))[-2:])
    whole = list(read_documents([file], packing=packing))
    if packing == "lines":
        assert [blocks.tokenizer.decode(row) for row in rows] == whole[-2:]
    else:
        assert "".join(whole).find(blocks.tokenizer.decode(rows.ravel())) == (index.tokens // 256 - 2) * 256


# ---- long


MEASURED = """
import sys
from pathlib import Path
from sedd import data, tokenizer
made = tokenizer.load_tokenizer(Path(sys.argv[3]))
data.prepare([sys.argv[1]], sys.argv[2], made, workers=2)
print(int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0]) / 1024)
"""
"""Not `ru_maxrss`, in which a process inherits the peak of its parent."""


@pytest.mark.verify
@pytest.mark.parametrize("spec", ["bytes", "bpe:1000"])
def test_memory_does_not_grow_with_the_corpus(tmp_path: Path, spec: str) -> None:
    """300 MB of text need less than 500 MB of memory, Python and libraries included."""
    made = build_tokenizer(spec, lambda: iter([STORY]))
    made.save(tmp_path / "tokenizer")
    with (tmp_path / "a.txt").open("w", encoding="utf-8") as file:
        for _ in range(300_000_000 // len(STORY.encode()) + 1):
            file.write(STORY)
    words = [tmp_path / "a.txt", tmp_path / "out", tmp_path / "tokenizer"]
    done = subprocess.run([sys.executable, "-c", MEASURED, *words], capture_output=True, text=True, check=True)
    assert Index.read(tmp_path / "out").bytes >= 300_000_000
    assert float(done.stdout) < 500
