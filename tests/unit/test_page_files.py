"""The files of the page: complete, from this server alone, and text never becomes markup."""

import re
from pathlib import Path

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from sedd.serve.guard import Guard
from sedd.serve.metrics import Metrics
from sedd.serve.page import FOLDER, MEDIA, add_page

FILES = sorted(path for path in FOLDER.iterdir() if path.suffix in MEDIA)


@pytest.fixture
def client() -> TestClient:
    app = FastAPI()
    app.add_middleware(Guard, metrics=Metrics(), max_body=1000, keys=frozenset({"key"}), hosts=None)
    add_page(app)
    return TestClient(app)


def test_the_page_is_served_without_a_key_and_nothing_else_is(client: TestClient) -> None:
    assert "text/html" in client.get("/").headers["content-type"]
    for path in FILES:
        reply = client.get(f"/page/{path.name}")
        assert reply.headers["content-type"].startswith(MEDIA[path.suffix])
        assert reply.content == path.read_bytes()
    for route in ("/page/__init__.py", "/page/..%2fapp.py", "/page/none.js"):
        assert client.get(route).status_code == 404
    assert client.get("/openapi.json").status_code == 401


def test_the_page_names_files_that_exist_and_no_other_server() -> None:
    html = (FOLDER / "index.html").read_text()
    names = re.findall(r'(?:src|href)="page/([\w.]+)"', html)
    names += [name for path in FILES for name in re.findall(r'from "\./([\w.]+)"', path.read_text())]
    assert {path.name for path in FILES} == {"index.html", *names}
    for path in FILES:
        assert set(re.findall(r"https?://[^\"' ]+", path.read_text())) <= {"http://www.w3.org/2000/svg"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_text_is_inserted_as_text(path: Path) -> None:
    refused = (
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|createContextualFragment|DOMParser|\beval\(|Function\("
    )
    assert re.findall(refused, path.read_text()) == []
    assert re.findall(r"<script(?![^>]* src=)|<style|\sstyle=|\son\w+=", path.read_text()) == []
    assert max(map(len, path.read_text().splitlines())) <= 120


def test_every_element_that_the_scripts_use_is_in_the_page() -> None:
    html = (FOLDER / "index.html").read_text()
    ids = set(re.findall(r'\sid="([\w-]+)"', html))
    used = {name for path in FOLDER.glob("*.js") for name in re.findall(r'"#([a-z][\w-]+)"', path.read_text())}
    assert len(used) > 30
    assert used <= ids
