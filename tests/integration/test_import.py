"""`sedd import` and `sedd export`: every command works on what they write, and no code in a file is executed."""

import json
import os
import pickle
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import publications
import pytest
import torch
from publications import KINDS, Kind, V
from runs import Sedd, ok
from safetensors.torch import load_file, save_file

SEDD, UNIFORM, RADD, MDLM = KINDS
HEAD = "output_layer.linear.weight"


def refused(done: subprocess.CompletedProcess[str], output: Path, *sentences: str) -> None:
    """Check for exit code 2, one sentence, after the line that states what is done, and an empty output folder."""
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    *stated, last = done.stderr.splitlines()
    assert [
        line for line in stated if not re.fullmatch(r"sedd: .+: (published weights|weights in .+), to .+", line)
    ] == []
    assert last.startswith("sedd: ")
    for sentence in sentences:
        assert sentence in last
    assert list(output.iterdir()) == []


@pytest.fixture
def output(tmp_path: Path) -> Path:
    made = tmp_path / "output"
    made.mkdir()
    return made


# Imported models -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS, ids="-".join)
def test_every_command_works_on_an_imported_model(sedd: Sedd, tmp_path: Path, kind: Kind) -> None:
    source, model = publications.folder(tmp_path / "source", kind, "pickle"), tmp_path / "model"
    done = sedd("import", source, "--out", model, "--json")
    ok(done)
    record = json.loads(done.stdout)
    assert (record["layout"], record["vocab_size"], record["tokenizer"]) == (kind.layout, V, "ints")
    count = sum(v.numel() for name, v in publications.weights(kind).items() if "inv_freq" not in name)
    assert record["parameters"] == count
    assert "no tokenizer was found, tokens are shown as integers" in done.stderr
    assert not list(model.rglob("*.bin"))
    info = sedd("info", model, "--json")
    ok(info)
    assert json.loads(info.stdout)["parameters"] == count
    assert (
        f"none (no log of a run is with this model); compute it with: sedd eval {model} DATA"
        in sedd("info", model).stdout
    )
    sampled = sedd("sample", model, "-n", 2, "--steps", 4, "--length", 6, "--json")
    ok(sampled)
    rows = [json.loads(line)["ids"] for line in sampled.stdout.splitlines()]
    assert [len(row) for row in rows] == [6, 6]
    assert all(0 <= id < V for row in rows for id in row)
    filled = sedd("infill", model, "3 {4} 10", "--steps", 4)
    ok(filled)
    words = filled.stdout.split()
    assert (words[0], words[-1], len(words)) == ("3", "10", 6)
    scored = sedd("score", model, "1 2 3 4", "--draws", 4, "--json")
    ok(scored)
    assert json.loads(scored.stdout)["nats_per_token"] > 0
    (tmp_path / "test.txt").write_text("1 2 3 4 5 6 7 8 9 10 " * 8)
    evaluated = sedd("eval", model, tmp_path / "test.txt", "--draws", 2, "--json")
    ok(evaluated)
    assert json.loads(evaluated.stdout)["tokens"] == 80
    ok(sedd("export", model, "--format", kind.layout, "--out", tmp_path / "back"))
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert all(torch.equal(back[name], value) for name, value in publications.weights(kind).items())


@pytest.mark.parametrize(
    ("kind", "prefix", "file"),
    [
        (SEDD, "", "."),
        (UNIFORM, "module.", "checkpoints-meta/checkpoint.pth"),
        (RADD, "", "checkpoints/checkpoint_1.pth"),
    ],
    ids=["SEDD", "uniform", "RADD"],
)
def test_a_run_of_the_original_training_code(sedd: Sedd, tmp_path: Path, kind: Kind, prefix: str, file: str) -> None:
    """Its folder or one of its files; the EMA weights are the model, and the trained ones are stored beside them."""
    run, model = publications.trainer_run(tmp_path / "run", kind, prefix=prefix), tmp_path / "model"
    done = sedd("import", run / file, "--out", model, "--json")
    ok(done)
    record = json.loads(done.stdout)
    assert (record["layout"], record["weights"], record["vocab_size"]) == (kind.layout, "ema and model", V)
    for stem, seed in (("model", 0), ("ema", 1)):
        stored, expected = load_file(model / f"{stem}.safetensors"), publications.weights(kind, seed)
        assert stored.keys() == expected.keys()
        assert all(torch.equal(stored[name], value) for name, value in expected.items())
    assert json.loads((model / "state.json").read_text())["step"] == 7
    config = json.loads((model / "config.json").read_text())
    assert config["noise"]["process"] == ("uniform" if kind is UNIFORM else "absorbing")
    assert config["model"]["seq_len"] == 24
    ok(sedd("sample", model, "-n", 1, "--steps", 2, "--length", 6))


def test_a_checkpoint_of_the_original_training_code_needs_its_configuration(
    sedd: Sedd, tmp_path: Path, output: Path
) -> None:
    run = publications.trainer_run(tmp_path / "run", SEDD)
    shutil.copy(run / "checkpoints-meta" / "checkpoint.pth", tmp_path / "checkpoint.pth")
    refused(sedd("import", tmp_path / "checkpoint.pth", "--out", output), output, "no graph.type", ".hydra/config.yaml")
    (run / ".hydra" / "config.yaml").write_text("a: [1")
    refused(sedd("import", run, "--out", output), output, "config.yaml cannot be read")
    (tmp_path / "config.json").write_text(json.dumps(publications.config(SEDD)))
    ok(sedd("import", tmp_path / "checkpoint.pth", "--out", output))


def test_the_tokenizer_in_the_folder_of_a_checkpoint_is_used(sedd: Sedd, tmp_path: Path, corpus: Path) -> None:
    from sedd.tokenizer import Characters

    letters = Characters(alphabet="abcdefghijk")
    source = publications.folder(tmp_path / "source", SEDD)
    letters.save(tmp_path / "letters")
    ok(sedd("import", source, "--out", tmp_path / "given", "--tokenizer", tmp_path / "letters"))
    letters.save(source)
    ok(sedd("import", source / "model.safetensors", "--out", tmp_path / "beside"))
    for model in ("given", "beside"):
        done = sedd("infill", tmp_path / model, "ab{3}k", "--steps", 2)
        ok(done)
        text = done.stdout.strip()
        assert (text[:2], text[-1], len(text)) == ("ab", "k", 6)
    assert json.loads(sedd("info", tmp_path / "beside", "--json").stdout)["tokenizer"] == "chars"


def test_denoisers_without_time_conditioning_are_called_only_when_a_token_is_revealed(
    sedd: Sedd, tmp_path: Path
) -> None:
    """MDLM embeds σ = 0 at every step: most of 1000 steps reveal no token and need no network call."""
    for kind, at_most in ((MDLM, 6), (RADD, 6)):
        source, model = publications.folder(tmp_path / kind.layout, kind), tmp_path / f"{kind.layout}-model"
        ok(sedd("import", source, "--out", model))
        done = sedd("sample", model, "-n", 1, "--steps", 1000, "--length", 6, "--json")
        ok(done)
        assert json.loads(done.stdout)["calls"] <= at_most


# Refused checkpoints ---------------------------------------------------------------------------------------


class Payload:
    """Creates a folder when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return os.mkdir, (str(self.mark),)


def bare(content: object, path: Path) -> None:
    path.write_bytes(pickle.dumps(content, protocol=2))


def newer(content: object, path: Path) -> None:
    path.write_bytes(pickle.dumps(content))


def zipped(content: object, path: Path) -> None:
    torch.save(content, path)


def old(content: object, path: Path) -> None:
    torch.save(content, path, _use_new_zipfile_serialization=False)


@pytest.mark.parametrize("write", [bare, newer, zipped, old])
@pytest.mark.parametrize("where", ["in place of weights", "beside weights", "in a Lightning checkpoint", "as a weight"])
def test_a_malicious_pickle_is_refused_and_not_executed(
    sedd: Sedd, tmp_path: Path, output: Path, write: Callable[[object, Path], None], where: str
) -> None:
    mark = tmp_path / "mark"
    weights = publications.weights(MDLM)
    content, name = {
        "in place of weights": (Payload(mark), "pytorch_model.bin"),
        "beside weights": ({**weights, "more": Payload(mark)}, "pytorch_model.bin"),
        "in a Lightning checkpoint": ({"state_dict": weights, "callbacks": Payload(mark)}, "last.ckpt"),
        "as a weight": ({**weights, next(iter(weights)): Payload(mark)}, "pytorch_model.bin"),
    }[where]
    write(content, tmp_path / name)
    pickle.loads(pickle.dumps(Payload(mark)))
    assert mark.exists()  # the payload works
    mark.rmdir()
    done = sedd("import", tmp_path / name, "--out", output / "model")
    # newer pickle protocols are refused as a whole; in a bare pickle of tensors the first error precedes the payload
    named = write in (zipped, old) or (where == "in place of weights" and write is bare)
    refused(done, output, "contains posix.mkdir, which is code" if named else name)
    assert not mark.exists()
    assert "weights_only" not in done.stderr  # torch's advice to load it without the restriction


def test_objects_of_other_libraries_are_named_and_refused(
    sedd: Sedd, tmp_path: Path, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lightning checkpoints often hold their configuration as an OmegaConf object."""
    library = ModuleType("omegaconf")
    library.DictConfig = type("DictConfig", (dict,), {"__module__": "omegaconf"})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "omegaconf", library)
    settings = {"config": library.DictConfig(time_conditioning=False)}
    zipped({"state_dict": publications.weights(MDLM), "hyper_parameters": settings}, tmp_path / "last.ckpt")
    refused(sedd("import", tmp_path / "last.ckpt", "--out", output / "model"), output, "contains omegaconf.")


@pytest.mark.parametrize("form", ["safetensors", "pickle", "old pickle"])
@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (lambda w: w, "truncated"),
        (lambda w: w.fill_(torch.nan), "NaN or infinite"),
        (lambda w: w.long(), "int64"),
        (lambda w: w[1:].clone(), "(11, 32)"),
    ],
    ids=["truncated", "NaN", "integers", "shape"],
)
def test_damaged_checkpoints_are_refused(
    sedd: Sedd,
    tmp_path: Path,
    output: Path,
    form: str,
    damage: Callable[[torch.Tensor], torch.Tensor],
    sentence: str,
) -> None:
    """The unit tests cover all kinds of damage; here: exit code 2 and no output."""
    source = publications.folder(tmp_path / "source", SEDD, form)
    path = max(source.iterdir(), key=lambda file: file.stat().st_size)
    weights = publications.weights(SEDD)
    weights[HEAD] = damage(weights[HEAD])
    if sentence == "truncated":
        path.write_bytes(path.read_bytes()[:9999])
    elif form == "safetensors":
        save_file(weights, path)
    else:
        (zipped if form == "pickle" else old)(weights, path)
    refused(
        sedd("import", source, "--out", output / "model"), output, path.name if sentence == "truncated" else sentence
    )


def test_paths_and_options_are_checked(sedd: Sedd, tmp_path: Path, output: Path) -> None:
    source = publications.folder(tmp_path / "source", SEDD)
    model = tmp_path / "model"
    refused(sedd("import", tmp_path / "nothing", "--out", output / "model"), output, "does not exist")
    refused(sedd("import", output, "--out", output / "model"), output, "holds no weights")
    refused(sedd("import", source / "config.json", "--out", output / "model"), output, "'.json'")
    refused(sedd("import", source, "--tokenizer", "bytes", "--out", output / "model"), output, "256 tokens", "11")
    refused(sedd("import", source, "--tokenizer", "chars", "--out", output / "model"), output, "no texts to fit")
    model.mkdir()
    (model / "letter.txt").write_text("mine")
    for words in (["import", source], ["export", source]):
        done = sedd(*words, "--out", model)
        assert done.returncode == 2
        assert "choose another --out" in done.stderr
    assert [path.name for path in model.iterdir()] == ["letter.txt"]
    (model / "letter.txt").unlink()
    ok(sedd("import", source, "--out", model))  # an empty folder is accepted
    refused(sedd("export", model, "--format", "radd", "--out", output / "back"), output, "its format is sedd")
    refused(sedd("export", model, "--format", "gguf", "--out", output / "back"), output, "sedd, radd, mdlm")
    ok(sedd("info", source))  # safetensors are read directly


def test_a_failed_write_leaves_no_output(sedd: Sedd, tmp_path: Path, output: Path) -> None:
    source = publications.folder(tmp_path / "source", SEDD)
    before = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (20000, 20000)); "
    before += "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)"
    refused(sedd("import", source, "--out", output / "model", before=before), output, "could not be written")
    assert shutil.disk_usage(output).free > 0


def test_modern_networks_have_no_published_layout(sedd: Sedd, tmp_path: Path, output: Path, corpus: Path) -> None:
    small = ["--set", "model.width=16", "--set", "model.depth=1", "--set", "model.heads=2", "--set", "model.seq_len=16"]
    ok(sedd("train", corpus, "--out", tmp_path / "run", "--steps", 1, *small))
    refused(sedd("export", tmp_path / "run", "--out", output / "back"), output, "no published format has such models")
    reference = [*small, "--set", "model.architecture=reference", "--steps", 1]
    ok(sedd("train", corpus, "--out", tmp_path / "reference", *reference))
    ok(sedd("export", tmp_path / "reference", "--out", tmp_path / "back"))
    ok(sedd("import", tmp_path / "back", "--out", tmp_path / "again"))
    words = ["score", "the cat", "--draws", 4]
    first, second = (sedd(words[0], tmp_path / name, *words[1:]).stdout for name in ("reference", "again"))
    assert first == second != ""
