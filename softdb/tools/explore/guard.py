"""What may be asked, and by whom: GET, under this server's own name, by its own page; what answers forbid a browser."""

from __future__ import annotations

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

__all__ = ["LONGEST", "Guard", "told_error"]

LONGEST = 1 << 18  # bytes of a question: a vector of 10,000 numbers

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


def told_error(kind: str, message: str, status: int) -> JSONResponse:
    """An error as the page shows it, in a line."""
    return JSONResponse({"error": {"type": kind, "message": " ".join(message.split())}}, status)


class Guard:
    """Refuses what is no GET, what names another host (DNS rebinding) and what another page asks for."""

    def __init__(self, app: ASGIApp, hosts: frozenset[str]) -> None:
        self._app, self._hosts = app, hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""

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
                return told_error("BadRequest", f"the header {name!a} is given twice; give it once", 400)
        hosts = given.get(b"host", [])
        if len(hosts) != 1 or hosts[0].decode("latin-1").lower() not in self._hosts:
            message = (
                f"this server answers to {' and '.join(sorted(self._hosts))} alone; open the address that it printed"
            )
            return told_error("ForeignHost", message, 403)
        if scope["method"] != "GET":
            refused = told_error(
                "NotAllowed", f"{scope['method']} is not allowed: a page that only reads needs GET", 405
            )
            refused.headers["Allow"] = "GET"
            return refused
        if len(scope["query_string"]) > LONGEST:
            return told_error("TooLong", f"the question is longer than {LONGEST:,} bytes; ask a shorter one", 414)
        site, mode, origin = (given.get(one, [b""])[0] for one in (b"sec-fetch-site", b"sec-fetch-mode", b"origin"))
        foreign = origin and origin.decode("latin-1").lower().removeprefix("http://") not in self._hosts
        if (foreign or site in (b"cross-site", b"same-site")) and not (mode == b"navigate" and scope["path"] == "/"):
            return told_error("ForeignPage", "another page asked for this; only the explorer's own may", 403)
        return None
