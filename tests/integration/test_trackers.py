"""Trackers beside the log: what is sent, and that a missing one is refused at once."""

import json
from pathlib import Path

import pytest
from runs import SMALL, Sedd, log, ok

from sedd.extras import install_hint

FAKE = """
import json, types
def send(kind):
    def function(*arguments, **options):
        with open({path!r}, "a") as file:
            file.write(json.dumps([kind, arguments, options]) + "\\n")
    return function
sys.modules[{name!r}] = types.SimpleNamespace(init=send("init"), log=send("log"), finish=send("finish"))
"""


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_a_tracker_gets_the_log(sedd: Sedd, corpus: Path, tmp_path: Path, name: str) -> None:
    sent, run = tmp_path / "sent.jsonl", tmp_path / "my-run"
    words = ["train", corpus, *SMALL, "--steps", 5, "--device", "cpu", "--out", run, "--track", name]
    ok(sedd(*words, before=FAKE.format(path=str(sent), name=name)))
    calls = [json.loads(line) for line in sent.read_text().splitlines()]
    assert [kind for kind, *_ in calls] == ["init", *["log"] * 5, "finish"]
    assert calls[0][2]["name"] == "my-run"
    assert calls[0][2]["config"]["model"]["width"] == 32
    for record, (_, (numbers,), options) in zip(log(run), calls[1:-1], strict=True):
        assert options == {"step": record["step"]}
        assert numbers["loss"] == record["loss"]
        assert numbers.get("bound") == record.get("bound")
        assert all(isinstance(value, int | float) for value in numbers.values())
    assert "bound" in calls[-2][1][0]


def test_a_missing_tracker_is_refused_at_once(sedd: Sedd, tmp_path: Path) -> None:
    for name, before, sentence in (
        ("wandb", "sys.modules['wandb'] = None", install_hint("wandb")),
        ("excel", "", "choose one of wandb, trackio"),
    ):
        done = sedd("train", "nowhere.txt", "--out", tmp_path / "run", "--track", name, before=before)
        assert (done.returncode, done.stdout) == (2, "")
        assert sentence in done.stderr
    assert not (tmp_path / "run").exists()


def test_devices_are_checked(sedd: Sedd, tmp_path: Path) -> None:
    """By every command that computes, before any work."""
    for words in (["train", "x"], ["plan", "x"], ["sample"], ["infill", "{8}"], ["trace", "{8}"], ["eval", "x"]):
        assert "device is 'tpu'; choose one of cpu, cuda" in sedd(*words, "--device", "tpu").stderr
    for words in (["score", "x"], ["compare", "x"], ["quality", "x"], ["report", "x"]):
        assert "device is 'tpu'; choose one of cpu, cuda" in sedd(*words, "--device", "tpu").stderr
    (tmp_path / "a.txt").write_text("abc" * 100)
    for device in ("cuda:99", "mps"):
        done = sedd("train", tmp_path / "a.txt", *SMALL, "--device", device, "--out", tmp_path / "run")
        assert done.returncode == 2
        assert f"device is {device}" in done.stderr
