"""Shards of a table on this machine: each is an ordinary database directory, a cache of one version of the table.

Guarantee: a directory's version is committed in the same transaction as its records, so a kill at any moment leaves it
at one version or the other. An incomplete directory stores how many rows of the table were read into it; the next call
continues with the following row. A directory that is lost, damaged or from another table is rebuilt. Questions read a
pinned version (`Served`), so they never see part of a version, and wait for no change. Where the changes between two
versions are large or unknown, the new version is built in a directory beside the old one, which answers meanwhile.
A row that cannot be stored is left out; the directory keeps the row's id.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from softdb.check import Id, shown
from softdb.cluster import apart
from softdb.cluster.directories import Directories, ShardOrigin, remove_unused
from softdb.cluster.placement import is_id, shard_of, windows
from softdb.errors import BadInput, CorruptionError, DuplicateId, StaleRead, WriteFailed
from softdb.index.choose import Progress
from softdb.index.contract import Rows
from softdb.lance_table.changes import Changes
from softdb.lance_table.storable import first_rows, storable
from softdb.lance_table.truth import LeftOut, Truth
from softdb.reports import IndexReport
from softdb.store import files
from softdb.tables.hashing import HASH

IndexWords = dict[str, Any]  # arguments of `SoftDB.build_index`

_log = logging.getLogger("softdb")
BYTES, ROWS = 1 << 25, 256  # bytes of rows that are read at once, and the least number of rows
FEW = 1000  # number of changed rows below which shards are changed in turn: threads cost more than they save
PARTLY = -1  # `ShardOrigin.rows` of a directory to which changes are applied part by part
MOST_DEAD = 10_000  # a directory is compacted if it has more dead rows than this, and more dead rows than records
MOST_LEFT_OUT = 1000  # largest number of rows left out of a shard; more mean that the column is wrong


class Hydrated(Directories):
    """Some shards of a table on this machine, which `follow` brings to newer versions of the table."""

    def __init__(
        self,
        truth: Truth,
        folder: Path,
        own_shards: Sequence[int],
        version: int | None = None,
        report: Progress | None = None,
        beside: Mapping[int, IndexWords] | None = None,
    ) -> None:
        """Open the shards, and bring them to `version`; None: only build missing shards, at the newest version.

        While shards are built, calls `report("shards", number of rows read, number of all rows)`. `beside` (shard ->
        arguments of its index) is given for directories that answer no questions, so that changes may be applied part
        by part; None: these directories answer.

        Raises DatabaseLocked if another process has the folder open, BadInput if a column cannot be stored, and
        StaleRead if the version was cleaned up.
        """
        super().__init__(truth, folder, own_shards)
        self._moving, self._earlier, self._counting = threading.Lock(), threading.Lock(), threading.Lock()
        self._report, self._serves, self._indexes = report, beside is None, beside or {}
        self._batch_size = max(ROWS, BYTES // truth.row_bytes)
        try:
            for at in {self.version(shard) for shard in self.own_shards} - {-1}:
                shards = [shard for shard in self.own_shards if self.version(shard) == at]
                for shard in shards if self._same(shards, at) is None else ():  # version gone, or another table
                    self._anew(shard)
            if version is not None or any(self.version(shard) < 0 for shard in self.own_shards):
                self.follow(truth.newest() if version is None else version)
            self._tidy()
            for shard in self.own_shards if self._serves else ():
                if self.version(shard) not in self.versions[shard].numbers:
                    self.serve(shard)
        except BaseException:
            self.close()
            raise
        finally:
            self._report = None

    # -- following -------------------------------------------------------------------------------------------------

    def follow(self, version: int) -> None:
        """Bring every shard to `version`, in parallel. A shard at a newer version stays at that version.

        If a write fails or a directory is damaged, repairs the shard and tries once more.

        Raises StaleRead, BadInput, WriteFailed, CorruptionError.
        """
        repaired = set[int]()
        with self._moving:
            while True:
                try:
                    return self._follow(version)
                except (WriteFailed, CorruptionError) as error:
                    if repaired >= self._unfit.keys():
                        if isinstance(error, CorruptionError):
                            raise
                        problem = f"{str(error).partition(';')[0]}, in {self.folder}"
                        raise WriteFailed(f"{problem}; free or mend its disk, then refresh()") from error
                    repaired |= self._unfit.keys()
                    _log.warning("shards %s of %s are repaired: %s", [*self._unfit], self.truth.url, error)

    def _follow(self, version: int) -> None:
        with ThreadPoolExecutor(max(1, len(self.own_shards))) as pool:  # waits for every shard when the block ends
            for shard, repair in list(self._unfit.items()):
                repair(shard)
                del self._unfit[shard]
                if self._serves:
                    self.serve(shard)
            if all(self.version(shard) >= version for shard in self.own_shards):
                return
            dataset = self.truth.at(version)
            self._go_on(pool)
            for since in {self.version(shard) for shard in self.own_shards}:
                shards = [shard for shard in self.own_shards if self.version(shard) == since]
                if since < version:
                    self._catch_up(pool, shards, since, dataset)
            for db in self.databases.values():
                snapshot = db.core.store.snapshot
                if snapshot.size - snapshot.count > max(MOST_DEAD, snapshot.count):
                    db.compact()

    def remake(self, shard: int) -> None:
        """Rebuild a shard at its version, or at the newest version if its version was cleaned up."""
        with self._moving, ThreadPoolExecutor(1) as pool:
            was = self.version(shard)
            try:
                dataset = self.truth.now() if was < 0 else self.truth.at(was)
            except StaleRead:
                dataset = self.truth.now()
            self._rebuild(pool, [shard], dataset)

    def _rebuild(self, pool: ThreadPoolExecutor, shards: list[int], dataset: Any, copies: bool = False) -> None:
        """Build a version of shards beside the version that answers; with `copies` from copies of the directories."""
        beside = self.folder / f"beside-{self.own_shards[0]}"
        if not self._serves:
            self._make(pool, shards, dataset)
            return
        files.make_directory(beside)
        for shard in shards if copies else ():
            with contextlib.suppress(BadInput):  # a copy or directory that an interrupted call has left
                self.databases[shard].snapshot(beside / self.name(shard))
        self._build(beside, shards, dataset)
        for shard in shards:
            self._swap(shard, beside / self.name(shard))
            _log.warning("shard %s of %s was rebuilt at version %s", shard, self.truth.url, dataset.version)

    def _build(self, folder: Path, shards: list[int], dataset: Any) -> None:
        """Build or complete directories of shards in another folder, and their indexes."""
        indexes = {shard: words for shard in shards if (words := self._index_words(shard, dataset)) is not None}
        arguments = self.truth, folder, shards, int(dataset.version), None, indexes
        if dataset.count_rows() * len(shards) < apart.LEAST * self.truth.shards or not apart.built(Hydrated, arguments):
            Hydrated(*arguments).close()

    def serve_again(self, shard: int, version: int) -> None:
        """Build a lost version, which a reader holds, from the table, and serve it. Raises StaleRead if it is gone."""
        with self._earlier:
            if self.versions[shard].at(version) is not None:
                return
            folder, path = self.folder / f"earlier-{shard}", self.folder / f"{self.name(shard)}.at-{version}"
            for leftover in (path, folder / self.name(shard)):
                remove_unused(leftover)
            self._build(folder, [shard], self.truth.at(version))
            files.publish(folder / self.name(shard), path)
            self._serve_earlier(shard, version, path)
            _log.warning("shard %s of %s serves version %s again", shard, self.truth.url, version)

    def _go_on(self, pool: ThreadPoolExecutor) -> None:
        """Complete partly built shards whose version still exists; empty the other incomplete shards."""
        incomplete: dict[int, list[int]] = {}
        for shard in self.own_shards:
            origin = self.origin(shard)
            if origin is not None and origin.rows == PARTLY:
                self._anew(shard)
            elif origin is not None and origin.rows is not None:
                incomplete.setdefault(origin.version, []).append(shard)
        for version, shards in incomplete.items():
            dataset = self._same(shards, version)
            try:
                if dataset is not None:
                    self._fill(pool, shards, dataset)
                    continue
            except BadInput as error:  # a newer version may have no such problem
                _log.warning("shards %s are rebuilt: %s", shards, error)
            for shard in shards:
                self._anew(shard)

    def _same(self, shards: list[int], version: int) -> Any:
        """Return the dataset at a version; None if the version is gone, or the shards were built from another table."""
        try:
            dataset = self.truth.at(version)
        except StaleRead:
            return None
        identity, origins = self.truth.identity(dataset), [self.origin(shard) for shard in shards]
        return dataset if all(origin is not None and origin.identity == identity for origin in origins) else None

    def _catch_up(self, pool: ThreadPoolExecutor, shards: list[int], since: int, dataset: Any) -> None:
        """Bring shards from version `since` to `dataset`: apply the changes, or rebuild if these are unknown."""
        while 0 <= since < dataset.version:
            before = self._same(shards, since)
            changes = None if before is None else self.truth.changes(before, dataset)
            if changes is None or (changes.large and self._serves):
                self._rebuild(pool, shards, dataset, copies=changes is not None)
                return
            self._apply_changes(pool, shards, changes)
            since = int(changes.dataset.version)
        if since < 0:
            self._make(pool, shards, dataset)

    def _apply_changes(self, pool: ThreadPoolExecutor, shards: list[int], changes: Changes) -> None:
        """Apply changes in one transaction of each shard, or large ones part by part."""
        unclear, id_column = set[int](), str(self.truth.fields.id)
        new = self._origin(changes.dataset)
        for ids, rows, is_last in changes.steps():
            origin = new if is_last else replace(new, rows=PARTLY)
            removed = shard_of(ids, self.truth.shards)
            added = None if rows is None else shard_of(rows[id_column], self.truth.shards)
            own = {shard: [ids[i] for i in np.flatnonzero(removed == shard)] for shard in shards}
            unclear |= {shard for shard in own if self._unclear(shard, own[shard])}

            def apply(shard: int) -> None:
                own_rows = None if rows is None else rows.take(np.flatnonzero(added == shard))  # noqa: B023
                self._apply(shard, own[shard], own_rows, origin)  # noqa: B023

            in_turn = len(ids) + (0 if rows is None else len(rows)) < FEW
            list((map if in_turn else pool.map)(apply, set(shards) - unclear))
        if unclear:
            self._rebuild(pool, [*unclear], changes.dataset)

    # -- indexes ---------------------------------------------------------------------------------------------------

    def indexed(self, shard: int, words: IndexWords) -> IndexReport:
        """Build an index over a shard's newest version; arguments as in `SoftDB.build_index`."""
        report: IndexReport = self.databases[shard].build_index(**words)
        with self._moving:
            self.serve(shard)
        return report

    def _index_words(self, shard: int, dataset: Any) -> IndexWords | None:
        """Return the arguments of a new directory's index: those in the table's configuration, else the old one's."""
        words, index = self.truth.index(dataset), self.databases[shard].core.finder.index
        if words is None and index is not None:
            return {"kind": index.kind, "recall": index.report["target"], "k": index.report["k"]}
        return words

    def _index(self, shard: int, dataset: Any) -> None:
        """Build the index of a new directory."""
        words = self._index_words(shard, dataset) if self._serves else self._indexes.get(shard)
        try:
            if words is not None:
                self.databases[shard].build_index(**words)
        except BadInput as error:  # too few records, for example
            _log.warning("shard %s of %s has no index: %s", shard, self.truth.url, error)

    def _unclear(self, shard: int, removed: list[Id]) -> bool:
        """Return True if a row was removed whose id has other rows: only the table knows which row remains."""
        origin = self.origin(shard)
        ids = {id for id, _ in origin.left_out} & set(removed) if origin is not None and origin.left_out else set()
        return not all(map(is_id, ids)) or bool(ids and self.databases[shard].core.stored([*filter(is_id, ids)]).any())

    def _make(self, pool: ThreadPoolExecutor, shards: list[int], dataset: Any) -> None:
        """Empty these shards, and build them again from a version of the table."""
        for shard in shards:
            self._anew(shard)
        if shards:
            self._fill(pool, shards, dataset)

    def _fill(self, pool: ThreadPoolExecutor, shards: list[int], dataset: Any) -> None:
        """Read the rows that these shards still lack, and store them."""
        seen, origin = {shard: self._seen(shard) for shard in shards}, self._origin(dataset)
        self._total, self._done = dataset.count_rows(), 0
        self._passed_over(min(seen.values()))
        for window in windows(self.truth, dataset, min(seen.values())):
            own = {shard: window.own(shard, after) for shard, after in seen.items()}
            own_rows = np.sort(np.concatenate([*own.values()]))
            self._passed_over(len(window.parts) - len(own_rows))
            if window.taken(own_rows, self.truth.row_bytes, self.truth.local):
                list(pool.map(lambda shard: self._take(dataset, shard, own[shard], origin), shards))  # noqa: B023
            elif len(own_rows):
                self._scan(pool, dataset, own, (int(own_rows[0]), int(own_rows[-1]) + 1), origin)
        for shard in shards:
            self._index(shard, dataset)
            self._apply(shard, [], None, origin)
            _log.info("shard %s of %s was built at version %s", shard, self.truth.url, dataset.version)

    def _take(self, dataset: Any, shard: int, places: Rows, origin: ShardOrigin) -> None:
        """Read only the rows at `places`, and store them in a shard."""
        for low in range(0, len(places), self._batch_size):
            batch = places[low : low + self._batch_size]
            at = replace(origin, rows=int(batch[-1]) + 1)
            self._apply(shard, [], self.truth.taken(dataset, batch), at)
            self._passed_over(len(batch))

    def _scan(
        self, pool: ThreadPoolExecutor, dataset: Any, own: dict[int, Rows], span: tuple[int, int], origin: ShardOrigin
    ) -> None:
        """Read all rows from span[0] to span[1] of the table, and store each row in its shard."""
        at, end = span
        for batch in self.truth.batches(dataset, self._batch_size, at, end - at):
            low, at = at, at + len(batch)

            def apply(shard: int) -> None:
                own_rows = own[shard][slice(*np.searchsorted(own[shard], (low, at)))]  # noqa: B023
                if len(own_rows):
                    rows = batch if len(own_rows) == len(batch) else batch.take(own_rows - low)  # noqa: B023
                    self._apply(shard, [], rows, replace(origin, rows=at))  # noqa: B023
                    self._passed_over(len(own_rows))

            list(pool.map(apply, own))

    def _apply(self, shard: int, removed: list[Id], rows: Any, origin: ShardOrigin) -> None:
        """Delete `removed`, add `rows`, and store version and left-out rows of a shard, in one transaction."""
        db, before, removed_ids = self.databases[shard], self.origin(shard), set(removed)
        left_out = [] if before is None else [row for row in before.left_out if row.id not in removed_ids]
        known = len(left_out)
        records = None if rows is None else self.truth.rows(rows, left_out)
        read = len(left_out)
        batches = [] if records is None else storable(self.truth, records, left_out)
        origin = replace(origin, place=[shard, self.truth.shards, HASH], making=self._making[shard])
        try:
            try:
                db.core.store.apply(removed, batches, self._noted(origin, left_out))
            except DuplicateId:
                assert records is not None
                del left_out[read:]
                own = {records.ids[i] for i in np.flatnonzero(db.core.stored(records.ids))}
                batches = storable(self.truth, first_rows(records, own - removed_ids, left_out), left_out)
                db.core.store.apply(removed, batches, self._noted(origin, left_out))
        except (WriteFailed, CorruptionError) as error:
            self._unfit[shard] = self._reopen if isinstance(error, WriteFailed) else self._anew
            raise
        self._origins[shard] = (db, db.generation), replace(origin, left_out=left_out)
        if self._serves and origin.rows is None:
            self.serve(shard)
        for id, reason in left_out[known:]:
            _log.warning("%s: the row with id %s is left out: %s", self.truth.url, shown(id), reason)

    def _passed_over(self, count: int) -> None:
        """Add `count` rows, read or skipped, to the progress that `report` gets."""
        if self._report is not None:
            with self._counting:
                self._done += count
                self._report("shards", self._done, self._total)

    def _noted(self, origin: ShardOrigin, left_out: list[LeftOut]) -> str:
        """Return the origin with the rows left out, as JSON. Raises BadInput if more than MOST_LEFT_OUT rows are."""
        if len(left_out) > MOST_LEFT_OUT:
            id, reason = left_out[-1]
            several = f"more than {MOST_LEFT_OUT} rows of a shard cannot be stored"
            raise BadInput(f"{self.truth.url}: {several}, such as id {shown(id)}: {reason}; correct or delete the rows")
        return replace(origin, left_out=left_out).text

    def _seen(self, shard: int) -> int:
        origin = self.origin(shard)
        return 0 if origin is None or origin.rows is None else origin.rows

    def _origin(self, dataset: Any) -> ShardOrigin:
        """Return the origin that names a version of the table; `_apply` adds the shard's number."""
        fields, version, identity = self.truth.fields, int(dataset.version), self.truth.identity(dataset)
        return ShardOrigin(self.truth.url, [fields.id, fields.key, fields.value], [], version, identity, 0)
