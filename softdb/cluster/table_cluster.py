"""A cluster over a table: it writes, follows what others write, and grows."""

from __future__ import annotations

import os
from collections.abc import Callable

from softdb import check
from softdb.cluster import shard as messages
from softdb.cluster.copying import copied, of_table
from softdb.cluster.handle import Cluster
from softdb.cluster.invariant import verified
from softdb.cluster.storage import occupied
from softdb.cluster.table_core import TableCore
from softdb.cluster.truth import Truth
from softdb.database.questions import verb
from softdb.reports import CompactReport, SnapshotReport


class TableCluster(Cluster):
    """SoftDB's verbs on a Lance table of any size: its shards answer, the table keeps.

        db = softdb.cluster.create("records.lance", dim=128, shards=4)
        db.insert(ids, keys)
        db.attend(queries)

    A verb that writes is one commit of the table, whatever shards it touches. The records are safe when it returns, and
    the answers of this handle have them; another handle sees them after `refresh()`. Two that write at once are both
    served: Lance commits one after the other; of two that insert one id at once, wherever they are, exactly one gets
    DuplicateId. Cost of a write: a commit of the table (some ms in a folder, some requests of an object store), and a
    refresh. `delete` by a filter names the records of the version that this handle sees.
    """

    core: TableCore

    def __init__(
        self,
        connect: Callable[[Truth], messages.Transport],
        truth: Truth,
        timeout: float,
        partial: bool,
        mode: str,
        encoder: check.Encoder | None,
    ) -> None:
        self.core = TableCore(connect, truth, timeout, partial, mode, encoder)
        try:
            self.refresh()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> TableCluster:
        return self

    @property
    def table(self) -> Truth:
        """The table."""
        return self.core.table

    @property
    def url(self) -> str:
        """Address of the table."""
        return self.table.url

    @verb
    def refresh(self) -> int:
        """See what was committed since, by whomever, and return the version. Cost: what has changed is read once.

        Raises ShardUnavailable where a shard is not there in time: one that is being made goes on with it meanwhile.
        """
        self.core.refresh()
        return self.version

    @property
    def left_out(self) -> tuple[messages.LeftOut, ...]:
        """Rows of the table that no record can be made of, each by its id and the reason; other programs wrote them.

        They take part in no answer. `upsert` or `delete` mends them; where an id comes twice, delete one of its rows.
        """
        return tuple(row for _, shard in sorted(self.caller.known.items()) for row in shard.left_out)

    @verb
    def verify(self) -> int:
        """Compare every record of every shard with the table, and return how many there are.

        It is of the version that this handle sees. Cost: one pass over the table, and over the records.

        Raises CorruptionError naming shard and id of what differs, is missing, or is left out; shards that differ are
        made anew from the table.
        """
        with self.core.moving:
            return verified(self, self.table, self.version, self.left_out)

    @verb
    def grow(self) -> int:
        """Answer by twice as many shards from now on, and return how many: shard s becomes s and s + P.

        Where its directory lies on the host that makes the two, each is a copy of that which half of the records leave;
        the table is read where there is none. Questions are answered by the old shards until the new ones are there,
        and what they have answered stays good; other handles go over with their next `refresh()`. On Ray the old actors
        live on for these until `softdb.cluster.stop`. It may take long, and is not bounded by the timeout; one that was
        cut short is gone on with by the next. Raises DatabaseLocked where another handle does the same at once.
        """
        return self.core.grow()

    @verb
    def snapshot(self, path: str | os.PathLike[str]) -> SnapshotReport:
        """Copy all records, as of the version that this handle sees, to one ordinary database in a new directory.

        It is read from the table, batch by batch, so that memory does not grow with it and writing goes on. Indexes are
        not copied: `build_index()` there makes one.

        Args:
            path: a directory that does not exist or is empty; it is there whole, or not at all.

        Raises BadInput for another path, StaleRead where the version was cleaned up, and WriteFailed where the disk
        refuses: then nothing of the copy is left.
        """
        target, version = check.folder(path, "path", "the path of a new directory"), self.version
        return copied(target, lambda folder: of_table(self.table, version, folder))

    @verb
    def compact(self) -> CompactReport:
        """Write the table's many small files as few large ones, and index its ids. Answers stay what they are.

        Worth it after some hundred writes: each is a file, which a shard that is made anew reads. The report is of the
        newest version: its files, and the rows of deleted and replaced records in them; older versions keep theirs.
        """
        self.core.require_writable()
        truth = self.table
        before = occupied(truth.now())
        truth.compact()
        after = occupied(truth.now())
        self.core.seen()
        return CompactReport(
            after.records, before.dead - after.dead, before.files, after.files, before.bytes, after.bytes
        )
