"""The committed results of benchmarks/ as pictures and as tables with bars, made at every build.

`results.yaml` says what is shown of each file, and describes its paths.
"""

from __future__ import annotations

import datetime
import json
import re
import statistics
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any

import yaml
from docutils import nodes
from sphinx.util.docutils import SphinxDirective

__all__ = ["FOLDER", "SHOWN", "Results", "is_of_softdb", "table"]

FOLDER = Path(__file__).parents[1] / "benchmarks" / "results"
SHOWN = Path(__file__).with_name("results.yaml")
COMPUTED = {"mean": statistics.mean, "mib": lambda count: count / 1024**2, "count": len}
GROUPED = {"max": max, "mean": statistics.mean, "median": statistics.median}


class Results(SphinxDirective):
    """The directive `{results}`: a section for each theme, and in it one for each file."""

    def run(self) -> list[nodes.Node]:
        """Return the sections."""
        self.env.note_dependency(str(SHOWN))
        text = []
        for theme, files in yaml.safe_load(SHOWN.read_text()).items():
            text += [f"## {theme}", *(section(**shown) for shown in files)]
        return list(self.parse_text_to_nodes("\n\n".join(text), allow_section_headings=True))


def is_of_softdb(facts: dict[str, Any]) -> bool:
    """Return False for a run whose record of versions says that softdb was not installed."""
    return bool(facts.get("versions", {}).get("softdb") != "not installed")


def section(file: str, title: str, about: str, tables: list[dict[str, Any]]) -> str:
    """Return the Markdown of one file: title, picture, tables, and where and how they were measured."""
    facts = json.loads((FOLDER / f"{file}.json").read_text())
    picture = f"![{title}](../benchmarks/results/{file}.png)"
    parts = [picture] if (FOLDER / f"{file}.png").exists() else []
    runs = dict.fromkeys(origin(facts[of["run"]] if "run" in of else facts) for of in tables)
    html = [table(facts=facts, **of) for of in tables] + list(runs)
    return "\n\n".join([f"### {title}", about, *parts, *(f"```{{raw}} html\n{part}\n```" for part in html)])


def origin(run: dict[str, Any]) -> str:
    """Return the caption of a run in HTML: machine, date, commit, versions and command."""
    if "command" not in run:  # every part of the file is a run of its own
        dates = " and ".join(day(date) for date in sorted({item["date"] for item in run.values()}))
        return f'<p class="origin">Measured on {dates}; machine, commit and command of each run are in the file.</p>'
    machine = run["machine"]
    where = [machine["cpu"] if machine["cpu"] != "not recorded" else "machine not recorded"]
    where += [f"{machine[key]} {unit}" for key, unit in (("cores", "cores"), ("memory_gib", "GiB")) if key in machine]
    where += [f"{name} {version}" for name, version in run.get("versions", {}).items()]
    commit = re.sub(r"\b([0-9a-f]{10})[0-9a-f]{30}\b", r"\1", run["commit"]).replace("+", " with changes")
    facts = escape(f"{', '.join(where)}. {day(run['date'])}, commit {commit}.")
    return f'<p class="origin">{facts} <code>{escape(run["command"])}</code></p>'


def day(date: str) -> str:
    """Return an ISO date as text, such as 26 November 2026."""
    when = datetime.date.fromisoformat(date)
    return f"{when.day} {when:%B %Y}"


def table(
    facts: dict[str, Any],
    title: str,
    rows: str,
    columns: dict[str, str] | None = None,
    name: str = "",
    label: str = "",
    where: dict[str, Any] | None = None,
    group: str = "",
    pivot: list[str] | None = None,
    plain: tuple[str, ...] = (),
    scale: str = "column",
    run: str = "",
) -> str:
    """Return a table in HTML; a bar behind each number shows its share of the largest number."""
    lines: list[tuple[str, dict[str, Any]]] = []
    for text, row in chosen(rows, facts[run] if run else facts, name):
        if isinstance(row, dict) and not (where or {}).items() <= row.items():
            continue
        line = {pivot[0].format(**row): row[pivot[1]]} if pivot else dict(cells(columns or {}, row))
        if any(value is not None for value in line.values()):
            lines.append((text, line))
    if group:
        lines = grouped(lines, group)
    if not lines:
        raise ValueError(f"no row of the results matches {rows!r} of the table {title!r}")
    heads = list(dict.fromkeys(head for _, line in lines for head in line))
    largest = {head: max((line[head] for _, line in lines if is_number(line.get(head))), default=0) for head in heads}
    if scale == "table":
        largest = dict.fromkeys(heads, max(value for head, value in largest.items() if head not in plain))
    body = "".join(
        f'<tr><th scope="row">{escape(text)}</th>'
        + "".join(cell(line.get(head), 0 if head in plain else largest[head]) for head in heads)
        for text, line in lines
    )
    top = "".join(f'<th scope="col">{escape(head)}</th>' for head in (label, *heads))
    return (
        f'<p class="results-title">{escape(title)}</p>'
        f'<div class="table-wrapper results" tabindex="0" role="group" aria-label="{escape(title)}">'
        f'<table class="docutils"><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'
    )


def chosen(path: str, facts: Any, name: str = "", label: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Yield the items at a path, each with its label: the keys that * stands for, and the names of lists' elements."""
    if not path:
        yield ", ".join(label), facts
        return
    key, _, further = path.partition("/")
    if isinstance(facts, list):
        for number, item in enumerate(facts, 1) if key == "*" else [(int(key) + 1, facts[int(key)])]:
            of = (*label, name.format(**{"number": number, **item})) if key == "*" else label
            yield from chosen(further, item, name, of)
    elif key.endswith("*") and isinstance(facts, dict):
        for member, item in facts.items():
            if member.startswith(key[:-1]) and (not further or isinstance(item, dict | list)):
                yield from chosen(further, item, name, (*label, member))
    elif isinstance(facts, dict) and key in facts:
        yield from chosen(further, facts[key], name, label)


def cells(columns: dict[str, str], row: Any) -> Iterator[tuple[str, Any]]:
    """Yield head and value of each cell of a row."""
    for head, path in columns.items():
        path, _, how = path.partition(":")
        for label, value in chosen(path, row):
            yield head.format(label), COMPUTED[how](value) if how else value


def grouped(lines: list[tuple[str, dict[str, Any]]], how: str) -> list[tuple[str, dict[str, Any]]]:
    """Return one line for each label: the largest, mean or median of its numbers."""
    groups: dict[str, dict[str, list[float]]] = {}
    for text, line in lines:
        for head, value in ((head, value) for head, value in line.items() if value is not None):
            groups.setdefault(text, {}).setdefault(head, []).append(value)
    return [(text, {head: GROUPED[how](values) for head, values in line.items()}) for text, line in groups.items()]


def is_number(value: object) -> bool:
    """Return True for a number, which may have a bar."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def cell(value: Any, largest: float) -> str:
    """Return a cell in HTML, with a bar where `largest` is above 0."""
    if not is_number(value):
        return f"<td>{'' if value is None else escape(str(value))}</td>"
    bar = f'<i style="width:{100 * value / largest:.1f}%"></i>' if largest > 0 <= value else ""
    return f'<td class="number">{bar}<span>{number(value)}</span></td>'


def number(value: float) -> str:
    """Return a number with three digits, or with all digits before the point."""
    if value == 0 or isinstance(value, int) or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:#.3g}".rstrip(".")
