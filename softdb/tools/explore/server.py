"""The server behind the page: routes, a few threads that answer, and an end for what nobody waits for any more."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib.resources import files
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from softdb.errors import BadInput, Closed, SoftDBError, StaleRead, UnknownId
from softdb.terminal import dumps
from softdb.tools.explore.answers import Answers, Wanted
from softdb.tools.explore.asked import Question, Weighing
from softdb.tools.explore.guard import Guard, told_error

__all__ = ["Desk", "application"]

THREADS = 2  # that answer at once
WAITING = 32  # questions that may wait for them
_FILES = {
    "index.html": "text/html; charset=utf-8", "style.css": "text/css; charset=utf-8",
    "icon.svg": "image/svg+xml", **dict.fromkeys(
        ("page.js", "map.js", "filters.js", "results.js", "panels.js"), "text/javascript; charset=utf-8"
    ),
}  # fmt: skip
_log = logging.getLogger("softdb")


class Overtaken(Exception):
    """Nobody waits for this answer any more."""


class Desk:
    """Answers in a few threads. What the browser no longer waits for is not begun, or ends at its next step."""

    def __init__(self, answers: Answers) -> None:
        self._answers, self._pool, self._open = answers, ThreadPoolExecutor(THREADS, "explore"), 0
        self.overtaken = 0  # questions that ended so

    async def answered(self, request: Request, work: Callable[[Wanted], dict[str, Any]]) -> Response:
        """What a piece of work finds, as JSON; or its error."""
        if self._open >= THREADS + WAITING:
            return told_error("Busy", "too many questions at once; ask again in a moment", 503)
        left = threading.Event()

        def wanted() -> None:
            if left.is_set():
                raise Overtaken

        self._open += 1
        future: asyncio.Future[Any] = asyncio.wrap_future(self._pool.submit(_in_words, work, wanted))
        future.add_done_callback(self._done)
        gone: asyncio.Future[Any] = asyncio.ensure_future(_disconnected(request))
        try:
            await asyncio.wait([future, gone], return_when=asyncio.FIRST_COMPLETED)
        finally:
            gone.cancel()
        if not future.done():
            left.set()
            future.cancel()
            self.overtaken += 1
            return Response(status_code=499)
        answer: Response = future.result()
        return answer

    def _done(self, future: asyncio.Future[Response]) -> None:
        self._open -= 1

    def close(self) -> None:
        """Begin nothing more."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    async def about(self, request: Request) -> Response:
        """The facts of the database."""
        return await self.answered(request, lambda _: self._answers.about())

    async def map(self, request: Request) -> Response:
        """The map."""
        return await self.answered(request, lambda _: self._answers.map())

    async def ask(self, request: Request) -> Response:
        """The nearest records and their weights."""
        given = _given(request)
        return await self.answered(
            request, lambda wanted: self._answers.ask(Question.of(given()), Weighing.of(given()), wanted)
        )

    async def weigh(self, request: Request) -> Response:
        """The weights at another temperature."""
        given = _given(request)
        return await self.answered(
            request, lambda wanted: self._answers.weigh(Question.of(given()), Weighing.of(given()), wanted)
        )

    async def compare(self, request: Request) -> Response:
        """The recall of one answer."""
        given = _given(request)
        return await self.answered(request, lambda wanted: self._answers.compare(Question.of(given()), wanted))


def application(answers: Answers, hosts: frozenset[str]) -> tuple[Guard, Desk]:
    """The page and its answers, for requests that name one of these hosts."""
    desk, pages = Desk(answers), {name: (files(__package__) / "page" / name).read_bytes() for name in _FILES}

    async def file(request: Request) -> Response:
        name = request.path_params.get("name", "index.html")
        if name not in pages:
            return told_error("NotFound", f"there is no {name[:80]!a} here", 404)
        return Response(pages[name], media_type=_FILES[name])

    calls = ("about", "map", "ask", "weigh", "compare")
    routes = [Route(f"/api/{one}", getattr(desk, one), methods=["GET"]) for one in calls]
    routes += [Route("/", file, methods=["GET"]), Route("/{name:path}", file, methods=["GET"])]
    return Guard(Starlette(routes=routes), hosts), desk


def _given(request: Request) -> Callable[[], dict[str, str]]:
    """The parameters of a URL, each given once."""

    def given() -> dict[str, str]:
        found = request.query_params.multi_items()
        if len(dict(found)) < len(found):
            raise BadInput("a parameter is given twice; give each once")
        return dict(found)

    return given


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _in_words(work: Callable[[Wanted], dict[str, Any]], wanted: Wanted) -> Response:
    """What a piece of work finds, or what went wrong, as JSON. In a thread."""
    try:
        wanted()
        try:
            found = work(wanted)
        except (StaleRead, Closed):  # another process wrote meanwhile, or made another database in its place
            found = work(wanted)
    except Overtaken:
        return Response(status_code=499)
    except (SoftDBError, OSError) as error:
        status = 404 if isinstance(error, UnknownId) else 400 if isinstance(error, BadInput) else 503
        return told_error(type(error).__name__, str(error), status)
    except Exception as error:
        _log.exception("the explorer met an error that it did not expect")
        return told_error(type(error).__name__, "an error that should not be; the terminal says more", 500)
    return Response(dumps(found), media_type="application/json")
