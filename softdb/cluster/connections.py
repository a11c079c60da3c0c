"""Sockets between ranks, which carry small messages faster than a gloo group does.

A socket wakes the thread that waits for it. Gloo passes a message through a chain of threads, each of which waits for
a core if all are busy. A rank accepts only connections that send its token, which the ranks exchange over the group.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import pickle
import secrets
import socket
import struct
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

HELLO = struct.Struct("<16sq")  # the endpoint's token, and the rank that connects
LENGTH = struct.Struct("<q")
LOCAL = "127.0.0.1"
CONNECT_SECONDS = 5.0  # to connect all ranks


class Endpoint(NamedTuple):
    """Address at which a rank listens."""

    host: str
    addresses: list[str]  # for other hosts
    port: int
    token: bytes


class Connections:
    """One socket to each other rank."""

    def __init__(self, sockets: Mapping[int, socket.socket]) -> None:
        self._sockets = dict(sockets)
        for connection in self._sockets.values():
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.close = weakref.finalize(self, _close, list(self._sockets.values()))

    @classmethod
    def between(cls, rank: int, ranks: int, gather: Callable[[bytes], Sequence[bytes]]) -> Connections | None:
        """Connect all ranks; every rank calls it. Returns None on every rank if any two cannot connect.

        Args:
            gather: collective call that returns the data of all ranks, by rank.
        """
        sockets, listener, host = dict[int, socket.socket](), None, socket.gethostname()
        one_host = len(set(gather(host.encode()))) == 1  # then refuse connections from other hosts
        with contextlib.suppress(OSError):
            listener = socket.create_server((LOCAL if one_host else "", 0), backlog=ranks)
        port = 0 if listener is None else listener.getsockname()[1]
        own = Endpoint(host, _addresses(), port, secrets.token_bytes(16))
        endpoints = [Endpoint(*pickle.loads(data)) for data in gather(pickle.dumps(tuple(own)))]
        deadline = time.monotonic() + CONNECT_SECONDS
        try:
            for other in range(rank):
                sockets[other] = _connected(endpoints[other], own, rank, deadline)
            while listener is not None and len(sockets) < ranks - 1:
                listener.settimeout(_remaining(deadline))
                _take(listener.accept()[0], own.token, range(rank + 1, ranks), sockets, deadline)
        except OSError:
            pass
        finally:
            if listener is not None:
                listener.close()
        if all(data == b"1" for data in gather(b"1" if len(sockets) == ranks - 1 else b"0")):
            return cls(sockets)
        _close(list(sockets.values()))
        return None

    def exchanged(self, sent: Mapping[int, bytes], seconds: float) -> dict[int, bytes]:
        """Send a message to each other rank, and receive one from each. Messages must fit into the sockets' buffers.

        Raises OSError if a rank is lost, or sends nothing within `seconds`.
        """
        deadline = time.monotonic() + seconds
        for rank, message in sent.items():
            self._sockets[rank].settimeout(_remaining(deadline))
            self._sockets[rank].sendall(LENGTH.pack(len(message)) + message)
        received = dict[int, bytes]()
        for rank in sent:
            (length,) = LENGTH.unpack(_read(self._sockets[rank], LENGTH.size, deadline))
            received[rank] = _read(self._sockets[rank], length, deadline)
        return received


def _addresses() -> list[str]:
    """Return addresses of this host; none if the user set gloo's interface, so that gloo carries all messages."""
    addresses = list[str]()
    if os.environ.get("GLOO_SOCKET_IFNAME"):
        return addresses
    with contextlib.suppress(OSError):
        addresses.append(socket.gethostbyname(socket.gethostname()))
    master = os.environ.get("MASTER_ADDR")
    if master:  # the address of the interface that reaches the master
        with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((master, 9))
            addresses.append(probe.getsockname()[0])
    return addresses


def _connected(endpoint: Endpoint, own: Endpoint, rank: int, deadline: float) -> socket.socket:
    """Connect to another rank. Raises OSError."""
    failure = OSError("it has no address")
    for address in [LOCAL] if endpoint.host == own.host else endpoint.addresses:
        try:
            connection = socket.create_connection((address, endpoint.port), _remaining(deadline))
        except OSError as error:
            failure = error
            continue
        try:
            connection.sendall(HELLO.pack(endpoint.token, rank))
            return connection
        except OSError as error:
            failure = error
            connection.close()
    raise failure


def _take(new: socket.socket, own: bytes, expected: range, sockets: dict[int, socket.socket], deadline: float) -> None:
    """Keep a new connection if it sends this rank's token and an expected rank, else close it."""
    with contextlib.suppress(OSError):
        token, other = HELLO.unpack(_read(new, HELLO.size, min(deadline, time.monotonic() + 1)))
        if hmac.compare_digest(token, own) and other in expected and other not in sockets:
            sockets[other] = new
            return
    new.close()


def _read(connection: socket.socket, size: int, deadline: float) -> bytes:
    """Read `size` bytes. Raises OSError."""
    data = b""
    while len(data) < size:
        connection.settimeout(_remaining(deadline))
        more = connection.recv(size - len(data))
        if not more:
            raise ConnectionError("a rank closed its connection")
        data += more
    return data


def _remaining(deadline: float) -> float:
    return max(0.001, deadline - time.monotonic())


def _close(sockets: Sequence[socket.socket]) -> None:
    for connection in sockets:
        connection.close()
