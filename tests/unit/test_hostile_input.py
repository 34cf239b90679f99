"""What enters from outside is refused in a sentence: counts, files, configurations, checkpoints, control characters."""

import errno
import inspect
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args, get_type_hints

import numpy as np
import publications
import pytest
import torch
import typer

from sedd import cli, files, schema, terminal
from sedd.cli import explain
from sedd.cli.root import app, check_limits, check_out, show
from sedd.data.packing import Index
from sedd.hub import convert
from sedd.samplers.template import parse_template
from sedd.tokenizer import BPE, bpe, load_tokenizer
from sedd.training import checkpoint
from sedd.training.config import ModelConfig, RunConfig
from sedd.training.overrides import PATHS, merge_config
from sedd.training.setup import build_network, build_setup

Refuses = Callable[..., None]
Sedd = Callable[..., subprocess.CompletedProcess[str]]
DEEP = "[" * 100_000
ESCAPES = "\x1b]0;evil\x07\x9b31m\u202e\r\u2028"
"""Characters that set a terminal's title, its colours, the direction of text and the position of the cursor."""


# Counts ----------------------------------------------------------------------------------------------------


def commands(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, below in getattr(command, "commands", {}).items():
        yield from commands(below, (*path, name))
    if not hasattr(command, "commands"):
        yield path, command


def test_every_count_of_every_command_has_a_limit(refuses: Refuses) -> None:
    """Those of `sedd train` and `sedd plan` are keys of the configuration, each of which has its own."""
    checked = 0
    for path, command in commands(typer.main.get_command(app)):
        hints = get_type_hints(command.callback)
        for name in inspect.signature(command.callback).parameters:
            if hints.get(name) is int or int in get_args(hints.get(name)):
                is_key = path in (("train",), ("plan",)) and name in PATHS
                if not is_key and name not in ("seed", "port"):
                    refuses(lambda name=name: check_limits({name: 2**31}), name.replace("_", "-"), "or less")
                checked += 1
    assert checked > 40


KEYS = [
    f"{section}.{name}"
    for section, kind in get_type_hints(RunConfig).items()
    if hasattr(kind, "__dataclass_fields__")
    for name, hint in get_type_hints(kind).items()
    if hint is int or int in get_args(hint)
]


@pytest.mark.parametrize("key", KEYS)
def test_every_count_of_the_configuration_has_a_limit(refuses: Refuses, key: str) -> None:
    section, _, name = key.partition(".")
    refuses(lambda: RunConfig.from_dict({section: {name: 10**20}}), key, str(10**20))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: schema.check_count("steps", 0), ("steps is 0", "1 or more")),
        (lambda: schema.check_count("steps", 2**20 + 1), ("steps is 1048577", "1,048,576 or less")),
        (lambda: schema.check_count("a gap", float("nan")), ("a gap is nan",)),
        (lambda: parse_template("a{1000000000000}"), ("1000000000000", "16,777,216 or less")),
        (lambda: BPE.train(iter(["a"]), 10**13), (str(10**13), "1,048,576 or less")),
        (lambda: merge_config({"tokenizer": f"bpe:{10**13}", "sources": [__file__]}), (str(10**13),)),
    ],
)
def test_counts_that_are_too_large(refuses: Refuses, call: Callable[[], object], words: tuple[str, ...]) -> None:
    refuses(call, *words)


def test_a_network_larger_than_the_memory_is_refused_before_it_is_built(refuses: Refuses) -> None:
    config = RunConfig(model=ModelConfig(width=2**16, depth=2**10, heads=1)).resolved()
    setup = build_setup(config, 256)
    refuses(lambda: build_network(config, setup), "width 65536", "depth 1024", "bytes")


# Files -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a small model."""
    folder = publications.folder(tmp_path_factory.mktemp("source"), publications.KINDS[0], "safetensors")
    imported = convert.read_published(folder)
    return convert.save_model_folder(imported, None, tmp_path_factory.mktemp("models") / "model", "source")


@pytest.fixture
def damaged(model: Path, tmp_path: Path) -> Callable[..., Path]:
    """Copies the model, without its manifest, and writes other contents into one of its files."""

    def copy(name: str, content: str) -> Path:
        folder = tmp_path / "damaged"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(model, folder)
        (folder / checkpoint.MANIFEST).unlink()
        (folder / name).write_text(content)
        return folder

    return copy


@pytest.mark.parametrize("name", ["config.json", "state.json", "tokenizer_config.json", "manifest.json"])
@pytest.mark.parametrize("content", [DEEP, "null", "[]", "{}", "5", ""])
def test_files_of_a_model(damaged: Callable[..., Path], name: str, content: str) -> None:
    folder = damaged(name, content)
    reads = {
        "config.json": lambda: checkpoint.find_model(folder),
        "state.json": lambda: checkpoint.read_state(folder),
        "tokenizer_config.json": lambda: load_tokenizer(folder),
        "manifest.json": lambda: checkpoint.find_model(folder),
    }
    if (name, content) == ("manifest.json", "{}"):
        return  # lists no file, so none of them differs
    with pytest.raises(ValueError, match=r"damaged|\.json"):
        reads[name]()


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"model": {"width": "big"}}, "model.width is 'big'; it must be an integer"),
        ({"model": {"width": 16.5}}, "model.width is 16.5"),
        ({"model": {"width": True}}, "model.width is True"),
        ({"model": [1]}, "model is [1]; it must be a mapping"),
        ({"noise": {"options": [1]}}, "noise.options is [1]; it must be a mapping"),
        ({"noise": {"options": {"eps": "x"}}}, "noise.options.eps is 'x'; it must be a number"),
        ({"data": {"sources": 5}}, "data.sources is 5; it must be a list"),
        ({"data": {"sources": ["a", 5]}}, "data.sources[1] is 5; it must be text"),
        ({"data": {"column": 5}}, "data.column is 5; it must be text"),
        ({"model": {"speed": 5}}, "unknown option 'model.speed'"),
        ({"model": {"widht": 5}}, "did you mean model.width? model has architecture, width"),
        ({"lr": 5}, "did you mean optim.lr?"),
        ({"optim": {"lr": 10**400}}, "optim.lr is 1000"),
        ({"train": {"compile": "perhaps"}}, "train.compile is 'perhaps'; it must be true or false"),
        ({"seed": "x"}, "seed is 'x'"),
        ({"seed": None}, "seed is None"),
        ({"seed": -1}, "seed is -1"),
        ({"objective": ["x"]}, "objective is ['x']"),
        ([], "the configuration is []; it must be a mapping"),
    ],
)
def test_values_of_the_wrong_type(refuses: Refuses, changes: Any, word: str) -> None:
    refuses(lambda: RunConfig.from_dict(changes), word)
    assert RunConfig.from_dict({"budget": {"minutes": None}, "noise": {"options": {"eps": 0.5}}}).budget.minutes is None


@pytest.mark.parametrize("content", [DEEP, "null", "[]", "{}"])
def test_an_index_of_prepared_data(refuses: Refuses, tmp_path: Path, content: str) -> None:
    (tmp_path / "index.json").write_text(content)
    refuses(lambda: Index.read(tmp_path), "index.json is damaged")


BOMB = {
    "version": "1.0",
    "added_tokens": [],
    "pre_tokenizer": {"type": "Split", "pattern": {"Regex": ""}, "behavior": "Isolated", "invert": False},
    "model": {"type": "BPE", "vocab": {"x": 0}, "merges": []},
}


@pytest.mark.parametrize(("pattern", "length"), [("(x+x+)+y", 1500), ("(?:[a-z]{0,90}){3}(?!.)(?<=q)", 250)])
def test_a_regular_expression_that_takes_too_long(
    refuses: Refuses, monkeypatch: pytest.MonkeyPatch, pattern: str, length: int
) -> None:
    """The library gives the first up; the second takes seconds, and at the length of a document hours."""
    monkeypatch.setattr(bpe, "SECONDS", 0.2)
    definition = {**BOMB, "pre_tokenizer": {**BOMB["pre_tokenizer"], "pattern": {"Regex": pattern}}}  # type: ignore[dict-item]
    tokenizer = BPE(definition=json.dumps(definition))
    refuses(lambda: tokenizer.encode("x" * length), "a regular expression of the tokenizer")
    assert not tokenizer.is_lossless
    assert tokenizer.encode("x").tolist() == [0]


def test_settings_files(refuses: Refuses, tmp_path: Path) -> None:
    """A small file does not become a large one, and only plain data is read."""
    path = tmp_path / "settings.yaml"
    laughs = "a0: &a0 [x, x]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]\n" for i in range(1, 40))
    for content, words in (
        (laughs, ("alias *a0",)),
        (DEEP, ("nested",)),
        ("a: " * 200, ("settings.yaml cannot be read",)),
        ("a: 1\nb: [1", ("settings.yaml cannot be read", "in line 2")),
        ("5", ("settings.yaml holds a int",)),
        ("\0", ("settings.yaml cannot be read",)),
        ("a: 2024-13-45", ("settings.yaml cannot be read",)),
        ("a: !!python/object/apply:os.getcwd []", ("settings.yaml cannot be read", "tag")),
        ("a: !!bool x", ("settings.yaml cannot be read", "tag")),
        ("#" * 2**19, ("more than 262,144",)),
    ):
        path.write_text(content)
        refuses(lambda: merge_config({}, file=path), *words)
    for text in (f"data.tokenizer={DEEP}", "optim.lr=[&a 1, *a]", "optim.lr", "=3", "optim=3", "data.column=[a"):
        refuses(lambda text=text: merge_config({}, sets=[text]), "")
    path.write_text("optim: {lr: 1e-4}\nbudget: {steps: 3}\n")
    assert merge_config({}, file=path).optim.lr == 1e-4
    path.write_text("")
    assert merge_config({}, file=path).budget.steps == 1000


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("optim.lr=3", 3.0),
        ("optim.lr=1e-4", 1e-4),
        ("seed=7", 7),
        ("train.compile=yes", True),
        ("train.compile=False", False),
        ("data.column=on", "on"),
        ("data.column=010", "010"),
        ("data.column=${seed}", "${seed}"),
        ("data.column='null'", "null"),
        ("data.column=null", None),
        ("data.column=", None),
        ("data.sources=[\"😀.txt\", 'b c']", ["😀.txt", "b c"]),
        ("noise.options={eps: 1e-4}", {"eps": 1e-4}),
        ("noise.options.eps=2", {"eps": 2.0}),
    ],
)
def test_an_assignment_has_the_type_of_its_key(monkeypatch: pytest.MonkeyPatch, text: str, value: object) -> None:
    """Text that looks like a number stays text where the key is text, and ``${…}`` is text everywhere."""
    monkeypatch.setattr("sedd.training.overrides.check_data", lambda options: None)
    config = merge_config({}, sets=[text], recipe="tiny").as_dict()
    for key in text.partition("=")[0].split(".")[:2]:
        config = config[key]
    assert config == value
    assert type(config) is type(value)


def test_paths_of_any_characters(tmp_path: Path) -> None:
    """As an argument, by --set, in JSON, whose escapes of an emoji are no YAML, and in YAML."""
    source, file = tmp_path / "a ${b} 😀 ???.txt", tmp_path / "settings"
    source.write_text("a text of some words\n" * 20)
    expected, settings = [str(source)], {"data": {"sources": [str(source)]}}
    assert merge_config({"sources": expected}, recipe="tiny").data.sources == expected
    assert merge_config({}, sets=[f"data.sources=['{source}']"], recipe="tiny").data.sources == expected
    for content in (json.dumps(settings), json.dumps(settings, ensure_ascii=False), f"data: {{sources: ['{source}']}}"):
        file.write_text(content)
        assert merge_config({}, file=file).data.sources == expected


def test_text_files_that_are_too_large(refuses: Refuses, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MAX_TEXT", 10)
    (tmp_path / "a.txt").write_bytes(b"line\r\nline")
    assert files.read_text(tmp_path / "a.txt") == "line\nline"
    (tmp_path / "a.txt").write_bytes(b"line\nline\nline")
    refuses(lambda: files.read_text(tmp_path / "a.txt"), "more than 10 bytes")


# Checkpoints of others -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [["x"], {"b": 1}, None, "x" * 300 + ".safetensors", "a\0.safetensors"])
def test_odd_names_in_an_index(refuses: Refuses, tmp_path: Path, name: object) -> None:
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": name}}))
    refuses(lambda: convert.read_published(tmp_path), "model.safetensors.index.json names")
    for content in ("null", DEEP):
        index.write_text(content)
        refuses(lambda: convert.read_published(tmp_path), "model.safetensors.index.json")


def test_a_tensor_that_is_not_stored_in_full(refuses: Refuses, tmp_path: Path) -> None:
    """A stride of 0 makes a file of a few bytes ask for any amount of memory."""
    kind = publications.Kind("radd")
    source = publications.folder(tmp_path / "source", kind, "pickle")
    shapes = publications.table(kind, 40_001, publications.WIDTH, publications.DEPTH)
    stored = {name: torch.ones(1).expand(shape) for name, shape in shapes.items()}
    torch.save(stored, source / "pytorch_model.bin")
    (source / "config.json").unlink()
    refuses(lambda: convert.read_published(source), "numbers, and 1 are stored")


# The machine -----------------------------------------------------------------------------------------------


def test_errors_of_the_machine_are_sentences(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the number that was too large; any other error is a mistake in the code and keeps its traceback."""
    words = ["sample", "run", "--steps", "16", "-n", "77777", "--set", "model.width=123456"]
    with pytest.raises(MemoryError) as numpy_error:
        np.zeros(2**57)
    with pytest.raises(RuntimeError) as torch_error:
        torch.zeros(2**60)
    for error, amount in (
        (numpy_error.value, "1.00 EiB"),
        (torch_error.value, f"{2**62:,} bytes"),
        (MemoryError(), "memory;"),
    ):
        sentence = explain(error, words)
        assert sentence
        assert amount in sentence
        assert "model.width=123456: choose a smaller one" in sentence
    assert "-n 77777:" in str(explain(MemoryError(), words[:-1]))
    assert "choose smaller numbers" in str(explain(MemoryError(), ["sample"]))
    for number, advice in (
        (errno.ENOSPC, "free some space"),
        (errno.EROFS, "can be written"),
        (errno.EMFILE, "ulimit"),
    ):
        assert f"a/b: {os.strerror(number)}; " in str(explain(OSError(number, os.strerror(number), "a/b"), []))
        assert advice in str(explain(OSError(number, os.strerror(number), "a/b"), []))
    assert "nested too deeply" in str(explain(RecursionError(), []))
    assert explain(RuntimeError("a bug"), []) is None


@pytest.mark.parametrize("error", [MemoryError(), RecursionError(), OSError(errno.ENOSPC, "No space left", "x\x1b[2J")])
def test_the_command_line_explains_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: Exception
) -> None:
    def fail() -> None:
        raise error

    monkeypatch.setattr(cli, "app", fail)
    with pytest.raises(SystemExit) as exit:
        cli.main()
    assert exit.value.code == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("sedd: ")
    assert line.isprintable()


def test_outputs_that_cannot_be_written_are_refused_first(refuses: Refuses, tmp_path: Path) -> None:
    refuses(lambda: check_out(tmp_path), "is a folder")
    refuses(lambda: check_out(Path("/proc/results.jsonl")), "/proc cannot be written to")
    (tmp_path / "file").touch()
    refuses(lambda: check_out(tmp_path / "file" / "results.jsonl"), "cannot be written to")
    check_out(Path("/dev/null"))
    check_out(tmp_path / "new" / "results.jsonl")
    assert [path.name for path in tmp_path.rglob("*")] == ["file"]


# Control characters ----------------------------------------------------------------------------------------


def test_control_characters_are_escaped() -> None:
    assert terminal.visible(ESCAPES + "a\tb\nc é😀") == ("\\x1b]0;evil\\x07\\x9b31m\\u202e\\r\\u2028a\tb\nc é😀")
    assert terminal.visible("a\nb", line_ends=False) == "a\\nb"


def test_errors_and_warnings_have_no_control_characters(sedd: Sedd, tmp_path: Path) -> None:
    """From names on the command line and from the contents of files; in the usage errors of the parser too."""
    name = f"x{ESCAPES}y"
    (tmp_path / "data.jsonl").write_text(json.dumps({name: 1, "b": 2}))
    for words in (
        ["info", name],
        [name],
        ["cache", name],
        ["data", "prepare", tmp_path / "data.jsonl", "--out", tmp_path / "out"],
    ):
        done = sedd(*words)
        assert done.returncode == 2
        assert "evil" in done.stderr
        assert set(done.stderr) & set(ESCAPES) - set("0;evil]31m") == set(), words


def test_stdout_is_escaped_on_a_terminal_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    show(ESCAPES)
    assert capsys.readouterr().out == ESCAPES + "\n"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    show(ESCAPES)
    assert capsys.readouterr().out == terminal.visible(ESCAPES) + "\n"
