"""Benchmarks, on tiny sizes: FLOP counts and agreement of the variants."""

import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from loss import LossSetting, measure_loss
from measure import Machine, build_parser, choose_device, describe_machine, read_setting
from sample import SampleSetting
from serve import ServeSetting, measure_serving
from train import TrainingSteps, TrainSetting, count_in_loss, random_batch

from sedd.training.setup import build_setup

ROOT = Path(__file__).parents[2]
ON = Machine("cpu", "a test", torch.__version__, "none", "float32", 1e-3)


def test_both_variants_are_measured() -> None:
    """Utilization is the formula's operations over time and throughput; half the positions count."""
    setting = LossSetting(rows=64, width=8, vocab_size=32, precision="float32", device="cpu", repeats=1)
    rows = list(measure_loss(setting, ON))
    assert [row.variant for row in rows] == ["fused", "plain"]
    for row in rows:
        assert row.milliseconds
        assert row.utilization
        counted = row.utilization * row.milliseconds / 1e3 * 1e9 / (6 * 8 * 32)
        assert abs(counted - 32) < 16  # 64 positions, each with probability ½: 4 standard deviations
        assert counted == pytest.approx(round(counted), abs=1e-6)


@pytest.mark.parametrize("objective", ["score-entropy", "lambda-dce", "autoregressive"])
def test_both_variants_train_alike(objective: str) -> None:
    """Fused and plain steps from the same weights on the same batches have the same losses and gradients."""
    setting = TrainSetting(
        recipe="tiny",
        objective=objective,
        batch=3,
        length=16,
        vocab_size=32,
        precision="float32",
        device="cpu",
        compile=False,
    )
    run = setting.run()
    parts = build_setup(run, 32)
    generator = torch.Generator().manual_seed(0)
    batches = [random_batch(parts, setting, 16, generator) for _ in range(2)]
    counts = [count_in_loss(parts, b.x_t) for b in batches]
    variants = [TrainingSteps(run, parts, setting, small, batches, counts) for small in (True, False)]
    for _ in range(3):
        torch.testing.assert_close(variants[0](), variants[1](), rtol=1e-4, atol=1e-5)


def run_script(name: str, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "benchmarks" / f"{name}.py"), *words]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_scripts_print_tables_and_json() -> None:
    """A table, or one JSON record with machine, setting, formula and rows."""
    small = ("--vocab", "16", "--device", "cpu", "--repeats", "1")
    table = run_script("loss", *small, "--rows", "32", "--width", "8", "--process", "uniform")
    assert "1.00×" in table.stdout, table.stderr
    train = ("--batch", "2", "--length", "8", "--objective", "lambda-dce", "--precision", "float8")
    done = run_script("train", *small, *train, "--json")
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout)
    assert [row["variant"] for row in record["rows"]] == ["fused", "plain"]
    assert record["machine"]["matmul_tflops"] > 0
    assert "width" in record["flops"]


def test_settings_have_the_defaults_of_the_device() -> None:
    """And a value that cannot be measured is one sentence, without a traceback."""
    parser = build_parser("", TrainSetting)
    words = ["--device", "cpu", "--length", "16", "--no-cuda-graphs", "--set", "optim.name=muon"]
    setting = read_setting(parser, parser.parse_args(words), TrainSetting)
    expected = TrainSetting(
        recipe="tiny",
        batch=8,
        vocab_size=4096,
        precision="float32",
        device="cpu",
        length=16,
        cuda_graphs=False,
        sets=("optim.name=muon",),
    )
    assert setting == expected
    done = run_script("loss", "--masked", "1.5")
    assert (done.returncode, done.stdout) == (2, "")
    assert "masked is 1.5" in done.stderr.splitlines()[-1]


def test_refusals(refuses: Callable[..., None]) -> None:
    refuses(lambda: choose_device("tpu"), "tpu", "cpu", "cuda")
    refuses(lambda: describe_machine("cpu", "int8"), "int8", "bfloat16")
    refuses(lambda: LossSetting(masked=1.5), "1.5")
    refuses(lambda: LossSetting(precision="float8"), "float8", "bfloat16")
    refuses(lambda: TrainSetting(recipe="huge").run(), "huge", "small")
    refuses(lambda: TrainSetting(sets=("train.precision=float8",)).run(), "train.precision", "--precision")
    assert TrainSetting(sets=("optim.name=muon",)).run().optim.name == "muon"
    refuses(lambda: ServeSetting(SampleSetting(), clients=0), "clients 0")


def test_a_server_needs_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused in a sentence, before a process is started."""
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "uvicorn" else found(name))
    with pytest.raises(ValueError, match=r"needs uvicorn; install with: pip install .*\[serve\]"):
        next(measure_serving(ServeSetting(SampleSetting()), lambda _: None))


@pytest.mark.verify
def test_serving_is_measured_under_four_loads() -> None:
    """32 clients share forward passes: at least 4 times the throughput of one, and the replies of single requests.

    Overload is refused, not failed.
    """
    small = ("--vocab", "64", "--device", "cpu", "--length", "16", "--steps", "64", "--seconds", "4")
    done = run_script("serve", *small, "--json")
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout)
    one, many, below, above = record["loads"]
    assert [one["variant"], many["variant"]] == ["one at a time", "32 clients"]
    assert many["tokens_per_second"] >= 4 * one["tokens_per_second"]
    assert one["occupancy"] == 1
    assert many["occupancy"] > 16
    assert below["first_edit"] < below["p99"]
    assert above["refused"] > 0
    assert above["replies"] > 0
    assert all(load["errors"] == load["differing"] == 0 for load in record["loads"])
    assert record["offline_tokens_per_second"] > many["tokens_per_second"]
