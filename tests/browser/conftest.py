"""A tiny model behind the server, and real Chromium in front of it; screenshots are kept in build/browser."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from serving import site

from sedd.loading import LoadedModel
from sedd.serve.app import build_app
from sedd.serve.limits import Limits
from sedd.tokenizer import Characters
from sedd.training.config import RunConfig
from sedd.training.setup import build_model, build_network, build_setup

try:
    from playwright.sync_api import sync_playwright
except ModuleNotFoundError:
    sync_playwright = None
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
SHOTS = Path(__file__).parents[2] / "build" / "browser"
ALPHABET = "\n &<=>abcdefghijklmnopqrstuvwxyz{}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = "playwright is not installed: pip install playwright" if sync_playwright is None else None
    reason = "Chromium is not installed: apt-get install chromium" if CHROMIUM is None else reason
    for item in items:
        if reason and Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def model() -> LoadedModel:
    """A network with random weights over small letters and what markup is made of."""
    config = RunConfig(objective="lambda-dce")
    config.model.seq_len, config.model.width, config.model.depth, config.model.heads = 128, 16, 1, 1
    tokenizer = Characters(alphabet=ALPHABET)
    setup = build_setup(config.resolved(), tokenizer.vocab_size)
    network = build_network(config, setup).eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(0)
    for parameter in network.parameters():
        parameter.normal_(0, 0.3, generator=generator)
    return LoadedModel(build_model(config, network, setup), network, *setup, tokenizer, config, Path("tiny"))


@pytest.fixture(scope="session")
def address(model: LoadedModel) -> Iterator[str]:
    with site(build_app(model, "tiny", Limits(steps=100_000))) as served:
        yield f"{served.url}/"


@pytest.fixture
def address_with_key(model: LoadedModel) -> Iterator[str]:
    app = build_app(model, "tiny", keys=frozenset({"correct-key"}))
    with site(app, {"authorization": "Bearer correct-key"}) as served:
        yield f"{served.url}/"


@pytest.fixture(scope="session")
def shots() -> Path:
    """The folder of screenshots, the artefact of a CI run."""
    SHOTS.mkdir(parents=True, exist_ok=True)
    return SHOTS


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    arguments = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
    with sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=arguments)
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def window(browser: Any) -> Any:
    """One window for all tests that need no other: to make one takes longer than most tests."""
    return new_page(browser)


def new_page(browser: Any, **options: Any) -> Any:
    options = {"viewport": {"width": 1280, "height": 800}, "reduced_motion": "reduce", **options}
    page = browser.new_context(**options).new_page()
    page.set_default_timeout(20_000)
    return page


@pytest.fixture
def open_page(
    browser: Any, window: Any, address: str, shots: Path, request: pytest.FixtureRequest
) -> Iterator[Callable[..., Any]]:
    """Open the page; a script error or a breach of the content security policy fails the test."""
    problems: list[str] = []
    pages: list[Any] = []

    def note(message: Any) -> None:
        if message.type == "error" and "Failed to load resource" not in message.text:  # a status, which tests expect
            problems.append(message.text)

    def note_error(error: Any) -> None:
        problems.append(str(error))

    def open_(fragment: str = "", at: str = address, **options: Any) -> Any:
        page = new_page(browser, **options) if options or pages else window
        pages.append(page)
        page.on("console", note)
        page.on("pageerror", note_error)
        page.goto(at + fragment)
        if at == address:
            page.locator("#count:not(:empty), #text-problem:not([hidden])").first.wait_for()
        return page

    yield open_
    pages[-1].screenshot(path=shots / f"{request.node.name}.png")
    for page in pages:
        if page is not window:
            page.context.close()
            continue
        page.evaluate("localStorage.clear(), sessionStorage.clear()")
        page.unroute_all()
        page.goto("about:blank")
        page.remove_listener("console", note)
        page.remove_listener("pageerror", note_error)
    assert problems == []
