"""Sockets between ranks of a training job, which carry small messages faster than torch's gloo group does.

A socket wakes the thread that waits for it. Gloo passes a message through several threads, each of which must wait for
a free core. Ranks exchange random tokens over gloo; a rank accepts only connections that send the rank's token.
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

HELLO = struct.Struct("<16sq")  # first bytes sent: token of the rank that listens, and number of the rank that connects
LENGTH = struct.Struct("<q")  # header of a message: number of bytes that follow
LOCAL = "127.0.0.1"
CONNECT_SECONDS = 5.0  # seconds within which all ranks must connect


class Endpoint(NamedTuple):
    """Addresses and port at which a rank listens, and the token that the rank accepts."""

    host: str  # name of the host
    addresses: list[str]  # addresses that ranks on other hosts try
    port: int
    token: bytes


class Connections:
    """Sockets from this rank, one to each other rank."""

    def __init__(self, sockets: Mapping[int, socket.socket]) -> None:
        self._sockets = dict(sockets)
        for connection in self._sockets.values():
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.close = weakref.finalize(self, _close, list(self._sockets.values()))

    @classmethod
    def between(cls, rank: int, ranks: int, gather: Callable[[bytes], Sequence[bytes]]) -> Connections | None:
        """Connect all ranks; every rank must call this. Returns None on every rank if any two ranks cannot connect.

        Args:
            gather: collective call that sends bytes to all ranks, and returns the bytes of all ranks, sorted by rank.
        """
        sockets, listener, host = dict[int, socket.socket](), None, socket.gethostname()
        one_host = len(set(gather(host.encode()))) == 1  # True: listen on LOCAL only
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
        """Send each other rank a message; return {rank: message received}. Messages must fit into socket buffers.

        Raises OSError if a rank closes its connection, or sends nothing within `seconds`.
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
    """Return this host's IP addresses, or [] if GLOO_SOCKET_IFNAME is set: then gloo must carry all messages."""
    addresses = list[str]()
    if os.environ.get("GLOO_SOCKET_IFNAME"):
        return addresses
    with contextlib.suppress(OSError):
        addresses.append(socket.gethostbyname(socket.gethostname()))
    master = os.environ.get("MASTER_ADDR")
    if master:  # find the address of the interface that reaches the master
        with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((master, 9))
            addresses.append(probe.getsockname()[0])
    return addresses


def _connected(endpoint: Endpoint, own: Endpoint, rank: int, deadline: float) -> socket.socket:
    """Connect to the rank that listens at `endpoint`. Raises OSError if no address works."""
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
    """Add a new connection to `sockets` if it sends this rank's token and an expected rank; else close it."""
    with contextlib.suppress(OSError):
        token, other = HELLO.unpack(_read(new, HELLO.size, min(deadline, time.monotonic() + 1)))
        if hmac.compare_digest(token, own) and other in expected and other not in sockets:
            sockets[other] = new
            return
    new.close()


def _read(connection: socket.socket, size: int, deadline: float) -> bytes:
    """Read `size` bytes. Raises OSError if the other rank closes the connection, or at the deadline."""
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
