"""The explorer in Chromium: by mouse, by keyboard, and the requests of the browser."""

from __future__ import annotations

import json
import math
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from explore_site import Site, served

import softdb
from softdb.text import HashedNGrams

sync_api = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install -e '.[browser]'")
BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(BROWSER is None, reason="needs Chromium: apt-get install chromium")]
LIMIT = 60_000  # milliseconds that anything may take on a loaded machine
HOSTILE = "<b id=own>bold</b><img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"
TEXTS = [f"{size} {animal}" for size in ("small", "large", "old", "young") for animal in ("cat", "dog", "whale", "hen")]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("browser") / "zoo"
    with softdb.open(path, metric="cosine", encoder=HashedNGrams(64), fields=["animal"]) as db:
        payloads = [{"animal": text.split()[1], "size": text.split()[0]} for text in TEXTS]
        db.insert(range(len(TEXTS)), texts=TEXTS, payloads=payloads)
        db.insert([HOSTILE], texts=[HOSTILE], payloads=[{HOSTILE: HOSTILE, "title": HOSTILE}])
        db.index_text()
    return path


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    with sync_api.sync_playwright() as driver:
        sync_api.expect.set_options(timeout=LIMIT)
        arguments = ["--no-sandbox", "--disable-dev-shm-usage"]  # containers run as root, with little shared memory
        browser = driver.chromium.launch(executable_path=BROWSER, args=arguments, timeout=LIMIT)
        yield browser
        browser.close()


class Visit:
    """A page in a fresh profile, with its requests and console errors."""

    def __init__(self, context: Any, site: Site, at: str = "") -> None:
        context.set_default_timeout(LIMIT)
        self.page = context.new_page()
        self.asked: list[str] = []
        self.complaints: list[str] = []
        self.page.on("request", lambda one: self.asked.append(one.url))
        self.page.on("pageerror", lambda one: self.complaints.append(str(one)))
        self.page.on("console", lambda one: self.complaints.append(one.text) if one.type in ("error", "warning") else 0)
        self.page.goto(site.address + at)
        self.settled()

    def settled(self) -> None:
        """Until the newest question and temperature are answered."""
        self.page.wait_for_selector("#answer[aria-busy=false] #hits li")

    def weights(self) -> list[float]:
        return [float(one.get_attribute("data-weight")) for one in self.page.query_selector_all("#hits > li[data-id]")]


@pytest.fixture
def visit(chromium: Any, site: Site) -> Iterator[Visit]:
    context = chromium.new_context(viewport={"width": 1280, "height": 900})
    one = Visit(context, site, "#text=cat&shown=5")
    yield one
    assert [url for url in one.asked if not url.startswith(site.address)] == []  # nothing leaves the origin
    assert one.complaints == []
    context.close()


def test_the_slider_shows_the_weights_of_attend(visit: Visit, place: Path) -> None:
    page, seen = visit.page, []
    with softdb.open(place, mode="r") as db:
        for step in (0, 300, 520, 800, 1000):
            page.evaluate(
                "([step]) => { const one = document.getElementById('temperature'); one.value = step;"
                " one.dispatchEvent(new Event('input')); }",
                [step],
            )
            visit.settled()
            t = float(page.input_value("#exactly"))
            hits, pooled = db.search("cat", 5), db.attend("cat", temperature=t)
            expected = [math.exp(one / t - pooled.lse[0].item()) for one in hits.scores[0].tolist()]
            np.testing.assert_allclose(visit.weights(), expected, rtol=1e-3, atol=1e-12)
            widths = page.eval_on_selector_all("#hits .bar i", "all => all.map((one) => parseFloat(one.style.width))")
            np.testing.assert_allclose(widths, 100 * np.array(expected), rtol=1e-3, atol=1e-6)
            seen.append(page.inner_text("#verdict").split(":")[0])
        assert (seen[0], seen[-1]) == ("Look-up", "Average")
        assert "Soft query" in seen
        assert "Map of 17 keys" in page.get_attribute("#map", "aria-label")
        drawn = "c => c.getContext('2d').getImageData(0, 0, c.width, c.height).data.some((one) => one > 0)"
        assert page.eval_on_selector("#map", drawn)


def test_stored_markup_is_shown_as_text(visit: Visit) -> None:
    page = visit.page
    page.check("input[value=id]", force=True)
    page.fill("#asked", HOSTILE)
    page.press("#asked", "Enter")
    visit.settled()
    assert HOSTILE[:40] in page.inner_text("#hits > li:first-child .name")
    assert page.query_selector("#own, #hits img, #hits script, #tip img") is None
    page.click("#dimmer")
    assert "<b id=own>" in page.inner_text("#walked")
    assert page.title() == f"{HOSTILE[:39]}… · zoo · softdb"


def test_keyboard_alone(visit: Visit) -> None:
    page = visit.page

    def tab_to(name: str) -> None:
        for _ in range(80):
            page.keyboard.press("Tab")
            if page.evaluate("(name) => document.activeElement.matches(name)", name):
                return
        raise AssertionError(name)

    tab_to(".skip")
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "asked"
    assert page.evaluate("location.hash").startswith("#text=cat")
    page.keyboard.press("Control+a")
    page.keyboard.type("whale")
    page.keyboard.press("Enter")
    visit.settled()
    assert "whale" in page.inner_text("#hits > li:first-child")
    tab_to("summary")
    page.keyboard.press("Enter")
    tab_to("#field")
    page.keyboard.type("size")
    tab_to("#value")
    page.keyboard.type("old")
    page.keyboard.press("Enter")
    visit.settled()
    assert json.loads(page.input_value("#where")) == {"size": "old"}
    assert len(visit.weights()) == 4
    tab_to("#temperature")
    before = visit.weights()
    for _ in range(60):
        page.keyboard.press("ArrowRight")
    visit.settled()
    assert visit.weights()[0] < before[0]
    assert "record" in page.get_attribute("#temperature", "aria-valuetext")
    tab_to("#hits button")
    page.keyboard.press("Enter")
    visit.settled()
    assert page.is_checked("input[value=id]")
    tab_to("#dimmer")
    page.keyboard.press("Enter")
    tab_to("#visit")
    page.keyboard.press("Enter")
    visit.settled()
    tab_to("#compare")
    page.keyboard.press("Enter")
    sync_api.expect(page.locator("#compared")).to_contain_text("100.0 % of the 4")


@pytest.mark.parametrize("scheme", ["dark", "light"])
def test_axe_reports_no_accessibility_faults(chromium: Any, site: Site, scheme: str) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="needs axe: pip install -e '.[browser]'")
    for width in (1280, 390, 320):
        context = chromium.new_context(color_scheme=scheme, viewport={"width": width, "height": 900}, bypass_csp=True)
        one = Visit(context, site, "#text=cat")
        one.page.click("#hits > li:first-child [aria-expanded]")
        one.page.evaluate("for (const one of document.querySelectorAll('details')) one.open = true")
        actual = axe.Axe().run(one.page).response["violations"]
        assert [(rule["id"], rule["impact"], [node["html"][:90] for node in rule["nodes"]]) for rule in actual] == []
        wide = one.page.evaluate("document.documentElement.scrollWidth")
        assert wide <= width  # nothing sticks out
        context.close()


def test_errors_are_shown_as_text_and_the_page_stays_usable(visit: Visit, site: Site) -> None:
    page = visit.page
    page.check("input[value=id]", force=True)
    page.fill("#asked", "<i>nobody</i>")
    page.press("#asked", "Enter")
    page.wait_for_selector("#problem:not([hidden])")
    assert page.inner_text("#problem") == "Id '<i>nobody</i>' is not stored."
    page.check("input[value=vector]", force=True)
    page.fill("#numbers", "[1, 2]")
    page.press("#numbers", "Enter")
    sync_api.expect(page.locator("#problem")).to_contain_text("2 wide")
    page.check("input[value=text]", force=True)
    page.fill("#asked", "hen")
    page.wait_for_selector("#problem", state="hidden")
    visit.settled()
    assert "hen" in page.inner_text("#hits > li:first-child")
    assert all(
        "Failed to load resource" in complaint for complaint in visit.complaints
    )  # the browser's own word on 400 and 404
    visit.complaints.clear()


def test_from_words_to_a_record_and_its_soft_query(visit: Visit) -> None:
    page = visit.page
    page.click("#more summary")
    page.select_option("#ranking", "text")
    page.fill("#asked", "old dog")
    page.press("#asked", "Enter")
    visit.settled()
    assert "old dog" in page.inner_text("#hits > li:first-child")
    page.click("#hits > li:first-child button")
    visit.settled()
    assert (page.is_checked("input[value=id]"), page.input_value("#ranking")) == (True, "vector")
    assert visit.weights()[0] == max(visit.weights()) > 0
    assert "db.get(" in page.inner_text("#python")


def test_a_newer_question_overtakes_an_older_one(visit: Visit, site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    import threading

    from softdb.tools.explore.replies import Answers

    page, gate, before, asked = visit.page, threading.Event(), site.desk.overtaken, Answers.ask

    def slow(self: Answers, question: Any, weighing: Any, wanted: Any) -> Any:
        if question.text == "whale":
            gate.wait(LIMIT / 1e3)
            wanted()
        return asked(self, question, weighing, wanted)

    monkeypatch.setattr(Answers, "ask", slow)
    page.fill("#asked", "whale")
    page.press("#asked", "Enter")
    page.fill("#asked", "hen")
    page.press("#asked", "Enter")
    visit.settled()
    gate.set()
    assert "hen" in page.inner_text("#hits > li:first-child")
    limit = time.monotonic() + LIMIT / 1e3
    while site.desk.overtaken == before and time.monotonic() < limit:
        page.wait_for_timeout(10)  # until the server hears that the browser hung up
    assert site.desk.overtaken > before
    assert not page.is_visible("#problem")


def test_commits_of_another_process_are_seen(chromium: Any, tmp_path: Path) -> None:
    with softdb.open(tmp_path / "db", dim=2, metric="l2", num_classes=2) as db, served(tmp_path / "db") as site:
        one = Visit(chromium.new_context(), site)
        assert "holds no record yet" in one.page.inner_text("#hits")
        db.insert(["a", "b", "c"], [[0, 0], [1, 0], [0, 2]], [0, 1, 1])
        one.page.check("input[value=vector]", force=True)
        one.page.fill("#numbers", "0 0")
        one.page.press("#numbers", "Enter")
        one.page.wait_for_selector("#hits li[data-id]")
        assert [line.get_attribute("data-id") for line in one.page.query_selector_all("#hits > li")] == ["a", "b", "c"]
        assert "class 0" in one.page.inner_text("#soft")
        assert one.complaints == []
        one.page.context.close()


def opened(chromium: Any, site: Site, at: str = "", width: int = 1366, height: int = 768, **more: Any) -> Visit:
    return Visit(chromium.new_context(viewport={"width": width, "height": height}, **more), site, at)


@pytest.mark.parametrize(("width", "height", "rows"), [(1366, 768, 5), (390, 844, 3)])
def test_the_first_screen_shows_question_slider_answers_and_map(
    chromium: Any, site: Site, width: int, height: int, rows: int
) -> None:
    one = opened(chromium, site, "#text=cat", width, height)
    for name in ("#asked", "#chips button", "#temperature", "#verdict", f"#hits > li:nth-child({rows})", "#map"):
        box = one.page.locator(name).first.bounding_box()
        assert box["y"] >= 0, name
        assert box["y"] + box["height"] <= height, name
    assert one.page.locator("#chips button").count() == 5
    one.page.context.close()


def test_the_sweep_plays_once_and_stops_at_any_action(chromium: Any, site: Site) -> None:
    one = opened(chromium, site)
    page = one.page
    sync_api.expect(page.locator("#sweep")).to_contain_text("Stop")
    sync_api.expect(page.locator("#verdict")).to_contain_text("Soft query")  # after the look-up of the cold end
    page.mouse.click(5, 700)
    assert "Play" in page.inner_text("#sweep")
    at = page.input_value("#temperature")
    page.wait_for_timeout(100)
    assert page.input_value("#temperature") == at
    page.goto("about:blank")
    page.goto(site.address)
    one.settled()
    page.wait_for_timeout(1200)
    assert "Play" in page.inner_text("#sweep")  # the second visit stands still
    page.context.close()
    still = opened(chromium, site, reduced_motion="reduce").page
    still.wait_for_timeout(1200)
    assert "Play" in still.inner_text("#sweep")
    still.context.close()


def test_each_question_is_one_entry_of_the_history(visit: Visit) -> None:
    page, title = visit.page, visit.page.locator("#hits-title")
    before = page.evaluate("history.length")
    page.click("#asked")
    page.fill("#asked", "")
    page.type("#asked", "whale", delay=400)  # slower than the page waits for the next letter
    sync_api.expect(title).to_have_text("Nearest to “whale”")
    page.press("#asked", "Enter")
    visit.settled()
    assert page.evaluate("history.length") == before + 1
    page.click("#hits > li:nth-child(2) .actions button")
    sync_api.expect(title).not_to_have_text("Nearest to “whale”")
    page.click(".stops [data-stop=high]")  # another temperature is no entry
    sync_api.expect(page.locator("#verdict")).to_contain_text("Average")
    sync_api.expect(page).to_have_url(re.compile(f"temperature={page.input_value('#exactly')}$"))
    assert page.evaluate("history.length") == before + 2
    page.go_back()
    sync_api.expect(title).to_have_text("Nearest to “whale”")
    page.go_back()
    sync_api.expect(title).to_have_text("Nearest to “cat”")
    page.go_forward()
    sync_api.expect(title).to_have_text("Nearest to “whale”")
    page.evaluate("location.hash = '#text=hen&temperature=0.5'")  # as a pasted link
    sync_api.expect(title).to_have_text("Nearest to “hen”")
    assert page.input_value("#exactly") == "0.5"


def test_settings_of_an_address_that_mean_nothing_are_told_calmly(visit: Visit) -> None:
    page, notes = visit.page, visit.page.locator("#notes")
    page.evaluate("location.hash = '#text=hen&way=bogus&shown=7&k=-1&temperature=hot&where=%7B&colour=red'")
    sync_api.expect(notes).to_have_text(
        "The address has way, shown, k, temperature, where, colour, which this page does not know; "
        "the usual settings stand instead."
    )
    assert (page.input_value("#way"), page.input_value("#shown")) == ("exact", "10")
    page.evaluate("location.hash = '#id=nobody'")
    sync_api.expect(notes).to_have_text("Id 'nobody' is not stored. This is an example instead.")
    assert not page.is_visible("#problem")
    assert "nobody" not in page.evaluate("location.hash")
    visit.complaints.clear()  # the browser's own word on 404


def test_waiting_is_shown_and_the_slider_works_with_an_empty_box(visit: Visit, monkeypatch: pytest.MonkeyPatch) -> None:
    import threading

    from softdb.tools.explore.replies import Answers

    page, gate, ask = visit.page, threading.Event(), Answers.ask

    def slow(self: Answers, *given: Any) -> Any:
        gate.wait(LIMIT / 1e3)
        return ask(self, *given)

    monkeypatch.setattr(Answers, "ask", slow)
    page.fill("#asked", "whale")
    page.press("#asked", "Enter")
    page.wait_for_selector("body.waiting")
    assert "asking" in page.evaluate("getComputedStyle(document.getElementById('hits-title'), '::after').content")
    assert page.inner_text("#hits-title") == "Nearest to “cat”"
    assert "text=cat" in page.evaluate("location.hash")  # no question without an answer
    gate.set()
    visit.settled()
    page.wait_for_selector("body:not(.waiting)")
    page.fill("#asked", "")
    before = visit.weights()
    page.click(".stops [data-stop=high]")
    sync_api.expect(page.locator("#verdict")).to_contain_text("Average")
    assert visit.weights()[0] < before[0]
    assert "text=whale" in page.evaluate("location.hash")


def test_focus_is_never_covered(chromium: Any, site: Site) -> None:
    for width, height in ((1366, 768), (683, 384)):  # 100 % and 200 %
        one = opened(chromium, site, "#text=cat&shown=20", width, height)
        covered = []
        for _ in range(90):
            one.page.keyboard.press("Tab")
            state = one.page.evaluate(
                """() => { const one = document.activeElement, box = one.getBoundingClientRect();
                if (one === document.body || box.width < 3) return null;
                const at = document.elementFromPoint(box.x + box.width / 2, box.y + box.height / 2);
                return at && (one.contains(at) || at.contains(one) || at.closest('label')) ? null : one.outerHTML }"""
            )
            covered += [state] if state else []
        assert covered == []
        one.page.context.close()


def test_a_database_of_numbers_has_reasons_and_names(chromium: Any, tmp_path: Path) -> None:
    with softdb.open(tmp_path / "db", dim=2) as db:
        db.insert(["a", "b"], np.eye(2), payloads=[{"at": [0.1 + 0.2, 1]}, {"at": [1 / 3]}])
    with served(tmp_path / "db") as site:
        one = opened(chromium, site, "#id=a")
        assert one.page.is_disabled("input[value=text]")
        assert "Text needs an encoder (--encoder MODEL) or an index of words" in one.page.inner_text("#hint")
        assert one.page.inner_text("#hits > li:first-child .head") == "a"
        assert one.page.inner_text("#hits > li:first-child .body") == "at: [0.3, 1]"
        one.page.fill("#asked", "nobod")
        sync_api.expect(one.page.locator("#hint")).to_have_text("Enter asks by this id.")
        assert one.complaints == []  # nothing was asked that has no answer
        one.page.click("#more summary")
        one.page.fill("#where", '{"at": 5}')
        one.page.press("#where", "Tab")
        sync_api.expect(one.page.locator("#hits > li.empty")).to_have_text(
            "No record matches. Loosen the filter, or ask otherwise."
        )
        assert one.page.locator("#hits > li.empty").bounding_box()["height"] < 100  # not one word a line
        one.page.context.close()


def test_names_and_ids_are_apart(visit: Visit) -> None:
    text = visit.page.evaluate("document.querySelector('#hits .head').textContent")
    assert re.fullmatch(r"\w+ cat \d+", text)


def test_theme_follows_other_tabs_and_a_link_is_copied(chromium: Any, site: Site) -> None:
    one = opened(chromium, site, "#text=cat", permissions=["clipboard-read", "clipboard-write"])
    other = one.page.context.new_page()
    other.goto(site.address + "#text=dog")
    other.click("#theme")
    sync_api.expect(one.page.locator("html")).to_have_attribute("data-theme", "light")
    one.page.bring_to_front()
    one.page.click("#link")
    sync_api.expect(one.page.locator("#link")).to_have_text("Copied")
    assert one.page.evaluate("navigator.clipboard.readText()") == one.page.url
    assert one.page.url.startswith(f"{site.address}#text=cat&temperature=")
    one.page.context.close()


def test_a_half_typed_word_is_no_alarm(chromium: Any) -> None:
    from softdb.tools.cli.serve import _demo_database

    with _demo_database(None) as db, served(None, db=db) as site:
        one = opened(chromium, site, "#text=light")
        page, hint = one.page, one.page.locator("#hint")
        page.evaluate(
            "window.alarms = 0; new MutationObserver(() => window.alarms++).observe("
            "document.getElementById('problem'), {attributes: true, childList: true})"
        )
        page.click("#asked")
        page.press("#asked", "End")
        page.type("#asked", "ho")
        sync_api.expect(hint).to_have_text("“lightho” is not among the 9,964 known words:")
        assert page.inner_text("#hits-title") == "Nearest to “light”"
        assert page.get_attribute("#answer", "class") == "columns old"
        assert "lightho" not in page.evaluate("location.hash")
        page.fill("#asked", "kettl")
        sync_api.expect(hint).to_have_text("Known words:")
        page.click("#chips button")
        sync_api.expect(page.locator("#hits-title")).to_have_text("Nearest to “kettle”")
        page.fill("#asked", "bread")
        sync_api.expect(page.locator("#notes")).to_contain_text("“bread” has no vector here")
        assert page.evaluate("window.alarms") <= 4  # the hidden one is hidden again with each answer
        assert not page.is_visible("#problem")
        assert one.complaints == []
        page.context.close()
