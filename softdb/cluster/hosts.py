"""Actors of Ray that serve the shards of a table: `Host` has some of the shards, `ShardPlaces` says which.

Ray starts, restarts and names the actors. `ShardPlaces` compares Ray's nodes with the hosts every few seconds: it
starts hosts on new nodes, and moves shards until all hosts have about as many. A shard answers on its old host until
the new one is ready. If a node is lost, Ray restarts its hosts on other nodes, where they build their shards from the
table.
"""

from __future__ import annotations

import contextlib
import logging
import pickle
import socket
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from softdb.cluster.directories import remove_unused
from softdb.cluster.hydrate import Hydrated
from softdb.cluster.local import HydratedShard
from softdb.cluster.merge import together
from softdb.cluster.shard import Message
from softdb.errors import DatabaseLocked, SoftDBError, WriteFailed
from softdb.lance_table.truth import Truth
from softdb.store import files
from softdb.tables.arrow_tables import needed

_log = logging.getLogger("softdb")
NAMESPACE = "softdb"
THREADS = 4  # number of messages that an actor answers at once
LIGHT = 1 << 22  # `HydratedShard.work` below which shards of a host answer in turn: threads cost more than they save
RETRIES = 2  # number of times that Ray repeats a call whose actor died, if no other replica can be asked
CORES, BYTES = 8, 16 << 30  # a node has a host for so many cores and so much memory, and one host at least
PERIOD = 2.0  # seconds between two looks at Ray's nodes
HOSTS = 64  # largest number of hosts of a table on one machine; each has its own directories
GRACE = 60.0  # seconds without a question after which a moved shard leaves its old host
UNUSED = 600.0  # seconds without a question after which hosts end whose number of shards is outdated


class Host:
    """Actor that serves some shards of a table on one node."""

    def __init__(self, truth: Truth, folder: str, own_shards: Iterable[int]) -> None:
        self.truth, self.folder, self._own = truth, Path(folder), set(own_shards)
        self._lock: files.Lock | None = None  # of the directory in `folder` that this host uses
        self._opening = threading.Lock()
        self._shards: dict[int, HydratedShard] | None = None
        self._asked = dict[int, float]()  # shard -> time of its last question
        self._again = 0.0  # time from which `take` tries again after an error
        self._pool = ThreadPoolExecutor()

    def answer(self, sent: bytes) -> bytes:
        """Unpickle a dict {shard: message}, answer each message, and return the pickled dict {shards: reply or error}.

        `together` merges the replies. Messages travel as bytes because Ray's own pickling of objects takes longer than
        the rest of the call, and makes arrays read-only.
        """
        asks: dict[int, Message] = pickle.loads(sent)
        shards: dict[int, HydratedShard] | SoftDBError = self._shards or {}
        if asks.keys() - (self._shards or {}).keys():
            shards = self._opened(asks)
        if isinstance(shards, SoftDBError):
            return pickle.dumps(dict.fromkeys([(shard,) for shard in asks], shards))
        if moved := asks.keys() - shards.keys():
            return pickle.dumps({(shard,): RuntimeError("it has moved to another host") for shard in moved})
        self._asked.update(dict.fromkeys(asks, time.monotonic()))
        in_turn = all(shards[shard].work(ask) < LIGHT for shard, ask in asks.items())
        replies = (map if in_turn else self._pool.map)(lambda shard: _answered(shards[shard], asks[shard]), asks)
        return pickle.dumps(together(asks, dict(zip(asks, replies, strict=True))))

    def tend(self, sent: bytes) -> bytes:
        """Do the same as `answer`. Ray runs this method in its own threads, for slow messages such as `Refresh`."""
        return self.answer(sent)

    def take(self, shards: Sequence[int]) -> None:
        """Build more shards in a thread, unless one builds already; `status` tells when they are complete.

        `ShardPlaces` repeats this call until they are. After an error, the next attempt waits for GRACE seconds.
        """
        self._own |= {*shards}
        if not self._opening.locked() and time.monotonic() >= self._again:
            threading.Thread(target=self._opened, args=(shards,), name="softdb-hydrate", daemon=True).start()

    def drop(self, shard: int) -> None:
        """Serve a shard no more, and remove its directories."""
        self._own.discard(shard)
        dropped = (self._shards or {}).pop(shard, None)  # without the lock, which is held while others are built
        if dropped is not None:
            dropped.hydrated.leave(shard)
            _log.info("shard %s of %s was dropped from %s", shard, self.truth.url, self.folder)

    def status(self) -> dict[int, float]:
        """Return {shard: seconds since its last question} of the shards that are complete. Updates Ray's metrics."""
        now, shards = time.monotonic(), dict(self._shards or {})
        for shard in shards.values():
            with contextlib.suppress(SoftDBError, KeyError):  # it is being replaced, or the store is out of reach
                shard.report()
        return {shard: now - self._asked.setdefault(shard, now) for shard in shards}

    def _opened(self, shards: Iterable[int]) -> dict[int, HydratedShard] | SoftDBError:
        """Build those of the given shards that this host owns and lacks; return all its shards, or the error."""
        with self._opening:
            opened = self._shards = self._shards if self._shards is not None else {}
            if lacking := sorted((self._own & {*shards}) - opened.keys()):
                try:
                    if self._lock is None:
                        self.folder = self._claimed(lacking)
                    hydrated = Hydrated(self.truth, self.folder, lacking)
                except SoftDBError as error:
                    self._again = time.monotonic() + GRACE
                    _log.warning("shards %s of %s are not ready: %s", lacking, self.truth.url, error)
                    return error
                opened |= {shard: HydratedShard(hydrated, shard) for shard in lacking}
                _log.info("shards %s of %s are ready in %s", lacking, self.truth.url, self.folder)
            return dict(opened)

    def _claimed(self, shards: Sequence[int]) -> Path:
        """Lock and return a directory that no other host of this machine uses, if possible one with these shards.

        Removes directories of shards that this host does not own.
        """
        count = self.truth.shards
        names = {f"{shard}-of-{count}" for shard in shards}

        def present(number: int) -> int:
            return sum(path.name.partition(".")[0] in names for path in self.folder.glob(f"ray-{number}/*-of-*"))

        for number in sorted(range(HOSTS), key=lambda number: (-present(number), number)):
            folder = self.folder / f"ray-{number}"
            try:
                files.make_directory(folder)
                self._lock = files.acquire(folder / f"host-{count}")
            except OSError as error:
                problem = f"{folder} cannot be made on {socket.gethostname()} ({error})"
                raise WriteFailed(f"{problem}; stop() the actors, and open with another cache=") from error
            if self._lock is not None:
                own = {f"{shard}-of-{count}" for shard in self._own}
                for path in folder.glob("*-of-*"):
                    name = path.name.partition(".")[0]
                    if name.endswith(f"-of-{count}") and name not in own:
                        remove_unused(path)
                return folder
        raise DatabaseLocked(f"{HOSTS} hosts use {self.folder} on this machine; stop some, or give another cache=")


def _answered(shard: HydratedShard, ask: Message) -> Any:
    try:
        return shard.answer(ask)
    except SoftDBError as error:
        return error


class Move(NamedTuple):
    """A shard that one host builds while another one answers."""

    shard: int
    source: str  # names of hosts
    target: str


class ShardPlaces:
    """Actor that knows which hosts own which shards of a table, and moves shards when nodes join or leave."""

    def __init__(self, truth: Truth, folder: str, start: str) -> None:
        """`start`: first part of the names of the table's actors."""
        self.truth, self.folder, self.start = truth, folder, start
        self.owners: dict[int, list[str]] = {shard: [] for shard in range(truth.shards)}  # names of hosts
        self._hosts = dict[str, Any]()  # name -> actor
        self._moves = list[Move]()
        self._adopt()
        self.balance(moves=False)
        threading.Thread(target=self._watch, name="softdb-places", daemon=True).start()

    def layout(self) -> dict[int, list[str]]:
        """Return the names of the hosts that own each shard."""
        return self.owners

    def owned(self, name: str) -> list[int]:
        """Return the shards that a host must build when Ray restarts it."""
        own = [shard for shard, names in self.owners.items() if name in names]
        return own + [move.shard for move in self._moves if move.target == name]

    def _load(self, name: str) -> int:
        """Return the number of shards that a host has when all moves are complete."""
        return len(self.owned(name)) - sum(move.source == name for move in self._moves)

    def _adopt(self) -> None:
        """Learn what the hosts own that run already, after Ray has restarted this actor."""
        ray = ray_module()
        for name in named(ray, f"{self.start}host-"):
            with contextlib.suppress(ValueError):
                self._hosts[name] = ray.get_actor(name, namespace=NAMESPACE)
        nodes = {f"{self.start}host-{node['NodeID']}" for node in ray.nodes() if node["Alive"]}
        status = self._status(PERIOD)
        for _ in range(4):  # hosts of lost nodes have nothing; others may be busy
            if any(_node(name) in nodes for name in self._hosts.keys() - status.keys()):
                status |= self._status(PERIOD)
        for name, own in status.items():
            for shard in own:
                if len(self.owners[shard]) < self.truth.replicas:
                    self.owners[shard].append(name)

    def _status(self, timeout: float) -> dict[str, dict[int, float]]:
        """Return `Host.status` of the hosts that reply in time. Forgets hosts that somebody has killed for good."""
        ray, status = ray_module(), dict[str, dict[int, float]]()
        refs = {name: host.status.remote() for name, host in self._hosts.items()}
        ready = ray.wait([*refs.values()], num_returns=len(refs), timeout=timeout)[0] if refs else []
        for name, ref in refs.items():
            try:
                status |= {name: ray.get(ref)} if ref in ready else {}
            except ray.exceptions.ActorDiedError:
                _log.warning("%s of %s is started again: it was killed", name, self.truth.url)
                del self._hosts[name]
            except ray.exceptions.RayError:  # Ray restarts it
                continue
        return status

    def _watch(self) -> None:
        while True:
            time.sleep(PERIOD)
            try:
                self.balance()
            except Exception as error:
                _log.warning("%s: hosts are not balanced: %s", self.truth.url, error)

    def balance(self, moves: bool = True) -> None:
        """Start hosts on new nodes, give shards without owner to hosts, and move shards from full hosts to others."""
        ray = ray_module()
        nodes = {node["NodeID"]: node["Resources"] for node in ray.nodes() if node["Alive"]}
        slots = {node: _slots(resources) for node, resources in nodes.items() if resources.get("CPU", 0) >= 1}
        slots = {node: max(count, -(-self.truth.replicas // len(slots))) for node, count in slots.items()}
        most = max(slots.values(), default=0)
        wanted = [(node, slot) for slot in range(most) for node, count in slots.items() if slot < count]
        proper = [f"{self.start}host-{node}-{slot}" for node, slot in wanted][: self.truth.shards * self.truth.replicas]
        if not proper:
            return
        for shard, names in self.owners.items():
            while len(names) < min(self.truth.replicas, len(proper)):
                names.append(min(set(proper) - {*names}, key=self._cost(names)))
                if names[-1] in self._hosts:  # questions come as soon as handles know the owner
                    self._hosts[names[-1]].take.remote([shard])
        for name in proper:
            if name not in self._hosts:
                node = _node(name).rpartition("-")[2]
                self._hosts[name] = self._host(name, node, int(nodes[node].get("CPU", 1)) // slots[node])
        if moves:
            self._reconcile(ray, proper, self._status(PERIOD))

    def _cost(self, others: Iterable[str]) -> Callable[[str], tuple[bool, int, str]]:
        """Return the key to sort hosts by for a shard whose other replicas are on the hosts `others`.

        Hosts on nodes without another replica come first, then hosts with few shards.
        """
        used = {*map(_node, others)}
        return lambda name: (_node(name) in used, self._load(name), name)

    def _begin(self, proper: Sequence[str]) -> None:
        """Move shards of hosts whose node is gone or has another replica, or with two shards more than the emptiest."""
        moving = {move.shard for move in self._moves}
        for shard, names in self.owners.items():
            for source in names if shard not in moving else ():
                others = {*names} - {source}
                cost, targets = self._cost(others), set(proper) - {*names}
                if not targets:
                    continue
                target = min(targets, key=cost)
                shared, load, _ = cost(target)
                if source not in proper or cost(source)[:2] > (shared, load + 1):
                    self._moves.append(Move(shard, source, target))
                    break

    def _reconcile(self, ray: Any, proper: Sequence[str], status: dict[str, dict[int, float]]) -> None:
        """Make the targets of complete moves owners, and begin moves. Let hosts build and drop what they shall."""
        for move in [move for move in self._moves if move.shard in status.get(move.target, {})]:
            names = self.owners[move.shard]
            self.owners[move.shard] = [move.target if name == move.source else name for name in names]
            self._moves.remove(move)
            _log.info("shard %s of %s has moved from %s to %s", move.shard, self.truth.url, move.source, move.target)
        self._moves = [move for move in self._moves if move.target in proper]
        self._begin(proper)
        for name, own in status.items():
            wanted = self.owned(name)
            if lacking := [shard for shard in wanted if shard not in own]:
                self._hosts[name].take.remote(lacking)
            for shard in [shard for shard, idle in own.items() if shard not in wanted and idle >= GRACE]:
                self._hosts[name].drop.remote(shard)
            if not own and not wanted and name not in proper:
                ray.kill(self._hosts.pop(name))
        idle = min((min(own.values(), default=0.0) for own in status.values()), default=0.0)
        if idle >= UNUSED and self.truth.own and self.truth.stored_shards() != self.truth.shards:
            for name in [*self._hosts, f"{self.start}places"]:
                ray.kill(ray.get_actor(name, namespace=NAMESPACE))

    def _host(self, name: str, node: str, threads: int) -> Any:
        """Start a host on a node, or on another one if the node is lost."""
        ray = ray_module()
        actor_class = ray.remote(
            concurrency_groups={"answers": THREADS, "tending": THREADS},
            max_restarts=-1,
            max_task_retries=RETRIES,
            num_cpus=0,
        )(_grouped(ray))
        options = actor_class.options(
            name=name,
            namespace=NAMESPACE,
            lifetime="detached",
            get_if_exists=True,
            scheduling_strategy=ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node, soft=True),
            # Ray would set as many OpenMP threads as the actor reserves CPUs (ray-project/ray#30496)
            runtime_env={"env_vars": {"OMP_NUM_THREADS": str(max(1, threads)), "OMP_WAIT_POLICY": "PASSIVE"}},
        )
        return options.remote(self.truth, self.folder, self.owned(name), name, f"{self.start}places")


def _slots(resources: dict[str, float]) -> int:
    """Return the number of hosts for a node with these resources of Ray."""
    return max(1, int(min(resources["CPU"] // CORES, resources.get("memory", 0) // BYTES)))


def _node(name: str) -> str:
    """Return the part of a host's name that names its node."""
    return name.rpartition("-")[0]


def _grouped(ray: Any) -> type:
    class Grouped(Host):
        def __init__(self, truth: Truth, folder: str, own_shards: Sequence[int], name: str, places: str) -> None:
            with contextlib.suppress(ray.exceptions.RayError, ValueError):  # after a restart, it may own other shards
                if ray.get_runtime_context().was_current_actor_reconstructed:
                    owned = ray.get_actor(places, namespace=NAMESPACE).owned.remote(name)
                    own_shards = ray.get(owned, timeout=10 * PERIOD)
                    _log.warning("%s was restarted, with shards %s of %s", name, own_shards, truth.url)
            super().__init__(truth, folder, own_shards)
            self.take(own_shards)  # at once: a restarted replica must be ready when another replica is lost

        answer = ray.method(concurrency_group="answers")(Host.answer)
        tend = ray.method(concurrency_group="tending")(Host.tend)

    Grouped.__name__ = "Host"
    return Grouped


def named(ray: Any, start: str) -> list[str]:
    """Return the names of softdb's running actors whose names begin with `start`."""
    actors = ray.util.list_named_actors(all_namespaces=True)
    return [actor["name"] for actor in actors if actor["namespace"] == NAMESPACE and actor["name"].startswith(start)]


def ray_module() -> Any:
    """Import Ray. Raises MissingDependency."""
    return needed("ray", "cluster", "actors")
