"""The gate between the answers of a shard and its changes."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import pytest

from softdb.cluster.directories import Gate


class Way:
    """Threads on their way through a gate, and their states: "waits", or "is in"."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.gate, self._said = Gate(), queue.Queue[str]()
        self._leaving: list[threading.Event] = []
        self._threads: list[threading.Thread] = []
        wait = threading.Condition.wait

        def told(condition: threading.Condition, timeout: float | None = None) -> bool:
            if condition is self.gate._condition:
                self._said.put("waits")
            return wait(condition, timeout)

        patch.setattr(threading.Condition, "wait", told)

    def goes(self, through: Callable[[], AbstractContextManager[None]]) -> int:
        """Send another thread; its number."""
        leaves = threading.Event()

        def walk() -> None:
            with through():
                self._said.put("is in")
                leaves.wait(60)

        self._leaving.append(leaves)
        self._threads.append(threading.Thread(target=walk, daemon=True))
        self._threads[-1].start()
        return len(self._threads) - 1

    def leaves(self, number: int) -> None:
        self._leaving[number].set()
        self._threads[number].join(60)

    @property
    def said(self) -> str:
        """The next that a thread came to."""
        return self._said.get(timeout=60)

    def end(self) -> None:
        for number in range(len(self._threads)):
            self.leaves(number)


@pytest.fixture
def way(monkeypatch: pytest.MonkeyPatch) -> Iterator[Way]:
    way = Way(monkeypatch)
    yield way
    way.end()


def test_answers_pass_side_by_side(way: Way) -> None:
    for _ in range(3):
        way.goes(way.gate.passing)
        assert way.said == "is in"


def test_a_change_waits_for_the_answers_that_go_on(way: Way) -> None:
    first, second = (way.goes(way.gate.passing) for _ in range(2))
    assert [way.said, way.said] == ["is in"] * 2
    way.goes(way.gate.closed)
    assert way.said == "waits"
    way.leaves(first)
    assert way.said == "waits"
    way.leaves(second)
    assert way.said == "is in"


def test_an_answer_waits_for_pending_and_running_changes(way: Way) -> None:
    """Else answers without end would keep a change out."""
    answer = way.goes(way.gate.passing)
    assert way.said == "is in"
    change = way.goes(way.gate.closed)
    assert way.said == "waits"
    late = way.goes(way.gate.passing)
    assert way.said == "waits"
    way.leaves(answer)
    assert sorted([way.said, way.said]) == ["is in", "waits"]  # the change is in; the other was woken, too
    way.leaves(change)
    assert way.said == "is in"
    way.leaves(late)


def test_changes_come_one_by_one(way: Way) -> None:
    first = way.goes(way.gate.closed)
    assert way.said == "is in"
    way.goes(way.gate.closed)
    assert way.said == "waits"
    way.leaves(first)
    assert way.said == "is in"


@pytest.mark.parametrize("how", ["passing", "closed"])
def test_a_failed_change_releases_the_gate(way: Way, how: str) -> None:
    with pytest.raises(OSError, match="the disk is gone"), getattr(way.gate, how)():
        raise OSError("the disk is gone")
    for through in (way.gate.closed, way.gate.passing):
        number = way.goes(through)
        assert way.said == "is in"
        way.leaves(number)
