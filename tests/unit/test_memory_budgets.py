"""Small files that ask for much memory are rejected within a budget, which the system enforces on the command."""

import base64
import gzip
import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import boxed
import pytest
from tokenizers import normalizers

from sedd import files
from sedd.data import read_documents, tables
from sedd.data.text_file import open_decompressed
from sedd.loading import load_model
from sedd.samplers import SamplingRun, SamplingSettings, empty
from sedd.schema import MAX_SAMPLES
from sedd.tokenizer import BPE, bpe

Refuses = Callable[..., None]
Sedd = Callable[..., subprocess.CompletedProcess[str]]
BUDGET = """
import resource
pages = int(open("/proc/self/statm").read().split()[0])
resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + 3 * 2**29,) * 2)
"""
"""Leaves a command 1.5 GiB beside what is imported."""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder without a manifest, as an attacker would write it."""
    folder = boxed.write_model(tmp_path_factory.mktemp("models") / "model")
    (folder / "manifest.json").unlink()
    return folder


@pytest.fixture
def rejected(sedd: Sedd, tmp_path: Path) -> Callable[..., str]:
    """Asserts that a command ends with one sentence and exit code 2 within the budget, and returns what it said."""

    def run(*words: object, before: str = BUDGET) -> str:
        done = sedd(*words, before=before)
        assert done.returncode == 2, done.stderr
        assert "not enough memory" not in done.stderr
        return done.stderr.splitlines()[-1]

    return run


# Tokenizers ------------------------------------------------------------------------------------------------

BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
METASPACE = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}


def replace(pattern: str, content: str, kind: str = "String") -> dict[str, Any]:
    return {"type": "Replace", "pattern": {kind: pattern}, "content": content}


def normalize(*steps: dict[str, Any]) -> dict[str, Any]:
    return {"normalizer": {"type": "Sequence", "normalizers": list(steps)}}


def split(*steps: dict[str, Any]) -> dict[str, Any]:
    return {"pre_tokenizer": {"type": "Sequence", "pretokenizers": list(steps)}}


def decode(*steps: dict[str, Any]) -> dict[str, Any]:
    return {"decoder": {"type": "Sequence", "decoders": list(steps)}}


def define(parts: dict[str, Any]) -> str:
    return json.dumps({"version": "1.0", "model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}, **parts})


LONGER = replace("a", "a" * 1000)
SPELLED = {name: value for name, value in LONGER.items() if name != "type"}  # as older versions wrote it
BOMBS = {
    "replace": normalize(*[LONGER] * 4),
    "one replace": normalize(LONGER),
    "without types": {"normalizer": {"normalizers": [SPELLED] * 4}},
    "empty patterns": normalize(*[replace("", "x", "Regex")] * 7),
    "prepend": normalize(*[{"type": "Prepend", "prepend": "x" * 20}] * 4),
    "bytes of bytes": split(*[BYTES] * 12),
    "normalized bytes": normalize(*[{"type": "ByteLevel"}] * 12),
    "Unicode": normalize(*[replace("ل", "ﷺ"), {"type": "NFKD"}] * 3),
    "both": normalize(replace("a", "é" * 32)) | split(BYTES),
    "spaces": split(*[METASPACE, {**METASPACE, "replacement": "_"}] * 40),
    "decoder": decode(*[LONGER] * 4),
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_tokenizer_that_multiplies_texts_is_rejected(refuses: Refuses, name: str) -> None:
    refuses(lambda: BPE(definition=define(BOMBS[name])), "times as long", f"{bpe.MAX_GROWTH}", "tokenizer.json")


def test_the_longest_entry_of_a_compiled_map_counts() -> None:
    """The size of the trie, the trie, and texts that end in zero."""
    charsmap = base64.b64encode(bytes([8, 0, 0, 0]) + bytes(8) + b"a\0" + "é".encode() * 30 + b"\0b\0").decode()
    compiled = {"type": "Precompiled", "precompiled_charsmap": charsmap}
    assert bpe._growth([compiled]) == 30
    assert bpe._growth([compiled, {"type": "NFKD"}]) == 30 * 18


LLAMA = normalize({"type": "Prepend", "prepend": "▁"}, replace(" ", "▁"))
CLIP = normalize({"type": "NFC"}, replace(r"\s+", " ", "Regex"), {"type": "Lowercase"}) | split(BYTES)
BERT = {"type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True, "strip_accents": None}
XLNET = normalize(replace("``", '"'), {"type": "NFKD"}, {"type": "StripAccents"}, replace(" {2,}", " ", "Regex"))
PUBLISHED = {
    "gpt2": {"pre_tokenizer": BYTES, "decoder": BYTES},
    "llama": LLAMA | decode(replace("▁", " "), {"type": "ByteFallback"}, {"type": "Fuse"}),
    "clip": CLIP,
    "bert": {"normalizer": {**BERT, "lowercase": True}, "pre_tokenizer": {"type": "BertPreTokenizer"}},
    "xlnet": XLNET | {"pre_tokenizer": METASPACE},
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_steps_of_published_tokenizers_are_accepted(name: str) -> None:
    assert BPE(definition=define(PUBLISHED[name])).encode("a").tolist()


@pytest.mark.parametrize("text", ["a", "é ﷺ a", "İ中 a"])
def test_the_bound_is_not_exceeded(text: str) -> None:
    """Of replacements by anything, once the steps of Unicode have something to grow."""
    parts = [replace("a", "ﷺ中é"), {"type": "NFKD"}, {**BERT, "lowercase": True}, {"type": "ByteLevel"}]
    model = normalizers.Sequence(
        [normalizers.Replace("a", "ﷺ中é"), normalizers.NFKD(), normalizers.BertNormalizer(), normalizers.ByteLevel()]
    )
    once = normalizers.Sequence([normalizers.NFKD(), normalizers.BertNormalizer(), normalizers.ByteLevel()])
    allowed = bpe._growth(parts) * len(once.normalize_str(text))
    assert len(model.normalize_str(text)) <= allowed


def test_a_post_processor_does_not_repeat_the_text() -> None:
    repeats = {"type": "TemplateProcessing", "single": [{"Sequence": {"id": "A", "type_id": 0}}] * 100}
    repeats |= {"pair": [{"Sequence": {"id": name, "type_id": 0}} for name in "AB"], "special_tokens": {}}
    assert BPE(definition=define({"post_processor": repeats})).encode("aa").tolist() == [0, 0]


def test_a_command_rejects_such_a_tokenizer(source: Path, tmp_path: Path, rejected: Callable[..., str]) -> None:
    """Its added tokens are normalized while it is read, so it is checked before that."""
    token = {"id": 1, "content": "a", "normalized": True, "special": False}
    token |= dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
    (tmp_path / "tokenizer.json").write_text(define(BOMBS["replace"] | {"added_tokens": [token]}))
    (tmp_path / "data.txt").write_text("a\n")
    words = ["--set", f"data.tokenizer={tmp_path / 'tokenizer.json'}", "--steps", "1", "--out", tmp_path / "run"]
    assert "times as long" in rejected("train", tmp_path / "data.txt", *words)


# Data ------------------------------------------------------------------------------------------------------


def test_a_cell_of_parquet(tmp_path: Path, rejected: Callable[..., str]) -> None:
    """A few kB hold 32 million characters, and would hold 800 million for the limit of 268."""
    pyarrow = pytest.importorskip("pyarrow", reason="the extra data has it")
    from pyarrow import parquet

    column = pyarrow.array(["a" * 32_000_000])
    parquet.write_table(pyarrow.table({"text": column}), tmp_path / "a.parquet", compression="zstd")
    assert (tmp_path / "a.parquet").stat().st_size < 5_000
    lower = "\nfrom sedd.data import tables\ntables.LONGEST_WHOLE = 2**24"
    words = ["data", "prepare", tmp_path / "a.parquet", "--out", tmp_path / "out"]
    assert "smaller row groups" in rejected(*words, before=BUDGET + lower)


def test_a_repeated_text_of_parquet_is_read_a_few_rows_at_a_time(
    refuses: Refuses, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is stored once, and a batch of a thousand rows would hold it a thousand times."""
    pyarrow = pytest.importorskip("pyarrow", reason="the extra data has it")
    from pyarrow import parquet

    monkeypatch.setattr(tables, "LONGEST_WHOLE", 10_000)
    monkeypatch.setattr("sedd.data.tables.LONGEST_LINE", 5_000)
    table = pyarrow.table({"text": ["x" * 4_000] * 50, "other": ["y" * 10**6] * 50})
    parquet.write_table(table, path := tmp_path / "a.parquet", compression="zstd")
    group = parquet.ParquetFile(path).metadata.row_group(0)
    assert 1 <= tables.rows_at_a_time(path, group, ["text"]) <= 5
    assert sum(map(len, read_documents([path]))) == 50 * 4_000
    refuses(lambda: tables.rows_at_a_time(path, group, ["other"]), "smaller row groups")
    parquet.write_table(pyarrow.table({"text": ["x" * 6_000]}), path)
    refuses(lambda: list(read_documents([path])), "more than 5,000 characters")


@pytest.mark.parametrize(
    ("name", "content", "word"),
    [
        ("a.json.gz", b'["' + b"a" * 4_000 + b'"]', ".jsonl"),
        ("a.fasta.gz", b">name\n" + b"ACGT\n" * 1_000, "sequence"),
        ("a.csv.gz", b"text,other\n" + b'"\n",' * 1_000, "a quote may be missing"),
        ("a.jsonl.gz", b'{"text": "' + b"a" * 4_000, "line of more"),
    ],
)
def test_what_is_read_as_a_whole_has_a_limit(
    refuses: Refuses, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, content: bytes, word: str
) -> None:
    for module, limit in (("readers", "LONGEST_LINE"), ("readers", "LONGEST_WHOLE"), ("tables", "LONGEST_LINE")):
        monkeypatch.setattr(f"sedd.data.{module}.{limit}", 2_000)
    (tmp_path / name).write_bytes(gzip.compress(content))
    refuses(lambda: list(read_documents([tmp_path / name], column="text" if "csv" in name else None)), word)


def test_zstandard_is_decompressed_a_little_at_a_time(tmp_path: Path) -> None:
    """A block that repeats one byte takes four: 64 KiB of them are 2 GiB."""
    pyarrow = pytest.importorskip("pyarrow", reason="the extra data has it")
    block = (131_072 << 3 | 1 << 1).to_bytes(3, "little") + b"a"
    last = (131_072 << 3 | 1 << 1 | 1).to_bytes(3, "little") + b"a"
    (tmp_path / "a.txt.zst").write_bytes(b"\x28\xb5\x2f\xfd" + bytes([0, 0x58]) + block * 4095 + last)
    before, size = pyarrow.total_allocated_bytes(), 0
    with (tmp_path / "a.txt.zst").open("rb") as raw, open_decompressed(tmp_path / "a.txt.zst", raw) as stream:
        while part := stream.read(2**20):
            size += len(part)
            assert pyarrow.total_allocated_bytes() - before < 2**23
    assert size == 4096 * 131_072


# Models ----------------------------------------------------------------------------------------------------


def linked(source: Path, folder: Path, name: str) -> Path:
    """Copy a model by links, one of its files to an endless device."""
    folder.mkdir()
    for file in source.iterdir():
        if file.name != name:
            os.symlink(file, folder / file.name)
    os.symlink("/dev/zero", folder / name)
    return folder


@pytest.mark.parametrize("name", ["state.json", "config.json", "log.jsonl", "tokenizer_config.json"])
def test_a_file_that_does_not_end(source: Path, tmp_path: Path, rejected: Callable[..., str], name: str) -> None:
    command = {"log.jsonl": "report", "tokenizer_config.json": "sample"}.get(name, "info")
    rejected(command, linked(source, tmp_path / "model", name))


def test_json_of_a_folder_has_a_limit(refuses: Refuses, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MAX_RECORD", 10)
    (tmp_path / "a.json").write_text("[1, 2, 3]")
    assert files.read_json(tmp_path / "a.json") == [1, 2, 3]
    (tmp_path / "a.json").write_text("[1, 2, 3, 4]")
    refuses(lambda: files.read_json(tmp_path / "a.json"), "more than 10 bytes")
    os.mkfifo(tmp_path / "b.json")
    refuses(lambda: files.read_json(tmp_path / "b.json"), "not a regular file")


def test_a_model_of_sequences_that_are_too_long(source: Path, tmp_path: Path, rejected: Callable[..., str]) -> None:
    folder = linked(source, tmp_path / "model", "config.json")
    (folder / "config.json").unlink()
    config = json.loads((source / "config.json").read_text())
    config["model"]["seq_len"] = 2**24
    (folder / "config.json").write_text(json.dumps(config))
    assert "1,048,576 or less" in rejected("sample", folder)


@pytest.mark.parametrize("change", [{"time_conditioning": "sigma", "cond_dim": 2**16}, {"width": 2**14}])
def test_a_model_that_is_larger_than_its_weights(
    source: Path, tmp_path: Path, rejected: Callable[..., str], change: dict[str, Any]
) -> None:
    """Its network would take gigabytes, and is not built."""
    folder = linked(source, tmp_path / "model", "config.json")
    (folder / "config.json").unlink()
    config = json.loads((source / "config.json").read_text())
    config["model"].update(change)
    (folder / "config.json").write_text(json.dumps(config))
    assert "is not of the model in its config.json" in rejected("sample", folder)


# Templates -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_file", [False, True])
def test_a_template_of_many_gaps(source: Path, tmp_path: Path, rejected: Callable[..., str], is_file: bool) -> None:
    """Each gap is below the limit of a gap; together they would take gigabytes."""
    template = f"{{{MAX_SAMPLES}}}" * 30
    (tmp_path / "template.txt").write_text(template)
    words = ["--file", tmp_path / "template.txt"] if is_file else [template]
    assert f"add up to {30 * MAX_SAMPLES} tokens" in rejected("infill", source, *words)


def test_samples_that_do_not_fit_into_memory(refuses: Refuses, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = load_model(source)
    run = SamplingRun.of(loaded, SamplingSettings(steps=1))
    monkeypatch.setattr(os, "sysconf", lambda name: 1 << 10)  # a machine with 1 MiB
    refuses(lambda: run.sample(empty(16, 144)), "16 samples of 144 tokens", "1,048,576", "smaller batch")
    assert len(run.sample(empty(2, 144), batch=1)) == 2
