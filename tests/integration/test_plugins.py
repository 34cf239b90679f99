"""Another package adds a process and a sampler through entry points: `tests/plugin`, as someone else would write it."""

import os
import random
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from commands import Commands, start_server

PLUGIN = Path(__file__).parents[1] / "plugin"


def install(site: Path, name: str, groups: dict[str, dict[str, str]]) -> None:
    """Write the metadata of an installed package, as pip does."""
    info = site / f"{name.replace('-', '_')}-0.1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.1\n")
    lines = [line for group, names in groups.items() for line in (f"[{group}]", *map(" = ".join, names.items()))]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where packages are installed: the plugin, one that cannot be imported, and one that takes a built-in name."""
    site = tmp_path_factory.mktemp("site")
    project = tomllib.loads((PLUGIN / "pyproject.toml").read_text())["project"]
    install(site, project["name"], project["entry-points"])
    install(site, "broken", {"sedd.samplers": {"broken": "no_such_module:Sampler"}})
    install(site, "greedy-name", {"sedd.processes": {"uniform": "no_such_module:Uniform"}})
    return site


@pytest.fixture(scope="module")
def sedd(site: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Commands]:
    """Commands in forks of a process that was started where these packages are installed."""
    path = os.pathsep.join([str(site), str(PLUGIN), *filter(None, [os.environ.get("PYTHONPATH")])])
    cache = str(tmp_path_factory.mktemp("cache"))
    with start_server({**os.environ, "PYTHONPATH": path, "SEDD_CACHE": cache, "COLUMNS": "400"}) as server:
        yield Commands(server, tmp_path_factory.mktemp("output"))
        assert server.stdin
        server.stdin.close()


@pytest.fixture(scope="module")
def model(sedd: Commands, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of short ordered sequences under noise that only the plugin has."""
    folder = tmp_path_factory.mktemp("plugin")
    draw = random.Random(0)
    rows = [[min(9, max(0, draw.randrange(10) + draw.choice((-1, 0, 1)))) for _ in range(8)] for _ in range(400)]
    (folder / "walks.txt").write_text("".join(" ".join(map(str, row)) + "\n" for row in rows))
    small = ("model.width=32", "model.depth=1", "model.heads=2", "model.seq_len=8", "train.batch_size=8")
    done = sedd(
        *("train", folder / "walks.txt", "--out", folder / "run", "--process", "random-walk", "--tokenizer", "ints:10"),
        *("--parameterization", "mean", "--steps", 3, "--set", "train.eval_sequences=8"),
        *(word for option in small for word in ("--set", option)),
    )
    assert done.returncode == 0, done.stderr
    return folder / "run"


def test_the_names_show_up_in_help(sedd: Commands) -> None:
    assert "random-walk" in sedd("train", "--help").stdout
    assert "renoise" in sedd("sample", "--help").stdout


@pytest.mark.parametrize("sampler", ["renoise", "ancestral"])
def test_a_plugin_trains_and_samples(sedd: Commands, model: Path, sampler: str) -> None:
    done = sedd("sample", model, "--sampler", sampler, "--steps", 4, "-n", 3)
    assert done.returncode == 0, done.stderr
    rows = [[int(word) for word in line.split()] for line in done.stdout.splitlines()]
    assert [len(row) for row in rows] == [8, 8, 8]
    assert all(0 <= token < 10 for row in rows for token in row)
    assert sedd("info", model).returncode == 0


def test_the_bound_of_a_plugin_is_estimated(sedd: Commands, model: Path) -> None:
    done = sedd("score", model, "1 2 3 4 3 2 1 0", "--json", "--draws", 4)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("words", "sentences"),
    [
        (["--sampler", "broken"], ["sampler broken cannot be imported from the package broken", "no_such_module"]),
        (["--sampler", "other"], ["sampler is 'other'; choose one of first-hitting", "renoise"]),
    ],
)
def test_a_plugin_that_fails_is_a_sentence(sedd: Commands, model: Path, words: list[str], sentences: list[str]) -> None:
    done = sedd("sample", model, *words)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert all(sentence in done.stderr for sentence in sentences)


def test_a_built_in_name_stays_built_in(sedd: Commands, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("abc " * 200)
    done = sedd("plan", tmp_path / "text.txt", "--recipe", "tiny", "--process", "uniform", "--set", "model.depth=1")
    assert done.returncode == 0, done.stderr
    assert "process uniform is built in; that of the package greedy-name is ignored" in done.stderr


def test_the_process_is_what_its_rates_define(monkeypatch: pytest.MonkeyPatch) -> None:
    """Transitions compose, noise forgets the token, and the score of an exact denoiser is the ratio of marginals."""
    monkeypatch.syspath_prepend(str(PLUGIN))
    from ordinal_noise import RandomWalk

    process, sigma = RandomWalk(5), torch.tensor([0.3, 1.1], dtype=torch.float64)
    one, two, both = (process.transition_matrix(s) for s in (sigma[0], sigma[1], sigma.sum()))
    torch.testing.assert_close(one @ two, both)
    torch.testing.assert_close(process.transition_matrix(torch.tensor(50.0).double()), torch.full((5, 5), 0.2).double())
    p_data = torch.tensor([0.1, 0.4, 0.2, 0.05, 0.25], dtype=torch.float64)
    p_t = one @ p_data
    x = torch.arange(5)[:, None]
    log_mean = (one[:, None] * p_data / p_t[:, None, None]).log()
    score = process.mean_score(log_mean, x, sigma[:1].expand(5)).exp()
    torch.testing.assert_close(score[:, 0], p_t[None] / p_t[:, None])
    draws = process.corrupt(torch.full((40_000, 1), 1), sigma[:1].expand(40_000), torch.Generator().manual_seed(0))
    torch.testing.assert_close(draws.flatten().bincount(minlength=5) / 40_000, one[:, 1].float(), atol=0.01, rtol=0)
