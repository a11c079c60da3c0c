"""What durability costs: inserts at full and at relaxed durability, beside SQLite's and the disk's own flush.

    python benchmarks/durability.py --out benchmarks/results/durability.json
    python benchmarks/durability.py --base 1000000 --dim 128 --singles 500

Engines, in turn, `--repeats` times, in one process: softdb with durability="full" (each insert on disk when it returns)
and "relaxed" (within a second); one SQLite table (id, key as BLOB, payload as JSON) in WAL mode at synchronous=FULL and
NORMAL; and the floor, one pwrite of the record and one fdatasync of a file of its final size: no store that keeps its
word can be faster. Records are inserted one by one, then in batches of 1,000.

Wrong answers raise: after each round the database is opened anew, counted, and 100 random records are compared.
`--base` records are there before the clock starts.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import apsw
import numpy as np
from common import IN_MEMORY, file_system, provenance, spread, write_json
from numpy.typing import NDArray

import softdb

Floats = NDArray[np.float32]
BATCH = 1000


class Store(Protocol):
    """What is timed."""

    def insert(self, ids: list[str], keys: Floats, payloads: list[Any]) -> None:
        """Add records; acknowledged when it returns."""

    def close(self) -> None:
        """Bring everything to disk."""

    def read(self, ids: list[str]) -> tuple[int, Floats, list[Any]]:
        """After `close`: how many records there are, and those keys and payloads."""


class SoftDB:
    """softdb."""

    def __init__(self, folder: Path, dim: int, durability: Any) -> None:
        self.path = folder / "softdb"
        self.db = softdb.open(self.path, dim=dim, durability=durability)

    def insert(self, ids: list[str], keys: Floats, payloads: list[Any]) -> None:
        """In one batch."""
        self.db.insert(ids, keys, payloads=payloads)

    def close(self) -> None:
        """Let go of it."""
        self.db.close()

    def read(self, ids: list[str]) -> tuple[int, Floats, list[Any]]:
        """Open it anew."""
        with softdb.open(self.path, mode="r", verify=True) as db:
            found = db.get(ids)
            return len(db), found.keys.numpy(), found.payloads


class SQLite:
    """One table."""

    def __init__(self, folder: Path, dim: int, synchronous: str) -> None:
        self.path = folder / "one.sqlite"
        self.connection = apsw.Connection(str(self.path))
        self.connection.execute("PRAGMA journal_mode = WAL")
        self.connection.execute(f"PRAGMA synchronous = {synchronous}")
        self.connection.execute(
            "CREATE TABLE IF NOT EXISTS records(row INTEGER PRIMARY KEY, id TEXT UNIQUE, key BLOB, payload TEXT)"
        )

    def insert(self, ids: list[str], keys: Floats, payloads: list[Any]) -> None:
        """In one batch."""
        rows = ((one, key.tobytes(), json.dumps(what)) for one, key, what in zip(ids, keys, payloads, strict=True))
        with self.connection:
            self.connection.executemany("INSERT INTO records(id, key, payload) VALUES(?, ?, ?)", rows)

    def close(self) -> None:
        """Let go of it."""
        self.connection.close()

    def read(self, ids: list[str]) -> tuple[int, Floats, list[Any]]:
        """Open it anew."""
        connection = apsw.Connection(str(self.path))
        count = int(connection.execute("SELECT count(*) FROM records").get)
        found = [connection.execute("SELECT key, payload FROM records WHERE id = ?", (one,)).get for one in ids]
        connection.close()
        return count, np.stack([np.frombuffer(key, np.float32) for key, _ in found]), [json.loads(p) for _, p in found]


ENGINES: dict[str, Callable[[Path, int], Store]] = {
    "softdb full": lambda folder, dim: SoftDB(folder, dim, "full"),
    "softdb relaxed": lambda folder, dim: SoftDB(folder, dim, "relaxed"),
    "sqlite FULL": lambda folder, dim: SQLite(folder, dim, "FULL"),
    "sqlite NORMAL": lambda folder, dim: SQLite(folder, dim, "NORMAL"),
}


def one_round(engine: str, folder: Path, args: argparse.Namespace, seed: int) -> dict[str, float]:
    """Seconds of single inserts and of batches; raises where the database does not hold what was given."""
    random = np.random.default_rng(seed)
    total = args.base + args.singles + args.batches * BATCH
    ids = [f"r{i:08d}" for i in range(total)]
    keys = random.standard_normal((total, args.dim), dtype=np.float32)
    payloads = [{"n": i, "word": f"w{i % 97}"} for i in range(total)]
    store = ENGINES[engine](folder, args.dim)
    for low in range(0, args.base, 50_000):
        part = slice(low, min(low + 50_000, args.base))
        store.insert(ids[part], keys[part], payloads[part])
    singles = []
    for i in range(args.base, args.base + args.singles):
        start = time.perf_counter()
        store.insert(ids[i : i + 1], keys[i : i + 1], payloads[i : i + 1])
        singles.append(time.perf_counter() - start)
    start = time.perf_counter()
    for low in range(args.base + args.singles, total, BATCH):
        part = slice(low, low + BATCH)
        store.insert(ids[part], keys[part], payloads[part])
    batches = time.perf_counter() - start
    store.close()
    sample = random.integers(0, total, 100)
    count, found, what = store.read([ids[i] for i in sample])
    if count != total or not np.array_equal(found, keys[sample]) or what != [payloads[i] for i in sample]:
        raise SystemExit(f"{engine} lost or changed records: {count} of {total}")
    return {
        "single_p50_ms": float(np.median(singles)) * 1e3,
        "single_p99_ms": float(np.quantile(singles, 0.99)) * 1e3,
        "singles_s": len(singles) / sum(singles),
        "batched_records_s": args.batches * BATCH / batches,
    }


def floor(folder: Path, args: argparse.Namespace) -> dict[str, float]:
    """One pwrite and one fdatasync a record."""
    size = args.dim * 4
    file = os.open(folder / "floor", os.O_CREAT | os.O_WRONLY, 0o600)
    os.posix_fallocate(file, 0, size * args.singles)
    os.fsync(file)
    seconds = []
    for i in range(args.singles):
        start = time.perf_counter()
        os.pwrite(file, os.urandom(size), i * size)
        os.fdatasync(file)
        seconds.append(time.perf_counter() - start)
    os.close(file)
    return {
        "single_p50_ms": float(np.median(seconds)) * 1e3,
        "single_p99_ms": float(np.quantile(seconds, 0.99)) * 1e3,
        "singles_s": len(seconds) / sum(seconds),
    }


def main() -> None:
    """Run it and write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dim", type=int, default=384)
    parser.add_argument("--base", type=int, default=0, help="records that are there before")
    parser.add_argument("--singles", type=int, default=1000)
    parser.add_argument("--batches", type=int, default=50)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="on the disk to measure; a temporary one if not given")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as scratch:
        if file_system(Path(scratch)) in IN_MEMORY:
            raise SystemExit(f"{scratch} is in memory: an fsync there costs nothing; give --folder on a disk")
        kind = file_system(Path(scratch))
        rounds: dict[str, list[dict[str, float]]] = {name: [] for name in (*ENGINES, "floor")}
        for seed in range(args.repeats + 1):  # the first is thrown away
            for engine in rounds:
                with tempfile.TemporaryDirectory(dir=scratch) as folder:
                    place = Path(folder)
                    found = floor(place, args) if engine == "floor" else one_round(engine, place, args, seed)
                    if seed:
                        rounds[engine].append(found)
    figures = {
        engine: {name: {k: round(v, 4) for k, v in spread([one[name] for one in found]).items()} for name in found[0]}
        for engine, found in rounds.items()
    }
    full = figures["softdb full"]
    ratios = {
        f"{engine}, {name}": round(figures[engine][name]["median"] / full[name]["median"], 3)
        for engine in figures
        if engine != "softdb full"
        for name in figures[engine]
    }
    result = {
        **provenance(("numpy", "apsw", "torch")),
        "file_system": kind,
        "workload": {name: getattr(args, name) for name in ("dim", "base", "singles", "batches", "repeats")},
        "engines": figures,
        "ratio_to_softdb_full": ratios,
    }
    for engine, medians in figures.items():
        print(f"{engine:15}", "  ".join(f"{name} {value['median']:.3f}" for name, value in medians.items()))
    if args.out:
        write_json(args.out, result)


if __name__ == "__main__":
    main()
