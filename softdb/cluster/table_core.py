"""`TableCore`: shards that follow a Lance table, and writes to the table."""

from __future__ import annotations

import dataclasses
import functools
import threading
import weakref
from collections.abc import Callable
from typing import Any

from softdb import check
from softdb.check import Id
from softdb.cluster import shard as messages
from softdb.cluster.caller import Caller
from softdb.cluster.cluster_core import ClusterCore
from softdb.cluster.invariant import is_kept
from softdb.cluster.truth import Truth
from softdb.database.embedding import telling
from softdb.database.incoming import Given, RecordChecker, WriteKind
from softdb.errors import Closed, CorruptionError, ReadOnly, ShardUnavailable, SoftDBError, StaleRead
from softdb.index.choose import Progress
from softdb.reports import Stats

PATIENCE = 3600.0  # least timeout of building new shards, in seconds
_TRIES = 20  # attempts of a refresh while other handles refresh, too


class TableCore(ClusterCore):
    """Shards of a Lance table; `table` has the number of shards that this handle asks."""

    def __init__(
        self,
        connect: Callable[[Truth], messages.Transport],
        truth: Truth,
        timeout: float,
        partial: bool,
        mode: str,
        encoder: check.Encoder | None,
    ) -> None:
        self.table, self.mode = truth, mode
        self._connect, self._encoder = connect, encoder
        self._before = weakref.WeakSet[messages.Transport]()  # to fewer shards, which older answers still refer to
        self.moving = threading.RLock()
        super().__init__(Caller(connect(truth), timeout, partial, functools.partial(is_kept, truth)))

    @property
    def id_types(self) -> set[str]:
        """Type of the table's ids: {"integer"} or {"text"}."""
        return {self.table.id_type}

    @property
    def version(self) -> int:
        """Version of the table that this handle sees."""
        return max(map(_version, self.caller.known.values()))

    def encoder(self) -> check.Encoder | None:
        """Return the encoder that this handle was opened with, else the encoder that the table names."""
        return super().encoder() if self._encoder is None else self._encoder

    def close(self) -> None:
        """Close all transports; safe to call twice."""
        for transport in list(self._before):
            transport.close()
        super().close()

    def stats(self) -> Stats:
        """Return sums over all shards; the path is the table's address."""
        return dataclasses.replace(super().stats(), path=self.table.url, durability="full")

    # -- following the table ---------------------------------------------------------------------------------------

    def refresh(self) -> None:
        """Bring the shards to the newest version."""
        with self.moving:
            shards = self.table.stored_shards()
            caller = self.caller if shards == self.table.shards else self._joined(shards, self.caller.timeout)
            self._go_on(caller)
            self._take(caller)

    def _go_on(self, caller: Caller) -> None:
        """Bring shards to the newest version, and rebuild them if they break `softdb.cluster.invariant`."""
        table, rebuild = self.table.with_shards(caller.shards), False
        for _ in range(_TRIES):
            newest = table.newest()
            if newest < self.version:
                raise StaleRead(f"another table has taken the place of {self.table.url}; open the new table")
            caller.look(lambda _: messages.Refresh(newest, rebuild))  # noqa: B023
            if len(set(map(_version, caller.known.values()))) > 1:  # another handle refreshes, too
                continue
            if is_kept(table, caller.known):
                return
            if rebuild:
                raise CorruptionError(
                    f"the shards hold other records than {self.table.url}, even rebuilt; verify() names the records"
                )
            rebuild = True
        raise StaleRead(f"the shards went on {_TRIES} times while they were compared with the table; refresh() again")

    def grow(self) -> int:
        """Double the number of shards, and return the new number."""
        self.require_writable()
        with self.moving:
            table, shards = self.table, 2 * self.table.shards
            caller = self._joined(shards, max(PATIENCE, self.caller.timeout))
            try:
                table.put_shards(shards)
                self._go_on(caller)
            except BaseException:
                caller.transport.close()
                raise
            self._take(caller)
        return shards

    def _joined(self, shards: int, timeout: float) -> Caller:
        """Return a caller of the table's records in `shards` shards, which are built first."""
        table = self.table.with_shards(shards)
        transport = self._connect(table)
        try:
            caller = Caller(transport, timeout, self.caller.partial, functools.partial(is_kept, table))
        except BaseException:
            transport.close()
            raise
        caller.timeout = self.caller.timeout
        return caller

    def _take(self, caller: Caller) -> None:
        """Switch to another caller. The old one stays open for running questions, and for older hits and gradients."""
        if caller is self.caller:
            return
        self._before.add(self.caller.transport)
        self.table = self.table.with_shards(caller.shards)
        self.caller = caller

    # -- writing ---------------------------------------------------------------------------------------------------

    def put(self, change: WriteKind, given: Given, progress: Progress | bool | None) -> None:
        """Check records, write them in one commit of the table, and refresh the shards."""
        self.require_writable()
        checker, table = RecordChecker(self.schema, lambda: self._encoder), self.table
        with telling(progress) as tell:
            if change is WriteKind.UPDATE:
                parts = checker.parts(*given, tell)
                columns = {"key": parts.keys, "value": parts.values, "payload": parts.payloads, "text": parts.texts}
                table.update(parts.ids, {name: column for name, column in columns.items() if column is not None})
            else:
                write = table.insert if change is WriteKind.INSERT else table.upsert
                write(checker.batch(*given, tell))
        self.seen()

    def delete(self, ids: list[Id] | None, where: dict[str, Any] | None) -> int:
        """Delete records by id, or the records that match a filter at the version that this handle sees."""
        self.require_writable()
        if ids is None:
            ids = [id for records in self.scan(10_000, where) for id in records.ids]
        count, _ = self.table.delete(ids)
        self.seen()
        return count

    def require_writable(self) -> None:
        """Raise ReadOnly if this handle or this table is read-only."""
        if self.mode != "rw" or not self.table.own:
            way = "open it with mode='rw'" if self.table.own else "write to it with what made it, then refresh()"
            raise ReadOnly(f"this handle of {self.table.url} only reads; {way}")

    def seen(self) -> None:
        """Refresh the shards after a commit. An error says that the records are written all the same."""
        try:
            self.refresh()
        except SoftDBError as error:
            message = f"it is written and safe, but not yet seen here: {error.args[0]}"
            if isinstance(error, Closed | ShardUnavailable | StaleRead):
                error.args = (message, *error.args[1:])
                raise
            raise StaleRead(message) from error  # other types would mean that the write failed


def _version(description: messages.Description) -> int:
    return messages.of_records(description.version)
