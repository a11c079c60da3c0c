"""Every block of docs/integrations, docs/coming-from and docs/cluster.md runs; a page's blocks are one program."""

from __future__ import annotations

from pathlib import Path

import pytest
from blocks import run_blocks

DOCS = Path(__file__).parents[2] / "docs"
PAGES = sorted(page for folder in ("integrations", "coming-from") for page in (DOCS / folder).glob("*.md"))
PAGES.append(DOCS / "cluster.md")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_block_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_blocks(page)
