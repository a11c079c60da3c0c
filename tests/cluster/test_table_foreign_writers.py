"""Changes of a table by other programs through Lance's own API are followed or refused by name."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

pytest.importorskip("lance", reason="the table of a cluster is Lance's")

import lance
import pyarrow as pa
from lance_tables import DIM, held, rewrite, rows, told

from softdb import cluster, errors
from softdb.cluster.local import LocalTable
from softdb.cluster.placement import shard_of
from softdb.cluster.table_cluster import TableCluster

N = 40
IDS = [f"r{i}" for i in range(N)]
KEYS = np.random.default_rng(0).normal(size=(N, DIM)).astype(np.float32)


@pytest.fixture
def db(tmp_path: Path) -> Iterator[TableCluster]:
    with cluster.create(tmp_path / "t.lance", dim=DIM, shards=2, cache=tmp_path / "cache") as made:
        made.insert(IDS, KEYS, payloads=[{"n": i} for i in range(N)], texts=[f"text {i}" for i in range(N)])
        yield made


def test_a_version_that_was_restored_is_followed(db: TableCluster) -> None:
    version = db.version
    db.delete(IDS[:20])
    lance.dataset(db.url, version=version).restore()
    db.refresh()
    assert held(db) == told(db.table)
    assert len(db) == N
    with pytest.raises(errors.DuplicateId, match="is stored already"):
        db.insert(["r7"], KEYS[:1])
    assert "r7" in db


@pytest.mark.parametrize(("column", "values"), [("payload", ['"new"'] * 3), ("key", np.ones((3, DIM)).tolist())])
def test_a_rewritten_column_is_followed(db: TableCluster, column: str, values: list[Any]) -> None:
    rewrite(db.url, IDS[:3], column, values)
    db.refresh()
    assert held(db) == told(db.table)


@pytest.mark.parametrize("column", ["payload", "text", "key"])
def test_a_column_that_was_dropped_is_named_before_anything_is_written(
    db: TableCluster, tmp_path: Path, column: str
) -> None:
    before, version = held(db), db.version
    lance.dataset(db.url).drop_columns([column])
    for call in (db.refresh, lambda: db.insert(["new"], KEYS[:1]), lambda: cluster.open(db.url, cache=tmp_path / "c")):
        with pytest.raises(errors.BadInput, match=rf"has no column '{column}'.* restore"):
            call()
    assert lance.dataset(db.url).version == version + 1
    assert held(db) == before, "the handle answers at the version that it has seen"
    lance.dataset(db.url, version=version).restore()
    db.insert(["new"], KEYS[:1])
    assert held(db) == told(db.table)


def test_columns_that_are_added_cast_or_renamed_and_named_again_do_no_harm(db: TableCluster) -> None:
    changes: list[Callable[[Any], Any]] = [
        lambda table: table.add_columns(pa.field("extra", pa.int32())),
        lambda table: table.alter_columns({"path": "text", "data_type": pa.large_string()}),
        lambda table: table.alter_columns({"path": "key", "data_type": pa.list_(pa.float64(), DIM)}),
        lambda table: table.alter_columns({"path": "payload", "name": "other"}),
        lambda table: table.alter_columns({"path": "other", "name": "payload"}),
        lambda table: table.drop_columns(["extra"]),
    ]
    for i, change in enumerate(changes):
        change(lance.dataset(db.url))
        if i != 3:
            db.upsert([f"n{i}", "r1"], KEYS[:2], payloads=[i, i], texts=["a", "b"])
            assert held(db) == told(db.table)
    lance.dataset(db.url).add_columns({"count": "1"})
    with pytest.raises(errors.WriteFailed, match=r"could not be written .*'count' is declared as non-nullable"):
        db.upsert(["r1"], KEYS[:1])
    lance.dataset(db.url).drop_columns(["count", "text"])
    lance.dataset(db.url).add_columns({"text": "CAST('their own' AS STRING)"})
    with pytest.raises(errors.WriteFailed, match=r"could not be written .*'text' is declared as non-nullable"):
        db.upsert(["r1"], KEYS[:1])
    db.refresh()
    assert db["r1"].text == "their own"


def test_a_table_that_was_written_over_is_followed(db: TableCluster) -> None:
    lance.write_dataset(rows(db, ["other", "r1"], KEYS[:2].tolist()), db.url, mode="overwrite")
    db.refresh()
    assert held(db) == told(db.table)


BAD: dict[str, tuple[Callable[[TableCluster], pa.Table], str]] = {
    "nan": (lambda db: rows(db, ["bad"], [[float("nan")] * DIM]), "key"),
    "payload": (lambda db: rows(db, ["bad"], [[1.0] * DIM], payload=["{"]), "'payload'.*not JSON"),
    "twice": (lambda db: rows(db, ["r3"], [[1.0] * DIM]), "twice"),
}


@pytest.mark.parametrize("kind", BAD)
def test_an_invalid_row_of_another_writer_is_left_out_and_named(db: TableCluster, tmp_path: Path, kind: str) -> None:
    make, reason = BAD[kind]
    bad = make(db)
    (name,) = bad["id"].to_pylist()
    before = held(db)
    lance.write_dataset(bad, db.url, mode="append")
    db.insert(["new"], KEYS[:1])
    after = {**before, "new": (KEYS[0].tolist(), None, None, None)}
    db.refresh()
    with cluster.open(db.url, cache=tmp_path / "other") as second, cluster.open(db.url, "r", partial=True) as third:
        for handle in (db, second, third):
            assert held(handle) == after
            ((left, why),) = handle.left_out
            assert left == name
            assert re.search(reason, why)
            with pytest.raises(errors.CorruptionError, match=rf"'{name}'.*{reason}"):
                handle.verify()
            assert len(handle.search(KEYS[:1], k=3).ids[0]) == 3
    db.upsert([name], KEYS[5:6]) if kind != "twice" else lance.dataset(db.url).delete("id = 'r3'")
    db.refresh()
    assert db.left_out == ()
    assert db.verify() == len(db) == len(told(db.table))
    assert held(db) == told(db.table)


@contextlib.contextmanager
def tampered(db: TableCluster, name: str) -> Iterator[Any]:
    """The database of the shard that a record lies in; afterwards the shard serves what was written there."""
    hydrated = cast(LocalTable, db.caller.transport).hydrated
    shard = next(shard for shard, database in hydrated.databases.items() if name in database)
    yield hydrated.databases[shard]
    hydrated.serve(shard)


def test_a_shard_with_more_or_fewer_records_than_the_table_is_rebuilt(db: TableCluster) -> None:
    changes: list[Callable[[Any], Any]] = [
        lambda shard: shard.delete(["r1"]),
        lambda shard: shard.insert(["no"], KEYS[:1]),
    ]
    for change in changes:
        with tampered(db, "r1") as shard:
            change(shard)
        db.refresh()
        assert held(db) == told(db.table)


def test_a_shard_with_other_records_than_the_table_is_named_and_rebuilt(db: TableCluster) -> None:
    added = next(f"no row {i}" for i in range(99) if shard_of([f"no row {i}"], 2) == shard_of(["r1"], 2))
    with tampered(db, "r1") as shard:
        other = next(name for name in IDS[2:] if name in shard)
        shard.delete(["r1"])
        shard.insert([added], KEYS[:1])
        shard.update([other], payloads=["changed"])
    expected = rf"3 records differ from .* shard \d, id .*'{other}': its payload differs.*1 shards are being rebuilt"
    with pytest.raises(errors.CorruptionError, match=expected) as error:
        db.verify()
    assert "id 'r1': it is missing" in str(error.value)
    assert f"id '{added}': the table has no such row" in str(error.value)
    assert db.verify() == N
    assert held(db) == told(db.table)
