"""The page in real Chromium: what a reader does with it, by mouse, by touch and by keyboard alone."""

import itertools
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from serving import site

from sedd.serve.app import build_app

Open = Callable[..., Any]
SENTENCE = "the cat sat on a mat"


def link(text: str, **settings: object) -> str:
    return "#" + urlencode({"text": text, "seed": 3, "steps": 8, "sampler": "tweedie", **settings})


def run(page: Any) -> None:
    page.click("#run")
    wait_until_done(page)


def wait_until_done(page: Any) -> None:
    page.locator("#run:not([disabled])").wait_for()
    page.locator(".stats", has_text="mean entropy").first.wait_for()


def words(page: Any) -> list[str]:
    return [text.strip() for text in page.locator(".piece").all_text_contents()]


def masks(page: Any) -> int:
    return page.locator(".token.mask").count()


def seek(page: Any, step: int) -> None:
    page.locator("#time").fill(str(step))
    page.locator("#readout", has_text=f"step {step}/").wait_for()


def test_an_example_is_there_that_the_model_can_read(open_page: Open) -> None:
    page = open_page()
    assert page.locator(".gap").count() >= 1
    assert page.locator("#text-problem").is_hidden()
    assert "tiny · absorbing noise · up to 128 tokens" in page.text_content("#model-line")
    assert page.locator("#empty").is_visible()
    run(page)
    assert masks(page) == 0
    assert page.locator("#empty").is_hidden()


def test_words_become_gaps_by_click_and_by_dragging(open_page: Open) -> None:
    page = open_page(link(SENTENCE))
    page.locator(".piece", has_text="cat").click()
    page.locator(".gap").wait_for()
    assert words(page) == ["the", "4", "sat", "on", "a", "mat"]  # a character per token, with the space before it
    start, end = (page.locator(".piece", has_text=word).bounding_box() for word in ("on", "mat"))
    page.mouse.move(start["x"] + 8, start["y"] + 8)
    page.mouse.down()
    page.mouse.move(end["x"] + 8, end["y"] + 8, steps=4)
    page.mouse.up()
    page.locator(".gap >> nth=1").wait_for()
    assert words(page) == ["the", "4", "sat", "9"]
    page.click("#gap-more")
    assert words(page) == ["the", "4", "sat", "10"]
    page.fill("#gap-length", "12")
    page.press("#gap-length", "Enter")
    assert words(page) == ["the", "4", "sat", "12"]
    page.click("#gap-restore")
    assert words(page) == ["the", "4", "sat", "on", "a", "mat"]


def test_a_text_is_written_and_its_gaps_are_kept(open_page: Open) -> None:
    page = open_page(link("the {4} sat"))
    page.check("input[name=mode][value=write]", force=True)
    assert page.input_value("#source") == "the {4} sat"
    page.fill("#source", "a {4} saw the cat")
    page.evaluate("document.querySelector('#source').setSelectionRange(14, 17)")
    page.click("#insert-gap")
    page.locator("#count", has_text="18 / 128").wait_for()  # 11 characters and two gaps
    assert page.input_value("#source") == "a {4} saw the {3}"
    page.check("input[name=mode][value=cut]", force=True)
    assert words(page) == ["a", "4", "saw", "the", "3"]


def test_a_run_is_watched_scrubbed_and_played(open_page: Open) -> None:
    page = open_page(link("the {20} mat", steps=16))
    run(page)
    assert "16/16 calls" in page.text_content(".stats")
    assert "seed 3" in page.text_content(".stats")
    assert page.locator(".bars rect").count() == 16
    final = page.text_content(".tokens")
    counts = []
    for step in (0, 4, 8, 12, 16):
        seek(page, step)
        counts.append(masks(page))
    assert counts[0] == 20
    assert counts[-1] == 0
    assert counts == sorted(counts, reverse=True)
    assert page.text_content(".tokens") == final
    seek(page, 12)
    page.click("#play")
    page.locator("#play[aria-label=Pause]").wait_for()
    page.locator("#readout", has_text="step 16/16").wait_for()
    page.locator("#play[aria-label=Play]").wait_for()
    assert masks(page) == 0


def test_tokens_tell_step_entropy_and_alternatives(open_page: Open) -> None:
    page = open_page(link("the {12} mat"))
    run(page)
    token = page.locator(".token").nth(3)
    token.hover()
    card = page.locator("#card")
    card.wait_for()
    assert re.search(r"%\s+step \d of 8 · t [01]\.\d\d · \d\.\d\d nats", card.inner_text())
    assert card.locator("li").count() == 5
    assert re.search(r"step \d, entropy \d", token.get_attribute("aria-label"))
    steps = page.locator(".token").evaluate_all("tokens => tokens.map((token) => token.dataset.bin)")
    assert len(set(steps)) > 2
    page.check("input[name=colour][value=entropy]", force=True)
    page.locator("#legend", has_text="unsure").wait_for()
    page.check("input[name=colour][value=none]", force=True)
    page.locator(".token[data-bin]").first.wait_for(state="detached")


def test_a_run_can_be_canceled_and_another_follows(open_page: Open) -> None:
    page = open_page(link("the {40} mat", steps=100_000))
    page.click("#run")
    page.locator("#progress-text", has_text="/100000 network calls").wait_for()
    page.click("#cancel")
    page.locator("#toast", has_text="Canceled").wait_for()
    assert page.locator("#cancel").is_hidden()
    page.fill("[name=steps]", "4")
    run(page)
    assert "4/4 calls" in page.text_content(".stats")
    assert page.text_content("#toast") == ""


def test_a_run_canceled_before_its_first_edit_shows_that_it_was(open_page: Open) -> None:
    page = open_page(link("the {40} mat"))
    page.route("**/v1/infill", lambda route: None)  # a reply that never begins
    page.click("#run")
    page.click("#cancel")
    page.locator("#toast", has_text="Canceled").wait_for()
    assert page.locator("#player").is_hidden()
    assert page.locator("#empty").is_visible()


def test_a_bad_setting_is_named(open_page: Open) -> None:
    page = open_page(link("the {4} mat"))
    for field, value, message in (
        ("temperature", "hot", "Temperature is “hot”; it must be a number from 0 to 100"),
        ("seed", "1.5", "Seed is “1.5”; it must be a whole number"),
        ("steps", "-3", "Steps is “-3”; it must be a whole number from 1 to 100000, or inf"),
    ):
        page.fill(f"[name={field}]", value)
        page.click("#run")
        assert message in page.text_content("fieldset .problem-line")
        assert page.get_attribute(f"[name={field}]", "aria-invalid") == "true"
        assert page.evaluate("document.activeElement.name") == field
    assert page.locator("#empty").is_visible()


def test_a_bad_text_is_explained(open_page: Open) -> None:
    page = open_page(link("the {500} mat"))
    assert "takes up to 128" in page.text_content("#text-problem")
    page.click("#run")
    page.locator("#problem", has_text="128").wait_for()
    page.click("#problem-close")
    page.click("#clear")
    page.fill("#source", SENTENCE)
    page.click("#run")
    assert "There is no gap to fill" in page.text_content("#problem-text")
    page.fill("#source", "∂ {3}")
    page.locator("#text-problem", has_text="∂").wait_for()


def test_a_server_that_is_gone_or_busy_is_explained(open_page: Open) -> None:
    page = open_page(link("the {4} mat"))
    busy = '{"error": {"message": "the server is busy; try again in 7 s", "code": "overloaded"}}'
    page.route("**/v1/infill", lambda route: route.fulfill(status=429, headers={"retry-after": "7"}, body=busy))
    page.click("#run")
    page.locator("#problem", has_text="The server is busy; try again in 7 s.").wait_for()
    page.unroute("**/v1/infill")
    page.route("**/v1/infill", lambda route: route.abort())
    page.click("#problem-action")
    page.locator("#problem", has_text="The server does not answer").wait_for()
    page.unroute("**/v1/infill")
    page.click("#problem-action")
    wait_until_done(page)
    assert page.locator("#problem").is_hidden()


def test_text_stays_text(open_page: Open) -> None:
    attack = "<b onmouseover=a>{4}<b on=a>"
    page = open_page(link(attack))
    run(page)
    assert page.text_content(".given") == "<b onmouseover=a>"
    assert page.locator("#words b, .tokens b, #card b").count() == 0
    assert page.text_content(".tokens").startswith("<b onmouseover=a>")
    assert page.text_content(".tokens").endswith("<b on=a>")


def test_a_reply_stays_text(open_page: Open) -> None:
    page = open_page(link("a {1}"))
    edit = (
        '{"position": 2, "id": 1, "text": "<img src=x onerror=alert(1)>", "entropy": 1, "alternatives": [["<b>", 1]]}'
    )
    events = (
        ("start", '{"tokens": [{"given": true}, {"given": true}, {"given": false}], "nfe_total": 1, "seed": 3}'),
        ("step", f'{{"step": 1, "t": 1, "nfe_done": 1, "nfe_total": 1, "edits": [{edit}]}}'),
        ("end", '{"infilled": "<script>", "usage": {"network_calls": 1}}'),
    )
    body = "".join(f"event: {name}\ndata: {data}\n\n" for name, data in events)
    page.route("**/v1/infill", lambda route: route.fulfill(body=body, content_type="text/event-stream"))
    run(page)
    page.locator(".token").hover()
    page.locator("#card", has_text="<b>").wait_for()
    assert page.text_content(".tokens") == "a <img src=x onerror=alert(1)>"
    assert page.locator(".tokens img, #card b").count() == 0


def test_a_link_restores_everything(open_page: Open) -> None:
    page = open_page(link("the {10} mat{2}{{", steps=12, temperature=0.5, top_p=0.9, **{"b.steps": 5, "b.seed": 8}))
    page.fill("[name=seed] >> nth=0", "")
    run(page)
    drawn = page.locator(".tokens").all_text_contents()
    page.click("#share")
    page.locator("#toast:not(:empty)").wait_for()
    shared = page.url.partition("#")[2]
    assert "seed=" in shared
    again = open_page("#" + shared)
    assert words(again) == words(page)
    for name, value in (("steps", "12"), ("temperature", "0.5"), ("top_p", "0.9")):
        assert again.input_value(f"[name={name}] >> nth=0") == value
    assert again.input_value("[name=steps] >> nth=1") == "5"
    assert again.input_value("[name=seed] >> nth=1") == "8"
    run(again)
    assert again.locator(".tokens").all_text_contents() == drawn


def test_the_page_begins_with_the_temperature_of_the_card(browser: Any, model: Any, tmp_path: Path) -> None:
    (tmp_path / "card.json").write_text('{"sample_metrics": {"temperature": 0.6}}')
    with site(build_app(replace(model, folder=tmp_path), "warm")) as served:
        page = browser.new_context().new_page()
        page.goto(f"{served.url}/")
        page.locator("#settings-summary", has_text="T 0.6").wait_for(state="attached")
        assert page.input_value("[name=temperature]") == "0.6"


def test_two_settings_are_compared(open_page: Open) -> None:
    page = open_page(link("the {10} mat", steps=16))
    page.click("#compare")
    assert page.input_value("[name=steps] >> nth=1") == "4"
    assert page.locator("[name=steps].differs").count() == 1
    run(page)
    stats = page.locator(".stats").all_text_contents()
    assert "16/16 calls" in stats[0]
    assert "4/4 calls" in stats[1]
    assert "tokens as in A" in stats[1]
    seek(page, 0)
    assert masks(page) == 20
    a, b = (box.bounding_box() for box in page.locator(".pane").all())
    assert a["y"] == b["y"]
    assert a["x"] + a["width"] <= b["x"]


def test_the_keyboard_alone_is_enough(open_page: Open) -> None:
    page = open_page(link(SENTENCE, steps=6))
    page.locator(".piece").first.focus()
    press = page.keyboard.press
    press("ArrowRight")
    press("Shift+ArrowRight")
    press("Enter")
    page.locator(".gap").wait_for()
    assert words(page) == ["the", "8", "on", "a", "mat"]
    press("+")
    press("+")
    press("-")
    assert words(page) == ["the", "9", "on", "a", "mat"]
    press("Control+Enter")
    wait_until_done(page)
    page.locator(".token").first.focus()
    press("ArrowRight")
    page.locator("#card").wait_for()
    assert page.evaluate("document.activeElement === document.querySelectorAll('.token')[1]")
    assert page.evaluate("document.activeElement.getAttribute('aria-describedby')") == "card"
    press("Escape")
    assert page.locator("#card").is_hidden()
    press(",")
    page.locator("#readout", has_text="step 5/6").wait_for()
    press("2")
    assert page.is_checked("input[name=colour][value=entropy]")
    seed = page.input_value("[name=seed]")
    press("n")
    assert page.input_value("[name=seed]") != seed
    press("?")
    assert page.locator("#help-dialog").is_visible()
    assert page.locator("#shortcuts dt").count() > 10
    page.uncheck("#single-keys")
    press("Escape")
    press("b")
    assert page.locator("fieldset").count() == 1


def brightness(page: Any) -> int:
    return sum(map(int, re.findall(r"\d+", page.evaluate("getComputedStyle(document.body).backgroundColor"))[:3]))


def test_nothing_is_cut_off_at_three_widths_in_both_themes(open_page: Open, shots: Path) -> None:
    page = open_page(link("the {30} mat and {20} near water", **{"b.steps": 4}))
    run(page)
    for width, theme in itertools.product((390, 820, 1440), ("light", "dark")):
        page.set_viewport_size({"width": width, "height": 900})
        page.emulate_media(color_scheme=theme)
        page.locator(".token").nth(9).hover()
        page.locator("#card").wait_for()
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        assert (brightness(page) > 384) == (theme == "light")
        assert page.evaluate("document.getAnimations().length") == 0
        page.screenshot(path=shots / f"{width}-{theme}.png", full_page=True)
    page.click("#theme-button")
    assert "light" in page.text_content("#theme-button")
    assert brightness(page) > 384
    page.reload()
    assert brightness(page) > 384
    page.emulate_media(color_scheme="light")
    page.set_viewport_size({"width": 1280, "height": 800})


CONTRAST = """() => {
  const context = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const rgb = (colours) => {  // painted over one another, as a browser mixes them
    for (const colour of colours) { context.fillStyle = colour; context.fillRect(0, 0, 1, 1); }
    return [...context.getImageData(0, 0, 1, 1).data].slice(0, 3);
  };
  const luminance = (values) => values.reduce((sum, value, i) => {
    const v = value / 255;
    return sum + [0.2126, 0.7152, 0.0722][i] * (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
  }, 0);
  const backgrounds = (element) =>
    element ? [...backgrounds(element.parentElement), getComputedStyle(element).backgroundColor] : [];
  const found = {};
  for (const element of document.querySelectorAll("body *")) {
    const own = [...element.childNodes].some((node) => node.nodeType === 3 && node.data.trim());
    if (!own || !element.checkVisibility() || element.closest(".mask, [disabled]")) continue;
    const style = getComputedStyle(element);
    const below = backgrounds(element);
    const levels = [luminance(rgb([...below, style.color])), luminance(rgb(below))].sort((a, b) => b - a);
    const name = `${element.tagName} ${element.className} ${element.id} ${element.textContent.slice(0, 20)}`;
    found[name] = (levels[0] + 0.05) / (levels[1] + 0.05);
  }
  return found;
}"""


def test_text_can_be_read_in_both_themes(open_page: Open) -> None:
    """The contrast of all text with what is behind it is at least 4.5 (WCAG AA)."""
    page = open_page(link("the {30} mat", **{"b.steps": 4}))
    run(page)
    for theme, colour in itertools.product(("light", "dark"), ("step", "entropy")):
        page.emulate_media(color_scheme=theme)
        page.check(f"input[name=colour][value={colour}]", force=True)
        page.locator(".token").nth(9).hover()
        page.locator("#card").wait_for()
        found = page.evaluate(CONTRAST)
        assert len(found) > 60
        assert {name: ratio for name, ratio in found.items() if ratio < 4.5} == {}
    page.emulate_media(color_scheme="light")


def test_touch_makes_a_gap_on_a_narrow_screen(open_page: Open) -> None:
    page = open_page(link(SENTENCE), viewport={"width": 390, "height": 844}, has_touch=True, is_mobile=True)
    page.locator(".piece", has_text="cat").tap()
    page.locator(".gap").wait_for()
    assert words(page) == ["the", "4", "sat", "on", "a", "mat"]
    page.locator("#run").tap()
    wait_until_done(page)
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    page.locator("#settings").evaluate("settings => { settings.open = true; }")
    page.fill("[name=steps]", "0")
    page.locator("#run").tap()
    line, bar = (page.locator(name).bounding_box() for name in ("fieldset .problem-line", ".actions"))
    assert line["y"] + line["height"] <= bar["y"]  # not behind the button


def test_a_key_is_requested_where_one_is_needed(open_page: Open, address_with_key: str) -> None:
    page = open_page(link("the {4} mat"), at=address_with_key)
    page.locator("#key-dialog").wait_for()
    page.fill("#key", "wrong-key")
    page.keyboard.press("Enter")
    page.locator("#key-problem", has_text="does not know this key").wait_for()
    page.fill("#key", "correct-key")
    page.keyboard.press("Enter")
    page.locator(".gap").wait_for()
    run(page)
    assert page.request.get(address_with_key + "v1/models").status == 401
    assert page.request.get(address_with_key + "page/__init__.py").status == 404


def test_the_policy_allows_nothing_from_elsewhere(open_page: Open, address: str) -> None:
    page = open_page()
    policy = page.request.get(address).headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    names = page.evaluate("performance.getEntriesByType('resource').map((entry) => entry.name)")
    assert len(names) > 10
    assert [name for name in names if not name.startswith(address)] == []
    assert page.locator("script:not([src]), style, [style]:not(.tokens *, #card, #progress)").count() == 0
