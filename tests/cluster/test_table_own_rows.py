"""Reading a shard's own rows one by one or by a scan gives the same; invalid rows are named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("lance", reason="the table of a cluster is Lance's")

import lance
import pyarrow as pa
from lance_tables import batch, contents, made, told

from softdb import cluster, errors
from softdb.cluster import hydrate, placement
from softdb.cluster.hydrate import Hydrated
from softdb.cluster.placement import RowWindow, shard_of
from softdb.tables.rows import Fields


@pytest.mark.parametrize("taken", [True, False])
@pytest.mark.parametrize("mine", [[0, 1, 2, 3], [2], [1, 3]])
def test_both_ways_bring_the_same_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, taken: bool, mine: list[int]
) -> None:
    """From several files with deletions, in several windows and batches."""
    truth = made(str(tmp_path / "t.lance"))
    for i in range(3):
        truth.write(truth.table(batch(truth, [f"{i} {j}" for j in range(80)], seed=i)), upsert=False)
    truth.delete([f"{i} {j}" for i in range(3) for j in range(0, 80, 7)])
    truth.write(truth.table(batch(truth, ["bare"], keyed=False)), upsert=False)
    monkeypatch.setattr(placement, "WINDOW", 50)
    monkeypatch.setattr(hydrate, "BYTES", 1)
    monkeypatch.setattr(hydrate, "ROWS", 8)
    monkeypatch.setattr(RowWindow, "taken", lambda *_: taken)
    followed = Hydrated(truth, tmp_path / "cache", mine, truth.newest())
    expected = {one: row for one, row in told(truth).items() if shard_of([one], 4)[0] in mine}
    assert contents(followed) == expected
    followed.close()


@pytest.mark.parametrize("taken", [True, False])
@pytest.mark.parametrize("mine", [[0, 1, 2, 3], [2]])
def test_every_row_is_reported_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, taken: bool, mine: list[int]
) -> None:
    """Also of the rows that other shards have, and where a directory is gone on with."""
    truth = made(str(tmp_path / "t.lance"))
    truth.write(truth.table(batch(truth, [f"r{i}" for i in range(120)])), upsert=False)
    monkeypatch.setattr(placement, "WINDOW", 50)
    monkeypatch.setattr(hydrate, "BYTES", 1)
    monkeypatch.setattr(hydrate, "ROWS", 8)
    monkeypatch.setattr(RowWindow, "taken", lambda *_: taken)
    reports = list[tuple[str, int, int]]()

    def stopping(*what: Any) -> None:
        if what[1] > 70:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Hydrated(truth, tmp_path / "cache", mine, truth.newest(), stopping)
    followed = Hydrated(truth, tmp_path / "cache", mine, truth.newest(), lambda *what: reports.append(what))
    counts = [done for _, done, _ in reports]
    assert {(what, whole) for what, _, whole in reports} == {("shards", 120)}
    assert counts == sorted(counts)
    assert counts[-1] == 120
    assert counts[0] > 0 or mine != [2], "what was seen before counts"
    reports.clear()
    truth.write(truth.table(batch(truth, ["new"])), upsert=False)
    followed.follow(truth.newest())
    followed.remake(mine[0])
    followed.close()
    assert reports == [], "only while it is opened"


def test_rows_that_were_seen_are_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    truth = made(str(tmp_path / "t.lance"))
    truth.write(truth.table(batch(truth, [f"r{i}" for i in range(120)])), upsert=False)
    monkeypatch.setattr(placement, "WINDOW", 50)
    results = [(one.low, len(one.parts)) for one in placement.windows(truth, truth.now(), 30)]
    assert results == [(30, 50), (80, 40)]


def test_rows_without_a_valid_id_lie_in_one_shard_also_after_doubling() -> None:
    for shards in (2, 4, 8):
        parts = shard_of([None, "a", 2**63, None, -(2**63) - 1, 7], shards)
        assert {*parts[[0, 2, 3, 4]]} == {*shard_of([0], shards)}
        assert parts[[1, 5]].tolist() == shard_of(["a", 7], shards).tolist()


def test_the_cheaper_way_of_reading_is_taken() -> None:
    n, width = 1 << 20, 1024
    scattered = np.arange(n) % 64
    for parts, mine, local, taken in (
        (scattered, 1, True, True),  # one row of 64, in a folder
        (scattered, 1, False, False),  # a request of an object store takes longer than to read on
        (scattered, 32, True, False),
        (np.arange(n) % 17, 1, True, False),  # a request for each, in which sixteen could be read
        (np.arange(n) // (n // 64), 1, False, True),  # side by side
        (np.arange(n) // (n // 64), 16, False, True),
        (np.arange(n) // (n // 64), 48, False, False),
        (scattered, 0, False, True),
    ):
        window = RowWindow(0, parts)
        places = np.flatnonzero(parts < mine)
        assert window.taken(places, width, local) == taken, (mine, local)


def test_rows_that_lie_together_are_read_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of eight hosts reads about an eighth, and the ids."""
    n, dim = 20_000, 128
    ids = np.array([f"r{i}" for i in range(n)])
    ids = ids[np.argsort(shard_of(ids.tolist(), 8), kind="stable")]
    keys = np.random.default_rng(0).normal(size=(n, dim)).astype(np.float32)
    column = pa.FixedSizeListArray.from_arrays(pa.array(keys.reshape(-1)), dim)
    url = str(tmp_path / "t.lance")
    lance.write_dataset(pa.table({"id": ids, "vector": column}), url)
    truth = made_of(url, dim, shards=8)
    dataset = truth.now()
    monkeypatch.setattr(type(truth), "at", lambda *_: dataset)
    dataset.io_stats_incremental()
    followed = Hydrated(truth, tmp_path / "cache", [3], truth.newest())
    read = dataset.io_stats_incremental().read_bytes
    assert len(followed.databases[3]) == (shard_of(ids.tolist(), 8) == 3).sum()
    assert read < (keys.nbytes + 8 * n) / 5
    followed.close()


def made_of(url: str, dim: int, shards: int) -> Any:
    """A table that softdb has not made."""
    from softdb.lance_table.foreign import served

    return served(url, None, Fields(key="vector"), "dot", None, shards, 1)


@pytest.mark.parametrize("shards", [1, 4])
@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        ([np.nan, 1.0], "keys hold NaN or infinity"),
        ([None, 1.0], "column 'vector' holds null; expected only numbers"),
        ([1e300, 1.0], "keys, cast to float32, hold NaN or infinity"),
    ],
)
def test_an_invalid_row_is_named_and_all_others_are_read(
    tmp_path: Path, shards: int, wrong: list[Any], match: str
) -> None:
    vectors: list[Any] = [[float(i), 1.0] for i in range(100)]
    vectors[57] = wrong
    lance.write_dataset(pa.table({"id": [f"r{i}" for i in range(100)], "vector": vectors}), tmp_path / "t.lance")
    for _ in range(2):  # made, and opened again
        with cluster.serve(tmp_path / "t.lance", shards=shards, cache=tmp_path / "cache") as db:
            ((name, reason),) = db.left_out
            assert (name, reason[: len(match)], len(db), "r57" in db) == ("r57", match, 99, False)


def test_numbers_beyond_64_bits_are_no_ids(tmp_path: Path) -> None:
    ids = pa.array([1, 2**63], pa.uint64())
    lance.write_dataset(pa.table({"id": ids, "vector": [[1.0], [2.0]]}), tmp_path / "t.lance")
    with cluster.serve(tmp_path / "t.lance", cache=tmp_path / "cache") as db:
        assert (len(db), [name for name, _ in db.left_out]) == (1, [2**63])
        with pytest.raises(errors.CorruptionError, match=r"id 9223372036854775808: .*beyond 64 bits|64"):
            db.verify()
