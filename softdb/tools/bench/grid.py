"""The grid: engines over recall targets, or over efforts, at each number of threads.

Each engine is tuned on one half of the queries and measured on the other. Its answers are checked, then rounds go over
the engines in turn; the first round warms up and is thrown away.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import numpy as np

from softdb.check import integer, share, shown
from softdb.errors import BadInput
from softdb.index.tune import least_effort
from softdb.tools.bench.datasets import Dataset
from softdb.tools.bench.engines import Engine, FaissRefine, Say, Setup, SoftDBAuto, pin_threads
from softdb.tools.bench.peers import ENGINES
from softdb.tools.bench.report import command, commit, compared, machine, spread, versions
from softdb.tools.bench.truth import Exam, true_nearest

__all__ = ["CURVE", "DEFAULT", "Ask", "run"]

DEFAULT = ("softdb", "softdb-ivf", "faiss-refine", "faiss-hnsw", "hnswlib", "usearch")
CURVE = (0.8, 0.9, 0.95, 0.97, 0.98, 0.99, 0.995)
ALONE = 200  # queries that are asked one by one
FINE = 64  # an effort is found to within one part in so many
DOUBT = 3.0  # standard errors by which the recall on other queries may fall short: by chance once in 700 times

Note = Callable[[str], None]


@dataclass(frozen=True)
class Ask:
    """What to measure. With `efforts` each engine is searched with these, else it is tuned to each of `recalls`."""

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
        for name, numbers in (("an effort", self.efforts), ("threads", self.threads)):
            for number in numbers:
                integer(number, name)
        for name, number in (("k", self.k), ("rounds", self.rounds), ("construction", self.construction)):
            integer(number, name)
        followers = {name for name in self.engines if issubclass(self.known[name], FaissRefine)}
        if followers and not any(issubclass(self.known[name], SoftDBAuto) for name in self.engines):
            raise BadInput(f"{', '.join(followers)} takes over softdb's index; name softdb or softdb-ivf, too")
        if followers and self.efforts:
            raise BadInput(f"{', '.join(followers)} has softdb's own effort only; leave it out, or ask for recalls")


class Goal(NamedTuple):
    """A recall to reach, or an effort to take."""

    recall: float | None
    effort: int

    @property
    def name(self) -> str:
        """As it is reported."""
        return f"effort {self.effort}" if self.recall is None else f"recall {self.recall:g}"


@dataclass
class _Entry:
    """An engine in the grid: what building took, and its setting for the goal at hand."""

    engine: Engine
    seconds: dict[str, float] = field(default_factory=dict)
    built: bool = False
    effort: int = 0
    tuned: float = 0.0  # recall on the half that was tuned on
    size: int = 0


def run(data: Dataset, ask: Ask, note: Note = lambda _: None, say: Say = lambda *_: None) -> dict[str, Any]:
    """Measure the grid; returns the report, ready for JSON.

    Args:
        note: told, in a line, what is left out and why.
        say: told what is being done, how much of it is done, the whole.

    Raises:
        BadInput: an engine, recall or number that cannot be; neighbours in the file that are wrong.
        WrongAnswer: an engine's answers are none; nothing of it was timed.
    """
    ask.checked()
    left_out: dict[str, str] = {}

    def leave(name: str, why: str) -> None:
        left_out[name] = why
        note(f"{name} is left out: {why}")

    kinds = [ask.known[name] for name in ask.engines if _serves(ask.known[name], data, leave)]
    pin_threads(max(ask.threads))
    say("true neighbours", 0, 1)
    truth = true_nearest(data, ask.k)
    exams = Exam(data.half(second=False), truth[0::2]), Exam(data.half(second=True), truth[1::2])
    rows: list[dict[str, Any]] = []
    with ExitStack() as stack:
        entries = _made(kinds, data, ask, stack, leave)
        goals = [Goal(None, effort) for effort in ask.efforts] or [Goal(recall, 0) for recall in ask.recalls]
        for goal in goals:
            rows += _measured(entries, exams, goal, ask, leave, say)
    return {
        "command": command(),
        "commit": commit(),
        "machine": machine(),
        "versions": versions({"softdb": 0, "torch": 0, "numpy": 0} | {p: 0 for kind in kinds for p in kind.packages}),
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


def _made(
    kinds: list[type[Engine]], data: Dataset, ask: Ask, stack: ExitStack, leave: Callable[[str, str], None]
) -> list[_Entry]:
    """Every variant of every engine, what takes over another's index after it."""
    setup = Setup(ask.k, max(ask.threads), ask.construction)
    entries: list[_Entry] = []
    for kind in sorted(kinds, key=lambda kind: issubclass(kind, FaissRefine)):
        for variant in kind.variants:
            engine = kind(data, setup, variant)
            if isinstance(engine, FaissRefine):
                ours = [entry.engine for entry in entries if isinstance(entry.engine, SoftDBAuto)]
                if not ours:
                    leave(kind.name, "there is no index of softdb to take over")
                    continue
                engine.beside = next((one for one in ours if one.name == "softdb-ivf"), ours[0])
            stack.callback(engine.close)
            entries.append(_Entry(engine))
    return entries


def _measured(
    entries: list[_Entry],
    exams: tuple[Exam, Exam],  # to tune on, to measure on
    goal: Goal,
    ask: Ask,
    leave: Callable[[str, str], None],
    say: Say,
) -> list[dict[str, Any]]:
    """A row for each engine and number of threads."""
    pin_threads(max(ask.threads))
    present = []
    for entry in entries:
        _prepare(entry, exams[0], goal, ask, say)
        why = entry.engine.facts.get("left_out")
        if why:
            leave(entry.engine.label, f"{why} ({goal.name})")
        else:
            present.append(entry)
    facts = [_facts(entry, exams[1], goal) for entry in present]
    rows = []
    for threads in ask.threads:
        speeds = _timed(present, exams[1], goal, threads, ask.rounds, say)
        rows += [{**fact, "threads": threads, **speed} for fact, speed in zip(facts, speeds, strict=True)]
    return rows


def _prepare(entry: _Entry, exam: Exam, goal: Goal, ask: Ask, say: Say) -> None:
    """Build it where it is not built or tunes itself, and find its effort."""
    engine = entry.engine
    engine.pin(max(ask.threads))
    if not entry.built or (engine.each_goal and goal.recall is not None):
        say(f"{engine.label}: building", 0, 1)
        entry.seconds, entry.built = engine.build(goal.recall or ask.recalls[0], say), True
        entry.size = 0 if "left_out" in engine.facts else engine.bytes()
    if "left_out" in engine.facts:
        return
    say(f"{engine.label}: tuning to {goal.name}", 0, 1)
    start = time.perf_counter()
    tunable = not engine.each_goal and engine.efforts[1] > 0

    def recall(effort: int) -> float:
        return exam.recall(engine.search(exam.data.queries, effort), engine.label)

    entry.effort = 0 if engine.efforts[1] == 0 and not engine.each_goal else goal.effort
    if tunable and goal.recall is not None:
        least, most = max(engine.efforts[0], ask.k), engine.efforts[1]
        entry.effort = least_effort(recall, least, most, goal.recall, FINE)[0]
        entry.seconds["measuring"] = time.perf_counter() - start
    entry.tuned = recall(entry.effort)


def _facts(entry: _Entry, exam: Exam, goal: Goal) -> dict[str, Any]:
    """What an engine is and finds, on queries it was not tuned on. Raises WrongAnswer before anything is timed."""
    engine, queries = entry.engine, exam.data.queries
    found = engine.search(queries, entry.effort)
    recalls = exam.recalls(found, engine.label)
    alone = np.concatenate([engine.search(queries[i : i + 1], entry.effort) for i in range(min(ALONE, len(queries)))])
    exam.alike(found, alone, engine.label)
    reached, doubt = float(recalls.mean()), float(recalls.std() / np.sqrt(len(recalls)))
    untuned = sum(entry.seconds.get(stage, 0.0) for stage in ("training", "adding"))
    build = {**entry.seconds, "without_tuning": untuned, "with_tuning": sum(entry.seconds.values())}
    return {
        "engine": engine.name,
        "label": engine.label,
        "goal": goal.name,
        "target": goal.recall,
        "effort": {engine.effort_name: entry.effort} if engine.effort_name else entry.effort or None,
        "recall": round(reached, 4),
        "recall_tuned_on": round(entry.tuned, 4),
        "met": goal.recall is None or reached >= goal.recall - DOUBT * doubt,
        "build_s": {stage: round(seconds, 3) for stage, seconds in build.items()},
        "index_bytes": entry.size,
        "holds_keys": engine.holds_keys,
        "facts": dict(engine.facts),
    }


def _timed(
    entries: list[_Entry], exam: Exam, goal: Goal, threads: int, rounds: int, say: Say
) -> list[dict[str, dict[str, float]]]:
    """Batch rate and single latency of each, in turn."""
    pin_threads(threads)
    queries = exam.data.queries
    alone = [queries[i : i + 1] for i in range(min(ALONE, len(queries)))]
    batch: list[list[float]] = [[] for _ in entries]
    single: list[list[float]] = [[] for _ in entries]
    for turn in range(rounds + 1):
        say(f"timing at {goal.name}, {threads} threads", turn, rounds + 1)
        for place, entry in enumerate(entries):
            search, effort = entry.engine.search, entry.effort
            entry.engine.pin(threads)
            start = time.perf_counter()
            search(queries, effort)
            between = time.perf_counter()
            for one in alone:
                search(one, effort)
            end = time.perf_counter()
            if turn:
                batch[place].append(round(len(queries) / (between - start), 1))
                single[place].append(round((end - between) / len(alone) * 1e3, 4))
    return [
        {"batch_queries_s": spread(many), "single_ms": spread(one)} for many, one in zip(batch, single, strict=True)
    ]
