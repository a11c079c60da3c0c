"""Rates of placing ids and of making shards from a table, beside floors of the same run; run by cluster.py."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path
from typing import Any
from uuid import UUID
from zlib import crc32

import apsw
import lance
import numpy as np
import pyarrow as pa
from common import disk_write_rate, in_turn, spread

from softdb import cluster
from softdb.cluster.hydrate import Hydrated
from softdb.cluster.placement import shard_of
from softdb.store import format

DIM, BATCH, IDS, SHARDS = 384, 50_000, 1_000_000, 1024  # width of keys; rows in a commit; ids that are placed
GB = 1e9


def hashed_one_by_one(column: Any) -> np.ndarray:
    """Place ids by BLAKE2b, one after the other: the placement of older versions."""
    digests = b"".join([blake2b(str(id).encode(), digest_size=8).digest() for id in column.to_pylist()])
    return np.frombuffer(digests, "<u8") % SHARDS


def placed(rounds: int) -> dict[str, Any]:
    """Measure millions of ids placed per second, by softdb and by BLAKE2b one by one."""
    columns = {
        "integers": pa.array(range(IDS)),
        "doc-000123": pa.array([f"doc-{i:06d}" for i in range(IDS)]),
        "uuids": pa.array([str(UUID(int=i << 64 | i)) for i in range(IDS)]),
        "short, and one of 1 MB": pa.array([*(f"r{i}" for i in range(IDS - 1)), "x" * 1_000_000]),
    }
    result = {}
    for name, column in columns.items():
        sample = np.random.default_rng(0).integers(0, IDS, 100)
        if shard_of(column, SHARDS)[sample].tolist() != shard_of(column.take(sample).to_pylist(), SHARDS).tolist():
            raise SystemExit(f"{name}: a list and a column of the same ids have other shards")
        calls: dict[str, Callable[[], object]] = {
            "softdb": lambda column=column: shard_of(column, SHARDS),  # type: ignore[misc]
            "blake2b": lambda column=column: hashed_one_by_one(column),  # type: ignore[misc]
        }
        rates = {of: [IDS / 1e6 / s for s in seconds] for of, seconds in in_turn(calls, rounds).items()}
        result[name] = {of: spread(rate) for of, rate in rates.items()}
        print(name, json.dumps(result[name]), flush=True)
    return {"millions of ids per second": result}


def hydrated(records: int, rounds: int) -> dict[str, Any]:
    """Measure seconds for each GB of keys: of making 1 and 4 shards, and of their parts, each alone."""
    random = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as name:
        folder, url = Path(name), str(Path(name, "t.lance"))
        with cluster.create(url, dim=DIM, shards=1, cache=folder / "first") as db:
            for low in range(0, records, BATCH):
                ids = range(low, min(low + BATCH, records))
                keys = random.standard_normal((len(ids), DIM), np.float32)
                payloads = [{"n": i, "tag": f"t{i % 7}"} for i in ids]
                db.insert([f"doc-{i:06d}" for i in ids], keys, payloads=payloads)
            truth = db.table
        size, made = records * DIM * 4 / GB, iter(range(1_000_000))

        def hydrate(shards: int) -> None:
            table = truth.with_shards(shards)
            shard = Hydrated(table, folder / f"cache-{next(made)}", range(shards), table.newest())
            count = sum(map(len, shard.databases.values()))
            shard.close()
            shutil.rmtree(shard.folder)
            if count != records:
                raise SystemExit(f"{shards} shards hold {count} records; expected {records}")

        calls = {
            "1 shard": lambda: hydrate(1),
            "4 shards": lambda: hydrate(4),
            "SQLite inserts the same rows": lambda: into_sqlite(url, folder / f"{next(made)}.sqlite"),
            "Lance reads the table": lambda: sum(len(batch) for batch in lance.dataset(url).to_batches()),
        }
        seconds = {of: spread([s / size for s in each]) for of, each in in_turn(calls, rounds).items()}
        disk = disk_write_rate(folder, int(size * GB))
        seconds["the disk writes the keys"] = {"median": 1e3 / disk["one_fsync_mb_s"]}
        print(json.dumps(seconds), flush=True)
        return {"records": records, "dim": DIM, "disk": disk, "seconds per GB": seconds}


def into_sqlite(url: str, path: Path) -> None:
    """Insert ids, payloads and checksums of a table into SQLite in one transaction, with the indexes of a shard."""
    connection, row = apsw.Connection(str(path)), 0
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute(format.TABLES)
    with connection:
        for batch in lance.dataset(url).to_batches(columns=["id", "payload"]):
            ids, payloads = batch["id"].to_pylist(), batch["payload"].to_pylist()
            numbers = range(row, row + len(ids))
            rows = zip(numbers, ids, payloads, numbers, (crc32(text.encode()) for text in payloads), strict=True)
            connection.executemany("INSERT INTO records VALUES(?, ?, ?, ?, NULL, ?, NULL, NULL)", rows)
            row += len(ids)
    connection.close()
