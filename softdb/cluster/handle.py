"""`Cluster`: the shards as one database. It asks and merges; what it answers is what one database of all would."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from softdb import check
from softdb.cluster import shard as messages
from softdb.cluster.caller import Caller
from softdb.cluster.cluster_core import ClusterCore
from softdb.cluster.copying import copied, of_records
from softdb.database import Verbs
from softdb.database.questions import verb
from softdb.errors import BadInput
from softdb.reports import IndexReport, SnapshotReport

BUILDING = 3600.0  # seconds that an index may take


class Versioned(Protocol):
    """Truth of the records, as far as a reader needs it."""

    def newest(self) -> int:
        """The newest version."""


class Cluster(Verbs):
    """Shards as one database: SoftDB's verbs that read, and its answers.

        db = Cluster(Local([DatabaseShard(one, i, len(all)) for i, one in enumerate(all)]))

    Every read names the version that this handle saw last; a shard that is at another one raises StaleRead, and
    `refresh()` goes on to the newest. Differentiable as a database is; see docs/cluster.md for what travels. `scan`
    goes shard by shard, and `search` orders records that score alike by id; it takes vectors alone, and raises BadInput
    for `texts`, `mode`, `fusion`, `diversity`, `fetch_k`, `group_by` and `group_size`. Verbs that write raise ReadOnly.

    Args:
        transport: what carries questions to the shards; `close` closes it.
        timeout: seconds that any question may take; beyond it ShardUnavailable, whatever a shard does.
        partial: whether answers without the shards that are missing will do. Then `missing` names these, `met` is False
            and `bar` infinite. Losses want all shards all the same.
        truth: what the shards are copies of; None: each shard's own database.
        intact: whether shards that were made anew at the same version are asked again, in place of StaleRead.
    """

    core: ClusterCore

    def __init__(
        self,
        transport: messages.Transport,
        timeout: float = 30.0,
        partial: bool = False,
        truth: Versioned | None = None,
        intact: Callable[[Mapping[int, messages.Description]], bool] = lambda _: False,
    ) -> None:
        self.truth = truth
        self.core = ClusterCore(Caller(transport, check.positive(timeout, "timeout"), bool(partial), intact))

    @property
    def mode(self) -> str:
        """ "rw", or "r" for a handle that only reads."""
        return self.core.mode

    @property
    def caller(self) -> Caller:
        """Asks the shards."""
        return self.core.caller

    @property
    def shards(self) -> int:
        """Number of shards."""
        return self.caller.shards

    @property
    def version(self) -> int:
        """Version that this handle sees; the newest of its shards', which are all at one where there is a truth."""
        return self.core.version

    @verb
    def refresh(self) -> int:
        """See what was committed since, in every shard, and return the version. Cost: whatever the shards must copy."""
        newest = messages.NEWEST if self.truth is None else self.truth.newest()
        self.caller.look(lambda _: messages.Refresh(newest))
        return self.version

    def close(self) -> None:
        """Let go of the shards. Safe to call twice."""
        self.core.close()

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self.closed else f"{self.core.keyed} keys, dim {self.dim}, {self.metric}"
        return f"<Cluster of {self.shards} shards, {state}>"

    @verb
    def build_index(self, /, kind: str = "auto", **words: Any) -> list[IndexReport]:
        """Build every shard's index, side by side, as `SoftDB.build_index`; the reports, shard by shard.

        Raises BadInput for arguments that do not travel: `background` and `progress`.
        """
        if refused := {"background", "progress"} & words.keys():
            raise BadInput(f"{' and '.join(sorted(refused))} mean nothing for a cluster, which waits for all shards")
        patient = self.caller.complete()
        patient.timeout = max(BUILDING, patient.timeout)
        answers = patient.ask(lambda _, version: messages.CallVerb(version, "build_index", {"kind": kind, **words}))
        self.caller.look(lambda _: messages.Describe(messages.NEWEST))
        return [report for _, report in sorted(answers.replies.items())]

    @verb
    def snapshot(self, path: str | os.PathLike[str]) -> SnapshotReport:
        """Copy all records to one ordinary database in a new directory, there whole, or not at all.

        Cost: a scan, batch by batch. Indexes are not copied.

        Raises BadInput for a path where something is, StaleRead where a shard has gone on meanwhile, and WriteFailed
        where the disk refuses.
        """
        core = self.core
        return copied(
            check.folder(path, "path", "the path of a new directory"),
            lambda folder: of_records(core.scan(1000, None), core.schema, core.encoder_name, folder),
        )
