"""Do the error bars of soft queries hold? Coverage, width, share met and draws in every world of tests/worlds/suite.py.

    python benchmarks/error_bars.py --quick
    python benchmarks/error_bars.py --n 20000 --queries 40 --draws 50 --out benchmarks/results/error-bars.json
    python benchmarks/error_bars.py --confidence 0.99 0.999 --queries 100 --draws 200 --worlds hubs --temperatures sd/4
    python benchmarks/error_bars.py --table benchmarks/results/error-bars.json

The truth is worlds/exact.py, in float64. A cell is one world, size, verb, temperature, mode and confidence, asked with
many generators. Answers given exactly leave its statistics, and so do infinite bars: they cannot fail. An error counts
as inside where it is at most the bar and what float32 rounds away: 2e-6 max(‖o‖, rms‖v‖) of an output, 2e-6 max(1,
|lse|) of Z (of a density also |log p|), records within 1e-6 of the radius of a count; `inside_strictly` does without.
Modes: "candidates" has max_draws=400, "default" has none; "-single" asks one query at a time.
"""

from __future__ import annotations

import argparse
import functools
import math
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from common import provenance, write_json
from error_bars_report import cell_of, line, shown, summary, table
from numpy.typing import NDArray

import softdb
from softdb.scores import Gaussian

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
from worlds import exact
from worlds.suite import World, names, world

Array = NDArray[Any]
CANDIDATES, RTOL = 400, 0.05
SHARES = (0.0003, 0.003, 0.03)  # of the records, within the radius of a count
VERBS = ("attend", "log_partition", "count_within", "log_density")
MODES = ("candidates", "default", "candidates-single", "default-single")
TRIED = 3  # draws after which a cell without an estimate is left
BATCH = 100_000  # records inserted at once
QUICK = ("gaussian-32", "lognormal-0.5", "student-2", "outlier", "uniform-2", "labels")
QUICK_TEMPERATURES = ("1e-05", "0.001", "1000", "sd/1", "sd/4", "sd/16")


class Question(NamedTuple):
    """One verb at one temperature or radius, and how its answers are judged."""

    verb: str
    temperature: str  # its name, or that of the radius
    number: float
    ask: Callable[..., Any]  # (queries, generator=, confidence=, max_draws=) -> an answer
    error: Callable[[Any, slice], Array]  # (b,), of an answer to some of the queries
    rounding: Array  # (q,) what float32 may add to an error
    small: bool = False  # whether errors as small as the rounding have no meaningful ratio to a bar
    exactly: Callable[..., Any] | None = None  # the same over every record, to see what float32 alone errs by


# -- the database ------------------------------------------------------------------------------------------------------


def database(subject: World) -> softdb.SoftDB:
    """The world's records, indexed: half of the deletions come before, half after; young records come last."""
    shape: dict[str, Any] = {"num_classes": subject.num_classes}
    if subject.values is not None and subject.num_classes is None:
        shape["value_dim"] = subject.values.shape[1]
    d, n = subject.keys.shape[1], len(subject.keys)
    db = softdb.open(None, dim=d, metric=subject.metric, dtype=subject.dtype, **shape)  # type: ignore[arg-type]
    _insert(db, subject, 0, n - subject.young)
    gone = np.zeros(0, np.int64) if subject.deleted is None else subject.deleted
    for i, some in enumerate(np.array_split(gone, 2)):
        if i == 1:
            db.build_index("ivf", recall=0.95)
        if len(some):
            db.delete(some.tolist())
    _insert(db, subject, n - subject.young, n)
    return db


def _insert(db: softdb.SoftDB, subject: World, first: int, last: int) -> None:
    for low in range(first, last, BATCH):
        part = slice(low, min(low + BATCH, last))
        values = None if subject.values is None else subject.values[part]
        payloads = None if subject.group is None else [{"group": group} for group in subject.group[part].tolist()]
        db.insert(range(part.start, part.stop), subject.keys[part], values, payloads)


# -- questions ---------------------------------------------------------------------------------------------------------


def questions(db: softdb.SoftDB, subject: World, verbs: list[str], asked: list[str]) -> Iterator[Question]:
    """What is asked of a world, with the truth of it."""
    chosen = _chosen(exact.temperatures(subject), asked)
    truths = exact.answers(subject, list(chosen.values()))
    rms = exact.rms_value(subject)
    for (name, temperature), truth in zip(chosen.items(), truths, strict=True):
        if "attend" in verbs:
            yield _attend(db, subject, name, temperature, truth, rms)
        if "log_partition" in verbs:
            ask = functools.partial(db.log_partition, temperature=temperature, rtol=RTOL, where=subject.where)
            yield _of_mass("log_partition", name, temperature, ask, truth.lse)
        if "log_density" in verbs and subject.metric == "l2":
            ask = functools.partial(
                db.log_density, kernel=Gaussian(math.sqrt(temperature / 2)), rtol=RTOL, where=subject.where
            )
            density = exact.log_density(subject, truth, temperature)
            yield _of_mass("log_density", name, temperature, ask, density, truth.lse)
    for share in SHARES if "count_within" in verbs else ():
        yield _count(db, subject, share)


def _chosen(known: dict[str, float], asked: list[str]) -> dict[str, float]:
    """Temperatures by their names; another name is a number."""
    return {name: known[name] if name in known else float(name) for name in asked or known}


def _attend(
    db: softdb.SoftDB, subject: World, name: str, temperature: float, truth: exact.Answer, rms: float
) -> Question:
    ask = functools.partial(db.attend, temperature=temperature, where=subject.where)
    size = np.maximum(np.linalg.norm(truth.output, axis=1), rms)

    def error(answer: Any, part: slice) -> Array:
        return np.asarray(np.linalg.norm(answer.output.double().numpy() - truth.output[part], axis=1))

    drawn = functools.partial(ask, rtol=RTOL)
    return Question("attend", name, temperature, drawn, error, 2e-6 * size, small=True, exactly=ask)


def _of_mass(
    verb: str, name: str, temperature: float, ask: Callable[..., Any], truth: Array, *parts: Array
) -> Question:
    """log Z, or log p, which is a sum of the parts: the error is that of Z, relative to it."""

    def error(answer: Any, part: slice) -> Array:
        with np.errstate(over="ignore"):
            return np.asarray(np.abs(np.expm1(answer.value.double().numpy() - truth[part])))

    size = np.abs([truth, *parts]).max(0)
    return Question(verb, name, temperature, ask, error, 2e-6 * np.maximum(1, size), small=True)


def _count(db: softdb.SoftDB, subject: World, share: float) -> Question:
    limit = exact.radius(subject, share)
    truth = exact.count_within(subject, limit)

    def error(answer: Any, part: slice) -> Array:
        return np.asarray(np.abs(answer.value.numpy() - truth.value[part]))

    ask = functools.partial(db.count_within, radius=limit, rtol=RTOL, where=subject.where)
    return Question("count_within", f"{share:.2%}", limit, ask, error, truth.doubtful)


# -- answers -----------------------------------------------------------------------------------------------------------


def measured(question: Question, subject: World, mode: str, confidence: float, draws: int) -> dict[str, Any]:
    """A cell: what many draws say of one question."""
    queries, wrong = torch.from_numpy(subject.queries), Counter[str]()
    most = CANDIDATES if mode.startswith("candidates") else None
    single = mode.endswith("single")
    alone = None if question.exactly is None else _asked(question, question.exactly, queries, len(queries), wrong)[:, 0]
    columns: list[Array] = []  # one a draw: (q, 5), see `_asked`
    times: list[float] = []
    for seed in range(draws):
        generator = torch.Generator().manual_seed(seed)
        ask = functools.partial(question.ask, generator=generator, confidence=confidence, max_draws=most)
        start = time.perf_counter()
        columns.append(_asked(question, ask, queries, 1 if single else len(queries), wrong))
        times.append((time.perf_counter() - start) / len(queries) * 1e3)
        if seed + 1 == TRIED and not (np.stack(columns)[:, :, 3] == 0).any():
            break
    facts = {
        "world": subject.name,
        "n": len(subject.keys),
        "verb": question.verb,
        "temperature": question.temperature,
        "number": question.number,
        "mode": mode,
        "confidence": confidence,
        "bad": subject.bad,
        "exact_error": None if alone is None else shown(float(np.quantile(alone, 0.95))),
        "ms_a_query": shown(float(np.median(times[1:] or times))),
        "exceptions": dict(wrong),
    }
    return facts | cell_of(np.stack(columns), question.rounding, confidence, question.small)


def _asked(question: Question, ask: Callable[..., Any], queries: torch.Tensor, size: int, wrong: Counter[str]) -> Array:
    """Error, bar, met, exact and records pooled of each query, (q, 5); NaN where it raised an exception."""
    found = np.full((len(queries), 5), np.nan)
    for low in range(0, len(queries), size):
        part = slice(low, low + size)
        try:
            answer = ask(queries[part])
        except Exception as error:  # an exception is a result here: it is counted, and the run goes on
            wrong[_told(error)] += 1
            continue
        pooled = answer.n_pooled.numpy() if hasattr(answer, "n_pooled") else np.nan
        found[part, 0] = np.nan_to_num(question.error(answer, part), nan=np.inf)
        for column, value in enumerate((answer.bar, answer.met, answer.exact), 1):
            found[part, column] = value.double().numpy()
        found[part, 4] = pooled
    return found


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:200]


def run(given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Every cell asked for."""
    for n in given.n:
        for name in given.worlds or names(n):
            subject = world(name, n, given.queries, given.seed)
            try:
                db = database(subject)
            except Exception as error:  # as above
                yield _unbuilt(subject, _told(error))
                continue
            with db:
                for question in questions(db, subject, given.verbs, given.temperatures):
                    for mode in given.mode:
                        for confidence in given.confidence:
                            yield measured(question, subject, mode, confidence, given.draws)


def _unbuilt(subject: World, why: str) -> dict[str, Any]:
    facts = {"world": subject.name, "n": len(subject.keys), "verb": "build", "temperature": "", "number": None}
    nothing = cell_of(np.full((1, 1, 5), np.nan), np.zeros(1), 0.95, False)
    return facts | {
        "mode": "",
        "confidence": 0.95,
        "bad": subject.bad,
        "exact_error": None,
        "ms_a_query": None,
        "exceptions": {why: 1},
        **nothing,
    }


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", nargs="+", default=[], metavar="NAME", help="of tests/worlds/suite.py; else all")
    parser.add_argument("--n", nargs="+", type=int, default=[20_000])
    parser.add_argument("--queries", type=int, default=40)
    parser.add_argument("--draws", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0, help="of the worlds")
    parser.add_argument("--confidence", nargs="+", type=float, default=[0.95])
    parser.add_argument("--mode", nargs="+", choices=MODES, default=["candidates"])
    parser.add_argument("--verbs", nargs="+", choices=VERBS, default=list(VERBS))
    parser.add_argument("--temperatures", nargs="+", default=[], metavar="T", help="numbers, or sd/4; else all")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="few worlds, temperatures, queries and draws")
    parser.add_argument("--out", type=Path, help="JSON, written anew after every world")
    parser.add_argument("--table", nargs="+", type=Path, metavar="FILE", help="show results as Markdown and stop")
    given = parser.parse_args()
    if given.quick:
        given.worlds, given.temperatures = given.worlds or list(QUICK), given.temperatures or list(QUICK_TEMPERATURES)
        given.queries, given.draws = min(given.queries, 20), min(given.draws, 20)
    return given


def main() -> None:
    """A line a cell, then what fails; or the table of earlier results."""
    given = arguments()
    if given.table:
        print(table(given.table))
        return
    torch.set_num_threads(given.threads)
    result: dict[str, Any] = {
        **provenance(["softdb", "torch", "numpy", "faiss-cpu"]),
        "cells": [],
    }
    for cell in run(given):
        print(line(cell), flush=True)
        changed = bool(result["cells"]) and cell["world"] != result["cells"][-1]["world"]
        if given.out and changed:
            write_json(given.out, result)  # a long run may be cut short
        result["cells"].append(cell)
    result["summary"] = summary(result["cells"])
    print("", *result["summary"], sep="\n")
    if given.out:
        write_json(given.out, result)


if __name__ == "__main__":
    main()
