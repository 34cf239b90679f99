"""The studies behind the results page: their statistics, their tables, and each of them on a few words."""

import importlib
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import tiny_judges
import torch

from sedd import draws

ROOT = Path(__file__).parents[2]
SMALL = {
    **{"model.width": 16, "model.depth": 1, "model.heads": 2, "train.batch_size": 2, "train.eval_sequences": 2},
    **{"optim.warmup_steps": 1, "train.eval_every": 10},
}


@pytest.fixture
def study(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Imports a script of experiments/ by its name."""
    monkeypatch.syspath_prepend(str(ROOT / "experiments"))
    return importlib.import_module


def run_script(name: str, *words: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "experiments" / f"{name}.py"), *map(str, words)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


def set_words(config: dict[str, object]) -> list[object]:
    return [word for key, value in config.items() for word in ("--set", f"{key}={value}")]


def fake_rows(bits: dict[str, list[float]], error: float = 0.001) -> dict[str, dict[str, Any]]:
    """Results with these bits of each row and seed, and standard errors of the evaluation in bits."""
    return {
        f"{row}, seed {seed}": {
            "row": row,
            "seed": seed,
            "tuning": None,
            "training": {"tokens": 1_000_000},
            "evaluation": {
                "bits_per_char": value,
                "stderr_nats_per_token": error * math.log(2),
                "is_exact": row == "autoregressive",
            },
            "curve": [{"seconds": 1.0, "characters": 500, "bits_per_char": value + 1}],
        }
        for row, values in bits.items()
        for seed, value in enumerate(values)
    }


# Statistics ------------------------------------------------------------------------------------------------


def test_p_values_are_corrected_by_holms_method(study: Any) -> None:
    """A worked example: 4·0.005, 3·0.01, 2·0.03, and the last no smaller than the one before."""
    objectives: ModuleType = study("objectives")
    assert objectives.holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert objectives.holm([0.5, 0.9]) == [1.0, 1.0]
    assert objectives.holm([]) == []


def test_differences_larger_than_both_errors_are_significant(study: Any) -> None:
    objectives: ModuleType = study("objectives")
    bits = {"SEDD absorbing": [1.80, 1.82], "RADD λ-DCE": [1.815, 1.801], "SEDD uniform": [2.00, 2.02]}
    summaries, deviation = objectives.summarize(list(fake_rows(bits).values()))
    assert deviation == pytest.approx(math.sqrt((2 * 0.01**2 + 2 * 0.007**2 + 2 * 0.01**2) / 3))
    assert [summary.row for summary in summaries] == ["RADD λ-DCE", "SEDD absorbing", "SEDD uniform"]
    assert summaries[0].stderr == pytest.approx(math.hypot(0.001, deviation) / math.sqrt(2))
    significant = {(c.better, c.worse) for c in objectives.compare(summaries) if c.p < 0.05}
    assert significant == {("RADD λ-DCE", "SEDD uniform"), ("SEDD absorbing", "SEDD uniform")}
    noisy, _ = objectives.summarize(list(fake_rows(bits, error=0.2).values()))  # the evaluation's error alone decides
    assert all(c.p > 0.05 for c in objectives.compare(noisy))


def test_a_false_difference_is_found_no_more_often_than_stated(study: Any) -> None:
    """Rows that do not differ: in at most 5 % of studies any difference is significant, of 300 within 4 errors."""
    objectives: ModuleType = study("objectives")
    generator, found, studies = torch.Generator().manual_seed(0), 0, 300
    for _ in range(studies):
        values = (1.8 + 0.01 * torch.randn(5, 3, generator=generator)).tolist()
        rows = fake_rows({f"row {i}": group for i, group in enumerate(values)}, error=0.0)
        found += any(c.p < 0.05 for c in objectives.compare(objectives.summarize(list(rows.values()))[0]))
    assert found / studies < 0.05 + 4 * math.sqrt(0.05 * 0.95 / studies)
    assert not any(p < 0.05 for p in objectives.holm([0.01] * 10))  # each alone would be


def test_one_seed_is_not_significant(study: Any) -> None:
    objectives: ModuleType = study("objectives")
    rows = fake_rows({"SEDD absorbing": [1.0], "autoregressive": [3.0]})
    text = "\n".join(objectives.table_lines({"rows": rows}))
    assert "no difference can be called significant" in text
    assert "| autoregressive | 3.0000 ± 0.0010 |" in text
    assert "| SEDD absorbing | ≤ 1.0000 ± 0.0010 |" in text
    assert "Nothing was tuned" in text


def test_the_table_is_printed_and_the_curves_are_drawn(
    study: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    objectives: ModuleType = study("objectives")
    rows = fake_rows(
        {"SEDD absorbing": [1.80, 1.82, 1.81], "RADD λ-DCE": [1.811, 1.80, 1.82], "D3PM uniform": [2, 2, 2]}
    )
    rows["RADD t-DCE, seed 0"] = {"row": "RADD t-DCE", "seed": 0, "tuning": None, "failed": "sedd train ended with 1"}
    tuning: dict[str, Any] = {
        "SEDD absorbing": {"bits": {"2e-3": 1.9, "4e-3": None}, "seconds": 20, "chosen": "2e-3"},
        "D3PM uniform": {
            "bits": {"2e-3": 1.9, "4e-3": 1.8},
            "seconds": 20,
            "chosen": "2e-3",
            "full": {"2e-3": 1.5, "4e-3": 1.6},
            "full_seconds": 60.0,
        },
    }
    (tmp_path / "r.json").write_text(json.dumps({"rows": rows, "tuning": tuning}))
    monkeypatch.setattr(
        sys, "argv", ["objectives.py", "--table", str(tmp_path / "r.json"), "--plot", str(tmp_path / "r.svg")]
    )
    objectives.main()
    printed = capsys.readouterr().out
    assert "2 of 3 differences are significant" in printed
    assert "is not significantly better than" in printed
    assert "RADD t-DCE, seed 0: sedd train ended with 1" in printed
    assert "learning rates 2e-3, 4e-3 for 20 seconds each, by the validation bound; of the two best" in printed
    assert "better after 60 seconds" in printed
    assert "chose the largest rate" not in printed
    assert "D3PM uniform" in (tmp_path / "r.svg").read_text()


def test_rows_of_other_settings_are_not_mixed(study: Any, tmp_path: Path) -> None:
    results = study("study_runs").Results(tmp_path / "r.json")
    results.describe(seconds=60)
    results.describe(seconds=30)  # no row yet
    results.store("row", {"bits": 1})
    again = study("study_runs").Results(tmp_path / "r.json")
    again.describe(seconds=30)
    assert "row" in again
    with pytest.raises(SystemExit, match="holds rows with seconds 30, and this run has 60"):
        again.describe(seconds=60)
    elsewhere = study("study_runs").Results(tmp_path / "elsewhere.json")
    elsewhere.describe(seconds=30)
    elsewhere.describe(seconds=30)  # as a study does that is started again
    elsewhere.record["machine"] = {**elsewhere.record["machine"], "name": "another machine"}
    again.take_facts(elsewhere)
    assert again.record["machine"]["name"] == "another machine"
    assert "row" in again  # facts alone are taken
    again.store("row", {"failed": "code 1"})
    assert "row" not in again  # it is measured again


def test_differences_of_ablations_are_tested_against_what_seeds_do_not_explain(study: Any) -> None:
    """By hand: rows (2.0, 1.0), (2.1, 1.3), (2.0, 1.2); the second seed is 0.867 lower in the mean.

    Residuals ±0.0667, ∓0.0333, ∓0.0333: squares 2·(0.00444 + 0.00222), two degrees of freedom; the base counts too.
    """
    ablations: ModuleType = study("ablations")
    bits = {"base": (2.0, 1.0), "cosine": (2.1, 1.3), "bell": (2.0, 1.2)}
    rows = [
        {"variant": name, "seed": seed, "bits": value, "tokens": 10}
        for name, values in bits.items()
        for seed, value in enumerate(values)
    ]
    best, worst = ablations.differences(rows)
    assert (best.variant, worst.variant) == ("bell", "cosine")
    assert (best.mean, worst.mean) == pytest.approx((0.1, 0.2))
    assert best.stderr == worst.stderr == pytest.approx((0.04 / 3 / 2) ** 0.5)
    # t² is 1.5 and 6 with two degrees of freedom: P = 1 − t/√(2 + t²); Holm doubles the smaller
    assert worst.p == pytest.approx(2 * (1 - (6 / 8) ** 0.5))
    assert best.p == pytest.approx(1 - (1.5 / 3.5) ** 0.5)
    for incomplete in (rows[:-1], rows[2:], [row for row in rows if row["seed"] == 0]):
        with pytest.raises(ValueError, match="need the same two seeds"):
            ablations.differences(incomplete)


def test_variants_that_equal_the_base_are_seldom_significant(study: Any) -> None:
    """29 variants without an effect, 400 studies: the rate of false alarms, nominally 5 %, is 2 to 3 %.

    Pooling the differences from the one base would give 9.5 %.
    """
    ablations: ModuleType = study("ablations")
    names, alarms = ["base", *map(str, range(29))], 0
    for number in range(400):
        draws = np.random.default_rng(number).normal((0, 5), size=(30, 2))
        rows = [
            {"variant": name, "seed": seed, "bits": draws[i, seed], "tokens": 1}
            for i, name in enumerate(names)
            for seed in (0, 1)
        ]
        alarms += min(row.p for row in ablations.differences(rows)) < 0.05
    assert alarms / 400 < 0.06


def test_every_ablation_is_named_in_words_and_has_two_seeds(study: Any) -> None:
    ablations: ModuleType = study("ablations")
    record = json.loads((ROOT / "benchmarks/results/ablations-equal-time-h200.json").read_text())
    runs = [(row["variant"], row["seed"]) for row in record["rows"]]
    assert sorted(runs) == sorted((name, seed) for name in ("base", *ablations.VARIANTS) for seed in (0, 1))


# Draw precision --------------------------------------------------------------------------------------------


def test_float32_draws_are_those_of_the_published_race(study: Any) -> None:
    quality: ModuleType = study("quality_curves")
    before, x = draws.sample_next, torch.tensor([2, 2, 0])
    weights = torch.tensor([[1.0, 0.0, 3.0], [0.0, 2.0, 0.0], [1e-3, 1.0, 0.0]])
    u = torch.tensor([[0.25, 0.9], [0.1, 0.2], [0.3, 0.4]], dtype=torch.float64)
    generator = torch.Generator().manual_seed(2**51)  # the first uniform, a quarter, in units of 2^−53
    expected = draws.legacy_fp32(weights / weights.sum(-1, keepdim=True), generator)
    with quality.draw_precision("float32"):
        assert torch.equal(draws.sample_next(x, weights, u), expected)
    assert draws.sample_next is before
    with quality.draw_precision("float64"):
        assert draws.sample_next is before


# Scripts on a CPU ------------------------------------------------------------------------------------------


def test_unknown_rows_are_refused(
    study: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for script, words, sentence in (
        ("objectives", ["--only", "SEDD"], "choose from SEDD absorbing; SEDD uniform; "),
        ("zero_shot", ["--only", "geometric"], "choose from absorbing, uniform, autoregressive"),
        ("quality_curves", ["--draw-precisions", "float16"], "choose float64, float32, not float16"),
    ):
        monkeypatch.setattr(sys, "argv", [script, "text8", *words, "--out", "x"])
        with pytest.raises(SystemExit):
            study(script).main()
        assert sentence in capsys.readouterr().err


@pytest.mark.verify
def test_objectives_are_tuned_measured_and_resumed(corpus: Path, tmp_path: Path) -> None:
    test, out = tmp_path / "test.txt", tmp_path / "out"
    test.write_text(corpus.read_text()[:600])
    config = {**SMALL, "model.seq_len": 16, "model.ngrams": 0}
    words = [corpus, "--test", test, "--out", out, "--precision", "float32", *set_words(config)]
    only = ["--only", "RADD λ-DCE;concrete score, any sign"]
    tuned = run_script("objectives", *words, *only, "--tune", "--tune-seconds", 0.3, "--rates", "1e-3,1e-2")
    assert tuned.returncode == 0, tuned.stderr
    seconds = ["--seconds", 0.5, "--seeds", "0,1"]
    none = run_script("objectives", *words, *only, *seconds, "--confirm", "--limit-seconds", 0)
    assert "no time for 2 rows" in none.stderr
    confirmed = run_script("objectives", *words, *only, *seconds, "--confirm")
    assert confirmed.returncode == 0, confirmed.stderr
    for row in json.loads((out / "objectives.json").read_text())["tuning"].values():
        assert row["full"].keys() == {"1e-3", "1e-2"}
        assert row["full"][row["chosen"]] == min(row["full"].values())
    short = run_script("objectives", *words, *only, *seconds, "--limit-seconds", 0.1)
    assert "no time for 4 rows; start this again" in short.stderr
    done = run_script("objectives", *words, *only, *seconds, "--plot", tmp_path / "curves.png")
    assert done.returncode == 0, done.stderr
    record = json.loads((out / "objectives.json").read_text())
    assert len(record["rows"]) == 4
    for row in record["rows"].values():
        assert row["evaluation"]["protocol"] == "strict"
        assert row["tuning"]["chosen"] in ("1e-3", "1e-2")
        assert row["curve"][-1]["characters"] == row["training"]["tokens"]
        assert f"--set optim.lr={float(row['tuning']['chosen'])}" in row["command"]
    assert str(tmp_path) not in json.dumps(record)
    before = (out / "objectives.json").read_text()
    again = run_script("objectives", *words, *only, *seconds)
    assert json.loads((out / "objectives.json").read_text())["rows"] == json.loads(before)["rows"]
    assert "| RADD λ-DCE | ≤ " in again.stdout


def test_stored_float32_draws_fall_below_the_entropy_and_others_do_not() -> None:
    record = json.loads((ROOT / "experiments/results/float32-draws.json").read_text())
    distance = {
        (row["draws"], row["steps"]): (row["nats_per_token"] - record["entropy_nats"]) / row["stderr"]
        for row in record["rows"].values()
    }  # in standard errors
    assert all(abs(found) < 4 for (draws, _), found in distance.items() if draws == "float64")
    assert distance["float32", 4096] < -8
    assert distance["float32", 1024] < -4


def test_float32_draws_on_a_small_vocabulary(tmp_path: Path, study: Any) -> None:
    """The samples' perplexity is that of the data, in both precisions and at any number of steps; rows are kept."""
    words = ["--out", tmp_path / "rows.json", "--vocabulary", 300, "--count", 2000]
    done = run_script("float32_draws", *words, "--steps", "2,8")
    assert done.returncode == 0, done.stderr
    record = json.loads((tmp_path / "rows.json").read_text())
    assert len(record["rows"]) == 4
    for row in record["rows"].values():
        assert abs(row["nats_per_token"] - record["entropy_nats"]) < 4 * row["stderr"]
    assert done.stdout.splitlines() == study("float32_draws").table_lines(record)
    again = run_script("float32_draws", *words, "--steps", "2,8")
    assert (again.returncode, again.stdout) == (0, done.stdout)
    other = run_script("float32_draws", *words[:-1], 50)
    assert (other.returncode, "tokens 2000" in other.stderr) == (1, True)


@pytest.mark.verify
def test_quality_curves_of_both_noises(corpus: Path, tmp_path: Path, sedd: Any) -> None:
    judge = tiny_judges.save(tmp_path / "judge")
    files = []
    for process, objective in (("absorbing", "lambda-dce"), ("uniform", "score-entropy")):
        config = set_words({**SMALL, "model.seq_len": 16})
        run, file = tmp_path / process, tmp_path / f"{process}.json"
        words = ["--process", process, "--objective", objective, "--tokenizer", "chars", "--steps", 3, "--out", run]
        assert sedd("train", corpus, *words, *config).returncode == 0
        sampling = ["--judge", judge, "--out", file, "-n", 4, "--steps", "2,4", "--temperatures", "0.8,1"]
        done = run_script("quality_curves", run, *sampling)
        assert done.returncode == 0, done.stderr
        rows = json.loads(file.read_text())["rows"]
        samplers = 6 if process == "absorbing" else 3
        assert len(rows) == samplers * 2 * 3  # two temperatures, and float32 draws at temperature 1
        assert {row["draw_precision"] for row in rows.values()} == {"float64", "float32"}
        assert all(row["entropy_nats"] > 0 and row["seconds_per_sample"] > 0 for row in rows.values())
        files.append(file)
    samples, judged = tmp_path / "samples", tmp_path / "judged.json"
    options = ["-n", 4, "--steps", "2,4", "--temperatures", "0.8,1"]
    apart = run_script("quality_curves", tmp_path / "absorbing", "--samples", samples, *options)
    assert apart.returncode == 0, apart.stderr
    facts = json.loads((samples / "facts.json").read_text())
    elsewhere = {**facts["machine"], "name": "another machine"}
    (samples / "facts.json").write_text(json.dumps({**facts, "machine": elsewhere}))
    judging = ["--samples", samples, "--judge", judge, "--out", judged]
    apart = run_script("quality_curves", tmp_path / "absorbing", *judging)
    assert apart.returncode == 0, apart.stderr
    record, together = json.loads(judged.read_text()), json.loads(files[0].read_text())["rows"]
    assert record["machine"]["name"] == "another machine"  # where they were drawn, and timed
    clock = {"seconds_per_sample", "date", "commit"}
    for name, row in record["rows"].items():
        assert {k: v for k, v in row.items() if k not in clock} == {
            k: v for k, v in together[name].items() if k not in clock
        }
    assert record["rows"].keys() == together.keys()
    other = run_script("quality_curves", tmp_path / "uniform", "--samples", samples, "-n", 4, "--steps", "2")
    assert (other.returncode, "holds rows with model absorbing, and this run has uniform" in other.stderr) == (1, True)
    wrong = run_script("quality_curves", tmp_path / "uniform", *judging)
    assert (wrong.returncode, "holds samples of absorbing, not of uniform" in wrong.stderr) == (1, True)
    none = run_script("quality_curves", "stories", "--samples", tmp_path / "none", "--judge", judge, "--out", judged)
    assert (none.returncode, "none holds no samples; draw them there, without --judge" in none.stderr) == (1, True)
    drawn = run_script("quality_curves", "--table", *files, "--plot", tmp_path / "curves.svg")
    assert drawn.returncode == 0, drawn.stderr
    assert "uniform noise" in (tmp_path / "curves.svg").read_text()


@pytest.mark.verify
def test_the_zero_shot_table(corpus: Path, tmp_path: Path) -> None:
    corpora = tmp_path / "corpora"
    corpora.mkdir()
    text = corpus.read_text()
    (corpora / "lambada_test.jsonl").write_text(
        "".join(json.dumps({"text": line}) + "\n" for line in text.split("\n")[:890])
    )
    (corpora / "wikitext2-train.txt").write_text(
        " \n = Cats = \n \n the cat sat @-@ on \n \n = Birds = \n \n two birds \n" * 400
    )
    (corpora / "wikitext2-test.txt").write_text(" \n = Mats = \n \n a mat and a cat \n" * 30)
    config = {**SMALL, "model.seq_len": 1024, "data.val_fraction": 0.1}
    words = [
        corpora / "wikitext2-train.txt",
        corpus,
        "--corpora",
        corpora,
        "--tokenizer",
        "bpe:270",
        *set_words(config),
    ]
    words += ["--precision", "float32", "--datasets", "lambada,wikitext2", "--seconds", 1, "--out", tmp_path / "out"]
    done = run_script("zero_shot", *words)
    assert done.returncode == 0, done.stderr
    documents = [json.loads(line)["text"] for line in (tmp_path / "out/train.jsonl").read_text().splitlines()]
    assert len(documents) == 801
    assert "sat-on" in documents[0]
    record = json.loads((tmp_path / "out/zero-shot.json").read_text())
    assert {*record["rows"]} == {"absorbing", "uniform", "autoregressive"}
    for row in record["rows"].values():
        assert {name: len(found) for name, found in row["evaluation"].items()} == {"strict": 2, "sedd": 2}
    assert "| SEDD absorbing small (Lou et al. 2024) | (50.92) | (41.84) |" in done.stdout
    assert "WikiText-2: the train split, which the protocol scores, is part of our training text." in done.stdout


# Text and checkpoints --------------------------------------------------------------------------------------


def test_prose_is_kept_and_markup_repetitions_and_evaluation_text_are_not(study: Any) -> None:
    """Mutants: without the evaluation text all three sentences stay; a sequence of nine words is no overlap."""
    english: ModuleType = study("english_text")
    sentence = "The old man walked to the river and sat down there, for it was warm and he was tired."
    scored = "She had never seen the sea before that day in June, and she was not sure that it was real."
    page = (
        f"<html><p>{sentence}</p><table><td>1 2 3</td></table><pre>x = 1</pre><p>{scored}</p><p>{sentence}</p></html>"
    )
    excluded = frozenset(english.find_sequences("before that day in June, and she was not sure"))
    assert len(excluded) == 1

    def paragraphs(excluded: frozenset[int]) -> list[str]:
        collector = english.Collector(excluded)
        return [p for text in english.read_html(page) for p in english.split_paragraphs(text) if keeps(collector, p)]

    def keeps(collector: Any, paragraph: str) -> bool:
        return bool(english.is_prose(paragraph) and collector.keep(paragraph))

    assert paragraphs(excluded) == [sentence]
    assert paragraphs(frozenset()) == [sentence, scored]
    assert not list(english.find_sequences("one two three four five six seven eight nine"))
    assert not english.is_prose("int main() { return 0; } // 42")


def test_the_cost_of_checkpoints_is_what_a_run_waited_and_was_slowed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A log of records of a second each; after the 60th two seconds of saving, and half a second more of training."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    saving = importlib.import_module("saving")

    def record(number: int) -> dict[str, float]:
        saved = number > 60
        return {
            **{"step": 10 * number, "tokens": 1000 * number, "tokens_per_second": 1000},
            **{"seconds": number + 0.5 * saved, "save_seconds": 2.0 * saved},
        }

    cost = saving.cost_of_saving([record(number) for number in range(100)])
    assert cost["checkpoints"] == 1
    assert cost["waited_seconds"] == 2.0
    assert cost["slowed_seconds"] == pytest.approx(0.5)
    assert cost["seconds_per_step"] == pytest.approx(0.1)
    assert saving.cost_of_saving([record(number) for number in range(60)])["checkpoints"] == 0
