"""Refuse requests without the token, from other pages or to other hosts; close slow connections; add headers."""

from __future__ import annotations

import asyncio
import hmac

from starlette.responses import JSONResponse, PlainTextResponse, RedirectResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

LONGEST = 1 << 18  # largest query string in bytes: enough for a vector of 10,000 numbers
SECONDS = 10.0  # time for a request's headers to arrive, from the connection or the last response
WAITING = 64  # largest number of connections that wait for a request; one more closes the oldest

_HEADERS = {
    # pages, styles and scripts come from this server only: none is inline, none from a payload or another host
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
STRANGER = "This address lacks the explorer's token. Open the address that softdb explore printed in its terminal.\n"
HEADERS = [(name.lower().encode(), value.encode()) for name, value in _HEADERS.items()]


def failure(kind: str, message: str, status: int) -> JSONResponse:
    """Return an error response as JSON, its message in one line."""
    return JSONResponse({"error": {"type": kind, "message": " ".join(message.split())}}, status)


class Guard:
    """Refuse requests other than GET, to another host name (DNS rebinding), from other pages, or without the token.

    The token is the first folder of every address, which keeps out other accounts of this machine. The application
    sees the rest of the address. No cookie holds it: browsers send cookies to all ports of a host.
    """

    def __init__(self, app: ASGIApp, hosts: frozenset[str], token: str) -> None:
        self._app, self._hosts, self._token = app, hosts, token.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass one request to the application, or refuse it; add the security headers to the response."""

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], *HEADERS]}
            await send(message)

        token, slash, path = scope["path"].removeprefix("/").partition("/")
        if scope["path"].startswith("/") and hmac.compare_digest(token.encode(), self._token):
            scope = {**scope, "path": f"/{path}"}
            refusal = self._refusal(scope) or (None if slash else RedirectResponse(f"/{token}/"))
        else:
            refusal = self._refusal(scope) or PlainTextResponse(STRANGER, 403)
        await (self._app if refusal is None else refusal)(scope, receive, guarded)

    def _refusal(self, scope: Scope) -> ASGIApp | None:
        headers: dict[bytes, list[bytes]] = {}
        for name, value in scope["headers"]:
            headers.setdefault(name.lower(), []).append(value)
        for name, values in headers.items():
            if len(values) > 1 and (name in (b"host", b"origin") or name.startswith(b"sec-fetch-")):
                return failure("BadRequest", f"the header {name!a} is given twice; give it once", 400)
        hosts = headers.get(b"host", [])
        if len(hosts) != 1 or hosts[0].decode("latin-1").lower() not in self._hosts:
            names = " and ".join(sorted(self._hosts))
            message = f"this server's address is {names} only; open the address that it printed"
            return failure("ForeignHost", message, 403)
        if scope["method"] != "GET":
            message = f"the method is {scope['method']}; expected GET, as the explorer only reads"
            refused = failure("NotAllowed", message, 405)
            refused.headers["Allow"] = "GET"
            return refused
        if len(scope["query_string"]) > LONGEST:
            return failure("TooLong", f"the query is longer than {LONGEST:,} bytes; send a shorter one", 414)
        site, mode, origin = (headers.get(name, [b""])[0] for name in (b"sec-fetch-site", b"sec-fetch-mode", b"origin"))
        foreign = origin and origin.decode("latin-1").lower().removeprefix("http://") not in self._hosts
        if (foreign or site in (b"cross-site", b"same-site")) and not (mode == b"navigate" and scope["path"] == "/"):
            return failure("ForeignPage", "the request comes from another page; open the explorer's own page", 403)
        return None


class Connection(H11Protocol):
    """Close a connection whose request headers do not arrive in time; uvicorn does so only after a response."""

    _deadline: asyncio.TimerHandle | None = None  # closes the connection when headers are late

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the timeout for the first request's headers."""
        super().connection_made(transport)
        self._wait()
        waiting = [other for other in self.connections if isinstance(other, Connection) and other._deadline]
        if len(waiting) > WAITING:
            oldest = min(waiting, key=lambda other: other._deadline.when() if other._deadline else 0)
            oldest._stop_waiting()  # now: more connections may come before uvicorn reports this one as lost
            oldest.transport.abort()

    def data_received(self, data: bytes) -> None:
        """Read data; stop the timeout if a request's headers are complete."""
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop_waiting()

    def on_response_complete(self) -> None:
        """Start the timeout for the next request's headers, unless they have arrived."""
        super().on_response_complete()
        if self.cycle.response_complete:
            self._wait()

    def _wait(self) -> None:
        self._stop_waiting()
        self._deadline = self.loop.call_later(SECONDS, self.transport.close)  # `close` first sends what is buffered

    def _stop_waiting(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
