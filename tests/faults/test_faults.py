"""The short form of the faults: a few of each kind that needs no process but forks. `make verify` runs the long one."""

import subprocess
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from harness import Done, Place, refusal, same_run
from run import try_fault
from trials import FAULTS, check_again

SHORT = {
    "training killed": 2,
    "data prepare killed": 1,
    "import killed": 1,
    "sample --out killed": 2,
    "eval --out killed": 2,
    "push killed": 1,
    "NaN at a step": 1,
    "SIGHUP": 1,
    "data changed before --resume": 1,
}


@pytest.fixture(scope="module")
def place(server: subprocess.Popen[str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    place = Place(tmp_path_factory.mktemp("faults"), server)
    yield place
    place.close()


@pytest.mark.parametrize("name", SHORT)
def test_nothing_is_lost(place: Place, name: str) -> None:
    """Where faults happen depends on the moment; that nothing is lost does not."""
    row = try_fault(name, place, seed=0, times=SHORT[name])
    assert row.tried >= SHORT[name]
    assert row.lost == []


def test_a_table_has_every_kind_of_fault_and_two_hundred_kills() -> None:
    assert sum(count for name, (_, count) in FAULTS.items() if name.endswith("killed")) >= 200
    assert set(SHORT) <= set(FAULTS)


def test_losses_are_noticed(tmp_path: Path) -> None:
    """A file that is half written, a temporary one left behind, a traceback, a run with other weights."""
    whole, out = tmp_path / "whole" / "a.txt", tmp_path / "out" / "a.txt"
    for path in (whole, out):
        path.parent.mkdir()
    whole.write_text("all of it")

    def write(path: Path, text: str = "all of it", code: int = 0) -> Done:
        path.write_text(text)
        return subprocess.CompletedProcess([], code, "", "Traceback" if code else "")

    out.write_text("all")
    assert "neither" in (check_again(write, out, {}, whole) or "")
    out.write_text("before")
    assert check_again(write, out, {"": b"before"}, whole) is None
    assert "a.txt differs" in (check_again(partial(write, text="other"), out, {"": b"all of it"}, whole) or "")
    (out.parent / ".a.txt-partial").touch()
    assert "left behind" in (check_again(write, out, {"": b"other"}, whole) or "")
    assert "traceback" in (refusal(write(out, code=1)) or "")
    assert "no sentence" in (refusal(subprocess.CompletedProcess([], 2, "", "")) or "")


def test_a_run_with_other_weights_is_noticed(place: Place, tmp_path: Path) -> None:
    other = tmp_path / "run"
    assert place.train(other, "--seed", 1).returncode == 0
    assert "model.safetensors differs" in (same_run(other, place.run.out) or "")
    assert same_run(place.run.out, place.run.out) is None
