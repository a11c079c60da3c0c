"""A server of the explorer over a database, in this process, and what asks it."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Iterator
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import uvicorn

from softdb.tools.cli.served import Served
from softdb.tools.explore.replies import Answers
from softdb.tools.explore.server import Desk, application, configured, listening

TOKEN = "a-token_of_tests"


class Site:
    """A page that is served, and its answers as a browser gets them."""

    def __init__(self, port: int, desk: Desk | None, token: str = TOKEN) -> None:
        self.port, self.token, self.address = port, token, f"http://127.0.0.1:{port}/{token}/"
        self.answering = desk

    @property
    def desk(self) -> Desk:
        assert self.answering is not None
        return self.answering

    def fetch(self, path: str, method: str = "GET", **headers: str) -> tuple[HTTPResponse, bytes]:
        connection = HTTPConnection("127.0.0.1", self.port, timeout=120)
        with contextlib.closing(connection):
            connection.request(
                method, f"/{self.token}{path}", headers={one.replace("_", "-"): value for one, value in headers.items()}
            )
            response = connection.getresponse()
            return response, response.read()

    def call(self, name: str, status: int = 200, /, **parameters: Any) -> Any:
        response, body = self.fetch(f"/api/{name}?{urlencode(parameters)}")
        found = json.loads(body)
        assert response.status == status, found
        return found["error"] if status != 200 else found


@contextlib.contextmanager
def served(path: Path | None, encoder: str | None = None, db: Any = None) -> Iterator[Site]:
    with Served(path, encoder, db) as database, listening(0) as listener:
        port = listener.getsockname()[1]
        app, desk = application(Answers(database), frozenset({f"127.0.0.1:{port}"}), TOKEN)
        server = uvicorn.Server(configured(app))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            limit = time.monotonic() + 60
            while not server.started and thread.is_alive() and time.monotonic() < limit:
                time.sleep(0.005)
            assert server.started
            yield Site(port, desk)
        finally:
            server.should_exit = True
            thread.join(10)
            desk.close()
