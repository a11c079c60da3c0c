"""docs/works-with.md: each line names a test that exists, and each cell of the first table has its line."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "works-with.md").read_text()
SECTIONS = {part.split("\n", 1)[0]: part for part in PAGE.split("\n## ")[1:]}
PARTS = ("softdb.attention", "nn.Attention", "nn.Memory", "nn.View", "losses", "db.attend")


def rows(text: str) -> list[list[str]]:
    """The cells of a table's lines below its head."""
    table = re.findall(r"^\| *(.+?) *\|$", text, re.MULTILINE)
    return [re.split(r" *\| *", line) for line in table[1:] if not line.startswith("---")]


def named(section: str) -> set[str]:
    """The tests in the files that a section names."""
    (line,) = re.findall(r"^Tests: (.+)$", section, re.MULTILINE)
    modules = [ast.parse((ROOT / path).read_text()) for path in re.findall(r"`([\w/]+\.py)`", line)]
    return {node.name for module in modules for node in module.body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("name", SECTIONS)
def test_every_line_names_a_test(name: str) -> None:
    lines, known = rows(SECTIONS[name]), named(SECTIONS[name])
    assert lines
    for *_, cell in lines:
        assert re.fullmatch(r"`(test_\w+)`", cell), f"{name}: {cell} is no test"
        assert cell.strip("`") in known, f"{name}: {cell} does not exist"


@pytest.mark.parametrize("name", SECTIONS)
def test_every_part_has_a_line(name: str) -> None:
    parts = " ".join(line[0] for line in rows(SECTIONS[name]))
    assert [part for part in PARTS if part not in parts] == []


def test_the_first_table_has_every_tool_and_every_part() -> None:
    first = PAGE.split("\n## ")[0]
    head = re.findall(r"^\| \| (.+) \|$", first, re.MULTILINE)[0]
    assert re.split(r" \| ", head.replace("`", "")) == list(PARTS)
    tools = rows(first)
    assert len(tools) == len(SECTIONS)
    for line in tools:
        assert len(line) == 1 + len(PARTS)
        assert re.match(r"\[.+\]\(#.+\)", line[0])
