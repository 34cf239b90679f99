"""Models in the box: known by name in every command, the default of those that are given none, small on the disk."""

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import boxed
import pytest
from runs import SMALL, Sedd, ok
from without_torch import check_refusals

import sedd as package
from sedd import models
from sedd.training import checkpoint

ROOT = Path(__file__).parents[2]
DRAWS = ["--draws", "2"]
STEPS = ["--steps", "2"]


@pytest.fixture(scope="module")
def box(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return boxed.write_box(tmp_path_factory.mktemp("box") / "models", "stories", "tales")


@pytest.fixture
def with_box(sedd: Sedd, box: Path, tmp_path: Path) -> Sedd:
    """Run a command in an empty folder, with the models of ``box``."""
    here = tmp_path / "here"
    here.mkdir()
    before = f"os.chdir({str(here)!r}); os.environ['SEDD_MODELS'] = {str(box)!r}"
    return lambda *words: sedd(*words, before=before)


NOTE = "sedd: no model was named; using stories\n"


def test_a_model_is_exported_small_and_its_cost_is_stated(sedd: Sedd, corpus: Path, tmp_path: Path) -> None:
    """The bound of the int8 weights differs from that of the run by less than its error, on the command line twice."""
    run, small = tmp_path / "run", tmp_path / "small"
    ok(sedd("train", corpus, "--out", run, "--steps", 40, *SMALL, "--objective", "lambda-dce", "--lr", 0.01))
    text = tmp_path / "test.txt"
    text.write_text(corpus.read_text()[:1500])
    done = sedd("export", run, "--out", small, "--dtype", "int8", "--eval", text, "--draws", 4, "--json")
    ok(done)
    record = json.loads(done.stdout)
    assert record["bytes"] < 0.4 * record["bytes_before"]
    assert (record["dtype"], record["parameters"]) == ("int8", checkpoint.read_header(small).parameters)
    first, second = (json.loads(sedd("eval", folder, text, "--draws", 4, "--json").stdout) for folder in (run, small))
    cost = record["cost"]
    assert cost["nats_per_token"] == pytest.approx(second["nats_per_token"] - first["nats_per_token"], abs=2e-4)
    assert cost["nats_per_token"] != 0
    assert abs(cost["nats_per_token"]) + 2 * cost["stderr_nats_per_token"] < first["stderr_nats_per_token"]
    card = (small / "README.md").read_text()
    assert f"int8 costs {cost['nats_per_token']:.6f} ± {cost['stderr_nats_per_token']:.6f}" in card
    assert f"≤ {second['nats_per_token']} ± {second['stderr_nats_per_token']}" in card
    shown = sedd("info", small).stdout
    assert re.search(r"weights +int8\n", shown)
    assert f"{second['nats_per_token']} ± {second['stderr_nats_per_token']} nats per token" in shown


def test_every_command_takes_the_name(with_box: Sedd, box: Path, tmp_path: Path) -> None:
    """And gives the same as for the folder."""
    (tmp_path / "test.txt").write_text("Tom had a ball.\n")
    commands = [
        ["sample", "tales", "-n", 1, *STEPS],
        ["infill", "tales", "Once {8} end.", *STEPS],
        ["score", "tales", "a fox", *DRAWS],
        ["eval", "tales", tmp_path / "test.txt", *DRAWS],
        ["info", "tales"],
    ]
    for words in commands:
        named = with_box(*words)
        by_path = with_box(words[0], box / "tales", *words[2:])
        ok(named)
        assert named.stdout == by_path.stdout != "", words
        assert "no model was named" not in named.stderr
    ok(with_box("trace", "tales", "--out", tmp_path / "trace.html", *STEPS))
    assert "A text of tales" in (tmp_path / "trace.html").read_text()
    ok(with_box("push", "tales", "owner/name", "--out", tmp_path / "pushed"))
    assert "Once there was" in (tmp_path / "pushed/README.md").read_text()
    done = with_box("quality", "tales", "--molecules", "-n", 2, *STEPS, "--json", "--known", tmp_path / "test.txt")
    ok(done)
    assert json.loads(done.stdout)["samples"] == 2


def test_without_a_model_the_default_is_used(with_box: Sedd, tmp_path: Path) -> None:
    """A first argument that is no model is a text, a template or data."""
    (tmp_path / "here/test.txt").write_text("Tom had a ball.\n")
    (tmp_path / "here/lines.txt").write_text("A {4} b.\n")
    pairs = [
        (["sample", "-n", 1, *STEPS], ["sample", "stories", "-n", 1, *STEPS]),
        (["infill", "Once {8} end.", *STEPS], ["infill", "stories", "Once {8} end.", *STEPS]),
        (["infill", "--file", "lines.txt", *STEPS], ["infill", "stories", "--file", "lines.txt", *STEPS]),
        (["score", "a fox", "tales of old", *DRAWS], ["score", "stories", "a fox", "tales of old", *DRAWS]),
        (["eval", "test.txt", *DRAWS], ["eval", "stories", "test.txt", *DRAWS]),
        (["info"], ["info", "stories"]),
    ]
    for short, long in pairs:
        one, two = with_box(*short), with_box(*long)
        ok(one)
        ok(two)
        assert one.stdout == two.stdout != "", short
        assert NOTE in one.stderr
        assert NOTE not in two.stderr
    ok(with_box("trace", "Once {8} end.", "--out", tmp_path / "a.html", *STEPS))
    ok(with_box("trace", "--out", tmp_path / "b.html", *STEPS))
    assert "A text of stories" in (tmp_path / "b.html").read_text()
    # a text in which a model would be looked for by its name, and one too long for the name of a file
    assert NOTE in with_box("score", "tales.", *DRAWS).stderr
    long_text = with_box("score", "a" * 5000, *DRAWS)
    assert (long_text.returncode, "Traceback" in long_text.stderr) == (2, False)
    assert f"trained on {boxed.SEQ_LEN}" in long_text.stderr


def test_info_states_the_facts_of_the_card(with_box: Sedd) -> None:
    shown = " ".join(with_box("info", "stories").stdout.split())
    for words in (
        *("weights int8", "summary Short tales.", "data Tales that a grammar generated.", "licence MIT"),
        *("limits It repeats itself.", "command sedd train tales.txt --out run"),
        *("bound, tales.txt 1.5 ± 0.25 nats per token", "cost of int8 0.000120 nats per token"),
    ):
        assert words in shown
    assert "more below" not in shown  # the rest of the command is in the card
    assert json.loads(with_box("info", "--json").stdout)["card"]["data"] == boxed.FACTS.data


def test_a_folder_of_that_name_here_comes_first(with_box: Sedd, box: Path, tmp_path: Path) -> None:
    """If it holds a model; a note states it."""
    here = tmp_path / "here"
    (here / "tales").mkdir()
    (here / "tales/story.txt").write_text("a text")
    assert json.loads(with_box("info", "tales", "--json").stdout)["folder"] == str(box / "tales")
    counted = with_box(
        "quality", "tales", "--molecules", "--known", "tales/story.txt", "--json"
    )  # of the folder's texts
    assert json.loads(counted.stdout)["samples"] == 1
    boxed.write_model(here / "stories", seed=5)
    done = with_box("info", "stories", "--json")
    assert json.loads(done.stdout)["folder"] == "stories"
    assert done.stderr == "sedd: stories is the folder here, not the bundled model of that name\n"
    assert json.loads(with_box("info", "--json").stdout)["folder"] == str(box / "stories")
    assert json.loads(with_box("info", box / "stories", "--json").stdout)["folder"] == str(box / "stories")


def test_python_loads_by_name(box: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SEDD_MODELS", str(box))
    monkeypatch.chdir(tmp_path)
    assert models.built_in_names() == ["stories", "tales"]
    one, two = (package.load(name, device="cpu") for name in ("tales", box / "tales"))
    assert one.loaded.folder == box / "tales"
    assert str(one.sample(steps=2)) == str(two.sample(steps=2))
    saved = one.save(tmp_path / "half", dtype="bfloat16")
    assert checkpoint.read_header(saved).dtype == "bfloat16"


REFUSALS = [
    ("sample", "no model was given, and the default, stories, is not there (this build has no bundled models)"),
    ("infill 'Once {3} end.'", "this build has no bundled models"),
    ("score 'a text'", "this build has no bundled models"),
    ("eval text.txt", "this build has no bundled models"),
    ("quality", "this build has no bundled models"),
    ("info stories", "stories holds no model: it does not exist; give the folder of a run"),
    ("sample stories", "this build has no bundled models"),
]
BOX_REFUSALS = [
    ("sample story", "story holds no model: it does not exist; give the folder of a run, one of its checkpoints"),
    ("sample story", "bundled models: stories, tales"),
    ("infill story 'Once {3} end.'", "'story' is neither a model nor a template with a gap"),
    ("infill story", "bundled models: stories, tales"),
    ("trace story", "'story' is neither a model nor a template"),
    ("eval story", "'story' is neither a model nor data"),
    ("eval story text.txt", "story holds no model: it does not exist"),
    ("eval stories", "the data of stories is not bundled; name a text, as in: sedd eval stories FILE"),
    ("eval", "the data of stories is not bundled"),
    ("score", "no text was given"),
    ("score ./story 'the cat'", "'./story' is neither a model nor a text"),
    ("score text.txt", "'text.txt' is neither a model nor a text"),
    ("infill tales", "no template was given"),
    ("quality", "samples need a judge"),
    ("export stories --out new --dtype int4", "dtype is 'int4'; choose one of int8, bfloat16, float32"),
    ("export stories --out new --dtype int8 --format sedd", "give one of them"),
    ("export stories --out new --eval text.txt", "add --dtype"),
    ("export stories --out new --dtype int8 --eval none.txt", "none.txt does not exist"),
    ("export stories --out new --dtype int8 --eval text.txt --draws 3", "draws is 3; they come in pairs"),
]


def test_unknown_models_are_rejected(box: Path, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("a text")
    (tmp_path / "empty").mkdir()
    check_refusals(tmp_path, REFUSALS, with_torch=True, SEDD_MODELS=str(tmp_path / "empty"))
    check_refusals(tmp_path, BOX_REFUSALS, with_torch=True, SEDD_MODELS=str(box))


def test_the_help_lists_the_models(box: Path) -> None:
    def shown(words: list[str], folder: Path) -> str:
        command = [sys.executable, "-m", "sedd", *words, "--help"]
        environment = {**os.environ, "COLUMNS": "200", "TERM": "dumb", "SEDD_MODELS": str(folder)}
        done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
        return " ".join(done.stdout.replace("│", " ").split())

    assert "Bundled models: stories, tales." in shown([], box)
    assert "or a bundled model: stories, tales. By default stories." in shown(["info"], box)
    help_of_infill = shown(["infill"], box.parent / "nothing")
    assert "bundled model" not in help_of_infill
    rule = "the first argument is a model if it is a bundled one, a path that holds a model"
    assert rule in shown(["infill"], box)
    assert rule not in help_of_infill


BUILD = "from setuptools import build_meta as b; b.build_wheel('dist'); b.build_sdist('dist')"


def test_wheel_and_sdist_hold_the_models(box: Path, tmp_path: Path) -> None:
    """Built from a tree with the package's configuration, its first module and a model."""
    package = [f"src/sedd/{name}" for name in ("__init__.py", "__init__.pyi", "models/__init__.py")]
    for name in ("pyproject.toml", "README.md", "LICENSE", *package):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    shutil.copytree(box / "stories", tmp_path / "src/sedd/models/stories")
    subprocess.run([sys.executable, "-W", "ignore", "-c", BUILD], cwd=tmp_path, check=True, capture_output=True)
    (wheel,), (sdist,) = (list((tmp_path / "dist").glob(pattern)) for pattern in ("*.whl", "*.tar.gz"))
    with zipfile.ZipFile(wheel) as packed, tarfile.open(sdist) as archive:
        assert "sedd/__init__.pyi" in packed.namelist()  # `import sedd` reads it
        for names in (packed.namelist(), archive.getnames()):
            found = {name.rpartition("/")[2] for name in names if "sedd/models/stories/" in name}
            assert found == {path.name for path in (box / "stories").iterdir()}
            assert {"ema.safetensors", "config.json", "manifest.json", "card.json", "README.md"} <= found


def test_a_model_of_ones_own_has_a_name(sedd: Sedd, tmp_path: Path) -> None:
    """The commands of the guide."""
    page = (ROOT / "docs/guides/models.md").read_text()
    export, variable, sample = re.findall(r"^(?:sedd|export) .*mine.*$|^export .*$", page, re.MULTILINE)
    boxed.write_model(tmp_path / "run")
    (tmp_path / "test.txt").write_text("Tom had a ball.\n")
    here = f"os.chdir({str(tmp_path)!r}); "
    ok(sedd(*export.split()[1:], "--draws", 2, before=here))
    name, value = variable.removeprefix("export ").split("=")
    done = sedd(*sample.split()[1:], *STEPS, before=f"{here}os.environ[{name!r}] = {value!r}")
    ok(done)
    assert done.stdout
