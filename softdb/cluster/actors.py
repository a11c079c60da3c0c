"""Transport to shards on a Ray cluster: one actor on each host. Ray places and restarts actors, and retries calls.

Actors are detached and named after the table, so that all drivers use the same actors. An actor's directories are a
cache: an actor that Ray restarts on another host builds its directories again from the table.
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
from softdb.tables.arrow_tables import needed

NAMESPACE = "softdb"
THREADS = 4  # number of messages that an actor answers at once
RETRIES = 2  # number of times that Ray repeats a call whose actor died, if no other replica can be asked
PENDING = 256  # largest number of calls that may wait for one actor
HEDGE = 3  # if a replica has not answered after timeout / HEDGE seconds, the next replica is asked, too


class Host:
    """Actor that serves some shards of a table on one host."""

    def __init__(self, truth: Truth, folder: str, own_shards: Sequence[int]) -> None:
        self.truth, self.folder, self.own_shards = truth, folder, list(own_shards)
        self._opening = threading.Lock()
        self._shards: dict[int, HydratedShard] | None = None
        self._pool = ThreadPoolExecutor(max(1, len(self.own_shards) - 1))

    def answer(self, sent: bytes) -> bytes:
        """Unpickle a dict {shard: message}, answer each message, and return the pickled dict {shards: reply or error}.

        `together` merges the replies. Messages travel as bytes because Ray's own pickling of objects takes longer than
        the rest of the call, and makes arrays read-only.
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
        """Do the same as `answer`. Ray runs this method in its own threads, for slow messages such as `Refresh`."""
        return self.answer(sent)

    def pid(self) -> int:
        """Return the id of the actor's process."""
        return os.getpid()

    def _opened(self) -> dict[int, HydratedShard] | SoftDBError:
        """Return this actor's shards, or the error that building them raised. The first call builds the shards."""
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
    """Transport to actors: shard s is on host s mod (number of hosts), and each replica of that host answers for it."""

    collective = False

    def __init__(self, hosts: Sequence[Sequence[Any]], shards: int) -> None:
        self.hosts, self.shards = [list(replicas) for replicas in hosts], shards
        self.first = [0] * len(self.hosts)  # for each host, the index of the replica that answered last
        self._following: dict[tuple[int, int], Any] = {}  # (host, replica) -> last `Refresh` call sent to that replica

    def ask(self, asks: Mapping[int, Message], timeout: float) -> ShardReplies:
        """Send messages, as `Transport.ask` says. If a replica is dead or slow, ask the next replica of that host."""
        replies = _FanOut(self, asks, timeout).answers()
        self._bring_on({shard: asks[shard] for shard in replies.replies}, replies.replies)
        return replies

    def _bring_on(self, asks: Mapping[int, Message], replies: Mapping[int, Any]) -> None:
        """Bring replicas that were not asked to the version of the replica that replied, so that they can take over.

        Does not wait for the replicas. Cancels an older refresh that a replica has not begun yet.
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
        """Return `more`, because there is only one caller (see `Transport.anyone`)."""
        return more

    def close(self) -> None:
        """Do nothing: the actors keep running until `stop`."""

    def order(self, host: int) -> list[int]:
        """Return the indices of a host's replicas. The replica that answered last comes first."""
        first, count = self.first[host], len(self.hosts[host])
        return [(first + i) % count for i in range(count)]


class _FanOut:
    """One call of `Actors.ask`: the messages to all hosts, the replicas still to ask, and the replies so far."""

    def __init__(self, actors: Actors, asks: Mapping[int, Message], timeout: float) -> None:
        self.actors, self.timeout, self.started = actors, timeout, time.monotonic()
        self.parts: dict[int, dict[int, Message]] = {}  # {host: {shard: message}}
        for shard, ask in asks.items():
            self.parts.setdefault(shard % len(actors.hosts), {})[shard] = ask
        self.remaining = {host: actors.order(host) for host in self.parts}  # {host: replicas not asked yet}
        self.waiting: dict[Any, tuple[int, int]] = {}  # call that has no reply yet -> (host, replica)
        self.replies, self.failures = dict[int, dict[tuple[int, ...], Any]](), dict[int, str]()  # {host: …}

    def answers(self) -> ShardReplies:
        """Ask one replica of every host, or the next if it is dead or slow; return the replies that arrive in time."""
        ray = _ray()
        for host in self.parts:
            self._send(host)
        hedged, sent = False, list(self.waiting)
        with contextlib.suppress(ray.exceptions.RayError):  # usually all hosts reply, and one `ray.get` suffices
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
        for ref in self.waiting:  # calls to actors that are stuck, or slower than another replica
            ray.cancel(ref)
        answers = {owners: reply for parts in self.replies.values() for owners, reply in parts.items()}
        failed = [(host, shard) for host, asks in self.parts.items() if host not in self.replies for shard in asks]
        missing = {shard: self.failures.get(host, "no answer from its actor") for host, shard in failed}
        return of_owners(answers, missing)

    def _send(self, host: int) -> None:
        """Send the messages for a host to its next replica; skip replicas that refuse the call."""
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


def hosted(truth: Truth, folder: Path, timeout: float) -> Actors:
    """Return the transport to the actors that serve a table. Start actors that do not run yet."""
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
    """End the actors that serve a table, and return the number of actors. The shards' directories stay on disk."""
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
    """Return Ray's placement group that spreads the actors over nodes; create it if needed. Raises ShardUnavailable."""
    ray, name = _ray(), f"{_key(truth.url)}-{bundles}"
    existing = _groups(ray, name)
    if existing:
        return existing[0]
    # reserve a byte of memory, which every node has: a fraction of a CPU would keep other tasks from that CPU
    group = ray.util.placement_group([{"memory": 1}] * bundles, strategy="SPREAD", name=name, lifetime="detached")
    ready, _ = ray.wait([group.ready()], timeout=timeout)
    if not ready:
        ray.util.remove_placement_group(group)
        raise ShardUnavailable(f"Ray had no room for {bundles} actors within {timeout:g} s; add hosts to Ray's cluster")
    return group


def _groups(ray: Any, start: str) -> list[Any]:
    """Return the placement groups whose names begin with `start`, from all namespaces (Ray's lookup searches one)."""
    from ray.util.placement_group import PlacementGroup

    return [
        PlacementGroup(ray.PlacementGroupID(bytes.fromhex(number)))
        for number, group in ray.util.placement_group_table().items()
        if group["name"].startswith(start) and group["state"] != "REMOVED"
    ]


def _names(truth: Truth, ray: Any) -> list[list[str]]:
    """Return the actors' names [host][replica]: of the running hosts, or of as many as nodes and shards allow."""
    start = "-".join(filter(None, [_key(truth.url), truth.digest, f"{truth.shards}-"]))
    running = _named(ray, start)
    nodes = sum(1 for node in ray.nodes() if node["Alive"])
    most = max(1, min(truth.shards, nodes // truth.replicas))
    hosts = int(running[0].removeprefix(start).partition("-")[0]) if running else most
    return [[f"{start}{hosts}-{host}-{replica}" for replica in range(truth.replicas)] for host in range(hosts)]


def _named(ray: Any, start: str) -> list[str]:
    """Return the names of softdb's running actors whose names begin with `start`."""
    actors = ray.util.list_named_actors(all_namespaces=True)
    return [actor["name"] for actor in actors if actor["namespace"] == NAMESPACE and actor["name"].startswith(start)]


def _threads(ray: Any, names: list[list[str]]) -> int:
    """Return the number of OpenMP threads for each actor: the cluster's cores divided by the number of actors."""
    return max(1, int(ray.cluster_resources().get("CPU", 1)) // sum(map(len, names)))


def _key(url: str) -> str:
    return f"softdb-{blake2b(url.encode(), digest_size=8).hexdigest()}"


def _cause(error: Exception) -> str:
    """Return one line that says why a call failed: the exception that the actor's code raised, else Ray's own."""
    cause = getattr(error, "cause", None)
    text = str(error) if cause is None else f"{type(cause).__name__}: {cause}"
    return " ".join(text.split())[:200] or type(error).__name__


def _connected() -> Any:
    """Return module `ray`, connected: by the user's `ray.init`, to RAY_ADDRESS, or to a new cluster on this machine."""
    ray = _ray()
    if not ray.is_initialized():
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "lance is not fork-safe")  # Ray's child processes exec at once
            ray.init(namespace=NAMESPACE, log_to_driver=False, include_dashboard=False)
    return ray


def _news(record: logging.LogRecord) -> bool:
    """Return False for one warning of Ray, which does not apply: our placement group is detached, as the actors are."""
    return "detached actor with a placement group" not in record.getMessage()


def _ray() -> Any:
    return needed("ray", "cluster", "actors")
