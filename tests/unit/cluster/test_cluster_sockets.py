"""Sockets between ranks, here between threads."""

from __future__ import annotations

import contextlib
import itertools
import pickle
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from softdb.cluster import connections
from softdb.cluster.connections import HELLO, Connections, Endpoint

RANKS = 3

Hears = Callable[[int, int, list[bytes]], None]  # called after the n-th message to a rank


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine may need more."""
    monkeypatch.setattr(connections, "CONNECT_SECONDS", 60.0)


def connected(hears: Hears | None = None) -> list[Connections | None]:
    """Every rank's."""
    barrier, given = threading.Barrier(RANKS, timeout=60), dict[int, bytes]()

    def of(rank: int) -> Connections | None:
        turns = itertools.count()

        def messages_for(mine: bytes) -> list[bytes]:
            given[rank] = mine
            barrier.wait()
            whole = [given[one] for one in range(RANKS)]
            barrier.wait()
            if hears is not None:
                hears(rank, next(turns), whole)
            return whole

        return Connections.between(rank, RANKS, messages_for)

    with ThreadPoolExecutor(RANKS) as pool:
        return list(pool.map(of, range(RANKS)))


def all_connected(found: list[Connections | None]) -> list[Connections]:
    there = [one for one in found if one is not None]
    assert len(there) == RANKS
    return there


def messages_for(rank: int) -> dict[int, bytes]:
    return {other: f"{rank} to {other}".encode() * other for other in range(RANKS) if other != rank}


def closed(found: list[Connections]) -> None:
    for one in found:
        one.close()


def test_each_hears_each() -> None:
    actual = all_connected(connected())
    with ThreadPoolExecutor(RANKS) as pool:
        for _ in range(3):
            heard = list(pool.map(lambda rank: actual[rank].exchanged(messages_for(rank), 60.0), range(RANKS)))
            assert heard == [
                {other: messages_for(other)[rank] for other in messages_for(rank)} for rank in range(RANKS)
            ]
    closed(actual)


def test_strangers() -> None:
    """Peers with a wrong number, a false rank or no message are dropped; the ranks connect."""
    let_go = []

    def hears(rank: int, turn: int, doors: list[bytes]) -> None:
        if (rank, turn) == (2, 1):  # hosts, doors, whether all is well; the others begin meanwhile
            door = Endpoint(*pickle.loads(doors[0]))
            for hello in (HELLO.pack(b"x" * 16, 1), HELLO.pack(door.token, 0), b""):
                one = socket.create_connection(("127.0.0.1", door.port))
                one.sendall(hello)
                if not hello:
                    one.shutdown(socket.SHUT_WR)
                let_go.append(one)

    actual = all_connected(connected(hears))
    for one in let_go:
        with one:
            one.settimeout(60)
            with contextlib.suppress(ConnectionResetError):
                assert one.recv(1) == b""
    closed(actual)


@pytest.mark.parametrize("hosts", [1, RANKS])
def test_ranks_on_one_host_listen_on_loopback_only(monkeypatch: pytest.MonkeyPatch, hosts: int) -> None:
    names, own, addresses = itertools.count(), socket.create_server, list[tuple[str, int]]()

    def server(address: tuple[str, int], backlog: int) -> socket.socket:
        addresses.append(address)
        return own(address, backlog=backlog)

    monkeypatch.setattr(socket, "gethostname", lambda: f"host {next(names) % hosts}")
    monkeypatch.setattr(socket, "create_server", server)
    monkeypatch.setattr(connections, "_addresses", lambda: ["127.0.0.1"])
    closed(all_connected(connected()))
    assert addresses == [("127.0.0.1" if hosts == 1 else "", 0)] * RANKS


def test_none_where_two_cannot_connect(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then no rank has any, so that all go another way."""
    own = connections._connected

    def walled(door: Endpoint, mine: Endpoint, rank: int, until: float) -> socket.socket:
        if rank == 1:
            raise OSError("no route")
        return own(door, mine, rank, until)

    monkeypatch.setattr(connections, "_connected", walled)
    monkeypatch.setattr(connections, "CONNECT_SECONDS", 2.0)
    assert connected() == [None] * RANKS


def test_lost_and_silent() -> None:
    actual = all_connected(connected())
    with pytest.raises(TimeoutError):
        actual[0].exchanged(messages_for(0), 0.2)  # the other rank sends nothing
    actual[2].close()
    with ThreadPoolExecutor(RANKS) as pool, pytest.raises(OSError, match=r"closed|reset|Broken"):
        list(pool.map(lambda rank: actual[rank].exchanged(messages_for(rank), 60.0), (0, 1)))
    closed(actual)


def test_the_interface_of_gloo_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages to other hosts keep to it."""
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    assert "127.0.0.1" in connections._addresses()
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    assert connections._addresses() == []
