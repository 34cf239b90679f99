"""Links, headings, images and navigation of the README and the docs; the site loads nothing from elsewhere."""

import functools
import http.server
import re
import shutil
import subprocess
import sys
import threading
import unicodedata
from collections.abc import Iterator
from pathlib import Path

import pytest
from shell_blocks import BLOCK, ROOT, name, pages

DOCS = ROOT / "docs"
LINK = re.compile(r"!?\[(?:[^][]|\[[^][]*\])*\]\(([^()\s]+)\)")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
GENERATED = "docs/reference/"
"""Pages whose headings are those of docstrings."""


def prose(page: Path) -> str:
    """Return a page without its code."""
    return re.sub(r"`[^`\n]+`", "", BLOCK.sub("", page.read_text()))


def headings(page: Path) -> list[str]:
    found = re.findall(r"^#{1,6} +(.+?) *#*$", BLOCK.sub("", page.read_text()), re.MULTILINE)
    return [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading) for heading in found]


def site_anchor(heading: str) -> str:
    """Return the id that the site gives a heading; ``{#id}`` at its end names another."""
    if named := re.search(r"\{#([\w-]+)\}$", heading):
        return named[1]
    plain = unicodedata.normalize("NFKD", heading).encode("ascii", "ignore").decode()
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", plain).strip().lower())


def anchors(page: Path) -> set[str]:
    """Return the ids of a page: headings, with a number from the second of the same name on, and those in HTML."""
    found: list[str] = []
    for heading in headings(page):
        anchor = site_anchor(heading)
        found.append(anchor if anchor not in found else f"{anchor}_{found.count(anchor)}")
    return {*found, *re.findall(r"\bid=\"([\w-]+)\"", page.read_text()), *re.findall(r"\{#([\w-]+)", page.read_text())}


def links(page: Path) -> list[tuple[str, str]]:
    """Return the relative links of a page: path, which is empty within the page, and anchor."""
    targets = [target for target in LINK.findall(prose(page)) if not re.match(r"[a-z]+:", target)]
    return [(target.partition("#")[0], target.partition("#")[2]) for target in targets]


@pytest.mark.parametrize("page", pages(), ids=name)
def test_links_point_to_files_and_headings(page: Path) -> None:
    for path, anchor in links(page):
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{name(page)} links to {path}, which does not exist"
        if anchor and target.suffix == ".md" and GENERATED not in str(target):
            assert anchor in anchors(target), f"{name(page)}: {name(target)} has no heading for #{anchor}"


def test_links_of_the_docs_stay_in_the_docs() -> None:
    """The site has no other files: what is outside is named in code, or by its address."""
    outside = [
        f"{name(page)} links to {path}"
        for page in pages()
        if DOCS in page.parents
        for path, _ in links(page)
        if path and DOCS not in (page.parent / path).resolve().parents
    ]
    assert outside == []


def test_every_page_is_in_the_navigation() -> None:
    shown = re.findall(r"([\w/-]+\.md)\s*$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert len(shown) == len(set(shown))
    assert sorted(shown) == sorted(str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md"))


def test_every_image_is_shown() -> None:
    text = "".join(page.read_text() for page in pages())
    images = [path for path in (DOCS / "images").rglob("*") if path.is_file()]
    assert images
    assert [str(path) for path in images if path.name not in text] == []


def test_anchors_are_those_of_the_site() -> None:
    assert site_anchor("2026-11-16: `text8p`: 1.5 bits, two  ways") == "2026-11-16-text8p-15-bits-two-ways"
    assert site_anchor("§7 The bound −log p") == "7-the-bound-log-p"
    assert site_anchor("A name {#other}") == "other"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built strictly from a copy."""
    folder = tmp_path_factory.mktemp("site")
    shutil.copy(ROOT / "mkdocs.yml", folder)
    shutil.copytree(DOCS, folder / "docs")
    (folder / "src").symlink_to(ROOT / "src")
    command = [str(Path(sys.executable).with_name("zensical")), "build", "--strict"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "site"


EXTERNAL = r"""(?:https?:)?//[^"')\s>]+"""


@pytest.mark.verify
def test_the_site_names_no_resource_from_elsewhere(built: Path) -> None:
    """Scripts, styles, images and fonts; links that a reader follows may lead anywhere."""
    found = []
    for path in built.rglob("*.html"):
        text = path.read_text()
        found += re.findall(rf"<(?:script|img|iframe|source|video)[^>]*\ssrc=[\"']?({EXTERNAL})", text)
        found += re.findall(rf"<link[^>]*\shref=[\"']?({EXTERNAL})", text)
    for path in [*built.rglob("*.css"), *built.rglob("*.html"), *built.rglob("*.svg")]:
        found += re.findall(rf"url\([\"']?({EXTERNAL})", path.read_text(errors="replace"))
        found += re.findall(rf"@import\s+[\"']({EXTERNAL})", path.read_text(errors="replace"))
    assert list(built.rglob("*.html"))
    assert found == []


@pytest.mark.verify
def test_links_into_the_reference_have_their_headings(built: Path) -> None:
    """Whose ids are made from docstrings when the site is built."""
    linked = {(path, anchor) for page in pages() for path, anchor in links(page) if anchor and "reference/" in path}
    assert linked
    for path, anchor in linked:
        html = built / "reference" / Path(path).stem / "index.html"
        assert f'id="{anchor}"' in html.read_text(), f"{path}#{anchor}"


@pytest.fixture
def served(built: Path) -> Iterator[str]:
    class Handler(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

    handler = functools.partial(Handler, directory=str(built))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.verify
@pytest.mark.timeout(900)
@pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed: apt-get install chromium")
def test_the_pages_request_nothing_from_elsewhere_and_have_their_headings(built: Path, served: str) -> None:
    """In a browser: what the scripts of a page request too; no error, no TeX that is not rendered, every heading."""
    from playwright.sync_api import sync_playwright

    requested: list[str] = []
    errors: list[str] = []
    with sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        window = browser.new_page()
        window.on("request", lambda request: requested.append(request.url))
        window.on("pageerror", lambda error: errors.append(f"{window.url}: {error}"))
        window.on("response", lambda reply: errors.append(reply.url) if reply.status >= 400 else None)
        for page in sorted(DOCS.rglob("*.md")):
            path = str(page.relative_to(DOCS).with_suffix("")).removesuffix("index")
            window.goto(f"{served}/{path}")
            ids = set(window.eval_on_selector_all("[id]", "elements => elements.map(e => e.id)"))
            if GENERATED not in str(page):
                assert {site_anchor(heading) for heading in headings(page)} <= ids | {""}, page
            assert window.locator(".arithmatex").count() == window.locator(".arithmatex .katex").count(), page
            assert window.locator(".katex-error").all_text_contents() == [], page
        browser.close()
    assert len(requested) > len(list(DOCS.rglob("*.md")))
    assert [url for url in requested if not url.startswith((served, "data:", "blob:"))] == []
    assert errors == []
