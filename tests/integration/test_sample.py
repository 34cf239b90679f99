"""The commands that sample, on models that were trained by the command that trains."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from runs import Sedd, ok

from sedd import samplers
from sedd.loading import load_model
from sedd.terminal import visible
from sedd.trace import separator, split_texts

SMALL = [
    *("--set", "model.width=32", "--set", "model.depth=2", "--set", "model.heads=2", "--set", "model.seq_len=32"),
    *("--set", "train.batch_size=8", "--set", "train.eval_sequences=4", "--steps", "3"),
]
KINDS = {
    "mean": ["--parameterization", "mean"],
    "score": [],
    "uniform": ["--process", "uniform"],
    "uniform geometric": ["--process", "uniform", "--set", "noise.schedule=geometric", "--lr", "1e-12"],
    "uniform mean": ["--process", "uniform", "--parameterization", "mean"],
    "time-free": ["--objective", "lambda-dce"],
    "autoregressive": ["--objective", "autoregressive"],
}


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture
def models(sedd: Sedd, shelf: Path, corpus: Path) -> Callable[[str], Path]:
    """A model of each kind, trained when it is first asked for."""

    def model(kind: str) -> Path:
        out = shelf / kind.replace(" ", "-")
        if not out.exists():
            ok(sedd("train", corpus, *SMALL, *KINDS[kind], "--tokenizer", "chars", "--out", out))
        return out

    return model


def lines(done: subprocess.CompletedProcess[str]) -> list[dict[str, object]]:
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_model_samples(sedd: Sedd, models: Callable[[str], Path], kind: str) -> None:
    rows = lines(sedd("sample", models(kind), "-n", 3, "--steps", 8, "--json"))
    assert [row["sample"] for row in rows] == [0, 1, 2]
    assert all(len(row["ids"]) == len(row["text"]) == 32 for row in rows)
    assert len({row["text"] for row in rows}) == 3
    again = lines(sedd("sample", models(kind), "-n", 3, "--steps", 8, "--json", "--batch", 1))
    assert [row["ids"] for row in again] == [row["ids"] for row in rows]  # the batch changes nothing
    other = lines(sedd("sample", models(kind), "-n", 1, "--steps", 8, "--json", "--seed", 1))
    assert other[0]["ids"] != rows[0]["ids"]


def test_texts_alone_go_to_stdout(sedd: Sedd, models: Callable[[str], Path], tmp_path: Path) -> None:
    done = sedd("sample", models("mean"), "-n", 2, "--steps", 4, "--length", 5, "--watch")
    assert done.returncode == 0, done.stderr
    texts = [
        row["text"] for row in lines(sedd("sample", models("mean"), "-n", 2, "--steps", 4, "--length", 5, "--json"))
    ]
    shown = [f"{separator(number)}\n{text}\n" for number, text in enumerate(texts, 1)]
    assert done.stdout == "".join(shown)
    for number in (1, 2):  # --watch shows all texts, without a terminal as lines
        assert f"step 1, sample {number}: " in done.stderr
    assert "tokens/s" in done.stderr
    assert "expected" in done.stderr
    done = sedd("sample", models("mean"), "-n", 2, "--steps", 4, "--length", 5, "--out", tmp_path / "texts.jsonl")
    assert done.stdout == ""
    assert [json.loads(line)["text"] for line in (tmp_path / "texts.jsonl").read_text().splitlines()] == texts
    ok(sedd("sample", models("mean"), "-n", 2, "--steps", 4, "--length", 5, "--out", tmp_path / "texts.txt"))
    assert (tmp_path / "texts.txt").read_text() == "".join(shown)


def test_control_characters_do_not_reach_the_terminal(sedd: Sedd, tmp_path: Path) -> None:
    """Shown texts have them escaped, watched and scored ones too; JSON and files keep them."""
    (tmp_path / "codes.txt").write_text("\x1b[31m\r;\n" * 400)
    words = [*SMALL, "--tokenizer", "chars", "--out", tmp_path / "run"]
    ok(sedd("train", tmp_path / "codes.txt", *words))
    sampling = ["sample", tmp_path / "run", "-n", 2, "--steps", 4]
    exact = [row["text"] for row in lines(sedd(*sampling, "--json"))]
    assert any("\x1b" in text for text in exact)
    assert any("\r" in text for text in exact)
    done = sedd(*sampling, "--watch")
    assert done.stdout == "".join(f"{separator(i)}\n{visible(text)}\n" for i, text in enumerate(exact, 1))
    scored = sedd("score", tmp_path / "run", exact[0], "--draws", 2)
    ok(scored)
    for output in (done.stdout, done.stderr, scored.stdout):
        assert not {"\x1b", "\r"} & set(output)
        assert "\\x1b" in output
    ok(sedd(*sampling, "--out", tmp_path / "texts.txt"))
    with (tmp_path / "texts.txt").open(newline="") as file:
        assert split_texts(file.read()) == exact


@pytest.mark.parametrize("kind", ["mean", "score", "uniform"])
def test_templates_come_back_filled(sedd: Sedd, models: Callable[[str], Path], kind: str, tmp_path: Path) -> None:
    (tmp_path / "templates.txt").write_text("the {4} sat\n{6} and a cat {2}\n")
    rows = lines(
        sedd("infill", models(kind), "on a {9}", "--file", tmp_path / "templates.txt", "-n", 2, "--steps", 8, "--json")
    )
    assert [row["template"] for row in rows[::2]] == ["on a {9}", "the {4} sat", "{6} and a cat {2}"]
    assert all(len(row["text"]) == length for row, length in zip(rows, [14, 14, 12, 12, 19, 19], strict=True))
    assert all(row["text"].startswith("on a ") for row in rows[:2])
    assert all(row["text"].startswith("the ") and row["text"].endswith(" sat") for row in rows[2:4])
    assert all(row["text"][6:17] == " and a cat " for row in rows[4:])
    assert rows[0]["text"] != rows[1]["text"]


def test_a_prefix_can_be_continued_by_an_autoregressive_model(sedd: Sedd, models: Callable[[str], Path]) -> None:
    (row,) = lines(sedd("infill", models("autoregressive"), "the {4}", "--json"))
    assert row["text"].startswith("the ")
    done = sedd("infill", models("autoregressive"), "the {4} sat")
    assert done.returncode == 2
    assert "beginning" in done.stderr


@pytest.mark.parametrize("suffix", ["html", "png"])
def test_trace_writes_a_picture(sedd: Sedd, models: Callable[[str], Path], tmp_path: Path, suffix: str) -> None:
    out = tmp_path / f"new/trace.{suffix}"
    done = sedd("trace", models("mean"), "the {4} sat", "--out", out, "--steps", 8)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{out}\n"
    assert out.stat().st_size > 1000


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["infill", "the cat"], "no gap"),
        (["infill", "the {99}"], "the model takes 32"),
        (["infill", "€{3}"], "€"),
        (["infill", "{x}"], "{8}"),
        (["infill"], "no template"),
        (["infill", "--file", "nowhere.txt"], "nowhere.txt"),
        (["sample", "--sampler", "best"], "choose one of first-hitting"),
        (["sample", "--sampler", "gibbs"], "remask"),
        (["sample", "--sampler", "theta", "--option", "theta=a"], "not a float"),
        (["sample", "--sampler", "theta", "--option", "eta=1"], "it takes theta"),
        (["sample", "--sampler", "theta", "--option", "theta"], "name=value"),
        (["sample", "--sampler", "euler", "--steps", "inf"], "steps is inf"),
        (["sample", "--steps", "0"], "steps is 0"),
        (["sample", "--steps", "-3"], "steps is '-3'"),
        (["sample", "--length", "99"], "1 to 32 tokens"),
        (["sample", "--temperature", "0"], "temperature is 0"),
        (["sample", "--top-p", "2"], "top_p is 2"),
        (["sample", "--grid", "1,2,0"], "from 1 to 0"),
        (["sample", "--seed", "-1"], "seed is -1"),
        (["sample", "-n", "0"], "count is 0"),
        (["sample", "--batch", "0"], "batch is 0"),
        (["sample", "--out", "/proc/none/x"], "cannot be written"),
        (["trace", "--out", "trace.pdf"], ".png"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_input_is_a_sentence_and_exit_code_2(
    sedd: Sedd, models: Callable[[str], Path], words: list[str], sentence: str
) -> None:
    command, *rest = words
    done = sedd(command, models("mean"), *rest)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("sedd: ")
    assert sentence in done.stderr


def test_a_model_that_is_not_there(sedd: Sedd) -> None:
    done = sedd("sample", "nowhere")
    assert done.returncode == 2
    assert "nowhere holds no model" in done.stderr


def test_padded_records_keep_their_padding(sedd: Sedd, tmp_path: Path) -> None:
    """A model of records: a template that ends in text is a whole record; one that ends in a gap is its beginning."""
    (tmp_path / "names.txt").write_text("anna\nbob\ncarl\nberta\n" * 60)
    words = ["--tokenizer", "chars", "--set", "data.packing=lines", "--set", "model.seq_len=8"]
    done = sedd("train", tmp_path / "names.txt", *SMALL, *words, "--out", tmp_path / "run")
    assert done.returncode == 0, done.stderr
    whole, begun = lines(sedd("infill", tmp_path / "run", "b{2}b", "b{2}", "--json"))
    pad = load_model(tmp_path / "run").tokenizer.pad
    assert whole["ids"][4:] == [pad] * 4
    assert len(begun["ids"]) == 3
    assert begun["text"].startswith("b")
    watched = sedd("infill", tmp_path / "run", "b{2}", "--watch").stderr
    assert "step 1" in watched
    assert "·" * 3 not in watched  # no mask after the limit


@pytest.mark.parametrize("limit", [12, 60])
def test_a_story_without_an_ending_is_continued(sedd: Sedd, limit: int) -> None:
    """With the bundled model: text for every seed, up to the limit."""
    rows = lines(sedd("infill", "stories", f"Once upon a time {{{limit}}}", "-n", 3, "--steps", 4, "--json"))
    assert len(rows) == 3
    assert all(row["text"].startswith("Once upon a time") for row in rows)
    assert all(len(row["text"]) > len("Once upon a time") + limit for row in rows)
    assert all(len(row["ids"]) == 4 + limit for row in rows)


def test_the_picture_of_a_record_has_no_room_for_padding(sedd: Sedd, tmp_path: Path) -> None:
    """A record of stories has 265 tokens: with its padding this picture had more than ten lines."""
    out = tmp_path / "trace.png"
    ok(sedd("trace", "stories", "Once upon a time {12} The end.", "--steps", 2, "--out", out))
    height = int.from_bytes(out.read_bytes()[20:24], "big")
    assert height < 300


@pytest.mark.parametrize("steps", [1, 4])
def test_one_long_step_under_uniform_noise_does_not_return_the_noise(
    sedd: Sedd, models: Callable[[str], Path], steps: int
) -> None:
    """Of an untrained model, by which all tokens are equally likely: as many agree with the noise as by chance."""
    loaded = load_model(models("uniform geometric"))
    rows = lines(sedd("sample", loaded.folder, "-n", 16, "--steps", steps, "--json"))
    sampling_run = samplers.SamplingRun.of(loaded, samplers.SamplingSettings(steps=steps))
    noise = next(sampling_run.states(samplers.empty(16, 32))).x.tolist()
    same = sum(a == b for row, start in zip(rows, noise, strict=True) for a, b in zip(row["ids"], start, strict=True))
    assert same < 3 * 16 * 32 / loaded.process.vocab_size


@pytest.mark.parametrize("sampler", ["confidence", "entropy", "first-hitting"])
def test_samplers_that_need_not_sample_the_models_distribution_state_when_they_do(
    sedd: Sedd, models: Callable[[str], Path], sampler: str
) -> None:
    done = sedd("sample", models("time-free"), "-n", 1, "--steps", 8, "--sampler", sampler)
    ok(done)
    has_note = "need not sample the model's distribution" in done.stderr
    assert has_note == (sampler[0] in "ce")


@pytest.mark.parametrize("steps", [8, None])
def test_progress_counts_the_steps_of_every_batch(steps: int | None, tmp_path: Path) -> None:
    """Without a grid of times a text takes as many steps as it has gaps: progress must not begin at its end."""
    import boxed

    loaded = load_model(boxed.write_model(tmp_path / "model"))
    run = samplers.SamplingRun.of(loaded, samplers.SamplingSettings(steps=steps))
    shown: list[tuple[int, int]] = []
    run.sample(samplers.blank_prompt(loaded, 3, 12), 2, lambda *done: shown.append(done))
    assert [total for _, total in shown] == [3 * (steps or 12)] * len(shown)
    done = [count for count, _ in shown]
    assert done == sorted(done)
    assert done[1] < 0.2 * shown[0][1]
    assert done[-1] == shown[0][1]
