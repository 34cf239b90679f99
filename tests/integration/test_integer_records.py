"""Records of integers: no number is per character, and no result is of one stream."""

import json
from pathlib import Path

import numpy as np
from runs import Sedd, ok

from sedd.evaluation import compare

SMALL = [
    *("--recipe", "tiny", "--set", "model.width=32", "--set", "model.depth=1", "--set", "model.heads=2"),
    *(
        "--batch-size",
        "8",
        "--set",
        "train.eval_sequences=8",
        "--set",
        "train.eval_every=2",
        "--set",
        "train.log_every=2",
    ),
]


def test_integers_are_not_characters(sedd: Sedd, tmp_path: Path) -> None:
    np.save(tmp_path / "notes.npy", np.random.default_rng(0).integers(0, 9, (60, 12)))
    run, data = tmp_path / "run", ["--tokenizer", "ints", "--packing", "lines", "--set", "model.seq_len=12"]
    done = sedd("train", tmp_path / "notes.npy", *data, *SMALL, "--steps", 4, "--out", run)
    ok(done)
    assert "nats per token (±" in done.stdout
    assert "step 2: validation bound" in done.stderr
    assert "nats/token" in done.stderr
    records = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    assert not [record for record in records if {"bits_per_char", "bound_bits_per_char"} & record.keys()]
    ok(sedd("report", run, "--samples", 1))
    shown = sedd("eval", run)
    ok(shown)
    for text in (done.stdout, done.stderr, (run / "report.html").read_text(), shown.stdout):
        assert "per char" not in text
        assert "bits/char" not in text
    found = json.loads(sedd("eval", run, "--json").stdout)
    assert (found["packing"], found["eos"], found["bits_per_char"]) == ("one sequence per record", "none", None)
    assert found["split"] == "the last 5.00% of records"
    np.save(tmp_path / "test.npy", np.zeros((3, 12), dtype=int))
    assert json.loads(sedd("eval", run, tmp_path / "test.npy", "--json").stdout)["packing"] == found["packing"]
    done = sedd("compare", run, "--plot", tmp_path / "compare.png", "--json")
    ok(done)
    row = json.loads(done.stdout)
    assert row["bits"] == row["bits_per_token"]
    curve = compare.read_curve(run)  # of bounds, in bits per token; the training loss is not in the plot
    bounds = [record["bound"] for record in records if "bound" in record]
    assert curve.bits.tolist() == [bound / np.log(2) for bound in bounds]
    left, _ = compare.plot_comparison([row], [curve]).axes
    assert left.get_ylabel() == "bits per token"
    assert left.lines[0].get_ydata().tolist() == curve.bits.tolist()
    assert left.get_xlim()[0] == 0
