"""Nodes of Ray that join and leave: shards move, every answer stays right, and nothing is lost."""

from __future__ import annotations

import random
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("lance", reason="the table of a cluster is Lance's")
pytest.importorskip("ray", reason="Ray starts the actors")

import ray
from ray.cluster_utils import Cluster as Nodes

from softdb import cluster
from softdb.cluster.table_cluster import TableCluster

N, DIM, SHARDS, TIMEOUT = 400, 8, 4, 120.0
KEYS = np.random.default_rng(0).normal(size=(N, DIM)).astype(np.float32)
MOST = 3  # largest number of nodes


@pytest.fixture(scope="module")
def nodes() -> Iterator[Any]:
    """A head without CPUs, and one node."""
    try:
        nodes = Nodes(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
        nodes.add_node(num_cpus=1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ray.init(address=nodes.address, log_to_driver=False)
    except Exception as error:
        pytest.skip(f"Ray does not start here: {error}")
    yield nodes
    ray.shutdown()
    nodes.shutdown()


def opened(folder: Path, **words: Any) -> TableCluster:
    return cluster.open(folder / "t.lance", on="ray", timeout=TIMEOUT, cache=folder / "cache", **words)


def owners(db: TableCluster) -> dict[int, list[str]]:
    """Nodes of the hosts of each shard."""
    transport: Any = db.caller.transport
    names = ray.get(transport._actor.layout.remote(), timeout=TIMEOUT)
    return {shard: [name.rpartition("-")[0].rpartition("-")[2] for name in own] for shard, own in names.items()}


def within(seconds: float, condition: Callable[[], bool]) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.3)
    return condition()


class World:
    """A table and what it must hold."""

    def __init__(self, db: TableCluster, seed: int) -> None:
        self.db, self.chance, self.keys = db, random.Random(seed), dict[str, Any]()
        self.numbers = np.random.default_rng(seed)

    def write(self) -> None:
        names = self.chance.sample([f"r{i}" for i in range(N)], 5)
        keys = self.numbers.normal(size=(5, DIM)).astype(np.float32)
        self.db.upsert(names, keys)
        self.keys |= zip(names, keys, strict=True)
        if self.chance.random() < 0.3:
            gone = self.chance.choice(sorted(self.keys))
            assert self.db.delete([gone]) == 1
            del self.keys[gone]

    def require_right(self) -> None:
        names = sorted(self.keys)
        columns = np.stack([self.keys[name] for name in names])
        query = self.numbers.normal(size=(1, DIM)).astype(np.float32)
        weights = np.exp(columns @ query[0])
        np.testing.assert_allclose(
            self.db.attend(query).output[0], weights / weights.sum() @ columns, rtol=1e-3, atol=1e-4
        )
        best = sorted(names, key=lambda name: -float(self.keys[name] @ query[0]))[:3]
        assert self.db.search(query, k=3).ids[0] == best
        assert len(self.db) == len(names)


@pytest.fixture
def world(nodes: Any, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[World]:
    replicas = getattr(request, "param", 1)
    url = tmp_path / "t.lance"
    with cluster.create(
        url, dim=DIM, shards=SHARDS, replicas=replicas, on="ray", timeout=TIMEOUT, cache=tmp_path / "cache"
    ) as db:
        world = World(db, 0)
        db.insert([f"r{i}" for i in range(N)], KEYS)
        world.keys = dict(zip([f"r{i}" for i in range(N)], KEYS, strict=True))
        yield world
    cluster.stop(url)


def joined(nodes: Any) -> Any:
    return nodes.add_node(num_cpus=1)


def alive() -> set[str]:
    return {node["NodeID"] for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU")}


def settled(db: TableCluster) -> bool:
    """True if shards lie on the living nodes only, about as many on each."""
    own = [node for names in owners(db).values() for node in names]
    counts = [own.count(node) for node in alive()]
    return {*own} <= alive() and max(counts) - min(counts) <= 1


def test_shards_follow_the_nodes(nodes: Any, world: World, tmp_path: Path) -> None:
    """A node that joins takes shards; readers go on meanwhile, and a node that leaves gives its shards."""
    db = world.db
    head = next(node["NodeID"] for node in ray.nodes() if not node["Resources"].get("CPU"))
    assert {node for names in owners(db).values() for node in names} == alive()
    with opened(tmp_path, mode="r") as reader:
        version, expected = reader.version, reader.attend(KEYS[:2]).output
        new = joined(nodes)

        def moved() -> bool:
            world.write()
            world.require_right()
            np.testing.assert_allclose(reader.attend(KEYS[:2]).output, expected, rtol=1e-5)
            return settled(db)

        assert within(TIMEOUT, moved), owners(db)
        assert reader.version == version
        reader.refresh()
        assert len(reader) == len(db)
    nodes.remove_node(new)
    world.write()
    world.require_right()
    assert within(TIMEOUT, lambda: len(alive()) == 1 and settled(db)), owners(db)
    world.require_right()
    assert head not in {node for names in owners(db).values() for node in names}


def test_a_node_is_lost_together_with_the_places(nodes: Any, tmp_path: Path) -> None:
    """The places, started again, cannot ask the lost host for its shards: another host must build them."""
    new, url, ids = joined(nodes), tmp_path / "t.lance", [f"r{i}" for i in range(N)]
    assert within(TIMEOUT, lambda: len(alive()) == 2)
    words: dict[str, Any] = {"dim": DIM, "shards": SHARDS, "on": "ray", "timeout": TIMEOUT, "cache": tmp_path / "cache"}
    with cluster.create(url, **words) as db:
        db.insert(ids, KEYS)
        assert settled(db)
        transport: Any = db.caller.transport
        nodes.remove_node(new)
        assert within(TIMEOUT, lambda: len(alive()) == 1)
        ray.kill(transport._actor, no_restart=False)
        db.refresh()
        assert sorted(db.get(ids).ids) == sorted(ids)
        assert within(TIMEOUT, lambda: settled(db)), owners(db)
        assert db.verify() == N
    cluster.stop(url)


@pytest.mark.slow
@pytest.mark.parametrize("world", [2], indirect=True)
def test_forty_nodes_join_and_leave(nodes: Any, world: World) -> None:
    """Two replicas: a loss of one node leaves an answer."""
    own = [joined(nodes)]
    assert within(TIMEOUT, lambda: settled(world.db)), owners(world.db)
    changes = 1
    while changes < 40:
        if len(own) < MOST - 1 and (not own or world.chance.random() < 0.5):
            own.append(joined(nodes))
        elif len(own) > 1 or world.chance.random() < 0.5:
            nodes.remove_node(own.pop(world.chance.randrange(len(own))))
        else:
            continue
        changes += 1
        for _ in range(3):
            world.write()
            world.require_right()
        assert within(TIMEOUT, lambda: settled(world.db)), owners(world.db)
    assert world.db.verify() == len(world.keys)


def test_the_places_are_known_again_after_a_kill(nodes: Any, world: World) -> None:
    before = owners(world.db)
    transport: Any = world.db.caller.transport
    ray.kill(transport._actor, no_restart=False)
    world.write()
    world.require_right()
    assert within(TIMEOUT, lambda: owners(world.db) == before)
