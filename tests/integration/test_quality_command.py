"""``sedd quality`` on models trained with ``sedd train``."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import tiny_judges
from runs import Sedd, ok

from sedd.evaluation import quality
from sedd.evaluation.quality import judges, samples
from sedd.evaluation.quality.judge import extract_features, score_samples
from sedd.exact import all_sequences
from sedd.extras import install_hint
from sedd.loading import load_model

SMALL = [
    *("--set", "model.width=32", "--set", "model.depth=2", "--set", "model.heads=2", "--set", "model.seq_len=32"),
    *("--set", "train.batch_size=8", "--set", "train.eval_sequences=4", "--steps", "20", "--tokenizer", "chars"),
]
KINDS = {
    "mean": ["--parameterization", "mean"],
    "ar": ["--objective", "autoregressive"],
    "short": ["--objective", "autoregressive", "--set", "model.seq_len=16"],
}
COST = ("source", "seconds_per_sample", "length", "model", "model_sha256")


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture
def models(sedd: Sedd, model_folder: Path, corpus: Path) -> Callable[[str], Path]:
    """A model of each kind, trained on first use."""

    def model(kind: str) -> Path:
        out = model_folder / kind
        if not out.exists():
            ok(sedd("train", corpus, *SMALL, *KINDS[kind], "--out", out))
        return out

    return model


def records(done: subprocess.CompletedProcess[str]) -> list[dict[str, object]]:
    ok(done)
    return [json.loads(line) for line in done.stdout.splitlines()]


def without(record: dict[str, object], names: tuple[str, ...] = COST) -> dict[str, object]:
    return {key: value for key, value in record.items() if key not in names}


def test_a_run_and_its_saved_samples_have_the_same_record(
    sedd: Sedd, models: Callable[[str], Path], tmp_path: Path
) -> None:
    """In any batch size; with a sedd run as judge, the scores are those of `sedd score`."""
    drawn, kept = tmp_path / "drawn.jsonl", tmp_path / "kept.jsonl"
    words = ["-n", 6, "--steps", 8, "--seed", 1]
    judge = ["--judge", models("ar"), "--json"]
    (whole,) = records(sedd("quality", models("mean"), *judge, *words, "--save", kept))
    (other,) = records(sedd("quality", models("mean"), *judge, *words, "--batch", 1, "--judge-batch", 1))
    assert without(other) == without(whole)
    ok(sedd("sample", models("mean"), *words, "--out", drawn))
    texts = [json.loads(line)["text"] for line in drawn.read_text().splitlines()]
    assert [json.loads(line)["text"] for line in kept.read_text().splitlines()] == texts
    (again,) = records(sedd("quality", drawn, *judge))
    assert without(again) == without(whole)
    assert again["seconds_per_sample"] > 0
    assert (again["nfe"], again["draw_precision"], again["steps"]) == (whole["nfe"], "float64", 8)
    scored = records(sedd("score", models("ar"), *texts, "--json"))
    nats = np.array([record["nats_per_token"] for record in scored])  # all texts have 32 tokens
    assert whole["gen_ppl_by_token"] == pytest.approx(np.exp(nats.mean()), rel=1e-4)
    assert whole["gen_ppl_by_sample"] == pytest.approx(np.exp(nats).mean(), rel=1e-4)


def test_a_sweep_equals_its_single_evaluations(sedd: Sedd, models: Callable[[str], Path], tmp_path: Path) -> None:
    words = ["quality", models("mean"), "--judge", models("ar"), "-n", 4]
    out = ["--out", tmp_path / "sweep.png", "--out", tmp_path / "sweep.jsonl"]
    done = sedd(*words, "--sweep", "steps=2,4", "--sweep", "temperature=0.5,1", *out)
    ok(done)
    swept = [json.loads(line) for line in (tmp_path / "sweep.jsonl").read_text().splitlines()]
    assert [(r["steps"], r["temperature"]) for r in swept] == [(2, 0.5), (2, 1.0), (4, 0.5), (4, 1.0)]
    for record in swept[1:3]:
        (one,) = records(sedd(*words, "--steps", record["steps"], "--temperature", record["temperature"], "--json"))
        assert without(one) == without(record)
    assert (tmp_path / "sweep.png").read_bytes().startswith(b"\x89PNG")
    title, heads, _, *rows = done.stdout.splitlines()
    assert "first token scored" in title
    assert "nats" in title
    assert all(name in heads for name in ("gen ppl by token", "gen ppl by sample", "entropy", "temperature", "nfe"))
    assert len(rows) == 4
    table = sedd("quality", tmp_path / "sweep.jsonl").stdout.splitlines()
    heads = next(line for line in table if line.startswith("| source"))
    columns = [cell.strip() for cell in heads.split("|")[1:-1]]
    assert columns[2:4] == ["steps", "temperature"]  # what differs is a column; what does not, is not
    assert "seed" not in columns
    saved = sedd("quality", tmp_path / "sweep.jsonl", "--json")  # saved results need no judge
    assert records(saved) == swept


def test_sweeps_state_what_their_points_share(sedd: Sedd, models: Callable[[str], Path]) -> None:
    """Equal samples are one measurement; those of one seed have dependent errors; those of two seeds do not."""
    words = ["quality", models("mean"), "--judge", models("ar"), "-n", 3, "--steps", 1, "--json", "--sweep"]
    equal = sedd(*words, "grid=uniform,cosine")  # one step is the same on both
    first, second = records(equal)
    assert first["samples_sha256"] == second["samples_sha256"]
    assert "rows 1 and 2 are equal" in equal.stderr
    paired = sedd(*words, "temperature=0.5,1")
    first, second = records(paired)
    assert first["samples_sha256"] != second["samples_sha256"]
    assert "equal" not in paired.stderr
    assert "not independent" in paired.stderr
    apart = sedd(*words, "seed=0,1")
    assert len(records(apart)) == 2
    assert "independent" not in apart.stderr


def test_a_gguf_file_and_mauve(sedd: Sedd, models: Callable[[str], Path], corpus: Path, tmp_path: Path) -> None:
    """A text file and a run are encoded by the judge; the GGUF file agrees with the folder it was made from."""
    folder, human = tiny_judges.save(tmp_path / "judge", context=40), tmp_path / "human.txt"
    path = tiny_judges.save_gguf(tmp_path / "judge.gguf", folder)
    human.write_text("\n".join(corpus.read_text().splitlines()[:40]))
    (tmp_path / "texts.txt").write_text("the cat sat on a mat\ntwo small birds fly over water\nthe the the the\n")
    words = ["-n", 2, "--steps", 2, "--length", 8, "--mauve", human, "--json"]
    done = sedd("quality", tmp_path / "texts.txt", models("mean"), "--judge", path, *words)
    texts, run = records(done)
    assert (texts["first_token"], texts["truncated"], texts["samples"], texts["nfe"]) == ("skipped", 0, 3, None)
    assert (run["samples"], run["nfe"], run["length"], run["scored"]) == (2, 2, 8, "text")
    assert all(0 <= record["mauve"] <= 1 and record["mauve_texts"] == 40 for record in (texts, run))
    assert "float64 and unknown precision" in done.stderr
    expected = quality.evaluate_samples(samples.read_samples(tmp_path / "texts.txt"), judges.load_judge(str(folder)))
    for name in ("gen_ppl_by_token", "gen_ppl_by_sample", "entropy_nats", "stderr_gen_ppl_by_token"):
        assert texts[name] == pytest.approx(expected[name], rel=1e-5)


def test_different_draw_precisions_cause_a_warning(sedd: Sedd, models: Callable[[str], Path], tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("the cat\nthe mat\n")
    (tmp_path / "b.txt").write_text("two birds\nold water\n")
    words = ["--judge", models("ar"), "--json"]
    for name, precision in (("a", "float32"), ("b", "float64")):
        done = sedd("quality", tmp_path / f"{name}.txt", *words, "--draw-precision", precision)
        assert "warning" not in done.stderr
        (tmp_path / f"{name}.json").write_text(done.stdout)
    done = sedd("quality", tmp_path / "a.json", tmp_path / "b.json")
    ok(done)
    assert "sedd: warning: these samples were drawn with float32 and float64 precision" in done.stderr
    assert "warning" not in done.stdout
    done = sedd("quality", tmp_path / "a.txt", tmp_path / "a.json", *words, "--draw-precision", "float32")
    assert len(records(done)) == 2
    assert "warning" not in done.stderr


def test_results_of_different_judges_cannot_share_a_table(
    sedd: Sedd, models: Callable[[str], Path], tmp_path: Path
) -> None:
    (tmp_path / "a.txt").write_text("the cat\nthe mat\n")
    for name in ("ar", "short"):
        done = sedd("quality", tmp_path / "a.txt", "--judge", models(name), "--json")
        (tmp_path / f"{name}.json").write_text(done.stdout)
    refused(sedd("quality", tmp_path / "ar.json", tmp_path / "short.json"), "cannot share a table")
    done = sedd("quality", tmp_path / "ar.json", models("mean"), "--judge", models("short"), "-n", 10**5)
    refused(done, "cannot share a table")  # before sampling


def refused(done: subprocess.CompletedProcess[str], sentence: str) -> None:
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1].startswith("sedd: ")
    assert sentence in done.stderr


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["nowhere.jsonl", "--judge", "AR"], "nowhere.jsonl holds no model: it does not exist"),
        (["EMPTY", "--judge", "AR"], "holds no sample"),
        (["GAP", "--judge", "AR"], "sample 1 of"),
        (["TEXT"], "name a Hugging Face model"),
        (["TEXT", "--judge", "./nowhere"], "judge ./nowhere does not exist"),
        (["TEXT", "--judge", "nowhere.gguf"], "judge nowhere.gguf does not exist"),
        (["TEXT", "--judge", "MEAN"], "a sedd run needs --objective autoregressive"),
        (["TEXT", "--judge", "SHORT"], "tokens of the judge, which reads 16"),
        (["EURO", "--judge", "AR"], "cannot read"),
        (["IDS", "--judge", "AR"], "which judge"),
        (["TEXT", "--judge", "AR", "--ids"], "has no ids"),
        (["TEXT", "--judge", "AR", "--sweep", "steps=2,4"], "--sweep needs the folder of a run"),
        (["TEXT", "--judge", "AR", "--mauve", "nowhere.txt"], "nowhere.txt could not be read"),
        (["TEXT", "--judge", "AR", "--out", "a.pdf"], "must end in .png"),
        (["TEXT", "--judge", "AR", "--first-token", "both"], "choose one of skipped, scored"),
        (["TEXT", "--judge", "AR", "--judge-precision", "float8"], "choose one of float32"),
        (["TEXT", "--judge", "AR", "--judge-batch", "0"], "judge-batch is 0"),
        (["MEAN", "--judge", "AR", "-n", "0"], "count is 0"),
        (["MEAN", "--judge", "AR", "--length", "99"], "1 to 32 tokens"),
        (["MEAN", "--judge", "AR", "--sweep", "steps=4,0"], "steps is 0"),
        (["MEAN", "--judge", "AR", "--sweep", "stops=4"], "choose one of sampler"),
        (["MEAN", "TEXT", "--judge", "AR", "--save", "a.jsonl"], "samples of one run"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_input_is_a_sentence_and_exit_code_2(
    sedd: Sedd, models: Callable[[str], Path], tmp_path: Path, words: list[str], sentence: str
) -> None:
    files = {"EMPTY": "", "GAP": "a\n\nb\n", "TEXT": "the cat sat on a mat\n", "EURO": "€\n", "IDS": '{"ids": [999]}'}
    for name, content in files.items():
        (tmp_path / f"{name}.{'json' if name == 'IDS' else 'txt'}").write_text(content)
    found = {path.stem: path for path in tmp_path.iterdir()}
    found |= {kind.upper(): models(kind) for kind in KINDS if kind.upper() in words}
    refused(sedd("quality", *(found.get(word, word) for word in words)), sentence)


def test_a_missing_judge_is_reported(sedd: Sedd, tmp_path: Path) -> None:
    """A name is searched on the Hub, which is offline here."""
    (tmp_path / "a.txt").write_text("the cat\n")
    offline = "os.environ['HF_HUB_OFFLINE'] = '1'"
    refused(sedd("quality", tmp_path / "a.txt", "--judge", "no-such-judge", before=offline), "cannot be loaded")
    (tmp_path / "empty").mkdir()
    refused(sedd("quality", tmp_path / "a.txt", "--judge", tmp_path / "empty", before=offline), "cannot be loaded")


def test_missing_packages_are_reported(sedd: Sedd, models: Callable[[str], Path], tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("the cat\nthe mat\n")
    hidden = "sys.modules['transformers'] = sys.modules['mauve'] = None"
    words = ["quality", tmp_path / "a.txt", "--judge"]
    refused(sedd(*words, "gpt2", before=hidden), install_hint("judge"))
    mauve = ["--mauve", tmp_path / "a.txt"]
    refused(sedd(*words, models("ar"), *mauve, before=hidden), install_hint("mauve"))
    ok(sedd(*words, models("ar"), before=hidden))  # a sedd run as judge needs neither


def test_the_scores_of_a_sedd_judge_are_a_distribution(models: Callable[[str], Path]) -> None:
    """Σ e^(−nats) = 1 over all texts of two letters; if the first is skipped, over the second given the first."""
    run, letters = models("ar"), load_model(models("ar")).tokenizer.vocab_size
    rows = list(all_sequences(letters, 2).numpy())
    scored, skipped = (
        np.exp(-score_samples(judges.load_judge(str(run), first_token=first), rows, batch=512))
        for first in ("scored", "skipped")
    )
    assert scored.sum() == pytest.approx(1, abs=1e-5)
    assert skipped.reshape(letters, letters).sum(-1) == pytest.approx(np.ones(letters), abs=1e-5)


def test_the_features_of_a_sedd_judge_do_not_depend_on_the_batch(models: Callable[[str], Path]) -> None:
    judge = judges.load_judge(str(models("ar")))
    rows = judge.encode(["the cat", "two small birds fly", "a", "the car"])
    one = extract_features(judge, rows, batch=1)
    assert np.allclose(extract_features(judge, rows, batch=4), one, atol=1e-5)
    assert np.abs(one[0] - one[3]).max() > 1e-3  # they depend on the last letter


def test_the_likelihood_of_a_record_includes_its_padding(sedd: Sedd, tmp_path: Path) -> None:
    """A judge of padded records sums −log p over the whole record, as `sedd score` does, and divides by its letters."""
    (tmp_path / "names.txt").write_text("anna\nbob\ncarl\nberta\n" * 60)
    words = ["--set", "data.packing=lines", "--set", "model.seq_len=8", "--objective", "autoregressive"]
    ok(sedd("train", tmp_path / "names.txt", *SMALL, *words, "--out", tmp_path / "run"))
    (tmp_path / "some.txt").write_text("anna\nbob\n")
    (found,) = records(sedd("quality", tmp_path / "some.txt", "--judge", tmp_path / "run", "--json"))
    scored = records(sedd("score", tmp_path / "run", "anna", "bob", "--json"))
    nats = [record["nats_per_token"] * record["tokens"] for record in scored]  # of 8 tokens each
    assert found["gen_ppl_by_token"] == pytest.approx(np.exp(sum(nats) / 7), rel=1e-4)
    assert found["tokens"] == 7
