"""S3 for tests of clusters, as moto's server has it."""

from __future__ import annotations

import contextlib
import itertools
import socket
import threading
from collections.abc import Iterator

import pytest

_NUMBERS = itertools.count()  # servers of one process share what they hold


@contextlib.contextmanager
def bucket() -> Iterator[tuple[str, dict[str, str]]]:
    """The address of an empty bucket, and its options. A second put of a name must be refused."""
    pytest.importorskip("moto.server", reason="S3 is moto's server")
    import boto3
    from botocore.exceptions import ClientError
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        name = f"bucket{next(_NUMBERS)}"
        endpoint = "http://{}:{}".format(*server.get_host_and_port())
        keys = {"aws_access_key_id": "test", "aws_secret_access_key": "test"}
        client = boto3.client("s3", endpoint_url=endpoint, region_name="us-east-1", **keys)
        client.create_bucket(Bucket=name)
        client.put_object(Bucket=name, Key="once", Body=b"first", IfNoneMatch="*")
        with pytest.raises(ClientError, match="PreconditionFailed"):  # else two commits could have one name
            client.put_object(Bucket=name, Key="once", Body=b"second", IfNoneMatch="*")
        yield f"s3://{name}", {**keys, "aws_endpoint": endpoint, "aws_region": "us-east-1", "allow_http": "true"}
    finally:
        server.stop()


class Way:
    """The way to a server, which may be closed, slow, or lose the reply to a request."""

    def __init__(self, endpoint: str) -> None:
        host, port = endpoint.removeprefix("http://").split(":")
        self._server, self._open = (host, int(port)), set[socket.socket]()
        self.delay, self._ended = 0.0, threading.Event()  # seconds before each reply
        self._fails, self.failed = (b"", False, False), 0
        self._door = socket.create_server(("127.0.0.1", 0))
        self.port = self._door.getsockname()[1]
        self.open()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def open(self) -> None:
        """Take connections, at the same address as ever."""
        if self._door.fileno() < 0:
            self._door = socket.create_server(("127.0.0.1", self.port))
        threading.Thread(target=self._take, args=(self._door,), daemon=True).start()

    def close(self) -> None:
        """Refuse connections, and break those that there are."""
        with contextlib.suppress(OSError):
            self._door.shutdown(socket.SHUT_RDWR)
        self._door.close()
        for one in list(self._open):
            _broken(one)

    def fail(self, request: bytes, reaches: bool, closes: bool) -> None:
        """Let the next request that begins so fail: whether it reaches the server, and whether the way closes then."""
        self._fails = request, reaches, closes

    def end(self) -> None:
        """Close for good."""
        self._ended.set()
        self.close()

    def _take(self, door: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                client = door.accept()[0]
                server = socket.create_connection(self._server)
                self._open |= {client, server}
                lost = list[bool]()  # requests that failed, and whether the way closes by that
                for come, go, up in ((client, server, True), (server, client, False)):
                    threading.Thread(target=self._carry, args=(come, go, up, lost), daemon=True).start()

    def _carry(self, come: socket.socket, go: socket.socket, up: bool, lost: list[bool]) -> None:
        with contextlib.suppress(OSError):
            while data := come.recv(1 << 16):
                request, reaches, closes = self._fails
                if up and request and data.startswith(request):
                    self._fails, self.failed = (b"", False, False), self.failed + 1
                    lost.append(closes)
                    if not reaches:
                        break
                elif not up and lost:
                    break
                if not up and self.delay:
                    self._ended.wait(self.delay)
                go.sendall(data)
        with contextlib.suppress(IndexError):
            if lost.pop():  # by one of the two directions alone: the way may be open again when the other ends
                self.close()
        for one in (come, go):
            self._open.discard(one)
            _broken(one)


def _broken(one: socket.socket) -> None:
    with contextlib.suppress(OSError):
        one.shutdown(socket.SHUT_RDWR)
    one.close()


@contextlib.contextmanager
def way_to_bucket() -> Iterator[tuple[str, dict[str, str], Way]]:
    """As `bucket`, by a way that can fail."""
    with bucket() as (address, options):
        way = Way(options["aws_endpoint"])
        try:
            yield address, {**options, "aws_endpoint": way.endpoint}, way
        finally:
            way.end()
