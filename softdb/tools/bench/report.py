"""What every benchmark reports beside its numbers, the machine, the versions, the command; and who won by how much."""

from __future__ import annotations

import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
from collections.abc import Iterable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

__all__ = [
    "MIB",
    "best",
    "command",
    "commit",
    "compared",
    "goals",
    "is_peer",
    "leading",
    "machine",
    "spread",
    "versions",
    "write_json",
]

MIB = 1 << 20  # sizes are in mebibytes, as memory is sold
Row = dict[str, Any]


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
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else "unknown"


def versions(packages: Iterable[str]) -> dict[str, str]:
    """The installed version of each package; one used from its source tree has none."""
    found = {}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def commit() -> str | None:
    """The commit that is measured, with `+` when files differ from it; None where softdb is no checkout."""
    here = Path(__file__).resolve()

    def git(*words: str) -> str:
        done = subprocess.run(["git", *words], cwd=here.parent, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    try:
        git("ls-files", "--error-unmatch", here.name)  # installed, it may lie within another project's repository
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
    return shlex.join(":".join(_name(part) if part.startswith("/") else part for part in w.split(":")) for w in words)


def _name(path: str) -> str:
    return Path(path).name


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, least and greatest."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def write_json(path: Path, result: dict[str, Any]) -> None:
    """Write a result as indented JSON, so that a diff of two results can be read."""
    path.write_text(json.dumps(result, indent=1, ensure_ascii=False, allow_nan=False) + "\n", encoding="utf-8")


# -- the rows of `softdb bench` ----------------------------------------------------------------------------------------


def is_peer(row: Row) -> bool:
    """Whether an engine is neither softdb nor FAISS over softdb's own index."""
    return not row["engine"].startswith("softdb") and row["engine"] != "faiss-refine"


def goals(rows: Sequence[Row]) -> list[tuple[str, int]]:
    """Every goal and number of threads, in their order."""
    return list(dict.fromkeys((row["goal"], row["threads"]) for row in rows))


def best(rows: Sequence[Row], alone: bool = False) -> list[Row]:
    """The better variant of each engine for each goal: one that meets it, then the faster in batches (or `alone`)."""
    found: dict[tuple[str, int, str], Row] = {}
    for row in rows:
        place = row["goal"], row["threads"], row["engine"]
        if place not in found or _rank(row, alone) > _rank(found[place], alone):
            found[place] = row
    return list(found.values())


def leading(rows: Sequence[Row]) -> list[Row]:
    """The better variants of each engine, in batches and alone: every row that `compared` names is among them."""
    kept = {id(row) for row in (*best(rows), *best(rows, alone=True))}
    return [row for row in rows if id(row) in kept]


def _rank(row: Row, alone: bool) -> tuple[bool, float]:
    return row["met"], -_latency(row) if alone else _rate(row)


def _rate(row: Row) -> float:
    return float(row["batch_queries_s"]["median"])


def _latency(row: Row) -> float:
    return float(row["single_ms"]["median"])


def compared(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """softdb beside the peers that meet the goal: for each measure the best of both.

    Ratios are softdb's over the other's. Without a recall to reach there is nothing to compare at.
    """
    found = []
    for goal, threads in goals(rows):
        these = [row for row in rows if (row["goal"], row["threads"]) == (goal, threads) and row["met"]]
        ours = [row for row in these if row["engine"].startswith("softdb") and row["target"] is not None]
        if ours:
            label = max(ours, key=_rate)["label"]
            found.append({"goal": goal, "threads": threads, "softdb": label, **_beside(ours, these)})
    return found


def _beside(ours: Sequence[Row], rows: Sequence[Row]) -> dict[str, Any]:
    facts: dict[str, Any] = {}
    fastest, peers = max(ours, key=_rate), [row for row in rows if is_peer(row)]
    if peers:
        for name, measure, choose in (("batch", _rate, max), ("single", _latency, min)):
            mine, other = choose(ours, key=measure), choose(peers, key=measure)
            ratio = _ratio(measure(mine), measure(other))
            facts[name] = {"softdb": mine["label"], "peer": other["label"], "ratio": ratio}
    graph = next((row for row in best(rows) if row["engine"] == "hnswlib"), None)
    if graph is not None:
        whole = graph["build_s"]["without_tuning"]
        facts["hnswlib"] = {
            "peer": graph["label"],
            "index_bytes_ratio": _ratio(fastest["index_bytes"], graph["index_bytes"]),
            "build_ratio": _ratio(fastest["build_s"]["without_tuning"], whole),
            "build_with_tuning_ratio": _ratio(fastest["build_s"]["with_tuning"], whole),
        }
    over = next((row for row in rows if row["engine"] == "faiss-refine"), None)
    same = over and next((row for row in rows if row["label"] == over["facts"].get("index")), None)
    if over and same:
        facts["over_faiss"] = {
            "softdb": same["label"],
            "batch_cost": round(_rate(over) / _rate(same) - 1, 3),
            "single_cost_ms": round(_latency(same) - _latency(over), 4),
        }
    return facts


def _ratio(mine: float, theirs: float) -> float | None:
    return round(mine / theirs, 3) if theirs else None
