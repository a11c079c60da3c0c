"""Cost of filters: a `where` asked first, asked again and asked after a commit, with and without declared fields.

    python benchmarks/filters.py --n 1000000 --before OLD --out benchmarks/results/filters.json

OLD is a checkout of softdb to compare with (`git archive COMMIT softdb | tar -x -C OLD`). Each version is measured in a
process of its own, on records with the same payloads. Every count and every matching row is compared with numpy before
its time counts. "first" uses a filter that was never asked before; "again" repeats that filter, because the cache of
filters is what it measures. The files are in the page cache.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from common import bytes_on_disk, provenance, spread, write_json

SHARES = {"50 %": 5000, "10 %": 1000, "1 %": 100, "0.1 %": 10}  # of ranks 0 … 9,999
LANGUAGES = ["de", "en", "fr", "it"]
ROUNDS = 5
BATCH = 10_000
SMALL = 1000  # records of the commit before "after_commit"


def payload(i: int, rank: int) -> dict[str, Any]:
    """Return a payload of about 130 characters of JSON."""
    words = f"record {i} of a benchmark, with a title that is about as long as titles are"
    return {"title": words, "rank": rank, "lang": LANGUAGES[i % 4], "score": rank / 7, "tags": ["a", "b"]}


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    """Return the milliseconds of a call, and its result."""
    start = time.perf_counter()
    result = call()
    return (time.perf_counter() - start) * 1e3, result


def filled(folder: Path, ranks: Any, fields: list[str]) -> tuple[Any, dict[str, Any]]:
    """Return a database of records with these ranks, and figures of the insert."""
    import softdb

    declared: dict[str, Any] = {"fields": fields} if fields else {}  # an older softdb has no such argument
    db = softdb.open(folder, dim=2, **declared)
    keys, seconds = np.ones((BATCH, 2), np.float32), 0.0
    for low in range(0, len(ranks), BATCH):
        high = min(low + BATCH, len(ranks))
        payloads = [payload(i, int(ranks[i])) for i in range(low, high)]
        seconds += timed(lambda: db.insert(range(low, high), keys[: high - low], payloads=payloads))[0] / 1e3  # noqa: B023
    return db, {
        "records_per_s": round(len(ranks) / seconds),
        "catalogue_bytes": (folder / "catalog.sqlite").stat().st_size,
        "allocated_bytes": bytes_on_disk(folder)["allocated"],
    }


def wheres(width: int, shift: int) -> dict[str, tuple[dict[str, Any], Callable[[Any, Any], Any]]]:
    """Return filters on `width` of 10,000 ranks, each with a function of ranks and rows for its matches."""

    def inside(ranks: Any) -> Any:
        return (ranks >= shift) & (ranks < shift + width)

    ranged = {"rank": {"$gte": shift, "$lt": shift + width}}
    return {
        "range": (ranged, lambda ranks, rows: inside(ranks)),
        "range, equality": ({**ranged, "lang": "de"}, lambda ranks, rows: inside(ranks) & (rows % 4 == 0)),
        "all but a range": ({"$not": ranged}, lambda ranks, rows: ~inside(ranks)),
    }


def count_ms(db: Any, where: dict[str, Any], expected: Any) -> float:
    """Return the milliseconds of one count; raise AssertionError if it matches other records than expected."""
    milliseconds, count = timed(lambda: db.count(where))
    assert count == np.count_nonzero(expected), f"{where} matches {count}; expected {np.count_nonzero(expected)}"
    assert np.array_equal(db._store.matching(where)[1], expected), f"{where} matches other records than expected"
    return milliseconds


def measure(folder: Path, n: int, fields: list[str]) -> dict[str, Any]:
    """Measure all filters over one database."""
    ranks = np.random.default_rng(0).integers(0, 10_000, n)
    db, inserting = filled(folder, ranks, fields)
    count_ms(db, {"rank": -1}, np.zeros(n, np.bool_))  # brings the files into memory
    result: dict[str, Any] = {"inserting": inserting}
    fresh_ids = iter(range(n, n + 1000 * SMALL))
    for share, width in SHARES.items():
        for name in wheres(width, 0):
            first, again, after = [], [], []
            for shift in range(ROUNDS):
                where, matches = wheres(width, shift)[name]
                first.append(count_ms(db, where, matches(ranks, np.arange(len(ranks)))))
                again.append(count_ms(db, where, matches(ranks, np.arange(len(ranks)))))
                new = [next(fresh_ids) for _ in range(SMALL)]
                ranks = np.append(ranks, [i % 10_000 for i in new])
                keys = np.ones((SMALL, 2), np.float32)
                db.insert(new, keys, payloads=[payload(i, i % 10_000) for i in new])
                after.append(count_ms(db, where, matches(ranks, np.arange(len(ranks)))))
            measured = {"first_ms": first, "again_ms": again, "after_commit_ms": after}
            result[f"{name}, {share}"] = {
                key: {name: round(value, 3) for name, value in spread(times).items()} for key, times in measured.items()
            }
    db.close()
    return result


def declaring(folder: Path, n: int) -> dict[str, Any]:
    """Measure the declaration of two fields of a full database."""
    db, _ = filled(folder, np.random.default_rng(0).integers(0, 10_000, n), [])
    milliseconds = timed(lambda: db.index_field("rank", "lang"))[0]
    db.close()
    return {"declare_two_fields_ms": round(milliseconds)}


def child(args: argparse.Namespace) -> None:
    """Measure one version of softdb with one set of declared fields, and print the result."""
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        result = measure(Path(folder) / "db", args.n, args.fields.split(",") if args.fields else [])
        if args.fields:
            result |= declaring(Path(folder) / "full", args.n)
    print(json.dumps(result))


def parent(args: argparse.Namespace) -> None:
    """Measure each version and set of fields in a process of its own, and write the result."""
    root = Path(__file__).resolve().parent.parent
    runs: dict[str, tuple[Path, str]] = {"undeclared": (root, ""), "declared": (root, "rank,lang")}
    if args.before:
        runs = {"before": (args.before.resolve(), ""), **runs}
    engines = {}
    for name, (source, fields) in runs.items():
        command = [sys.executable, __file__, "--child", "--n", str(args.n), "--fields", fields]
        command += ["--folder", str(args.folder)] if args.folder else []
        completed = subprocess.run(
            command, env={**os.environ, "PYTHONPATH": str(source)}, stdout=subprocess.PIPE, text=True, check=True
        )
        engines[name] = json.loads(completed.stdout)
        print(name, json.dumps(engines[name], indent=1), file=sys.stderr)
    write_json(
        args.out,
        {
            **provenance(["softdb", "apsw", "numpy"]),
            "n": args.n,
            "rounds": ROUNDS,
            "records_of_a_commit": SMALL,
            "engines": engines,
        },
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--n", type=int, default=1_000_000)
    parser.add_argument("--before", type=Path, help="folder that holds an older softdb/")
    parser.add_argument("--folder", type=Path, help="folder for the databases")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/filters.json"))
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--fields", default="", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    (child if arguments.child else parent)(arguments)
