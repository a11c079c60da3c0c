"""Choice and timing of replicas, on a stand-in for Ray with a clock that the test moves."""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest

from softdb.check import Metric, Schema
from softdb.cluster import actors
from softdb.cluster.actors import Actors
from softdb.cluster.hosts import PERIOD
from softdb.cluster.shard import NEWEST, VERSION_BITS, CallVerb, Description, Message, Refresh
from softdb.errors import StaleRead
from softdb.lance_table.truth import Truth
from softdb.tables.rows import Fields

TIMEOUT = 30.0
NEVER = 1e9
AT = 7  # the newest version
SCHEMA = Schema(4, None, None, np.dtype(np.float32), Metric.DOT)


class RayError(Exception):
    """An error of Ray."""


class Does(NamedTuple):
    """Outcome of a call of an actor."""

    after: float = 0.0  # seconds
    dies: str = ""
    full: bool = False  # it takes no more calls
    error: Exception | None = None  # of softdb, in place of the replies


class Call:
    """A running call."""

    def __init__(self, at: float, reply: bytes | RayError) -> None:
        self.at, self.reply = at, reply


class Method(NamedTuple):
    """Of an actor."""

    actor: Actor
    name: str
    retries: int | None = None

    def options(self, max_task_retries: int) -> Method:
        """Stand-in for Ray's class."""
        return self._replace(retries=max_task_retries)

    def remote(self, sent: bytes) -> Call:
        """Stand-in for Ray's class."""
        return self.actor.call(sent, self.name, self.retries)


class Actor:
    """One replica of a host: its reaction to each call, the last one repeated."""

    def __init__(self, ray: Ray, name: str, *does: Does) -> None:
        self.ray, self.name, self.does = ray, name, [*does]
        self.asked: list[tuple[float, str]] = []  # when, and by which method
        self.sent: list[dict[int, Message]] = []
        self.retries: list[int | None] = []  # of each call; None: as many as the actor has
        for method in ("answer", "tend"):
            setattr(self, method, Method(self, method))

    def call(self, sent: bytes, method: str, retries: int | None) -> Call:
        """As `remote`."""
        self.asked.append((self.ray.now, method))
        self.retries.append(retries)
        does = self.does.pop(0) if len(self.does) > 1 else self.does[0]
        if does.full:
            raise RayError("too many wait")
        self.sent.append(pickle.loads(sent))
        reply = {(shard,): does.error or self.reply(shard, ask) for shard, ask in self.sent[-1].items()}
        return Call(self.ray.now + does.after, RayError(does.dies) if does.dies else pickle.dumps(reply))

    def reply(self, shard: int, ask: Message) -> Any:
        """A reply of a shard."""
        if not isinstance(ask, Refresh):
            return self.name
        version = AT if ask.version == NEWEST else ask.version
        return Description(shard, 2, (shard << VERSION_BITS) + version, SCHEMA, 0, 0.0, None, None, 0)


class Ray:
    """The part of Ray that the fan-out uses."""

    exceptions = SimpleNamespace(RayError=RayError, ActorDiedError=type("ActorDiedError", (RayError,), {}))

    def __init__(self) -> None:
        self.now, self.cancelled = 0.0, list[Call]()

    def cancel(self, call: Call) -> None:
        self.cancelled.append(call)

    def get(self, calls: Any, timeout: float = NEVER) -> Any:
        every = calls if isinstance(calls, list) else [calls]
        until = self.now + timeout
        failed = [one.at for one in every if isinstance(one.reply, RayError)]
        end = min(failed, default=max((one.at for one in every), default=self.now))
        self.now = max(self.now, min(end, until))
        if end > until:
            raise RayError("timeout")
        for one in every:
            if isinstance(one.reply, RayError) and one.at <= self.now:
                raise one.reply
        found = [one.reply for one in every]
        return found if isinstance(calls, list) else found[0]

    def wait(self, calls: Sequence[Call], timeout: float) -> tuple[list[Call], list[Call]]:
        first = min(calls, key=lambda one: one.at)
        if first.at > self.now + timeout:
            self.now += timeout
            return [], list(calls)
        self.now = max(self.now, first.at)
        return [first], [call for call in calls if call is not first]


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> Ray:
    ray = Ray()
    monkeypatch.setattr(actors, "ray_module", lambda: ray)
    monkeypatch.setattr(actors, "time", SimpleNamespace(monotonic=lambda: ray.now))
    return ray


def one_host(ray: Ray, *does: list[Does]) -> tuple[Actors, list[Actor]]:
    """Two shards on one host, with a replica for each list of reactions."""
    replicas = [Actor(ray, f"replica {i}", *own) for i, own in enumerate(does)]
    return Actors([replicas], 2), replicas


ASKS: dict[int, Message] = {shard: CallVerb(3, "count", {}) for shard in range(2)}


def by(name: str) -> tuple[dict[int, str], dict[int, str]]:
    """Both shards' replies, of one replica."""
    return dict.fromkeys(range(2), name), {}


def test_only_the_first_replica_is_asked(ray: Ray) -> None:
    transport, (first, second) = one_host(ray, [Does(1.0)], [Does()])
    assert transport.ask(ASKS, TIMEOUT)[:2] == by("replica 0")
    assert (first.asked, second.asked, ray.now) == ([(0.0, "answer")], [], 1.0)


@pytest.mark.parametrize("how", [Does(1.0, dies="the actor died"), Does(full=True)], ids=["dies", "full"])
def test_a_replica_takes_over_and_is_asked_first_afterwards(ray: Ray, how: Does) -> None:
    transport, (first, second) = one_host(ray, [how, Does()], [Does()])
    for _ in range(2):
        assert transport.ask(ASKS, TIMEOUT)[:2] == by("replica 1")
    assert (first.retries, second.retries) == ([0], [None, 0])  # Ray retries only if there is no other actor to ask
    assert ray.now == how.after


def test_a_replica_replaces_a_slow_actor_after_a_third_of_the_timeout(ray: Ray) -> None:
    transport, (first, second) = one_host(ray, [Does(NEVER), Does()], [Does(1.0)])
    assert transport.ask(ASKS, TIMEOUT)[:2] == by("replica 1")
    assert (first.asked, second.asked, ray.now) == ([(0.0, "answer")], [(10.0, "answer")], 11.0)


def test_abandoned_calls_are_cancelled(ray: Ray) -> None:
    """Of a slow actor whose replica has answered, and of all that time out; never one that was answered."""
    transport, _ = one_host(ray, [Does(NEVER)], [Does(1.0)])
    transport.ask(ASKS, TIMEOUT)
    assert [call.at for call in ray.cancelled] == [NEVER]
    ray.cancelled.clear()
    alone, _ = one_host(ray, [Does(NEVER)], [Does(NEVER)])
    assert alone.ask(ASKS, TIMEOUT).replies == {}
    assert len(ray.cancelled) == 2
    ray.cancelled.clear()
    well, _ = one_host(ray, [Does(1.0)])
    well.ask(ASKS, TIMEOUT)
    assert ray.cancelled == []


def test_the_cause_of_a_failed_call_is_named_first(ray: Ray, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray raises a traceback whose last line is the exception."""
    actual = RayError("ray::Host.answer() (pid=1, ip=192.0.2.2)\n" + "  File host.py\n" * 50 + "OSError: no space left")
    monkeypatch.setattr(actual, "cause", OSError("no space left"), raising=False)
    monkeypatch.setattr(Actor, "call", lambda *_: Call(0.0, actual))
    transport, _ = one_host(ray, [Does()])
    assert transport.ask(ASKS, TIMEOUT).missing == dict.fromkeys(range(2), "OSError: no space left")


def test_a_slow_actor_is_awaited_if_its_replica_dies(ray: Ray) -> None:
    transport, (_, second) = one_host(ray, [Does(20.0)], [Does(1.0, dies="the actor died")])
    assert transport.ask(ASKS, TIMEOUT)[:2] == by("replica 0")
    assert (len(second.asked), ray.now) == (1, 20.0)


def test_of_two_that_answer_the_first_counts(ray: Ray) -> None:
    transport, _ = one_host(ray, [Does(10.5)], [Does(2.0)])
    assert transport.ask(ASKS, TIMEOUT)[:2] == by("replica 0")
    assert transport.layout.order(0) == [0, 1]


@pytest.mark.parametrize(
    ("how", "why", "end"),
    [
        (Does(NEVER), "no answer from its actor", TIMEOUT),
        (Does(2.0, dies="the actor\n  died"), "the actor died", 4.0),
        (Does(full=True), "too many wait", 0.0),
    ],
    ids=["slow", "dies", "full"],
)
def test_unanswered_shards_are_missing_within_the_timeout(ray: Ray, how: Does, why: str, end: float) -> None:
    transport, _ = one_host(ray, [how], [how])
    assert transport.ask(ASKS, TIMEOUT)[:2] == ({}, dict.fromkeys(range(2), why))
    assert ray.now == end


def test_other_hosts_answer_for_a_silent_host(ray: Ray) -> None:
    hosts = [[Actor(ray, "dead", Does(dies="the actor died"))], [Actor(ray, "well", Does(1.0))]]
    actual = Actors(hosts, 2).ask(ASKS, TIMEOUT)
    assert actual[:2] == ({1: "well"}, {0: "the actor died"})


def test_errors_of_a_shard_are_raised(ray: Ray) -> None:
    transport, _ = one_host(ray, [Does(error=StaleRead("shard 1 is at version 4"))])
    with pytest.raises(StaleRead, match="shard 1 is at version 4"):
        transport.ask(ASKS, TIMEOUT)


@pytest.mark.parametrize(
    ("message", "method"),
    [(Refresh(NEWEST), "tend"), (CallVerb(3, "build_index", {}), "tend"), (CallVerb(3, "get", {}), "answer")],
    ids=["refresh", "build_index", "get"],
)
def test_answers_do_not_wait_for_long_changes(ray: Ray, message: Message, method: str) -> None:
    transport, (only,) = one_host(ray, [Does()])
    transport.ask({0: message}, TIMEOUT)
    assert only.asked == [(0.0, method)]


NEWS: dict[int, Message] = dict.fromkeys(range(2), Refresh(NEWEST))


def test_a_refresh_brings_the_other_replicas_to_the_same_version(ray: Ray) -> None:
    transport, (first, second) = one_host(ray, [Does(1.0)], [Does(20.0)])
    transport.ask(NEWS, TIMEOUT)
    assert (first.asked, second.asked) == ([(0.0, "tend")], [(1.0, "tend")])
    assert second.sent == [dict.fromkeys(range(2), Refresh(AT))]
    assert ray.now == 1.0  # no call waits for it
    for ask in (CallVerb(AT, "count", {}), CallVerb(AT, "build_index", {})):
        transport.ask({0: ask}, TIMEOUT)
    assert len(second.asked) == 1


def test_refreshes_look_for_moved_shards_as_often_as_shards_move(ray: Ray, monkeypatch: pytest.MonkeyPatch) -> None:
    host, times = Actor(ray, "host", Does(1.0)), list[float]()

    def layout() -> Any:
        times.append(ray.now)
        return Call(ray.now, {0: ["host"], 1: ["host"]})  # type: ignore[arg-type]

    named = {"host": host, "places": SimpleNamespace(layout=SimpleNamespace(remote=layout))}
    monkeypatch.setattr(Ray, "get_actor", lambda _, name, namespace: named[name], raising=False)
    transport = Actors([], 2, "places")
    for _ in range(5):
        transport.ask(NEWS, TIMEOUT)
    assert (times, len(host.asked), PERIOD) == ([0.0, 2.0, 4.0], 5, 2.0)


def test_a_busy_replica_still_gets_the_change(ray: Ray) -> None:
    """And what still waits in it is cancelled: the last call alone brings it on."""
    transport, (first, second) = one_host(ray, [Does(1.0)], [Does(10.0)])
    for _ in range(5):
        transport.ask(NEWS, TIMEOUT)
    assert (len(first.asked), len(second.asked)) == (5, 5)
    assert [call.at for call in ray.cancelled] == [11.0, 12.0, 13.0, 14.0]


def test_a_lost_actor_catches_up_from_its_replacement(ray: Ray) -> None:
    transport, (first, second) = one_host(ray, [Does(dies="the actor died"), Does(1.0)], [Does(1.0)])
    transport.ask(NEWS, TIMEOUT)
    assert (len(first.asked), len(second.asked)) == (2, 1)
    assert first.sent[1] == dict.fromkeys(range(2), Refresh(AT))


def test_a_replica_that_takes_no_more_calls_does_not_matter(ray: Ray) -> None:
    transport, (_, second) = one_host(ray, [Does(1.0)], [Does(full=True)])
    for _ in range(2):
        assert transport.ask(NEWS, TIMEOUT).missing == {}
    assert (len(second.asked), second.sent) == (2, [])


@pytest.mark.parametrize(
    "other",
    [
        {"fields": Fields(key="right")},
        {"schema": dataclasses.replace(SCHEMA, metric=Metric.L2)},
        {"payload": ("title",)},
        {"shards": 4},
        {"url": "/elsewhere"},
    ],
)
def test_each_reading_of_a_table_has_actors_of_its_own(other: dict[str, Any]) -> None:
    truth = Truth("/table", None, Fields(key="left"), False, SCHEMA, 2, 1)
    starts = [actors._start(one) for one in (truth, dataclasses.replace(truth, **other))]
    assert not starts[0].startswith(starts[1])
    assert not starts[1].startswith(starts[0])
    assert actors._start(truth) == starts[0]
