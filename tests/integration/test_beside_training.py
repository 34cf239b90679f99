"""Commands beside a training run, which saves checkpoints and removes older ones while they are loaded and used."""

import json
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import boxed
import pytest
import torch
from runs import Sedd, ok

from sedd import files
from sedd.loading import load_model
from sedd.training import checkpoint

AT_THE_FIRST_NETWORK_CALL = """
import shutil
from pathlib import Path
from sedd.nn.transformer import Transformer
hidden = Transformer.hidden

def once(*given, **options):
    Transformer.hidden = hidden
    {action}
    return hidden(*given, **options)

Transformer.hidden = once
"""
WHILE_LOADING = """
import shutil
from pathlib import Path
from sedd.training import checkpoint
root = Path({root!r})
old, later = root / "step-00000001", root.with_name("step-00000002")
shutil.copytree(old, later)

def prune(name, arguments):
    if name == "open" and str(arguments[0]).endswith("step-00000001/{file}") and later.exists():
        later.rename(root / later.name)
        checkpoint.prune(root, 1, None)

sys.addaudithook(prune)
"""


@pytest.fixture
def run(words_run: Path, tmp_path: Path) -> Path:
    """A run with a checkpoint of its first step."""
    return shutil.copytree(words_run, tmp_path / "run")


@pytest.fixture
def text(corpus: Path, tmp_path: Path) -> Path:
    path = tmp_path / "test.txt"
    path.write_text(corpus.read_text()[:200])
    return path


def words(command: str, run: Path, text: Path) -> list[object]:
    """Return a command that computes something of the run and prints it as JSON."""
    return {
        "eval": ["eval", run, "--draws", 2],
        "eval text": ["eval", run, text, "--draws", 2],
        "score": ["score", run, "the cat", "a mat", "--draws", 2],
        "compare": ["compare", run, run, "--draws", 2, "--plot", text.with_suffix(".png")],
        "quality": ["quality", run, "--molecules", "-n", 2, "--steps", 4],
        "info": ["info", run],
    }[command] + ["--json"]


def results(output: str) -> list[dict[str, object]]:
    records = map(json.loads, output.splitlines())
    return [{name: value for name, value in record.items() if "seconds" not in name} for record in records]


@pytest.mark.parametrize("command", ["eval", "eval text", "score", "compare", "quality"])
@pytest.mark.parametrize("action", ["remove", "replace"])
def test_a_result_is_of_the_weights_that_were_loaded(
    sedd: Sedd, run: Path, text: Path, command: str, action: str
) -> None:
    """Nothing of a checkpoint is read after it was loaded: neither its weights nor anything else."""
    weights = run / "checkpoints/step-00000001/ema.safetensors"
    undisturbed = sedd(*words(command, run, text))
    ok(undisturbed)
    sha256 = files.sha256(weights)
    other = f"Path({str(weights)!r} + 'x').write_bytes(b'other'); Path({str(weights)!r} + 'x').rename({str(weights)!r})"
    code = f"shutil.rmtree({str(run / 'checkpoints')!r})" if action == "remove" else other
    disturbed = sedd(*words(command, run, text), before=AT_THE_FIRST_NETWORK_CALL.format(action=code))
    ok(disturbed)
    assert not weights.exists() or weights.read_bytes() == b"other"
    assert results(disturbed.stdout) == results(undisturbed.stdout)
    assert {record["model_sha256"] for record in results(disturbed.stdout)} == {sha256}


@pytest.mark.parametrize("command", ["eval", "score", "compare", "info"])
def test_a_run_whose_checkpoint_is_pruned_while_it_loads_has_a_newer_one(
    sedd: Sedd, run: Path, text: Path, command: str
) -> None:
    root = run / "checkpoints"
    file = "state.json" if command in ("compare", "info") else "ema.safetensors"
    done = sedd(*words(command, run, text), before=WHILE_LOADING.format(root=str(root), file=file))
    ok(done)
    assert [path.name for path in root.iterdir()] == ["step-00000002"]
    assert "step-00000002" in done.stdout or command == "compare"
    assert "damaged" not in done.stderr


def test_a_digest_is_of_the_file_that_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Although its name is given to another file between hashing and loading."""
    one, two = (boxed.write_model(tmp_path / name, seed) for seed, name in enumerate(("one", "two")))
    weights, sha256 = checkpoint.load_tensors(one, "ema"), files.sha256(one / "ema.safetensors")
    load_tensors = checkpoint.load_tensors

    def replace(*arguments: Any) -> dict[str, torch.Tensor]:
        (two / "ema.safetensors").rename(one / "ema.safetensors")
        return load_tensors(*arguments)

    monkeypatch.setattr(checkpoint, "load_tensors", replace)
    loaded = load_model(one)
    assert loaded.sha256 == sha256
    assert all(torch.equal(value, weights[name]) for name, value in loaded.network.state_dict().items())


def checkpoint_of_step(root: Path, step: int) -> Path:
    model = boxed.write_model(root.parent / f"model-{step}", seed=step)
    weights = checkpoint.load_tensors(model, "ema")
    records = {stem: checkpoint.load_json(model, stem) for stem in ("config", "state")}
    tokenizer = {path.name: path.read_bytes() for path in model.glob("tokenizer*")}
    tensors = {"ema": weights, "model": weights, "optimizer": {}}
    return checkpoint.save(root, checkpoint.step_name(step), tensors, records, tokenizer)


hooks: list[Callable[[str], None]] = []


@pytest.fixture
def at_open() -> Iterator[list[Callable[[str], None]]]:
    """Functions that are called with the path of every file that is about to be opened."""
    yield hooks
    hooks.clear()


def _call_hooks(name: str, arguments: tuple[object, ...]) -> None:
    if name == "open" and hooks:
        hooks[0](str(arguments[0]))


sys.addaudithook(_call_hooks)


def test_a_checkpoint_may_be_pruned_at_any_moment_of_loading(
    tmp_path: Path, at_open: list[Callable[[str], None]], capsys: pytest.CaptureFixture[str]
) -> None:
    """Before any of its files is opened; the digest is always that of the weights."""
    made = [checkpoint_of_step(tmp_path / "checkpoints", step) for step in (1, 2)]
    for moment in range(50):
        run = tmp_path / f"run-{moment}"
        root = run / "checkpoints"
        old, later = (
            shutil.copytree(source, run / place / source.name)
            for source, place in zip(made, ("checkpoints", "later"), strict=True)
        )
        opened = 0

        def prune(path: str, moment: int = moment, root: Path = root, later: Path = later) -> None:
            nonlocal opened
            if "/checkpoints/step-" in path:
                opened += 1
                if opened == moment + 1:
                    later.rename(root / later.name)
                    checkpoint.prune(root, 1, None)

        at_open.append(prune)
        loaded = load_model(run)
        at_open.clear()
        if opened <= moment:
            break
        assert loaded.folder != old or opened == moment + 1  # its last file had been opened
        source = made[loaded.folder != old]
        assert loaded.sha256 == files.sha256(source / "ema.safetensors")
        weights = checkpoint.load_tensors(source, "ema")
        assert all(torch.equal(value, weights[name]) for name, value in loaded.network.state_dict().items())
    assert moment > 8  # every file of a checkpoint is opened at least once
    assert "damaged" not in capsys.readouterr().err
