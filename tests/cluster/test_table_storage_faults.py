"""Faults of a table's storage: unreachable, slow, losing replies, or lacking a file.

Errors are typed and name the address and the cause. What was acknowledged is there afterwards, what was not is there
whole or not at all, and the same handle goes on once the storage is back.
"""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

pytest.importorskip("lance", reason="the table of a cluster is Lance's")

from object_stores import Way, way_to_bucket

from softdb import cluster
from softdb.cluster.shard import ROW_BITS
from softdb.errors import (
    BadInput,
    CorruptionError,
    NotADatabase,
    ShardUnavailable,
    SoftDBError,
    StaleRead,
    StorageUnavailable,
    WriteFailed,
)
from softdb.lance_table.storage import failure

pytestmark = pytest.mark.filterwarnings("ignore:datetime.datetime.utcnow:DeprecationWarning")

DIM, N = 4, 30
LOST, HALF = "cluster: acknowledged records lost", "cluster: half-applied writes seen"
IMPATIENT = {"client_max_retries": "0"}  # of Lance's client, so that tests need not wait for its retries


def keys(turn: int, count: int = N) -> np.ndarray:
    return np.full((count, DIM), turn, np.float32)


class Place(NamedTuple):
    """A table in a bucket, and the way there."""

    url: str
    options: dict[str, str]
    way: Way
    cache: Path

    def opened(self, mode: Any = "rw", cache: str = "", **words: Any) -> cluster.TableCluster:
        return cluster.open(self.url, mode, cache=f"{self.cache}{cache}", storage_options=self.options, **words)

    def request(self, what: str) -> bytes:
        """The beginning of a request, such as "PUT data"."""
        method, folder = what.split()
        return f"{method} /{self.url.removeprefix('s3://')}/{folder}".encode()


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    """N records of turn 0."""
    with way_to_bucket() as (address, options, way):
        found = Place(f"{address}/t.lance", {**options, **IMPATIENT}, way, tmp_path / "cache")
        with cluster.create(found.url, dim=DIM, shards=2, storage_options=options, cache=found.cache) as db:
            db.insert([f"r{i}" for i in range(N)], keys(0), payloads=[0] * N)
        yield found


def holds(db: cluster.TableCluster, turns: set[int], tally: Counter[str]) -> int:
    """Assert that all records are of one turn, among these, and return it."""
    for name in (LOST, HALF):
        tally[name] += 0
    batches = list(db.scan())
    written = Counter(payload for part in batches for payload in part.payloads)
    of_keys = Counter(int(key) for part in batches for key in part.keys[:, 0].tolist())
    tally[HALF] += len(written) > 1 or written != of_keys
    assert written == of_keys
    assert len(written) == 1, "a write is there by half"
    tally[LOST] += sum(written.values()) < N
    assert (sum(written.values()), len(db)) == (N, N)
    (turn,) = written
    tally[LOST] += turn not in turns
    assert turn in turns
    return int(turn)


def write(db: cluster.TableCluster, turn: int) -> None:
    db.upsert([f"r{i}" for i in range(N)], keys(turn), payloads=[turn] * N)


VERBS: dict[str, Callable[[cluster.TableCluster, Path], object]] = {
    "refresh": lambda db, _: db.refresh(),
    "insert": lambda db, _: db.insert(["new"], keys(1, 1)),
    "upsert": lambda db, _: write(db, 1),
    "update": lambda db, _: db.update(["r1"], payloads=[1]),
    "delete": lambda db, _: db.delete(["r1"]),
    "compact": lambda db, _: db.compact(),
    "grow": lambda db, _: db.grow(),
    "snapshot": lambda db, path: db.snapshot(path / "copy"),
}


@pytest.mark.parametrize(
    "verb", [verb if verb in ("refresh", "upsert") else pytest.param(verb, marks=pytest.mark.slow) for verb in VERBS]
)
def test_an_unreachable_store_is_named_and_the_handle_stays_usable(
    place: Place, verb: str, tally: Counter[str]
) -> None:
    with place.opened() as db:
        place.way.close()
        with pytest.raises(
            StorageUnavailable, match=rf"{verb}: {place.url} cannot be reached \(.*{place.way.port}"
        ) as e:
            VERBS[verb](db, place.cache)
        assert "create()" not in str(e.value)
        holds(db, {0}, tally)  # the shards answer on
        place.way.open()
        holds(db, {0}, tally)
        write(db, 2)
        holds(db, {2}, tally)
    tally["cluster: storage faults"] += 1


def test_an_unreachable_store_is_named_when_a_table_is_opened_or_created(place: Place) -> None:
    place.way.close()
    with pytest.raises(StorageUnavailable, match=rf"open: {place.url} cannot be reached \(.*{place.way.port}"):
        place.opened(cache="-new")
    with pytest.raises(WriteFailed, match=rf"create: {place.url}2 cannot be made \(.*{place.way.port}"):
        cluster.create(f"{place.url}2", dim=DIM, storage_options=place.options)
    place.way.open()
    with place.opened(cache="-new") as db:
        assert len(db) == N


FAILS = ["PUT data", "PUT _transactions", "PUT _versions", "GET data", "HEAD _versions", "GET _versions"]


@pytest.mark.parametrize("closes", [False, True], ids=["once", "from then on"])
@pytest.mark.parametrize("reaches", [False, True], ids=["refused", "reply lost"])
@pytest.mark.parametrize("request_", FAILS)
@pytest.mark.few(4)
def test_a_write_whose_request_fails(
    place: Place, request_: str, reaches: bool, closes: bool, tally: Counter[str]
) -> None:
    """A write is acknowledged or raises; it is complete or absent; and no shard is rebuilt for it."""
    with place.opened() as db:
        before = directories(db)
        place.way.fail(place.request(request_), reaches, closes)
        acknowledged, turns = False, {0, 1}
        try:
            write(db, 1)
            acknowledged, turns = True, {1}
        except (StorageUnavailable, StaleRead, ShardUnavailable, WriteFailed) as error:
            written = "the write is committed" in str(error)
            turns = {1} if written else turns
        place.way.fail(b"", False, False)
        place.way.open()
        db.refresh()
        turn = holds(db, turns, tally)
        assert not acknowledged or db.version == db.table.newest()
        assert directories(db) == before, "a shard was made anew"
        write(db, 2)
        holds(db, {2}, tally)
    with place.opened("r", "-elsewhere") as db:
        holds(db, {2}, tally)
    tally["cluster: storage faults"] += place.way.failed
    tally[f"cluster: storage faults: written, turn {turn}"] += 1


def directories(db: cluster.TableCluster, *ids: str) -> set[int]:
    """Numbers of the shards with these records, or of all; a rebuilt shard has a new number."""
    rows: Any = db.core.located([*ids] or [f"r{i}" for i in range(N)])
    return set((rows >> ROW_BITS).tolist())


@pytest.mark.parametrize("reaches", [False, True], ids=["refused", "reply lost"])
def test_a_failed_build_of_shards_is_resumed(place: Place, reaches: bool, tally: Counter[str]) -> None:
    place.way.fail(place.request("GET data"), reaches, closes=True)
    with pytest.raises((StorageUnavailable, ShardUnavailable), match=r"cannot be reached|did not answer"):
        place.opened("r", "-elsewhere")
    assert place.way.failed
    place.way.open()
    with place.opened("r", "-elsewhere") as db:
        holds(db, {0}, tally)
    tally["cluster: storage faults"] += 1


def test_a_slow_store_makes_shards_late_and_answers_right(place: Place, tally: Counter[str]) -> None:
    """A shard that follows too slowly is named within the timeout and is back later."""
    with place.opened("r", timeout=0.5) as reader, place.opened(cache="-writer") as db:
        write(db, 1)
        place.way.delay = 0.3
        with pytest.raises(ShardUnavailable, match=r"shards did not answer \(waited .* s of at most 0.5 s"):
            reader.refresh()
        place.way.delay = 0.0
        reader.caller.timeout = 60.0
        assert reader.refresh() == db.version
        holds(reader, {1}, tally)
        place.way.delay = 0.05
        write(db, 2)
        holds(db, {2}, tally)
    tally["cluster: storage faults"] += 1


# -- files of a table -------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A table of two data files and a file of deletions."""
    with cluster.create(tmp_path / "t.lance", dim=DIM, shards=2, cache=tmp_path / "cache") as db:
        db.insert([f"r{i}" for i in range(N)], keys(0), payloads=[0] * N)
        db.insert(["more"], keys(0, 1), payloads=[0])
        db.delete(["r1"])
    return tmp_path / "t.lance"


def refusal(call: Callable[[], object]) -> str:
    """The message of the error that a write is refused with; empty where it is not."""
    try:
        call()
    except (CorruptionError, WriteFailed) as error:
        return str(error)
    return ""


@pytest.mark.parametrize("kind", ["data", "_deletions"])
@pytest.mark.parametrize("how", ["missing", "emptied", "overwritten"])
def test_a_lost_or_damaged_file_of_a_table_is_named(folder: Path, kind: str, how: str) -> None:
    lost = next((folder / kind).iterdir())
    size = lost.stat().st_size
    if how == "missing":
        lost.unlink()
    else:
        lost.write_bytes(b"" if how == "emptied" else b"z" * size)
    match = rf"lacks its file \S*{lost.name}; bring" if how == "missing" else f"{folder.name} cannot be read .*; bring"
    with pytest.raises(CorruptionError, match=rf"open: .*{match} the file back"):
        cluster.open(folder, cache=folder.parent / "other")
    with cluster.open(folder, cache=folder.parent / "cache") as db:  # whose records it has copied
        assert len(db) == N
        with pytest.raises(CorruptionError, match=rf"snapshot: .*{match}"):
            db.snapshot(folder.parent / "copy")
        messages = [refusal(lambda: VERBS[verb](db, folder)) for verb in ("upsert", "update", "delete")]  # noqa: B023
        assert not any("create()" in message for message in messages)
        assert how != "missing" or all(lost.name in message for message in messages if message)
    if how == "missing":
        with pytest.raises(CorruptionError, match=rf"serve: .*{match}"):
            cluster.serve(folder, keys="key")


@pytest.mark.parametrize(
    ("message", "error"),
    [
        ("Generic S3 error: Error performing GET http://h/b - HTTP error: error sending request", StorageUnavailable),
        ("External error: Not found: t.lance/data/x.lance, /build/x.rs:1:2", CorruptionError),
        ("Dataset at path t.lance/_versions/2.manifest was not found: Not found: t.lance/_versions/2.manifest", None),
    ],
    ids=["out of reach", "a file is missing", "the version was cleaned up"],
)
def test_shards_are_rebuilt_only_if_a_version_is_lost(
    folder: Path, message: str, error: type[SoftDBError] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They may be the last copies of what the table lacks."""

    def fails(*_: Any) -> Any:
        raise OSError(message)

    with cluster.open(folder, "r", cache=folder.parent / "reader") as reader:
        before = directories(reader, "r2")
        with cluster.open(folder, cache=folder.parent / "cache") as db:
            db.upsert(["r2"], keys(1, 1), payloads=[1])
        with monkeypatch.context() as patch:
            patch.setattr(import_module("softdb.lance_table.changes"), "_dead", fails)
            if error is None:
                reader.refresh()
            else:
                with pytest.raises(error, match="refresh: "):
                    reader.refresh()
                assert reader["r2"].payload == 0
        reader.refresh()
        assert reader["r2"].payload == 1
        assert (directories(reader, "r2") == before) == (error is not None)


@pytest.mark.parametrize("what", ["nothing", "an empty folder", "a file", "no versions"])
def test_a_place_without_a_table_names_the_call_that_creates_one(folder: Path, what: str) -> None:
    place = folder.parent / "other"
    if what == "an empty folder":
        place.mkdir()
    elif what == "a file":
        place.write_text("x")
    elif what == "no versions":
        shutil.copytree(folder, place, ignore=shutil.ignore_patterns("_versions"))
    with pytest.raises(NotADatabase, match=r"open: .* holds no table that can be read .*create\(\) makes a table"):
        cluster.open(place)


@pytest.mark.parametrize(
    ("url", "message", "error", "match"),
    [
        ("foo://b/t", "Invalid user input: No object store provider found for scheme", BadInput, "cannot be opened"),
        ("s3://b/t", "LanceError(IO): Generic S3 error: Failed to resolve region for b", StorageUnavailable, "region"),
        (
            "/",
            "LanceError(IO): Generic LocalFileSystem error: Permission denied (os error 13)",
            StorageUnavailable,
            "13",
        ),
        (
            "s3://b/t",
            "Error performing GET http://h/b - 404\n<Code>NoBucket</Code>",
            StorageUnavailable,
            "404 NoBucket",
        ),
        ("s3://b/t", "External error: Object at location t/data/x.lance not found: 404", CorruptionError, "t/data/x"),
    ],
)
def test_errors_of_lance_become_errors_of_softdb(url: str, message: str, error: type[SoftDBError], match: str) -> None:
    actual = failure(url, OSError(f"{message}, /build/x.rs:1:2"))
    assert type(actual) is error
    assert match in str(actual)
    assert ".rs:" not in str(actual)
