"""The reference: generated pages are those of today's program; every public module and every paper is there."""

import json
import re
from collections.abc import Callable
from dataclasses import is_dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from fastapi.testclient import TestClient

import sedd
from sedd.serve.app import build_app
from sedd.serve.errors import STATUS
from sedd.training.config import OptimConfig, RunConfig

ROOT = Path(__file__).parents[2]
REFERENCE = ROOT / "docs/reference"


@pytest.fixture
def pages(experiment: Callable[[str], ModuleType]) -> ModuleType:
    return experiment("reference_pages")


@pytest.fixture
def page_text(experiment: Callable[[str], ModuleType]) -> ModuleType:
    return experiment("reference_text")


# Generated pages -------------------------------------------------------------------------------------------


def test_the_generated_pages_are_up_to_date(pages: ModuleType) -> None:
    assert pages.stale() == []


def test_another_default_makes_a_page_stale(pages: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutant: a configuration whose learning rate is another one."""
    monkeypatch.setattr(OptimConfig.__init__, "__defaults__", ("adamw", 5e-4, *OptimConfig.__init__.__defaults__[2:]))
    assert pages.stale() == ["docs/reference/configuration.md is stale; run python experiments/reference_pages.py"]


def test_every_configuration_key_is_documented() -> None:
    """The page has the keys of `sedd.training.config` in order, with their defaults, a type and a meaning."""
    page = (REFERENCE / "configuration.md").read_text().partition("## Options of samplers")[0]
    rows = re.findall(r"^\| `([a-z0-9_.]+)` \| \S[^|]*\S \| `([^`]*)` \| \S", page, re.MULTILINE)
    sections, keys = [], []
    for key, value in RunConfig().as_dict().items():
        if is_dataclass(getattr(RunConfig(), key)):
            sections += [(f"{key}.{name}", default) for name, default in value.items()]
        else:
            keys.append((key, value))
    expected = [(key, value if isinstance(value, str) else json.dumps(value)) for key, value in [*sections, *keys]]
    assert [(key, default) for key, default in rows if "options." not in key] == expected


def test_what_the_page_allows_is_allowed_and_nothing_else(pages: ModuleType) -> None:
    """Intervals and choices of a few keys, as their errors state them."""
    page = (REFERENCE / "configuration.md").read_text()
    assert "| `model.depth` | integer, 1 to 1,024 | `6` |" in page
    assert "| `data.packing` | `packed`, `lines` | `packed` |" in page
    assert "| `noise.options.lo` | `geometric` | number, 0 < lo < hi |" in page
    assert "| `objective_options.steps` | `d3pm` | integer, at least 1 | `1000` |" in page


def test_every_command_is_documented(pages: ModuleType) -> None:
    """Each command has a heading, and a row for each of its options."""
    sections = re.split(r"^##+ ", (REFERENCE / "cli.md").read_text(), flags=re.MULTILINE)[1:]
    shown = {section.split("\n", 1)[0]: section for section in sections}
    root = pages.typer.main.get_command(pages.app)
    listed = {" ".join(("sedd", *words)): command for words, command in pages.commands(root)}
    assert list(shown) == list(listed)
    for name, command in listed.items():
        rows = re.findall(r"^\| (`[^|]+`) \|", shown[name], re.MULTILINE)
        assert len(rows) == len(command.params), name


# HTTP ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("served")
    (folder / "book.txt").write_text("It was the best of times, it was the worst of times. " * 100)
    tiny = {"width": 16, "depth": 1, "heads": 2, "seq_len": 32}
    model = sedd.train(folder / "book.txt", out=folder / "run", recipe="tiny", steps=1, model=tiny)
    with TestClient(build_app(model.loaded, "run")) as client:
        yield client


def paths(value: Any, path: str = "") -> set[str]:
    """The paths of all fields of a reply; those of `logprobs` and `alternatives` are described in one row."""
    if isinstance(value, dict) and not path.endswith("logprobs"):
        return {p for k, v in value.items() for p in paths(v, f"{path}.{k}" if path else k)}
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return {p for item in value for p in paths(item, f"{path}[]")}
    return {path}


TEMPLATE = {"template": "It was {8} times.", "steps": 4, "seed": 1}
REQUESTS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "It was ", "max_tokens": 4, "steps": 2, "logprobs": 1},
    "/v1/infill": TEMPLATE,
    "/v1/score": {"text": "It was", "draws": 2},
    "/v1/tokenize": {"text": "It was"},
}


def test_replies_have_the_fields_of_the_page(page_text: ModuleType, client: Any) -> None:
    for path, fields in page_text.REPLIES.items():
        reply = client.post(path, json=REQUESTS[path]) if path in REQUESTS else client.get(path)
        assert reply.status_code == 200, reply.text
        assert paths(reply.json()) == set(fields), path


def events(text: str) -> list[tuple[str, Any]]:
    """The events of a stream: name, or an empty one, and data."""
    found = []
    for block in text.replace("\r", "").strip().split("\n\n"):
        lines = dict(line.split(": ", 1) for line in block.splitlines() if not line.startswith(":"))
        if "data" in lines:  # else a comment that keeps the connection open
            found.append((lines.get("event", ""), lines["data"]))
    return found


def test_events_have_the_fields_of_the_page(page_text: ModuleType, client: Any) -> None:
    reply = client.post("/v1/infill", json={**TEMPLATE, "diffusing": True, "details": True})
    seen: dict[str, set[str]] = {}
    for name, data in events(reply.text):
        seen.setdefault(name, set()).update(paths(json.loads(data)))
    seen["step"] -= {"edits"}  # of a step without any
    assert list(seen) == ["start", "step", "end"]
    assert seen == {name: set(page_text.EVENT_FIELDS[name]) for name in seen}


def test_a_stream_is_as_the_page_states(client: Any) -> None:
    request = {"prompt": "It was ", "max_tokens": 4, "stream": True, "stream_options": {"include_usage": True}}
    *chunks, last = events(client.post("/v1/completions", json=request).text)
    assert last == ("", "[DONE]")
    records = [json.loads(data) for name, data in chunks if name == ""]
    assert len(records) == len(chunks)
    *parts, final = records
    assert all(set(part) == {"id", "created", "model", "object", "seed", "choices"} for part in parts)
    assert [part["choices"][0]["finish_reason"] for part in parts] == [None] * (len(parts) - 1) + ["length"]
    assert final["choices"] == []
    assert set(final["usage"]) == {"prompt_tokens", "completion_tokens", "total_tokens", "network_calls"}


def test_error_codes_of_the_page_are_those_of_the_server(page_text: ModuleType, client: Any) -> None:
    listed = {(code, status) for code, status, _ in page_text.ERRORS if code}
    assert {(code, str(status)) for code, status in STATUS.items()} == listed - {("overloaded", "503")}
    for request, code, status in (
        ({"template": 3}, "invalid_request", 400),
        ({"template": "{4}", "model": "other"}, "model_not_found", 404),
    ):
        reply = client.post("/v1/infill", json=request)
        assert (reply.status_code, reply.json()["error"]["code"]) == (status, code)
    assert client.get("/v1/nothing").json()["error"]["code"] is None


# Modules ---------------------------------------------------------------------------------------------------


def modules() -> dict[str, Path]:
    """Every module of the package by its name."""
    found = {}
    for path in sorted((ROOT / "src").rglob("*.py")):
        parts = path.relative_to(ROOT / "src").with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def is_public(name: str) -> bool:
    return not any(part.startswith("_") for part in name.split(".")) and not name.startswith("sedd.cli")


def test_every_public_module_is_in_the_reference_once() -> None:
    """The modules of the command line are described by its own page."""
    shown = [
        name
        for page in sorted(REFERENCE.glob("*.md"))
        for name in re.findall(r"^::: ([\w.]+)$", page.read_text(), re.MULTILINE)
    ]
    assert sorted(shown) == sorted(filter(is_public, modules()))


# References ------------------------------------------------------------------------------------------------

IDENTIFIER = re.compile(r"arXiv \d{4}\.\d{4,5}|doi:10\.\d+/[\w./()-]*\w")


def entries() -> dict[str, tuple[str, str]]:
    """The entries of the references page by their identifier, else their title: the title and the whole entry."""
    found = {}
    for text in re.split(r"^- ", (ROOT / "docs/references.md").read_text(), flags=re.MULTILINE)[1:]:
        entry = " ".join(text.partition("\n## ")[0].split())
        title, *_ = re.findall(r'"([^"]+)"\.', entry)
        identifier = IDENTIFIER.search(entry)
        found[identifier[0] if identifier else title] = title, entry
    return found


def cited() -> dict[str, set[str]]:
    """What the source of each module cites: identifiers, and titles of what has none."""
    titles = {key for key in entries() if not IDENTIFIER.fullmatch(key)}
    sources = {name: " ".join(path.read_text().split()) for name, path in modules().items()}
    return {
        name: set(IDENTIFIER.findall(source)) | {title for title in titles if f'"{title}"' in source}
        for name, source in sources.items()
    }


def test_the_page_has_every_paper_that_a_docstring_cites_and_no_other() -> None:
    assert set(entries()) == set().union(*cited().values())


def test_a_citation_has_a_number_a_doi_or_a_known_title() -> None:
    """``Author et al. 2024, "Title"`` in a docstring: of what has a number, the number follows."""
    titles = {title.lower() for title, _ in entries().values()}
    for module, path in modules().items():
        source = " ".join(path.read_text().split())
        for citation in re.finditer(r'\b(?:19|20)\d\d, "([^"]+)"(.{0,40})', source):
            title, after = citation[1].lower(), citation[2]
            assert any(known.startswith(title) for known in titles), f"{module} cites {citation[1]}"
            key = next(key for key, (known, _) in entries().items() if known.lower().startswith(title))
            assert not IDENTIFIER.fullmatch(key) or key in after, f"{module} cites {citation[1]} without {key}"


def test_papers_that_pages_cite_are_on_the_page_of_references() -> None:
    for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        numbers = re.findall(r"arXiv[: ](\d{4}\.\d{4,5})|arxiv\.org/abs/(\d{4}\.\d{4,5})", page.read_text())
        assert {f"arXiv {a or b}" for a, b in numbers} <= set(entries()), page


def test_entries_have_authors_a_year_and_a_page() -> None:
    for key, (_, entry) in entries().items():
        assert re.match(r"\*\*\w[^*]+\.\*\* ", entry), key
        assert re.search(r"\((?:19|20)\d\d\)\.\*\*", entry) or key == "Large Text Compression Benchmark", key
        assert re.search(r"See \[", entry), key
