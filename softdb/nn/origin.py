"""Link between the parameters of a memory and their records, in one generation of the database."""

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
from softdb.index.contract import Live, Rows
from softdb.index.query import Query
from softdb.lazy import cached_property
from softdb.store import Snapshot

BLOCK = 1 << 14  # number of records read or compared at once
Names = NDArray[np.bytes_]  # digests of ids, DIGEST bytes each
DIGEST = 16  # bytes of an id's digest; among 10⁹ ids two have the same digest with probability 10⁻²¹
RECORDS = "records"  # name of the ids' digests in a state_dict
UNKNOWN = b""  # digest of a deleted or replaced record


@dataclass(frozen=True)
class Origin:
    """The record of each of n parameters, in the parameters' order, and a snapshot of the database. Immutable.

    A deep copy is the same object, with the same handle; unpickling opens the database for reading.
    """

    db: SoftDB
    rows: Rows  # (n,) permanent row of each parameter's record
    snapshot: Snapshot = field(repr=False)

    @classmethod
    def newest(cls, db: SoftDB) -> Origin:
        """Return an origin of all records that have a key, in row order. Raises Closed."""
        db.core.require_open()
        snapshot = db.core.view()[0]
        return cls(db, snapshot.rows(np.flatnonzero(snapshot.live)), snapshot)

    def now(self) -> Origin:
        """Return an origin of the same records in the generation that the handle now sees. Raises Closed, StaleRead."""
        self.db.core.require_open()
        snapshot = self.db.core.view()[0]
        if self.snapshot.generation < self.db.core.reembedded <= snapshot.generation:
            raise StaleRead("all keys of the database were made anew since this memory was made; make the memory anew")
        return self if snapshot is self.snapshot else Origin(self.db, self.rows, snapshot)

    def written(
        self,
        numbers: Rows,  # (m,) indices of the parameters to write
        keys: Tensor | None,  # (n, d), None: unchanged
        values: Tensor | None,  # (n, v), None: unchanged
    ) -> Origin:
        """Write trained keys and values in one transaction, and return the origin with the records' new rows."""
        rows = self.rows.copy()
        columns = (None if column is None else column.detach()[numbers] for column in (keys, values))
        snapshot, rows[numbers] = self.db.core.rewrite(rows[numbers], *columns)
        return Origin(self.db, rows, snapshot)

    def names(self) -> Names:
        """Return digests (n,) of the records' ids; UNKNOWN for a deleted or replaced record."""
        names = np.zeros(len(self.rows), f"S{DIGEST}")
        for low in range(0, len(names), BLOCK):
            rows = self.rows[low : low + BLOCK]
            known = self.db.core.store.read(rows)
            names[low : low + BLOCK] = [_digest(known[row].id) if row in known else UNKNOWN for row in rows.tolist()]
        return names

    @cached_property
    def positions(self) -> Rows:
        """Positions (n,) of the records in the snapshot; -1 for a record that is no longer in the files."""
        return self.snapshot.positions(self.rows)

    @cached_property
    def present(self) -> Live:
        """Mask (n,) of the records that were neither deleted nor replaced."""
        if not self.snapshot.size:
            return np.zeros(len(self.rows), np.bool_)
        return (self.positions >= 0) & self.snapshot.live[self.positions]

    @cached_property
    def count(self) -> int:
        """Number of records that were neither deleted nor replaced."""
        return int(np.count_nonzero(self.present))

    @cached_property
    def _allowed(self) -> Live | None:
        """Mask (size,) of the snapshot's positions that hold these records; None if these are all of its records."""
        if self.count == self.snapshot.count:
            return None
        allowed = np.zeros(self.snapshot.size, np.bool_)
        allowed[self.positions[self.present]] = True
        return allowed

    @cached_property
    def _parameters(self) -> Rows:
        """Index (size,) of the parameter for each position of the snapshot; -1 = no parameter."""
        parameters = np.full(self.snapshot.size, -1, np.int64)
        parameters[self.positions[self.present]] = np.flatnonzero(self.present)
        return parameters

    @property
    def metric(self) -> Metric:
        """Metric of the database."""
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
        """Return the indices of the k parameters with the nearest stored keys, and the finder's name. k <= `count`.

        The index keeps its target recall for the `certain` nearest of these k; None: for all k.
        """
        query = Query(queries, k, self.metric, self._allowed, certain=certain, pairwise=False)
        candidates = self.db.core.finder.find(self.snapshot, query)
        return self._parameters[candidates.positions], candidates.finder

    def keys(self, numbers: Rows) -> Tensor:  # (…) indices of parameters -> (…, d) in the column's dtype
        """Return a copy of the stored keys; zeros for a record that is no longer in the files."""
        if not self.snapshot.size:
            return torch.zeros(*numbers.shape, self.db.core.schema.dim)
        return self.snapshot.keys_at(self.positions[numbers])

    def values(self, numbers: Rows) -> Tensor:  # (…) indices -> (…, v) in the column's dtype, or int64 labels (…)
        """Return a copy of the stored values; zeros for a record that is no longer in the files."""
        if not self.snapshot.size:
            schema = self.db.core.schema
            empty = torch.zeros(*numbers.shape, schema.pooled_dim)
            return empty if schema.num_classes is None else empty[..., 0].long()
        return self.snapshot.values_at(self.positions[numbers])

    def changed(
        self,
        numbers: Rows,  # (m,) indices of the parameters to compare
        keys: Tensor | None,  # (n, d), None: not trained
        values: Tensor | None,  # (n, v)
    ) -> Rows:
        """Return the indices, out of `numbers`, whose key or value differs from the stored one in the stored dtype."""
        differ = np.zeros(len(numbers), np.bool_)
        for low in range(0, len(numbers), BLOCK):
            block = numbers[low : low + BLOCK]
            for trained, read in ((keys, self.keys), (values, self.values)):
                if trained is not None:
                    stored = read(block)
                    differ[low : low + BLOCK] |= (trained.detach()[block].to(stored) != stored).any(1).numpy()
        return numbers[differ]

    def __deepcopy__(self, memo: dict[int, Any]) -> Origin:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopened, (self.db, self.rows)


@dataclass
class Followed:
    """The origin that a memory shares with its copies, so that each copy uses the rows that another has written."""

    origin: Origin
    names: Names  # (n,) digests of the ids, from `Origin.names` when the memory was made

    def digests(self) -> Tensor:  # (n, DIGEST) bytes
        """Return the digests of the records' ids for a state_dict; zeros for a deleted or replaced record."""
        names = np.where(self.origin.present, self.names, UNKNOWN).astype(self.names.dtype)
        return torch.from_numpy(names.view(np.uint8).reshape(-1, DIGEST))

    def places(
        self,
        digests: object,  # (m, DIGEST) bytes that `digests` of another memory returned
        columns: list[Tensor],  # (m, …) keys and values from the same state_dict
    ) -> Rows:  # (n,), -1 = missing
        """Return, for each parameter, the index of its record in another memory's state, matched by the id's digest.

        Raises BadInput unless both hold the same records; deleted and replaced records are ignored.
        """
        if not isinstance(digests, Tensor) or digests.ndim != 2 or digests.shape[1] != DIGEST:
            raise BadInput(
                f"the state's {RECORDS!r} are {shown(digests)}; expected the digests of ids in a memory's state_dict()"
            )
        if any(len(column) != len(digests) for column in columns):
            raise BadInput(
                f"the state has {len(digests)} records but columns of {[len(column) for column in columns]} rows"
            )
        saved = np.ascontiguousarray(digests.cpu().to(torch.uint8).numpy()).view(self.names.dtype).reshape(-1)
        places = np.full(len(self.names), -1, np.int64)
        if len(saved):
            order = np.argsort(saved)
            near = order[np.searchsorted(saved, self.names, sorter=order).clip(max=len(saved) - 1)]
            places = np.where((saved[near] == self.names) & (self.names != UNKNOWN), near, -1)
        missing = int(np.count_nonzero((places < 0) & (self.names != UNKNOWN) & self.origin.present))
        others = int(np.count_nonzero((saved != UNKNOWN) & ~np.isin(saved, self.names)))
        if missing or others:
            raise BadInput(
                f"the state lacks {missing} of this memory's {len(self.names)} records and holds {others} others; "
                "load it into a memory of the same records"
            )
        return places

    def __deepcopy__(self, memo: dict[int, Any]) -> Followed:
        return self


def in_order(
    column: Tensor,  # (m, …) keys or values from a state_dict
    places: Rows,  # (n,) index in `column` of each of the memory's records, -1 = missing
    current: Tensor,  # (n, …)
) -> Tensor:  # (n, …)
    """Return the column in the order of the memory's records; missing records keep their current keys or values."""
    if np.array_equal(places, np.arange(len(column))):
        return column
    ordered = column.detach()[places] if len(column) else current.to(column).clone()
    ordered[places < 0] = current.to(ordered)[places < 0]
    return ordered


def _digest(name: Id) -> bytes:
    return hashlib.blake2b(f"{type(name).__name__} {name}".encode(), digest_size=DIGEST).digest()


def _reopened(db: SoftDB, rows: Rows) -> Origin:
    return Origin(db, rows, db.core.view()[0])
