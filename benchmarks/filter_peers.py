"""Filtered search: recall and speed at 50, 10, 1 and 0.1 % of the records, against every peer that filters.

    python benchmarks/filter_peers.py --n 200000 --out benchmarks/results/filter-peers-clustered.json
    python benchmarks/filter_peers.py --data wordnet:DIR --out benchmarks/results/filter-peers-wordnet.json

Three kinds of queries: any ("uncorrelated", the filter is on a random number), those most of whose 100 nearest records
match ("correlated") and those few of whose do ("opposed"). softdb's index is built once, on queries of no filter. Each
peer has its least effort that reaches the recall on the very queries that are timed; one that cannot within --patience
seconds is shown with what it reached. Answers are checked: the records match, none comes twice, K of them, the recall.

"first" is one query with a filter never asked before, working out the matches included (from stored fields by a
database, by numpy on columns in memory for an engine that takes ids). "again" is one query and "batch" 100 of them with
a filter that was asked before; an engine that takes ids has them ready. An exact engine is checked on 20 queries, and a
slow one is timed on smaller batches. Inserting and building are not compared. Qdrant's local mode (0.4 s a query at
30,000 records) and Chroma run when --engines names them.
"""

from __future__ import annotations

import argparse
import itertools
import os
import time
from collections.abc import Callable, Iterator, Sequence
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
CHECKED = 20  # queries by which an engine that compares with every match is checked


class Reached(NamedTuple):
    """What an effort gives."""

    effort: Effort
    recall: float
    full: bool  # K records in every answer
    done: bool  # all queries were asked before --patience ended
    each: float  # seconds a query


class Tuned:
    """An engine with its effort for a case, and what it reaches."""

    def __init__(self, engine: Engine, case: Case, keys: Floats, given: argparse.Namespace) -> None:
        self.engine, self.case, self.keys, self.given = engine, case, keys, given
        self.prepared = engine.prepare(case.wanted)
        self.reached = max((one for ladder in engine.ladders for one in self._climbed(ladder)), key=self._worth)
        self.firsts_full = True

    @property
    def met(self) -> bool:
        """Whether it counts as a peer."""
        return self._enough(self.reached) and self.firsts_full

    def _enough(self, one: Reached) -> bool:
        return one.full and one.done and one.recall >= self.given.recall

    def _worth(self, one: Reached) -> tuple[float, ...]:
        """Of those that are enough the fastest, else what reaches most."""
        return (1, -one.each) if self._enough(one) else (0, one.done, one.recall)

    def _climbed(self, ladder: Sequence[Effort]) -> Iterator[Reached]:
        """By halves, to the least effort that is enough."""
        low, high = 0, len(ladder) - 1
        while low <= high:
            middle = (low + high) // 2
            one = self._tried(ladder[middle])
            low, high = (low, middle - 1) if self._enough(one) or not one.done else (middle + 1, high)
            yield one

    def _tried(self, effort: Effort) -> Reached:
        """Checks every answer."""
        count = CHECKED if self.engine.exact else len(self.case.queries)
        shares, took = [], 0.0
        for low in range(0, count, CHECKED):
            start = time.perf_counter()
            rows = self.engine.search(self.case.queries[low : low + CHECKED], self.prepared, effort)
            took += time.perf_counter() - start
            shares.append(self.case.recall(self.keys, self.engine, rows, low))
            if took > self.given.patience:
                break
        asked = min(count, len(shares) * CHECKED)
        recall, full = float(np.mean([share for share, _ in shares])), all(full for _, full in shares)
        return Reached(effort, recall, full, asked == count, took / asked)

    def first(self, case: Case) -> tuple[float, float]:
        """Milliseconds of one query with a new filter, and its recall."""
        start = time.perf_counter()
        rows = self.engine.search(case.queries, self.engine.prepare(case.wanted), self.reached.effort)
        took = time.perf_counter() - start
        share, full = case.recall(self.keys, self.engine, rows)
        self.firsts_full &= full
        return took * 1e3, share

    def again(self) -> float:
        """Milliseconds of one query: the median of up to 50."""
        return float(np.median(self._repeated(lambda i: self.case.queries[i : i + 1], 50)) * 1e3)

    def batch(self) -> float:
        """Queries a second; fewer than BATCH at once where these would take too long."""
        count = int(np.clip(self.given.patience / 10 / self.reached.each, 1, BATCH))
        return count / float(np.median(self._repeated(lambda i: self.case.queries[:count], 5)))

    def _repeated(self, queries: Callable[[int], Floats], most: int) -> list[float]:
        """Seconds of some searches: fewer where they are slow."""
        found: list[float] = []
        while len(found) < most and sum(found) < self.given.patience / 10:
            start = time.perf_counter()
            self.engine.search(queries(len(found)), self.prepared, self.reached.effort)
            found.append(time.perf_counter() - start)
        return found


def compared(world: World, engines: list[Engine], share: str, kind: str, given: argparse.Namespace) -> dict[str, Any]:
    """One case: every engine tuned and checked, then timed in turn."""
    queries, near = world.queries(SHARES[share], kind, given.queries)
    name = f"{share}, {kind}"
    case = Case.of(name, world, world.filter(SHARES[share], kind, 0), queries)
    all_tuned = [Tuned(engine, case, world.keys, given) for engine in engines]
    first: list[list[tuple[float, float]]] = [[] for _ in engines]
    again: list[list[float]] = [[] for _ in engines]
    batch: list[list[float]] = [[] for _ in engines]
    shifts = itertools.count(1 + (given.firsts + 1) * KINDS.index(kind))  # no filter is asked in two cases
    for i in range(given.firsts):
        wanted = world.filter(SHARES[share], kind, next(shifts))
        fresh = Case.of(name, world, wanted, queries[i % len(queries)][None])
        for times, tuned in zip(first, all_tuned, strict=True):
            times.append(tuned.first(fresh))
    for turn in range(given.rounds + 1):
        for i, tuned in enumerate(all_tuned):
            one, many = tuned.again(), tuned.batch()
            if turn:  # the first round warms up
                again[i].append(one)
                batch[i].append(many)
    rows = {
        tuned.engine.name: {
            "met": tuned.met,
            "recall": round(tuned.reached.recall, 4),
            "full": tuned.reached.full and tuned.firsts_full,
            "too_slow": not tuned.reached.done,
            "effort": list(tuned.reached.effort),
            "first_recall": round(float(np.mean([share for _, share in firsts])), 4),
            "first_ms": _rounded(spread([took for took, _ in firsts])),
            "again_ms": _rounded(spread(ones)),
            "batch_queries_s": _rounded(spread(many)),
        }
        for tuned, firsts, ones, many in zip(all_tuned, first, again, batch, strict=True)
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
    """How many times as fast as the fastest of the peers that met the recall softdb is, and which that was."""
    met = [name for name in peers if rows[name]["met"]]
    if "softdb" not in rows or not met:
        return {}
    found: dict[str, Any] = {"softdb_met": rows["softdb"]["met"]}
    for what, sign in (("first_ms", 1), ("again_ms", 1), ("batch_queries_s", -1)):
        medians = {name: rows[name][what]["median"] for name in ["softdb", *met]}
        best = min(met, key=lambda name: sign * medians[name])
        found[what] = [round((medians[best] / medians["softdb"]) ** sign, 3), best]
    return found


def show(name: str, result: dict[str, Any]) -> None:
    """A table of one case."""
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


def built(world: World, given: argparse.Namespace) -> tuple[list[Engine], dict[str, float]]:
    """Every engine asked for, and the seconds that inserting and indexing took."""
    engines, seconds = [], {}
    for name in given.engines.split(","):
        engine = ENGINES[name](name, given.threads)
        start = time.perf_counter()
        engine.build(world.keys, world.columns, world.tuning)
        seconds[name] = round(time.perf_counter() - start, 1)
        print(f"built {name} in {seconds[name]} s", flush=True)
        engines.append(engine)
    return engines, seconds


def main() -> None:
    """Build every engine, go through the cases, write."""
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
    parser.add_argument("--patience", type=float, default=10, help="seconds for one effort over all queries")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    for name in ("LANCE_CPU_THREADS", "RAYON_NUM_THREADS", "TOKIO_WORKER_THREADS"):  # read when these are imported
        os.environ[name] = str(given.threads)
    os.environ.setdefault("LANCE_LOG", "error")
    torch.set_num_threads(given.threads)
    named = given.data.startswith("wordnet:")
    chosen = wordnet(Path(given.data.removeprefix("wordnet:"))) if named else clustered(given.n, given.dim)
    engines, seconds = built(chosen, given)
    cases = {}
    for share, kind in itertools.product(given.shares.split(","), given.kinds.split(",")):
        cases[f"{share}, {kind}"] = compared(chosen, engines, share, kind, given)
        show(f"{share}, {kind}", cases[f"{share}, {kind}"])
    for engine in engines:
        engine.close()
    packages = {package for engine in engines for package in engine.packages}
    if given.out:
        result = {
            **provenance(sorted(packages | {"numpy", "torch"})),
            "data": {"name": given.data.split(":")[0], "n": len(chosen.keys), "dim": chosen.keys.shape[1], "k": K},
            "threads": given.threads,
            "index": next((engine.report for engine in engines if engine.name == "softdb"), None),  # type: ignore[attr-defined]
            "insert_and_build_seconds": seconds,
            "cases": cases,
        }
        write_json(given.out, result)


if __name__ == "__main__":
    main()
