"""The quickstarts of docs/coming-from: softdb needs no more statements and calls than the library beside it."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from blocks import blocks

FOLDER = Path(__file__).parents[2] / "docs" / "coming-from"
OF_PYTHON = {"Path", "iterdir", "read_text"}
PAGES = {"Chroma": "chroma.md", "LanceDB": "lancedb.md", "LlamaIndex": "llama_index.md"}


def counted(program: str) -> tuple[int, int]:
    """The number of statements, and of distinct calls of a library."""
    body = [node for node in ast.parse(program).body if not isinstance(node, ast.Assert)]
    calls = [node.func for statement in body for node in ast.walk(statement) if isinstance(node, ast.Call)]
    names = {call.attr if isinstance(call, ast.Attribute) else getattr(call, "id", "") for call in calls}
    return len(body), len(names - OF_PYTHON)


@pytest.mark.parametrize("library", PAGES)
def test_softdb_needs_no_more_than_the_library_beside_it(library: str, tmp_path: Path) -> None:
    section = tmp_path / "section.md"
    section.write_text((FOLDER / PAGES[library]).read_text().split("\n## The quickstarts\n")[1].split("\n## ")[0])
    *_, theirs, ours = blocks(section, "py(?:thon)?")
    assert "softdb" in ours
    assert "softdb" not in theirs
    assert all(own <= other for own, other in zip(counted(ours), counted(theirs), strict=True))
    row = re.search(rf"^\| {library} \| (\d.*)\|$", (FOLDER / "index.md").read_text(), re.MULTILINE)
    assert row is not None
    assert [int(number) for number in re.findall(r"\d+", row[1])] == [*counted(theirs), *counted(ours)]
