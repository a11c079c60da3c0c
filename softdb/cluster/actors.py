"""Transport to shards on a Ray cluster: asks the actors of `hosts.py`. Ray restarts actors and retries calls.

Actors are detached and named after the table, so that all drivers use the same actors. An actor's directories are a
cache: an actor that Ray restarts on another node builds its directories again from the table.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

from softdb.cluster.addresses import address
from softdb.cluster.hosts import NAMESPACE, PERIOD, THREADS, ShardPlaces, named, ray_module
from softdb.cluster.merge import of_owners
from softdb.cluster.shard import Message, Refresh, ShardReplies, Transport, of_records
from softdb.errors import ShardUnavailable
from softdb.lance_table.truth import Truth

HEDGE = 3  # if a replica has not answered after timeout / HEDGE seconds, the next replica is asked, too
AGAIN = 0.5  # seconds after which hosts that were killed for good are looked up again
LAYOUTS = 256  # number of versions for which a handle remembers the hosts that described them


class HostLayout:
    """Hosts of the shards: replicas that serve the same shards are one host."""

    def __init__(self, hosts: Sequence[Sequence[Any]], home: Mapping[int, int]) -> None:
        self.hosts, self.home = [list(replicas) for replicas in hosts], home  # home: shard -> index of its host
        self.first = [0] * len(self.hosts)  # for each host, the index of the replica that answered last

    def order(self, host: int) -> list[int]:
        """Return the indices of a host's replicas. The replica that answered last comes first."""
        first, count = self.first[host], len(self.hosts[host])
        return [(first + i) % count for i in range(count)]


class Actors(Transport):
    """Transport to actors, found by the `ShardPlaces` named `places`; None: shard s is on host s mod their number."""

    def __init__(self, hosts: Sequence[Sequence[Any]], shards: int, places: str | None = None) -> None:
        self.shards, self._places, self._owners = shards, places, dict[int, list[str]]()
        self._actor: Any = None  # the actor named `places`
        self._located = -PERIOD  # time.monotonic() at which `places` was asked last
        self.layout = HostLayout(hosts, {shard: shard % len(hosts) for shard in range(shards)} if hosts else {})
        self._layouts = dict[int, HostLayout]()  # version -> hosts that described it, and serve it after a move, too
        self._following: dict[Any, Any] = {}  # replica -> last `Refresh` call sent to that replica

    def ask(self, asks: Mapping[int, Message], timeout: float) -> ShardReplies:
        """Send messages, as `Transport.ask` says. If a replica is dead or slow, ask the next replica of that host.

        If a shard has moved, asks its new host. If its hosts were killed for good, waits for others until the timeout.
        """
        started, refreshes = time.monotonic(), any(isinstance(ask, Refresh) for ask in asks.values())
        if refreshes and started >= self._located + PERIOD:
            self.locate(timeout / HEDGE)
        version = max((of_records(ask.version) for ask in asks.values()), default=0)
        layout, replies = self._answers(version, asks, started + timeout)
        if refreshes:
            self._bring_on(layout, {shard: asks[shard] for shard in replies.replies}, replies.replies)
            versions = {of_records(description.version) for description in replies.replies.values()}
            self._layouts |= dict.fromkeys(versions, layout)
            for version in [*self._layouts][:-LAYOUTS]:
                del self._layouts[version]
        return replies

    def _answers(self, version: int, asks: Mapping[int, Message], deadline: float) -> tuple[HostLayout, ShardReplies]:
        """Ask the hosts that described a version, and new hosts for the shards without a reply, until `deadline`."""
        layout = self._layouts.get(version, self.layout)
        calls = _FanOut(layout, asks, deadline - time.monotonic())
        replies = calls.answers()
        while replies.missing and (remaining := deadline - time.monotonic()) > 0:
            if not self.locate(remaining, anew=True) and layout is self.layout and not (calls.died and self._places):
                break
            layout = self.layout
            self._layouts.pop(version, None)
            calls = _FanOut(layout, {shard: asks[shard] for shard in replies.missing}, remaining)
            others = calls.answers()
            merged = {**replies.merged, **others.merged}
            replies = ShardReplies({**replies.replies, **others.replies}, others.missing, merged)
            if not calls.died:
                break
            time.sleep(min(AGAIN, remaining))
        return layout, replies

    def locate(self, timeout: float, anew: bool = False) -> bool:
        """Ask which actors own the shards; return True if they have changed, or if all were looked up `anew`.

        Raises ShardUnavailable if they were stopped.
        """
        if self._places is None:
            return False
        ray, self._located = ray_module(), time.monotonic()
        try:
            if anew or self._actor is None:
                self._actor = ray.get_actor(self._places, namespace=NAMESPACE)
        except ValueError:
            raise ShardUnavailable("the actors of this handle were stopped; open the table again") from None
        try:
            owners = ray.get(self._actor.layout.remote(), timeout=timeout)
            if owners == self._owners and not anew:
                return False
            actors = {n: ray.get_actor(n, namespace=NAMESPACE) for names in owners.values() for n in names}
        except (ray.exceptions.RayError, ValueError):  # it is being restarted: the owners known so far are asked
            return False
        hosts = list(dict.fromkeys(tuple(names) for names in owners.values()))
        home = {shard: hosts.index(tuple(names)) for shard, names in owners.items()}
        self.layout, self._owners = HostLayout([[actors[name] for name in names] for names in hosts], home), owners
        return True

    def _bring_on(self, layout: HostLayout, asks: Mapping[int, Message], replies: Mapping[int, Any]) -> None:
        """Bring replicas that were not asked to the version of the replica that replied, so that they can take over.

        Does not wait for the replicas. Cancels an older refresh that a replica has not begun yet.
        """
        by_host: dict[int, dict[int, Message]] = {}
        for shard, ask in asks.items():
            if isinstance(ask, Refresh):
                version = of_records(replies[shard].version)
                by_host.setdefault(layout.home[shard], {})[shard] = replace(
                    ask, version=version, rebuild=False, again=False
                )
        ray = ray_module()
        for host, refreshes in by_host.items():
            for replica in layout.order(host)[1:]:
                actor = layout.hosts[host][replica]
                with contextlib.suppress(ray.exceptions.RayError):
                    if actor in self._following:
                        ray.cancel(self._following[actor])
                    self._following[actor] = actor.tend.remote(pickle.dumps(refreshes))

    def close(self) -> None:
        """Do nothing: the actors keep running until `stop`."""


class _FanOut:
    """One call of `Actors.ask`: the messages to all hosts, the replicas still to ask, and the replies so far."""

    def __init__(self, layout: HostLayout, asks: Mapping[int, Message], timeout: float) -> None:
        self.layout, self.timeout, self.started = layout, timeout, time.monotonic()
        self.parts: dict[int, dict[int, Message]] = {}  # {host: {shard: message}}
        for shard, ask in asks.items():
            self.parts.setdefault(layout.home[shard], {})[shard] = ask
        self.remaining = {host: layout.order(host) for host in self.parts}  # {host: replicas not asked yet}
        self.waiting: dict[Any, tuple[int, int]] = {}  # call that has no reply yet -> (host, replica)
        self.replies, self.failures = dict[int, dict[tuple[int, ...], Any]](), dict[int, str]()  # {host: …}
        self.died = False  # True: Ray does not restart some replica

    def answers(self) -> ShardReplies:
        """Ask one replica of every host, or the next if it is dead or slow; return the replies that arrive in time."""
        ray = ray_module()
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
            actor = self.layout.hosts[host][replica]
            long = any(isinstance(ask, Refresh) or getattr(ask, "verb", "") == "build_index" for ask in asks.values())
            method = actor.tend if long else actor.answer
            if self.remaining[host]:  # the next replica answers sooner than a restarted actor
                method = method.options(max_task_retries=0)
            try:
                self.waiting[method.remote(pickle.dumps(asks))] = host, replica
                return
            except ray_module().exceptions.RayError as error:
                self._failed(host, error)

    def _take(self, ref: Any) -> None:
        ray = ray_module()
        try:
            self._note(ref, ray.get(ref))
        except ray.exceptions.RayError as error:
            host, _ = self.waiting.pop(ref)
            self._failed(host, error)
            self._send(host)

    def _failed(self, host: int, error: Exception) -> None:
        self.failures[host] = _cause(error)
        self.died |= isinstance(error, ray_module().exceptions.ActorDiedError)

    def _note(self, ref: Any, reply: bytes) -> None:
        host, replica = self.waiting.pop(ref)
        self.replies.setdefault(host, pickle.loads(reply))
        self.layout.first[host] = replica


def hosted(truth: Truth, folder: Path, timeout: float) -> Actors:
    """Return the transport to the actors that serve a table. Start actors that do not run yet."""
    ray, name = _connected(), f"{_start(truth)}places"
    places = ray.remote(num_cpus=0, max_concurrency=THREADS, max_restarts=-1, max_task_retries=-1)(ShardPlaces)
    actor = places.options(name=name, namespace=NAMESPACE, lifetime="detached", get_if_exists=True)
    actor.remote(truth, str(folder), _start(truth))
    actors = Actors([], truth.shards, name)
    if not actors.locate(timeout):
        raise ShardUnavailable(f"the actors of {truth.url} did not start within {timeout:g} s; open it again")
    if not all(actors.layout.hosts):
        raise ShardUnavailable(f"Ray has no node with a CPU for {truth.url}; add one, then open it again")
    return actors


def stop(url: str | os.PathLike[str]) -> int:
    """End the actors that serve a table, and return the number of hosts; 0 without a running cluster of Ray.

    The shards' directories stay on disk.
    """
    try:
        ray = _connected(address="auto")
    except ConnectionError:  # no cluster of Ray runs
        return 0
    names = sorted(named(ray, f"{_key(address(url))}-"), key=lambda name: not name.endswith("-places"))
    for name in names:  # first those that would start hosts again
        ray.kill(ray.get_actor(name, namespace=NAMESPACE))
    return sum(not name.endswith("-places") for name in names)


def _start(truth: Truth) -> str:
    """Return the first part of the names of the actors that serve one reading of a table."""
    return "-".join(filter(None, [_key(truth.url), truth.digest, f"{truth.shards}-"]))


def _key(url: str) -> str:
    return f"softdb-{blake2b(url.encode(), digest_size=8).hexdigest()}"


def _cause(error: Exception) -> str:
    """Return one line that says why a call failed: the exception that the actor's code raised, else Ray's own."""
    cause = getattr(error, "cause", None)
    text = str(error) if cause is None else f"{type(cause).__name__}: {cause}"
    return " ".join(text.split())[:200] or type(error).__name__


def _connected(**where: str) -> Any:
    """Return module `ray`, connected: by the user's `ray.init`, to RAY_ADDRESS, or to a new cluster on this machine.

    `where`: arguments of `ray.init`; with address="auto" no new cluster is started.
    """
    ray = ray_module()
    if not ray.is_initialized():
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "lance is not fork-safe")  # Ray's child processes exec at once
            ray.init(namespace=NAMESPACE, log_to_driver=False, include_dashboard=False, **where)
    return ray
