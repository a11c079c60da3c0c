"""The facts that every benchmark reports beside its numbers, and the rows of `softdb bench`: who won by how much."""

from __future__ import annotations

import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeVar

from softdb.errors import BadInput

MIB = 1 << 20  # sizes are in mebibytes, as memory is sold
ENDS = (".png", ".svg", ".pdf")
Row = dict[str, Any]
Name = TypeVar("Name")


def machine() -> dict[str, Any]:
    """Processor, cores that this process may use, memory, kernel and Python."""
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
        "load_average": [round(load, 2) for load in os.getloadavg()],  # a busy machine shows itself here
    }


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or "unknown"
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


def versions(packages: Iterable[str]) -> dict[str, str]:
    """The installed version of each package; one used from its source tree has none."""
    installed = {}
    for package in packages:
        try:
            installed[package] = version(package)
        except PackageNotFoundError:
            installed[package] = "not installed"
    return installed


def commit() -> str | None:
    """The commit that is measured, with `+` when files differ from it; None where softdb is no checkout."""
    source = Path(__file__).resolve()

    def git(*words: str) -> str:
        return subprocess.check_output(["git", *words], cwd=source.parent, text=True, stderr=subprocess.DEVNULL).strip()

    try:
        git("ls-files", "--error-unmatch", source.name)  # installed, it may lie within another project's repository
        return git("rev-parse", "HEAD") + ("+" if git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def command() -> str:
    """The command line as given, absolute paths cut to their last name: a result names no one's folders."""
    program = Path(sys.argv[0])
    if program.name == "__main__.py":
        words = [Path(sys.executable).name, "-m", program.parent.name, *sys.argv[1:]]
    elif program.suffix == ".py":
        words = [Path(sys.executable).name, *sys.argv]
    else:
        words = [program.name, *sys.argv[1:]]
    cut = (":".join(Path(p).name if p.startswith("/") else p for p in word.split(":")) for word in words)
    return shlex.join(cut)


def in_turn(ways: Mapping[Name, Callable[[], object]], rounds: int) -> dict[Name, list[float]]:
    """Seconds of each way, in rounds over all of them; a first round warms up and is thrown away."""
    seconds: dict[Name, list[float]] = {name: [] for name in ways}
    for turn in range(rounds + 1):
        for name, way in ways.items():
            start = time.perf_counter()
            way()
            if turn:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, least and greatest."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def write_json(path: Path, result: dict[str, Any]) -> None:
    """Write a result as indented JSON, so that a diff of two results can be read."""
    path.write_text(json.dumps(result, indent=1, ensure_ascii=False, allow_nan=False) + "\n", encoding="utf-8")


# -- the rows of `softdb bench` ----------------------------------------------------------------------------------------


def leading(rows: Sequence[Row]) -> list[Row]:
    """The better variants of each engine, in batches and alone: every row that `compared` names is among them."""
    best = {id(row) for speed in (_rate, _rate_alone) for row in _best(rows, speed)}
    return [row for row in rows if id(row) in best]


def _best(rows: Sequence[Row], speed: Callable[[Row], float]) -> list[Row]:
    """The better variant of each engine for each goal: one that meets it, then the faster."""
    best: dict[tuple[str, int, str], Row] = {}
    for row in sorted(rows, key=lambda row: (row["met"], speed(row))):
        best[row["goal"], row["threads"], row["engine"]] = row
    return list(best.values())


def _rate(row: Row) -> float:
    return float(row["batch_queries_s"]["median"])


def _rate_alone(row: Row) -> float:
    return 1e3 / float(row["single_ms"]["median"])


def compared(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """softdb beside the fastest peer that meets the goal, in batches and in single queries.

    Ratios are softdb's over the other's. Without a recall to reach there is nothing to compare at.
    """
    facts = []
    for goal, threads in dict.fromkeys((row["goal"], row["threads"]) for row in rows):
        fit = [row for row in rows if (row["goal"], row["threads"], row["met"]) == (goal, threads, True)]
        ours = [row for row in fit if row["engine"].startswith("softdb") and row["target"] is not None]
        peers = [row for row in fit if not row["engine"].startswith("softdb")]
        if not ours:
            continue
        facts.append({"goal": goal, "threads": threads, "softdb": max(ours, key=_rate)["label"]})
        if peers:
            for name, speed in (("batch", _rate), ("single", _rate_alone)):
                first, second = max(ours, key=speed), max(peers, key=speed)
                ratio = speed(first) / speed(second) if name == "batch" else speed(second) / speed(first)
                facts[-1][name] = {"softdb": first["label"], "peer": second["label"], "ratio": round(ratio, 3)}
    return facts


def can_draw(path: Path) -> None:
    """BadInput or MissingDependency where a picture could not be written there, before anything is measured."""
    from softdb.plots import figure

    if path.suffix.lower() not in ENDS:
        raise BadInput(f"the picture's name ends in {path.suffix!r}; expected one of {', '.join(ENDS)}")
    figure()


def draw(result: dict[str, Any], path: Path) -> None:
    """Write the picture of a report, of its first number of threads: recall against speed, build times, sizes."""
    from softdb.plots import figure, save

    threads = result["setup"]["threads"][0]
    rows = [row for row in result["rows"] if row["threads"] == threads]
    drawn, axes = figure(columns=4, width=4.6)
    colours = {row["engine"]: "" for row in rows}
    colours = {name: f"C{place % 10}" for place, name in enumerate(colours)}
    for ax, speed, title in ((axes[0], _rate, f"in batches, {threads} threads"), (axes[1], _rate_alone, "one by one")):
        for name, colour in colours.items():
            recalls, speeds = zip(*frontier([row for row in rows if row["engine"] == name], speed), strict=True)
            ax.plot(recalls, speeds, marker="o", color=colour, label=name, linewidth=2.5 if "softdb" in name else 1.2)
        ax.set(yscale="log", xlabel="recall", title=f"queries/s {title}")
        ax.grid(True, which="both", color="0.92")
    axes[0].legend(frameon=False, fontsize="small")
    last = [row for row in _best(rows, _rate) if row["goal"] == rows[-1]["goal"]]
    names, shades = [row["label"] for row in last], [colours[row["engine"]] for row in last]
    for part, shade in (("with_tuning", "0.75"), ("without_tuning", shades)):  # grey: the seconds that tuning adds
        axes[2].barh(names, [row["build_s"][part] for row in last], color=shade)
    axes[3].barh(
        [name if row["holds_keys"] else f"{name} (without keys)" for name, row in zip(names, last, strict=True)],
        [row["index_bytes"] / MIB for row in last],
        color=shades,
    )
    for ax, unit, title in ((axes[2], "seconds", "build"), (axes[3], "MiB", "index")):
        ax.invert_yaxis()
        ax.set(xlabel=unit, title=title)
    data = result["data"]
    drawn.suptitle(f"{data['name']}: {data['n']:,} × {data['dim']}, {data['metric']}, k = {result['setup']['k']}")
    save(drawn, path)


def frontier(rows: Sequence[Row], speed: Callable[[Row], float] = _rate) -> list[tuple[float, float]]:
    """Recall and queries a second of the rows that no other of them beats in both, by recall."""
    points: list[tuple[float, float]] = []
    for point in sorted(((row["recall"], speed(row)) for row in rows), reverse=True):
        if not points or point[1] > points[-1][1]:
            points.append(point)
    return points[::-1]
