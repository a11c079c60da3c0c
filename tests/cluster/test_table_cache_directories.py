"""Directories below a cluster's cache belong to the table or are rebuilt."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("lance", reason="the table of a cluster is Lance's")

import lance
import pyarrow as pa
from lance_tables import DIM, batch, contents, hydrated, made, told

import softdb
from softdb import cluster
from softdb.cluster import hydrate
from softdb.cluster.hydrate import Hydrated
from softdb.cluster.local import HydratedShard
from softdb.cluster.placement import shard_of
from softdb.cluster.shard import CallVerb, directory_of
from softdb.lance_table.truth import Truth


@pytest.fixture
def truth(tmp_path: Path) -> Truth:
    truth = made(str(tmp_path / "t.lance"), shards=2)
    truth.write(truth.table(batch(truth, [f"r{i}" for i in range(50)])), upsert=False)
    return truth


def test_foreign_files_in_a_cache_directory_are_removed(truth: Truth, tmp_path: Path) -> None:
    with softdb.open(tmp_path / "cache" / "0-of-2", dim=DIM) as stranger:
        stranger.insert(["stranger"], np.ones((1, DIM)))
    followed = hydrated(truth, tmp_path / "cache")
    assert contents(followed) == told(truth)
    followed.close()


def test_rows_mean_the_same_records_when_a_directory_is_opened_again(truth: Truth, tmp_path: Path) -> None:
    """The same checks when it continues with the table."""
    numbers = []
    for i in range(2):
        truth.write(truth.table(batch(truth, [f"more {i} {j}" for j in range(8)])), upsert=False)
        followed = hydrated(truth, tmp_path / "cache")
        numbers.append([directory_of(followed.tagged(shard)) for shard in followed.own_shards])
        followed.close()
    assert numbers[0] == numbers[1]
    assert len({*numbers[0]}) == 2, "each directory has its own"


def test_swapped_directories_are_rebuilt(truth: Truth, tmp_path: Path) -> None:
    hydrated(truth, tmp_path / "cache").close()
    first, second, aside = (tmp_path / "cache" / name for name in ("0-of-2", "1-of-2", "aside"))
    for one, other in ((first, aside), (second, first), (aside, second)):
        one.rename(other)
    followed = hydrated(truth, tmp_path / "cache")
    assert contents(followed) == told(truth)
    for shard, db in followed.databases.items():
        assert {*shard_of([name for part in db.scan() for name in part.ids], 2)} == {shard}
    followed.close()


def test_other_columns_of_one_table_have_directories_of_their_own(tmp_path: Path) -> None:
    url, vectors = str(tmp_path / "t.lance"), pa.array([[1.0, 0.0], [0.0, 1.0]])
    lance.write_dataset(
        pa.table({"id": ["a", "b"], "left": vectors, "right": pa.array(vectors[::-1].to_pylist())}), url
    )
    for keys, nearest in (("left", "a"), ("right", "b"), ("left", "a")):
        with cluster.serve(url, keys=keys, cache=tmp_path / "cache") as db:
            assert db.search([[1.0, 0.0]], k=1).ids == [[nearest]]


def test_old_shards_are_removed_only_after_the_growth_is_final(truth: Truth, tmp_path: Path) -> None:
    hydrated(truth, tmp_path / "cache").close()
    older, other = (tmp_path / "cache" / name for name in ("0-of-2", "notes-of-mine"))
    other.mkdir()
    hydrated(truth.with_shards(4), tmp_path / "cache").close()
    assert older.exists(), "the table says two yet"
    truth.put_shards(4)
    hydrated(truth.with_shards(4), tmp_path / "cache").close()
    assert not older.exists()
    assert other.exists()


def test_tables_of_others_are_answered_by_any_number_of_shards(tmp_path: Path) -> None:
    url = str(tmp_path / "t.lance")
    lance.write_dataset(pa.table({"id": ["a", "b"], "vector": pa.array([[1.0, 0.0], [0.0, 1.0]])}), url)
    for shards in (2, 4):
        cluster.serve(url, shards=shards, cache=tmp_path / "cache").close()
    assert [*(tmp_path / "cache").rglob("0-of-2")], "nobody said that the other number is no more asked for"


def test_a_directory_is_rebuilt_beside_the_one_that_answers(truth: Truth, tmp_path: Path) -> None:
    followed = hydrated(truth, tmp_path / "cache")
    old, during = followed.databases[0], list[int]()
    shard, version = HydratedShard(followed, 0), followed.version(0)
    count = shard.answer(CallVerb(version, "count", {}))

    class Watched(Hydrated):
        def _fill(self, *arguments: Any) -> None:
            super()._fill(*arguments)
            during.append(shard.answer(CallVerb(version, "count", {})))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hydrate, "Hydrated", Watched)
        followed.remake(0)
    assert during == [count] == [shard.answer(CallVerb(version, "count", {}))]
    assert followed.path(0).name == "0-of-2.1"
    assert old.closed
    assert not Path(str(old.path)).exists()
    assert contents(followed) == told(truth)
    followed.close()
    again = hydrated(truth, tmp_path / "cache")
    assert again.databases[0].path == followed.path(0)
    assert contents(again) == told(truth)
    again.close()


def test_directories_of_another_number_of_shards_stay(truth: Truth, tmp_path: Path) -> None:
    """Of 16 shards as well, whose name begins as that of 1 shard does."""
    folder = tmp_path / "cache"
    hydrated(truth.with_shards(16), folder).close()
    (folder / "0-of-16").rename(folder / "0-of-16.1")
    Hydrated(truth.with_shards(1), folder, [0], truth.newest()).close()
    assert {path.name for path in folder.glob("*-of-16*")} == {"0-of-16.1", *(f"{i}-of-16" for i in range(1, 16))}
