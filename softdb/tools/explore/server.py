"""The explorer's server: its routes, a few threads that answer, and the cancelling of dropped requests."""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib.resources import files
from pathlib import PurePath
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from softdb.errors import BadInput, Closed, SoftDBError, StaleRead, UnknownId
from softdb.terminal import dumps
from softdb.tools.cli.served import HOST, PORT
from softdb.tools.explore.guard import LONGEST, Connection, Guard, failure
from softdb.tools.explore.questions import Question, Weighing
from softdb.tools.explore.replies import Answers, Wanted

THREADS = 2  # number of requests answered at once
WAITING = 32  # largest number of requests in the queue
_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
_log = logging.getLogger("softdb")


class Overtaken(Exception):
    """Raised in a call to stop it, as the browser no longer waits for its answer."""


class Desk:
    """Answer requests in a few threads. A request that the browser has dropped is not begun, or stops early."""

    def __init__(self, answers: Answers) -> None:
        self._pool, self._open = ThreadPoolExecutor(THREADS, "explore"), 0
        self._training = ThreadPoolExecutor(1, "train")  # so that training never keeps a question waiting for a thread
        self.overtaken = 0  # number of dropped requests
        self.calls: dict[str, Callable[[dict[str, str], Wanted], dict[str, Any]]] = {
            "about": lambda params, wanted: answers.about(),
            "map": lambda params, wanted: answers.map(),
            "complete": lambda params, wanted: answers.complete(params.get("kind", ""), params.get("text", "")),
            "ask": lambda params, wanted: answers.ask(Question.of(params), Weighing.of(params), wanted),
            "weigh": lambda params, wanted: answers.weigh(Question.of(params), Weighing.of(params), wanted),
            "compare": lambda params, wanted: answers.compare(Question.of(params), wanted),
            "colours": lambda params, wanted: answers.colours(params.get("field", "")),
            "gradient": lambda params, wanted: answers.gradient(
                params.get("right", ""), Question.of(params), Weighing.of(params), wanted
            ),
            "trail": lambda params, wanted: answers.trail(Question.of(params), Weighing.of(params), wanted),
            "train": answers.trainer.train,
        }

    async def answered(self, request: Request) -> Response:
        """Run the call that the request's path names in a thread; return its answer or its error as JSON."""
        if self._open >= THREADS + WAITING:
            return failure("Busy", "too many requests at once; send it again in a moment", 503)
        dropped, call = threading.Event(), self.calls[request.url.path.rpartition("/")[2]]

        def wanted() -> None:
            if dropped.is_set():
                raise Overtaken

        self._open += 1
        pool = self._training if call == self.calls["train"] else self._pool
        future: asyncio.Future[Response] = asyncio.wrap_future(pool.submit(_answer, call, request, wanted))
        future.add_done_callback(self._done)
        disconnected: asyncio.Future[Any] = asyncio.ensure_future(_disconnected(request))
        try:
            await asyncio.wait([future, disconnected], return_when=asyncio.FIRST_COMPLETED)
        finally:
            disconnected.cancel()
        if not future.done():
            dropped.set()
            future.cancel()
            self.overtaken += 1
            return Response(status_code=499)
        return future.result()

    def _done(self, future: asyncio.Future[Response]) -> None:
        self._open -= 1

    def close(self) -> None:
        """Cancel the requests in the queue, and wait for those in progress."""
        for pool in (self._pool, self._training):
            pool.shutdown(wait=True, cancel_futures=True)


def application(answers: Answers, hosts: frozenset[str], token: str) -> tuple[Guard, Desk]:
    """Return the ASGI application and its pool of threads; it answers at `hosts` only, below the folder `token`."""
    desk, pages = Desk(answers), {file.name: file.read_bytes() for file in (files(__package__) / "page").iterdir()}

    async def file(request: Request) -> Response:
        name = request.path_params.get("name", "index.html")
        if name not in pages:
            return failure("NotFound", f"there is no file {name[:80]!a}; open /", 404)
        return Response(pages[name], media_type=_TYPES[PurePath(name).suffix])

    routes = [Route(f"/api/{name}", desk.answered, methods=["GET"]) for name in desk.calls]
    routes += [Route("/", file, methods=["GET"]), Route("/{name:path}", file, methods=["GET"])]
    return Guard(Starlette(routes=routes), hosts, token), desk


def configured(app: Guard) -> uvicorn.Config:
    """Return uvicorn's settings: HTTP/1.1 only, limited sizes and times of requests, a log of errors only."""
    return uvicorn.Config(
        app, log_level="error", access_log=False, server_header=False, lifespan="off", ws="none", http=Connection,
        proxy_headers=False, h11_max_incomplete_event_size=2 * LONGEST, timeout_graceful_shutdown=1,
    )  # fmt: skip


def listening(port: int | None) -> socket.socket:
    """Return a socket that listens on the loopback interface: at `port`; if that is None, at PORT or any free one."""
    listener = socket.socket(proto=socket.IPPROTO_TCP)  # asyncio sets TCP_NODELAY only if the protocol is named
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((HOST, PORT if port is None else port))
        listener.listen()  # before the address is printed, so that a browser can connect at once
    except OSError as error:
        if port is not None:
            listener.close()
            raise BadInput(f"port {port} cannot be used ({error.strerror}); give another, or omit --port") from None
        listener.bind((HOST, 0))
        listener.listen()
    return listener


def _parameters(request: Request) -> dict[str, str]:
    items = request.query_params.multi_items()
    if len(dict(items)) < len(items):
        raise BadInput("a parameter is given twice; give each once")
    return dict(items)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _answer(call: Callable[[dict[str, str], Wanted], dict[str, Any]], request: Request, wanted: Wanted) -> Response:
    """Run a call in the present thread; return its answer, or its error, as JSON."""
    try:
        wanted()
        try:
            answer = call(_parameters(request), wanted)
        except (StaleRead, Closed):  # another process wrote meanwhile, or put another database at the path
            answer = call(_parameters(request), wanted)
    except Overtaken:
        return Response(status_code=499)
    except (SoftDBError, OSError) as error:
        status = 404 if isinstance(error, UnknownId) else 400 if isinstance(error, BadInput) else 503
        return failure(type(error).__name__, str(error), status)
    except Exception as error:
        _log.exception("the explorer met an error that it did not expect")
        return failure(type(error).__name__, "an unexpected error; the terminal shows its traceback", 500)
    return Response(dumps(answer), media_type="application/json")
