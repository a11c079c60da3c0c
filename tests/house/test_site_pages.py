"""The site builds without a warning, its links lead somewhere, nothing is cut off, and no other host is asked."""

from __future__ import annotations

import functools
import http.server
import json
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urldefrag

import pytest

ROOT = Path(__file__).parents[2]
BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
LIMIT = 60_000  # milliseconds that anything may take on a loaded machine
WIDTHS = (390, 1280)  # pixels of a telephone, and of a laptop
pytestmark = pytest.mark.slow
ASKED = re.compile(
    r"<(?:script|img|iframe|source)[^>]*\ssrc=\"(https?:)?//|<link(?![^>]*rel=\"canonical\")[^>]*href=\"(https?:)?//"
)

CUT = """() => {
  const article = document.querySelector('article'), edge = article.getBoundingClientRect().right + 1, bad = [];
  const wide = document.documentElement.scrollWidth;
  if (wide > innerWidth) bad.push(`the page is ${wide} pixels wide`);
  const over = (e, kinds) => kinds.includes(getComputedStyle(e).overflowX);
  const scrolls = (e) => {
    for (; e && e !== article; e = e.parentElement) if (over(e, ['auto', 'scroll'])) return true;
    return false;
  };
  const report = (e, why) => bad.push(`${why}: <${e.tagName.toLowerCase()}> ${e.textContent.trim().slice(0, 60)}`);
  const texts = document.createTreeWalker(article, NodeFilter.SHOW_TEXT), range = document.createRange();
  while (texts.nextNode()) {
    range.selectNodeContents(texts.currentNode);
    const box = range.getBoundingClientRect(), parent = texts.currentNode.parentElement;
    if (box.width && box.right > edge && !parent.closest('.headerlink') && !scrolls(parent)) report(parent, 'outside');
  }
  for (const e of article.querySelectorAll('*')) {
    if (over(e, ['hidden', 'clip']) && e.scrollWidth > e.clientWidth + 1) report(e, 'cut');
    else if (e.matches('img, svg, table, input, button') && e.getBoundingClientRect().right > edge && !scrolls(e))
      report(e, 'outside');
  }
  return bad;
}"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("furo", reason="needs softdb[docs]")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "-W", "-q", "-d", str(folder / "trees"), "docs", str(folder / "pages")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder / "pages"


def test_the_site_loads_nothing_from_other_hosts(site: Path) -> None:
    pages = {page.relative_to(site).as_posix(): page.read_text() for page in site.rglob("*.html")}
    assert [name for name, text in pages.items() if ASKED.search(text)] == []
    assert "<math" in pages["mathematics.html"]
    assert 'id="softdb.SoftDB.attend"' in pages["api/database.html"]
    assert pages["results.html"].count("<table") > 40
    assert "…" not in pages["results.html"].partition("<article")[2].partition("</article>")[0]  # no cell is cut
    assert (site / "searchindex.js").stat().st_size > 10_000  # the search needs no server


def test_a_page_that_loads_from_another_host_is_noticed() -> None:
    assert ASKED.search('<script async src="https://example.org/a.js">')
    assert ASKED.search('<link rel="stylesheet" href="//example.org/a.css">')
    assert not ASKED.search('<a href="https://example.org">')


def test_every_result_and_every_example_is_on_the_site(site: Path) -> None:
    yaml = pytest.importorskip("yaml")
    shown = [
        of["file"] for files in yaml.safe_load((ROOT / "docs" / "results.yaml").read_text()).values() for of in files
    ]
    results = {path.stem: json.loads(path.read_text()) for path in (ROOT / "benchmarks" / "results").glob("*.json")}
    measured = {name for name, run in results.items() if run.get("versions", {}).get("softdb") != "not installed"}
    assert sorted(shown) == sorted(measured)
    programs = {path.stem for path in (ROOT / "examples").glob("*.py")} - {"shared"}
    assert {path.stem for path in (site / "gallery").glob("*.html")} == programs
    gallery = Page((site / "examples.html").read_text()).addresses
    assert [name for name in programs if f"gallery/{name}.html" not in gallery] == []
    assert sum(address.startswith("_images/") for address in gallery) >= len(programs) - 2


class Page(HTMLParser):
    """The addresses that a page names, and the anchors that it has."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.addresses: list[str] = []
        self.anchors = {"", "top"}
        self.pictures_without_text = 0
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.addresses += [address for name in ("href", "src") if (address := given.get(name))]
        self.anchors |= {anchor for name in ("id", "name") if (anchor := given.get(name))}
        self.pictures_without_text += tag == "img" and "alt" not in given


def broken(folder: Path) -> list[str]:
    """Addresses within a site that lead nowhere, as `page: address`."""
    pages = {path: Page(path.read_text()) for path in folder.rglob("*.html")}
    faults = []
    for path, page in pages.items():
        for address in page.addresses:
            target, anchor = urldefrag(address)
            if target.startswith(("http:", "https:", "mailto:", "data:")):
                continue
            file = (path.parent / unquote(target).partition("?")[0]).resolve() if target else path
            known = pages.get(file)
            if not file.is_file() or (known and unquote(anchor) not in known.anchors):
                faults.append(f"{path.relative_to(folder)}: {address}")
    return faults


def test_every_link_anchor_and_picture_of_the_site_exists(site: Path) -> None:
    assert broken(site) == []
    pages = {path.name: Page(path.read_text()) for path in site.rglob("*.html")}
    assert [name for name, page in pages.items() if page.pictures_without_text] == []
    assert (site / "_static" / "icon.svg").exists()
    assert (
        'rel="icon"' in (site / "index.html").read_text() or 'rel="shortcut icon"' in (site / "index.html").read_text()
    )


def test_a_broken_link_and_a_missing_anchor_are_noticed(tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text(
        '<a id="x" href="a.html#x"></a><a href="#y"></a><img src="b.png"><a href="c.html">'
    )
    assert broken(tmp_path) == ["a.html: #y", "a.html: b.png", "a.html: c.html"]


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(site)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    sync_api = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install -e '.[browser]'")
    if BROWSER is None:
        pytest.skip("needs Chromium: apt-get install chromium")
    with sync_api.sync_playwright() as driver:
        arguments = ["--no-sandbox", "--disable-dev-shm-usage"]  # containers run as root, with little shared memory
        browser = driver.chromium.launch(executable_path=BROWSER, args=arguments, timeout=LIMIT)
        yield browser
        browser.close()


def test_no_page_cuts_anything_off(chromium: Any, address: str, site: Path) -> None:
    page = chromium.new_context(java_script_enabled=False).new_page()  # the layout needs no script
    requested: list[str] = []
    page.on("request", lambda request: requested.append(request.url))
    names = [path.relative_to(site).as_posix() for path in sorted(site.rglob("*.html"))]
    faults = []
    for name in names:
        page.goto(address + name, wait_until="domcontentloaded")
        for width in WIDTHS:
            page.set_viewport_size({"width": width, "height": 900})
            faults += [f"{name} at {width} pixels, {fault}" for fault in page.evaluate(CUT)]
    assert faults == []
    assert len(names) > 60
    assert [url for url in requested if not url.startswith((address, "data:"))] == []
    page.context.close()


def test_what_is_cut_off_is_noticed(chromium: Any) -> None:
    page = chromium.new_page()
    page.set_content(
        "<meta charset=utf-8><article style='width: 100px'><pre style='width: 300px'>a long line of text, outside</pre>"
        "<p style='overflow: hidden'><i style='display: inline-block; width: 300px; height: 9px'></i></p>"
        "<pre style='overflow: auto'>a long line of text that scrolls within itself</pre></article>"
    )
    assert page.evaluate(CUT) == [
        "outside: <pre> a long line of text, outside",
        "cut: <p> ",
    ]
    page.close()


def figure(page: Any) -> dict[str, Any]:
    """What the figure shows: shares in percent, the answer's place, and the sentence below."""
    shares = page.eval_on_selector_all("#slider .share", "all => all.map((one) => parseFloat(one.textContent))")
    place = page.get_attribute("#slider .answer", "transform")
    return {"shares": shares, "answer": place, "verdict": page.inner_text("#slider .slider-verdict")}


def test_the_figure_goes_from_look_up_to_average_by_keyboard(chromium: Any, address: str) -> None:
    plain = chromium.new_context(java_script_enabled=False).new_page()  # a still picture
    plain.goto(address)
    assert plain.locator("#slider svg").is_visible()
    assert not plain.locator("#slider input").is_visible()
    text = plain.content()
    page = chromium.new_context(reduced_motion="reduce").new_page()
    complaints: list[str] = []
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.goto(address)
    start = figure(page)
    assert start["answer"] in text  # the script draws the same picture at first
    assert start["verdict"] in text
    assert sum(start["shares"]) == pytest.approx(100, abs=3)
    assert not page.locator("#slider button").is_visible()  # nothing moves by itself where motion is unwelcome
    page.focus("#slider input")
    page.keyboard.press("Home")
    cold = figure(page)
    assert cold["shares"] == [100, 0, 0, 0, 0, 0]
    assert "look-up" in cold["verdict"]
    assert "look-up" in page.get_attribute("#slider input", "aria-valuetext")
    assert cold["answer"] == "translate(112.0 70.0)"  # the nearest record
    assert page.get_attribute("#slider .gradient", "style") == "visibility: hidden;"
    page.keyboard.press("End")
    hot = figure(page)
    assert set(hot["shares"]) <= {16, 17}
    assert "average" in hot["verdict"]
    assert complaints == []


def test_the_figure_plays_and_can_be_paused(chromium: Any, address: str) -> None:
    page = chromium.new_context(viewport={"width": 1280, "height": 1600}).new_page()
    page.goto(address)
    button = page.locator("#slider button")
    button.filter(has_text="pause").wait_for(timeout=LIMIT)  # it began when it was seen
    button.click()
    still = figure(page)
    page.wait_for_timeout(300)
    assert figure(page) == still
    assert button.inner_text() == "play"


def test_the_first_page_is_accessible(chromium: Any, address: str) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="needs axe-playwright-python")
    for scheme in ("light", "dark"):
        page = chromium.new_context(color_scheme=scheme, reduced_motion="reduce").new_page()
        for name in ("index.html", "examples.html"):
            page.goto(address + name)
            violations = axe.Axe().run(page, context="article").response["violations"]
            assert [(one["id"], [node["target"] for node in one["nodes"]][:3]) for one in violations] == [], name
