"""The committed results of benchmarks/ as tables, made at every build, so that no figure is copied by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.util.docutils import SphinxDirective

__all__ = ["Results"]

FOLDER = Path(__file__).parents[1] / "benchmarks" / "results"
MAX_ROWS, MAX_LETTERS = 40, 90  # of a table; of a cell


class Results(SphinxDirective):
    """The directive `{results}`: a section for each file."""

    def run(self) -> list[nodes.Node]:
        """Return the sections."""
        files = sorted(FOLDER.glob("*.json"))
        text = "\n".join(section(file.stem, json.loads(file.read_text())) for file in files)
        return list(self.parse_text_to_nodes(text, allow_section_headings=True))


def section(name: str, facts: dict[str, Any]) -> str:
    """Return the Markdown of one file: command, machine and versions, then its parts."""
    machine, versions = facts.pop("machine", {}), facts.pop("versions", {})
    origin = [f"`{facts.pop('command')}`"] if "command" in facts else []
    facts.pop("commit", None)
    where = [str(machine[key]) for key in ("cpu", "gpu", "system", "level") if machine.get(key)]
    if where or versions:
        origin.append(", ".join([*where, *(f"{key} {value}" for key, value in versions.items())]))
    plain = {key: value for key, value in facts.items() if not isinstance(value, dict | list)}
    parts = [table([plain])] if plain else []
    for key, value in facts.items():
        if key not in plain:
            parts += [f"**{key.replace('_', ' ')}**", table(rows_of(value))]
    return "\n\n".join([f"## {name}", *origin, *parts]) + "\n"


def rows_of(value: Any) -> list[dict[str, Any]]:
    """Return the rows of a table: the elements of a list, or one row for each key of a dict."""
    if isinstance(value, list):
        return [item if isinstance(item, dict) else {"": item} for item in value]
    if value and all(isinstance(item, dict) for item in value.values()):
        return [{"": key, **item} for key, item in value.items()]
    return [{"": key, " ": item} for key, item in value.items()]


def table(rows: list[dict[str, Any]]) -> str:
    """Return a table in Markdown, of at most `MAX_ROWS` rows; long cells are cut."""
    columns = list(dict.fromkeys(key for row in rows[:MAX_ROWS] for key in row))
    lines = [columns, ["---"] * len(columns), *([cell(row.get(key)) for key in columns] for row in rows[:MAX_ROWS])]
    more = [f"\n… and {len(rows) - MAX_ROWS} more in the file."] if len(rows) > MAX_ROWS else []
    return "\n".join(["| " + " | ".join(line) + " |" for line in lines] + more)


def cell(value: Any) -> str:
    """Return a value as text, cut to `MAX_LETTERS`."""
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, dict):
        value = ", ".join(f"{key}: {cell(item)}" for key, item in value.items())
    elif isinstance(value, list):
        value = ", ".join(cell(item) for item in value)
    text = str(value).replace("|", "\\|").replace("\n", " ")
    return text if len(text) <= MAX_LETTERS else text[: MAX_LETTERS - 1] + "…"
