"""Engines that start processes and restart them: torchrun with restarts, and Ray Train."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from runs import SMALL, Sedd, log

from sedd.training import checkpoint

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.verify

KILL_ONCE = """
import os, signal
from pathlib import Path
from sedd.training import loop

def kill_once(rank, marker):
    step = loop.train_step
    def train_step(trainer, *given):
        if rank == 1 and trainer.state.step == 6 and not Path(marker).exists():
            Path(marker).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return step(trainer, *given)
    loop.train_step = train_step
"""
ELASTIC = """
import os, sys
from sedd.cli import main
from kill_once import kill_once
kill_once(int(os.environ["RANK"]), sys.argv.pop())
main()
"""
RAY = """
import json, sys
import ray
from ray_train import fit, train_worker

def worker(settings):
    from kill_once import kill_once
    from ray import train
    kill_once(train.get_context().get_world_rank(), settings["marker"])
    train_worker(settings)

if __name__ == "__main__":
    settings = json.loads(sys.argv[1])
    ray.init(num_cpus=2, include_dashboard=False, runtime_env={"env_vars": {"PYTHONPATH": sys.argv[2]}})
    result = fit(settings, worker)
    print(json.dumps({"checkpoint": result.checkpoint.path, "metrics": result.metrics}))
"""


def run(
    script: str, words: list[object], tmp_path: Path, environment: dict[str, str], *launcher: str
) -> tuple[str, str]:
    """Run a script with a module that kills the second process at the seventh step, once."""
    (tmp_path / "kill_once.py").write_text(KILL_ONCE)
    (tmp_path / "script.py").write_text(script)
    path = os.pathsep.join([str(tmp_path), str(ROOT / "examples"), *filter(None, [environment.get("PYTHONPATH")])])
    command = [sys.executable, *launcher, str(tmp_path / "script.py"), *map(str, words)]
    if script == RAY:
        command.append(path)
    done = subprocess.run(
        command, env={**environment, "PYTHONPATH": path}, capture_output=True, text=True, check=False, timeout=280
    )
    assert done.returncode == 0, done.stderr[-5000:]
    assert (tmp_path / "killed").exists()
    return done.stdout, done.stderr


def whole_run(sedd, corpus: Path, tmp_path: Path) -> Path:
    done = sedd("train", corpus, *SMALL, "--save-every", 5, "--steps", 12, "--out", tmp_path / "whole")
    assert done.returncode == 0, done.stderr
    return tmp_path / "whole"


def check_curve(whole: Path, out: Path) -> None:
    """The curve of the losses continues as if no process had been killed."""
    for a, b in zip(log(whole), log(out), strict=True):
        assert a["step"] == b["step"]
        assert abs(a["loss"] - b["loss"]) < 1e-5


def test_torchrun_restarts_a_killed_rank(sedd: Sedd, corpus: Path, tmp_path: Path, environment: dict[str, str]) -> None:
    whole, out = whole_run(sedd, corpus, tmp_path), tmp_path / "run"
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "2"]
    words = ["train", corpus, *SMALL, "--save-every", 5, "--steps", 12, "--out", out, tmp_path / "killed"]
    # torch 2.13: with a shared store the processes may wait for each other for ever after a restart, without sedd too
    environment = {**environment, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    _, stderr = run(ELASTIC, words, tmp_path, environment, *launcher)
    assert "resuming from step-00000005" in stderr
    check_curve(whole, out)


def test_ray_train_restarts_a_killed_worker(
    sedd: Sedd, corpus: Path, tmp_path: Path, environment: dict[str, str]
) -> None:
    """Two workers on a local cluster; Ray has the metrics of every validation and the last checkpoint."""
    pytest.importorskip("ray.train", reason="ray is not installed; it is ray[train] on the package index")
    whole, out = whole_run(sedd, corpus, tmp_path), tmp_path / "run"
    sets = [word for word in SMALL if "=" in word]
    options: dict[str, dict[str, float]] = {"train": {"save_every": 5}}
    for key, value in (word.split("=") for word in sets):
        section, name = key.split(".")
        options.setdefault(section, {})[name] = float(value) if "." in value else int(value)
    settings = {
        "sources": [str(corpus)], "out": str(out), "storage": str(tmp_path / "ray"), "workers": 2, "use_gpu": False,
        "marker": str(tmp_path / "killed"), "options": {**options, "steps": 12},
    }  # fmt: skip
    stdout, _ = run(RAY, [json.dumps(settings)], tmp_path, environment)
    found = json.loads(stdout.splitlines()[-1])
    assert found["metrics"]["finished"]
    assert found["metrics"]["bound"] == log(out)[-1]["bound"]
    assert checkpoint.load_json(Path(found["checkpoint"]), "state")["step"] == 12
    assert checkpoint.corruption(Path(found["checkpoint"]), checkpoint.CHECKPOINT_FILES) is None
    check_curve(whole, out)
