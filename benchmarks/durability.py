"""Cost of durability: inserts at full and relaxed durability, beside SQLite and the disk's own flush.

    python benchmarks/durability.py --out benchmarks/results/durability.json
    python benchmarks/durability.py --base 1000000 --dim 128 --singles 500

The engines run in turn, `--repeats` times, in one process: softdb with durability="full" (each insert is on disk when
it returns) and "relaxed" (within a second); one SQLite table (id, key as BLOB, payload as JSON) in WAL mode at
synchronous=FULL and NORMAL; and the floor: one pwrite of the record and one fdatasync, in a file that has its final
size. No durable store can be faster than the floor. Records are inserted one by one, then in batches of 1,000.

Wrong answers raise: after each round the database is opened again, its records are counted, and 100 random ones are
compared. `--base` records are inserted before the clock starts.
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
    """A store whose inserts are timed."""

    def insert(self, ids: list[str], keys: Floats, payloads: list[Any]) -> None:
        """Add records; acknowledged when it returns."""

    def close(self) -> None:
        """Bring everything to disk."""

    def read(self, ids: list[str]) -> tuple[int, Floats, list[Any]]:
        """Open the closed store and return the number of records, and the keys (n, d) and payloads of these ids."""


class SoftDB:
    """A softdb directory."""

    def __init__(self, folder: Path, dim: int, durability: Any) -> None:
        self.path = folder / "softdb"
        self.db = softdb.open(self.path, dim=dim, durability=durability)

    def insert(self, ids: list[str], keys: Floats, payloads: list[Any]) -> None:
        """Insert in one batch."""
        self.db.insert(ids, keys, payloads=payloads)

    def close(self) -> None:
        """Close the database."""
        self.db.close()

    def read(self, ids: list[str]) -> tuple[int, Floats, list[Any]]:
        """Open the database again and read."""
        with softdb.open(self.path, mode="r", verify=True) as db:
            records = db.get(ids)
            return len(db), records.keys.numpy(), records.payloads


class SQLite:
    """One SQLite table."""

    def __init__(self, folder: Path, dim: int, synchronous: str) -> None:
        self.path = folder / "one.sqlite"
        self.connection = apsw.Connection(str(self.path))
        self.connection.execute("PRAGMA journal_mode = WAL")
        self.connection.execute(f"PRAGMA synchronous = {synchronous}")
        self.connection.execute(
            "CREATE TABLE IF NOT EXISTS records(row INTEGER PRIMARY KEY, id TEXT UNIQUE, key BLOB, payload TEXT)"
        )

    def insert(self, ids: list[str], keys: Floats, payloads: list[Any]) -> None:
        """Insert in one transaction."""
        rows = (
            (name, key.tobytes(), json.dumps(payload)) for name, key, payload in zip(ids, keys, payloads, strict=True)
        )
        with self.connection:
            self.connection.executemany("INSERT INTO records(id, key, payload) VALUES(?, ?, ?)", rows)

    def close(self) -> None:
        """Close the connection."""
        self.connection.close()

    def read(self, ids: list[str]) -> tuple[int, Floats, list[Any]]:
        """Open the table again and read."""
        connection = apsw.Connection(str(self.path))
        count = int(connection.execute("SELECT count(*) FROM records").get)
        rows = [connection.execute("SELECT key, payload FROM records WHERE id = ?", (name,)).get for name in ids]
        connection.close()
        return count, np.stack([np.frombuffer(key, np.float32) for key, _ in rows]), [json.loads(p) for _, p in rows]


ENGINES: dict[str, Callable[[Path, int], Store]] = {
    "softdb full": lambda folder, dim: SoftDB(folder, dim, "full"),
    "softdb relaxed": lambda folder, dim: SoftDB(folder, dim, "relaxed"),
    "sqlite FULL": lambda folder, dim: SQLite(folder, dim, "FULL"),
    "sqlite NORMAL": lambda folder, dim: SQLite(folder, dim, "NORMAL"),
}


def one_round(engine: str, folder: Path, args: argparse.Namespace, seed: int) -> dict[str, float]:
    """Measure single inserts and batches; raise SystemExit if the store does not hold the inserted records."""
    random = np.random.default_rng(seed)
    total = args.base + args.singles + args.batches * BATCH
    ids = [f"r{i:08d}" for i in range(total)]
    keys = random.standard_normal((total, args.dim), dtype=np.float32)
    payloads = [{"n": i, "word": f"w{i % 97}"} for i in range(total)]
    store = ENGINES[engine](folder, args.dim)
    for low in range(0, args.base, 50_000):
        block = slice(low, min(low + 50_000, args.base))
        store.insert(ids[block], keys[block], payloads[block])
    singles = []
    for i in range(args.base, args.base + args.singles):
        start = time.perf_counter()
        store.insert(ids[i : i + 1], keys[i : i + 1], payloads[i : i + 1])
        singles.append(time.perf_counter() - start)
    start = time.perf_counter()
    for low in range(args.base + args.singles, total, BATCH):
        block = slice(low, low + BATCH)
        store.insert(ids[block], keys[block], payloads[block])
    batches = time.perf_counter() - start
    store.close()
    sample = random.integers(0, total, 100)
    count, read_keys, read_payloads = store.read([ids[i] for i in sample])
    if count != total:
        raise SystemExit(f"{engine} holds {count} records; expected {total}")
    if not np.array_equal(read_keys, keys[sample]) or read_payloads != [payloads[i] for i in sample]:
        raise SystemExit(f"{engine} changed keys or payloads of records; expected those that were inserted")
    return {
        "single_p50_ms": float(np.median(singles)) * 1e3,
        "single_p99_ms": float(np.quantile(singles, 0.99)) * 1e3,
        "singles_s": len(singles) / sum(singles),
        "batched_records_s": args.batches * BATCH / batches,
    }


def floor(folder: Path, args: argparse.Namespace) -> dict[str, float]:
    """Measure one pwrite and one fdatasync per record."""
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
    """Run the rounds and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dim", type=int, default=384)
    parser.add_argument("--base", type=int, default=0, help="records inserted before the clock starts")
    parser.add_argument("--singles", type=int, default=1000)
    parser.add_argument("--batches", type=int, default=50)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="on the disk to measure; a temporary one if not given")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as scratch:
        if file_system(Path(scratch)) in IN_MEMORY:
            raise SystemExit(f"{scratch} is in memory, where an fsync costs nothing; give --folder on a disk")
        kind = file_system(Path(scratch))
        rounds: dict[str, list[dict[str, float]]] = {name: [] for name in (*ENGINES, "floor")}
        for seed in range(args.repeats + 1):  # the first round warms up
            for engine in rounds:
                with tempfile.TemporaryDirectory(dir=scratch) as name:
                    folder = Path(name)
                    measured = floor(folder, args) if engine == "floor" else one_round(engine, folder, args, seed)
                    if seed:
                        rounds[engine].append(measured)
    figures = {
        engine: {name: {k: round(v, 4) for k, v in spread([row[name] for row in rows]).items()} for name in rows[0]}
        for engine, rows in rounds.items()
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
