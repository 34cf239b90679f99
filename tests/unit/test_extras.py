"""The command that installs an extra is right for a clone, a local wheel and an index install."""

import json
import re
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

from sedd import extras
from sedd.extras import install_hint

ROOT = Path(__file__).parents[2]


class Installed:
    """A distribution of which only direct_url.json is read."""

    def __init__(self, origin: dict[str, object] | None) -> None:
        self.origin = origin

    def read_text(self, name: str) -> str | None:
        assert name == "direct_url.json"
        return None if self.origin is None else json.dumps(self.origin)


def test_a_clone_is_named() -> None:
    assert install_hint("judge") == f"pip install -e '{ROOT}[judge]'"


@pytest.mark.parametrize(
    ("origin", "requirement"),
    [
        (None, "'score-entropy[mauve]'"),
        ({"url": "file:///home/me/sedd", "dir_info": {}}, "'score-entropy[mauve] @ file:///home/me/sedd'"),
        (
            {"url": "https://example.org/s.git", "vcs_info": {"vcs": "git", "commit_id": "ab12"}},
            "'score-entropy[mauve] @ git+https://example.org/s.git@ab12'",
        ),
    ],
)
def test_a_wheel_is_reinstalled_from_its_origin(
    origin: dict[str, object] | None, requirement: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(extras, "__file__", str(tmp_path / "site-packages" / "sedd" / "extras.py"))
    monkeypatch.setattr(metadata, "distribution", lambda name: Installed(origin))
    assert install_hint("mauve") == f"pip install {requirement}"


def test_without_metadata_the_index_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def missing(name: str) -> None:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(extras, "__file__", str(tmp_path / "site-packages" / "sedd" / "extras.py"))
    monkeypatch.setattr(metadata, "distribution", missing)
    assert install_hint("data") == "pip install 'score-entropy[data]'"


def test_every_extra_that_is_advised_exists() -> None:
    """In the code and in the documents; and the package index is never sent to the other project called sedd."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["name"] == extras.DISTRIBUTION
    sources = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/*.py"), *ROOT.glob("src/**/*.py")]
    text = "\n".join(file.read_text() for file in sources)
    found = re.findall(r"install_hint\(['\"]([\w-]+)", text) + re.findall(r"pip install [^\n]*?\[([\w,-]+)\]", text)
    advised = {extra for group in found for extra in group.split(",")}
    assert advised <= set(project["optional-dependencies"])
    assert {"data", "judge", "lm-eval", "mauve", "molecules"} <= advised
    assert "sedd[" not in text.replace("score-entropy[", "")
