"""Every error is one sentence on stderr and a non-zero exit code, and nothing is lost."""

import json
import math
import re
import signal
import subprocess
from pathlib import Path

import publications
import pytest
from runs import SMALL, Sedd, ok, same
from safetensors.torch import load_file, save_file

from sedd.training import checkpoint


def refused(done: subprocess.CompletedProcess[str], *sentences: str) -> None:
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    for sentence in sentences:
        assert sentence in done.stderr


def flip(path: Path, at: int = -1) -> None:
    """Flip one bit of a file."""
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["nothing.txt"], "nothing.txt"),
        ([], "no data was given"),
        (["CORPUS", "--tokenizer", "klingon"], "klingon"),
        (["CORPUS", "--recipe", "huge"], "choose one of tiny"),
        (["CORPUS", "--config", "nothing.yaml"], "nothing.yaml"),
        (["CORPUS", "--set", "optim.speed=3"], "unknown option 'optim.speed'"),
        (["CORPUS", "--set", "optim.lr=fast"], "optim.lr is 'fast'; it must be a number"),
        (["CORPUS", "--set", "seed"], "write KEY=VALUE"),
        (["CORPUS", "--process", "gauss"], "'gauss'"),
        (["CORPUS", "--objective", "lambda-dce", "--process", "uniform"], "it needs Absorbing"),
        (["CORPUS", "--objective", "lambda-dce", "--parameterization", "score"], "trains parameterization mean"),
        (["CORPUS", "--parameterization", "signed-score"], "choose objective concrete-score, or leave it out"),
        (["CORPUS", "--set", "model.width=30", "--set", "model.heads=4"], "30"),
        (["CORPUS", "--set", "model.seq_len=100000"], "100000"),
        (["CORPUS", "--set", "train.batch_size=8", "--set", "train.grad_accumulation=3"], "each in 3 equal parts"),
        (["CORPUS", "--fsdp"], "torchrun"),
        (["CORPUS", "--out", "/proc/run"], "cannot be written"),
        (["CORPUS", "--out", "CORPUS"], "cannot be written"),
        (["CORPUS", "--set", "data.column=text"], "has no columns"),
    ],
)
def test_options(sedd: Sedd, corpus: Path, tmp_path: Path, words: list[str], sentence: str) -> None:
    words = [str(corpus) if word == "CORPUS" else word for word in words]
    out = [] if "--out" in words else ["--out", tmp_path / "run"]
    refused(sedd("train", *words, *out, "--steps", 1), sentence)


@pytest.mark.parametrize("command", [["train", "--steps", "1"], ["data", "prepare"]], ids=" ".join)
def test_text_in_another_encoding(sedd: Sedd, tmp_path: Path, command: list[str]) -> None:
    """The message names the byte and its place, and what it advises works."""
    (tmp_path / "latin.txt").write_bytes(b"un deux trois\n" * 500 + b"caf\xe9 au lait\n" + b"un deux trois\n" * 500)
    words = [*command, tmp_path / "latin.txt", "--out", tmp_path / "out"]
    refused(
        sedd(*words, "--tokenizer", "chars"),
        "latin.txt is not UTF-8",
        "0xe9 at offset 7,003, in line 501",
        "--encoding latin-1",
        "a tokenizer of bytes",
    )
    refused(sedd(*words, "--encoding", "klingon"), "encoding is 'klingon'", "latin-1")
    for i, advice in enumerate((["--tokenizer", "chars", "--encoding", "latin-1"], ["--tokenizer", "bytes"])):
        words[-1] = tmp_path / f"out{i}"
        done = sedd(*words, *advice, *(["--recipe", "tiny"] if command[0] == "train" else []))
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("command", [["train"], ["data", "prepare"]], ids=" ".join)
@pytest.mark.parametrize(
    ("name", "content", "words", "sentences"),
    [
        ("empty.txt", b"", [], ["empty.txt holds no text"]),
        ("empty.csv", b"text\n", [], ["empty.csv holds no text"]),
        ("picture.txt", b"\x89PNG\r\n\x1a\n\0\0", [], ["picture.txt", "is not text"]),
        ("cut.txt.gz", b"\x1f\x8b\x08", [], ["cut.txt.gz", "damaged"]),
        ("table.csv", b"left,right\na,b\n", [], ["left, right", "name the one"]),
        ("table.csv", b"left,right\na,b\n", ["middle"], ["'middle'", "left, right"]),
        ("floats.npy", b"no array", [], ["floats.npy is not an .npy file"]),
    ],
)
def test_files(
    sedd: Sedd, tmp_path: Path, command: list[str], name: str, content: bytes, words: list[str], sentences: list[str]
) -> None:
    (tmp_path / name).write_bytes(content)
    place = tmp_path / "place"
    column = ["--column", *words] if words else []
    refused(sedd(*command, tmp_path / name, "--out", place / "out", *column), *sentences)
    assert list(place.glob("*/*")) == []


def test_folders_that_cannot_be_written(sedd: Sedd, corpus: Path, tmp_path: Path) -> None:
    refused(sedd("data", "prepare", corpus, "--out", "/proc/out"), "/proc/out cannot be written to")
    refused(sedd("data", "prepare", corpus, "--out", corpus / "out"), "cannot be written to")
    elsewhere = "os.environ['SEDD_CACHE'] = '/proc/cache'"
    unwritable = sedd("train", corpus, "--out", tmp_path / "run", before=elsewhere)
    refused(unwritable, "the cache /proc/cache/data cannot be written to", "SEDD_CACHE")
    assert not HASH.search(unwritable.stderr)


def test_a_run_resumes_with_its_own_vocabulary_and_model_alone(sedd: Sedd, corpus: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    words = ["train", "--out", run, "--steps", 4, "--resume"]
    ok(sedd("train", corpus, *SMALL, "--out", run, "--steps", 2, "--tokenizer", "chars"))
    (saved,) = checkpoint.list_checkpoints(run / "checkpoints")
    refused(sedd(*words, "--tokenizer", "bytes"), "another tokenizer")
    upper = tmp_path / "upper.txt"
    upper.write_text(corpus.read_text().upper())
    refused(sedd("train", upper, *words[1:]), "another tokenizer")
    refused(sedd(*words, "--process", "uniform"), "trained with noise")
    refused(sedd(*words, "--set", "model.depth=3"), "trained with model")
    refused(sedd(*words, "--objective", "concrete-score"), "trained with objective score-entropy")
    refused(sedd("train", corpus, *SMALL, "--out", run, "--steps", 4), "holds a run already")
    assert checkpoint.list_checkpoints(run / "checkpoints") == [saved]
    assert checkpoint.corruption(saved) is None


HASH = re.compile("[0-9a-f]{32}")
"""The name of a folder in the cache, which no message has."""
FULL = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, ({0}, {0}))"


@pytest.mark.parametrize("file", ["optimizer.safetensors", "model.safetensors", "log.jsonl", "config.json"])
def test_a_full_disk(sedd: Sedd, corpus: Path, tmp_path: Path, file: str) -> None:
    """With a limit on file sizes the run stops with one sentence; without it, it resumes bit for bit."""
    whole, full = tmp_path / "whole", tmp_path / "full"
    words = ["train", corpus, *SMALL, "--save-every", 5, "--steps", 10]
    ok(sedd(*words, "--out", whole))
    killed = sedd(*words, "--out", full, before="kill_at('open', 'log.jsonl', after='step-00000005')")
    assert killed.returncode == -signal.SIGKILL
    before = contents(full / "checkpoints")
    model, config = (full / "checkpoints/step-00000005/model.safetensors"), full / "config.json"
    limit = {
        "optimizer.safetensors": model.stat().st_size,
        "model.safetensors": model.stat().st_size - 1,
        "log.jsonl": config.stat().st_size,
        "config.json": config.stat().st_size - 1,
    }[file]
    refused(sedd(*words, "--out", full, "--resume", before=FULL.format(limit)), f"{file} could not be written")
    assert contents(full / "checkpoints") == before
    assert json.loads(config.read_text()) | {"out": str(whole)} == json.loads((whole / "config.json").read_text())
    ok(sedd(*words, "--out", full, "--resume"))
    same(whole, full, 10)


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_damaged_checkpoint_falls_back_to_the_one_before(sedd: Sedd, corpus: Path, tmp_path: Path) -> None:
    """It is renamed, so that it is not taken for the newest when older checkpoints are removed."""
    run, whole = tmp_path / "run", tmp_path / "whole"
    words = ["train", corpus, *SMALL, "--steps", 10]
    ok(sedd(*words, "--save-every", 5, "--out", run))
    ok(sedd(*words, "--save-every", 5, "--out", whole))
    saves = run / "checkpoints"
    flip(saves / "step-00000010" / "ema.safetensors")
    info = sedd("info", run)
    ok(info)
    assert "nats per token" in info.stdout
    assert "step-00000010 is damaged" in info.stderr
    refused(sedd("info", saves / "step-00000010"), "ema.safetensors is not what was written")
    done = sedd(*words, "--save-every", 7, "--set", "train.keep_checkpoints=1", "--out", run, "--resume")
    ok(done)
    assert "step-00000010 is damaged (ema.safetensors is not what was written)" in done.stderr
    assert "resuming from step-00000005" in done.stderr
    assert {"step-00000010", "damaged-step-00000010"} <= {path.name for path in saves.iterdir()}
    assert checkpoint.corruption(saves / "step-00000010") is None
    same(whole, run, 10)
    for folder in checkpoint.list_checkpoints(saves):
        (folder / "state.json").unlink()
    refused(sedd(*words, "--out", run, "--resume"), "state.json is missing", "is intact")


def test_changed_bits_of_a_manifest_are_detected(sedd: Sedd, corpus: Path, tmp_path: Path) -> None:
    """Bytes in turn; a change of white space alone is harmless."""
    ok(sedd("train", corpus, *SMALL, "--steps", 1, "--out", tmp_path / "run"))
    (saved,) = checkpoint.list_checkpoints(tmp_path / "run" / "checkpoints")
    manifest = saved / checkpoint.MANIFEST
    right = manifest.read_bytes()
    for at in range(0, len(right), 7):
        flip(manifest, at)
        assert checkpoint.corruption(saved) is not None or chr(right[at]).isspace()
        manifest.write_bytes(right)
    assert checkpoint.corruption(saved) is None


def test_damaged_data(sedd: Sedd, corpus: Path, tmp_path: Path) -> None:
    """A damaged prepared folder is refused; a damaged copy in the cache is made again."""
    words = ["train", *SMALL, "--steps", 1]
    ok(sedd("data", "prepare", corpus, "--out", tmp_path / "shards", "--tokenizer", "chars"))
    ok(sedd(*words, tmp_path / "shards", "--out", tmp_path / "run"))
    assert json.loads(sedd("info", tmp_path / "run", "--json").stdout)["tokenizer"] == "chars"
    flip(tmp_path / "shards" / "tokens-00000.bin")
    refused(
        sedd(*words, tmp_path / "shards", "--out", tmp_path / "other"), "SHA-256 is wrong", "prepare the data again"
    )
    cache = f"os.environ['SEDD_CACHE'] = {str(tmp_path / 'cache')!r}"
    ok(sedd(*words, corpus, "--out", tmp_path / "cached", before=cache))
    (shard,) = (tmp_path / "cache").rglob("tokens-00000.bin")
    shard.write_bytes(shard.read_bytes()[:-2])
    again = sedd("train", "--steps", 2, "--out", tmp_path / "cached", "--resume", before=cache)
    ok(again)
    assert f"the cached copy of {corpus} is damaged; preparing it again" in again.stderr
    assert not HASH.search(again.stderr)
    flip(shard)
    assert "is damaged; preparing it again" in sedd("eval", tmp_path / "cached", "--draws", 2, before=cache).stderr
    shard.with_name("index.json").unlink()
    healed = sedd("eval", tmp_path / "cached", "--draws", 2, before=cache)
    ok(healed)
    assert "is damaged; preparing it again" in healed.stderr
    assert "is damaged" not in sedd("eval", tmp_path / "cached", "--draws", 2, before=cache).stderr
    assert {path.name for path in shard.parent.parent.iterdir()} == {shard.parent.name}


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_weights_that_are_not_finite(sedd: Sedd, words_run: Path, tmp_path: Path, dtype: str, value: float) -> None:
    """`sedd info` describes the model, and fails as the commands that would use it."""
    model = tmp_path / "model"
    ok(sedd("export", words_run, "--dtype", dtype, "--out", model))
    assert json.loads(sedd("info", model, "--json").stdout)["nonfinite"] is None
    weights = load_file(model / "ema.safetensors")
    name = sorted(weights)[3]
    weights[name].view(-1)[-1] = value
    save_file(weights, model / "ema.safetensors")
    (model / "manifest.json").unlink()
    described, shown, used = (sedd(*words) for words in (["info", model, "--json"], ["info", model], ["sample", model]))
    assert json.loads(described.stdout)["nonfinite"] == name
    assert name in shown.stdout
    for done in (described, shown, used):
        assert done.returncode == 2
        assert f"{name} holds a value that is NaN or infinite" in done.stderr


@pytest.mark.parametrize("lost", ["manifest.json", "config.json", "tokenizer_config.json"])
def test_a_damaged_conversion_in_the_cache(sedd: Sedd, tmp_path: Path, lost: str) -> None:
    """It is made again, as data are; and used as it is once it is whole."""
    words = ["info", publications.folder(tmp_path / "source", publications.KINDS[0], "safetensors")]
    cache = f"os.environ['SEDD_CACHE'] = {str(tmp_path / 'cache')!r}"
    ok(sedd(*words, before=cache))
    (folder,) = (tmp_path / "cache" / "models").iterdir()
    (folder / lost).unlink()
    healed = sedd(*words, before=cache)
    ok(healed)
    assert "is damaged" in healed.stderr
    assert (folder / lost).is_file()
    assert "is damaged" not in sedd(*words, before=cache).stderr


def test_a_folder_of_something_else_has_no_quality(sedd: Sedd, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["GPT2LMHeadModel"]}')
    done = sedd("quality", tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("sedd: ")
    assert "Traceback" not in done.stderr
