"""Actors on Ray give the same answers through kills of any of them."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import threading
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("lance", reason="the table of a cluster is Lance's")
pytest.importorskip("ray", reason="actors are Ray's")

import ray
from contracts.cluster import ClusterContract
from ray_kills import RayKills

import softdb
from softdb import cluster, errors
from softdb.cluster.actors import Actors
from softdb.cluster.database_shard import DatabaseShard
from softdb.cluster.hosts import LIGHT, THREADS, Host
from softdb.cluster.placement import shard_of
from softdb.cluster.shard import Message, Transport

pytestmark = pytest.mark.filterwarnings("ignore")  # Ray has warnings of its own, also in threads

N, DIM = 200, 8
TIMEOUT = 60.0  # of what must succeed: an actor that was killed comes back in some seconds, on a slow machine in more


@pytest.fixture(scope="module")
def connected() -> Iterator[str]:
    """Ray's address."""
    for again in (True, False):  # Ray gives its own processes 30 s to start, which a busy machine may exceed once
        try:
            found: Any = ray.init(
                num_cpus=4, include_dashboard=False, log_to_driver=False, object_store_memory=80_000_000
            )
            break
        except Exception as error:
            ray.shutdown()
            if not again:
                pytest.skip(f"Ray does not start here: {error}")
    yield found.address_info["address"]
    ray.shutdown()


@pytest.fixture(scope="class")
def holders(connected: str) -> Iterator[list[Any]]:
    """Two actors that hold the databases given to them."""

    class Shard(DatabaseShard):
        def work(self, ask: Message) -> float:
            return float(LIGHT * (ask.numbers % 2))  # some answers in turn, others in threads

    class Folders(Host):  # a class of a function is pickled whole: actors need not find the tests
        def hold(self, folders: dict[int, str], shards: int) -> None:
            for one in (self._shards or {}).values():
                one.db.close()  # type: ignore[attr-defined]
            opened = {shard: softdb.open(folder, mode="r") for shard, folder in folders.items()}
            self._shards = {shard: Shard(db, shard, shards) for shard, db in opened.items()}  # type: ignore[misc]

    actor: Any = ray.remote(num_cpus=0)(Folders)
    found = [actor.options(max_concurrency=4).remote(None, "", range(host, 8, 2)) for host in range(2)]
    yield found
    for one in found:
        ray.kill(one)


class TestActors(ClusterContract):
    """The contract, by Ray: two hosts, each with half of the shards."""

    SHARDS = (1, 4)
    holders: list[Any]

    @pytest.fixture(autouse=True)
    def held(self, holders: list[Any]) -> None:
        self.holders = holders

    @contextlib.contextmanager
    def transport(self, folders: list[Path]) -> Iterator[Transport]:
        shards, hosts = len(folders), self.holders[: len(folders)]
        for host, one in enumerate(hosts):
            mine = {shard: str(folders[shard]) for shard in range(host, shards, len(hosts))}
            ray.get(one.hold.remote(mine, shards), timeout=TIMEOUT)
        yield Actors([[host] for host in hosts], shards)


class Own:
    """A score of a module that actors cannot import."""

    def __call__(self, queries: Any, keys: Any) -> Any:
        return queries @ keys.mT


KEYS = np.random.default_rng(0).normal(size=(N, DIM)).astype(np.float32)


def opened(url: str, timeout: float = TIMEOUT, **words: Any) -> cluster.TableCluster:
    return cluster.open(url, on="ray", timeout=timeout, cache=Path(url).parent / "cache", **words)


def pids(db: cluster.TableCluster) -> list[int]:
    """Of the actors of the first host, by replica."""
    transport: Any = db.caller.transport
    asked = [one.__ray_call__.remote(lambda _: os.getpid()) for one in transport.layout.hosts[0]]
    processes: list[int] = ray.get(asked, timeout=TIMEOUT)
    return processes


def counts_held_up(host: Any) -> None:
    """Let an actor's counts wait until `let_go`."""
    from softdb.cluster import hosts

    gate, answered = threading.Event(), hosts._answered
    host.gate, host.counts = gate, 0

    def late(shard: Any, ask: Any) -> Any:
        if getattr(ask, "verb", "") == "count":
            host.counts += 1
            gate.wait(120)
        return answered(shard, ask)

    host.restored, hosts._answered = answered, late


def let_go(host: Any) -> None:
    """End `counts_held_up`."""
    host.gate.set()


def building_held_up(host: Any) -> None:
    """In an actor: let versions that were lost be built only after `building_let_go`."""
    for hydrated in {shard.hydrated for shard in host._shards.values()}:
        hydrated._earlier.acquire()


def building_let_go(host: Any) -> None:
    """In an actor: see `building_held_up`."""
    for hydrated in {shard.hydrated for shard in host._shards.values()}:
        hydrated._earlier.release()


def counted(host: Any) -> int:
    """Number of counts that an actor's shards have begun."""
    from softdb.cluster import hosts

    hosts._answered = host.restored
    return int(host.counts)


def called(db: cluster.TableCluster, function: Any) -> list[Any]:
    """A function in every actor of the first host, which need not find the tests."""
    transport: Any = db.caller.transport
    names = {"threading": threading, "Any": Any}
    whole: Any = types.FunctionType(function.__code__, names)
    asked = [one.__ray_call__.remote(lambda host: whole(host)) for one in transport.layout.hosts[0]]
    return list(ray.get(asked, timeout=TIMEOUT))


def all_at(db: cluster.TableCluster, version: int) -> None:
    """Wait until every replica is up; raise TimeoutError with their places."""

    def versions(host: Any) -> dict[int, int]:
        return {shard: one.hydrated.version(shard) for shard, one in (host._shards or {}).items()}

    transport: Any = db.caller.transport
    until, found = time.monotonic() + TIMEOUT, list[dict[int, int]]()
    while time.monotonic() < until:
        asked = [one.__ray_call__.remote(versions) for one in transport.layout.hosts[0]]
        found = ray.get(asked, timeout=TIMEOUT)
        if all({*one.values()} == {version} for one in found):
            return
        time.sleep(0.05)
    raise TimeoutError(f"the replicas are at {found}, not at {version}")


def keep_counting(db: cluster.TableCluster) -> None:
    """Ask until an error is raised, for TIMEOUT seconds."""
    ends = time.monotonic() + TIMEOUT
    while time.monotonic() < ends:
        db.count()


def as_one(db: cluster.TableCluster) -> None:
    """Assert that it answers as one database does."""
    with softdb.open(None, dim=DIM) as one:
        one.insert([f"r{i}" for i in range(N)], KEYS)
        assert db.search(KEYS[:3], k=5).ids == one.search(KEYS[:3], k=5).ids
        np.testing.assert_allclose(db.attend(KEYS[:3]).output, one.attend(KEYS[:3]).output, rtol=1e-4, atol=1e-5)


class TestTable:
    """The actors of a table, which end with these tests: memory is short."""

    @pytest.fixture(scope="class")
    @classmethod
    def url(cls, connected: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
        """A table of two shards with two replicas each, on one host."""
        folder = tmp_path_factory.mktemp("ray")
        url = str(folder / "t.lance")
        with cluster.create(
            url, dim=DIM, shards=2, replicas=2, on="ray", timeout=TIMEOUT, cache=folder / "cache"
        ) as db:
            db.insert([f"r{i}" for i in range(N)], KEYS, payloads=[{"n": i} for i in range(N)])
        yield url
        cluster.stop(url)

    def test_actors_answer_as_one_database(self, url: str) -> None:
        with opened(url, mode="r") as db:
            as_one(db)
            assert db["r7"].payload == {"n": 7}
            with pytest.raises(errors.UnknownId, match="get: id 'none' is not stored"):
                db.get(["none"])

    def test_actors_share_the_cores_of_ray(self, url: str) -> None:
        with opened(url, mode="r") as db:
            transport: Any = db.caller.transport
            replicas = transport.layout.hosts[0]
            asked = [one.__ray_call__.remote(lambda _: os.environ["OMP_NUM_THREADS"]) for one in replicas]
            assert ray.get(asked, timeout=TIMEOUT) == ["2", "2"]  # of the four that it has

    def test_a_task_that_needs_every_core_runs_beside_a_cluster(self, url: str) -> None:
        with opened(url, mode="r"):
            cores = int(ray.cluster_resources()["CPU"])
            assert ray.get(ray.remote(num_cpus=cores)(lambda: True).remote(), timeout=TIMEOUT)

    def test_a_score_that_actors_cannot_import_is_named_at_once(self, url: str) -> None:
        """Stand in for a notebook: these tests are a module of the driver alone."""
        match = "attend: a shard cannot load the score .*test_ray.*define it in a module that the shards can import"
        with opened(url, mode="r") as db, pytest.raises(errors.BadInput, match=match):
            db.attend(KEYS[:1], score=Own())

    def test_calls_that_timed_out_are_cancelled(self, url: str) -> None:
        """Those that wait in an actor's queue never run."""
        with opened(url, mode="r") as db, opened(url, mode="r") as impatient:
            as_one(db)
            called(db, counts_held_up)
            impatient.caller.timeout = 0.5
            try:
                for _ in range(2 * THREADS):
                    with pytest.raises(errors.ShardUnavailable, match=r"2 of 2 shards did not answer \(waited"):
                        impatient.count()
            finally:
                called(db, let_go)
            as_one(db)
            assert max(called(db, counted)) <= 2 * THREADS, "of two shards; the others nobody waits for"

    @pytest.mark.parametrize("which", ["first", "all"])
    def test_the_answer_is_right_after_a_kill(self, url: str, which: str) -> None:
        """By a replica, or by Ray's restart and retry of the call."""
        with opened(url) as db:
            as_one(db)
            for pid in pids(db)[: 1 if which == "first" else None]:
                os.kill(pid, signal.SIGKILL)
            as_one(db)

    def test_a_reader_goes_on_at_its_version_after_a_kill(self, url: str) -> None:
        with opened(url) as db, opened(url, mode="r") as reader:
            expected, hits = reader.search(KEYS[:3], k=5).payloads, reader.search(KEYS[:3], k=5)
            db.upsert(["r0"], np.ones((1, DIM)), payloads=[{"late": True}])
            for pid in pids(db):
                os.kill(pid, signal.SIGKILL)
            db.refresh()
            assert (reader.version < db.version, hits.payloads) == (True, expected)
            as_one(reader)
            db.upsert(["r0"], KEYS[:1], payloads=[{"n": 0}])

    def test_writes_do_not_wait_while_a_lost_version_is_built(self, url: str) -> None:
        with opened(url) as db, opened(url, mode="r") as reader, opened(url, mode="r") as other:
            db.upsert(["late"], np.ones((1, DIM)))
            for pid in pids(db):
                os.kill(pid, signal.SIGKILL)
            db.refresh()
            all_at(db, db.version)
            called(db, building_held_up)
            counts = list[int]()
            threads = [threading.Thread(target=lambda db=db: counts.append(db.count())) for db in (reader, other)]
            try:
                for replica, (handle, thread) in enumerate(zip((reader, other), threads, strict=True)):
                    transport: Any = handle.caller.transport
                    transport.layout.first = [replica] * len(transport.layout.hosts)
                    thread.start()
                time.sleep(1)  # until both replicas build
                assert db.delete(["late"]) == 1
                assert not counts
            finally:
                called(db, building_let_go)
            for thread in threads:
                thread.join(TIMEOUT)
            assert counts == [N, N]

    def test_actors_that_are_killed_for_good_are_started_again(self, url: str) -> None:
        with opened(url) as db:
            transport: Any = db.caller.transport
            for host in {host for replicas in transport.layout.hosts for host in replicas}:
                ray.kill(host)
            as_one(db)  # waits

    def test_a_handle_goes_on_when_stopped_actors_are_started_again(self, url: str) -> None:
        with opened(url) as db:
            hits = db.search(KEYS[:3], k=5)
            cluster.stop(url)
            with pytest.raises(errors.ShardUnavailable, match="actors of this handle were stopped; open the table"):
                keep_counting(db)  # Ray takes a moment
            with pytest.raises(errors.ShardUnavailable, match="were stopped"):
                db.refresh()
            with opened(url, mode="r"):
                as_one(db)
                assert [payload["n"] for payload in hits.payloads[0]] == [int(str(name)[1:]) for name in hits.ids[0]]
                db.refresh()
                as_one(db)

    def test_acknowledged_writes_survive_the_loss_of_all_actors_and_directories(self, url: str) -> None:
        with opened(url) as db:
            db.upsert(["late"], np.ones((1, DIM)))
            shutil.rmtree(Path(url).parent / "cache")
            for pid in pids(db):
                os.kill(pid, signal.SIGKILL)
            db.refresh()
            assert ("late" in db, len(db)) == (True, N + 1)
            assert db.delete(["late"]) == 1

    def test_replicas_are_ready_before_the_first_question(self, url: str) -> None:
        """After a write, and after Ray has brought one back."""

        def flushed(host: Any) -> None:
            for shard, one in host._shards.items():
                one.hydrated.databases[shard].flush()

        with opened(url) as db:
            db.upsert(["late"], np.ones((1, DIM)))
            all_at(db, db.version)
            assert db.delete(["late"]) == 1
            all_at(db, db.version)  # else Ray would send the call again
            called(db, flushed)  # else the kill would take back the last second, until a question comes
            os.kill(pids(db)[1], signal.SIGKILL)
            all_at(db, db.version)

    def test_a_busy_replica_catches_up_with_writes(self, url: str) -> None:
        """An actor restarted by Ray: the first write's call waits in it during the second write."""
        with opened(url) as db:
            transport: Any = db.caller.transport
            busy = transport.layout.hosts[0][transport.layout.order(0)[1]].__ray_call__
            ray.get(busy.remote(lambda host: host._opening.acquire()), timeout=TIMEOUT)
            try:
                db.upsert(["late"], np.ones((1, DIM)))
                assert db.delete(["late"]) == 1
            finally:
                ray.get(busy.remote(lambda host: host._opening.release()), timeout=TIMEOUT)
            all_at(db, db.version)

    def test_an_actor_that_stands_still_is_passed_over_or_named_in_time(self, url: str) -> None:
        with opened(url) as db:
            as_one(db)
            all_at(db, db.version)  # after the last test's kills
            stopped = pids(db)
            impatient = opened(url, timeout=12.0)
            try:
                os.kill(stopped[0], signal.SIGSTOP)
                as_one(impatient)  # by the replica
                os.kill(stopped[1], signal.SIGSTOP)
                with pytest.raises(
                    errors.ShardUnavailable,
                    match=r"2 of 2 shards did not answer \(waited 1\S* s of at most 12 s; .*give more time",
                ):
                    impatient.count()  # they stand still until it has given up
                impatient.caller.timeout = 2.0
                with pytest.raises(errors.ShardUnavailable, match="the write is committed, but this handle"):
                    impatient.upsert(["late"], np.ones((1, DIM)))
            finally:
                for pid in stopped:
                    os.kill(pid, signal.SIGCONT)
            db.refresh()  # both follow the later writes
            assert ("late" in db, len(db)) == (True, N + 1)
            assert db.delete(["late"]) == 1
            as_one(db)
            assert pids(db) == stopped
            impatient.close()


class TestKills(RayKills):
    """Actors and drivers die, or stand still; the tally counts what comes of it."""


def test_a_job_of_ray_data_is_one_commit_or_none(connected: str, tmp_path: Path) -> None:
    url, ids = str(tmp_path / "t.lance"), list(range(N))
    with cluster.create(url, dim=DIM, shards=2, ids="int", cache=tmp_path / "cache") as db:
        rows = [{"id": i, "key": KEYS[i].tolist(), "title": f"title {i}"} for i in ids]
        assert cluster.ingest(url, ray.data.from_items(rows)) == db.version + 1
        db.refresh()
        assert (len(db), db[7].payload) == (N, {"title": "title 7"})
        version = db.version
        for wrong, error, match in (
            ({"id": 7, "key": KEYS[7].tolist(), "title": ""}, errors.DuplicateId, "id 7 is stored already"),
            ({"id": N, "key": KEYS[7].tolist()[1:], "title": ""}, errors.BadInput, "nothing was written"),
        ):
            with pytest.raises(error, match=match):
                cluster.ingest(url, ray.data.from_items([wrong]))
        assert db.refresh() == version
        assert sorted({*shard_of(ids, 2)}) == [0, 1]
