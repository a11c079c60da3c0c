"""The verbs of the store, in memory and on disk alike."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from worlds import holding

import softdb
from softdb.store.append import Batch


@pytest.fixture(params=["memory", "disk"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Path | None:
    return None if request.param == "memory" else tmp_path / "db"


@pytest.fixture
def db(place: Path | None) -> Iterator[softdb.SoftDB]:
    with softdb.open(place, dim=3, value_dim=2) as db:
        yield db


def fill(db: softdb.SoftDB, ids: list[Any], seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    keys = random.standard_normal((len(ids), 3)).astype(np.float32)
    values = random.standard_normal((len(ids), 2)).astype(np.float32)
    db.insert(ids, keys, values, [{"n": i} for i in range(len(ids))])
    return keys, values


def test_get_returns_records_in_the_requested_order(db: softdb.SoftDB) -> None:
    ids: list[int | str] = ["a", 1, "1", -(2**63), 2**63 - 1, "", "nul\0", "emoji 😀", "'; DROP TABLE records; --"]
    keys, values = fill(db, ids)
    order = [3, 0, 8, 2, 1, 7, 6, 5, 4, 4]
    actual = db.get([ids[i] for i in order])
    assert actual.ids == [ids[i] for i in order]
    np.testing.assert_array_equal(actual.keys.numpy(), keys[order])
    assert actual.values is not None
    np.testing.assert_array_equal(actual.values.numpy(), values[order])
    assert actual.payloads == [{"n": i} for i in order]
    assert len(db) == db.count() == len(ids)


def test_a_single_record_is_inserted_and_read(db: softdb.SoftDB) -> None:
    db.insert("solo", [1, 2, 3], [4, 5], {"x": [None, True, 1.5, "é"]})
    record = db["solo"]
    assert record.id == "solo"
    assert record.key.tolist() == [1, 2, 3]
    assert isinstance(record.value, torch.Tensor)
    assert record.value.tolist() == [4, 5]
    assert record.payload == {"x": [None, True, 1.5, "é"]}
    assert "solo" in db
    assert "other" not in db


def test_an_int_and_its_text_are_two_ids(db: softdb.SoftDB) -> None:
    fill(db, [1, "1"])
    assert db.delete(1) == 1
    assert 1 not in db
    assert "1" in db


def test_inputs_may_be_lists_arrays_or_tensors_and_are_not_changed(db: softdb.SoftDB) -> None:
    keys = torch.tensor([[1.0, 2, 3]], dtype=torch.float64, requires_grad=True)
    values = np.array([[4, 5]])
    before = keys.detach().clone(), values.copy()
    db.insert(np.array([10]), keys, values, ({"a": 1},))
    db.insert(torch.tensor([11]), [[1, 2, 3]], [[4.0, 5.0]])
    db.insert(np.array(["x"]), [np.array([1, 2, 3])], [torch.tensor([4.0, 5.0])])
    assert torch.equal(keys.detach(), before[0])
    np.testing.assert_array_equal(values, before[1])
    assert db.get([10, 11, "x"]).keys.tolist() == [[1, 2, 3]] * 3


def test_upsert_replaces_every_column_of_a_record(db: softdb.SoftDB) -> None:
    fill(db, ["a", "b"])
    db.upsert(["b", "c"], [[1, 1, 1], [2, 2, 2]], [[1, 1], [2, 2]], [None, {"new": True}])
    assert len(db) == 3
    assert db["b"].payload is None
    assert db["b"].key.tolist() == [1, 1, 1]
    assert db["c"].payload == {"new": True}
    assert db["a"].payload == {"n": 0}


@pytest.mark.parametrize("parts", ["keys", "values", "payloads", "keys values payloads"])
def test_update_changes_only_the_given_columns(db: softdb.SoftDB, parts: str) -> None:
    keys, values = fill(db, ["a", "b", "c"])
    new: dict[str, Any] = {"keys": [[9, 9, 9]], "values": [[8, 8]], "payloads": [{"z": 1}]}
    db.update(["b"], **{part: new[part] for part in parts.split()})
    record = db["b"]
    assert record.key.tolist() == ([9, 9, 9] if "keys" in parts else keys[1].tolist())
    assert isinstance(record.value, torch.Tensor)
    assert record.value.tolist() == ([8, 8] if "values" in parts else values[1].tolist())
    assert record.payload == ({"z": 1} if "payloads" in parts else {"n": 1})
    assert len(db) == 3


def test_delete_by_id_and_by_filter(db: softdb.SoftDB) -> None:
    fill(db, list(range(10)))
    assert db.delete([3, 3, 99, "3"]) == 1
    assert db.delete(where={"n": {"$gte": 7}}) == 3
    assert db.delete([]) == 0
    assert sorted(i for batch in db.scan() for i in batch.ids if isinstance(i, int)) == [0, 1, 2, 4, 5, 6]
    fill(db, [3])
    assert db[3].payload == {"n": 0}
    assert db.delete(where={}) == 7
    assert len(db) == 0


def test_scan_gives_every_record_once_in_order(db: softdb.SoftDB) -> None:
    keys, _ = fill(db, list(range(25)))
    db.delete([0, 13])
    db.upsert([5], [[0, 0, 0]], [[0, 0]])
    batches = list(db.scan(batch_size=7))
    assert [len(b) for b in batches] == [7, 7, 7, 2]
    ids = [i for b in batches for i in b.ids]
    assert ids == [i for i in range(25) if i not in (0, 5, 13)] + [5]
    stacked = np.concatenate([b.keys.numpy() for b in batches])
    np.testing.assert_array_equal(stacked[:-1], keys[[i for i in ids[:-1] if isinstance(i, int)]])


def test_scan_skips_records_deleted_meanwhile(db: softdb.SoftDB) -> None:
    fill(db, list(range(6)))
    scan = db.scan(batch_size=2)
    assert next(scan).ids == [0, 1]
    db.delete([2, 3, 5])
    assert [b.ids for b in scan] == [[4]]


def test_iterating_gives_the_records_in_the_order_of_scan(db: softdb.SoftDB) -> None:
    assert list(db) == []
    names: list[softdb.check.Id] = [*range(1100), "a", "7"]
    fill(db, names)
    records = list(db)
    assert [record.id for record in records] == names
    for record in (records[0], records[1050], records[-1]):
        same = db[record.id]
        assert torch.equal(record.key, same.key)
        assert torch.equal(record.value, same.value)  # type: ignore[arg-type]
    records_after = iter(db)
    assert next(records_after).id == 0
    db.delete([1, 1099])  # one that was read with the first, one that was not
    fill(db, ["later"])
    assert [record.id for record in records_after] == [*range(1, 1099), "a", "7"]
    with pytest.raises(TypeError, match="not reversible"):
        reversed(db)
    db.close()
    with pytest.raises(softdb.Closed, match="iter: this handle is closed"):
        iter(db)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("values", ["none", "vectors", "labels"])
def test_every_kind_of_column_survives_many_segments(place: Path | None, dtype: Any, values: str) -> None:
    extra: dict[str, Any] = {"none": {}, "vectors": {"value_dim": 5}, "labels": {"num_classes": 7}}[values]
    random = np.random.default_rng(1)
    keys = random.standard_normal((700, 3)).astype(dtype)
    column: Any = {"none": None, "vectors": random.standard_normal((700, 5)), "labels": random.integers(0, 7, 700)}[
        values
    ]
    with softdb.open(place, dim=3, dtype=dtype, **extra) as db:
        for start in (0, 50, 100, 350):
            stop = {0: 50, 50: 100, 100: 350, 350: 700}[start]
            db.insert(list(range(start, stop)), keys[start:stop], None if column is None else column[start:stop])
        assert db.stats().segments > 2
        actual = db.get(list(range(700)))
        np.testing.assert_array_equal(actual.keys.numpy(), keys)
        assert actual.keys.dtype is getattr(torch, dtype)
        if column is None:
            assert actual.values is None
        else:
            assert actual.values is not None
            np.testing.assert_array_equal(
                actual.values.numpy(), column.astype(dtype if values == "vectors" else np.int64)
            )
        assert db.verify() == 700


def test_labels_come_back_as_int() -> None:
    with holding([[1.0]], [2], ids=["a"], num_classes=3) as db:
        assert db["a"].value == 2
        assert isinstance(db["a"].value, int)


def test_a_phone_book_takes_kilobytes(tmp_path: Path) -> None:
    holding(np.ones((1, 384)), ids=["x"], path=tmp_path / "db").close()
    assert sum(f.stat().st_size for f in (tmp_path / "db").rglob("*")) < 200_000


def test_a_generation_is_a_commit(db: softdb.SoftDB) -> None:
    start = db.stats().generation
    fill(db, ["a", "b"])
    db.update("a", payloads=[1])
    db.upsert(["a"], [[1, 2, 3]], [[1, 2]])
    db.delete("b")
    db.delete("b")
    assert db.stats().generation == start + 4
    assert db.stats().dead == 2


def test_threads_share_one_handle(db: softdb.SoftDB) -> None:
    """Writers and readers at once: every batch is seen whole, none is lost."""
    fill(db, [f"start{i}" for i in range(50)])
    errors: list[BaseException] = []

    def write(worker: int) -> None:
        try:
            for i in range(20):
                db.insert([f"{worker}-{i}-{j}" for j in range(5)], np.full((5, 3), i), np.ones((5, 2)))
        except BaseException as error:
            errors.append(error)

    def read() -> None:
        try:
            for _ in range(60):
                assert len(db) % 5 == 0
                assert len(db.get([f"start{i}" for i in range(50)])) == 50
                hits = db.search(np.ones((2, 3)), k=5)
                assert bool(hits.live.all())
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=write, args=(w,)) for w in range(3)] + [
        threading.Thread(target=read) for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert len(db) == 50 + 3 * 20 * 5
    assert db.verify() == len(db)


def test_a_table_that_holds_an_id_twice_is_refused_by_that_id(db: softdb.SoftDB) -> None:
    fill(db, [1, 5])
    store = db.core.store

    def batch(*ids: int) -> Batch:
        column = np.ones((len(ids), 3), np.float32)
        return Batch([*ids], column, column[:, :2].copy(), [None] * len(ids))

    for batches, twice in (([batch(8, 9, 8)], 8), ([batch(2), batch(3, 2)], 2), ([batch(1)], 1), ([batch(5, 7, 7)], 7)):
        with pytest.raises(softdb.DuplicateId, match=f"the table holds id {twice} twice; keep one of the two"):
            store.apply([5], batches, "a table")
        assert sorted(name for part in db.scan(10) for name in part.ids) == [1, 5]
    store.apply([5], [batch(5, 7)], "a table")
    assert len(db) == 3
