"""The gradient, the training and the map's tools in Chromium."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import pytest
from explore_site import Site, served
from worlds import holding

import softdb
from softdb.data import load_wordnet
from softdb.data.encoder import KnownWords

sync_api = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install -e '.[browser]'")
BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(BROWSER is None, reason="needs Chromium: apt-get install chromium")]
LIMIT = 60_000  # milliseconds that anything may take on a loaded machine
KETTLE = "noun.03612814"


@pytest.fixture(scope="module")
def demo() -> Iterator[Site]:
    data = load_wordnet()
    db = softdb.open(None, dim=96, metric="cosine", encoder=KnownWords(data))
    payloads = [{"word": one["word"], "pos": one["pos"], "size": len(one["gloss"])} for one in data.payloads]
    db.insert(data.ids, data.keys, payloads=payloads, texts=[one["gloss"] for one in data.payloads])
    with served(None, db=db) as site:
        yield site


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    with sync_api.sync_playwright() as driver:
        sync_api.expect.set_options(timeout=LIMIT)
        arguments = ["--no-sandbox", "--disable-dev-shm-usage"]
        browser = driver.chromium.launch(executable_path=BROWSER, args=arguments, timeout=LIMIT)
        yield browser
        browser.close()


@pytest.fixture
def page(chromium: Any, demo: Site) -> Iterator[Any]:
    context = chromium.new_context(viewport={"width": 1366, "height": 768}, reduced_motion="reduce")
    context.set_default_timeout(LIMIT)
    page, complaints, asked = context.new_page(), [], []
    page.on("pageerror", lambda one: complaints.append(str(one)))
    page.on("console", lambda one: complaints.append(one.text) if one.type in ("error", "warning") else 0)
    page.on("request", lambda one: asked.append(one.url))
    page.goto(f"{demo.address}#text=kettle&temperature=0.072")
    page.wait_for_selector(f"#hits li[data-id='{KETTLE}']")
    page.wait_for_selector("#map[aria-label^='Map of 2']")
    yield page
    assert complaints == []
    assert [url for url in asked if not url.startswith(demo.address)] == []
    context.close()


def _place(page: Any) -> int:
    return int(page.inner_text(f"#hits li[data-id='{KETTLE}'] .rank"))


def _teach(page: Any) -> None:
    page.click(f"#hits li[data-id='{KETTLE}'] .teach")
    sync_api.expect(page.locator("#lesson-says")).to_contain_text("kettle should be the answer")


def _drawn(page: Any) -> str:
    return str(page.eval_on_selector("#map", "canvas => canvas.toDataURL()"))


def test_a_record_is_taught_step_by_step_and_unlearned(page: Any) -> None:
    assert "What is a gradient for?" in page.inner_text("#lesson-lead")
    assert _place(page) == 4
    _teach(page)
    assert "5.38" in page.inner_text("#lesson-says")
    still = _drawn(page)
    for loss in ("3.24", "1.82"):
        page.click("#step")
        sync_api.expect(page.locator("#lesson-says")).to_contain_text(loss)
    assert _place(page) == 1
    assert "place 4 → place 1" in page.inner_text("#lesson-says")
    assert "Loss 1.82 after 2 steps" in page.text_content("#lesson-spoken")
    assert _drawn(page) != still
    page.reload()  # the address holds the steps
    sync_api.expect(page.locator("#lesson-says")).to_contain_text("1.82")
    for loss in ("3.24", "5.38"):
        page.click("#undo")
        sync_api.expect(page.locator("#lesson-says")).to_contain_text(loss)
    assert page.is_disabled("#undo")
    assert _place(page) == 4
    page.click("#done")
    page.wait_for_selector("#lesson-panel", state="hidden")
    page.fill("#asked", "violin")
    page.press("#asked", "Enter")
    sync_api.expect(page.locator("#hits-title")).to_contain_text("violin")
    assert "moves" not in page.url


def test_training_brings_the_word_to_its_place(page: Any) -> None:
    page.click("#train-run")
    sync_api.expect(page.locator("#train-step")).to_have_text("20 steps")
    sync_api.expect(page.locator("#train-rows")).to_contain_text("16.2 %")
    assert "place 4\tplace 1" in page.inner_text("#train-rows")
    page.wait_for_selector(f"#hits li:first-child[data-id='{KETTLE}']")
    assert "trained=20" in page.url
    page.click("#train-undo")
    sync_api.expect(page.locator("#train-step")).to_have_text("not trained")
    page.wait_for_selector(f"#hits li:nth-child(4)[data-id='{KETTLE}']")


def test_the_map_zooms_moves_and_is_coloured_by_mouse_and_keyboard(page: Any) -> None:
    seen = [_drawn(page)]

    def changed() -> None:
        assert _drawn(page) != seen[-1]
        seen.append(_drawn(page))

    page.click("#zoom-in")
    changed()
    page.click("#zoom-fit")
    page.locator("#map").focus()
    for key in ("+", "ArrowLeft", "ArrowUp", "-", "0"):
        page.keyboard.press(key)
        changed()
    box = page.locator("#map").bounding_box()
    middle = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
    page.mouse.move(*middle)
    page.mouse.wheel(0, -200)
    page.wait_for_timeout(100)
    changed()
    page.mouse.down()
    page.mouse.move(middle[0] + 60, middle[1] + 20, steps=4)
    page.mouse.up()
    changed()
    assert page.is_disabled("#teach")  # a drag chooses no record
    for field, legend in (("pos", ["noun", "adj", "verb", "adv"]), ("size", None)):
        page.select_option("#colour", field)
        page.wait_for_selector("#colours li")
        page.wait_for_timeout(100)
        changed()
        shown = page.locator("#colours li").all_inner_texts()
        assert shown == legend if legend else " to " in shown[0]


def test_a_record_of_the_map_is_walked_to_explained_and_taught(page: Any) -> None:
    page.click("#dimmer")
    assert "1 of " in page.inner_text("#walked")
    assert "well, 0.94 % of the answer, as exp(0.5811 / 0.07200)" in page.inner_text("#walked")
    page.click("#dimmer")
    page.click("#teach")
    sync_api.expect(page.locator("#lesson-says")).to_contain_text("sluice should be the answer")


def test_light_is_the_share_of_the_whole(page: Any) -> None:
    light = """() => {
        const map = document.getElementById('map'), copy = document.createElement('canvas');
        Object.assign(copy, { width: map.width, height: map.height });
        const pen = copy.getContext('2d', { willReadFrequently: true });
        pen.drawImage(map, 0, 0);
        const data = pen.getImageData(0, 0, copy.width, copy.height).data;
        let sum = 0;
        for (let i = 0; i < data.length; i += 4) sum += data[i] - data[i + 2] > 60 && data[i] > 160;
        return sum;
    }"""
    amber = []
    for stop in ("low", "start", "high"):
        page.click(f"[data-stop={stop}]")
        page.wait_for_timeout(600)
        page.evaluate("scrollTo(0, 0)")
        amber.append(page.evaluate(light))
    assert amber[2] < amber[0]  # where all weigh alike, no record blazes


def test_keys_of_two_numbers_are_wholly_on_the_map(chromium: Any) -> None:
    with served(None, db=holding([[0, 0], [1, 0], [0, 2]], metric="l2", num_classes=2, values=[0, 1, 1])) as site:
        page = chromium.new_page()
        page.goto(f"{site.address}#id=1")
        sync_api.expect(page.locator("#map-share")).to_contain_text("the map shows all of it")
        assert page.is_hidden("#train")
        page.click("#hits li:nth-child(3) .teach")  # classes: a loss and a step, but no answer on the map
        sync_api.expect(page.locator("#lesson-says")).to_contain_text("loss")
        page.click("#step")
        sync_api.expect(page.locator("#lesson-spoken")).to_contain_text("after 1 steps")
        page.close()


@pytest.mark.parametrize("scheme", ["dark", "light"])
def test_axe_reports_no_faults_of_lesson_training_and_colours(chromium: Any, demo: Site, scheme: str) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="needs axe: pip install -e '.[browser]'")
    for width in (1366, 390):
        context = chromium.new_context(color_scheme=scheme, viewport={"width": width, "height": 800}, bypass_csp=True)
        page = context.new_page()
        page.goto(f"{demo.address}#text=kettle&right={KETTLE}&trained=3&temperature=0.072")
        page.wait_for_selector("#lesson-panel:not([hidden])")
        page.select_option("#colour", "pos")
        page.click("#dimmer")
        sync_api.expect(page.locator("#train-rows")).to_contain_text("%")
        found = axe.Axe().run(page).response["violations"]
        assert [(rule["id"], rule["impact"], [node["html"][:90] for node in rule["nodes"]]) for rule in found] == []
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        context.close()
