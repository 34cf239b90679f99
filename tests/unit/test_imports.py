"""Commands import what they need: ``--help`` no torch; and they reject mistakes before any work."""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from without_torch import check_refusals, run_commands

from sedd import registry
from sedd.cli.root import ORDER
from sedd.tokenizer import Bytes
from sedd.training import checkpoint, config
from sedd.training.config import RunConfig
from sedd.training.setup import build_network, build_setup

Imported = Callable[[str], set[str]]
LIST = "import sys; print(*sorted(name for name in sys.modules if name.split('.')[0] in ('sedd', 'torch')))"


FORKS = f"""
import json, os, sys, torch
for line in sys.stdin:
    if (child := os.fork()) == 0:
        try:
            exec(json.loads(line))
            {LIST}
        finally:
            sys.stdout.flush()
            os._exit(0)
    os.waitpid(child, 0)
    print("end", flush=True)
os._exit(0)
"""
"""Runs code in forks of a process that has imported torch and nothing else."""


@pytest.fixture(scope="module")
def imported() -> Iterator[Imported]:
    """Return the modules of sedd and torch that are loaded after code in a process with torch alone."""
    with subprocess.Popen([sys.executable, "-c", FORKS], stdin=-1, stdout=-1, text=True) as process:
        assert process.stdin
        assert process.stdout

        def run(code: str) -> set[str]:
            print(json.dumps(code), file=process.stdin, flush=True)
            lines = list(iter(process.stdout.readline, "end\n"))
            assert lines, "the code failed"
            return set(lines[-1].split())

        yield run
        process.stdin.close()


def test_help_does_not_load_torch() -> None:
    """Of no command."""
    commands = ["--help", *(f"{name} --help" for name in ORDER.split())]
    for command, (code, out, err) in zip(commands, run_commands(Path.cwd(), commands), strict=True):
        assert (code, err) == (0, ""), (command, err)
        assert "Usage" in out


def test_a_loaded_model_imports_no_kernels_and_no_training(imported: Imported) -> None:
    found = imported("from sedd import loading")
    assert not {name for name in found if name.startswith("sedd.ops.") and name.endswith("_triton")}
    assert not {"sedd.training.loop", "sedd.training.trainer", "sedd.training.optimizer"} & found


def test_training_imports_no_compiler_and_no_sharding(imported: Imported) -> None:
    """Each takes a second; torch's optimizers import the compiler when the first of them is made."""
    assert not {"torch._dynamo", "torch.distributed.tensor", "torch.distributed.fsdp"} & imported(
        "import sedd.training.loop"
    )


def test_every_built_in_name_can_be_imported() -> None:
    for names in (value for module in (config, registry) for value in vars(module).values()):
        if isinstance(names, registry.Registry):
            for name in names.built_in:
                assert callable(names.load(name))


EARLY_REFUSALS = [
    ("train book.txt --objective scor-entropy", "objective is 'scor-entropy'; choose one of score-entropy"),
    ("train book.txt --objective explicit-score-entropy", "needs the probability of every sequence"),
    ("train book.txt --objective implicit-score-entropy", "length × vocabulary calls"),
    ("train book.txt --process foggy", "noise.process is 'foggy'"),
    ("train book.txt --recipe huge", "recipe is 'huge'"),
    ("train book.txt --set optim.learning=1", "learning"),
    ("train book.txt --objective ratio-matching --set model.ngrams=2", "model.ngrams is 2"),
    ("train book.txt --objective softmax-linear", "minimum is not at the ratios"),
    ("train book.txt --set noise.schedule=cosin", "noise.schedule is 'cosin'; choose one of log-linear"),
    ("train book.txt --recipe tiny --set model.width=30", "model.width 30 is not a multiple of model.heads"),
    ("train book.txt --out model", "model holds a run already; add --resume"),
    ("push model owner/name --out model", "model exists and is not an empty folder"),
    ("train book.txt --out book.txt --recipe tiny", "book.txt cannot be written to"),
    ("train", "no data was given"),
    ("train none.txt", "none.txt does not exist"),
    ("train empty.txt", "empty.txt holds no text"),
    ("train book.txt --tokenizer klingon", "tokenizer is 'klingon'; choose one of bytes"),
    ("train table.csv --packing lines --label kinds", "label is 'kinds'; table.csv has the columns text, kind"),
    ("train table.csv --column words", "column is 'words'; table.csv has text, kind"),
    ("plan none.txt", "none.txt does not exist"),
    ("sample nowhere", "nowhere holds no model: it does not exist"),
    ("sample model --sampler tweedy", "sampler is 'tweedy'; choose one of first-hitting"),
    ("sample model --grid lin", "grid is 'lin'; choose one of uniform, cosine"),
    ("sample model --precision half", "precision is 'half'; choose one of float32, bfloat16"),
    ("sample model --seed -1", "seed is -1"),
    ("sample model --batch 0", "batch is 0"),
    ("infill model --file none.txt", "none.txt could not be read"),
    ("trace model --out x.gif", "it must end in .html or .png"),
    ("info nowhere", "nowhere holds no model: it does not exist"),
    ("push model name", "'name' is not the name of a repository"),
    ("export model --out model", "model exists and is not an empty folder"),
    ("export model --out new --format onnx", "format is 'onnx'; choose one of sedd, radd, mdlm"),
    ("import nowhere --out new", "nowhere does not exist"),
]
"""Mistakes that are rejected without torch, and part of the message."""
REFUSALS = [
    ("eval model book.txt --batch 0", "batch is 0"),
    ("score model text --seed -1", "seed is -1"),
    ("eval model book.txt --dataset ptb", "dataset is 'ptb'; protocol strict takes any text as it is"),
    ("sample model --sampler remask --option ete=1", "sampler remask has no option ete; it takes strategy, eta"),
    ("sample model --label dog", "label is 'dog'; this model has cat"),
    ("sample model --length 999", "length is 999; this model generates 1 to 256 tokens"),
    ("infill model cat", "the template 'cat' has no gap"),
    ("trace model {x}", "a gap is a number of tokens in braces"),
    ("eval model none.txt", "none.txt does not exist"),
    ("eval model book.txt --protocol paper", "protocol is 'paper'; choose one of strict"),
    ("eval model book.txt --estimator guess", "estimator is 'guess'; choose one of bound"),
    ("eval model book.txt --orders 2", "orders is for a time-free denoiser under absorbing noise"),
    ("eval model book.txt --orders few", "orders is 'few'; give a number of 1 or more, or all"),
    ("eval model book.txt --draws 3", "draws is 3; they come in pairs"),
    ("eval model . --suite all", "suite is 'all'; choose one of zero-shot"),
    ("eval model book.txt --label dog", "label is 'dog'; this model has cat"),
    ("eval model --protocol strict", "protocol strict needs data"),
    ("eval model book.txt --dataset ptb --dataset lm1b", "name one for a file, several only with --suite"),
    ("eval model . --suite zero-shot --protocol sedd", ". holds no LAMBADA (test)"),
    ("score model", "no text was given"),
    ("score model cat --label dog", "label is 'dog'; this model has cat"),
    ("compare nowhere", "nowhere holds no log.jsonl"),
    ("compare model --plot x.gif", "must end in .png or .html"),
    ("compare model --draws 3", "draws is 3; they come in pairs"),
    ("compare model --protocol strict", "protocol strict needs data"),
    ("report nowhere", "nowhere holds no log.jsonl"),
    ("report model --samples -1", "samples is -1"),
    ("quality nowhere", "nowhere holds no model: it does not exist"),
    ("quality model", "samples need a judge"),
    ("quality model --judge ar --sweep step=1", "sweep is 'step=1'; choose one of sampler, steps"),
    ("quality model --judge ar --first-token none", "first-token is 'none'; choose one of skipped, scored"),
    ("quality model --judge ar -n 0", "count is 0"),
    ("quality model --judge ar --batch 0", "batch is 0"),
    ("quality model --judge ar --known book.txt", "there are no molecules to compare with it"),
    ("quality model model --judge ar --save new.jsonl", "save takes the samples of one run"),
    ("quality model --molecules --out new.png", "the plot shows generative perplexity, which needs --judge"),
    ("audit entropy", "loss is 'entropy'; name a function as FILE.py:FUNCTION"),
]
"""Mistakes that are rejected before any work, and part of the message."""


def write_model(folder: Path, objective: str = "score-entropy") -> None:
    """Write a run with one checkpoint of a model with a label."""
    saved = folder / "checkpoints" / "step-00000001"
    saved.mkdir(parents=True)
    model = {"parameterization": None, "width": 32, "depth": 1, "heads": 2}
    config = RunConfig.from_dict({"objective": objective, "model": model}).resolved()
    stored = {**config.as_dict(), "vocab_size": 256, "labels": ["cat"]}
    (saved / "config.json").write_text(json.dumps(stored))
    (saved / "state.json").write_text(json.dumps({"step": 1, "tokens": 2, "seconds": 1.0, "best": 0.5, "best_step": 1}))
    Bytes().save(saved)
    weights = build_network(config, build_setup(config, vocab_size=256), labels=1).state_dict()
    for stem in ("ema", "model", "optimizer"):
        checkpoint.write_tensors(saved / f"{stem}.safetensors", weights)
    checkpoint._write_manifest(saved, [path.name for path in saved.iterdir()])
    (folder / "config.json").write_text(json.dumps(config.as_dict()))
    (folder / "log.jsonl").write_text('{"step": 1, "tokens": 2, "bound": 0.5, "bound_stderr": 0.1}\n')


def test_mistakes_are_rejected_before_any_work(tmp_path: Path) -> None:
    write_model(tmp_path / "model")
    (tmp_path / "book.txt").write_text("one two buckle my shoe")
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "table.csv").write_text("text,kind\na cat,cat\n")
    check_refusals(tmp_path, EARLY_REFUSALS)
    check_refusals(tmp_path, REFUSALS, with_torch=True)


EARLY_FIRST_LINES = [
    ("serve model --port 0 --slots 3", "loading model for http://127.0.0.1:PORT, 3 texts at a time"),
    ("import owner/name --out new", "owner/name: published weights, to new"),
    ("export model --out new", "model: weights in a published format, to new"),
    ("export model --out new --format radd", "model: weights in the format radd, to new"),
    ("push model owner/name", "model: 0 results for its card, to owner/name on the Hub"),
    ("push model owner/name --out new", "model: 0 results for its card, to new"),
    ("sample owner/name", "owner/name: on the Hugging Face Hub, or in its cache"),
    (
        "train book.txt --recipe tiny --steps 7 --out run",
        "recipe tiny: 4 blocks of width 128, 32 sequences of 128 tokens per step, tokenizer bytes, float32, 7 steps",
    ),
    ("train book.txt --out run", "book.txt: the network is chosen for this machine, the data and the budget"),
    ("plan book.txt", "book.txt: the network is chosen for this machine, the data and the budget"),
]
"""What commands print on stderr before they import torch."""
FIRST_LINES = [
    ("sample model -n 1 --steps 4 --seed 3", "model: 1 sample of 256 tokens, steps 4, seed 3"),
    (
        "sample model --sampler theta --steps 3 --temperature 0.6 --label cat --option theta=0.4 --length 9",
        "model: 4 samples of 9 tokens, steps 3, seed 0, sampler theta, temperature 0.6, label cat, theta 0.4",
    ),
    ("sample causal --length 3", "causal: 4 samples of 3 tokens, seed 0"),
    ("infill mixture 'a {3}' --steps inf", "mixture: 1 template, steps inf, seed 0"),
    ("trace model 'a {3}' '{2} b' -n 5 --steps 2", "model: 2 templates, 5 samples each, steps 2, seed 0"),
    ("eval model book.txt", "model: book.txt, protocol strict, seed 0"),
    (
        "eval model book.txt --draws 2 --seed 5 --estimator bound",
        "model: book.txt, protocol strict, estimator bound, draws 2, seed 5",
    ),
    ("eval mixture --samples 2 --orders 3", "mixture: 2 samples of its own, orders 3, seed 0"),
    ("score model 'a b' c --draws 2", "model: 2 texts, draws 2, seed 0"),
    ("quality model --molecules -n 1 --steps 2", "model, count 1"),
    ("compare model --data book.txt --draws 2", "model: book.txt, protocol strict, draws 2, seed 0"),
    ("report model --samples 0", "model: 1 record of its log, 0 samples, to model/report.html"),
    ("export model --out small --dtype int8", "model: weights in int8, to small"),
]
"""What commands print first on stderr, at the latest once they have read the model."""


def test_commands_state_first_what_they_do(tmp_path: Path) -> None:
    """Of several processes the first prints it."""
    write_model(tmp_path / "model")
    write_model(tmp_path / "causal", objective="autoregressive")
    write_model(tmp_path / "mixture", objective="lambda-dce")
    (tmp_path / "book.txt").write_text("one two buckle my shoe")
    found = run_commands(tmp_path, [command for command, _ in EARLY_FIRST_LINES])
    for (command, line), (error, out, err) in zip(EARLY_FIRST_LINES, found, strict=True):
        assert (error, out) == ("ModuleNotFoundError('import of torch halted; None in sys.modules')", ""), command
        assert re.sub(r"(127\.0\.0\.1):\d+", r"\1:PORT", err) == f"sedd: {line}\n", command
    found = run_commands(tmp_path, [command for command, _ in FIRST_LINES], with_torch=True)
    for (command, line), (code, _, err) in zip(FIRST_LINES, found, strict=True):
        assert code == 0, (command, err)
        assert err.splitlines()[0] == f"sedd: {line}", command
    commands = [command for command, _ in EARLY_FIRST_LINES if not command.startswith("serve")]
    for command, (_, _, err) in zip(commands, run_commands(tmp_path, commands, RANK="1"), strict=True):
        assert err == "", command


def test_models_in_the_box_are_known_by_their_names(tmp_path: Path) -> None:
    write_model(tmp_path / "run")
    shutil.copytree(tmp_path / "run/checkpoints/step-00000001", tmp_path / "stories")
    commands = ["sample --steps 1 -n 1", "sample stories --steps 1 -n 1"]
    found = run_commands(tmp_path, commands, with_torch=True, SEDD_MODELS=str(tmp_path))
    line = "sedd: stories: 1 sample of 256 tokens, steps 1, seed 0"
    assert found[0][2].splitlines()[:2] == ["sedd: no model was named; using stories", line]
    assert found[1][2].splitlines()[0] == line


def test_info_reads_a_model(tmp_path: Path) -> None:
    write_model(tmp_path / "model")
    (_, out, err), (code, shown, _) = run_commands(tmp_path, ["info model --json", "info model"], with_torch=True)
    found = json.loads(out)
    assert (found["vocab_size"], found["labels"]) == (256, "cat"), err
    assert (found["bound"], found["best_bound"], found["best_bound_step"]) == (0.5, 0.5, 1)
    assert code == 0
    assert "0.5000 nats per token at step 1" in shown


def test_loading_a_model_imports_no_distributed_checkpoints(imported: Imported) -> None:
    """`torch.distributed.checkpoint` takes a second; training imports it when it saves."""
    found = imported("import sedd\nsedd.load")
    assert "sedd.model" in found
    assert not {name for name in found if name.startswith(("torch.distributed.checkpoint", "torch._dynamo"))}
