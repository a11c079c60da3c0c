"""The committed results of benchmarks/ as tables: drawn at every build, so that no figure is copied by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.util.docutils import SphinxDirective

__all__ = ["Results"]

FOLDER = Path(__file__).parents[1] / "benchmarks" / "results"
ROWS, LONG = 40, 90  # of a table; letters of a cell


class Results(SphinxDirective):
    """`{results}`: a section for each file."""

    def run(self) -> list[nodes.Node]:
        """What stands in its place."""
        files = sorted(FOLDER.glob("*.json"))
        text = "\n".join(section(file.stem, json.loads(file.read_text())) for file in files)
        return list(self.parse_text_to_nodes(text, allow_section_headings=True))


def section(name: str, facts: dict[str, Any]) -> str:
    """One file: where it is from, then its parts."""
    machine, versions = facts.pop("machine", {}), facts.pop("versions", {})
    told = [f"`{facts.pop('command')}`"] if "command" in facts else []
    facts.pop("commit", None)
    where = [str(machine[key]) for key in ("cpu", "gpu", "system", "level") if machine.get(key)]
    if where or versions:
        told.append(", ".join([*where, *(f"{key} {value}" for key, value in versions.items())]))
    plain = {key: value for key, value in facts.items() if not isinstance(value, dict | list)}
    parts = [table([plain])] if plain else []
    for key, value in facts.items():
        if key not in plain:
            parts += [f"**{key.replace('_', ' ')}**", table(rows_of(value))]
    return "\n\n".join([f"## {name}", *told, *parts]) + "\n"


def rows_of(value: Any) -> list[dict[str, Any]]:
    """Lines of a table: those of a list, or one for each key."""
    if isinstance(value, list):
        return [one if isinstance(one, dict) else {"": one} for one in value]
    if value and all(isinstance(one, dict) for one in value.values()):
        return [{"": key, **one} for key, one in value.items()]
    return [{"": key, " ": one} for key, one in value.items()]


def table(rows: list[dict[str, Any]]) -> str:
    """A table in Markdown; what does not fit a cell is cut, and said to be."""
    columns = list(dict.fromkeys(key for row in rows[:ROWS] for key in row))
    lines = [columns, ["---"] * len(columns), *([cell(row.get(key)) for key in columns] for row in rows[:ROWS])]
    more = [f"\n… and {len(rows) - ROWS} more in the file."] if len(rows) > ROWS else []
    return "\n".join(["| " + " | ".join(line) + " |" for line in lines] + more)


def cell(value: Any) -> str:
    """A value, short."""
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, dict):
        value = ", ".join(f"{key}: {cell(one)}" for key, one in value.items())
    elif isinstance(value, list):
        value = ", ".join(cell(one) for one in value)
    text = str(value).replace("|", "\\|").replace("\n", " ")
    return text if len(text) <= LONG else text[: LONG - 1] + "…"
