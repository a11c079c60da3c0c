"""Every block of docs/integrations, docs/coming-from and docs/cluster.md runs; a page's blocks are one program."""

from __future__ import annotations

from pathlib import Path

import pytest
from blocks import blocks, run_blocks

DOCS = Path(__file__).parents[2] / "docs"
PAGES = sorted(page for folder in ("integrations", "coming-from") for page in (DOCS / folder).glob("*.md"))
PAGES = [page for page in (*PAGES, DOCS / "cluster.md") if blocks(page, "python")]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_block_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if page.stem == "chroma":
        pytest.importorskip("chromadb", reason="needs softdb[chroma], which .ci/run installs last")
    monkeypatch.chdir(tmp_path)
    assert run_blocks(page)
