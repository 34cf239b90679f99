"""A network of the user's own in the application: every command finds it again, and no one else's is imported."""

import json
import shutil
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
from commands import Commands, start_server
from runs import log, ok, same
from serving import sedd_serve
from test_plugins import install

MODULE = """
    from pathlib import Path

    import torch
    from torch import nn

    Path(__file__).with_suffix(".imported").touch()

    class MyNet(nn.Module):
        def __init__(self, num_states, width=16):
            super().__init__()
            self.embed, self.time = nn.Embedding(num_states, width), nn.Linear(1, width)
            self.hidden, self.out = nn.Linear(width, width), nn.Linear(width, num_states)
            self.dropout = nn.Dropout(0.1)

        def forward(self, x, sigma):
            h = self.embed(x) + self.time(sigma.log1p()[:, None])[:, None]
            return self.out(self.dropout(torch.relu(self.hidden(h + h.mean(1, keepdim=True)))))
"""
SMALL = [
    *("--seq-len", 32, "--batch-size", 8, "--tokenizer", "chars", "--set", "network.width=24"),
    *("--set", "train.log_every=1", "--set", "train.eval_every=3", "--set", "train.eval_sequences=16"),
]


@pytest.fixture(scope="module")
def code(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a module, which is installed nowhere."""
    folder = tmp_path_factory.mktemp("code")
    (folder / "mynets.py").write_text(textwrap.dedent(MODULE))
    return folder


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory, environment: dict[str, str]) -> dict[str, str]:
    """One of a user without records of networks."""
    return {**environment, "XDG_CONFIG_HOME": str(tmp_path_factory.mktemp("settings")), "COLUMNS": "400"}


@pytest.fixture(scope="module")
def sedd(environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Commands]:
    with start_server(environment) as server:
        yield Commands(server, tmp_path_factory.mktemp("output"))
        assert server.stdin
        server.stdin.close()


@pytest.fixture(scope="module")
def run(sedd: Commands, code: Path, corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was trained in the folder of the code."""
    out = tmp_path_factory.mktemp("runs") / "own"
    words = ("train", corpus, "--network", "mynets:MyNet", *SMALL, "--steps", 6, "--out", out)
    ok(sedd(*words, before=f"os.chdir({str(code)!r})"))
    return out


@pytest.mark.parametrize(
    "words",
    [
        ("sample", "RUN", "-n", 2, "--steps", 8),
        ("infill", "RUN", "the {4} sat", "a{8}", "--steps", 8),
        ("trace", "RUN", "--steps", 8, "--out", "TMP/trace.html"),
        ("eval", "RUN", "--draws", 2),
        ("score", "RUN", "the cat", "--draws", 4),
        ("info", "RUN"),
        ("report", "RUN", "--out", "TMP/report.html"),
        ("compare", "RUN", "RUN", "--draws", 2, "--plot", "TMP/plot.html"),
        ("export", "RUN", "--out", "TMP/exported", "--dtype", "int8"),
    ],
    ids=lambda words: str(words[0]),
)
def test_every_command_finds_the_network_of_a_run(
    words: tuple[object, ...], sedd: Commands, run: Path, tmp_path: Path
) -> None:
    """From another folder, and without naming it."""
    shown = [run if word == "RUN" else str(word).replace("TMP", str(tmp_path)) for word in words]
    done = sedd(*shown, before=f"os.chdir({str(tmp_path)!r})")
    ok(done)
    if words[0] == "info":
        assert "mynets:MyNet, width 24" in done.stdout
    if words[0] == "export":
        ok(sedd("sample", tmp_path / "exported", "-n", 1, "--steps", 4, before=f"os.chdir({str(tmp_path)!r})"))


def test_a_resumed_run_has_the_same_bits(sedd: Commands, run: Path, corpus: Path, code: Path, tmp_path: Path) -> None:
    parts, before = tmp_path / "parts", f"os.chdir({str(code)!r})"
    words = ("train", corpus, "--network", "mynets:MyNet", *SMALL, "--set", "optim.lr_schedule=constant", "--out")
    ok(sedd(*words, tmp_path / "whole", "--steps", 6, before=before))
    ok(sedd(*words, parts, "--steps", 3, before=before))
    ok(sedd("train", "--out", parts, "--resume", "--steps", 6))
    same(tmp_path / "whole", parts, 6)


@pytest.mark.parametrize(
    "options", [[], ["--fsdp"], ["--set", "train.precision=bfloat16"]], ids=["ddp", "fsdp", "bfloat16"]
)
def test_two_processes_train_as_one(
    options: list[str], sedd: Commands, corpus: Path, code: Path, tmp_path: Path
) -> None:
    words = ("train", corpus, "--network", "mynets:MyNet", "--recipe", "tiny", *SMALL, "--steps", 3, "--out")
    before = f"os.chdir({str(code)!r}); torch.nn.Dropout.forward = lambda self, x: x"
    plain = [word for word in options if word != "--fsdp"]
    ok(sedd(*words, tmp_path / "one", *plain, before=before))
    ok(sedd(*words, tmp_path / "two", *options, before=before, processes=2))
    losses = [[record["loss"] for record in log(tmp_path / name) if "loss" in record] for name in ("one", "two")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-2 if "train.precision=bfloat16" in options else 1e-5)
    ok(sedd("sample", tmp_path / "two", "-n", 1, "--steps", 4))


def test_the_server_answers(run: Path, environment: dict[str, str]) -> None:
    """Also texts of different lengths together, although the network takes no padding."""
    with sedd_serve(environment, run, "--name", "own") as server:
        request = {"model": "own", "prompt": ["the", "a cat"], "max_tokens": 8, "steps": 4, "seed": 1}
        reply = server.site.send("/v1/completions", request)
        assert reply.status == 200, reply.body
        scored = server.site.send("/v1/score", {"model": "own", "text": ["the cat", "a"], "draws": 2})
        assert scored.status == 200, scored.body


@pytest.mark.parametrize("words", [("sample",), ("eval",), ("serve",), ("export", "--out", "TMP/x")], ids=str)
def test_a_downloaded_folder_imports_nothing(words: tuple[str, ...], sedd: Commands, run: Path, tmp_path: Path) -> None:
    """Neither a class that it brings nor one that is installed; ``--network`` allows it."""
    theirs = tmp_path / "theirs"
    ok(sedd("export", run, "--out", theirs, "--dtype", "float32"))
    downloaded = tmp_path / "downloaded"
    shutil.copytree(theirs, downloaded)
    (downloaded / "hostile.py").write_text(textwrap.dedent(MODULE))
    (downloaded / "manifest.json").unlink()
    config = json.loads((downloaded / "config.json").read_text())
    command, *options = (word.replace("TMP", str(tmp_path)) for word in words)
    for name in ("hostile:MyNet", "os:system", "mynets:MyNet"):
        config["network"]["class"] = name
        (downloaded / "config.json").write_text(json.dumps(config))
        done = sedd(command, downloaded, *options, before=f"os.chdir({str(downloaded)!r})")
        assert done.returncode == 2
        assert f"--network {name}" in done.stderr
        assert "Traceback" not in done.stderr
    assert not (downloaded / "hostile.imported").exists()
    config["network"]["class"] = "hostile:MyNet"
    (downloaded / "config.json").write_text(json.dumps(config))
    if command == "sample":
        named = ("--network", "hostile:MyNet", "-n", 1, "--steps", 4)
        ok(sedd(command, downloaded, *named, before=f"os.chdir({str(downloaded)!r})"))


def test_a_downloaded_configuration_imports_nothing(sedd: Commands, run: Path, corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((run / "config.json").read_text())
    refused = sedd("train", corpus, "--config", tmp_path / "config.json", "--out", tmp_path / "x")
    assert refused.returncode == 2
    assert "--network mynets:MyNet" in refused.stderr


def test_an_entry_point_is_a_name(code: Path, corpus: Path, environment: dict[str, str], tmp_path: Path) -> None:
    """An installed package's network is found by everyone who has installed it, wherever the run comes from."""
    install(code, "my-networks", {"sedd.networks": {"my-net": "mynets:MyNet"}})
    strangers = {**environment, "PYTHONPATH": f"{code}:{environment.get('PYTHONPATH', '')}"}
    with start_server({**strangers, "XDG_CONFIG_HOME": str(tmp_path / "settings")}) as server:
        sedd = Commands(server, tmp_path)
        assert "my-net" in sedd("train", "--help").stdout
        ok(sedd("train", corpus, "--network", "my-net", *SMALL, "--steps", 1, "--out", tmp_path / "run"))
        shutil.move(tmp_path / "run", tmp_path / "moved")
        ok(sedd("sample", tmp_path / "moved", "-n", 1, "--steps", 4))
        assert not (tmp_path / "settings" / "sedd").exists()
        assert server.stdin
        server.stdin.close()
