"""Run the tests of tests/trust in full within a number of minutes, and make the table of docs/durability.md.

    python benchmarks/trust.py --minutes 120             # all suites
    python benchmarks/trust.py --minutes 20 --only kill  # the results of the others stay

If a suite fails, neither the file nor the table changes. A suite that is cut off when its minutes are over counts what
it has tried until then, and the table says "cut off".
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from common import provenance, write_json

__all__ = ["DOCS", "RESULTS", "shown", "table"]

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks/results/trust.json"
DOCS = ROOT / "docs/durability.md"
INTERRUPTED = 2  # pytest's exit code of an interrupted run

Figures = dict[str, int]


class Line(NamedTuple):
    """A line of the table, with functions of a run's figures for its two last cells."""

    tried: str
    much: Callable[[Figures], str]
    wrong: Callable[[Figures], str]


class Suite(NamedTuple):
    """Test files that run together, and their lines of the table."""

    marks: str
    files: tuple[str, ...]
    share: int  # of the minutes
    lines: tuple[Line, ...]
    only: str = ""  # pytest's -k: the tests to run

    @property
    def command(self) -> str:
        """Command line of the suite, without the options of a run."""
        only = f'-k "{self.only}" ' if self.only else ""
        return f'pytest -m "{self.marks}" {only}{" ".join(self.paths)}'

    @property
    def paths(self) -> list[str]:
        """Paths of the files from the root."""
        return [
            f"tests/{place or 'trust'}/test_{name}.py" for place, _, name in (x.rpartition("/") for x in self.files)
        ]


def counted(*names: str) -> Callable[[Figures], str]:
    """Return a function that formats the sum of these figures; it raises KeyError if a run has not counted one."""
    return lambda figures: f"{sum(figures[name] for name in names):,}"


def none_of(*names: str, suffix: str = "") -> Callable[[Figures], str]:
    """Return a function that formats the sum of these figures, followed by a suffix."""
    return lambda figures: counted(*names)(figures) + suffix


WRONG = ("acknowledged records lost", "half-applied writes seen", "wrong answers")
SUITES = {
    "kill": Suite("exhaustive", ("writer_killed",), 18, (
        Line(
            "Writing processes that were killed (SIGKILL)",
            lambda f: f"{f['kills']:,}; {f['kills: fail points']:,} of them at a chosen step of a write",
            none_of("kills: acknowledged records lost", "kills: deleted records back", "kills: half batches"),
        ),
    )),
    "power": Suite("exhaustive", ("power_cut",), 18, (
        Line(
            "States that a power cut can leave on the disk, also a power cut after a kill",
            counted("power loss: states explored"), none_of("power loss: acknowledged records lost"),
        ),
    ), "no_cut_loses or after_a_kill"),
    "recovery": Suite("exhaustive", ("power_cut",), 6, (
        Line(
            "States after a second power cut while the database recovers from the first",
            counted("power loss: states explored"), none_of("power loss: acknowledged records lost"),
        ),
    ), "within_the_recovery"),
    "protocol": Suite("exhaustive", ("power_cut",), 8, (
        Line(
            "Versions of softdb in which one sync is omitted, or two neighbouring steps are swapped: do power cuts "
            "show the fault?",
            counted("power loss: mutations tried"),
            lambda f: f"{f['power loss: mutations found']:,} lose data; a list says why each of the others cannot",
        ),
    ), "each_sync"),
    "faults": Suite("", ("disk_errors",), 5, (
        Line(
            "Disk errors: failed reads and writes (EIO), a full disk (ENOSPC), short writes",
            counted("faults injected"), none_of("faults: acknowledged records lost"),
        ),
    )),
    "model": Suite("exhaustive", ("random_operations",), 25, (
        Line(
            "Random operations, each result compared with that of a dict and numpy",
            counted("model: operations"), none_of("model: disagreements"),
        ),
    )),
    "rot": Suite("exhaustive", ("bit_rot",), 8, (
        Line(
            "Damaged files: a bit was flipped, or a part was cut, zeroed or swapped",
            counted("bit rot: damages tried"), none_of("bit rot: misread"),
        ),
    )),
    "salvage": Suite("exhaustive", ("salvage", "salvage_lost_parts"), 8, (
        Line(
            "Damaged databases that were salvaged",
            counted("salvage: damages tried"), none_of("salvage: records that were never so"),
        ),
    )),
    "hostile": Suite("", ("hostile_directory", "hostile_catalog", "hostile_ids_payloads", "fuzz"), 6, (
        Line(
            "Hostile directories and files, and fuzzed inputs",
            lambda f: (
                f"{f['hostile: directories tried'] + f['hostile: files tried']:,} directories and files, "
                f"{f['fuzz: inputs']:,} inputs"
            ),
            none_of("hostile: code runs", "fuzz: crashes", suffix=" ran code or crashed softdb"),
        ),
    )),
    "signals": Suite("exhaustive", ("signals",), 10, (
        Line(
            "Interrupts (Ctrl-C) at every moment of every operation, and other exceptions and signals",
            lambda f: f"{f['interrupts']:,} interrupts, {f['exceptions set in other threads'] + f['signals']:,} others",
            lambda _: "0, and no lock remained",
        ),
    )),
    "concurrency": Suite("exhaustive", ("concurrency", "forks", "maintenance_under_load"), 20, (
        Line(
            "One process writes with eight threads while four processes read",
            lambda f: f"{f['concurrency: seconds']:,} seconds, {f['concurrency: views checked']:,} reads checked",
            lambda f: f"{f['concurrency: torn views']:,} reads saw half of a write",
        ),
    )),
    "outside": Suite("", ("files_changed_outside",), 4, (
        Line(
            "Files of an open database that another program renamed, deleted, replaced or overwrote",
            counted("outside: changes"), none_of("outside: acknowledged records lost"),
        ),
    )),
    "cluster": Suite("", ("cluster/table_writer_killed", "cluster/ray_actors"), 20, (
        Line(
            "[Clusters](cluster.md): writers, actors and drivers killed, directories removed while in use, processes "
            "stopped (SIGSTOP)",
            lambda f: (
                f"{f['cluster: kills']:,} killed, {f['cluster: kills between commit and hydration']:,} of them after a "
                f"commit that some shards did not have yet; {f['cluster: directories removed in use']} directories; "
                f"{f['cluster: processes stopped (SIGSTOP)']} stopped"
            ),
            lambda f: (
                f"{sum(f[f'cluster: {wrong}'] for wrong in WRONG)}; every question ended at most "
                f"{f['cluster: milliseconds beyond the timeout']} ms after its timeout"
            ),
        ),
    )),
}  # fmt: skip


def run(suite: Suite, minutes: float) -> dict[str, Any]:
    """Run a suite for at most `minutes` and return its figures; raise SystemExit if it fails."""
    options = ["-q", "-x", "-p", "no:cacheprovider", "--minutes", f"{minutes:g}"]
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        figures = Path(folder) / "figures.json"
        command = [sys.executable, "-m", *shlex.split(suite.command), *options, "--figures", str(figures)]
        completed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        counts: Figures = json.loads(figures.read_text()) if figures.exists() else {}
    cut_off = bool(counts.pop("cut off", 0))
    if completed.returncode != (INTERRUPTED if cut_off else 0):
        output = completed.stdout[-8000:] + completed.stderr[-2000:]
        raise SystemExit(f"{suite.command} exited with {completed.returncode}:\n{output}")
    return provenance(("numpy", "apsw", "torch", "faiss-cpu")) | {
        "command": suite.command,
        "minutes": round((time.monotonic() - begun) / 60, 1),
        "whole": not cut_off,
        "figures": counts,
    }


def table(results: dict[str, Any]) -> str:
    """Format the table of docs/durability.md."""
    rows = ["| tried | how many | lost records or wrong answers | command |", "|---|---:|---|---|"]
    for name, result in results.items():
        for line in SUITES[name].lines:
            try:
                much, wrong = line.much(result["figures"]), line.wrong(result["figures"])
            except KeyError:  # cut off before the first one was counted
                much, wrong = "none", ""
            remarks = [*([] if result["whole"] else ["cut off"]), *([result["note"]] if "note" in result else [])]
            suffix = f" ({', '.join(remarks)})" if remarks else ""
            rows.append(f"| {line.tried} | {much}{suffix} | {wrong} | `{result['command']}` |")
    return "\n".join(rows) + "\n"


def shown(page: str, results: dict[str, Any]) -> str:
    """Return the page with the table of these results."""
    text, count = re.subn(r"^\| tried \|.*\n(\|.*\n)*", lambda _: table(results), page, flags=re.MULTILINE)
    if count != 1:
        raise ValueError(f"{DOCS.name} has {count} tables that begin with 'tried'; expected 1")
    return text


def main() -> None:
    """Run the suites one after the other; write the result and the page after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=120, help="minutes for all suites, or for those of --only")
    parser.add_argument("--only", help=f"suites to run, comma-separated, of {','.join(SUITES)}")
    args = parser.parse_args()
    chosen = args.only.split(",") if args.only else list(SUITES)
    shares = sum(SUITES[name].share for name in chosen)
    for name in chosen:
        result = run(SUITES[name], args.minutes * SUITES[name].share / shares)
        end = "whole" if result["whole"] else "cut off"
        print(f"{name}: {result['minutes']} min, {end}", result["figures"], flush=True)
        results = {**json.loads(RESULTS.read_text()), name: result}
        results = {suite: results[suite] for suite in SUITES if suite in results}
        write_json(RESULTS, results)
        DOCS.write_text(shown(DOCS.read_text(), results))


if __name__ == "__main__":
    main()
