"""Every block of docs/integrations and of docs/cluster.md runs; the blocks of one page are one program."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
PAGES = sorted(page for folder in ("integrations", "coming-from") for page in (DOCS / folder).glob("*.md"))
PAGES.append(DOCS / "cluster.md")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_block_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if page.stem == "chroma":
        pytest.importorskip("chromadb", reason="needs softdb[chroma], which .ci/run installs last")
    monkeypatch.chdir(tmp_path)
    scope: dict[str, object] = {}
    actual = re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)
    for number, block in enumerate(actual, start=1):
        exec(compile(block, f"{page.name}, block {number}", "exec"), scope)
