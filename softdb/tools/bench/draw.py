"""Pictures of a report: recall against speed, what building takes, what an index occupies."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from softdb.errors import BadInput
from softdb.plots import figure, save
from softdb.tools.bench.report import MIB, Row, best

__all__ = ["can_draw", "draw", "frontier"]

ENDS = (".png", ".svg", ".pdf")
STAGES = {"choosing": "0.75", "measuring": "0.55"}  # shades of what is tuning


def can_draw(path: Path) -> None:
    """BadInput or MissingDependency where a picture could not be written there, before anything is measured."""
    if path.suffix.lower() not in ENDS:
        raise BadInput(f"the picture's name ends in {path.suffix!r}; expected one of {', '.join(ENDS)}")
    figure()


def draw(result: dict[str, Any], path: Path) -> None:
    """Write the picture of a report, of its first number of threads."""
    threads = result["setup"]["threads"][0]
    rows = [row for row in result["rows"] if row["threads"] == threads]
    drawn, axes = figure(columns=4, width=4.6)
    names = list(dict.fromkeys(row["engine"] for row in rows))
    colours = {name: f"C{place % 10}" for place, name in enumerate(names)}
    _curves(axes[0], rows, colours, "batch_queries_s", f"queries/s in batches, {threads} threads")
    _curves(axes[1], rows, colours, "single_ms", "queries/s one by one")
    last = [row for row in best(rows) if row["goal"] == rows[-1]["goal"]]
    _build_bars(axes[2], last, colours)
    _memory_bars(axes[3], last, colours)
    handles, labels = axes[0].get_legend_handles_labels()
    axes[0].legend(handles, labels, frameon=False, fontsize="small")
    data = result["data"]
    drawn.suptitle(f"{data['name']}: {data['n']:,} × {data['dim']}, {data['metric']}, k = {result['setup']['k']}")
    save(drawn, path)


def frontier(rows: Sequence[Row], measure: str) -> list[tuple[float, float]]:
    """Recall and queries a second of the rows that no other of them beats in both, by recall."""
    points = sorted(((row["recall"], _speed(row, measure)) for row in rows), reverse=True)
    found: list[tuple[float, float]] = []
    for point in points:
        if not found or point[1] > found[-1][1]:
            found.append(point)
    return found[::-1]


def _speed(row: Row, measure: str) -> float:
    middle = float(row[measure]["median"])
    return middle if measure == "batch_queries_s" else 1e3 / middle


def _curves(ax: Any, rows: Sequence[Row], colours: dict[str, str], measure: str, title: str) -> None:
    """A line an engine, the better variant at each point; the best is at the upper right."""
    for name, colour in colours.items():
        points = frontier([row for row in rows if row["engine"] == name], measure)
        ours = name.startswith("softdb")
        recalls, speeds = zip(*points, strict=True)
        ax.plot(recalls, speeds, marker="o", markersize=4, color=colour, label=name, linewidth=2.5 if ours else 1.2)
    ax.set(yscale="log", xlabel="recall", title=title)
    ax.grid(True, which="both", color="0.92")
    ax.set_axisbelow(True)
    ax.margins(x=0.08, y=0.15)  # room for the word in the corner
    ax.text(0.98, 0.98, "better ↗", transform=ax.transAxes, ha="right", va="top", color="0.4")


def _build_bars(ax: Any, rows: Sequence[Row], colours: dict[str, str]) -> None:
    """Seconds to build, and in grey those that tuning adds."""
    names = [row["label"] for row in rows]
    built = [row["build_s"]["without_tuning"] for row in rows]
    ax.barh(names, built, color=[colours[row["engine"]] for row in rows])
    for stage, shade in STAGES.items():
        more = [row["build_s"].get(stage, 0.0) for row in rows]
        ax.barh(names, more, left=built, color=shade, label=stage)
        built = [a + b for a, b in zip(built, more, strict=True)]
    ax.invert_yaxis()
    ax.legend(frameon=False, fontsize="small")
    ax.set(xlabel="seconds", title="build")


def _memory_bars(ax: Any, rows: Sequence[Row], colours: dict[str, str]) -> None:
    """Size of each index."""
    names = [row["label"] if row["holds_keys"] else f"{row['label']} (without keys)" for row in rows]
    ax.barh(names, [row["index_bytes"] / MIB for row in rows], color=[colours[row["engine"]] for row in rows])
    ax.invert_yaxis()
    ax.set(xlabel="MiB", title="index")
