"""Compaction and copies keep every record through all interruptions and return disk space."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from worlds import holding, index_report

import softdb
from softdb.store import compact as compaction
from softdb.store import disk, segments
from softdb.store.segments import ColumnFiles
from softdb.store.snapshot import Segment, Snapshot


class Model:
    """The expected records: a dict with the same operations."""

    def __init__(self, db: softdb.SoftDB, seed: int = 0) -> None:
        self.db = db
        self.random = np.random.default_rng(seed)
        self.records: dict[int, tuple[np.ndarray, Any]] = {}
        self.next = 0

    def insert(self, n: int) -> None:
        ids = list(range(self.next, self.next + n))
        keys = self.random.standard_normal((n, self.db.stats().dim)).astype(np.float32)
        payloads = [{"n": i, "group": i % 5} for i in ids]
        self.db.insert(ids, keys, payloads=payloads)
        self.records |= dict(zip(ids, zip(keys, payloads, strict=True), strict=True))
        self.next += n

    def delete(self, share: float) -> None:
        ids = [i for i in self.records if self.random.random() < share]
        assert self.db.delete(ids) == len(ids)
        for i in ids:
            del self.records[i]


def same(db: softdb.SoftDB, records: dict[int, tuple[np.ndarray, Any]]) -> None:
    """The database holds exactly these, and finds them."""
    assert db.verify() == len(db) == len(records)
    found = [(batch.ids, batch.keys.numpy(), batch.payloads) for batch in db.scan()]
    ids = [i for part, _, _ in found for i in part if isinstance(i, int)]
    assert ids == list(records)
    if not ids:
        return
    keys = np.concatenate([part for _, part, _ in found])
    np.testing.assert_array_equal(keys, np.stack([key for key, _ in records.values()]))
    assert [p for _, _, part in found for p in part] == [payload for _, payload in records.values()]
    some = ids[:: max(1, len(ids) // 20)]
    np.testing.assert_array_equal(db.get(some).keys.numpy(), np.stack([records[i][0] for i in some]))
    queries = np.random.default_rng(5).standard_normal((4, keys.shape[1])).astype(np.float32)
    best = np.argsort(-(queries.astype(float) @ keys.T.astype(float)), axis=1, kind="stable")[:, :5]
    hits = db.search(queries, k=min(5, len(ids)), exact=True)
    assert [list(row) for row in hits.ids] == [[ids[j] for j in row] for row in best]
    group = [i for i in ids if i % 5 == 2]
    assert db.count({"group": 2}) == len(group)
    assert {i for row in db.search(queries[:1], k=len(ids), where={"group": 2}).ids for i in row} <= {*group}


@pytest.fixture(params=["memory", "disk"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Path | None:
    return None if request.param == "memory" else tmp_path / "db"


def columns_of(path: Path) -> set[str]:
    return {file.name for file in path.glob("*.npy")}


# -- behaviour ---------------------------------------------------------------------------------------------------------


def test_compaction_removes_only_dead_records(place: Path | None) -> None:
    with softdb.open(place, dim=4) as db:
        model = Model(db)
        for n in (300, 200, 400):
            model.insert(n)
            model.delete(0.3)
        dead = db.stats().dead
        assert dead > 100
        report = db.compact()
        assert (report.removed, report.records, db.stats().dead) == (dead, len(model.records), 0)
        if place is not None:
            assert report.bytes < report.bytes_before
        same(db, model.records)
        model.insert(100)
        model.delete(0.1)
        same(db, model.records)
        assert db.compact().removed > 0
        same(db, model.records)
    if place is not None:
        for mode in ("r", "rw"):
            with softdb.open(place, mode=mode, verify=True) as db:
                same(db, model.records)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("values", ["vectors", "labels"])
def test_answers_and_rows_survive_a_compaction(place: Path | None, dtype: Any, values: str) -> None:
    extra: dict[str, Any] = {"vectors": {"value_dim": 5}, "labels": {"num_classes": 7}}[values]
    random = np.random.default_rng(1)
    column: Any = random.standard_normal((700, 5)) if values == "vectors" else random.integers(0, 7, 700)
    queries = random.standard_normal((6, 3)).astype(np.float32)
    with softdb.open(place, dim=3, dtype=dtype, **extra) as db:
        for low in range(0, 700, 140):
            part = slice(low, low + 140)
            db.insert([f"r{i}" for i in range(700)[part]], random.standard_normal((140, 3)), column[part])
        db.delete([f"r{i}" for i in range(0, 700, 4)])
        before, pooled, stored = db.search(queries, k=20), db.attend(queries), db.get("r77").values
        db.compact()
        after = db.search(queries, k=20)
        assert after.ids == before.ids
        np.testing.assert_array_equal(after.rows, before.rows)
        np.testing.assert_array_equal(after.scores.numpy(), before.scores.numpy())
        np.testing.assert_allclose(db.attend(queries).output.numpy(), pooled.output.numpy(), atol=1e-6)
        again = db.get("r77").values
        assert stored is not None
        assert again is not None
        np.testing.assert_array_equal(again.numpy(), stored.numpy())
        assert db.verify() == len(db) == 525


def test_updates_and_upserts_go_on_after_compaction(place: Path | None) -> None:
    with softdb.open(place, dim=4) as db:
        model = Model(db)
        model.insert(200)
        model.delete(0.5)
        db.compact()
        some = list(model.records)[3]
        db.update([some], keys=[[1, 2, 3, 4]])
        db.upsert([some, "new"], np.ones((2, 4)))
        assert db.stats().dead == 2
        assert db.compact().removed == 2
        assert db[some].key.tolist() == [1] * 4
        assert len(db) == len(model.records) + 1 == db.verify()


def test_an_emptied_database_compacts_and_takes_records_again(place: Path | None) -> None:
    with softdb.open(place, dim=4) as db:
        model = Model(db)
        model.insert(300)
        model.delete(1.1)
        assert db.compact().segments == 0
        assert db.stats().segments == db.stats().dead == 0
        assert not db.search(np.ones((1, 4)), k=3).live.any()
        if place is not None:
            assert not columns_of(place)
        model.insert(70)
        same(db, model.records)
        db.compact()
        same(db, model.records)
    if place is not None:
        with softdb.open(place) as db:
            same(db, model.records)


def test_the_last_rows_may_be_the_ones_that_go(place: Path | None) -> None:
    with softdb.open(place, dim=4) as db:
        model = Model(db)
        model.insert(200)
        db.delete(list(range(150, 200)))
        for i in range(150, 200):
            del model.records[i]
        db.compact()
        model.insert(10)
        hits = db.search(np.ones((1, 4)), k=160)
        assert set(hits.rows[0].tolist()) == {*range(150), *range(200, 210)}
        same(db, model.records)


def test_small_segments_are_merged_once(path: Path) -> None:
    with softdb.open(path, dim=4) as db:
        model = Model(db)
        for _ in range(40):
            model.insert(20)
        assert db.stats().segments > 3
        db.compact()
        assert db.stats().segments <= 2
        before, generation = columns_of(path), db.stats().generation
        assert db.compact().removed == 0
        assert (columns_of(path), db.stats().generation) == (before, generation)
        same(db, model.records)
        assert not list(path.glob("rows-*"))  # no gaps, no rows column


def test_a_large_clean_segment_is_left_alone(path: Path) -> None:
    with softdb.open(path, dim=4) as db:
        model = Model(db)
        model.insert(1000)
        db.compact()
        large = columns_of(path)
        model.insert(200)
        db.delete([1100])
        del model.records[1100]
        db.compact()
        assert large <= columns_of(path)
        same(db, model.records)


def test_groups_keep_to_the_largest_segment(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "MAX_ROWS", 128)
    monkeypatch.setattr(compaction, "MAX_ROWS", 128)
    with softdb.open(path, dim=4) as db:
        model = Model(db)
        model.insert(1500)
        for _ in range(4):
            model.delete(0.3)
            model.insert(100)
            db.compact()
            assert all(len(s) <= 128 for s in db._store.snapshot.segments)
            assert db.stats().segments <= 3 + 2 * len(db) / 128
            same(db, model.records)


@pytest.mark.slow
def test_ten_rounds_stay_near_a_fresh_build(path: Path, tmp_path: Path) -> None:
    with softdb.open(path, dim=32) as db:
        model = Model(db)
        model.insert(12_000)
        db.build_index("ivf", recall=0.95)
        for _ in range(10):
            model.delete(0.5)
            model.insert(12_000 - len(model.records))
            report = db.compact()
        used, count = db.stats().bytes, db.stats().segments
        assert used == report.bytes
        assert count <= 6
        index = db.core.finder.index
        assert index is not None
        assert index.count <= len(db)
        queries = np.random.default_rng(3).standard_normal((100, 32)).astype(np.float32)
        truth, results = db.search(queries, k=10, exact=True), db.search(queries, k=10)
        hits = sum(len(set(a) & set(b)) for a, b in zip(truth.ids, results.ids, strict=True))
        assert bool(results.live.all())
        assert hits / 1000 >= 0.9
        same(db, model.records)
    with softdb.open(tmp_path / "fresh", dim=32) as fresh:
        ids = list(model.records)
        keys = np.stack([key for key, _ in model.records.values()])
        fresh.insert(ids, keys, payloads=[payload for _, payload in model.records.values()])
        fresh.build_index("ivf", recall=0.95)
        fresh.compact()
        assert fresh.search(queries, k=10, exact=True).ids == truth.ids
        assert used <= 1.5 * fresh.stats().bytes


def test_the_catalogue_shrinks_with_the_records(path: Path) -> None:
    with holding(np.ones((5000, 2)), payloads=[{"text": "x" * 200}] * 5000, path=path) as db:
        db.delete(list(range(4900)))
        db.compact()
        assert (path / "catalog.sqlite").stat().st_size < 300_000
        assert (path / "catalog.sqlite-wal").stat().st_size < 300_000
        assert db.verify() == 100


def test_the_index_serves_on_and_after_reopening(path: Path) -> None:
    with softdb.open(path, dim=16) as db:
        model = Model(db)
        model.insert(12_000)
        db.build_index("ivf", recall=0.95)
        model.delete(0.3)
        db.compact()
        assert db.core.finder.index is not None
        assert db.core.finder.index.count == len(db)
    queries = np.random.default_rng(3).standard_normal((50, 16)).astype(np.float32)
    with softdb.open(path) as db:
        assert index_report(db).kind == "ivf"
        assert db.core.finder.index is not None
        truth, results = db.search(queries, k=10, exact=True), db.search(queries, k=10)
        assert sum(len(set(a) & set(b)) for a, b in zip(truth.ids, results.ids, strict=True)) >= 450
        few = db.search(queries, k=10, where={"group": 3})
        assert all(len(row) == 10 and i % 5 == 3 for row in few.ids for i in row)


# -- concurrent changes ------------------------------------------------------------------------------------------------


def test_a_reader_keeps_its_generation_until_it_refreshes(path: Path) -> None:
    with softdb.open(path, dim=4) as writer:
        model = Model(writer)
        model.insert(500)
        model.delete(0.4)
        with softdb.open(path, mode="r") as reader:
            before = reader.search(np.ones((1, 4)), k=50)
            old = columns_of(path)
            writer.compact()
            assert not old & columns_of(path)
            assert reader.stats().dead > 0
            same_hits = reader.search(np.ones((1, 4)), k=50)
            assert same_hits.ids == before.ids
            np.testing.assert_array_equal(reader.get(before.ids[0]).keys, writer.get(before.ids[0]).keys)
            assert reader.refresh() == writer.stats().generation
            assert reader.stats().dead == 0
            same(reader, model.records)


def test_a_segment_number_is_never_used_again(path: Path) -> None:
    with softdb.open(path, dim=4) as writer:
        model = Model(writer)
        model.insert(100)
        with softdb.open(path, mode="r") as reader:
            for _ in range(3):  # the reader has maps of removed segments
                model.delete(1.1)
                writer.compact()
                model.insert(100)
                reader.refresh()
                same(reader, model.records)


@pytest.mark.parametrize("how", ["open", "refresh", "where"])
def test_a_reader_overtaken_while_it_opens_the_files_tries_again(
    path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    with softdb.open(path, dim=4) as writer:
        model = Model(writer)
        model.insert(300)
        reader = softdb.open(path, mode="r") if how != "open" else None
        model.insert(500)
        model.delete(0.4)
        real = ColumnFiles.open
        overtaken: list[bool] = []

        def slow(self: ColumnFiles, number: int, capacity: int) -> Any:
            if not overtaken and self is not writer._store.columns:
                overtaken.append(True)
                writer.compact()
            return real(self, number, capacity)

        monkeypatch.setattr(ColumnFiles, "open", slow)
        if reader is None:
            reader = softdb.open(path, mode="r")
        elif how == "refresh":
            reader.refresh()
        else:
            assert reader.count({"group": 1}) == sum(i % 5 == 1 for i in model.records)
        assert overtaken
        same(reader, model.records)
        reader.close()


@pytest.mark.parametrize("change", ["insert", "delete", "compact"])
def test_changes_during_a_compaction_are_not_lost(path: Path, monkeypatch: pytest.MonkeyPatch, change: str) -> None:
    with softdb.open(path, dim=4) as db:
        model = Model(db)
        model.insert(300)
        model.delete(0.4)
        real = compaction._write
        done: list[bool] = []

        def slow(*args: Any) -> Any:
            written = real(*args)
            if not done:
                done.append(True)
                if change == "insert":
                    model.insert(5)
                elif change == "delete":
                    model.delete(0.2)
                else:
                    db.compact()
            return written

        monkeypatch.setattr(compaction, "_write", slow)
        dead, removed = db.stats().dead, db.compact().removed
        assert removed == (0 if change == "compact" else dead)  # the other compaction has removed them
        same(db, model.records)
        assert (db.stats().dead > 0) == (change == "delete")
        known = {s.number for s in db._store.snapshot.segments}
        assert {int(name.split("-")[1][:8]) for name in columns_of(path)} == known
        db.compact()
        same(db, model.records)


def repeated(work: Callable[[int], None], times: int, errors: list[BaseException]) -> None:
    try:
        for i in range(times):
            work(i)
    except BaseException as error:
        errors.append(error)


def test_threads_write_read_and_compact_at_once(place: Path | None) -> None:
    with holding(np.ones((50, 3)), ids=[f"start{i}" for i in range(50)], path=place) as db:
        errors: list[BaseException] = []
        kept: set[str] = {f"start{i}" for i in range(50)}

        def write(worker: int) -> Callable[[int], None]:
            def one(i: int) -> None:
                ids = [f"{worker}-{i}-{j}" for j in range(8)]
                db.insert(ids, np.full((8, 3), i))
                db.delete(ids[::2])
                kept.update(ids[1::2])

            return one

        def read(_: int) -> None:
            assert len(db.get([f"start{i}" for i in range(50)])) == 50
            assert bool(db.search(np.ones((2, 3)), k=5).live.all())

        def shrink(_: int) -> None:
            db.compact()

        work = [(write(0), 25), (write(1), 25), (read, 40), (shrink, 12), (shrink, 12)]
        threads = [threading.Thread(target=repeated, args=(one, times, errors)) for one, times in work]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not errors
        db.compact()
        assert {i for batch in db.scan() for i in batch.ids} == kept
        assert db.verify() == len(kept)
        assert db.stats().dead == 0


# -- failures ----------------------------------------------------------------------------------------------------------

KILLER = """
import os, shutil, signal, sys
from pathlib import Path
import softdb
from softdb.store import files
from softdb.store.catalog import Catalog

origin, folder = Path(sys.argv[1]), Path(sys.argv[2])

def watched(real):
    def call(*args, **words):
        step()
        found = real(*args, **words)
        step()
        return found
    return call

left = 0
def step():
    global left
    left -= 1
    if left == 0:
        os.kill(os.getpid(), signal.SIGKILL)

for number in range(1, 1000):
    path = folder / f"{number:03}"
    shutil.copytree(origin, path)
    child = os.fork()
    if not child:
        db = softdb.open(path)
        left = number
        for name in ("fsync", "fdatasync", "unlink", "ftruncate"):
            setattr(os, name, watched(getattr(os, name)))
        for name in ("commit", "shrink", "set_tombstones", "put_segment"):
            setattr(Catalog, name, watched(getattr(Catalog, name)))
        db.compact()
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    if not os.WIFSIGNALED(status):
        assert status == 0
        break
print(number)
"""


@pytest.mark.slow
def test_a_kill_at_any_step_leaves_old_or_new_complete(path: Path, tmp_path: Path) -> None:
    with softdb.open(path, dim=4) as db:
        model = Model(db)
        for _ in range(3):
            model.insert(100)
            model.delete(0.3)
    before = columns_of(path)
    copies = tmp_path / "copies"
    copies.mkdir()
    out = subprocess.run([sys.executable, "-c", KILLER, path, copies], capture_output=True, text=True, check=True)
    steps = int(out.stdout)
    assert steps > 20
    outcomes = set()
    for number in range(1, steps + 1):
        copy = copies / f"{number:03}"
        with softdb.open(copy, mode="r") as db:
            same(db, model.records)
        with softdb.open(copy) as db:
            dead = db.stats().dead
            outcomes.add(dead == 0)
            if dead:
                assert columns_of(copy) == before  # orphans are gone
            else:
                assert len(columns_of(copy)) == 2
            assert db.compact().records == db.verify() == len(model.records)
    assert outcomes == {True, False}


def test_damage_is_not_copied_under_a_new_checksum(path: Path) -> None:
    with softdb.open(path, dim=4) as db:
        Model(db).insert(300)
        db.delete(list(range(10)))
    file = min(path.glob("keys-*.npy"))
    with file.open("r+b") as f:
        f.seek(1000)
        byte = f.read(1)[0]
        f.seek(1000)
        f.write(bytes([byte ^ 1]))
    with softdb.open(path) as db:
        with pytest.raises(softdb.CorruptionError, match=rf"compact: {file.name}.*restore"):
            db.compact()
        assert file.exists()
        with pytest.raises(softdb.CorruptionError, match=file.name):
            db.verify()
        db.insert(["more"], np.ones((1, 4)))


@pytest.mark.parametrize("stuck", [False, True])
def test_a_full_disk_leaves_the_handle_writing(path: Path, monkeypatch: pytest.MonkeyPatch, stuck: bool) -> None:
    with softdb.open(path, dim=4) as db:
        model = Model(db)
        model.insert(300)
        model.delete(0.5)
        before = columns_of(path)
        with monkeypatch.context() as patch:

            def full(*_: Any) -> int:
                raise OSError(28, "No space left on device")

            patch.setattr(os, "pwrite", full)
            if stuck:  # the unfinished file cannot be removed, either
                patch.setattr(ColumnFiles, "remove", full)
            with pytest.raises(softdb.WriteFailed, match=r"compact: .*No space left.*no record changed"):
                db.compact()
        assert (columns_of(path) == before) is not stuck
        model.insert(10)
        same(db, model.records)
        db.compact()
        same(db, model.records)


@pytest.mark.parametrize("damage", ["missing", "cut", "first", "bits"])
def test_a_damaged_rows_column_is_named(path: Path, damage: str) -> None:
    with softdb.open(path, dim=4) as db:
        Model(db).insert(300)
        db.delete(list(range(0, 300, 3)))
        db.compact()
    file = next(path.glob("rows-*.npy"))
    np.testing.assert_array_equal(np.load(file), [i for i in range(300) if i % 3])
    if damage == "missing":
        file.unlink()
    elif damage == "cut":
        os.truncate(file, file.stat().st_size - 8)
    else:
        with file.open("r+b") as f:
            f.seek(128 + (0 if damage == "first" else 2 * 8))
            f.write(b"\x02" if damage == "first" else b"\x03")  # still ascending
    with pytest.raises(softdb.CorruptionError, match=file.name):
        softdb.open(path, verify=True)
    if damage != "bits":
        with pytest.raises(softdb.CorruptionError, match=file.name):
            softdb.open(path)


def test_only_a_writer_compacts(path: Path) -> None:
    holding(np.ones((1, 4)), ids=["a"], path=path).close()
    with softdb.open(path, mode="r") as db, pytest.raises(softdb.ReadOnly, match="compact: this handle is read-only"):
        db.compact()
    with pytest.raises(softdb.Closed, match="compact: this handle is closed"):
        db.compact()


# -- copies ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("compacted", [False, True])
def test_a_copy_opens_verifies_and_lives_its_own_life(place: Path | None, tmp_path: Path, compacted: bool) -> None:
    copy = tmp_path / "new" / "copy"
    with softdb.open(place, dim=4) as db:
        model = Model(db)
        model.insert(300)
        model.delete(0.3)
        if compacted:
            db.compact()
            model.insert(20)
        report = db.snapshot(copy)
        assert report.records == len(model.records)
        assert report.generation == db.stats().generation
        assert not [f.name for f in copy.iterdir() if f.suffix not in (".npy", ".sqlite") or "unfinished" in f.name]
        then = dict(model.records)
        model.insert(50)
        with softdb.open(copy, verify=True) as other:
            same(other, then)
            other.delete([next(iter(then))])
            other.insert(["own"], np.ones((1, 4)))
            other.compact()
            assert other.verify() == len(then)
        same(db, model.records)


def test_a_reader_makes_copies_too(path: Path, tmp_path: Path) -> None:
    with softdb.open(path, dim=4) as db:
        model = Model(db)
        model.insert(100)
    with softdb.open(path, mode="r") as reader:
        reader.snapshot(tmp_path / "copy")
    with softdb.open(tmp_path / "copy", mode="r", verify=True) as db:
        same(db, model.records)


def test_copies_beside_writers_hold_complete_batches(path: Path, tmp_path: Path) -> None:
    with softdb.open(path, dim=4) as db, softdb.open(path, mode="r") as reader:
        db.insert([f"0-{j}" for j in range(7)], np.zeros((7, 4)))
        stop = threading.Event()
        errors: list[BaseException] = []

        def write() -> None:
            try:
                batch = 0
                while not stop.is_set():
                    batch += 1
                    db.upsert([f"{batch % 50}-{j}" for j in range(7)], np.full((7, 4), batch))
                    if batch % 20 == 0:
                        db.compact()
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=write)
        thread.start()
        try:
            for number in range(12):
                (db if number % 2 else reader).snapshot(tmp_path / f"copy{number}")
        finally:
            stop.set()
            thread.join()
        assert not errors
    for number in range(12):
        with softdb.open(tmp_path / f"copy{number}", mode="r", verify=True) as copy:
            groups: dict[str, list[float]] = {}
            for batch in copy.scan():
                for one, key in zip(batch.ids, batch.keys, strict=True):
                    groups.setdefault(str(one).split("-")[0], []).append(float(key[0]))
            assert all(len(actual) == 7 and len(set(actual)) == 1 for actual in groups.values())


@pytest.mark.slow
def test_a_copy_keeps_the_index(path: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with softdb.open(path, dim=8) as db:
        Model(db).insert(6000)
        db.build_index("ivf")
        db.snapshot(tmp_path / "with")
        next((path / "index").iterdir()).unlink()
        db.snapshot(tmp_path / "without")
    with softdb.open(tmp_path / "with", mode="r") as db:
        assert index_report(db).kind == "ivf"
    with softdb.open(tmp_path / "without", mode="r", verify=True) as db:
        assert db.stats().index is None
        assert db.search(np.ones((1, 8)), k=3).live.all()
    assert not caplog.records  # no index was left aside: the copy knows that it has none


def test_a_failed_copy_leaves_no_files(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with softdb.open(path, dim=4) as db:
        model = Model(db)
        model.insert(100)
        empty = tmp_path / "empty"
        empty.mkdir()
        for target in (empty, tmp_path / "new"):
            with monkeypatch.context() as patch:

                def full(*_: Any) -> int:
                    raise OSError(28, "No space left on device")

                patch.setattr(os, "pwrite", full)
                with pytest.raises(softdb.WriteFailed, match=r"snapshot: .*No space left.*make room"):
                    db.snapshot(target)
        assert not list(empty.iterdir())
        assert not (tmp_path / "new").exists()
        model.insert(5)
        same(db, model.records)


def test_a_copy_gets_its_name_last(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = disk.link
    seen: list[list[str]] = []

    def link(fresh: Path, path: Path) -> None:
        seen.append(sorted(file.name for file in path.parent.iterdir() if not file.name.startswith(".softdb-")))
        with pytest.raises(softdb.NotADatabase, match="another program's directory"):
            softdb.open(path.parent, mode="r")
        real(fresh, path)

    monkeypatch.setattr(disk, "link", link)
    with softdb.open(path, dim=4) as db:
        Model(db).insert(100)
        db.snapshot(tmp_path / "copy")
    assert seen == [[], ["keys-00000000.npy"]]


def test_where_a_copy_may_not_go(path: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    with holding(np.ones((1, 4)), ids=["a"], path=path) as db:
        for target, why in [
            (tmp_path / "file", "is a file"),
            (tmp_path / "full", "that is not empty"),
            (path, "that is not empty"),
            (path / "inside", "is inside the database"),
            (3, r"path is 3.*expected the path"),
            (None, "path is None.*expected the path"),
        ]:
            with pytest.raises(softdb.BadInput, match=f"snapshot: .*{why}"):
                db.snapshot(target)  # type: ignore[arg-type]
        assert not (path / "inside").exists()
    assert os.listdir(tmp_path / "full") == ["notes.txt"]
    with pytest.raises(softdb.Closed, match="snapshot: this handle is closed"):
        db.snapshot(tmp_path / "copy")


# -- choice and copying of segments ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("segments", "groups"),  # each segment's slots and live rows; at most 128 rows a segment
    [
        ("50/50 60/59", [{0, 1}]),  # 50 is neither half of 128 nor as large as what follows
        ("50/50 100/90", [{1}]),  # 50 may not join, and gains nothing alone
        ("64/64 30/29 50/50", [{1}]),  # half of the largest
        ("20/20 10/9 11/11", [{1}]),  # as large as all that follow
        ("100/98 30/30 60/60", [{0, 1}]),  # 128 rows in all
        ("100/99 30/30 60/60", [{0}]),  # 129
        ("40/0", [{0}]),
        ("40/40", []),
        ("", []),
    ],
)
def test_segments_to_merge_are_chosen_by_size(
    monkeypatch: pytest.MonkeyPatch, segments: str, groups: list[set[int]]
) -> None:
    monkeypatch.setattr(compaction, "MAX_ROWS", 128)
    sizes = [tuple(map(int, part.split("/"))) for part in segments.split()]
    columns = tuple(Segment(i, 1000 * i, None, np.zeros((size, 1)), None) for i, (size, _) in enumerate(sizes))
    live = np.concatenate([np.zeros(0, np.bool_), *(np.arange(size) < count for size, count in sizes)])
    assert compaction._groups(Snapshot.of(1, columns, live)) == groups


def test_a_segment_is_copied_block_by_block(place: Path | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "AT_ONCE", 16)
    keys = np.arange(400.0).reshape(100, 4)
    with holding(keys, keys[:, :2], path=place) as db:
        db.delete(list(range(0, 100, 3)))
        db.compact()
        rest = [i for i in range(100) if i % 3]
        actual = db.get(rest)
        np.testing.assert_array_equal(actual.keys.numpy(), keys[rest])
        assert actual.values is not None
        np.testing.assert_array_equal(actual.values.numpy(), keys[rest, :2])
        assert db.verify() == len(rest)
