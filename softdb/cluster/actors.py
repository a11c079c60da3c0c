"""Shards on the hosts of a Ray cluster: one actor a host, which Ray places, restarts and retries.

Actors are detached and named after the table, so that every driver finds the same ones. What an actor holds is a cache:
one that Ray restarts elsewhere makes its directories anew from the table.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import threading
import time
import warnings
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b
from pathlib import Path
from typing import Any

from softdb.cluster.addresses import address
from softdb.cluster.hydrate import Hydrated
from softdb.cluster.local import HydratedShard
from softdb.cluster.merge import of_owners, together
from softdb.cluster.shard import Message, Refresh, ShardReplies, of_records
from softdb.cluster.truth import Truth
from softdb.errors import ShardUnavailable, SoftDBError
from softdb.formats.tables import needed

NAMESPACE = "softdb"
THREADS = 4  # answers of one actor side by side
RETRIES = 2  # of a call whose actor died, where no other is left to ask
PENDING = 256  # calls that may wait for one actor
HEDGE = 3  # a replica is asked when this part of the timeout has passed


class Host:
    """Actor that serves some shards of a table on one host."""

    def __init__(self, truth: Truth, folder: str, mine: Sequence[int]) -> None:
        self.truth, self.folder, self.mine = truth, folder, list(mine)
        self._opening = threading.Lock()
        self._shards: dict[int, HydratedShard] | None = None
        self._pool = ThreadPoolExecutor(max(1, len(self.mine) - 1))

    def answer(self, sent: bytes) -> bytes:
        """Messages by shard -> replies, by whose they are (`together`); an error of softdb in place of one.

        Both are pickled here: Ray carries bytes as they are, and an object by a pickler in Python, which takes longer
        than all else it does, and arrays come out of it that cannot be written to.
        """
        asks: dict[int, Message] = pickle.loads(sent)
        shards = self._opened()
        if isinstance(shards, SoftDBError):
            return pickle.dumps(dict.fromkeys([(shard,) for shard in asks], shards))
        last, *others = reversed(asks)
        found = {shard: self._pool.submit(_answered, shards[shard], asks[shard]) for shard in others}
        replies = {last: _answered(shards[last], asks[last])}
        replies |= {shard: reply.result() for shard, reply in found.items()}
        return pickle.dumps(together(asks, replies))

    def tend(self, sent: bytes) -> bytes:
        """As `answer`, for what takes long: answers go on beside it."""
        return self.answer(sent)

    def pid(self) -> int:
        """Of the actor's process."""
        return os.getpid()

    def _opened(self) -> dict[int, HydratedShard] | SoftDBError:
        """The shards, hydrated when they are first asked, as an actor that was restarted is."""
        with self._opening:
            if self._shards is None:
                try:
                    hydrated = Hydrated(self.truth, Path(self.folder), self.mine)
                except SoftDBError as error:
                    return error
                self._shards = {shard: HydratedShard(hydrated, shard) for shard in self.mine}
            return self._shards


def _answered(shard: HydratedShard, ask: Message) -> Any:
    try:
        return shard.answer(ask)
    except SoftDBError as error:
        return error


class Actors:
    """A transport to actors: shard s lies with host s mod hosts, on each of its replicas."""

    collective = False

    def __init__(self, hosts: Sequence[Sequence[Any]], shards: int) -> None:
        self.hosts, self.shards = [list(replicas) for replicas in hosts], shards
        self.first = [0] * len(self.hosts)  # the replica that answered last
        self._following: dict[tuple[int, int], Any] = {}  # (host, replica) -> the last call that brings it on

    def ask(self, asks: Mapping[int, Message], timeout: float) -> ShardReplies:
        """As `Transport.ask`. A replica is asked where the first one is dead or slow."""
        replies = _FanOut(self, asks, timeout).answers()
        self._bring_on({shard: asks[shard] for shard in replies.replies}, replies.replies)
        return replies

    def _bring_on(self, asks: Mapping[int, Message], replies: Mapping[int, Any]) -> None:
        """Bring the replicas that were not asked to where those are that were, so that taking over finds them there.

        Nobody waits for it. A call that still waits in a replica that is busy, or comes back, gives way to this one.
        """
        told: dict[int, dict[int, Message]] = {}
        for shard, ask in asks.items():
            if isinstance(ask, Refresh):
                told.setdefault(shard % len(self.hosts), {})[shard] = Refresh(of_records(replies[shard].version))
        ray = _ray()
        for host, refreshes in told.items():
            for replica in self.order(host)[1:]:
                with contextlib.suppress(ray.exceptions.RayError):
                    if (host, replica) in self._following:
                        ray.cancel(self._following[host, replica])
                    sent = self.hosts[host][replica].tend.remote(pickle.dumps(refreshes))
                    self._following[host, replica] = sent

    def anyone(self, more: bool) -> bool:
        """As `Transport.anyone`."""
        return more

    def close(self) -> None:
        """The actors live on: see `stop`."""

    def order(self, host: int) -> list[int]:
        """The replicas of a host, the one that answered last first."""
        first, count = self.first[host], len(self.hosts[host])
        return [(first + i) % count for i in range(count)]


class _FanOut:
    """One question to all hosts."""

    def __init__(self, actors: Actors, asks: Mapping[int, Message], timeout: float) -> None:
        self.actors, self.timeout, self.begun = actors, timeout, time.monotonic()
        self.parts: dict[int, dict[int, Message]] = {}  # by host
        for shard, ask in asks.items():
            self.parts.setdefault(shard % len(actors.hosts), {})[shard] = ask
        self.left = {host: actors.order(host) for host in self.parts}  # replicas to ask yet
        self.waiting: dict[Any, tuple[int, int]] = {}
        self.found, self.why = dict[int, dict[tuple[int, ...], Any]](), dict[int, str]()

    def answers(self) -> ShardReplies:
        """Ask, wait, and ask the replicas of those that are dead or slow."""
        ray = _ray()
        for host in self.parts:
            self._send(host)
        hedged, sent = False, list(self.waiting)
        with contextlib.suppress(ray.exceptions.RayError):  # most often all is well, which costs one call
            for ref, reply in zip(sent, ray.get(sent, timeout=self.timeout / HEDGE), strict=True):
                self._note(ref, reply)
        while self.waiting and len(self.found) < len(self.parts):
            until = self.begun + (self.timeout if hedged else self.timeout / HEDGE)
            ready, _ = ray.wait(list(self.waiting), timeout=max(0.0, until - time.monotonic()))
            for ref in ready:
                self._take(ref)
            if not ready and hedged:
                break
            if not ready:
                hedged = True
                for host in set(self.parts) - set(self.found):
                    self._send(host)
        for ref in self.waiting:  # of actors that stand still or are slower: nobody reads these replies
            ray.cancel(ref)
        return self._sorted()

    def _send(self, host: int) -> None:
        """Ask the next replica that takes the question."""
        while self.left[host]:
            replica, asks = self.left[host].pop(0), self.parts[host]
            actor = self.actors.hosts[host][replica]
            long = any(isinstance(ask, Refresh) or getattr(ask, "verb", "") == "build_index" for ask in asks.values())
            method = actor.tend if long else actor.answer
            if self.left[host]:  # the next one answers sooner than this one comes back
                method = method.options(max_task_retries=0)
            try:
                self.waiting[method.remote(pickle.dumps(asks))] = host, replica
                return
            except _ray().exceptions.RayError as error:
                self.why[host] = _cause(error)

    def _take(self, ref: Any) -> None:
        ray = _ray()
        try:
            self._note(ref, ray.get(ref))
        except ray.exceptions.RayError as error:
            host, _ = self.waiting.pop(ref)
            self.why[host] = _cause(error)
            self._send(host)

    def _note(self, ref: Any, reply: bytes) -> None:
        host, replica = self.waiting.pop(ref)
        self.found.setdefault(host, pickle.loads(reply))
        self.actors.first[host] = replica

    def _sorted(self) -> ShardReplies:
        found = {mine: reply for parts in self.found.values() for mine, reply in parts.items()}
        gone = [(host, shard) for host, asks in self.parts.items() if host not in self.found for shard in asks]
        missing = {shard: self.why.get(host, "no answer from its actor") for host, shard in gone}
        return of_owners(found, missing)


def hosted(truth: Truth, folder: Path, timeout: float) -> Actors:
    """The actors of a table, started where there are none: one for each node of the Ray cluster, and its replicas."""
    ray = _connected()
    logging.getLogger("ray.actor").addFilter(_news)
    names = _names(truth, ray)
    group = _group(truth, sum(map(len, names)), timeout)
    spread = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy
    made = ray.remote(
        concurrency_groups={"answers": THREADS, "tending": 1},
        max_restarts=-1,
        max_task_retries=RETRIES,
        max_pending_calls=PENDING,
        num_cpus=0,
    )(_grouped(ray))
    hosts = []
    for host, replicas in enumerate(names):
        mine = [shard for shard in range(truth.shards) if shard % len(names) == host]
        actors = []
        for replica, name in enumerate(replicas):
            options = made.options(
                name=name,
                namespace=NAMESPACE,
                lifetime="detached",
                get_if_exists=True,
                scheduling_strategy=spread(group, placement_group_bundle_index=host * len(replicas) + replica),
                # Ray would have OpenMP use as many threads as the actor has CPUs (ray-project/ray#30496)
                runtime_env={"env_vars": {"OMP_NUM_THREADS": str(_threads(ray, names)), "OMP_WAIT_POLICY": "PASSIVE"}},
            )
            actors.append(options.remote(truth, str(folder / f"ray-{replica}-{host}"), mine))
        hosts.append(actors)
    return Actors(hosts, truth.shards)


def stop(url: str | os.PathLike[str]) -> int:
    """End the actors of a table, and return how many there were. Directories stay; nothing is lost."""
    ray = _connected()
    start = f"{_key(address(url))}-"
    names = _named(ray, start)
    for name in names:
        ray.kill(ray.get_actor(name, namespace=NAMESPACE))
    for group in _groups(ray, start):
        ray.util.remove_placement_group(group)
    return len(names)


def _grouped(ray: Any) -> type:
    class Grouped(Host):
        def __init__(self, truth: Truth, folder: str, mine: Sequence[int]) -> None:
            super().__init__(truth, folder, mine)
            # a replica that nobody has asked, or that Ray has restarted, must not begin when another one is lost
            threading.Thread(target=self._opened, name="softdb-hydrate", daemon=True).start()

        answer = ray.method(concurrency_group="answers")(Host.answer)
        tend = ray.method(concurrency_group="tending")(Host.tend)

    Grouped.__name__ = "Host"
    return Grouped


def _group(truth: Truth, bundles: int, timeout: float) -> Any:
    """Place the actors as far apart as there are hosts. Raises ShardUnavailable where there is no room."""
    ray, name = _ray(), f"{_key(truth.url)}-{bundles}"
    there = _groups(ray, name)
    if there:
        return there[0]
    # a byte of memory, which every node has: any part of a CPU would keep tasks of a whole one from that CPU
    group = ray.util.placement_group([{"memory": 1}] * bundles, strategy="SPREAD", name=name, lifetime="detached")
    ready, _ = ray.wait([group.ready()], timeout=timeout)
    if not ready:
        ray.util.remove_placement_group(group)
        raise ShardUnavailable(f"Ray has no room for {bundles} actors within {timeout:g} s; add hosts to its cluster")
    return group


def _groups(ray: Any, start: str) -> list[Any]:
    """Placement groups by how their names begin, whoever made them: Ray looks names up in a driver's own namespace."""
    from ray.util.placement_group import PlacementGroup

    return [
        PlacementGroup(ray.PlacementGroupID(bytes.fromhex(number)))
        for number, one in ray.util.placement_group_table().items()
        if one["name"].startswith(start) and one["state"] != "REMOVED"
    ]


def _names(truth: Truth, ray: Any) -> list[list[str]]:
    """Actors by host and replica: those that there are, else one a node, and no more than there are shards."""
    start = "-".join(filter(None, [_key(truth.url), truth.digest, f"{truth.shards}-"]))
    running = _named(ray, start)
    nodes = sum(1 for node in ray.nodes() if node["Alive"])
    most = max(1, min(truth.shards, nodes // truth.replicas))
    hosts = int(running[0].removeprefix(start).partition("-")[0]) if running else most
    return [[f"{start}{hosts}-{host}-{replica}" for replica in range(truth.replicas)] for host in range(hosts)]


def _named(ray: Any, start: str) -> list[str]:
    """Names of the actors here whose names begin so."""
    actors = ray.util.list_named_actors(all_namespaces=True)
    return [actor["name"] for actor in actors if actor["namespace"] == NAMESPACE and actor["name"].startswith(start)]


def _threads(ray: Any, names: list[list[str]]) -> int:
    """OpenMP's threads of one actor: its share of the cluster's cores."""
    return max(1, int(ray.cluster_resources().get("CPU", 1)) // sum(map(len, names)))


def _key(url: str) -> str:
    return f"softdb-{blake2b(url.encode(), digest_size=8).hexdigest()}"


def _cause(error: Exception) -> str:
    """The cause of a failed call in one line: the exception that the actor's own code raised, where there is one."""
    cause = getattr(error, "cause", None)
    text = str(error) if cause is None else f"{type(cause).__name__}: {cause}"
    return " ".join(text.split())[:200] or type(error).__name__


def _connected() -> Any:
    """Ray, connected: to what `ray.init` or RAY_ADDRESS says, else to a cluster of this machine."""
    ray = _ray()
    if not ray.is_initialized():
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "lance is not fork-safe")  # Ray's children become other programs at once
            ray.init(namespace=NAMESPACE, log_to_driver=False, include_dashboard=False)
    return ray


def _news(record: logging.LogRecord) -> bool:
    """True if what Ray warns of is no news: a placement group here is detached, too, and ends with its actors."""
    return "detached actor with a placement group" not in record.getMessage()


def _ray() -> Any:
    return needed("ray", "cluster", "actors")
