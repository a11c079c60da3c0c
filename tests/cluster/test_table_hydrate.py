"""Directories built from a table always hold one complete version."""

from __future__ import annotations

import contextlib
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("lance", reason="the table of a cluster is Lance's")

from lance_tables import batch, contents, hydrated, made, told

from softdb import errors
from softdb.answers import Records
from softdb.cluster import hydrate
from softdb.cluster.database_shard import DatabaseShard
from softdb.cluster.hydrate import Hydrated
from softdb.cluster.local import HydratedShard
from softdb.cluster.placement import power_of_two, shard_of
from softdb.cluster.shard import NEWEST, CallVerb, Describe, Message, Refresh, ScanRows
from softdb.lance_table.truth import Truth, stored
from softdb.store.store import Store


@pytest.fixture
def truth(tmp_path: Path) -> Truth:
    truth = made(str(tmp_path / "t.lance"))
    truth.write(truth.table(batch(truth, [f"r{i}" for i in range(50)])), upsert=False)
    truth.write(truth.table(batch(truth, ["bare"], keyed=False)), upsert=False)
    return truth


def test_where_a_record_lies_is_fixed() -> None:
    """These numbers are those of every cluster that was ever made."""
    ids: list[int | str] = [0, -1, 2**62, "", "0", "é", "a"]
    assert shard_of(ids, 1 << 16).tolist() == FIXED
    assert (shard_of(ids, 8) % 4 == shard_of(ids, 4)).all()  # so that P doubles by splitting
    for wrong, near in ((3, "2 or 4"), (12, "8 or 16")):
        with pytest.raises(errors.BadInput, match=f"expected a power of two, such as {near}"):
            power_of_two(wrong)


FIXED = [52655, 11296, 43499, 0, 35985, 61256, 23439]


@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_directories_follow_whatever_is_done(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Deleted, replaced, deleted and inserted again, compacted, at every step or after several."""
    folder = tmp_path_factory.mktemp("follow")
    truth = made(str(folder / "t.lance"), shards=2)
    followed, names = hydrated(truth, folder / "cache"), st.lists(st.sampled_from("abcdef"), min_size=1, unique=True)
    for step in range(data.draw(st.integers(1, 6))):
        ids: list[int | str] = [*data.draw(names)]
        match data.draw(st.sampled_from(["upsert", "delete", "update", "bare", "compact"])):
            case "upsert":
                truth.write(truth.table(batch(truth, ids, seed=step)), upsert=True)
            case "bare":
                truth.write(truth.table(batch(truth, ids, seed=step, keyed=False)), upsert=True)
            case "delete":
                truth.delete(ids)
            case "compact":
                truth.compact()
            case _:
                there = [one for one in ids if one in told(truth)]
                if there:
                    truth.update(there, {"text": [f"step {step}"] * len(there)})
        if data.draw(st.booleans()):
            followed.follow(truth.newest())
            assert contents(followed) == told(truth)
    followed.follow(truth.newest())
    assert contents(followed) == told(truth)
    followed.close()


def test_directories_follow_a_table_that_was_compacted_twice(tmp_path: Path) -> None:
    """The second compaction rewrites the index of the ids without a rebuild of the shards."""
    truth = made(str(tmp_path / "t.lance"), shards=2)
    followed = hydrated(truth, tmp_path / "cache")
    for seed in range(2):
        truth.write(truth.table(batch(truth, ["a", "b"], seed=seed)), upsert=True)
        truth.write(truth.table(batch(truth, ["a"], seed=seed + 10)), upsert=True)
        truth.compact()
        assert truth.identity(truth.now()) == truth.identity(truth.at(truth.newest()))
        folders = {shard: followed.databases[shard] for shard in followed.own_shards}
        followed.follow(truth.newest())
        assert contents(followed) == told(truth)
        assert folders == {shard: followed.databases[shard] for shard in followed.own_shards}
    followed.close()


def ruined(path: Path, how: str) -> None:
    match how:
        case "lost":
            shutil.rmtree(path)
        case "catalogue":
            (path / "catalog.sqlite").write_bytes(b"no catalogue" * 999)
        case "columns":
            for one in path.glob("**/*.npy"):
                one.unlink()
        case "another":
            shutil.rmtree(path)
            import softdb

            softdb.open(path, dim=3).close()


@pytest.mark.parametrize("how", ["lost", "catalogue", "columns", "another"])
def test_lost_and_damaged_files_are_rebuilt(truth: Truth, tmp_path: Path, how: str) -> None:
    hydrated(truth, tmp_path / "cache").close()
    ruined(tmp_path / "cache" / "2-of-4", how)
    again = hydrated(truth, tmp_path / "cache")
    assert contents(again) == told(truth)
    again.close()


def test_directories_that_another_hash_placed_are_rebuilt(truth: Truth, tmp_path: Path) -> None:
    """Softdb 0.1.0 before its release placed records by BLAKE2b, and did not note the hash."""
    followed = hydrated(truth, tmp_path / "cache")
    made, db, origin = followed._making[1], followed.databases[1], followed.origin(1)
    assert origin is not None
    db.core.store.apply([next(db.scan()).ids[0]], [], replace(origin, place=[1, 4]).text)
    followed.close()
    again = hydrated(truth, tmp_path / "cache")
    assert contents(again) == told(truth)
    assert again._making[1] != made
    again.close()


@pytest.mark.parametrize("how", ["lost", "columns"])
def test_a_directory_removed_while_served_is_rebuilt(truth: Truth, tmp_path: Path, how: str) -> None:
    followed = hydrated(truth, tmp_path / "cache")
    ruined(followed.path(1), how)
    truth.write(truth.table(batch(truth, [f"n{i}" for i in range(20)])), upsert=True)
    for _ in range(2):  # the first question may only notice the loss
        try:
            followed.follow(truth.newest())
            break
        except errors.WriteFailed:
            continue
    assert contents(followed) == told(truth)
    followed.close()


@pytest.mark.parametrize("step", range(1, 9))
def test_a_hydration_stopped_at_any_step_is_resumed(
    truth: Truth, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    """Making a directory is resumed where it was; following is one transaction."""
    monkeypatch.setattr(hydrate, "BYTES", 1)
    monkeypatch.setattr(hydrate, "ROWS", 16)
    apply, count = Store.apply, 0

    def cut(self: Store, *args: Any) -> None:
        nonlocal count
        count += 1
        if count >= step:
            raise InterruptedError
        apply(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(Store, "apply", cut)
        with pytest.raises(InterruptedError):
            hydrated(truth, tmp_path / "cache")
    seen: list[int] = []

    def counted(self: Store, *args: Any) -> None:
        seen.append(1)
        apply(self, *args)

    monkeypatch.setattr(Store, "apply", counted)
    again = hydrated(truth, tmp_path / "cache")
    assert contents(again) == told(truth)
    assert len(seen) <= 4 * 6 - (step - 1)  # 5 batches and an end for each of 4 shards, less the finished ones
    again.close()


def test_a_change_is_visible_completely_or_not_at_all(
    truth: Truth, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While every record is replaced again and again, what a shard answers at one version is always the same."""
    ids: list[int | str] = [f"r{i}" for i in range(50)]
    followed, stop = hydrated(truth, tmp_path / "cache"), threading.Event()
    shard, seen = HydratedShard(followed, 1), dict[int, set[tuple[int, ...]]]()
    mine, apply = [one for one, place in zip(ids, shard_of(ids, 4), strict=True) if place == 1], Store.apply

    def slow(self: Store, *args: Any) -> None:
        apply(self, *args)
        time.sleep(0.1)  # the records are new, the version is not yet

    def read() -> None:
        while not stop.is_set():
            version = shard.answer(Describe(NEWEST)).version
            with contextlib.suppress(errors.StaleRead):
                actual: Records = shard.answer(CallVerb(version, "get", {"ids": mine}))
                seen.setdefault(version, set()).add(tuple(payload["seed"] for payload in actual.payloads))

    monkeypatch.setattr(Store, "apply", slow)
    reader = threading.Thread(target=read)
    reader.start()
    for seed in range(1, 6):
        truth.write(truth.table(batch(truth, ids, seed=seed)), upsert=True)
        shard.answer(Refresh(truth.newest()))
        version, until = shard.answer(Describe(NEWEST)).version, time.monotonic() + 60
        while version not in seen and reader.is_alive():
            assert time.monotonic() < until, f"nobody reads version {version}"
            time.sleep(0.001)
    stop.set()
    reader.join(60)
    followed.close()
    assert len(seen) >= 5
    assert all(len({*only}) == len(answers) == 1 for answers in seen.values() for only in answers), seen


def test_intact_directories_are_reused(truth: Truth, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hydrated(truth, tmp_path / "cache").close()
    rows: list[int] = []
    apply = Store.apply

    def counted(self: Store, removed: list[Any], batches: Any, source: str) -> None:
        rows.append(len(removed) + sum(len(one.ids) for one in batches))
        apply(self, removed, batches, source)

    monkeypatch.setattr(Store, "apply", counted)
    hydrated(truth, tmp_path / "cache").close()
    assert rows == []
    truth.write(truth.table(batch(truth, ["r0", "new"], seed=1)), upsert=True)
    hydrated(truth, tmp_path / "cache").close()
    assert sum(rows) == 3  # one goes, two come


def test_a_shard_at_another_version_or_rebuilt_refuses(truth: Truth, tmp_path: Path) -> None:
    followed = hydrated(truth, tmp_path / "cache")
    shard = HydratedShard(followed, 0)
    before = shard.answer(Describe(NEWEST)).version
    truth.delete([followed.databases[0].get()[0].id])
    assert shard.answer(Refresh(NEWEST)).version == before + 1
    assert shard.answer(CallVerb(before, "count", {})) == shard.answer(CallVerb(before + 1, "count", {})) + 1
    with pytest.raises(errors.StaleRead, match=r"shard 0 no longer serves version 2; refresh\(\)"):
        shard.answer(CallVerb(2, "count", {}))
    followed.remake(0)
    assert shard.answer(CallVerb(before + 1, "count", {})) == shard.answer(Describe(NEWEST)).keyed
    with pytest.raises(errors.StaleRead, match=r"shard 0 was rebuilt, or a replica answers; refresh\(\)"):
        shard.answer(ScanRows(before + 1, -1, 10))
    followed.close()


def test_directories_that_were_removed_in_use_are_no_error(
    truth: Truth, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    followed = hydrated(truth, tmp_path / "cache")
    truth.delete(["r0"])
    followed.follow(truth.newest())  # not yet on disk
    shutil.rmtree(tmp_path / "cache")
    followed.close()
    assert "was not flushed" in caplog.text
    assert all(db.closed for db in followed.databases.values())
    again = hydrated(truth, tmp_path / "cache")
    assert contents(again) == told(truth)
    again.close()


def test_a_cleaned_up_version_is_rebuilt(truth: Truth, tmp_path: Path) -> None:
    followed = hydrated(truth, tmp_path / "cache")
    version = truth.newest()
    truth.delete(["r1"])
    truth.now().cleanup_old_versions(older_than=timedelta(0))
    with pytest.raises(errors.StaleRead, match="was cleaned up"):
        Hydrated(truth, tmp_path / "other", range(4), version)
    followed.follow(truth.newest())
    assert contents(followed) == told(truth)
    followed.close()


def test_a_table_recreated_at_the_same_path_is_recognised(truth: Truth, tmp_path: Path) -> None:
    version = truth.newest()
    hydrated(truth, tmp_path / "cache").close()
    shutil.rmtree(truth.url)
    other = made(truth.url)
    while other.newest() < version:
        other.write(other.table(batch(other, [f"other {other.newest()}"], seed=9)), upsert=False)
    again = hydrated(stored(truth.url, None), tmp_path / "cache")
    assert contents(again) == told(other)
    again.close()


def test_two_handles_of_one_folder_are_refused(truth: Truth, tmp_path: Path) -> None:
    first = hydrated(truth, tmp_path / "cache")
    with pytest.raises(errors.DatabaseLocked, match="is being written by process"):
        hydrated(truth, tmp_path / "cache")
    first.close()


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        (lambda ids: [*ids, ids[0]], ("a", "the id comes twice; keep one of the rows")),
        (lambda ids: [*ids, None], (None, "column 'id' is None; an id is a str or an int")),
    ],
)
def test_rows_with_ambiguous_ids_are_left_out(
    tmp_path: Path, wrong: Callable[[list[Any]], list[Any]], error: tuple[str | None, str]
) -> None:
    import lance
    import pyarrow as pa

    from softdb.check import schema
    from softdb.tables.rows import Fields

    ids = wrong(["a", "b"])
    keys = pa.FixedSizeListArray.from_arrays(pa.array(np.ones(2 * len(ids), np.float32)), 2)
    lance.write_dataset(pa.table({"id": ids, "v": keys}), tmp_path / "t.lance")
    made_of = schema(2, None, None, None, None, None)
    truth = Truth(str(tmp_path / "t.lance"), None, Fields(key="v"), False, made_of, 1, 1)
    followed = hydrated(truth, tmp_path / "cache")
    origin = followed.origin(0)
    assert origin is not None
    assert (len(followed.databases[0]), origin.left_out, origin.identity) == (2, [error], truth.identity(truth.now()))
    followed.close()


def test_more_rows_than_a_few_that_are_no_records_are_refused(
    truth: Truth, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hydrate, "MOST_LEFT_OUT", 2)
    bad = truth.table(batch(truth, [f"bad {i}" for i in range(40)])).to_pylist()
    table = truth.now().schema.empty_table().from_pylist([{**row, "payload": "{"} for row in bad], truth.now().schema)
    followed = hydrated(truth, tmp_path / "cache")
    version = truth.newest()
    truth.now().insert(table)
    with pytest.raises(errors.BadInput, match=r"more than 2 rows of a shard .*, .* id 'bad .*'payload'.*correct"):
        followed.follow(truth.newest())
    assert {followed.version(shard) for shard in followed.own_shards} == {version}
    followed.close()


def test_a_question_that_meets_damage_is_repeated_on_a_rebuilt_shard(
    truth: Truth, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The question is repeated once; damage in the rebuilt shard is raised."""
    followed = hydrated(truth, tmp_path / "cache")
    shard, seen, real = HydratedShard(followed, 1), list[int](), DatabaseShard.answer
    count, times = len(followed.databases[1]), 1

    def damaged(own: DatabaseShard, ask: Message) -> Any:
        seen.append(own.version())
        if len(seen) <= times:
            raise errors.CorruptionError("a page is damaged")
        return real(own, ask)

    monkeypatch.setattr(DatabaseShard, "answer", damaged)
    ask = CallVerb(followed.version(1), "count", {})
    assert shard.answer(ask) == count
    assert len({*seen}) == 2
    assert contents(followed) == told(truth)
    seen.clear()
    times = 9
    with pytest.raises(errors.CorruptionError, match="a page is damaged"):
        shard.answer(ask)
    assert (len({*seen}), followed.tagged(1)) == (2, seen[-1])
    followed.close()


def test_a_shard_is_rebuilt_at_the_version_of_the_others(truth: Truth, tmp_path: Path) -> None:
    """A cleaned-up version is replaced by the newest."""
    followed = hydrated(truth, tmp_path / "cache")
    before, version = contents(followed), truth.newest()
    truth.write(truth.table(batch(truth, [f"n{i}" for i in range(20)])), upsert=True)
    followed.remake(1)
    assert ({followed.version(shard) for shard in range(4)}, contents(followed)) == ({version}, before)
    truth.now().cleanup_old_versions(older_than=timedelta(0))
    followed.remake(1)
    assert followed.version(1) == truth.newest() > followed.version(0) == version
    followed.close()


def test_a_failed_opening_releases_its_folder(truth: Truth, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(errors.StaleRead, match=r"version 99 .* cannot be opened") as told_of:
        Hydrated(truth, tmp_path / "cache", range(4), 99)
    real = Hydrated._open

    def refused(self: Hydrated, shard: int) -> None:
        if shard == 3:
            raise errors.WriteFailed("no room")
        real(self, shard)

    with monkeypatch.context() as patch:
        patch.setattr(Hydrated, "_open", refused)
        with pytest.raises(errors.WriteFailed, match="no room") as refused_of:
            Hydrated(truth, tmp_path / "cache", range(4))
    again = hydrated(truth, tmp_path / "cache")
    assert contents(again) == told(truth)
    again.close()
    assert told_of.tb is not None  # so long their frames were kept
    assert refused_of.tb is not None
