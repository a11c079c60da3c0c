"""Readers of a table go on: shards serve the versions that readers hold, and build new directories beside the old."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("lance", reason="the table of a cluster is Lance's")

import lance
import pyarrow as pa
from lance_tables import DIM, held, made, told

import softdb
from softdb import cluster, errors
from softdb.cluster import apart, hydrate
from softdb.cluster.hydrate import Hydrated
from softdb.cluster.local import HydratedShard, Local
from softdb.cluster.table_cluster import TableCluster
from softdb.cluster.table_core import TableCore
from softdb.database import versions
from softdb.index import build
from softdb.lance_table import changes
from softdb.lance_table.truth import Truth

N, SHARDS = 60, 2
IDS = [f"r{i}" for i in range(N)]
KEYS = np.random.default_rng(0).normal(size=(N, DIM)).astype(np.float32)
QUERIES = torch.from_numpy(np.random.default_rng(1).normal(size=(3, DIM)))


class Shared:
    """Directories that several handles read, as an actor's shards are."""

    def __init__(self, truth: Truth, folder: Path) -> None:
        self.truth, self.hydrated = truth, Hydrated(truth, folder, range(SHARDS))

        self.shards = [HydratedShard(self.hydrated, shard) for shard in range(SHARDS)]

    def handle(self) -> TableCluster:
        return TableCluster(TableCore(lambda _: Local(self.shards), self.truth, 30.0, False, "rw", None))

    def restart(self) -> None:
        """Close the directories and open them again, as a restarted actor does. Handles do not notice."""
        self.hydrated.close()
        self.hydrated = Hydrated(self.truth, self.hydrated.folder, range(SHARDS))
        for shard in self.shards:
            shard.hydrated = self.hydrated

    @property
    def earlier(self) -> set[str]:
        """Names of directories of earlier versions."""
        return {path.name for path in self.hydrated.folder.glob("*.at-*")}

    @property
    def versions(self) -> set[int]:
        return {version for own in self.hydrated.versions.values() for version in own.numbers}


@pytest.fixture
def shared(tmp_path: Path) -> Iterator[Shared]:
    shared = Shared(made(str(tmp_path / "t.lance"), SHARDS), tmp_path / "cache")
    with shared.handle() as db:
        db.insert(IDS, KEYS, payloads=[{"n": i % 3} for i in range(N)])
    yield shared
    shared.hydrated.close()


def commits(shared: Shared, count: int) -> None:
    """Upsert and delete through another handle, one commit after the other."""
    with shared.handle() as writer:
        for i in range(count):
            writer.upsert([IDS[i % N], f"new {i}"], KEYS[:2] + i, payloads=[{"n": 7}, {"n": 0}])
            writer.delete([IDS[(i + 7) % N]])


def one_database(db: Any) -> softdb.SoftDB:
    """The records that a handle sees, in one ordinary database."""
    copy = softdb.open(None, dim=DIM)
    for part in db.scan():
        copy.insert(part.ids, part.keys, payloads=part.payloads)
    return copy


def test_a_reader_answers_at_its_version_while_others_commit(shared: Shared) -> None:
    reader = shared.handle()
    version, expected = reader.version, one_database(reader)
    asked = QUERIES.clone().requires_grad_()
    pooled, hits, scan = reader.attend(asked), reader.search(QUERIES, 4), reader.scan(batch_size=7)
    first = next(scan)
    commits(shared, 30)
    assert reader.version == version
    assert hits.payloads == expected.search(QUERIES, 4).payloads
    assert sorted([*first.ids, *(name for part in scan for name in part.ids)]) == sorted(IDS)
    for question in (
        lambda db: db.search(QUERIES, 5, where={"n": 1}).ids,
        lambda db: db.attend(QUERIES, where={"n": 2}).n_pooled.tolist(),
        lambda db: (len(db), [name in db for name in [*IDS, "new 3"]]),
        lambda db: db.get(IDS).payloads,
        lambda db: db.count_within(QUERIES, 0.5).value.tolist(),
    ):  # type: Callable[[Any], Any]
        assert question(reader) == question(expected)
    twin = QUERIES.clone().requires_grad_()
    expected.attend(twin).output.sum().backward()  # type: ignore[no-untyped-call]
    pooled.output.sum().backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(asked.grad, twin.grad)
    torch.testing.assert_close(pooled.output, expected.attend(QUERIES).output)
    reader.refresh()
    assert held(reader) == told(shared.truth)
    reader.close()


def test_versions_go_when_no_answer_needs_them(shared: Shared, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = shared.handle()
    version, pooled = reader.version, reader.attend(QUERIES.clone().requires_grad_())
    commits(shared, 10)
    assert version in shared.versions
    reader.refresh()
    assert version in shared.versions, "a backward is pending"
    pooled.output.sum().backward()  # type: ignore[no-untyped-call]
    del pooled
    gc.collect()
    for _ in range(2):  # the first tells the shards what was still held
        reader.refresh()
    assert version not in shared.versions
    assert len(shared.versions) == versions.RECENT
    stale = reader.search(QUERIES)
    commits(shared, 10)
    monkeypatch.setattr(versions, "LEASE", -1.0)
    commits(shared, 1)
    lance.dataset(shared.truth.url).cleanup_old_versions(timedelta(0))
    with pytest.raises(errors.StaleRead, match=r"version \d+ of .* was cleaned up"):
        _ = stale.payloads
    with pytest.raises(errors.StaleRead, match="was cleaned up"):
        reader.attend(QUERIES)
    reader.refresh()
    assert held(reader) == told(shared.truth)
    reader.close()


def test_only_so_many_versions_are_served(shared: Shared, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "MOST", 12)
    readers = []
    for _ in range(15):
        readers.append(shared.handle())
        commits(shared, 1)
    assert len(shared.versions) == 12
    assert readers[0].version not in shared.versions
    readers[-1].attend(QUERIES)


@pytest.mark.parametrize("loss", ["restart", "full disk"])
def test_a_version_that_a_host_has_lost_is_built_from_the_table(shared: Shared, loss: str) -> None:
    reader, other = shared.handle(), shared.handle()
    version, expected = reader.version, one_database(reader)
    asked = QUERIES.clone().requires_grad_()
    hits, pooled = reader.search(QUERIES, 4), reader.attend(asked)
    commits(shared, 3)
    if loss == "restart":
        shared.restart()
    else:
        shared.hydrated._unfit = dict.fromkeys(range(SHARDS), shared.hydrated._reopen)
        commits(shared, 1)
    assert version not in shared.versions
    other.refresh()
    assert held(other) == told(shared.truth)
    assert hits.payloads == expected.search(QUERIES, 4).payloads
    assert held(reader) == held(expected)
    pooled.output.sum().backward()  # type: ignore[no-untyped-call]
    twin = QUERIES.clone().requires_grad_()
    expected.attend(twin).output.sum().backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(asked.grad, twin.grad)
    assert reader.version == version
    assert shared.earlier == {f"{shard}-of-2.at-{version}" for shard in range(SHARDS)}
    commits(shared, versions.RECENT)
    other.refresh()
    assert held(other) == told(shared.truth)
    assert held(reader) == held(expected)
    reader.close()
    commits(shared, 1)
    assert not shared.earlier, "nobody needs the version"


def test_directories_of_earlier_versions_go_when_a_killed_host_is_started_again(shared: Shared) -> None:
    reader = shared.handle()
    commits(shared, versions.RECENT)
    shared.restart()
    expected = held(reader)
    assert len(shared.earlier) == SHARDS
    shared.restart()
    assert not shared.earlier
    assert held(reader) == expected


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let few records have an index."""
    monkeypatch.setattr(build, "LEAST", 10)


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("how", ["large", "retyped"])
def test_a_rebuilt_shard_keeps_its_index_and_its_readers(
    shared: Shared, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """Changes that are large or unknown are followed beside the directories that answer."""
    reader, writer = shared.handle(), shared.handle()
    writer.build_index("hnsw", recall=0.5)
    reader.refresh()
    version, expected, answers = reader.version, one_database(reader), list[Any]()

    class Watched(Hydrated):
        def _apply(self, *arguments: Any) -> None:
            super()._apply(*arguments)
            answers.append(reader.attend(QUERIES).output)

    monkeypatch.setattr(hydrate, "Hydrated", Watched)
    if how == "large":
        with monkeypatch.context() as patch:
            patch.setattr(changes, "LARGEST", 1)
            writer.upsert([*IDS[:30], "new"], KEYS[:31] + 1)
    else:
        shared.truth.delete([*IDS[:5]])
        lance.dataset(shared.truth.url).alter_columns({"path": "text", "data_type": pa.large_string()})
        writer.refresh()
    assert len(answers) >= 2 * SHARDS, "the shards were built while a reader asked"
    for answer in answers:
        torch.testing.assert_close(answer, expected.attend(QUERIES).output)
    assert {path.name for path in shared.hydrated.folder.glob("*-of-*")} == {
        f"{shard}-of-2{n}" for shard in range(SHARDS) for n in ("", ".1")
    }
    assert held(writer) == told(shared.truth)
    assert {known.finder for known in writer.caller.known.values()} == {"hnsw"}
    assert reader.version == version
    assert held(reader) == held(expected)
    for _ in range(versions.RECENT + 1):
        writer.insert(None, KEYS[:1])
    for _ in range(2):
        reader.refresh()
    assert {path.name for path in shared.hydrated.folder.glob("*-of-*")} == {"0-of-2.1", "1-of-2.1"}


def test_an_interrupted_rebuild_is_done_again(shared: Shared, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(changes, "LARGEST", 1)
    shared.truth.delete([*IDS[:3]])
    with monkeypatch.context() as patch:
        patch.setattr(Hydrated, "_swap", killed)
        with pytest.raises(KeyboardInterrupt):
            shared.hydrated.follow(shared.truth.newest())
    assert [*(shared.hydrated.folder / "beside-0").glob("*-of-2")]
    shared.hydrated.close()
    again = Hydrated(shared.truth, tmp_path / "cache", range(SHARDS), shared.truth.newest())
    assert sum(map(len, again.databases.values())) == N - 3
    again.close()


@pytest.mark.parametrize("builder", [apart.PROGRAM, "raise SystemExit(3)"])
def test_many_records_are_built_by_another_process(
    shared: Shared, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, builder: str
) -> None:
    """If the process does not work, this process builds them."""
    monkeypatch.setattr(apart, "LEAST", 0)
    monkeypatch.setattr(apart, "PROGRAM", builder)
    shared.hydrated.remake(1)
    assert shared.hydrated.path(1).name == "1-of-2.1"
    assert ("built in this process" in caplog.text) is ("raise" in builder)
    with shared.handle() as reader:
        assert held(reader) == told(shared.truth)


def test_an_error_of_the_process_that_builds_is_raised(shared: Shared, tmp_path: Path) -> None:
    with pytest.raises(errors.StaleRead, match=r"version 99 .* cannot be opened"):
        apart.built(Hydrated, (shared.truth, tmp_path / "new", [0], 99, None, {}))


@pytest.mark.usefixtures("few")
def test_shards_made_anew_have_the_index_of_the_table(tmp_path: Path) -> None:
    with cluster.create(tmp_path / "t.lance", dim=DIM, shards=SHARDS, cache=tmp_path / "a") as db:
        db.insert(IDS, KEYS)
        db.build_index("hnsw", recall=0.5, queries=KEYS[:5])
    with cluster.open(tmp_path / "t.lance", cache=tmp_path / "b") as db:
        assert {known.finder for known in db.caller.known.values()} == {"hnsw"}
        assert held(db) == told(db.table)


def test_a_handle_moves_by_itself(tmp_path: Path) -> None:
    with cluster.create(tmp_path / "t.lance", dim=DIM, cache=tmp_path / "a") as writer:
        with cluster.open(tmp_path / "t.lance", "r", cache=tmp_path / "b", refresh=0.05) as reader:
            writer.insert(IDS, KEYS)
            deadline = time.monotonic() + 60
            while len(reader) < N and time.monotonic() < deadline:
                time.sleep(0.02)
            assert len(reader) == N
        with pytest.raises(errors.BadInput, match="refresh is -1"):
            cluster.open(tmp_path / "t.lance", refresh=-1)


def test_dead_rows_are_removed_from_directories(shared: Shared, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hydrate, "MOST_DEAD", 10)
    with shared.handle() as reader, shared.handle() as writer:
        expected = held(reader)
        for i in range(8):
            writer.upsert(IDS, KEYS + i)
        for db in shared.hydrated.databases.values():
            snapshot = db.core.store.snapshot
            assert snapshot.size <= 3 * snapshot.count
        assert held(reader) == expected
        assert held(writer) == told(shared.truth)
