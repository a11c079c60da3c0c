"""README, docs/ and the pages beside them are true: code runs, links resolve, names exist."""

from __future__ import annotations

import ast
import re
import unicodedata
from pathlib import Path

import pytest
import torch
from blocks import PEERS, blocks, run_blocks
from worlds import holding

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
DOCS = sorted(set((ROOT / "docs").rglob("*.md")) - set((ROOT / "docs" / "gallery").glob("*.md")))  # made by a build
RUN_ELSEWHERE = ROOT / "docs" / "integrations"  # by tests/integrations/test_pages.py, where the libraries are
PAGES = [README, *DOCS, *(ROOT / name for name in ("CONTRIBUTING.md", "SECURITY.md", "benchmarks/README.md"))]

FENCE = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)|!\[[^\]]*\]\(([^)\s]+)\)")


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub and MyST give to a page's headings."""
    text = FENCE.sub("", page.read_text())
    return {slug(heading) for heading in re.findall(r"^#+ +(.+)$", text, re.MULTILINE)}


def slug(heading: str) -> str:
    kept = (letter for letter in heading.strip().lower() if letter in " -_" or unicodedata.category(letter)[0] in "LNM")
    return "".join(kept).replace(" ", "-")


def links(page: Path) -> list[str]:
    return [first or second for first, second in LINK.findall(FENCE.sub("", page.read_text()))]


ENGINES = ("lance", "ray")  # of a cluster
RUN_HERE = [page for page in PAGES if blocks(page, "python") and RUN_ELSEWHERE not in page.parents]


@pytest.mark.parametrize("page", RUN_HERE, ids=name_of)
def test_every_python_block_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The blocks of one page are one program, in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    try:
        ran = run_blocks(page)
    except ModuleNotFoundError as error:
        if error.name not in ENGINES:
            raise
        pytest.skip(f"needs {error.name}")
    assert any("softdb" in block for block in ran)  # also where a peer is missing


def test_a_block_of_a_missing_library_is_left_out_with_those_that_use_its_names(tmp_path: Path) -> None:
    programs = "import zvec_is_missing\ntheirs = 1", "ours = 1", "assert ours == theirs", "theirs = 1", "last = theirs"
    page = tmp_path / "page.md"
    page.write_text("".join(f"```python\n{program}\n```\n" for program in programs))
    assert run_blocks(page, ["zvec_is_missing"]) == [f"{programs[i]}\n" for i in (1, 3, 4)]
    with pytest.raises(ModuleNotFoundError, match="zvec_is_missing"):
        run_blocks(page, PEERS)
    page.write_text("```python\nassert 1 == 2\n```\n")
    with pytest.raises(AssertionError):
        run_blocks(page)


def test_the_pages_have_blocks_to_run() -> None:
    assert len(blocks(README, "python")) >= 2
    assert sum(len(blocks(page, "python")) for page in DOCS) >= 10


def test_the_readme_is_short_and_its_example_twenty_lines() -> None:
    assert len(README.read_text().splitlines()) <= 150
    assert len([line for line in blocks(README, "python")[0].splitlines() if line.strip()]) <= 20


def test_the_readme_has_both_commands() -> None:
    main, tests = blocks(README, "console")[:2]
    assert main.startswith("pip install -c constraints.txt")
    assert main.rstrip().endswith("softdb demo")
    assert tests.rstrip().endswith("&& pytest -n 2 --dist loadfile")


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_link_leads_somewhere(page: Path) -> None:
    for link in links(page):
        target, _, anchor = link.partition("#")
        if target.startswith(("https://", "http://")):
            continue
        file = (page.parent / target).resolve() if target else page
        assert file.exists(), f"{name_of(page)} links to {target}, which does not exist"
        if anchor:
            assert anchor in anchors(file), f"{name_of(page)} links to {link}, but there is no such heading"


def test_anchors_are_those_of_github() -> None:
    assert slug("Attention: `attend.py`") == "attention-attendpy"
    assert slug("Exact, truncated, or to a tolerance") == "exact-truncated-or-to-a-tolerance"


@pytest.mark.parametrize("page", DOCS, ids=name_of)
def test_a_page_opens_with_a_title_and_a_sentence(page: Path) -> None:
    title, blank, opening = page.read_text().splitlines()[:3]
    assert title.startswith("# ")
    assert blank == ""
    assert opening[:1].isalpha() or opening.startswith("`")


@pytest.mark.parametrize("index", [page for page in DOCS if page.name == "index.md"], ids=name_of)
def test_the_index_has_every_page(index: Path) -> None:
    listed = {link for link in links(index) if not link.startswith(("../", "images/"))}
    below = {*index.parent.glob("*.md"), *index.parent.glob("*/index.md")} - {index}
    assert listed == {page.relative_to(index.parent).as_posix() for page in below}
    trees = blocks(index, "{toctree}")
    assert {f"{line}.md" for tree in trees for line in tree.split("\n\n", 1)[1].split()} == listed


def defined(file: Path) -> set[str]:
    """Functions and classes of a file, and the methods of its classes as `Class.method`."""
    found: set[str] = set()
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            found.add(node.name)
            if isinstance(node, ast.ClassDef):
                found |= {f"{node.name}.{item.name}" for item in node.body if isinstance(item, ast.FunctionDef)}
    return found


def test_the_walks_of_the_architecture_name_existing_files() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    steps = re.findall(r"^\| `(softdb/[\w/]+\.py)` \| (.+?) \|", text, re.MULTILINE)
    missing = [
        f"{path}: {name}"
        for path, names in steps
        for name in re.findall(r"`([\w.]+)`", names)
        if name not in defined(ROOT / path)
    ]
    assert missing == []


def test_every_public_name_is_in_the_pages() -> None:
    import softdb
    import softdb.nn

    calls = "".join(page.read_text() for page in (ROOT / "docs" / "api").glob("*.md"))
    pages = "".join(page.read_text() for page in (README, *DOCS))
    methods = [name for name in dir(softdb.SoftDB) if not name.startswith("_")]
    assert [name for name in methods if not re.search(rf"\b{name}\b", calls)] == []
    names = [name for name in (*softdb.__all__, *softdb.nn.__all__) if not name.startswith("_")]
    assert [name for name in names if not re.search(rf"\b{name}\b", pages)] == []


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_file_that_is_named_exists(page: Path) -> None:
    named = re.findall(r"`((?:softdb|tests|examples|benchmarks)/[\w./*-]+)`", page.read_text())
    missing = [path for path in named if not list(ROOT.glob(path))]
    assert missing == []


def test_files_on_disk_match_the_format_page(tmp_path: Path) -> None:
    from softdb.store import format

    text = (ROOT / "docs" / "format.md").read_text()
    assert f"0x{format.APPLICATION:X}" in text
    assert f"format version, {format.FORMAT}," in text
    with holding([[1, 2]], [[3]], ids=["a"], path=tmp_path / "db"):
        names = {path.name for path in (tmp_path / "db").iterdir()}
    assert {"catalog.sqlite", "lock", "keys-00000000.npy", "values-00000000.npy"} <= names


def test_the_citation_is_of_this_version() -> None:
    import softdb

    assert f"version: {softdb.__version__}\n" in (ROOT / "CITATION.cff").read_text()


def test_the_commands_of_a_contributor_are_in_the_justfile() -> None:
    recipes = set(re.findall(r"^([a-z]+)[^:\n=]*:", (ROOT / "Justfile").read_text(), re.MULTILINE))
    named = set(re.findall(r"`just ([a-z]+)`", (ROOT / "CONTRIBUTING.md").read_text()))
    assert named == recipes == {"setup", "test", "slow", "lint", "docs", "bench"}


def test_every_public_error_is_exported() -> None:
    import softdb
    from softdb import errors

    assert set(errors.__all__) <= set(softdb.__all__)
