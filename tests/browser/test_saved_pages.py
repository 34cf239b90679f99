"""The pages that commands write: they work under their Content-Security-Policy, and no other script runs on them."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sedd import trace
from sedd.evaluation import compare
from sedd.tokenizer import Bytes

EVIL = "</pre><script>window.evil = 1</script><img src=x onerror='window.evil = 1'>"
INJECT = """() => {
  const script = document.createElement("script");
  script.text = "window.evil = 1";
  document.body.append(script);
  document.body.insertAdjacentHTML("beforeend", "<img src=x onerror='window.evil = 1'>");
  return window.evil === undefined;
}"""


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    """A page that counts what its policy has refused."""
    page = browser.new_context().new_page()
    page.add_init_script(
        "window.refused = []; addEventListener('securitypolicyviolation', (e) => refused.push(e.type))"
    )
    yield page
    page.context.close()


def trace_page(path: Path) -> None:
    ids = Bytes().encode(EVIL).tolist()
    rows = [trace.trace_tokens(Bytes().tokens(ids), range(len(ids)))]
    path.write_text(trace.trace_page(rows, EVIL, EVIL), encoding="utf-8")


def compare_page(path: Path) -> None:
    numbers = {"trained_tokens": 300, "seconds": 2.0, "bits": 2.5, "stderr_bits": 0.1, "bits_per_char": 2.5}
    texts = {name: EVIL for name in compare.COLUMNS if name not in numbers}
    points = np.array([100.0, 200.0, 300.0])
    curve = compare.ValidationCurve(points, points / 100, 3 - points / 600, points / 3000)
    compare.write_comparison([{**texts, **numbers, "is_exact": False, "protocol": EVIL}], [], [curve], path)


@pytest.mark.parametrize("write", [trace_page, compare_page])
def test_a_saved_page_runs_its_own_script_alone(page: Any, tmp_path: Path, write: Any) -> None:
    write(tmp_path / "page.html")
    page.goto((tmp_path / "page.html").as_uri())
    assert page.evaluate("refused") == []
    assert page.evaluate("window.evil") is None
    assert page.locator("h1").count() == 1
    if write is trace_page:
        assert page.locator(".later").count() == 0
        page.locator("#step").fill("10")
        assert page.locator(".later").count() == len(EVIL.encode()) - 11  # a given token, and ten steps
        assert page.locator("#now").inner_text() == "10"
    else:
        assert page.locator("svg").evaluate("svg => svg.getBoundingClientRect().height") > 100
    assert page.evaluate(INJECT)
    page.wait_for_function("refused.length >= 2")
    assert page.evaluate("window.evil") is None
