"""Report machine and versions beside benchmark results; compare and plot the rows of `softdb bench`."""

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
from softdb.plots import COLORS, figure, save, style

MIB = 1 << 20  # bytes
SUFFIXES = (".png", ".svg", ".pdf")
Row = dict[str, Any]
Name = TypeVar("Name")


def machine() -> dict[str, Any]:
    """Describe the machine: processor, cores that this process may use, memory, kernel, Python, load."""
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
        "load_average": [round(load, 2) for load in os.getloadavg()],  # high on a machine with other work
    }


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or "unknown"
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


def versions(packages: Iterable[str]) -> dict[str, str]:
    """Return the installed version of each package; a package used from its source tree has none."""
    installed = {}
    for package in packages:
        try:
            installed[package] = version(package)
        except PackageNotFoundError:
            installed[package] = "not installed"
    return installed


def commit() -> str | None:
    """Return the commit of the checkout, with `+` if files differ from it; None if softdb is not in a checkout."""
    source = Path(__file__).resolve()

    def git(*words: str) -> str:
        return subprocess.check_output(["git", *words], cwd=source.parent, text=True, stderr=subprocess.DEVNULL).strip()

    try:
        git("ls-files", "--error-unmatch", source.name)  # an installed softdb may be inside another repository
        return git("rev-parse", "HEAD") + ("+" if git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def command() -> str:
    """Return the command line with absolute paths cut to their last name, so that a report names no private folder."""
    program = Path(sys.argv[0])
    if program.name == "__main__.py":
        words = [Path(sys.executable).name, "-m", program.parent.name, *sys.argv[1:]]
    elif program.suffix == ".py":
        words = [Path(sys.executable).name, *sys.argv]
    else:
        words = [program.name, *sys.argv[1:]]
    short = (":".join(Path(p).name if p.startswith("/") else p for p in word.split(":")) for word in words)
    return shlex.join(short)


def in_turn(calls: Mapping[Name, Callable[[], object]], rounds: int) -> dict[Name, list[float]]:
    """Time all calls in each of `rounds` rounds; return the seconds of each. A first round warms up, uncounted."""
    seconds: dict[Name, list[float]] = {name: [] for name in calls}
    for turn in range(rounds + 1):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            if turn:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return median, minimum and maximum."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def write_json(path: Path, result: dict[str, Any]) -> None:
    """Write a report as indented JSON, so that a diff of two reports is readable."""
    path.write_text(json.dumps(result, indent=1, ensure_ascii=False, allow_nan=False) + "\n", encoding="utf-8")


# -- the rows of `softdb bench` ----------------------------------------------------------------------------------------


def leading(rows: Sequence[Row]) -> list[Row]:
    """Return the rows of each engine's fastest variants, in batches and for single queries, for each goal."""
    best = {id(row) for speed in (_rate, _rate_alone) for row in _best(rows, speed)}
    return [row for row in rows if id(row) in best]


def _best(rows: Sequence[Row], speed: Callable[[Row], float]) -> list[Row]:
    """Return the row of each engine's fastest variant for each goal; one that meets the goal goes before others."""
    best: dict[tuple[str, int, str], Row] = {}
    for row in sorted(rows, key=lambda row: (row["met"], speed(row))):
        best[row["goal"], row["threads"], row["engine"]] = row
    return list(best.values())


def _rate(row: Row) -> float:
    return float(row["batch_queries_s"]["median"])


def _rate_alone(row: Row) -> float:
    return 1e3 / float(row["single_ms"]["median"])


def compared(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Compare softdb with the fastest peer that meets each goal, in batches and for single queries.

    "ratio" is softdb's queries/s, or its time for one query, over the peer's. Grids over efforts are not compared.
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


def require_drawable(path: Path) -> None:
    """Raise BadInput for a picture of another format, and MissingDependency without matplotlib."""
    if path.suffix.lower() not in SUFFIXES:
        raise BadInput(f"the picture's name ends in {path.suffix!r}; expected one of {', '.join(SUFFIXES)}")
    figure()


@style()
def draw(result: dict[str, Any], path: Path) -> None:
    """Plot recall against speed, build times and sizes of a report, for its first number of threads."""
    threads = result["setup"]["threads"][0]
    rows = [row for row in result["rows"] if row["threads"] == threads]
    looks = _looks(row["engine"] for row in rows)
    plot, axes = figure(2, 2, height=5 + len(looks) / 3)
    for ax, speed, title in ((axes[0], _rate, f"In batches, {threads} threads"), (axes[1], _rate_alone, "One by one")):
        for name, look in looks.items():
            recalls, speeds = zip(*frontier([row for row in rows if row["engine"] == name], speed), strict=True)
            ax.plot(recalls, speeds, label=name, linewidth=2.8 if "softdb" in name else 1.4, **look)
        ax.set(yscale="log", xlabel="recall", ylabel="queries per second", title=title)
    plot.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=5)
    last = [row for row in _best(rows, _rate) if row["goal"] == rows[-1]["goal"]]
    last.sort(key=lambda row: list(looks).index(row["engine"]))
    names, shades = [row["label"].replace(" ", "\n") for row in last], [looks[row["engine"]]["color"] for row in last]
    for ax, few, many, unit, title in (
        (axes[2], "without_tuning", "with_tuning", "seconds", "Build (with tuning: grey)"),
        (axes[3], "beside_keys_bytes", "in_all_bytes", "MiB", "Index (with keys: grey)"),
    ):
        for amount, shade in ((many, "0.82"), (few, shades)):
            ax.barh(
                names, [row["build_s"][amount] if ax is axes[2] else row[amount] / MIB for row in last], color=shade
            )
        ax.invert_yaxis()
        ax.set(xlabel=unit, title=title)
        ax.tick_params(axis="y", labelsize=8, labelleft=ax is axes[2])
        ax.grid(visible=False, axis="y")
    data = result["data"]
    plot.suptitle(f"{data['name']}: {data['n']:,} × {data['dim']}, {data['metric']}, k = {result['setup']['k']}")
    save(plot, path)


def _looks(engines: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Return the colour, marker and line of each engine; the first colour is softdb's alone."""
    ordered = sorted(dict.fromkeys(engines), key=lambda name: "softdb" not in name)
    peers = len(COLORS) - 1
    return {
        name: {
            "color": COLORS[1 + (i - 1) % peers if i else 0],
            "marker": "osDv^<>PX*"[i % 10],
            "linestyle": "--" if i > peers else "-",
        }
        for i, name in enumerate(ordered)
    }


def frontier(rows: Sequence[Row], speed: Callable[[Row], float] = _rate) -> list[tuple[float, float]]:
    """Return (recall, queries per second) of the rows that no other row beats in both, sorted by recall."""
    points: list[tuple[float, float]] = []
    for point in sorted(((row["recall"], speed(row)) for row in rows), reverse=True):
        if not points or point[1] > points[-1][1]:
            points.append(point)
    return points[::-1]
