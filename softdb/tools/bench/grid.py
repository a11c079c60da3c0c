"""The grid: engines over recall targets, or over efforts, at each number of threads.

Each engine is tuned on one half of the queries and measured on the other. Its answers are checked, then rounds go over
the engines in turn; the first round warms up and is thrown away.
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
ALONE = 200  # queries that are asked one by one
FINE = 64  # an effort is found to within one part in so many
DOUBT = 3.0  # standard errors by which the recall on other queries may fall short: by chance once in 700 times


@dataclass(frozen=True)
class Ask:
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
        """BadInput unless all of it can be measured."""
        unknown = [name for name in self.engines if name not in self.known]
        if unknown or not self.engines:
            raise BadInput(f"there is no engine {shown(', '.join(unknown))}; choose from {', '.join(self.known)}")
        if not self.recalls or not self.threads:
            raise BadInput("there is no recall or no number of threads to measure at; give one of each at least")
        for recall in self.recalls:
            share(recall, "a recall")
            if not recall:
                raise BadInput("a recall is 0; expected a share above 0, such as 0.95")
        numbers = [("an effort", effort) for effort in self.efforts] + [("threads", count) for count in self.threads]
        numbers += [("k", self.k), ("rounds", self.rounds), ("construction", self.construction)]
        for name, number in numbers:
            integer(number, name)


class _Goal(NamedTuple):
    """A recall to reach, or an effort to take."""

    recall: float | None
    effort: int

    @property
    def name(self) -> str:
        return f"effort {self.effort}" if self.recall is None else f"recall {self.recall:g}"


@dataclass
class _Entry:
    """An engine in the grid: the seconds that building took, and its setting for the goal at hand."""

    engine: Engine
    seconds: dict[str, float] = field(default_factory=dict)
    built: bool = False
    effort: int = 0
    tuned: float = 0.0  # recall on the half that was tuned on
    size: int = 0


def run(
    data: Dataset, ask: Ask, note: Callable[[str], None] = lambda _: None, progress: Progress = lambda *_: None
) -> dict[str, Any]:
    """Measure the grid; returns the report, ready for JSON.

    Args:
        note: called with a line for each engine that is left out.
        progress: called with the step, the amount done, the total.

    Raises:
        BadInput: an engine, recall or number that cannot be; neighbours in the file that are wrong.
        WrongAnswer: an engine's answers are impossible; nothing of it was timed.
    """
    ask.checked()
    left_out: dict[str, str] = {}

    def leave(name: str, why: str) -> None:
        left_out[name] = why
        note(f"{name} is left out: {why}")

    kinds = [ask.known[name] for name in ask.engines if _serves(ask.known[name], data, leave)]
    pin_threads(max(ask.threads))
    progress("true neighbours", 0, 1)
    truth = true_nearest(data, ask.k)
    exams = Exam(data.half(second=False), truth[0::2]), Exam(data.half(second=True), truth[1::2])
    rows: list[dict[str, Any]] = []
    with ExitStack() as stack:
        entries: list[_Entry] = []
        setup = Setup(ask.k, max(ask.threads), ask.construction)
        for kind, variant in [(each, variant) for each in kinds for variant in each.variants]:
            engine = kind(data, setup, variant, [entry.engine for entry in entries])
            stack.callback(engine.close)
            entries.append(_Entry(engine))
        goals = [_Goal(None, effort) for effort in ask.efforts] or [_Goal(recall, 0) for recall in ask.recalls]
        for goal in goals:
            rows += _measured(entries, exams, goal, ask, leave, progress)
    packages = ["softdb", "torch", "numpy", *(package for kind in kinds for package in kind.packages)]
    return {
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "command": command(),
        "commit": commit(),
        "machine": machine(),
        "versions": versions(dict.fromkeys(packages)),
        "data": {
            "name": data.name, "n": data.n, "dim": data.dim, "metric": data.metric.value, "queries": len(data.queries),
        },
        "setup": {name: value for name, value in asdict(ask).items() if name != "known"},
        "left_out": left_out,
        "compared": compared(rows),
        "rows": rows,
    }  # fmt: skip


def _serves(kind: type[Engine], data: Dataset, leave: Callable[[str, str], None]) -> bool:
    missing = kind.missing()
    why = f"{' and '.join(missing)} is not installed; pip install {kind.packages[0]}" if missing else kind.unfit(data)
    if why:
        leave(kind.name, why)
    return not why


def _measured(
    entries: list[_Entry],
    exams: tuple[Exam, Exam],  # to tune on, to measure on
    goal: _Goal,
    ask: Ask,
    leave: Callable[[str, str], None],
    progress: Progress,
) -> list[dict[str, Any]]:
    """A row for each engine and number of threads."""
    pin_threads(max(ask.threads))
    present = []
    for entry in entries:
        _prepare(entry, exams[0], goal, ask, progress)
        why = entry.engine.facts.get("left_out")
        if why:
            leave(entry.engine.label, f"{why} ({goal.name})")
        else:
            present.append(entry)
    facts = [_facts(entry, exams[1], goal) for entry in present]
    rows = []
    for threads in ask.threads:
        progress(f"timing at {goal.name}, {threads} threads", 0, 1)
        speeds = _timed(present, exams[1].data.queries, threads, ask.rounds)
        rows += [{**fact, "threads": threads, **speed} for fact, speed in zip(facts, speeds, strict=True)]
    return rows


def _prepare(entry: _Entry, exam: Exam, goal: _Goal, ask: Ask, progress: Progress) -> None:
    """Build the engine where it is not built or tunes itself, and find its effort."""
    engine = entry.engine
    engine.pin(max(ask.threads))
    if not entry.built or (engine.each_goal and goal.recall is not None):
        progress(f"{engine.label}: building", 0, 1)
        entry.seconds, entry.built = engine.build(goal.recall or ask.recalls[0], progress), True
        entry.size = 0 if "left_out" in engine.facts else engine.bytes()
    if "left_out" in engine.facts:
        return
    progress(f"{engine.label}: tuning to {goal.name}", 0, 1)
    start = time.perf_counter()

    def recall(effort: int) -> float:
        return exam.recall(engine.search(exam.data.queries, effort), engine.label)

    least, most = engine.efforts
    entry.effort = goal.effort if most or engine.each_goal else 0
    if most and not engine.each_goal and goal.recall is not None:
        entry.effort = least_effort(recall, max(least, ask.k), most, goal.recall, FINE)[0]
        entry.seconds["measuring"] = time.perf_counter() - start
    entry.tuned = recall(entry.effort)


def _facts(entry: _Entry, exam: Exam, goal: _Goal) -> dict[str, Any]:
    """Recall on queries it was not tuned on, and the rest that needs no clock. WrongAnswer before anything is timed."""
    engine, queries = entry.engine, exam.data.queries
    rows = engine.search(queries, entry.effort)
    recalls = exam.recalls(rows, engine.label)
    alone = [engine.search(query[None], entry.effort) for query in queries[:ALONE]]
    exam.alike(rows, np.concatenate(alone), engine.label)
    mean, doubt = float(recalls.mean()), float(recalls.std() / np.sqrt(len(recalls)))
    untuned = sum(entry.seconds.get(stage, 0.0) for stage in ("training", "adding"))
    build = {**entry.seconds, "without_tuning": untuned, "with_tuning": sum(entry.seconds.values())}
    return {
        "engine": engine.name,
        "label": engine.label,
        "goal": goal.name,
        "target": goal.recall,
        "effort": {engine.effort_name: entry.effort} if engine.effort_name else entry.effort or None,
        "recall": round(mean, 4),
        "recall_tuned_on": round(entry.tuned, 4),
        "met": goal.recall is None or mean >= goal.recall - DOUBT * doubt,
        "build_s": {stage: round(seconds, 3) for stage, seconds in build.items()},
        "index_bytes": entry.size,
        "holds_keys": engine.holds_keys,
        "facts": dict(engine.facts),
    }


def _timed(entries: list[_Entry], queries: Any, threads: int, rounds: int) -> list[dict[str, dict[str, float]]]:
    """Batch rate and single latency of each engine."""
    pin_threads(threads)
    for entry in entries:
        entry.engine.pin(threads)
    alone = [query[None] for query in queries[:ALONE]]

    def single(entry: _Entry) -> None:
        search, effort = entry.engine.search, entry.effort
        for query in alone:
            search(query, effort)

    ways: dict[tuple[int, str], Callable[[], object]] = {}
    for place, entry in enumerate(entries):
        ways[place, "batch"] = partial(entry.engine.search, queries, entry.effort)
        ways[place, "single"] = partial(single, entry)
    seconds = in_turn(ways, rounds)
    return [
        {
            "batch_queries_s": spread([round(len(queries) / spent, 1) for spent in seconds[place, "batch"]]),
            "single_ms": spread([round(spent / len(alone) * 1e3, 4) for spent in seconds[place, "single"]]),
        }
        for place in range(len(entries))
    ]
