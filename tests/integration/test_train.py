"""A run is a function of its configuration, however often resumed and on any number of processes."""

import json
import os
import signal
from pathlib import Path

import numpy as np
import pytest
from runs import SMALL, Sedd, log, ok
from safetensors.torch import load_file

from sedd.data import block_order
from sedd.evaluation import compare
from sedd.training import checkpoint


@pytest.mark.parametrize(
    ("fsdp", "architecture", "optimizer"),
    [
        (False, "modern", "adamw"),
        pytest.param(True, "modern", "adamw", marks=pytest.mark.verify),
        (True, "reference", "muon"),
    ],
    ids=["DDP", "FSDP2", "FSDP2, reference, Muon"],
)
def test_two_processes_compute_what_one_does(
    sedd: Sedd, corpus: Path, tmp_path: Path, fsdp: bool, architecture: str, optimizer: str
) -> None:
    words = ["train", corpus, *SMALL, "--steps", 12, "--save-every", 6, "--set", "train.sample_every=9"]
    words += ["--set", f"model.architecture={architecture}", "--set", f"optim.name={optimizer}"]
    one, two = tmp_path / "one", tmp_path / "two"
    ok(sedd(*words, "--out", one))
    ok(sedd(*words, "--out", two, *(["--fsdp"] if fsdp else []), processes=2))
    for a, b in zip(log(one), log(two), strict=True):
        assert a["step"] == b["step"]
        for key in ("loss", "bound", "grad_norm"):
            if key in a:
                assert abs(a[key] - b[key]) <= 1e-5 * max(1, abs(a[key])), (a["step"], key)


@pytest.mark.verify
def test_resume_at_another_number_of_processes(sedd: Sedd, corpus: Path, tmp_path: Path) -> None:
    words = ["train", corpus, *SMALL, "--save-every", 4]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    ok(sedd(*words, "--out", whole, "--steps", 12, "--set", "optim.lr_schedule=constant"))
    ok(sedd(*words, "--out", parts, "--steps", 4, "--set", "optim.lr_schedule=constant", "--fsdp", processes=2))
    ok(sedd(*words, "--out", parts, "--steps", 8, "--resume", "--no-fsdp"))
    ok(sedd(*words, "--out", parts, "--steps", 12, "--resume", processes=2))
    for a, b in zip(log(whole), log(parts), strict=True):
        assert abs(a["loss"] - b["loss"]) <= 1e-5 * max(1, abs(a["loss"])), a["step"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_finishes_the_step_and_saves(sedd: Sedd, corpus: Path, tmp_path: Path, number: int) -> None:
    """It comes while the first step is logged."""
    run, before = tmp_path / "run", f"kill_at('open', 'log.jsonl', number={int(number)})"
    done = sedd("train", corpus, *SMALL, "--out", run, "--steps", 100_000, before=before)
    assert done.returncode == 128 + number
    assert "saved; continue with --resume" in done.stderr
    assert "Traceback" not in done.stderr
    (newest,) = checkpoint.list_checkpoints(run / "checkpoints")[:1]
    assert checkpoint.corruption(newest) is None


def test_common_keys_have_flags(sedd: Sedd, tmp_path: Path) -> None:
    (tmp_path / "table.csv").write_text("left,right\n" + "one two buckle my shoe,0\n" * 40)
    flags = ["--column", "left", "--seq-len", 12, "--batch-size", 6, "--lr", 3e-4, "--encoding", "ascii"]
    tiny = ["--recipe", "tiny", "--set", "model.width=32", "--set", "train.eval_sequences=4"]
    ok(sedd("train", tmp_path / "table.csv", *tiny, "--out", tmp_path / "run", "--steps", 1, *flags))
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    found = config["model"]["seq_len"], config["train"]["batch_size"], config["optim"]["lr"]
    assert found == (12, 6, 3e-4)
    assert (config["data"]["column"], config["data"]["encoding"]) == ("left", "ascii")


@pytest.mark.parametrize("policy", ["stop", "skip"])
def test_a_loss_that_is_not_finite(sedd: Sedd, corpus: Path, tmp_path: Path, policy: str) -> None:
    """With a learning rate at which weights diverge; the saved weights are those from before the step."""
    run = tmp_path / "run"
    words = [
        "--set",
        "optim.lr=1e30",
        "--set",
        "optim.warmup_steps=0",
        "--on-nonfinite",
        policy,
        "--set",
        "train.max_skips=2",
    ]
    done = sedd("train", corpus, *SMALL, "--out", run, "--steps", 20, *words)
    assert done.returncode == 1
    assert "not finite" in done.stderr
    assert "Traceback" not in done.stderr
    assert len(list((run / "nonfinite").glob("*.safetensors"))) == (1 if policy == "stop" else 3)
    batch = load_file(next((run / "nonfinite").iterdir()))
    assert set(batch) == {"x_0", "x_t", "t", "weight", "valid", "label", "loss_count", "tokens"}
    (newest,) = checkpoint.list_checkpoints(run / "checkpoints")[:1]
    assert all(value.isfinite().all() for value in load_file(newest / "model.safetensors").values())


def test_info_and_plan(sedd: Sedd, corpus: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    done = sedd("train", corpus, *SMALL, "--out", run, "--steps", 3, "--json")
    ok(done)
    assert json.loads(done.stdout)["step"] == 3
    assert "100%" in done.stderr
    info = json.loads(sedd("info", run, "--json").stdout)
    assert info["step"] == 3
    assert info["vocab_size"] == 256
    assert info["best_bound"] == info["bound"] == json.loads(done.stdout)["bound"]
    shown = sedd("info", run).stdout
    assert "parameters" in shown
    assert f"{info['bound']:.4f} nats per token at step 3" in shown
    planned = sedd("plan", corpus, *SMALL, "--steps", 1000, "--json")
    ok(planned)
    found = json.loads(planned.stdout)
    assert found["parameters"] == info["parameters"]
    assert found["tokens_per_second"] > 0
    assert found["minutes_to_finish"] > 0
    missing = sedd("info", tmp_path)
    assert missing.returncode == 2
    assert "holds no model" in missing.stderr


def test_the_last_bound_is_kept(sedd: Sedd, corpus: Path, tmp_path: Path) -> None:
    """The bound that train prints is in the log, counted for the best, and shown by info, report and compare."""
    run = tmp_path / "run"
    words = ["train", corpus, *SMALL, "--out", run, "--set", "train.log_every=4", "--set", "optim.ema_decay=0"]
    printed = json.loads(sedd(*words, "--steps", 7, "--json").stdout)
    bounds = {record["step"]: record["bound"] for record in log(run) if "bound" in record}
    assert list(bounds) == [5, 7]
    assert bounds[7] == printed["bound"] < bounds[5]
    state = checkpoint.load_json(run / "checkpoints" / "step-00000007", "state")
    assert (state["best"], state["best_step"]) == (printed["bound"], 7)
    info = json.loads(sedd("info", run, "--json").stdout)
    assert (info["bound"], info["bound_step"]) == (info["best_bound"], info["best_bound_step"]) == (bounds[7], 7)
    ok(sedd("report", run, "--samples", 0))
    page = (run / "report.html").read_text()
    assert f"{bounds[7]:.4f} ±" in page
    assert f"{printed['bound_bits_per_char']:.4f}" in page
    curve = compare.read_curve(run)
    assert curve.bits[-1] == printed["bound_bits_per_char"]
    assert "loss" in log(run)[-1]

    before = (run / "log.jsonl").read_text()
    again = sedd("train", "--out", run, "--resume", "--json")
    assert json.loads(again.stdout)["bound"] == printed["bound"]
    assert (run / "log.jsonl").read_text() == before
    (run / "log.jsonl").write_text("".join(line for line in before.splitlines(True) if '"bound"' not in line))
    ok(sedd("train", "--out", run, "--resume"))  # the log of a run that a signal stopped at its last step
    assert [record["bound"] for record in log(run) if "bound" in record] == [bounds[7]]


@pytest.mark.parametrize("objective", ["autoregressive", "d3pm", "any-order", "concrete-score", "mean"])
def test_every_kind_of_model_trains(sedd: Sedd, corpus: Path, tmp_path: Path, objective: str) -> None:
    run = tmp_path / "run"
    ok(
        sedd(
            "train",
            corpus,
            *SMALL,
            "--out",
            run,
            "--steps",
            6,
            "--objective",
            objective,
            "--set",
            "train.sample_every=3",
        )
    )
    assert all(isinstance(record["loss"], float) for record in log(run))


def test_float8_trains_and_samples_in_float32(sedd: Sedd, corpus: Path, tmp_path: Path) -> None:
    """It runs on a CPU too, if slowly; widths that are not multiples of 16 are refused."""
    run = tmp_path / "run"
    float8 = ("--set", "train.precision=float8")
    ok(sedd("train", corpus, *SMALL, "--out", run, "--steps", 3, *float8))
    assert all(isinstance(record["loss"], float) for record in log(run))
    ok(sedd("sample", run, "--count", 1, "--steps", 2))
    odd = sedd("train", corpus, *SMALL, "--out", tmp_path / "odd", "--steps", 3, *float8, "--set", "model.width=24")
    assert odd.returncode == 2
    assert "multiple of 16, and it is 24; use bfloat16" in odd.stderr


DATA = Path(os.environ.get("SEDD_TEST_DATA", Path(__file__).parents[3] / "shared" / "data")) / "domains"


@pytest.mark.skipif(not DATA.is_dir(), reason="needs the corpora that SEDD_TEST_DATA names")
@pytest.mark.parametrize(
    ("name", "flags"),
    [
        ("tinyshakespeare.txt.xz", []),
        ("dna-encode-test.txt.xz", ["--tokenizer", "chars"]),
        ("moses-test.csv.gz", ["--tokenizer", "chars"]),
    ],
)
def test_text_dna_and_molecules(sedd: Sedd, tmp_path: Path, name: str, flags: list[str]) -> None:
    done = sedd("train", DATA / name, *SMALL, "--out", tmp_path / "run", "--steps", 3, *flags)
    ok(done)
    assert "bits per character" in done.stdout


@pytest.mark.parametrize("pad", ["model", "ignore"])
@pytest.mark.parametrize("process", ["absorbing", "uniform"])
def test_records_of_several_lengths(sedd: Sedd, tmp_path: Path, pad: str, process: str) -> None:
    """Padding counts as a token if the model learns it, and nowhere if it is ignored."""
    records = ["abcdefgh"[: 1 + i % 7] for i in range(200)]
    (tmp_path / "records.txt").write_text("\n".join(records))
    words = [
        "--set",
        "data.packing=lines",
        "--set",
        f"data.pad={pad}",
        "--set",
        "model.seq_len=8",
        "--process",
        process,
    ]
    done = sedd("train", tmp_path / "records.txt", *SMALL, *words, "--out", tmp_path / "run", "--steps", 10, "--json")
    ok(done)
    found = json.loads(done.stdout)
    lengths = [len(records[i]) for i in block_order(0, 0, 80, 190).tolist()]  # 190 are for training
    assert found["tokens"] == (sum(lengths) if pad == "ignore" else 80 * 8)
    assert [record["step"] for record in log(tmp_path / "run") if "bound" in record] == [5, 10]
    vocabulary = {"ignore": 256, "model": 257}[pad]
    # to an untrained network all tokens are equally likely: log N per token, up to the random times
    assert found["bound"] == pytest.approx(np.log(vocabulary), rel=0.5)
    evaluated = [records[190 + i % 10] for i in range(16)]  # SMALL evaluates 16 of the 10 that are held out
    characters = sum(map(len, evaluated)) / (16 * 8 if pad == "model" else sum(map(len, evaluated)))
    assert found["bound_bits_per_char"] == pytest.approx(found["bound"] / np.log(2) / characters)


def test_a_run_from_before_an_option_existed_resumes(sedd: Sedd, corpus: Path, tmp_path: Path) -> None:
    """An option that a stored configuration lacks has its default value."""
    run = tmp_path / "run"
    ok(sedd("train", corpus, "--out", run, "--steps", 1, *SMALL))
    folder = run / "checkpoints" / "step-00000001"
    for place in (run, folder):
        stored = checkpoint.load_json(place, "config")
        del stored["model"]["time_conditioning"]
        checkpoint.write_json(place / "config.json", stored)
    (folder / "manifest.json").unlink()
    checkpoint._write_manifest(folder, [path.name for path in folder.iterdir()])
    ok(sedd("train", "--out", run, "--steps", 2, "--resume"))
    refused = sedd("train", "--out", run, "--steps", 3, "--resume", "--set", "model.time_conditioning=zero")
    assert refused.returncode == 2
    assert "resume with --set model.time_conditioning=null" in refused.stderr


def test_not_every_best_validation_is_saved(sedd: Sedd, corpus: Path, tmp_path: Path) -> None:
    """Twice per ``save_every`` at most, however often the run is validated; the end is saved."""
    words = ["--set", "train.eval_every=1", "--set", "train.keep_checkpoints=99", "--save-every", 6, "--steps", 11]
    ok(sedd("train", corpus, *SMALL, *words, "--out", tmp_path / "run"))
    saved = sorted(int(path.name[-8:]) for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert set(saved) <= {3, 6, 9, 11}
    assert saved[-1] == 11
    records = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    assert sum("bound" in record for record in records) == 11


def test_a_finished_run_of_integers_is_not_validated_again(sedd: Sedd, tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.random.default_rng(0).integers(0, 5, 4000))
    words = ["train", tmp_path / "a.npy", "--tokenizer", "ints", *SMALL, "--steps", 2, "--out", tmp_path / "run"]
    first = sedd(*words, "--json")
    ok(first)
    before = (tmp_path / "run" / "log.jsonl").read_text()
    again = sedd(*words, "--resume", "--json")
    ok(again)
    assert (tmp_path / "run" / "log.jsonl").read_text() == before
    assert json.loads(again.stdout)["bound"] == json.loads(first.stdout)["bound"]


def test_a_budget_is_the_total_of_a_run(sedd: Sedd, corpus: Path, tmp_path: Path) -> None:
    """One that is used up already is refused before anything is written, with the one that trains as much again."""
    run, steps = tmp_path / "run", ["--steps", 6]
    ok(sedd("train", corpus, *SMALL, *steps, "--out", run))
    state_file = run / "checkpoints" / "step-00000006" / "state.json"
    state_file.write_text(json.dumps(json.loads(state_file.read_text()) | {"seconds": 180.0}))
    checkpoint._write_manifest(state_file.parent, checkpoint.CHECKPOINT_FILES)
    before = (run / "config.json").read_bytes()
    for budget, larger in ((["--steps", 2], "--steps 8"), (["--minutes", 1], "--minutes 4")):
        done = sedd("train", "--out", run, "--resume", *budget)
        assert done.returncode == 2
        assert larger in done.stderr
        assert (run / "config.json").read_bytes() == before
    again = sedd("train", "--out", run, "--resume", *steps)  # the command of a run that is finished
    ok(again)
    assert "--steps 12" in again.stderr
    ok(sedd("train", "--out", run, "--resume", "--steps", 8))
    assert log(run)[-1]["step"] == 8
