"""Shards on the hosts of a Ray cluster: one actor a host, which Ray places, restarts and retries.

Actors are detached and named after the table, so that all drivers use the same actors. An actor's directories are a
cache: an actor that Ray restarts on another host builds them from the table.
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
THREADS = 4  # concurrent answers of an actor
RETRIES = 2  # of a call whose actor died, if no replica remains to ask
PENDING = 256  # calls that may wait for an actor
HEDGE = 3  # after timeout / HEDGE seconds the next replica is asked, too


class Host:
    """Actor that serves some shards of a table on one host."""

    def __init__(self, truth: Truth, folder: str, own_shards: Sequence[int]) -> None:
        self.truth, self.folder, self.own_shards = truth, folder, list(own_shards)
        self._opening = threading.Lock()
        self._shards: dict[int, HydratedShard] | None = None
        self._pool = ThreadPoolExecutor(max(1, len(self.own_shards) - 1))

    def answer(self, sent: bytes) -> bytes:
        """Answer pickled messages by shard: return pickled replies merged by `together`, or errors of softdb.

        Ray carries bytes as they are. It would pickle objects in Python, which takes longer than the rest of the call
        and makes arrays read-only.
        """
        asks: dict[int, Message] = pickle.loads(sent)
        shards = self._opened()
        if isinstance(shards, SoftDBError):
            return pickle.dumps(dict.fromkeys([(shard,) for shard in asks], shards))
        last, *others = reversed(asks)
        pending = {shard: self._pool.submit(_answered, shards[shard], asks[shard]) for shard in others}
        replies = {last: _answered(shards[last], asks[last])}
        replies |= {shard: reply.result() for shard, reply in pending.items()}
        return pickle.dumps(together(asks, replies))

    def tend(self, sent: bytes) -> bytes:
        """Answer slow messages, in a concurrency group of their own."""
        return self.answer(sent)

    def pid(self) -> int:
        """Return the id of the actor's process."""
        return os.getpid()

    def _opened(self) -> dict[int, HydratedShard] | SoftDBError:
        """Return the shards, hydrated at the first call, or the error that this raised."""
        with self._opening:
            if self._shards is None:
                try:
                    hydrated = Hydrated(self.truth, Path(self.folder), self.own_shards)
                except SoftDBError as error:
                    return error
                self._shards = {shard: HydratedShard(hydrated, shard) for shard in self.own_shards}
            return self._shards


def _answered(shard: HydratedShard, ask: Message) -> Any:
    try:
        return shard.answer(ask)
    except SoftDBError as error:
        return error


class Actors:
    """Transport to actors: every replica of host s mod hosts serves shard s."""

    collective = False

    def __init__(self, hosts: Sequence[Sequence[Any]], shards: int) -> None:
        self.hosts, self.shards = [list(replicas) for replicas in hosts], shards
        self.first = [0] * len(self.hosts)  # by host: the replica that answered last
        self._following: dict[tuple[int, int], Any] = {}  # (host, replica) -> its last refresh

    def ask(self, asks: Mapping[int, Message], timeout: float) -> ShardReplies:
        """Ask as `Transport.ask`; ask the next replica if one is dead or slow."""
        replies = _FanOut(self, asks, timeout).answers()
        self._bring_on({shard: asks[shard] for shard in replies.replies}, replies.replies)
        return replies

    def _bring_on(self, asks: Mapping[int, Message], replies: Mapping[int, Any]) -> None:
        """Refresh the replicas that were not asked to the versions of those that were, so that they can take over.

        Does not wait. A refresh replaces an older one that still waits in the replica.
        """
        by_host: dict[int, dict[int, Message]] = {}
        for shard, ask in asks.items():
            if isinstance(ask, Refresh):
                by_host.setdefault(shard % len(self.hosts), {})[shard] = Refresh(of_records(replies[shard].version))
        ray = _ray()
        for host, refreshes in by_host.items():
            for replica in self.order(host)[1:]:
                with contextlib.suppress(ray.exceptions.RayError):
                    if (host, replica) in self._following:
                        ray.cancel(self._following[host, replica])
                    sent = self.hosts[host][replica].tend.remote(pickle.dumps(refreshes))
                    self._following[host, replica] = sent

    def anyone(self, more: bool) -> bool:
        """Return `more`, as `Transport.anyone`."""
        return more

    def close(self) -> None:
        """Do nothing: the actors keep running until `stop`."""

    def order(self, host: int) -> list[int]:
        """Return the replicas of a host, the one that answered last first."""
        first, count = self.first[host], len(self.hosts[host])
        return [(first + i) % count for i in range(count)]


class _FanOut:
    """One question to all hosts."""

    def __init__(self, actors: Actors, asks: Mapping[int, Message], timeout: float) -> None:
        self.actors, self.timeout, self.started = actors, timeout, time.monotonic()
        self.parts: dict[int, dict[int, Message]] = {}  # messages by host and shard
        for shard, ask in asks.items():
            self.parts.setdefault(shard % len(actors.hosts), {})[shard] = ask
        self.remaining = {host: actors.order(host) for host in self.parts}  # replicas that were not asked yet
        self.waiting: dict[Any, tuple[int, int]] = {}  # calls -> (host, replica)
        self.replies, self.failures = dict[int, dict[tuple[int, ...], Any]](), dict[int, str]()  # by host

    def answers(self) -> ShardReplies:
        """Ask every host, and the next replica of a host that is dead or slow; return the replies in time."""
        ray = _ray()
        for host in self.parts:
            self._send(host)
        hedged, sent = False, list(self.waiting)
        with contextlib.suppress(ray.exceptions.RayError):  # one call, in the usual case that all reply
            for ref, reply in zip(sent, ray.get(sent, timeout=self.timeout / HEDGE), strict=True):
                self._note(ref, reply)
        while self.waiting and len(self.replies) < len(self.parts):
            deadline = self.started + (self.timeout if hedged else self.timeout / HEDGE)
            ready, _ = ray.wait(list(self.waiting), timeout=max(0.0, deadline - time.monotonic()))
            for ref in ready:
                self._take(ref)
            if not ready and hedged:
                break
            if not ready:
                hedged = True
                for host in set(self.parts) - set(self.replies):
                    self._send(host)
        for ref in self.waiting:  # of actors that are stuck or slower than their replica
            ray.cancel(ref)
        return self._sorted()

    def _send(self, host: int) -> None:
        """Ask the next replica of a host that accepts the call."""
        while self.remaining[host]:
            replica, asks = self.remaining[host].pop(0), self.parts[host]
            actor = self.actors.hosts[host][replica]
            long = any(isinstance(ask, Refresh) or getattr(ask, "verb", "") == "build_index" for ask in asks.values())
            method = actor.tend if long else actor.answer
            if self.remaining[host]:  # the next replica answers sooner than a restarted actor
                method = method.options(max_task_retries=0)
            try:
                self.waiting[method.remote(pickle.dumps(asks))] = host, replica
                return
            except _ray().exceptions.RayError as error:
                self.failures[host] = _cause(error)

    def _take(self, ref: Any) -> None:
        ray = _ray()
        try:
            self._note(ref, ray.get(ref))
        except ray.exceptions.RayError as error:
            host, _ = self.waiting.pop(ref)
            self.failures[host] = _cause(error)
            self._send(host)

    def _note(self, ref: Any, reply: bytes) -> None:
        host, replica = self.waiting.pop(ref)
        self.replies.setdefault(host, pickle.loads(reply))
        self.actors.first[host] = replica

    def _sorted(self) -> ShardReplies:
        answers = {owners: reply for parts in self.replies.values() for owners, reply in parts.items()}
        failed = [(host, shard) for host, asks in self.parts.items() if host not in self.replies for shard in asks]
        missing = {shard: self.failures.get(host, "no answer from its actor") for host, shard in failed}
        return of_owners(answers, missing)


def hosted(truth: Truth, folder: Path, timeout: float) -> Actors:
    """Return the transport to a table's actors; start missing actors: one for each node of Ray, and its replicas."""
    ray = _connected()
    logging.getLogger("ray.actor").addFilter(_news)
    names = _names(truth, ray)
    group = _group(truth, sum(map(len, names)), timeout)
    spread = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy
    actor_class = ray.remote(
        concurrency_groups={"answers": THREADS, "tending": 1},
        max_restarts=-1,
        max_task_retries=RETRIES,
        max_pending_calls=PENDING,
        num_cpus=0,
    )(_grouped(ray))
    hosts = []
    for host, replicas in enumerate(names):
        own_shards = [shard for shard in range(truth.shards) if shard % len(names) == host]
        actors = []
        for replica, name in enumerate(replicas):
            options = actor_class.options(
                name=name,
                namespace=NAMESPACE,
                lifetime="detached",
                get_if_exists=True,
                scheduling_strategy=spread(group, placement_group_bundle_index=host * len(replicas) + replica),
                # Ray would set as many OpenMP threads as the actor reserves CPUs (ray-project/ray#30496)
                runtime_env={"env_vars": {"OMP_NUM_THREADS": str(_threads(ray, names)), "OMP_WAIT_POLICY": "PASSIVE"}},
            )
            actors.append(options.remote(truth, str(folder / f"ray-{replica}-{host}"), own_shards))
        hosts.append(actors)
    return Actors(hosts, truth.shards)


def stop(url: str | os.PathLike[str]) -> int:
    """End the actors of a table, and return their number. The directories stay, and no record is lost."""
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
        def __init__(self, truth: Truth, folder: str, own_shards: Sequence[int]) -> None:
            super().__init__(truth, folder, own_shards)
            # hydrate at once: a new or restarted replica must be ready when another replica is lost
            threading.Thread(target=self._opened, name="softdb-hydrate", daemon=True).start()

        answer = ray.method(concurrency_group="answers")(Host.answer)
        tend = ray.method(concurrency_group="tending")(Host.tend)

    Grouped.__name__ = "Host"
    return Grouped


def _group(truth: Truth, bundles: int, timeout: float) -> Any:
    """Return the table's placement group, which spreads its actors over the nodes. Raises ShardUnavailable."""
    ray, name = _ray(), f"{_key(truth.url)}-{bundles}"
    existing = _groups(ray, name)
    if existing:
        return existing[0]
    # reserve a byte of memory, which every node has: a fraction of a CPU would keep other tasks from that CPU
    group = ray.util.placement_group([{"memory": 1}] * bundles, strategy="SPREAD", name=name, lifetime="detached")
    ready, _ = ray.wait([group.ready()], timeout=timeout)
    if not ready:
        ray.util.remove_placement_group(group)
        raise ShardUnavailable(f"Ray had no room for {bundles} actors within {timeout:g} s; add hosts to its cluster")
    return group


def _groups(ray: Any, start: str) -> list[Any]:
    """Return the placement groups of any namespace by prefix: Ray's own lookup is limited to the driver's namespace."""
    from ray.util.placement_group import PlacementGroup

    return [
        PlacementGroup(ray.PlacementGroupID(bytes.fromhex(number)))
        for number, group in ray.util.placement_group_table().items()
        if group["name"].startswith(start) and group["state"] != "REMOVED"
    ]


def _names(truth: Truth, ray: Any) -> list[list[str]]:
    """Return names of actors by host and replica: with as many hosts as run, else one a node, at most one a shard."""
    start = "-".join(filter(None, [_key(truth.url), truth.digest, f"{truth.shards}-"]))
    running = _named(ray, start)
    nodes = sum(1 for node in ray.nodes() if node["Alive"])
    most = max(1, min(truth.shards, nodes // truth.replicas))
    hosts = int(running[0].removeprefix(start).partition("-")[0]) if running else most
    return [[f"{start}{hosts}-{host}-{replica}" for replica in range(truth.replicas)] for host in range(hosts)]


def _named(ray: Any, start: str) -> list[str]:
    """Return the names of softdb's running actors with this prefix."""
    actors = ray.util.list_named_actors(all_namespaces=True)
    return [actor["name"] for actor in actors if actor["namespace"] == NAMESPACE and actor["name"].startswith(start)]


def _threads(ray: Any, names: list[list[str]]) -> int:
    """Return an actor's number of OpenMP threads: its share of the cluster's cores."""
    return max(1, int(ray.cluster_resources().get("CPU", 1)) // sum(map(len, names)))


def _key(url: str) -> str:
    return f"softdb-{blake2b(url.encode(), digest_size=8).hexdigest()}"


def _cause(error: Exception) -> str:
    """Return the cause of a failed call in one line: the exception of the actor's own code, if there is one."""
    cause = getattr(error, "cause", None)
    text = str(error) if cause is None else f"{type(cause).__name__}: {cause}"
    return " ".join(text.split())[:200] or type(error).__name__


def _connected() -> Any:
    """Return Ray, connected by `ray.init` or RAY_ADDRESS, else to a new cluster on this machine."""
    ray = _ray()
    if not ray.is_initialized():
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "lance is not fork-safe")  # Ray's forks exec at once
            ray.init(namespace=NAMESPACE, log_to_driver=False, include_dashboard=False)
    return ray


def _news(record: logging.LogRecord) -> bool:
    """Return False for Ray's warning of detached actors in a placement group: the group is detached, too."""
    return "detached actor with a placement group" not in record.getMessage()


def _ray() -> Any:
    return needed("ray", "cluster", "actors")
