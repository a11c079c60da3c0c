"""Random changes of a table by Lance's own API between a cluster's writes: answers are always the table's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("lance", reason="the table of a cluster is Lance's")

import lance
import pyarrow as pa
from lance_tables import DIM, held, rewrite, rows

from softdb import cluster, errors
from softdb.cluster.table_cluster import TableCluster

Random = np.random.Generator
FAULTS = 6  # of a seed
QUICK = 2  # seeds


def keys(random: Random, n: int) -> list[list[float]]:
    found: list[list[float]] = random.normal(size=(n, DIM)).astype(np.float32).tolist()
    return found


def some(db: TableCluster, random: Random, most: int = 6) -> list[str]:
    """Ids that are stored."""
    ids = sorted({*lance.dataset(db.url).to_table(columns=["id"])["id"].to_pylist()})
    return random.choice(ids, min(most, len(ids)), replace=False).tolist() if ids else []


def condition(ids: list[str]) -> str:
    return f"id IN ({', '.join(map(repr, [*ids, 'none']))})"


def append(db: TableCluster, random: Random) -> None:
    ids = [f"theirs {random.integers(10**9)}" for _ in range(5)]
    lance.write_dataset(rows(db, ids, keys(random, 5), payload=["1"] * 5), db.url, mode="append")


def append_bad(db: TableCluster, random: Random) -> None:
    """Rows that no record can be made of, among good ones."""
    ids = [f"bad {random.integers(10**9)}" for _ in range(4)]
    vectors: list[Any] = keys(random, 4)
    vectors[1][2] = float("nan")
    payloads = ["1", "2", "{", "3"]
    lance.write_dataset(rows(db, ids, vectors, payload=payloads), db.url, mode="append")


def update_rows(db: TableCluster, random: Random) -> None:
    lance.dataset(db.url).update({"payload": f"'{random.integers(100)}'"}, where=condition(some(db, random)))


def rename_record(db: TableCluster, random: Random) -> None:
    for name in some(db, random, 1):
        lance.dataset(db.url).update({"id": f"'renamed {random.integers(10**9)}'"}, where=condition([name]))


def merge(db: TableCluster, random: Random) -> None:
    ids = [*some(db, random), f"merged {random.integers(10**9)}"]
    merged = lance.dataset(db.url).merge_insert("id").when_matched_update_all().when_not_matched_insert_all()
    merged.execute(rows(db, ids, keys(random, len(ids))))


def rewrite_column(db: TableCluster, random: Random) -> None:
    ids, column = some(db, random), ["payload", "key", "text"][random.integers(3)]
    values: dict[str, list[Any]] = {
        "payload": ["[3]"] * len(ids),
        "text": ["new"] * len(ids),
        "key": keys(random, len(ids)),
    }
    if ids:
        rewrite(db.url, ids, column, values[column])


def restore(db: TableCluster, random: Random) -> None:
    versions = [one["version"] for one in lance.dataset(db.url).versions()]
    lance.dataset(db.url, version=int(random.choice(versions[2:]))).restore()


def drop(db: TableCluster, random: Random) -> None:
    """A column goes, which is refused by its name, and comes back."""
    version, column = lance.dataset(db.url).version, ["key", "text", "payload"][random.integers(3)]
    lance.dataset(db.url).drop_columns([column])
    with pytest.raises(errors.BadInput, match=f"has no column '{column}'"):
        db.refresh()
    lance.dataset(db.url, version=version).restore()


def replace_column(db: TableCluster, random: Random) -> None:
    """A column goes, and another comes by its name."""
    table = lance.dataset(db.url)
    table.drop_columns(["text"])
    table.add_columns(pa.field("text", pa.string()))
    lance.dataset(db.url).update({"text": f"'anew {random.integers(100)}'"}, where=condition(some(db, random)))


def add_column(db: TableCluster, random: Random) -> None:
    lance.dataset(db.url).add_columns(pa.field(f"extra {random.integers(10**9)}", pa.int32()))


def overwrite(db: TableCluster, random: Random) -> None:
    lance.write_dataset(rows(db, ["a", "r1", "c"], keys(random, 3)), db.url, mode="overwrite")


def compact(db: TableCluster, random: Random) -> None:
    lance.dataset(db.url).optimize.compact_files()


def delete(db: TableCluster, random: Random) -> None:
    lance.dataset(db.url).delete(condition(some(db, random)))


def several(db: TableCluster, random: Random) -> None:
    """Three others before the cluster looks."""
    for fault in random.choice(len(EACH), 3):
        EACH[fault](db, random)


EACH: list[Callable[[TableCluster, Random], None]] = [
    append, append_bad, update_rows, rename_record, merge, rewrite_column, restore, add_column, overwrite, compact,
    delete, drop, replace_column,
]  # fmt: skip


def own_write(db: TableCluster, random: Random, turn: int) -> None:
    ids = [f"own {turn}", *some(db, random, 2)]
    match random.integers(3):
        case 0:
            db.insert([f"own {turn}"], keys(random, 1), payloads=[turn])
        case 1:
            db.upsert(ids, keys(random, len(ids)), payloads=[turn] * len(ids))
        case _:
            db.delete(ids)


def as_the_table(db: TableCluster) -> None:
    """Every record is the table's, but for rows that are named as left out; both ways of comparing say so."""
    out = {name for name, _ in db.left_out}
    table = {name: row for name, row in read(db).items() if name not in out}
    assert held(db) == table
    assert len(db) == len(table)
    if out:
        with pytest.raises(errors.CorruptionError, match="records differ from those in"):
            db.verify()
    else:
        assert db.verify() == len(table)


def read(db: TableCluster) -> dict[Any, Any]:
    """Read as `told` does, where some payloads are no JSON."""
    import json

    found = {}
    for row in lance.dataset(db.url).to_table().to_pylist():
        payload = row["payload"]
        payload = None if payload is None else "damaged" if payload == "{" else json.loads(payload)
        found[row["id"]] = (row["key"], None, payload, row["text"])
    return found


SEEDS = [pytest.param(seed, marks=[] if seed < QUICK else pytest.mark.slow) for seed in range(16)]


@pytest.mark.parametrize("seed", SEEDS)
def test_a_cluster_follows_whatever_other_writers_do(tmp_path: Path, seed: int) -> None:
    random = np.random.default_rng(seed)
    order = [*random.permutation(len(EACH)), *random.permutation(len(EACH))]
    with cluster.create(tmp_path / "t.lance", dim=DIM, shards=2, cache=tmp_path / "cache") as db:
        db.insert([f"r{i}" for i in range(40)], keys(random, 40), payloads=[{"n": i} for i in range(40)])
        for turn in range(FAULTS):
            fault = EACH[order[(seed * FAULTS + turn) % len(order)]] if turn < FAULTS - 1 else several
            fault(db, random)
            if random.random() < 0.5:
                own_write(db, random, turn)
            db.refresh()
            as_the_table(db)
    with cluster.open(tmp_path / "t.lance", cache=tmp_path / "cache") as db:
        as_the_table(db)
