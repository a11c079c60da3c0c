"""Filtered search: recall and speed at 50, 10, 1 and 0.1 % of the records, against every peer that filters.

    python benchmarks/filter_peers.py --n 200000 --out benchmarks/results/filter-peers-clustered.json
    python benchmarks/filter_peers.py --data wordnet:DIR --out benchmarks/results/filter-peers-wordnet.json

There are three kinds of queries: "uncorrelated" ones, with a filter on a random number; "correlated" ones, most of
whose 100 nearest records match; and "opposed" ones, few of whose nearest records match. softdb's index is built once
and tuned without a filter. Each peer is tuned to the least effort that reaches the recall on the queries that are
timed; a peer that does not reach it within --patience seconds is reported with the recall it reached. Answers are
checked: the records match, none comes twice, there are K of them, and the recall is reached.

"first" is one query with a new filter, and includes the time to evaluate it: on stored fields by a database, by numpy
on columns in memory for an engine that takes ids. "again" is one query, and "batch" 100 queries, with a filter that was
asked before; engines that take ids have them ready. Each timed query is another one. An exact engine is checked on 20
queries, and a slow one is timed on smaller batches. Inserting and building are not compared. Qdrant's local mode (0.4 s
a query at 30,000 records) and Chroma run only if --engines names them.
"""

from __future__ import annotations

import argparse
import itertools
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from common import provenance, spread, write_json
from filter_cases import KINDS, NEAR, SHARES, Case, World, clustered, wordnet
from filter_databases import DATABASES
from filter_engines import LIBRARIES, Effort, Engine, Floats, K

ENGINES = {**DATABASES, **LIBRARIES}
BATCH = 100
CHECKED = 20  # queries of a check; an exact engine is checked on these alone


class Reached(NamedTuple):
    """Recall and time at an effort."""

    effort: Effort
    recall: float
    full: bool  # every answer has K records
    done: bool  # all queries were asked before --patience ended
    each: float  # seconds per query


class Tuned:
    """An engine tuned to the recall of a case."""

    def __init__(self, engine: Engine, case: Case, keys: Floats, args: argparse.Namespace) -> None:
        self.engine, self.case, self.keys, self.args = engine, case, keys, args
        self.prepared = engine.prepare(case.wanted)
        self.reached = max((point for ladder in engine.ladders for point in self._climbed(ladder)), key=self._worth)
        self.firsts_full = True

    @property
    def met(self) -> bool:
        """Return True if the recall was reached and every answer is full."""
        return self._enough(self.reached) and self.firsts_full

    def _enough(self, point: Reached) -> bool:
        return point.full and point.done and point.recall >= self.args.recall

    def _worth(self, point: Reached) -> tuple[float, ...]:
        """Return a key that puts the fastest point with enough recall first, else the one with the largest recall."""
        return (1, -point.each) if self._enough(point) else (0, point.done, point.recall)

    def _climbed(self, ladder: Sequence[Effort]) -> Iterator[Reached]:
        """Yield the points of a bisection for the least effort that reaches the recall."""
        low, high = 0, len(ladder) - 1
        while low <= high:
            middle = (low + high) // 2
            point = self._tried(ladder[middle])
            low, high = (low, middle - 1) if self._enough(point) or not point.done else (middle + 1, high)
            yield point

    def _tried(self, effort: Effort) -> Reached:
        """Measure an effort, and check every answer."""
        count = CHECKED if self.engine.exact else len(self.case.queries)
        shares, seconds = [], 0.0
        for low in range(0, count, CHECKED):
            start = time.perf_counter()
            rows = self.engine.search(self.case.queries[low : low + CHECKED], self.prepared, effort)
            seconds += time.perf_counter() - start
            shares.append(self.case.recall(self.keys, self.engine, rows, low))
            if seconds > self.args.patience:
                break
        answered = min(count, len(shares) * CHECKED)
        recall, full = float(np.mean([share for share, _ in shares])), all(full for _, full in shares)
        return Reached(effort, recall, full, answered == count, seconds / answered)

    def first(self, case: Case) -> tuple[float, float]:
        """Return the milliseconds of one query with a new filter, and its recall."""
        start = time.perf_counter()
        rows = self.engine.search(case.queries, self.engine.prepare(case.wanted), self.reached.effort)
        seconds = time.perf_counter() - start
        share, full = case.recall(self.keys, self.engine, rows)
        self.firsts_full &= full
        return seconds * 1e3, share

    def again(self) -> float:
        """Return the milliseconds of one query: the median of up to 50 queries."""
        return float(np.median(self._repeated(1, 50)) * 1e3)

    def batch(self) -> float:
        """Return queries per second in batches of BATCH, or of fewer if the engine is slow."""
        count = int(np.clip(self.args.patience / 10 / self.reached.each, 1, BATCH))
        return count / float(np.median(self._repeated(count, 5)))

    def _repeated(self, count: int, most: int) -> list[float]:
        """Return the seconds of up to `most` searches of `count` other queries each; fewer if the engine is slow."""
        seconds: list[float] = []
        while len(seconds) < most and sum(seconds) < self.args.patience / 10:
            places = np.arange(count) + len(seconds) * count
            queries = self.case.queries[places % len(self.case.queries)]
            start = time.perf_counter()
            self.engine.search(queries, self.prepared, self.reached.effort)
            seconds.append(time.perf_counter() - start)
        return seconds


def compared(world: World, engines: list[Engine], share: str, kind: str, args: argparse.Namespace) -> dict[str, Any]:
    """Measure one case: tune and check every engine, then time them in turn."""
    queries, near = world.queries(SHARES[share], kind, args.queries)
    name = f"{share}, {kind}"
    case = Case.of(name, world, world.filter(SHARES[share], kind, 0), queries)
    all_tuned = [Tuned(engine, case, world.keys, args) for engine in engines]
    first: list[list[tuple[float, float]]] = [[] for _ in engines]
    again: list[list[float]] = [[] for _ in engines]
    batch: list[list[float]] = [[] for _ in engines]
    shifts = itertools.count(1 + (args.firsts + 1) * KINDS.index(kind))  # no filter is asked in two cases
    for i in range(args.firsts):
        wanted = world.filter(SHARES[share], kind, next(shifts))
        fresh = Case.of(name, world, wanted, queries[i % len(queries)][None])
        for times, tuned in zip(first, all_tuned, strict=True):
            times.append(tuned.first(fresh))
    for turn in range(args.rounds + 1):
        for i, tuned in enumerate(all_tuned):
            milliseconds, rate = tuned.again(), tuned.batch()
            if turn:  # the first round warms up
                again[i].append(milliseconds)
                batch[i].append(rate)
    rows = {
        tuned.engine.name: {
            "met": tuned.met,
            "recall": round(tuned.reached.recall, 4),
            "full": tuned.reached.full and tuned.firsts_full,
            "too_slow": not tuned.reached.done,
            "effort": list(tuned.reached.effort),
            "first_recall": round(float(np.mean([share for _, share in firsts])), 4),
            "first_ms": _rounded(spread([milliseconds for milliseconds, _ in firsts])),
            "again_ms": _rounded(spread(singles)),
            "batch_queries_s": _rounded(spread(rates)),
        }
        for tuned, firsts, singles, rates in zip(all_tuned, first, again, batch, strict=True)
    }
    databases = [engine.name for engine in engines if engine.database and not engine.name.startswith("softdb")]
    others = [engine.name for engine in engines if not engine.name.startswith("softdb")]
    return {
        "matches": int(np.count_nonzero(case.mask)),
        "neighbours_that_match": round(near, 4),
        "filter": case.wanted.sql(),
        "engines": rows,
        "ratio_to_peers": _ratios(rows, others),
        "ratio_to_databases": _ratios(rows, databases),
    }


def _rounded(values: dict[str, float]) -> dict[str, float]:
    return {name: round(value, 4) for name, value in values.items()}


def _ratios(rows: dict[str, Any], peers: list[str]) -> dict[str, Any]:
    """Return softdb's speed over that of the fastest peer that met the recall, and the name of that peer."""
    met = [name for name in peers if rows[name]["met"]]
    if "softdb" not in rows or not met:
        return {}
    ratios: dict[str, Any] = {"softdb_met": rows["softdb"]["met"]}
    for measure, sign in (("first_ms", 1), ("again_ms", 1), ("batch_queries_s", -1)):
        medians = {name: rows[name][measure]["median"] for name in ["softdb", *met]}
        best = min(met, key=lambda name: sign * medians[name])
        ratios[measure] = [round((medians[best] / medians["softdb"]) ** sign, 3), best]
    return ratios


def show(name: str, result: dict[str, Any]) -> None:
    """Print the table of one case."""
    print(f"\n{name}: {result['matches']} match, {result['neighbours_that_match']:.3f} of the queries' {NEAR} nearest")
    print(f"{'':18} {'recall':>7} {'first ms':>10} {'again ms':>10} {'batch/s':>9}  effort")
    for engine, row in result["engines"].items():
        why = "TOO SLOW" if row["too_slow"] else "MISSED" if row["full"] else "FEWER THAN K"
        note = "" if row["met"] else f"  {why}"
        times = f"{row['first_ms']['median']:10.3f} {row['again_ms']['median']:10.3f}"
        batch = f"{row['batch_queries_s']['median']:9.0f}"
        print(f"{engine:18} {row['recall']:7.3f} {times} {batch}  {row['effort']}{note}", flush=True)
    for against in ("peers", "databases"):
        ratios = {key: value for key, value in result[f"ratio_to_{against}"].items() if key != "softdb_met"}
        words = [f"{key.split('_')[0]} {ratio:.2f} ({best})" for key, (ratio, best) in ratios.items()]
        print(f"softdb / fastest of the {against}: {', '.join(words)}", flush=True)


def built(world: World, args: argparse.Namespace) -> tuple[list[Engine], dict[str, float]]:
    """Build the chosen engines; return them and the seconds of inserting and indexing."""
    engines, seconds = [], {}
    for name in args.engines.split(","):
        engine = ENGINES[name](name, args.threads)
        start = time.perf_counter()
        engine.build(world.keys, world.columns, world.tuning)
        seconds[name] = round(time.perf_counter() - start, 1)
        print(f"built {name} in {seconds[name]} s", flush=True)
        engines.append(engine)
    return engines, seconds


def main() -> None:
    """Build the engines, measure the cases and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="clustered", help="clustered or wordnet:DIR")
    parser.add_argument("--n", type=int, default=200_000)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--engines", default=",".join(name for name in ENGINES if name not in ("chroma", "qdrant")))
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--shares", default=",".join(SHARES))
    parser.add_argument("--recall", type=float, default=0.95)
    parser.add_argument("--queries", type=int, default=200)
    parser.add_argument("--firsts", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--patience", type=float, default=10, help="seconds that one effort may take for all queries")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    for name in ("LANCE_CPU_THREADS", "RAYON_NUM_THREADS", "TOKIO_WORKER_THREADS"):  # read when these are imported
        os.environ[name] = str(args.threads)
    os.environ.setdefault("LANCE_LOG", "error")
    torch.set_num_threads(args.threads)
    named = args.data.startswith("wordnet:")
    chosen = wordnet(Path(args.data.removeprefix("wordnet:"))) if named else clustered(args.n, args.dim)
    engines, seconds = built(chosen, args)
    cases = {}
    for share, kind in itertools.product(args.shares.split(","), args.kinds.split(",")):
        cases[f"{share}, {kind}"] = compared(chosen, engines, share, kind, args)
        show(f"{share}, {kind}", cases[f"{share}, {kind}"])
    for engine in engines:
        engine.close()
    packages = {package for engine in engines for package in engine.packages}
    if args.out:
        result = {
            **provenance(sorted(packages | {"numpy", "torch"})),
            "data": {"name": args.data.split(":")[0], "n": len(chosen.keys), "dim": chosen.keys.shape[1], "k": K},
            "threads": args.threads,
            "index": next((engine.report for engine in engines if engine.name == "softdb"), None),  # type: ignore[attr-defined]
            "insert_and_build_seconds": seconds,
            "cases": cases,
        }
        write_json(args.out, result)


if __name__ == "__main__":
    main()
