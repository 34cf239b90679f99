"""Screenshots of the pages: the report of a run, and the server's page. They need Chromium and playwright."""

import hashlib
import importlib.util
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch

from figures.canvas import Picture, language, spell

SOURCE = Path(__file__).parents[2] / "src/sedd"
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
TRAINING = "--steps 300 --set model.width=64 --set model.depth=2 --set model.heads=2 --set model.seq_len=64"
"""The run that the report is about: a small network, on words of the language of docs/pictures.md."""
SETTINGS = {"steps": "32", "temperature": "0.6", "seed": "1"}
"""What is typed into the server's page."""


def missing() -> str | None:
    """Return why no screenshots can be made; None if they can."""
    if importlib.util.find_spec("playwright") is None:
        return "playwright is not installed: pip install playwright"
    return "Chromium is not installed: apt-get install chromium" if CHROMIUM is None else None


def digests(*patterns: str, source: Path = SOURCE) -> dict[str, str]:
    """Return the hash of every file below ``source`` that matches one of the patterns; by default of the package."""
    files = sorted(file for pattern in patterns for file in source.glob(pattern))
    return {str(file.relative_to(source)): hashlib.sha256(file.read_bytes()).hexdigest()[:16] for file in files}


@contextmanager
def browser_page(width: int, height: int) -> Iterator[Any]:
    """Open a page of Chromium in the light theme, without motion."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as started:
        arguments = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        browser = started.chromium.launch(executable_path=CHROMIUM, args=arguments)
        size = {"width": width, "height": height}
        page = browser.new_context(viewport=size, reduced_motion="reduce", color_scheme="light").new_page()
        page.set_default_timeout(300_000)
        yield page
        browser.close()


# The report of a run ---------------------------------------------------------------------------------------


@cache
def report() -> dict[str, Any]:
    """What the look of the report depends on: its templates and the code that fills them."""
    return {"training": TRAINING, **digests("templates/base.html.j2", "templates/macros.html.j2",
                                           "templates/report.html.j2", "evaluation/report.py")}  # fmt: skip


def shoot_report() -> bytes:
    """Train, write the report, and return its first screen as a PNG."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        words = language().draw(20_000, torch.Generator().manual_seed(0))
        (folder / "words.txt").write_text(" ".join(spell(word) for word in words))
        for command in (f"train words.txt --out run --recipe tiny --seed 0 {TRAINING}", "report run"):
            subprocess.run([sys.executable, "-m", "sedd", *command.split()], cwd=folder, check=True)
        report_file = folder / "run/report.html"
        report_file.write_text(report_file.read_text(encoding="utf-8").replace(f"{folder}/", ""), encoding="utf-8")
        with browser_page(1000, 1290) as page:
            page.goto(report_file.as_uri())
            return bytes(page.screenshot())


# The server's page -----------------------------------------------------------------------------------------


@cache
def server_page() -> dict[str, Any]:
    """What the look of the page depends on."""
    return {"settings": SETTINGS, **digests("serve/page/*.html", "serve/page/*.css", "serve/page/*.js")}


def shoot_page() -> bytes:
    """Start the server, fill the gaps of the example, and return the page as a PNG."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = subprocess.Popen([sys.executable, "-m", "sedd", "serve", "stories", "--port", str(port)])
    try:
        address = f"http://127.0.0.1:{port}"
        wait_for(f"{address}/health", server)
        with browser_page(1280, 760) as page:
            page.goto(address)
            page.locator("#count:not(:empty)").wait_for()
            for field, value in SETTINGS.items():
                page.fill(f"[name={field}]", value)
            page.click("#run")
            page.locator("#run:not([disabled])").wait_for()
            page.locator(".stats", has_text="mean entropy").first.wait_for()
            return bytes(page.screenshot())
    finally:
        server.terminate()
        server.wait()


def wait_for(address: str, server: "subprocess.Popen[bytes]") -> None:
    """Wait until an address answers; raise if the server has ended."""
    while server.poll() is None:
        try:
            with urllib.request.urlopen(address, timeout=5):
                return
        except OSError:
            time.sleep(0.5)
    raise RuntimeError(f"the server ended with code {server.returncode}")


PICTURES = {
    "report": Picture(report, shoot_report),
    "page": Picture(server_page, shoot_page),
}
