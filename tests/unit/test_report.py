"""`sedd report`: the page agrees with the log, and all text in it is escaped."""

import json
import subprocess
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sedd import data, templates
from sedd.evaluation import report
from sedd.runtime import run_log
from sedd.tokenizer import build_tokenizer
from sedd.training import loop
from sedd.training.config import BudgetConfig, DataConfig, ModelConfig, RunConfig, TrainConfig

ROOT = Path(__file__).parents[2]
EVIL = "<script>alert(1)</script> & \"quoted\" <img src=x onerror='alert(2)'>"


def record(step: int, **extra: Any) -> dict[str, Any]:
    return {"step": step, "tokens": 100 * step, "loss": 5 - step / 100, "loss_by_time": [1.0, 2.0, 3.0], **extra}


def bound(step: int) -> dict[str, float]:
    return {"bound": 4 - step / 100, "bound_stderr": 0.05, "bound_bits_per_char": 1.25}


def write(folder: Path, records: list[dict[str, Any]], tail: str = "", **data_options: Any) -> Path:
    """The folder of a run that logged ``records``."""
    folder.mkdir(parents=True, exist_ok=True)
    config = RunConfig(data=DataConfig(**data_options), budget=BudgetConfig(steps=300)).resolved()
    (folder / "config.json").write_text(json.dumps(config.as_dict()))
    (folder / "log.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records) + tail)
    return folder


class Reader(HTMLParser):
    """The tags, attributes and text of a page, as a browser parses it."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_data(self, text: str) -> None:
        self.text += text


def is_inert(page: str) -> bool:
    """Return whether a page has no script, no event handler, no external resource and no duplicate id."""
    found = Reader(page)
    ids = [value for name, value in found.attributes if name == "id"]
    links = [value for name, value in found.attributes if name in ("href", "xlink:href", "src", "srcset", "action")]
    return (
        not {"script", "iframe", "object", "embed", "link", "base", "form", "img"} & set(found.tags)
        and not any(name.startswith("on") for name, _ in found.attributes)
        and all(link.startswith("#") for link in links)
        and all("url(" not in value.replace("url(#", "") for _, value in found.attributes)
        and len(ids) == len(set(ids))
    )


def page(folder: Path, count: int = 4) -> str:
    history = report.read_run(folder)
    return report.render_report(history, *report.report_samples(history, count, seed=0))


RECORDS = [record(step, seconds=step / 2, **(bound(step) if step % 50 == 0 else {})) for step in range(10, 301, 10)]


def test_markup_in_samples_and_names_is_escaped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In samples, file names and folder names; the mutant without escaping is noticed."""
    run = write(tmp_path / "<b onclick=x>run", [*RECORDS, record(310, samples=[EVIL])], sources=[EVIL])
    made = page(run)
    assert is_inert(made)
    text = Reader(made).text
    assert text.count(EVIL) == 2  # the sample and the summary
    assert json.dumps([EVIL], ensure_ascii=False) in text
    assert "<b onclick=x>run" in text
    unescaped = templates.environment
    monkeypatch.setattr(unescaped, "autoescape", False)
    monkeypatch.setattr(unescaped, "cache", None)  # or the templates compiled with escaping are used again
    assert not is_inert(page(run))


def test_the_page_agrees_with_the_log(tmp_path: Path) -> None:
    text = Reader(page(write(tmp_path, RECORDS))).text
    for fact in ("300 of 300", "30,000", "seconds of training", "150.0", "1.0000 ± 0.0980", "1.2500"):
        assert fact in text
    assert "at step 300" in text
    assert "optim.lr" in text
    assert "score-entropy" in text
    assert run_log.environment()["torch"] in text


def test_figures_have_alternative_text_and_follow_the_text_colour(tmp_path: Path) -> None:
    made = page(write(tmp_path, RECORDS))
    found = Reader(made)
    labels = [value for name, value in found.attributes if name == "aria-label"]
    assert found.tags.count("svg") == len(labels) == 2
    assert "from 4.900 at step 10 to 2.000 at step 300" in labels[0]
    assert "currentColor" in made
    assert "#000000" not in made  # invisible in dark mode


def test_curves_are_placed_by_step_tokens_and_time() -> None:
    """The time of a bound that was logged without it is interpolated."""
    records = [record(10, seconds=5.0), {"step": 15, "tokens": 1500, **bound(15)}, record(20, seconds=25.0)]
    panels = report.plot_training(records).axes
    assert len(panels) == 3
    for ax, expected in zip(panels, (15, 1500, 15.0), strict=True):
        (bounds,) = (line for line in ax.lines if line.get_marker() == "o")
        assert bounds.get_xydata().tolist() == [[expected, 4 - 0.15]]
    bars = panels[0].collections[0].get_segments()[0][:, 1]
    assert bars.tolist() == pytest.approx([3.85 - 1.96 * 0.05, 3.85 + 1.96 * 0.05])


def test_long_curves_are_downsampled_by_means() -> None:
    records = [record(step) for step in range(1, 3 * report.MAX_POINTS + 1)]
    curve = report.plot_training(records).axes[0].lines[0].get_xydata()
    assert len(curve) == report.MAX_POINTS
    assert np.allclose(curve[0], [2, 5 - 2 / 100])  # of steps 1, 2, 3
    assert np.isclose(curve[:, 1].mean(), np.mean([r["loss"] for r in records]))


def test_loss_by_time_is_averaged_over_thirds_of_the_run() -> None:
    records = [record(step) | {"loss_by_time": [float(step), 0.0]} for step in (1, 2, 3, 4, 5, 6)]
    lines = report.plot_loss_by_time(records).axes[0].lines
    assert [line.get_ydata()[0] for line in lines] == [1.5, 3.5, 5.5]
    assert lines[0].get_xdata().tolist() == [0.25, 0.75]


@pytest.mark.parametrize(
    ("records", "tail", "text"),
    [
        (RECORDS, '{"step": 310, "tok', "300 of 300"),  # killed in the middle of a line
        ([record(10)], "", "None was logged; train.eval_every"),
        ([{"step": 50, "tokens": 5000, **bound(50)}], "", "No loss was logged"),
        ([record(10, seconds=1.0), record(20, seconds=2.0) | {"loss": float("nan")}], "", "20 of 300"),
        ([record(10, seconds=4e4)], "", "hours of training"),
    ],
    ids=["cut off", "no bound", "no loss", "no number", "one record"],
)
def test_unfinished_runs(tmp_path: Path, records: list[dict[str, Any]], tail: str, text: str) -> None:
    made = page(write(tmp_path, records, tail))
    assert is_inert(made)
    shown = Reader(made).text
    assert text in shown
    assert "There is no checkpoint yet" in shown


def test_other_folders_are_refused(tmp_path: Path, refuses: Callable[..., None]) -> None:
    refuses(lambda: report.read_run(tmp_path), "log.jsonl", "not the folder of a run")
    refuses(lambda: report.read_run(write(tmp_path, [], '{"step": 1')), "logged nothing yet")
    refuses(
        lambda: report.read_run(write(tmp_path, RECORDS, "not json\n")), "log.jsonl, line", "not a record of a step"
    )
    refuses(lambda: report.read_run(write(tmp_path, RECORDS, '{"text": "x"}\n')), "not a record of a step")
    (write(tmp_path, RECORDS) / "config.json").unlink()
    refuses(lambda: report.read_run(tmp_path), "config.json", "cannot be read")
    history = report.read_run(write(tmp_path, RECORDS))
    refuses(lambda: report.report_samples(history, -1, 0), "samples is -1")


def test_the_recorded_environment_is_preferred(tmp_path: Path) -> None:
    run = write(tmp_path, RECORDS)
    assert "the run recorded no environment" in page(run)
    (run / "environment.json").write_text(json.dumps({"torch": "0.0.7"}))
    text = Reader(page(run)).text
    assert "0.0.7" in text
    assert "At the start of the run" in text


def test_the_commit_is_that_of_this_checkout() -> None:
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    expected = head.stdout.strip() if head.returncode == 0 else "unknown"
    assert run_log.environment()["commit"].removesuffix("-dirty") == expected


@pytest.mark.parametrize("objective", ["score-entropy", "autoregressive"])
def test_samples_are_drawn_from_the_newest_checkpoint(tmp_path: Path, objective: str) -> None:
    """They have the model's length and the corpus's characters, and depend on the seed."""
    (tmp_path / "text.txt").write_text("one two buckle my shoe\n" * 60)
    tokenizer = build_tokenizer("chars", lambda: data.read_documents([tmp_path / "text.txt"]))
    data.prepare([tmp_path / "text.txt"], tmp_path / "shards", tokenizer)
    config = RunConfig(
        data=DataConfig([str(tmp_path / "text.txt")], tokenizer="chars"),
        model=ModelConfig(width=16, depth=1, heads=2, seq_len=12),
        budget=BudgetConfig(steps=2),
        train=TrainConfig(batch_size=10, log_every=1, eval_every=1, eval_sequences=8),
        objective=objective,
    ).resolved()
    loop.run(config, lambda: tmp_path / "shards", tmp_path / "run", resume=False, on_event=lambda kind, record: None)
    history = report.read_run(tmp_path / "run")
    texts, origin = report.report_samples(history, 3, seed=1)
    assert (texts, origin) == report.report_samples(history, 3, seed=1)
    assert texts != report.report_samples(history, 3, seed=2)[0]
    assert "step-00000002" in origin
    assert [len(text) for text in texts] == [12, 12, 12]
    assert set("".join(texts)) <= set("one two buckle my shoe\n")
    assert report.report_samples(history, 0, seed=0)[0] == []
    made = Reader(report.render_report(history, texts, origin)).text
    assert all(text in made for text in texts)


def test_the_command(sedd: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path) -> None:
    run, out = write(tmp_path / "run", RECORDS), tmp_path / "deep" / "page.html"
    done = sedd("report", run, "--out", out, "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"report": str(out), "step": 300, "samples": 0}
    assert is_inert(out.read_text())
