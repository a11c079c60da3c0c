"""Sockets from rank to rank, which carry small messages sooner than a gloo group does.

A socket wakes the thread that waits for it. Gloo's messages come by threads of its own, of which each is woken by the
one before, and where every core is busy each may wait for its turn. Messages are read only from who knows a number
that the ranks told each other over the group.
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

HELLO = struct.Struct("<16sq")  # the door's number, and who connects
LENGTH = struct.Struct("<q")
LOCAL = "127.0.0.1"
PATIENCE = 5.0  # seconds to connect all ranks in


class Door(NamedTuple):
    """Address of a rank."""

    host: str
    addresses: list[str]  # from other hosts
    port: int
    number: bytes


class Connections:
    """One socket to each other rank."""

    def __init__(self, sockets: Mapping[int, socket.socket]) -> None:
        self._sockets = dict(sockets)
        for one in self._sockets.values():
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.close = weakref.finalize(self, _close, list(self._sockets.values()))

    @classmethod
    def made(cls, rank: int, ranks: int, told: Callable[[bytes], Sequence[bytes]]) -> Connections | None:
        """Between all ranks; None, on all of them, where any two cannot connect. All ranks call it.

        Args:
            told: what each rank gives, by its number; a call that all ranks make.
        """
        sockets, listener, host = dict[int, socket.socket](), None, socket.gethostname()
        alone = len(set(told(host.encode()))) == 1  # on this host, then nobody else can connect
        with contextlib.suppress(OSError):
            listener = socket.create_server((LOCAL if alone else "", 0), backlog=ranks)
        port = 0 if listener is None else listener.getsockname()[1]
        own = Door(host, _addresses(), port, secrets.token_bytes(16))
        doors = [Door(*pickle.loads(one)) for one in told(pickle.dumps(tuple(own)))]
        until = time.monotonic() + PATIENCE
        try:
            for other in range(rank):
                sockets[other] = _connected(doors[other], own, rank, until)
            while listener is not None and len(sockets) < ranks - 1:
                listener.settimeout(_left(until))
                _take(listener.accept()[0], own, range(rank + 1, ranks), sockets, until)
        except OSError:
            pass
        finally:
            if listener is not None:
                listener.close()
        if all(one == b"1" for one in told(b"1" if len(sockets) == ranks - 1 else b"0")):
            return cls(sockets)
        _close(list(sockets.values()))
        return None

    def exchanged(self, sent: Mapping[int, bytes], seconds: float) -> dict[int, bytes]:
        """A message to each other rank, and one from each; they are small enough for the system to hold them.

        Raises OSError where a rank is lost, or says nothing in time.
        """
        until = time.monotonic() + seconds
        for rank, message in sent.items():
            self._sockets[rank].settimeout(_left(until))
            self._sockets[rank].sendall(LENGTH.pack(len(message)) + message)
        found = dict[int, bytes]()
        for rank in sent:
            (length,) = LENGTH.unpack(_read(self._sockets[rank], LENGTH.size, until))
            found[rank] = _read(self._sockets[rank], length, until)
        return found


def _addresses() -> list[str]:
    """Addresses of this host for others. None where gloo was told its interface: then all goes by gloo."""
    found = list[str]()
    if os.environ.get("GLOO_SOCKET_IFNAME"):
        return found
    with contextlib.suppress(OSError):
        found.append(socket.gethostbyname(socket.gethostname()))
    master = os.environ.get("MASTER_ADDR")
    if master:  # the address that leads there
        with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as way:
            way.connect((master, 9))
            found.append(way.getsockname()[0])
    return found


def _connected(door: Door, own: Door, rank: int, until: float) -> socket.socket:
    """A socket to another rank. Raises OSError."""
    why = OSError("it has no address")
    for address in [LOCAL] if door.host == own.host else door.addresses:
        try:
            made = socket.create_connection((address, door.port), _left(until))
        except OSError as error:
            why = error
            continue
        try:
            made.sendall(HELLO.pack(door.number, rank))
            return made
        except OSError as error:
            why = error
            made.close()
    raise why


def _take(made: socket.socket, own: Door, expected: range, sockets: dict[int, socket.socket], until: float) -> None:
    """Keep a connection of a rank that is expected; let go of others."""
    with contextlib.suppress(OSError):
        number, other = HELLO.unpack(_read(made, HELLO.size, min(until, time.monotonic() + 1)))
        if hmac.compare_digest(number, own.number) and other in expected and other not in sockets:
            sockets[other] = made
            return
    made.close()


def _read(one: socket.socket, size: int, until: float) -> bytes:
    """So many bytes. Raises OSError."""
    found = b""
    while len(found) < size:
        one.settimeout(_left(until))
        more = one.recv(size - len(found))
        if not more:
            raise ConnectionError("a rank closed its connection")
        found += more
    return found


def _left(until: float) -> float:
    return max(0.001, until - time.monotonic())


def _close(sockets: Sequence[socket.socket]) -> None:
    for one in sockets:
        one.close()
