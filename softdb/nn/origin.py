"""Records that the parameters of a memory stand for, as of one generation of the database."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from softdb.check import Id, Metric, shown
from softdb.database import SoftDB
from softdb.errors import BadInput, StaleRead
from softdb.index.query import Query
from softdb.lazy import cached_property
from softdb.store import Snapshot

BLOCK = 1 << 14  # records compared with what is stored at once
Rows = NDArray[np.int64]
Live = NDArray[np.bool_]
Names = NDArray[np.bytes_]  # digests of ids, DIGEST bytes each
DIGEST = 16  # bytes; two of 10⁹ ids are alike with probability 10⁻²¹
TOLD = "records"  # in a state_dict: whose parameters these are
UNKNOWN = b""  # the digest where no id is known


@dataclass(frozen=True)
class Origin:
    """The records behind n parameters, in their order, and where a generation of the database has them. Immutable.

    Copies share it, and with it the handle; a pickle opens the database for reading.
    """

    db: SoftDB
    rows: Rows  # (n,) permanent row of each parameter's record
    snapshot: Snapshot = field(repr=False)

    @classmethod
    def newest(cls, db: SoftDB) -> Origin:
        """Every record there is, in row order. Raises Closed."""
        db.core.require_open()
        snapshot = db.core.view()[0]
        return cls(db, snapshot.rows(np.flatnonzero(snapshot.live)), snapshot)

    def now(self) -> Origin:
        """The same records as of the newest generation that the handle sees. Raises Closed."""
        self.db.core.require_open()
        snapshot = self.db.core.view()[0]
        if self.snapshot.generation < self.db.core.reembedded <= snapshot.generation:
            raise StaleRead("all keys of the database were made anew since these were taken; make the memory anew")
        return self if snapshot is self.snapshot else Origin(self.db, self.rows, snapshot)

    def written(
        self,
        which: Rows,  # (m,) parameters
        keys: Tensor | None,  # (n, d), None: as they are
        values: Tensor | None,  # (n, v)
    ) -> Origin:
        """Write what records have become into the database, one transaction, and follow them to their new rows."""
        rows = self.rows.copy()
        columns = (None if column is None else column.detach()[which] for column in (keys, values))
        snapshot, rows[which] = self.db.core.rewrite(rows[which], *columns)
        return Origin(self.db, rows, snapshot)

    def names(self) -> Names:
        """The digest of each record's id (n,), UNKNOWN where it is gone: the same in every generation and order."""
        names = np.zeros(len(self.rows), f"S{DIGEST}")
        for low in range(0, len(names), BLOCK):
            part = self.rows[low : low + BLOCK]
            known = self.db.core.store.read(part)
            names[low : low + BLOCK] = [_digest(known[row].id) if row in known else UNKNOWN for row in part.tolist()]
        return names

    @cached_property
    def positions(self) -> Rows:
        """Positions of the records, (n,), -1 for one that is gone from the files."""
        return self.snapshot.positions(self.rows)

    @cached_property
    def present(self) -> Live:
        """Mask of records that are still there as they were, (n,): neither deleted nor replaced."""
        if not self.snapshot.size:
            return np.zeros(len(self.rows), np.bool_)
        return (self.positions >= 0) & self.snapshot.live[self.positions]

    @cached_property
    def count(self) -> int:
        """Number of them that are still there."""
        return int(np.count_nonzero(self.present))

    @cached_property
    def _allowed(self) -> Live | None:
        """The positions (size,) of these records; None where there are no others."""
        if self.count == self.snapshot.count:
            return None
        allowed = np.zeros(self.snapshot.size, np.bool_)
        allowed[self.positions[self.present]] = True
        return allowed

    @cached_property
    def _parameters(self) -> Rows:
        """The parameter at each position (size,), -1 = none."""
        found = np.full(self.snapshot.size, -1, np.int64)
        found[self.positions[self.present]] = np.flatnonzero(self.present)
        return found

    @property
    def metric(self) -> Metric:
        """The database's."""
        return self.db.core.schema.metric

    @property
    def indexed(self) -> bool:
        """True if the database has an index."""
        report = self.db.core.finder.report()
        return report is not None and report.kind != "flat"

    def find(
        self,
        queries: Tensor,  # (q, d) without a graph
        k: int,
        certain: int | None = None,
    ) -> tuple[Rows, str]:  # (q, k)
        """The k of these records, at most `count`, whose stored keys are nearest, and the finder's name.

        `certain` of them are found with the recall of the index, the others on the way.
        """
        query = Query(queries, k, self.metric, self._allowed, certain=certain, pairwise=False)
        found = self.db.core.finder.find(self.snapshot, query)
        return self._parameters[found.positions], found.finder

    def keys(self, which: Rows) -> Tensor:  # (…) parameters -> (…, d) in the column's dtype
        """Stored keys, copied; zeros of a record that is gone from the files."""
        if not self.snapshot.size:
            return torch.zeros(*which.shape, self.db.core.schema.dim)
        return self.snapshot.keys_at(self.positions[which])

    def values(self, which: Rows) -> Tensor:  # (…) parameters -> (…, v) in the column's dtype, or int64 labels (…)
        """Stored values, copied, as `keys`."""
        if not self.snapshot.size:
            schema = self.db.core.schema
            empty = torch.zeros(*which.shape, schema.pooled_dim)
            return empty if schema.num_classes is None else empty[..., 0].long()
        return self.snapshot.values_at(self.positions[which])

    def changed(
        self,
        which: Rows,  # (m,) parameters
        keys: Tensor | None,  # (n, d), None: not trained
        values: Tensor | None,  # (n, v)
    ) -> Rows:
        """Those that are no longer what is stored, to the last bit of its dtype. Cost m (d + v)."""
        differ = np.zeros(len(which), np.bool_)
        for low in range(0, len(which), BLOCK):
            part = which[low : low + BLOCK]
            for now, stored in ((keys, self.keys), (values, self.values)):
                if now is not None:
                    then = stored(part)
                    differ[low : low + BLOCK] |= (now.detach()[part].to(then) != then).any(1).numpy()
        return which[differ]

    def __deepcopy__(self, memo: dict[int, Any]) -> Origin:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopened, (self.db, self.rows)


@dataclass
class Followed:
    """The origin of a memory and of its copies: what one of them writes, the others follow to its new rows."""

    origin: Origin
    names: Names  # (n,) as `Origin.names`, of when the memory was made

    @classmethod
    def of(cls, origin: Origin) -> Followed:
        """These records, from now on. Cost: n ids are read."""
        return cls(origin, origin.names())

    def told(self) -> Tensor:  # (n, DIGEST) bytes
        """Records that the parameters stand for, as a state_dict holds them; zeros where the record is gone."""
        names = np.where(self.origin.present, self.names, UNKNOWN).astype(self.names.dtype)
        return torch.from_numpy(names.view(np.uint8).reshape(-1, DIGEST))

    def places(
        self,
        told: object,  # (m, DIGEST) bytes, as `told` of another memory
        columns: list[Tensor],  # (m, …) that came with it
    ) -> Rows:  # (n,), -1 = not there
        """Positions of the parameters' records in the state of another memory.

        Raises BadInput unless both hold the same records; those that are gone from one of them do not count.
        """
        if not isinstance(told, Tensor) or told.ndim != 2 or told.shape[1] != DIGEST:
            raise BadInput(
                f"the state's {TOLD!r} are {shown(told)}; expected what a memory's state_dict() says of whose "
                "parameters these are"
            )
        if any(len(column) != len(told) for column in columns):
            raise BadInput(
                f"the state has {len(told)} records and columns of {[len(column) for column in columns]} rows"
            )
        theirs = np.ascontiguousarray(told.cpu().to(torch.uint8).numpy()).view(self.names.dtype).reshape(-1)
        places = np.full(len(self.names), -1, np.int64)
        if len(theirs):
            order = np.argsort(theirs)
            near = order[np.searchsorted(theirs, self.names, sorter=order).clip(max=len(theirs) - 1)]
            places = np.where((theirs[near] == self.names) & (self.names != UNKNOWN), near, -1)
        missing = int(np.count_nonzero((places < 0) & (self.names != UNKNOWN) & self.origin.present))
        others = int(np.count_nonzero((theirs != UNKNOWN) & ~np.isin(theirs, self.names)))
        if missing or others:
            raise BadInput(
                f"the state lacks {missing} of this memory's {len(self.names)} records and holds {others} others; "
                "load it into a memory of the same records"
            )
        return places

    def __deepcopy__(self, memo: dict[int, Any]) -> Followed:
        return self


def in_order(
    column: Tensor,  # (m, …) of a state
    places: Rows,  # (n,) of a memory's records in it, -1 = not there
    now: Tensor,  # (n, …)
) -> Tensor:  # (n, …)
    """The column as the memory orders it; what the state does not have stays as it is."""
    if np.array_equal(places, np.arange(len(column))):
        return column
    taken = column.detach()[places] if len(column) else now.to(column).clone()
    taken[places < 0] = now.to(taken)[places < 0]
    return taken


def _digest(name: Id) -> bytes:
    return hashlib.blake2b(f"{type(name).__name__} {name}".encode(), digest_size=DIGEST).digest()


def _reopened(db: SoftDB, rows: Rows) -> Origin:
    return Origin(db, rows, db.core.view()[0])
