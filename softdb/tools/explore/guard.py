"""The limits on requests: GET, under this server's own name, by its own page, soon; and the headers of answers."""

from __future__ import annotations

import asyncio

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

LONGEST = 1 << 18  # bytes of a question: a vector of 10,000 numbers
SECONDS = 10.0  # from the connection, or from the last answer, to the end of the next request's head
WAITING = 64  # connections that may be waited for at once; the oldest makes room

_HEADERS = {
    # the page, its styles and scripts from here alone: none inline, none of a payload, none from elsewhere
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
HEADERS = [(name.lower().encode(), value.encode()) for name, value in _HEADERS.items()]


def failure(kind: str, message: str, status: int) -> JSONResponse:
    """An error as the page shows it, in a line."""
    return JSONResponse({"error": {"type": kind, "message": " ".join(message.split())}}, status)


class Guard:
    """Refuses what is no GET, what names another host (DNS rebinding) and what another page asks for."""

    def __init__(self, app: ASGIApp, hosts: frozenset[str]) -> None:
        self._app, self._hosts = app, hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], *HEADERS]}
            await send(message)

        refusal = self._refusal(scope)
        await (self._app if refusal is None else refusal)(scope, receive, guarded)

    def _refusal(self, scope: Scope) -> ASGIApp | None:
        given: dict[bytes, list[bytes]] = {}
        for name, value in scope["headers"]:
            given.setdefault(name.lower(), []).append(value)
        for name, values in given.items():
            if len(values) > 1 and (name in (b"host", b"origin") or name.startswith(b"sec-fetch-")):
                return failure("BadRequest", f"the header {name!a} is given twice; give it once", 400)
        hosts = given.get(b"host", [])
        if len(hosts) != 1 or hosts[0].decode("latin-1").lower() not in self._hosts:
            names = " and ".join(sorted(self._hosts))
            message = f"this server answers to {names} alone; open the address that it printed"
            return failure("ForeignHost", message, 403)
        if scope["method"] != "GET":
            message = f"{scope['method']} is not allowed: a page that only reads needs GET"
            refused = failure("NotAllowed", message, 405)
            refused.headers["Allow"] = "GET"
            return refused
        if len(scope["query_string"]) > LONGEST:
            return failure("TooLong", f"the question is longer than {LONGEST:,} bytes; ask a shorter one", 414)
        site, mode, origin = (given.get(name, [b""])[0] for name in (b"sec-fetch-site", b"sec-fetch-mode", b"origin"))
        foreign = origin and origin.decode("latin-1").lower().removeprefix("http://") not in self._hosts
        if (foreign or site in (b"cross-site", b"same-site")) and not (mode == b"navigate" and scope["path"] == "/"):
            return failure("ForeignPage", "another page asked for this; only the explorer's own may", 403)
        return None


class Connection(H11Protocol):
    """uvicorn's connection, which by itself limits only those that are idle after an answer."""

    _deadline: asyncio.TimerHandle | None = None  # of the head that is waited for

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Wait for the first head."""
        super().connection_made(transport)
        self._wait()
        waiting = [other for other in self.connections if isinstance(other, Connection) and other._deadline]
        if len(waiting) > WAITING:
            oldest = min(waiting, key=lambda other: other._deadline.when() if other._deadline else 0)
            oldest._stop_waiting()  # `connection_lost` comes later than the next of a burst of connections
            oldest.transport.abort()

    def data_received(self, data: bytes) -> None:
        """Take in the data, which may end a head."""
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop_waiting()

    def on_response_complete(self) -> None:
        """Wait for the next head, unless it has come."""
        super().on_response_complete()
        if self.cycle.response_complete:
            self._wait()

    def _wait(self) -> None:
        self._stop_waiting()
        self._deadline = self.loop.call_later(SECONDS, self.transport.close)  # an answer goes out first

    def _stop_waiting(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
