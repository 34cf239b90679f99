"""Commands import what they need: ``--help`` no torch, ``info`` neither kernels nor training, a sampler no other."""

import subprocess
import sys
from pathlib import Path

import pytest

from sedd import registry

LIST = "import sys; print(*sorted(name for name in sys.modules if name.split('.')[0] in ('sedd', 'torch')))"


def imported(code: str) -> set[str]:
    """The modules of sedd and torch that are loaded after ``code`` in a new process."""
    done = subprocess.run([sys.executable, "-c", f"{code}\n{LIST}"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.splitlines()[-1].split())


def test_help_does_not_load_torch() -> None:
    """Neither do the settings of samplers nor the names of the registry, which help texts show."""
    code = (
        "import contextlib, io, sys\n"
        "from sedd import cli\n"
        "for words in (['--help'], ['sample', '--help'], ['train', '--help'], ['quality', '--help']):\n"
        "    with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):\n"
        "        cli.app(words)\n"
    )
    assert "torch" not in imported(code)


def test_a_loaded_model_imports_no_kernels_and_no_training() -> None:
    """What ``sedd info`` imports: the factory and the classes of one model."""
    found = imported("from sedd import checkpoint, factory\nfactory.build_process('absorbing', 5)")
    assert not {name for name in found if name.startswith("sedd.ops.") and name.endswith("_triton")}
    assert not {name for name in found if name.startswith(("sedd.training", "sedd.sampling.", "sedd.likelihood"))}


def test_training_imports_no_compiler_and_no_sharding() -> None:
    """Each takes a second; torch's optimizers import the compiler when the first of them is made."""
    assert not {"torch._dynamo", "torch.distributed.tensor", "torch.distributed.fsdp"} & imported(
        "import sedd.training.loop"
    )


def test_a_sampler_imports_no_other() -> None:
    found = imported("from sedd import registry\nregistry.SAMPLERS.load('tweedie')")
    others = {path.partition(":")[0] for path in registry.SAMPLERS.built_in.values()} - {"sedd.sampling.grid"}
    assert not others & found


def test_every_built_in_name_can_be_imported() -> None:
    for names in vars(registry).values():
        if isinstance(names, registry.Registry):
            for name in names.built_in:
                assert callable(names.load(name))


@pytest.mark.parametrize(
    ("words", "sentences"),
    [
        (["--objective", "scor-entropy"], ["objective is 'scor-entropy'", "choose one of score-entropy"]),
        (["--objective", "explicit-score-entropy"], ["small enough to enumerate", "the probability of every sequence"]),
        (["--objective", "implicit-score-entropy"], ["length × vocabulary calls"]),
        (["--process", "foggy"], ["noise.process is 'foggy'"]),
        (["--recipe", "huge"], ["recipe is 'huge'"]),
        (["--set", "optim.learning=1"], ["learning"]),
        (["--objective", "ratio-matching", "--set", "model.ngrams=2"], ["model.ngrams is 2", "does not see the token"]),
        (["--out", "old"], ["old holds a run already", "--resume"]),
    ],
    ids=lambda value: " ".join(value),
)
def test_train_refuses_before_torch_is_imported(tmp_path: Path, words: list[str], sentences: list[str]) -> None:
    (tmp_path / "old" / "checkpoints" / "step-1").mkdir(parents=True)
    (tmp_path / "book.txt").write_text("one two buckle my shoe")
    command = ["train", "book.txt", *([] if "--recipe" in words else ["--recipe", "tiny"]), *words]
    code = (
        f"import sys; sys.modules['torch'] = None; sys.argv = ['sedd', *{command!r}]; from sedd import cli; cli.main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *command], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    for sentence in sentences:
        assert sentence in " ".join(done.stderr.split())
