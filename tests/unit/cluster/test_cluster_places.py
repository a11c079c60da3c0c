"""Places of shards while nodes join, leave and die, on a stand-in for Ray without processes."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from softdb.cluster import hosts
from softdb.cluster.hosts import GRACE, NAMESPACE, Host, ShardPlaces
from softdb.errors import StorageUnavailable

SHARDS, START = 8, "t-8-"
ROUNDS = 40  # after so many looks at the nodes all shards must have come to rest


class RayError(Exception):
    """An error of Ray."""


class ActorDiedError(RayError):
    """Ray's error of an actor that was killed for good."""


class FakeHost:
    """Stand-in for an actor. `work` builds the shards that it took; `lose` loses them with its node."""

    def __init__(self, world: World, name: str, node: str, own: Iterable[int]) -> None:
        self.world, self.name, self.node, self.up = world, name, node, True
        self.own, self.complete = {*own}, set[int]()
        self.status = SimpleNamespace(remote=lambda: dict.fromkeys(self.complete, GRACE) if self.up else RayError())
        self.take = SimpleNamespace(remote=self.own.update)
        self.drop = SimpleNamespace(remote=self.leave)

    def leave(self, shard: int) -> None:
        """Stand-in for `Host.drop`."""
        self.own.discard(shard)
        self.complete.discard(shard)

    def lose(self) -> None:
        """Be restarted elsewhere by Ray, which takes until the next call of `work`."""
        self.up, self.node = False, "another"
        self.own.clear()
        self.complete.clear()

    def work(self) -> None:
        """Build what was taken before."""
        if not self.up:
            self.up = True
            self.own.update(self.world.places.owned(self.name))
        self.complete |= self.own


class World:
    """Ray's nodes and actors, and the places of one table."""

    def __init__(self, replicas: int, nodes: int, slots: int = 1) -> None:
        self.truth: Any = SimpleNamespace(shards=SHARDS, replicas=replicas, own=False, url="t")
        self.resources = {"CPU": slots * hosts.CORES, "memory": slots * hosts.BYTES}
        self.alive, self.number, self.actors = list[str](), 0, dict[str, FakeHost]()
        self.exceptions, self.util = (
            SimpleNamespace(RayError=RayError, ActorDiedError=ActorDiedError),
            SimpleNamespace(list_named_actors=self.named),
        )
        for _ in range(nodes):
            self.join()

    def start(self) -> None:
        """Start the actor of the places, as Ray does after its death, too."""
        self.places = ShardPlaces(self.truth, "", START)

    def join(self) -> None:
        """Add a node."""
        self.number += 1
        self.alive.append(f"node{self.number}")

    def leave(self, node: str) -> None:
        """Lose a node with the hosts on it."""
        self.alive.remove(node)
        for host in self.actors.values():
            if host.node == node:
                host.lose()

    def rest(self) -> None:
        """Let hosts build and places look at the nodes until nothing moves."""
        for _ in range(ROUNDS):
            for host in [*self.actors.values()]:
                host.work()
            self.places.balance()

    def require_rest(self) -> None:
        """Assert that every shard has its replicas, on nodes apart, and that nothing else is held."""
        owners, most = self.places.owners, self.truth.replicas
        held = {name: sorted(host.complete) for name, host in self.actors.items()}
        assert held == {name: sorted(s for s, names in owners.items() if name in names) for name in self.actors}, "held"
        assert all(len({*names}) == most for names in owners.values()), owners
        assert {host.node for host in self.actors.values()} <= {*self.alive}
        for names in owners.values():
            assert len({self.actors[name].node for name in names}) == min(most, len(self.alive)), owners
        counts = Counter(name for names in owners.values() for name in names)
        spread = max(counts.values()) - min(counts[name] for name in self.actors)
        assert spread <= (1 if most == 1 else 2), counts  # a host may hold one more, so that replicas stay apart
        before = {shard: [*names] for shard, names in owners.items()}
        self.rest()
        assert self.places.owners == before, "shards move without a reason"

    # -- functions of Ray ------------------------------------------------------------------------------------------

    def nodes(self) -> list[dict[str, Any]]:
        head = {"NodeID": "head", "Alive": True, "Resources": {"memory": 1e12}}
        return [head, *({"NodeID": node, "Alive": True, "Resources": self.resources} for node in self.alive)]

    def named(self, all_namespaces: bool) -> list[dict[str, str]]:
        return [{"name": name, "namespace": NAMESPACE} for name in self.actors]

    def get(self, result: Any, timeout: float = 0.0) -> Any:
        if isinstance(result, RayError):
            raise result
        return result

    def wait(self, refs: list[Any], num_returns: int, timeout: float) -> tuple[list[Any], list[Any]]:
        return refs, []

    def kill(self, host: FakeHost) -> None:
        del self.actors[host.name]

    def get_actor(self, name: str, namespace: str) -> FakeHost:
        return self.actors[name]


@pytest.fixture(autouse=True)
def ray(monkeypatch: pytest.MonkeyPatch) -> list[World]:
    """Let places call the first of the returned worlds in place of Ray."""
    worlds = list[World]()

    def started(places: ShardPlaces, name: str, node: str, threads: int) -> FakeHost:
        return worlds[0].actors.setdefault(name, FakeHost(worlds[0], name, node, places.owned(name)))

    monkeypatch.setattr(hosts, "ray_module", lambda: worlds[0])
    monkeypatch.setattr(ShardPlaces, "_watch", lambda _: None)
    monkeypatch.setattr(ShardPlaces, "_host", started)
    return worlds


def opened(ray: list[World], replicas: int, nodes: int, slots: int = 1) -> World:
    ray[:] = [World(replicas, nodes, slots)]
    ray[0].start()
    ray[0].rest()
    ray[0].require_rest()
    return ray[0]


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("slots", [1, 2, 3])
def test_shards_are_spread_over_nodes_that_join(ray: list[World], replicas: int, slots: int) -> None:
    world = opened(ray, replicas, 1, slots)
    for _ in range(4):
        world.join()
        world.rest()
        world.require_rest()


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_new_node_takes_its_share_and_no_more(ray: list[World], replicas: int) -> None:
    world = opened(ray, replicas, 3)
    before = {shard: {*names} for shard, names in world.places.owners.items()}
    world.join()
    world.rest()
    moved = sum(len({*names} - before[shard]) for shard, names in world.places.owners.items())
    assert moved <= SHARDS * replicas // 4 + 1


@pytest.mark.parametrize("replicas", [1, 2])
def test_shards_of_a_node_that_is_lost_with_their_places(ray: list[World], replicas: int) -> None:
    world = opened(ray, replicas, 3)
    world.leave("node2")
    world.start()
    world.rest()
    world.require_rest()


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_host_that_is_killed_for_good_is_started_again(ray: list[World], replicas: int) -> None:
    world = opened(ray, replicas, 2)
    name, host = next(iter(world.actors.items()))
    del world.actors[name]
    host.status = SimpleNamespace(remote=ActorDiedError)
    world.rest()
    assert world.actors[name].complete
    world.require_rest()


def test_places_that_die_while_shards_move(ray: list[World]) -> None:
    world = opened(ray, 1, 2)
    world.join()
    world.places.balance()
    world.start()
    world.rest()
    world.require_rest()


@pytest.mark.parametrize("seed", range(60))
def test_nodes_come_and_go(ray: list[World], seed: int) -> None:
    chance = random.Random(seed)
    world = opened(ray, chance.choice([1, 2, 3]), chance.randint(1, 4), chance.randint(1, 3))
    for _ in range(12):
        for _ in range(chance.randint(1, 3)):
            if len(world.alive) > 1 and chance.random() < 0.5:
                world.leave(chance.choice(world.alive))
            elif len(world.alive) < 6:
                world.join()
            if chance.random() < 0.3:
                world.start()
            if chance.random() < 0.5:
                world.places.balance()
        world.rest()
        world.require_rest()


def test_a_host_that_could_not_build_a_shard_tries_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The table's store is out of reach at first; nobody asks a host for a shard that it does not own yet."""
    built, errors = threading.Event(), [StorageUnavailable("out of reach")]

    def hydrated(*_: Any) -> Any:
        if errors:
            raise errors.pop()
        built.set()
        return SimpleNamespace(truth=host.truth)

    monkeypatch.setattr(hosts, "Hydrated", hydrated)
    monkeypatch.setattr(hosts, "GRACE", 0.0)
    monkeypatch.setattr(hosts, "HydratedShard", lambda *_: SimpleNamespace(report=lambda: None))
    truth: Any = SimpleNamespace(shards=2, url="t")
    host = Host(truth, str(tmp_path), [])
    for _ in range(200):  # as `ShardPlaces` does until the shard is complete
        if host.status():
            break
        host.take([1])
        built.wait(0.05)
    assert [*host.status()] == [1]
    assert "shards [1] of t are not ready: out of reach" in caplog.text
