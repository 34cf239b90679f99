"""`sedd eval`, `sedd score` and `sedd compare` on every kind of model, in any batch size and number of processes."""

import hashlib
import json
import math
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

import sedd
from sedd.loading import load_model
from sedd.training import loop
from sedd.training.config import BudgetConfig, DataConfig, ModelConfig, NoiseConfig, RunConfig, TrainConfig
from sedd.training.datasets import prepare_data

KEYS = {
    *("nats_per_token", "stderr_nats_per_token", "bits_per_token", "bits_per_char", "bits_per_byte", "ppl_bound"),
    *("terms", "tokens", "draws", "protocol", "model_sha256"),
    *("split", "seed", "precision", "terms_included", "data_sha256", "stderr_population_nats_per_token"),
}
BASELINES = {
    "autoregressive": ("autoregressive", "absorbing"),
    "d3pm": ("d3pm", "absorbing"),
    "d3pm-uniform": ("d3pm", "uniform"),
    "concrete": ("concrete-score", "absorbing"),
    "mean": ("mean", "absorbing"),
    "lambda": ("lambda-dce", "absorbing"),
    "t-dce": ("t-dce", "absorbing"),
    "any-order": ("any-order", "absorbing"),
    "score": ("score-entropy", "absorbing"),
    "ratio-matching": ("ratio-matching", "uniform"),
}


def trained(corpus: Path, out: Path, objective: str, process: str = "absorbing", length: int = 32) -> Path:
    config = RunConfig(
        data=DataConfig([str(corpus)], tokenizer="chars"),
        noise=NoiseConfig(process=process),
        model=ModelConfig(width=16, depth=1, heads=2, seq_len=length),
        train=TrainConfig(batch_size=8, log_every=2, eval_every=2, eval_sequences=8),
        budget=BudgetConfig(steps=6),
        objective=objective,
    ).resolved()
    loop.run(config, lambda: prepare_data(config), out, resume=False, on_event=lambda kind, record: None)
    return out


@pytest.fixture(scope="module")
def runs(corpus: Path, tmp_path_factory: pytest.TempPathFactory, environment: dict[str, str]) -> dict[str, Path]:
    """A run of six steps for each objective."""
    folder = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SEDD_CACHE", environment["SEDD_CACHE"])
        return {name: trained(corpus, folder / name, *kind) for name, kind in BASELINES.items()}


WORKER = """
import contextlib, io, json, os, sys
from sedd.cli import main
commands, printed = sys.stdin, sys.stdout
for line in commands:
    words, folder, given = json.loads(line)
    os.chdir(folder)
    sys.argv, sys.stdin, code = ["sedd", *words], io.StringIO(given), 0
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        try:
            main()
        except SystemExit as end:
            code = int(end.code or 0)
    print(json.dumps([code, out.getvalue(), err.getvalue()]), file=printed, flush=True)
"""
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def worker(environment: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    """One process for all commands: importing torch takes seconds."""
    command = [sys.executable, "-c", WORKER]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        yield process
        process.stdin.close()


@pytest.fixture
def sedd_in_process(worker: subprocess.Popen[str], tmp_path: Path) -> Run:
    """Run a command in a folder of its own and return its exit code, stdout and stderr."""

    def run(*words: object, stdin: str = "") -> tuple[int, str, str]:
        worker.stdin.write(json.dumps([[str(word) for word in words], str(tmp_path), stdin]) + "\n")
        worker.stdin.flush()
        code, out, err = json.loads(worker.stdout.readline())
        return code, out, err

    return run


@pytest.fixture
def text(tmp_path: Path, corpus: Path) -> Path:
    path = tmp_path / "test.txt"
    path.write_text(corpus.read_text()[:700])
    return path


def record(done: tuple[int, str, str]) -> dict[str, object]:
    code, out, err = done
    assert code == 0, err
    found: dict[str, object] = json.loads(out)
    return found


def test_a_record_contains_everything_it_depends_on(
    sedd_in_process: Run, runs: dict[str, Path], text: Path, tmp_path: Path
) -> None:
    out = tmp_path / "result.json"
    found = record(sedd_in_process("eval", runs["score"], text, "--json", "--out", out, "--seed", 3))
    assert set(found) >= KEYS
    assert json.loads(out.read_text()) == found
    assert (found["tokens"], found["draws"], found["seed"]) == (700, 8, 3)
    assert found["protocol"] == "strict"
    assert sum(found["terms"].values()) == pytest.approx(found["nats_per_token"], abs=2e-5)
    assert found["bits_per_char"] == pytest.approx(found["nats_per_token"] / 0.693147, abs=2e-5)
    assert 0 < found["stderr_nats_per_token"] < found["nats_per_token"]
    folder = load_model(runs["score"]).folder
    assert found["model_sha256"] == hashlib.sha256((folder / "ema.safetensors").read_bytes()).hexdigest()
    code, printed, _ = sedd_in_process("eval", runs["score"], text, "--seed", 3)
    assert code == 0
    assert f"at most {found['nats_per_token']:.5f} ± " in printed


def test_results_do_not_depend_on_batch_size_or_processes(
    sedd_in_process: Run,
    torchrun: Callable[..., subprocess.CompletedProcess[str]],
    runs: dict[str, Path],
    text: Path,
) -> None:
    """The two processes are started by torchrun."""
    words = ("eval", runs["score"], text, "--json")
    one, many = (record(sedd_in_process(*words, "--batch", batch)) for batch in (1, 64))
    assert one == many
    done = torchrun(*words, "--batch", 16)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == one
    assert record(sedd_in_process(*words, "--seed", 1))["nats_per_token"] != one["nats_per_token"]


@pytest.mark.parametrize("name", BASELINES)
def test_every_baseline_is_evaluated(sedd_in_process: Run, runs: dict[str, Path], name: str) -> None:
    """On the validation split by default; six steps of training leave the likelihood near that of a new model."""
    found = record(sedd_in_process("eval", runs[name], "--json", "--draws", 2))
    assert found["protocol"] == "held-out"
    exact = name == "autoregressive"
    assert found["is_exact"] == exact
    assert (found["stderr_nats_per_token"] == 0) == exact
    assert found["draws"] == (0 if exact else 2)
    assert 1 < found["nats_per_token"] < (60 if "uniform" in name or name == "ratio-matching" else 5)


def test_orders_of_a_denoiser(sedd_in_process: Run, runs: dict[str, Path], text: Path) -> None:
    """The bound and the mean over orders agree within their errors, each order is close; other models are refused."""
    found = {
        name: record(sedd_in_process("eval", runs["lambda"], text, "--json", "--estimator", name, "--batch", 256))
        for name in ("bound", "any-order", "forward", "backward", "random")
    }
    for name in ("forward", "backward", "random"):
        assert found[name]["is_exact"]
        assert abs(found[name]["nats_per_token"] - found["any-order"]["nats_per_token"]) < 0.05
    gap = abs(found["bound"]["nats_per_token"] - found["any-order"]["nats_per_token"])
    assert gap < 5 * found["bound"]["stderr_nats_per_token"] + 0.01  # for the prior term
    for name in ("score", "autoregressive", "d3pm-uniform"):
        code, out, err = sedd_in_process("eval", runs[name], text, "--estimator", "any-order")
        assert (code, out) == (2, "")
        assert "'any-order'; choose one of" in err
    forward = record(sedd_in_process("eval", runs["autoregressive"], text, "--estimator", "forward", "--json"))
    assert forward == record(sedd_in_process("eval", runs["autoregressive"], text, "--json"))


def test_the_likelihood_of_a_mixture_over_orders(sedd_in_process: Run, runs: dict[str, Path]) -> None:
    """Of a text: at most, and exactly. Of the model's own samples: between; the same in any batch and from Python."""
    words = ("score", runs["lambda"], "a mat", "--json")
    exact, weighted, single = (record(sedd_in_process(*words, "--orders", k)) for k in ("all", 8, 1))
    assert (exact["is_exact"], exact["orders"], exact["network_calls"]) == (True, "all", 31)
    assert exact["lower_nats_per_token"] == exact["nats_per_token"]
    assert (weighted["is_exact"], weighted["lower_nats_per_token"]) == (False, None)
    assert (weighted["draws"], weighted["network_calls"]) == (8, 8 * 8 * 5)
    for bound in (weighted, single):
        assert bound["nats_per_token"] > exact["nats_per_token"] - 5 * bound["stderr_nats_per_token"]
    api = sedd.load(runs["lambda"], device="cpu")
    (found,) = api.bound("a mat", orders="all")
    assert (round(found.nats_per_token, 5), found.is_exact) == (exact["nats_per_token"], True)
    (after,) = api.bound("at", given="a m", orders=4)
    assert after.tokens == 2
    words = ("eval", runs["lambda"], "--samples", 6, "--orders", 2)
    both = record(sedd_in_process(*words, "--json", "--batch", 4))
    assert both["lower_nats_per_token"] <= both["nats_per_token"]  # six steps leave hardly any gap
    assert both["stderr_lower_nats_per_token"] > 0
    assert (both["protocol"], both["sequences"], both["network_calls"]) == ("own-samples", 6, 6 * 3 * 32)
    assert api.evaluate_samples(6, orders=2)["lower_nats_per_token"] == both["lower_nats_per_token"]
    code, out, err = sedd_in_process(*words)
    assert code == 0, err
    assert out.startswith(f"between {both['lower_nats_per_token']:.5f} ± ")
    assert f" and {both['nats_per_token']:.5f} ± " in out


@pytest.mark.parametrize("name", ["score", "t-dce", "d3pm-uniform", "autoregressive"])
def test_models_that_are_no_mixture_over_orders_are_refused(
    sedd_in_process: Run, runs: dict[str, Path], name: str
) -> None:
    code, out, err = sedd_in_process("score", runs[name], "a mat", "--orders", 4)
    assert (code, out) == (2, "")
    assert "orders is for a time-free denoiser under absorbing noise" in err


def test_score_prints_a_line_for_each_text_independently_of_the_others(
    sedd_in_process: Run, runs: dict[str, Path], tmp_path: Path
) -> None:
    texts = ["the cat sat", "a mat", "red houses near water"]
    code, out, _ = sedd_in_process("score", runs["lambda"], *texts, "--json")
    assert code == 0
    lines = [json.loads(line) for line in out.splitlines()]
    assert [line["text"] for line in lines] == texts
    assert [line["tokens"] for line in lines] == [len(text) for text in texts]
    assert set(lines[0]) >= KEYS
    assert record(sedd_in_process("score", runs["lambda"], texts[1], "--json", "--batch", 5)) == lines[1]
    shared = [
        json.loads(line)
        for line in sedd_in_process("score", runs["lambda"], *texts, "--json", "--shared-noise")[1].splitlines()
    ]
    assert [line["shared_noise"] for line in (*lines, *shared)] == [False] * 3 + [True] * 3
    api = sedd.load(runs["lambda"], device="cpu")
    for found, is_shared in ((lines, False), (shared, True)):
        bounds = api.bound(texts, shared_noise=is_shared)
        assert [line["nats_per_token"] for line in found] == [round(bound.nats_per_token, 5) for bound in bounds]
    assert all(a["nats_per_token"] != b["nats_per_token"] for a, b in zip(lines, shared, strict=True))
    (tmp_path / "texts.txt").write_text("\n".join(texts))
    assert sedd_in_process("score", runs["lambda"], "--file", tmp_path / "texts.txt", "--json")[1] == out
    assert sedd_in_process("score", runs["lambda"], "-", "--json", stdin="\n".join(texts))[1] == out
    printed = sedd_in_process("score", runs["autoregressive"], "a mat")[1]
    nats, bits = re.match(r" *([\d.]+) exact nats per token, 5 tokens, ([\d.]+) bits/char: a mat\n", printed).groups()
    assert float(bits) == pytest.approx(float(nats) / math.log(2), abs=1e-3)  # tokens are characters


@pytest.mark.parametrize("shared_noise", [False, True])
def test_the_error_of_a_sum_over_texts_is_that_of_independent_terms(runs: dict[str, Path], shared_noise: bool) -> None:
    """The variance of Σ bound over 32 seeds is Σ stderr², within 0.23 … 2.5 (chi-square with 31 degrees, 1e-5).

    With the same noise for all six texts, the mistake to be caught, it is several times that.
    """
    texts = ["the cat", "sat on a", "mat and", "saw two", "small birds", "fly over"]
    model, sums, variances = sedd.load(runs["lambda"], device="cpu"), [], []
    for seed in range(32):
        bounds = model.bound(texts, draws=8, seed=seed, shared_noise=shared_noise)
        sums.append(sum(bound.nats for bound in bounds))
        variances.append(sum(bound.stderr**2 for bound in bounds))
    ratio = np.var(sums, ddof=1) / np.mean(variances)
    assert (ratio > 3) if shared_noise else (0.23 < ratio < 2.5), ratio


def test_compare_prints_a_table_and_writes_a_plot(
    sedd_in_process: Run, runs: dict[str, Path], tmp_path: Path, text: Path
) -> None:
    folders = [runs[name] for name in ("autoregressive", "d3pm", "lambda", "score")]
    plot = tmp_path / "plot.png"
    code, out, err = sedd_in_process("compare", *folders, "--draws", 2, "--plot", plot)
    assert code == 0, err
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert "| objective" in out
    assert sum(str(folder) in out for folder in folders) == 4
    page = tmp_path / "page.html"
    code, out, err = sedd_in_process("compare", *folders[:2], "--draws", 2, "--plot", page, "--json", "--data", text)
    assert code == 0, err
    rows = [json.loads(line) for line in out.splitlines()]
    assert [row["protocol"] for row in rows] == ["strict", "strict"]
    assert rows[0]["data_sha256"] == rows[1]["data_sha256"]
    assert rows[0]["stderr_bits"] == 0 < rows[1]["stderr_bits"]
    alone = record(sedd_in_process("eval", folders[1], text, "--draws", 2, "--json"))
    assert rows[1]["nats_per_token"] == alone["nats_per_token"]
    assert "<svg" in page.read_text()


def test_compare_refuses_runs_with_different_validation_data(
    sedd_in_process: Run, runs: dict[str, Path], corpus: Path, tmp_path: Path, environment: dict[str, str]
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SEDD_CACHE", environment["SEDD_CACHE"])
        other = trained(corpus, tmp_path / "shorter", "mean", length=16)
    code, out, err = sedd_in_process("compare", runs["mean"], other, "--plot", tmp_path / "plot.png")
    assert (code, out) == (2, "")
    assert "have different validation data" in err
    assert "--data" in err
    assert not (tmp_path / "plot.png").exists()


@pytest.fixture
def benchmarks(tmp_path: Path) -> Path:
    """Toy files with the names of the benchmarks, long enough for a block of 1024 in each shard."""
    folder = tmp_path / "benchmarks"
    folder.mkdir()
    line = "the cat sat on a mat and saw two small birds fly over old red houses near water"
    for name in ("wikitext2-train.txt", "ptb.test.txt", "wikitext-raw-test.txt", "lm1b-test.txt"):
        (folder / name).write_text(f"{line}\n" * 120)
    (folder / "lambada_test.jsonl").write_text((json.dumps({"text": line}) + "\n") * 120)
    return folder


@pytest.fixture
def long_run(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, environment: dict[str, str]) -> Path:
    """A model of 1024 bytes with an end-of-text token."""
    monkeypatch.setenv("SEDD_CACHE", environment["SEDD_CACHE"])
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"text": line}) + "\n" for line in corpus.read_text().splitlines()))
    config = RunConfig(
        data=DataConfig([str(rows)]),
        model=ModelConfig(width=8, depth=1, heads=2, seq_len=1024),
        train=TrainConfig(batch_size=2, eval_every=0, eval_sequences=1),
        budget=BudgetConfig(steps=1),
    ).resolved()
    loop.run(config, lambda: prepare_data(config), tmp_path / "long", resume=False, on_event=lambda kind, record: None)
    return tmp_path / "long"


def test_a_suite_is_one_table(sedd_in_process: Run, long_run: Path, benchmarks: Path) -> None:
    code, out, err = sedd_in_process(
        "eval", long_run, benchmarks, "--suite", "zero-shot", "--protocol", "sedd", "--draws", 2
    )
    assert code == 0, err
    assert "protocol sedd" in out
    assert "this model has 257: compare bits_per_char only" in err
    rows = {tuple(cell.strip() for cell in line.split("|")[1:3]) for line in out.splitlines() if "|" in line}
    assert rows >= {("lambada", "test"), ("wikitext2", "train"), ("ptb", "test"), ("lm1b", "test")}
    code, out, err = sedd_in_process(
        *("eval", long_run, benchmarks, "--suite", "zero-shot", "--protocol", "sedd", "--draws", 2, "--json"),
        *("--dataset", "ptb", "--dataset", "lm1b"),
    )
    rows = [json.loads(line) for line in out.splitlines()]
    assert [row["dataset"] for row in rows] == ["ptb", "lm1b"]
    assert all(row["terms_included"] == ["diffusion"] and row["terms"]["prior"] is None for row in rows)
    assert {row["t_min"] for row in rows} == {1e-3}
    code, out, err = sedd_in_process("eval", long_run, benchmarks, "--suite", "zero-shot", "--protocol", "mdlm")
    assert (code, out) == (2, "")
    assert "PTB (validation)" in err


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["eval", "RUN", "none.txt"], "none.txt does not exist"),
        (["eval", "RUN", "EMPTY"], "holds no text"),
        (["eval", "none", "TEXT"], "none holds no model"),
        (["eval", "RUN", "TEXT", "--protocol", "paper"], "protocol is 'paper'; choose one of strict"),
        (["eval", "RUN", "TEXT", "--protocol", "held-out"], "was trained on, so no part of it was held out"),
        (["eval", "RUN", "--protocol", "strict"], "needs data"),
        (["eval", "RUN", "TEXT", "--protocol", "text8p"], "74,000,000 characters"),
        (["eval", "RUN", "FOREIGN"], "'Ж' at position 0 is not among"),
        (["eval", "RUN", "TEXT", "--draws", "3"], "draws is 3; they come in pairs"),
        (["eval", "RUN", "TEXT", "--draws", "0"], "draws is 0; they come in pairs"),
        (["eval", "RUN", "TEXT", "--protocol", "alone"], "choose one of strict"),
        (["eval", "RUN", "TEXT", "--batch", "0"], "batch is 0"),
        (["eval", "RUN", "TEXT", "--seed", "-1"], "seed is -1"),
        (["eval", "RUN", "TEXT", "--estimator", "guess"], "'guess'; choose one of"),
        (["eval", "RUN", "TEXT", "--suite", "zero-shot"], "protocol strict has no suite"),
        (["eval", "RUN", "TEXT", "--dataset", "ptb", "--dataset", "lm1b"], "several only with --suite"),
        (["score", "RUN", "the cat sat on a mat and saw two small birds"], "44 tokens and the model was trained on 32"),
        (["score", "LAMBDA", "cat", "--orders", "0"], "orders is 0; give a number of 1 or more, or all"),
        (
            ["score", "LAMBDA", "cat", "--orders", "2", "--estimator", "forward"],
            "orders are those of estimator any-order",
        ),
        (["score", "LAMBDA", "the cat sat on a mat", "--orders", "all"], "a sequence has 20 tokens"),
        (["eval", "LAMBDA", "--samples", "4"], "a number of orders, such as 16"),
        (["eval", "LAMBDA", "--samples", "1", "--orders", "2"], "samples is 1; a standard error needs at least 2"),
        (["eval", "LAMBDA", "TEXT", "--samples", "4", "--orders", "2"], "--samples generates the data"),
        (["score", "RUN", ""], "a text is empty"),
        (["score", "RUN"], "no text was given"),
        (["score", "RUN", "--file", "none.txt"], "none.txt could not be read"),
        (["score", "RUN", "Жук"], "cannot read the text"),
        (["compare", "RUN", "--plot", "x.txt"], "must end in .png or .html"),
        (["compare", "TEXT"], "is not the folder of a run"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_bad_input_is_a_sentence_and_exit_code_2(
    sedd_in_process: Run,
    runs: dict[str, Path],
    text: Path,
    tmp_path: Path,
    words: list[str],
    sentence: str,
) -> None:
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "foreign.txt").write_text("Жук")
    given = {
        "RUN": runs["score"],
        "LAMBDA": runs["lambda"],
        "TEXT": text,
        "EMPTY": "empty.txt",
        "FOREIGN": "foreign.txt",
    }
    code, out, err = sedd_in_process(*(given.get(word, word) for word in words))
    assert (code, out) == (2, ""), err
    assert sentence in err
    assert "Traceback" not in err
