"""`TableCore`: implements `Core` for a cluster whose records are in a Lance table, with writes and growth."""

from __future__ import annotations

import dataclasses
import functools
import logging
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any
from uuid import uuid4

from softdb import check
from softdb.check import Id
from softdb.cluster import shard as messages
from softdb.cluster.caller import Caller
from softdb.cluster.cluster_core import ClusterCore
from softdb.cluster.invariant import is_kept
from softdb.database.embedding import telling
from softdb.database.incoming import UPDATES, Given, RecordChecker, WriteKind
from softdb.errors import Closed, CorruptionError, ReadOnly, ShardUnavailable, SoftDBError, StaleRead
from softdb.index.choose import Progress
from softdb.lance_table.truth import Truth
from softdb.reports import Stats

_log = logging.getLogger("softdb")
PATIENCE = 3600.0  # least timeout for building new shards, in seconds
_TRIES = 20  # number of attempts to refresh while other handles refresh, too


class TableCore(ClusterCore):
    """Core of a cluster over a Lance table, which `table` describes."""

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
        self._before = weakref.WeakSet[messages.Transport]()  # transports from before `grow`, which older answers use
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
        """Close all transports. Calling `close` twice is allowed."""
        for transport in list(self._before):
            transport.close()
        super().close()

    def stats(self) -> Stats:
        """Return statistics summed over all shards; `path` is the table's address."""
        return dataclasses.replace(super().stats(), path=self.table.url, durability="full")

    # -- following the table ---------------------------------------------------------------------------------------

    def refresh(self) -> None:
        """Bring the shards to the table's newest version; switch to more shards if another handle has added some."""
        with self.moving:
            dataset = self.table.now()
            shards = self.table.stored_shards(dataset)
            caller = self.caller if shards == self.table.shards else self._joined(shards, self.caller.timeout)
            self._go_on(caller, dataset)
            self._take(caller)

    def keep_refreshing(self, seconds: float) -> None:
        """Refresh every `seconds` in a thread, until this handle is closed or deleted. Errors are logged."""
        handle = weakref.ref(self)

        def run() -> None:
            while True:
                time.sleep(seconds)
                core = handle()
                if core is None or core.closed:
                    return
                try:
                    core.refresh()
                except SoftDBError as error:
                    _log.warning("%s stays at version %s: %s", core.table.url, core.version, error)
                del core

        threading.Thread(target=run, name="softdb-refresh", daemon=True).start()

    def _go_on(self, caller: Caller, dataset: Any) -> None:
        """Bring shards to the version of `dataset`, or to a newer one; rebuild those that lack records of the table."""
        table, rebuild = self.table.with_shards(caller.shards), False
        for _ in range(_TRIES):
            newest = int(dataset.version)
            if newest < self.version:
                raise StaleRead(f"another table has replaced {self.table.url}; open the new table")
            caller.look(lambda _: messages.Refresh(newest, rebuild))  # noqa: B023
            versions = set(map(_version, caller.known.values()))
            if len(versions) == 1:  # else another handle refreshes, too
                if is_kept(table, caller.known, dataset if versions == {newest} else None):
                    return
                if rebuild:
                    raise CorruptionError(
                        f"the rebuilt shards still differ from {self.table.url}; verify() names the records that differ"
                    )
                rebuild = True
            dataset = table.now()
        raise StaleRead(f"the shards changed {_TRIES} times while they were compared with the table; refresh() again")

    def grow(self) -> int:
        """Double the number of shards, and return the new number."""
        self.require_writable()
        with self.moving:
            table, shards = self.table, 2 * self.table.shards
            caller = self._joined(shards, max(PATIENCE, self.caller.timeout))
            try:
                table.put_shards(shards)
                self._go_on(caller, table.now())
            except BaseException:
                caller.transport.close()
                raise
            self._take(caller)
        return shards

    def _joined(self, shards: int, timeout: float) -> Caller:
        """Build the table's records in `shards` shards, and return a caller for them."""
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
        """Switch to `caller`. The old caller stays open for running questions, and for older hits and gradients."""
        if caller is self.caller:
            return
        self._before.add(self.caller.transport)
        self.table = self.table.with_shards(caller.shards)
        self.caller = caller

    # -- writing ---------------------------------------------------------------------------------------------------

    def put(self, change: WriteKind, given: Given, progress: Progress | bool | None) -> list[Id]:
        """Check records, write them to the table in one commit, and refresh the shards.

        Ids that are not given are random (UUIDs as texts, or ints below 2⁶³), since handles do not share a counter.
        """
        self.require_writable()
        checker, table = RecordChecker(self.schema, lambda: self._encoder), self.table
        with telling(progress) as tell:
            if change in UPDATES:
                parts = checker.parts(given, tell)
                ids, merge = parts.ids, change is WriteKind.MERGE
                columns = dict(zip(("key", "value", "payload", "text"), parts[1:], strict=True))
                table.update(ids, {name: column for name, column in columns.items() if column is not None}, merge)
            else:
                batch = checker.batch(given, tell)
                is_int = table.id_type == "integer"
                ids = batch.ids or [uuid4().int >> 65 if is_int else str(uuid4()) for _ in batch.payloads]
                table.write(table.table(batch._replace(ids=ids)), change is WriteKind.UPSERT and bool(batch.ids))
        self.seen()
        return ids

    def delete(self, ids: list[Id] | None, where: dict[str, Any] | None) -> int:
        """Delete records by id, or those that match a filter at this handle's version; return the number deleted."""
        self.require_writable()
        if ids is None:
            ids = [id for records in self.scan(10_000, where) for id in records.ids]
        count, _ = self.table.delete(ids)
        self.seen()
        return count

    def require_writable(self) -> None:
        """Raise ReadOnly if this handle or this table is read-only."""
        if self.mode != "rw" or not self.table.own:
            way = "open it with mode='rw'" if self.table.own else "write with the program that made it, then refresh()"
            raise ReadOnly(f"this handle of {self.table.url} only reads; {way}")

    def seen(self) -> None:
        """Refresh the shards after a commit. If that fails, the error says that the write itself succeeded."""
        try:
            self.refresh()
        except SoftDBError as error:
            message = f"the write is committed, but this handle does not see it yet: {error.args[0]}"
            if isinstance(error, Closed | ShardUnavailable | StaleRead):
                error.args = (message, *error.args[1:])
                raise
            raise StaleRead(message) from error  # other types of error would mean that the write failed


def _version(description: messages.Description) -> int:
    return messages.of_records(description.version)
