"""`Cluster`: several shards as one database. Answers equal those of one database that holds all records."""

from __future__ import annotations

import inspect
import os
from typing import Any

from softdb import check
from softdb.cluster import shard as messages
from softdb.cluster.caller import Caller
from softdb.cluster.cluster_core import ClusterCore
from softdb.cluster.copying import copied, of_records
from softdb.database import SoftDB, Verbs
from softdb.database.questions import verb
from softdb.errors import BadInput
from softdb.misnomers import require_known
from softdb.reports import IndexReport, SnapshotReport

BUILDING = 3600.0  # least timeout for building an index, in seconds


class Cluster(Verbs):
    """Several shards as one database: the verbs of SoftDB that read, with equal answers.

        db = Cluster(Local([DatabaseShard(part, i, len(parts)) for i, part in enumerate(parts)]))

    Every read names the version that this handle saw last. A shard at another version raises StaleRead; `refresh()`
    moves the handle to the newest version. Answers have gradients, as from a database; docs/cluster.md says which data
    are sent. Scans, loops and pages of `get` go shard by shard. `search` orders equal scores by id. It takes vectors
    only: `texts`, `mode`, `fusion`, `diversity`, `fetch_k`, `group_by` and `group_size` raise BadInput. Writing raises
    ReadOnly.

    Args:
        transport: carries messages to the shards; `close` closes it.
        timeout: seconds that a question may take; then it raises ShardUnavailable.
        partial: True to answer without shards that do not reply. Then `missing` names them, `met` is False and `bar`
            infinite. Losses always need all shards.

    Raises BadInput for a timeout that is no number above 0.
    """

    core: ClusterCore

    def __init__(self, transport: messages.Transport, timeout: float = 30.0, partial: bool = False) -> None:
        self.core = ClusterCore(Caller(transport, check.positive(timeout, "timeout"), bool(partial)))

    @property
    def mode(self) -> str:
        """ "rw" if the handle writes, "r" if it only reads."""
        return self.core.mode

    @property
    def caller(self) -> Caller:
        """`Caller` that sends this handle's messages to the shards."""
        return self.core.caller

    @property
    def shards(self) -> int:
        """Number of shards."""
        return self.caller.shards

    @property
    def version(self) -> int:
        """Version that this handle sees: the newest among the shards. Shards of a table are all at one version."""
        return self.core.version

    @verb
    def refresh(self) -> int:
        """Move every shard to its newest version, and return that version. Cost: the new changes are copied once."""
        self.caller.look(lambda _: messages.Refresh(messages.NEWEST))
        return self.version

    def __repr__(self) -> str:
        state = "closed" if self.closed else f"{self.core.keyed} keys, dim {self.dim}, {self.metric}"
        return f"<Cluster of {self.shards} shards, {state}>"

    @verb
    def build_index(self, /, kind: str = "auto", **words: Any) -> list[IndexReport]:
        """Build an index in every shard, in parallel; return each shard's report. Arguments as in `SoftDB.build_index`.

        Raises BadInput for `background` and `progress`.
        """
        require_known("build_index", words, inspect.signature(SoftDB.build_index).parameters)
        if refused := {"background", "progress"} & words.keys():
            raise BadInput(f"{' and '.join(sorted(refused))} cannot be given: a cluster waits for all of its shards")
        patient = self.caller.complete()
        patient.timeout = max(BUILDING, patient.timeout)
        answers = patient.ask(lambda _, version: messages.CallVerb(version, "build_index", {"kind": kind, **words}))
        self.caller.look(lambda _: messages.Describe(messages.NEWEST))
        return [report for _, report in sorted(answers.replies.items())]

    @verb
    def snapshot(self, path: str | os.PathLike[str]) -> SnapshotReport:
        """Copy all records to one ordinary database in a new directory; an error leaves no directory.

        Cost: a scan, batch by batch. Indexes are not copied.

        Raises BadInput if the path exists and is not empty, StaleRead if a shard moves to another version meanwhile,
        and WriteFailed if the disk refuses to write.
        """
        core = self.core
        return copied(
            check.folder(path, "path", "the path of a new directory"),
            lambda folder: of_records(core.scan(1000, None), core.schema, core.encoder_name, folder),
        )
