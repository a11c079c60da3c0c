"""`TableCluster`: a cluster whose records are in a Lance table. It reads and writes, and can double its shards."""

from __future__ import annotations

import os
from typing import Any

from softdb import check
from softdb.cluster.copying import copied, of_table
from softdb.cluster.handle import Cluster
from softdb.cluster.invariant import verified
from softdb.cluster.table_core import TableCore
from softdb.database.questions import verb
from softdb.lance_table.storage import occupied
from softdb.lance_table.truth import LeftOut, Truth
from softdb.reports import CompactReport, IndexReport, SnapshotReport


class TableCluster(Cluster):
    """SoftDB's verbs on a Lance table of any size: the table stores the records, and shards answer questions.

        db = softdb.cluster.create("records.lance", dim=128, shards=4)
        db.insert(ids, keys)
        db.attend(queries)

    Each write is one commit of the table for all shards. When the verb returns, the records are on disk and in this
    handle's answers; another handle sees them after `refresh()`. Concurrent writes both succeed, one after the other.
    If two handles insert the same id at once, one succeeds and the other gets DuplicateId. A write costs a commit of
    the table (some ms in a folder, some requests to an object store) and a refresh. `delete` by a filter deletes the
    records that match at the version that this handle sees.
    """

    core: TableCore

    def __init__(self, core: TableCore) -> None:
        self.core = core
        try:
            self.refresh()
        except BaseException:
            self.close()
            raise

    @property
    def table(self) -> Truth:
        """The Lance table that stores the records."""
        return self.core.table

    @property
    def url(self) -> str:
        """Address of the table."""
        return self.table.url

    @verb
    def refresh(self) -> int:
        """Move to the table's newest version, and return that version. Cost: the new changes are read once.

        Raises ShardUnavailable if a shard exceeds the timeout; a shard that is being built continues meanwhile.
        """
        self.core.refresh()
        return self.version

    @property
    def left_out(self) -> tuple[LeftOut, ...]:
        """Rows of other programs that cannot be stored as records, each with its id and the reason.

        These rows take part in no answer. Correct or remove rows with `upsert` or `delete`; keep one row for each id.
        """
        return tuple(row for _, shard in sorted(self.caller.known.items()) for row in shard.left_out)

    @verb
    def verify(self) -> int:
        """Compare the records of all shards with the table at this handle's version; return the number of records.

        Cost: one pass over the table, and one over the records.

        Raises CorruptionError with shard and id of records that differ, are missing or are left out. Rebuilds shards
        that differ from the table.
        """
        with self.core.moving:
            return verified(self, self.table, self.version, self.left_out)

    @verb
    def build_index(self, /, kind: str = "auto", **words: Any) -> list[IndexReport]:
        """Build an index in every shard, as `Cluster.build_index` does, and let shards that are built later have one.

        The table's configuration keeps the arguments (without `queries`) if this handle may write. Raises BadInput.
        """
        reports = super().build_index(kind, **words)
        if self.mode == "rw" and self.table.own:
            self.table.put_index({"kind": kind, **{name: word for name, word in words.items() if name != "queries"}})
            self.core.seen()
        return reports

    @verb
    def grow(self) -> int:
        """Double the number of shards, and return the new number: shard s becomes s and s + P.

        The new shards are built from the table, and have the index of `build_index`. The old shards answer until the
        new ones are complete, and their answers stay valid. Other handles switch
        at their next `refresh()`; on Ray the old actors end when nobody asks them any more. Growing may take longer
        than the timeout; call again after an interruption. Raises DatabaseLocked if another handle grows at once.
        """
        return self.core.grow()

    @verb
    def snapshot(self, path: str | os.PathLike[str]) -> SnapshotReport:
        """Copy all records at this handle's version to one ordinary database in a new directory.

        The copy reads the table batch by batch, in bounded memory, and blocks no writer. Indexes are not copied: call
        `build_index()` on the copy.

        Args:
            path: a directory that does not exist or is empty. A failed copy leaves no files in it.

        Raises BadInput for any other path, StaleRead if the version was cleaned up, and WriteFailed if writing fails.
        """
        target, version = check.folder(path, "path", "the path of a new directory"), self.version
        return copied(target, lambda folder: of_table(self.table, version, folder))

    @verb
    def compact(self) -> CompactReport:
        """Merge the table's files into few large ones without dead rows, and index its ids. Answers do not change.

        Useful when many records were replaced or deleted; writes merge small files themselves. The report counts the
        files of the newest version, and the rows of deleted and replaced records in them. Older versions keep their
        files.
        """
        self.core.require_writable()
        truth = self.table
        _, dead, files, size = occupied(truth.now())
        truth.compact()
        records, dead_after, files_after, size_after = occupied(truth.now())
        self.core.seen()
        return CompactReport(records, dead - dead_after, files, files_after, size, size_after)
