"""Coverage, width and cost of the error bars of soft queries, in every world of tests/worlds/suite.py.

    python benchmarks/error_bars.py --quick
    python benchmarks/error_bars.py --n 20000 --queries 40 --draws 50 --out benchmarks/results/error-bars.json
    python benchmarks/error_bars.py --confidence 0.99 0.999 --queries 100 --draws 200 --worlds hubs --temperatures sd/4
    python benchmarks/error_bars.py --table benchmarks/results/error-bars.json

The truth is computed by tests/worlds/exact.py in float64. A cell is one world, size, verb, temperature, mode and
confidence, asked with many generators. The statistics leave out exact answers and infinite bars, which cannot fail. An
error counts as inside if it is at most the bar plus the rounding of float32: 2e-6 max(‖o‖, rms‖v‖) for an output, 2e-6
max(1, |lse|) for Z (for a density also |log p|), and the records within 1e-6 of the radius for a count;
`inside_strictly` allows no rounding. Mode "candidates" has max_draws=400, "default" no limit; "-single" asks one query
at a time. A cell repeats its queries with other draws, so that `ms_a_query` is of queries asked before.
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
TRIED = 3  # draws after which a cell without any estimate stops
BATCH = 100_000  # records in an insert
QUICK = ("gaussian-32", "lognormal-0.5", "student-2", "outlier", "uniform-2", "labels")
QUICK_TEMPERATURES = ("1e-05", "0.001", "1000", "sd/1", "sd/4", "sd/16")


class Question(NamedTuple):
    """One verb at one temperature or radius, with functions to ask it and to judge its answers."""

    verb: str
    temperature: str  # name of the temperature or of the radius
    number: float
    ask: Callable[..., Any]  # (queries, generator=, confidence=, max_draws=) -> an answer
    error: Callable[[Any, slice], Array]  # (b,), of an answer to some of the queries
    rounding: Array  # (q,) error that float32 may add
    small: bool = False  # True: errors as small as the rounding have no meaningful ratio to a bar
    exactly: Callable[..., Any] | None = None  # asks over every record, to measure the error of float32 alone


# -- the database ------------------------------------------------------------------------------------------------------


def database(subject: World) -> softdb.SoftDB:
    """Return an indexed database of the world: half of the deletions precede the index, unindexed records follow it."""
    shape: dict[str, Any] = {"num_classes": subject.num_classes}
    if subject.values is not None and subject.num_classes is None:
        shape["value_dim"] = subject.values.shape[1]
    d, n = subject.keys.shape[1], len(subject.keys)
    db = softdb.open(None, dim=d, metric=subject.metric, dtype=subject.dtype, **shape)  # type: ignore[arg-type]
    _insert(db, subject, 0, n - subject.young)
    deleted = np.zeros(0, np.int64) if subject.deleted is None else subject.deleted
    for i, ids in enumerate(np.array_split(deleted, 2)):
        if i == 1:
            db.build_index("ivf", recall=0.95)
        if len(ids):
            db.delete(ids.tolist())
    _insert(db, subject, n - subject.young, n)
    return db


def _insert(db: softdb.SoftDB, subject: World, first: int, last: int) -> None:
    for low in range(first, last, BATCH):
        block = slice(low, min(low + BATCH, last))
        values = None if subject.values is None else subject.values[block]
        payloads = None if subject.group is None else [{"group": group} for group in subject.group[block].tolist()]
        db.insert(range(block.start, block.stop), subject.keys[block], values, payloads)


# -- questions ---------------------------------------------------------------------------------------------------------


def questions(db: softdb.SoftDB, subject: World, verbs: list[str], temperatures: list[str]) -> Iterator[Question]:
    """Yield the questions to ask of a world, with their truth."""
    chosen = _chosen(exact.temperatures(subject), temperatures)
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


def _chosen(known: dict[str, float], names: list[str]) -> dict[str, float]:
    """Return temperatures by name, all known ones if no name is args; an unknown name is read as a number."""
    return {name: known[name] if name in known else float(name) for name in names or known}


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
    """Return the question of log Z, or of log p, which is a sum of `parts`; the error is that of Z, relative to Z."""

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
    """Return a cell: statistics of one question over many draws."""
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
    """Return error, bar, met, exact and records pooled of each query, (q, 5); NaN if it raised an exception."""
    columns = np.full((len(queries), 5), np.nan)
    for low in range(0, len(queries), size):
        batch = slice(low, low + size)
        try:
            answer = ask(queries[batch])
        except Exception as error:  # an exception is a result here: it is counted, and the run goes on
            wrong[_shortened(error)] += 1
            continue
        pooled = answer.n_pooled.numpy() if hasattr(answer, "n_pooled") else np.nan
        columns[batch, 0] = np.nan_to_num(question.error(answer, batch), nan=np.inf)
        for column, value in enumerate((answer.bar, answer.met, answer.exact), 1):
            columns[batch, column] = value.double().numpy()
        columns[batch, 4] = pooled
    return columns


def _shortened(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:200]


def run(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield every cell of the command line."""
    for n in args.n:
        for name in args.worlds or names(n):
            subject = world(name, n, args.queries, args.seed)
            try:
                db = database(subject)
            except Exception as error:  # as above
                yield _unbuilt(subject, _shortened(error))
                continue
            with db:
                for question in questions(db, subject, args.verbs, args.temperatures):
                    for mode in args.mode:
                        for confidence in args.confidence:
                            yield measured(question, subject, mode, confidence, args.draws)


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
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--worlds", nargs="+", default=[], metavar="NAME", help="worlds of tests/worlds/suite.py (default: all)"
    )
    parser.add_argument("--n", nargs="+", type=int, default=[20_000])
    parser.add_argument("--queries", type=int, default=40)
    parser.add_argument("--draws", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0, help="seed of the worlds")
    parser.add_argument("--confidence", nargs="+", type=float, default=[0.95])
    parser.add_argument("--mode", nargs="+", choices=MODES, default=["candidates"])
    parser.add_argument("--verbs", nargs="+", choices=VERBS, default=list(VERBS))
    parser.add_argument(
        "--temperatures", nargs="+", default=[], metavar="T", help="numbers, or shares as sd/4 (default: all)"
    )
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="few worlds, temperatures, queries and draws")
    parser.add_argument("--out", type=Path, help="JSON file, written after every world")
    parser.add_argument("--table", nargs="+", type=Path, metavar="FILE", help="show results as Markdown and stop")
    args = parser.parse_args()
    if args.quick:
        args.worlds, args.temperatures = args.worlds or list(QUICK), args.temperatures or list(QUICK_TEMPERATURES)
        args.queries, args.draws = min(args.queries, 20), min(args.draws, 20)
    return args


def main() -> None:
    """Print a line for each cell, then the failures; or print the table of earlier results."""
    args = arguments()
    if args.table:
        print(table(args.table))
        return
    torch.set_num_threads(args.threads)
    result = provenance(["softdb", "torch", "numpy", "faiss-cpu"]) | {"cells": []}
    for cell in run(args):
        print(line(cell), flush=True)
        changed = bool(result["cells"]) and cell["world"] != result["cells"][-1]["world"]
        if args.out and changed:
            write_json(args.out, result)  # a long run may be cut short
        result["cells"].append(cell)
    result["summary"] = summary(result["cells"])
    print("", *result["summary"], sep="\n")
    if args.out:
        write_json(args.out, result)


if __name__ == "__main__":
    main()
