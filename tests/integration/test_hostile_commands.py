"""Commands refuse counts and outputs before any work."""

from pathlib import Path

import publications
import pytest
from typer.testing import CliRunner

from sedd.cli.root import app
from sedd.hub import convert


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a small model."""
    folder = publications.folder(tmp_path_factory.mktemp("source"), publications.KINDS[0], "safetensors")
    imported = convert.read_published(folder)
    return convert.save_model_folder(imported, None, tmp_path_factory.mktemp("models") / "model", "source")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["report", "run", "--samples"], "samples is"),
        (["serve", "--slots"], "slots is"),
    ],
)
def test_commands_refuse_them_before_any_work(words: list[str], message: str, model: Path) -> None:
    words = [words[0], str(model), *words[1:]] if words[0] == "serve" else words
    error = CliRunner().invoke(app, [*words, str(10**12)]).exception
    assert isinstance(error, ValueError)
    assert message in str(error)


@pytest.mark.parametrize("command", ["infill", "trace"])
def test_the_gaps_of_a_template_are_added_up_before_any_work(command: str, model: Path, tmp_path: Path) -> None:
    words = [command, str(model), "{16777216}" * 30, "--out", str(tmp_path / "out.html")]
    error = CliRunner().invoke(app, words).exception
    assert isinstance(error, ValueError)
    assert str(30 * 2**24) in str(error)


@pytest.mark.parametrize(
    "words",
    [
        ["eval", "MODEL", "DATA", "--out", "OUT.jsonl"],
        ["sample", "MODEL", "--out", "OUT.txt"],
        ["infill", "MODEL", "1 {2}", "--out", "OUT.txt"],
        ["trace", "MODEL", "--out", "OUT.html"],
        ["quality", "MODEL", "--judge", "MODEL", "--out", "OUT.jsonl"],
        ["quality", "MODEL", "--judge", "MODEL", "--save", "OUT.jsonl"],
    ],
    ids=lambda words: f"{words[0]} {words[-2]}",
)
def test_commands_refuse_them_before_the_model_is_loaded(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    def load_model(*args: object, **options: object) -> None:
        raise AssertionError("the model is loaded")

    monkeypatch.setattr("sedd.loading.load_model", load_model)
    (tmp_path / "data.txt").write_text("1 2 3\n")
    names = {"MODEL": str(model), "DATA": str(tmp_path / "data.txt")}
    error = CliRunner().invoke(app, [names.get(word, word.replace("OUT", "/proc/out")) for word in words]).exception
    assert isinstance(error, ValueError)
    assert "/proc cannot be written to" in str(error)
