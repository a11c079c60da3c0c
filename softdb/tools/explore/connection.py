"""A connection of the explorer: a request's head comes in within seconds, and few connections wait for theirs."""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.h11_impl import H11Protocol

__all__ = ["SECONDS", "WAITING", "Connection"]

SECONDS = 10.0  # from the connection, or from the last answer, to the end of the next request's head
WAITING = 64  # connections that may be waited for at once; the oldest makes room


class Connection(H11Protocol):
    """uvicorn's connection, whose only limit is on those that are idle after an answer, and have sent nothing since."""

    _deadline: asyncio.TimerHandle | None = None  # of the head that is waited for

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Wait for the first head."""
        super().connection_made(transport)
        self._wait()
        waiting = [one for one in self.connections if isinstance(one, Connection) and one._deadline]
        if len(waiting) > WAITING:
            oldest = min(waiting, key=lambda one: one._deadline.when() if one._deadline else 0)
            oldest._wait_no_more()  # `connection_lost` comes later than the next of a burst of connections
            oldest.transport.abort()

    def data_received(self, data: bytes) -> None:
        """Take in what came, which may end a head."""
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self._wait_no_more()

    def on_response_complete(self) -> None:
        """Wait for the next head, unless it is there."""
        super().on_response_complete()
        if self.cycle.response_complete:
            self._wait()

    def _wait(self) -> None:
        self._wait_no_more()
        self._deadline = self.loop.call_later(SECONDS, self.transport.close)  # an answer goes out first

    def _wait_no_more(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
