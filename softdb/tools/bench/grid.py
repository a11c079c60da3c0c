"""Measure all engines at all recall targets, or with all efforts, with each number of threads.

Each engine is tuned on one half of the queries and measured on the other. Its answers are checked first. Then each
round runs all engines in turn; the first round warms up and is not counted.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from softdb.check import integer, share, shown
from softdb.errors import BadInput
from softdb.index.tune import least_effort
from softdb.tools.bench.datasets import Dataset
from softdb.tools.bench.engines import Engine, Progress, Setup, pin_threads
from softdb.tools.bench.exam import Exam, true_nearest
from softdb.tools.bench.peers import ENGINES
from softdb.tools.bench.report import command, commit, compared, in_turn, machine, spread, versions

DEFAULT = ("softdb", "softdb-ivf", "faiss-hnsw", "hnswlib", "usearch")
CURVE = (0.8, 0.9, 0.95, 0.97, 0.98, 0.99, 0.995)
ALONE = 200  # number of queries that are sent one by one
FINE = 64  # the tuned effort is at most 1/64 above the smallest that reaches the recall
DOUBT = 3.0  # a goal is met if recall is at most 3 standard errors below it, which chance exceeds once in 700 times


@dataclass(frozen=True)
class Grid:
    """Parameters of a grid. Each engine is searched with each of `efforts`, or tuned to each of `recalls`."""

    engines: tuple[str, ...] = DEFAULT
    recalls: tuple[float, ...] = (0.95, 0.98)
    efforts: tuple[int, ...] = ()
    k: int = 10
    threads: tuple[int, ...] = (2,)
    rounds: int = 5
    construction: int = 100
    known: dict[str, type[Engine]] = field(default_factory=lambda: dict(ENGINES))

    def checked(self) -> None:
        """Raise BadInput for an unknown engine or an impossible recall or number."""
        unknown = [name for name in self.engines if name not in self.known]
        if unknown or not self.engines:
            raise BadInput(f"there is no engine {shown(', '.join(unknown))}; choose from {', '.join(self.known)}")
        if not self.recalls or not self.threads:
            raise BadInput("there is no recall or no number of threads; give at least one of each")
        for recall in self.recalls:
            share(recall, "a recall")
            if not recall:
                raise BadInput("a recall is 0; expected a share above 0, such as 0.95")
        numbers = [("an effort", effort) for effort in self.efforts] + [("threads", count) for count in self.threads]
        numbers += [("k", self.k), ("rounds", self.rounds), ("construction", self.construction)]
        for name, number in numbers:
            integer(number, name)


class _Goal(NamedTuple):
    """A recall to reach; or, if `recall` is None, an effort to search with."""

    recall: float | None
    effort: int

    @property
    def name(self) -> str:
        return f"effort {self.effort}" if self.recall is None else f"recall {self.recall:g}"


@dataclass
class _Entry:
    """An engine of the grid, the seconds that its build took, and its effort for the present goal."""

    engine: Engine
    seconds: dict[str, float] = field(default_factory=dict)  # empty: not built yet
    effort: int = 0
    tuned: float = 0.0  # recall of the queries for tuning
    size: int = 0  # size of the index in bytes


def run(
    data: Dataset, grid: Grid, note: Callable[[str], None] = lambda _: None, progress: Progress = lambda *_: None
) -> dict[str, Any]:
    """Measure the grid; return the report for JSON.

    Args:
        note: called with a line for each engine that is left out.
        progress: called with the step, the amount done, the total.

    Raises:
        BadInput: an unknown engine, an impossible recall or number, or wrong neighbours in the file.
        WrongAnswer: an engine's answers are impossible.
    """
    grid.checked()
    reasons = {name: _unfit(grid.known[name], data) for name in grid.engines}
    left_out = {name: reason for name, reason in reasons.items() if reason}
    for name, reason in left_out.items():
        note(f"{name} is left out: {reason}")
    kinds = [grid.known[name] for name in grid.engines if name not in left_out]
    pin_threads(max(grid.threads))
    progress("true neighbours", 0, 1)
    truth = true_nearest(data, grid.k)
    exams = Exam(data.half(second=False), truth[0::2]), Exam(data.half(second=True), truth[1::2])
    rows: list[dict[str, Any]] = []
    with ExitStack() as stack:
        entries: list[_Entry] = []
        setup = Setup(grid.k, max(grid.threads), grid.construction)
        for kind in kinds:
            for variant in kind.variants:
                engine = kind(data, setup, variant)
                stack.callback(engine.close)
                entries.append(_Entry(engine))
        goals = [_Goal(None, effort) for effort in grid.efforts] or [_Goal(recall, 0) for recall in grid.recalls]
        for goal in goals:
            rows += _measured(entries, exams, goal, grid, progress)
    packages = ["softdb", "torch", "numpy", *(package for kind in kinds for package in kind.packages)]
    return {
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "command": command(),
        "commit": commit(),
        "machine": machine(),
        "versions": versions(dict.fromkeys(packages)),
        "data": {
            "name": data.name, "n": data.n, "dim": data.dim, "metric": data.metric.value, "queries": len(data.queries),
            "held_out": data.held_out,
        },
        "setup": {name: value for name, value in asdict(grid).items() if name != "known"},
        "left_out": left_out,
        "compared": compared(rows),
        "rows": rows,
    }  # fmt: skip


def _unfit(kind: type[Engine], data: Dataset) -> str:
    """Return the reason why an engine cannot be measured; empty if it can."""
    missing = kind.missing()
    return f"{' and '.join(missing)} is not installed; pip install {kind.packages[0]}" if missing else kind.unfit(data)


def _measured(
    entries: list[_Entry],
    exams: tuple[Exam, Exam],  # with the queries for tuning, and with those for measuring
    goal: _Goal,
    grid: Grid,
    progress: Progress,
) -> list[dict[str, Any]]:
    """Tune and time the engines for one goal; return one row for each engine and number of threads."""
    pin_threads(max(grid.threads))
    for entry in entries:
        _prepare(entry, exams[0], goal, grid, progress)
    facts = [_facts(entry, exams[1], goal) for entry in entries]
    rows = []
    for threads in grid.threads:
        progress(f"timing at {goal.name}, {threads} threads", 0, 1)
        speeds = _timed(entries, exams[1].data.queries, threads, grid.rounds)
        rows += [{**fact, "threads": threads, **speed} for fact, speed in zip(facts, speeds, strict=True)]
    return rows


def _prepare(entry: _Entry, exam: Exam, goal: _Goal, grid: Grid, progress: Progress) -> None:
    """Build the engine if it is not built, or is built for each goal; then tune its effort to the goal."""
    engine = entry.engine
    engine.pin(max(grid.threads))
    if not entry.seconds or (engine.each_goal and goal.recall is not None):
        progress(f"{engine.label}: building", 0, 1)
        entry.seconds, entry.size = engine.build(goal.recall or grid.recalls[0], progress), engine.bytes()
    progress(f"{engine.label}: tuning to {goal.name}", 0, 1)
    start = time.perf_counter()

    def recall(effort: int) -> float:
        return exam.recall(engine.search(exam.data.queries, effort), engine.label)

    least, most = engine.efforts
    entry.effort = goal.effort if most or engine.each_goal else 0
    if most and not engine.each_goal and goal.recall is not None:
        entry.effort = least_effort(recall, max(least, grid.k), most, goal.recall, FINE)[0]
        entry.seconds["measuring"] = time.perf_counter() - start
    entry.tuned = recall(entry.effort)


def _facts(entry: _Entry, exam: Exam, goal: _Goal) -> dict[str, Any]:
    """Return a row without speeds: recall of the queries for measuring, build times, size. Raises WrongAnswer."""
    engine, queries = entry.engine, exam.data.queries
    rows = engine.search(queries, entry.effort)
    recalls = exam.recalls(rows, engine.label)
    alone = [engine.search(query[None], entry.effort) for query in queries[:ALONE]]
    exam.alike(rows, np.concatenate(alone), engine.label)
    mean, standard_error = float(recalls.mean()), float(recalls.std() / np.sqrt(len(recalls)))
    untuned = sum(entry.seconds.get(stage, 0.0) for stage in ("training", "adding"))
    build = {**entry.seconds, "without_tuning": untuned, "with_tuning": sum(entry.seconds.values())}
    numbers = exam.data.n * exam.data.dim
    beside = entry.size - engine.number_bytes * numbers
    return {
        "engine": engine.name,
        "label": engine.label,
        "goal": goal.name,
        "target": goal.recall,
        "effort": {engine.effort_name: entry.effort} if engine.effort_name else entry.effort or None,
        "recall": round(mean, 4),
        "recall_tuned_on": round(entry.tuned, 4),
        "met": goal.recall is None or mean >= goal.recall - DOUBT * standard_error,
        "build_s": {stage: round(seconds, 3) for stage, seconds in build.items()},
        "beside_keys_bytes": beside,
        "in_all_bytes": beside + (engine.number_bytes or 4) * numbers,  # float32, unless it holds shorter ones
        "facts": dict(engine.facts),
    }


def _timed(entries: list[_Entry], queries: Any, threads: int, rounds: int) -> list[dict[str, dict[str, float]]]:
    """Measure each engine's queries per second in a batch, and its milliseconds per single query."""
    pin_threads(threads)
    for entry in entries:
        entry.engine.pin(threads)
    alone = [query[None] for query in queries[:ALONE]]

    def single(entry: _Entry) -> None:
        search, effort = entry.engine.search, entry.effort
        for query in alone:
            search(query, effort)

    calls: dict[tuple[int, str], Callable[[], object]] = {}
    for i, entry in enumerate(entries):
        calls[i, "batch"] = partial(entry.engine.search, queries, entry.effort)
        calls[i, "single"] = partial(single, entry)
    seconds = in_turn(calls, rounds)
    return [
        {
            "batch_queries_s": spread([round(len(queries) / spent, 1) for spent in seconds[i, "batch"]]),
            "single_ms": spread([round(spent / len(alone) * 1e3, 4) for spent in seconds[i, "single"]]),
        }
        for i in range(len(entries))
    ]
