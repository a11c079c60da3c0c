"""Records: written, read by id, scanned, filtered by the payload."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from softdb import check
from softdb.answers import Record, Records
from softdb.check import Array, Id
from softdb.database.handle import Handle, verb
from softdb.errors import BadInput, StaleRead
from softdb.store import Batch, Snapshot
from softdb.store.keyed import Keyed
from softdb.store.paths import field_names
from softdb.typing import Ids, Numbers, Vectors

__all__ = ["RecordVerbs"]


class RecordVerbs(Handle):
    """What is asked of a database by id or by filter."""

    # -- writing ---------------------------------------------------------------------------------------------------

    @verb
    def insert(self, ids: Ids, keys: Vectors, values: Numbers | None = None, payloads: Any = None) -> None:
        """Add records; on disk when this returns, all of them or none.

        Args:
            ids: n of `str` or `int`.
            keys: (n, d) numbers, or n texts where the database has an encoder.
            values: (n, v) numbers, (n,) integer labels, or None: as the database was made.
            payloads: n JSON values, or None.

        Raises:
            DuplicateId: an id is stored already or comes twice.
            BadInput: something does not fit; nothing was written.
            ReadOnly, WriteFailed: this handle may not, or can no longer, write.
        """
        self._put(self._store.insert, ids, keys, values, payloads)

    @verb
    def upsert(self, ids: Ids, keys: Vectors, values: Numbers | None = None, payloads: Any = None) -> None:
        """As `insert`, but a record whose id is stored already is replaced whole, its payload too."""
        self._put(self._store.upsert, ids, keys, values, payloads)

    @verb
    def update(
        self, ids: Ids, keys: Vectors | None = None, values: Numbers | None = None, payloads: Any = None
    ) -> None:
        """Replace the given parts of stored records, all or none. Raises UnknownId for an id that is not stored."""
        if keys is None and values is None and payloads is None:
            raise BadInput("nothing to change was given; pass keys, values or payloads")
        names, schema = self._identifiers(ids), self._store.schema
        while not self._store.run(
            self._if_made,
            self._store.keyed,
            self._store.update,
            names,
            None if keys is None else self._keys(keys, len(names)),
            None if values is None else check.values(values, schema, len(names)),
            None if payloads is None else check.payloads(payloads, len(names)),
        ):
            pass

    @verb
    def delete(self, ids: Ids | None = None, where: dict[str, Any] | None = None) -> int:
        """Delete records by id (missing ones are fine) or by filter, and return how many there were."""
        if (ids is None) == (where is None):
            raise BadInput("give ids or where, one of them; where={} deletes every record")
        return self._store.delete(None if ids is None else check.identifiers(ids, unique=False), where)

    # -- reading ---------------------------------------------------------------------------------------------------

    @verb
    def get(self, ids: Ids) -> Records:
        """The records of those ids, in that order. Raises UnknownId (a KeyError) naming one that is not stored."""
        names = check.identifiers(ids, unique=False)
        snapshot, rows, texts = self._store.require(names)
        return self._records(snapshot, snapshot.positions(rows), names, texts)

    @verb
    def __getitem__(self, name: Id) -> Record:
        return self.get([name])[0]

    @verb
    def __contains__(self, name: object) -> bool:
        return bool(self._store.locate(check.identifiers([name]))[1][0] >= 0)

    @verb
    def __len__(self) -> int:
        return self._store.snapshot.count

    @verb
    def count(self, where: dict[str, Any] | None = None) -> int:
        """How many records there are, or how many a filter matches."""
        if where is None:
            return len(self)
        return int(np.count_nonzero(self._store.matching(where)[1]))

    @verb
    def scan(self, batch_size: int = 1000, where: dict[str, Any] | None = None) -> Iterator[Records]:
        """All records, or those that a filter matches, in the order of their last insertion, in batches.

        The scan is of the generation it began with, less the records that were deleted before it reached them.
        """
        return self._scan(check.integer(batch_size, "batch_size"), *self.view(where))

    def _scan(self, size: int, snapshot: Snapshot, allowed: NDArray[np.bool_] | None) -> Iterator[Records]:
        positions = np.flatnonzero(snapshot.live if allowed is None else allowed & snapshot.live)
        for start in range(0, len(positions), size):
            mine = positions[start : start + size]
            rows = snapshot.rows(mine)
            found = self._store.read(rows)
            kept = np.fromiter((row in found for row in rows.tolist()), np.bool_, len(rows))
            if kept.any():
                names, texts = zip(*(found[row] for row in rows[kept].tolist()), strict=True)
                yield self._records(snapshot, mine[kept], list(names), list(texts))

    # -- fields of the payload -------------------------------------------------------------------------------------

    @verb
    def index_field(self, *names: str) -> None:
        """Declare fields of the payload: SQLite indexes them, and filters on them no longer read the payloads.

            db.index_field("year", "lang")
            db.search(queries, where={"year": {"$gte": 2020}, "lang": "de"})

        Kept with the database; an index that is there already stays. Any answer is the same without. Equality, order,
        `$in`, `$exists` and their negations use it, `$contains` does not. Cost: one pass over the payloads now, and on
        every insert 1 to 3 µs and 20 to 30 bytes a record and field.
        """
        self._store.index_fields(field_names(names))

    @verb
    def drop_field(self, name: str) -> None:
        """Drop the index of a declared field. Raises BadInput where it has none."""
        self._store.drop_field(*field_names([name]))

    def _batch(self, ids: Ids, keys: Vectors, values: Numbers | None, payloads: Any) -> Batch:
        names = self._identifiers(ids)
        return Batch(
            names,
            self._keys(keys, len(names)),
            check.values(values, self._store.schema, len(names)),
            check.payloads(payloads, len(names)),
        )

    def _put(
        self, write: Callable[[Batch], None], ids: Ids, keys: Vectors, values: Numbers | None, payloads: Any
    ) -> None:
        while not self._store.run(self._if_made, self._store.keyed, write, self._batch(ids, keys, values, payloads)):
            pass

    def _if_made(self, made: Keyed, write: Callable[..., None], *what: Any) -> bool:
        """Write, unless all keys were made anew since `made`, maybe of another width. On the store's thread."""
        if self._store.keyed is not made:
            return False
        write(*what)
        return True

    def _identifiers(self, ids: Ids) -> list[Id]:
        names = check.identifiers(ids)
        if not names:
            raise BadInput("ids are an empty batch; give at least one")
        return names

    def _keys(self, keys: Vectors, count: int) -> Array:
        schema = self._store.schema
        array = check.matrix(check.encoded(keys, "keys", self._encoder), "keys", schema.dim, schema.dtype)
        return check.filled(array, "keys", count)

    def _records(
        self, snapshot: Snapshot, positions: NDArray[np.int64], names: list[Id], texts: list[str | None]
    ) -> Records:
        """The records at positions (n,) of a generation, whose ids and payload texts are known."""
        schema = self._store.schema
        if not names:  # the snapshot may have no columns to gather from
            keys = torch.from_numpy(np.zeros((0, schema.dim), schema.dtype))
            labels = torch.zeros(0, dtype=torch.int64)
            none = labels if schema.value_dim is None else keys.new_zeros(0, schema.value_dim)
            return Records([], keys, none if schema.has_values else None, [])
        values = snapshot.values_at(positions) if schema.has_values else None
        return Records(names, snapshot.keys_at(positions), values, texts)

    def rewrite(
        self, rows: NDArray[np.int64], keys: Tensor | None, values: Tensor | None
    ) -> tuple[Snapshot, NDArray[np.int64]]:
        """Update the records at rows (m,) in one transaction; the generation after, and their new rows (m,).

        Raises StaleRead, and writes nothing, where one of them was deleted or replaced.
        """

        def update() -> tuple[Snapshot, NDArray[np.int64]]:
            known = self._store.read(rows)
            if len(known) < len(rows):
                raise StaleRead(
                    f"{len(rows) - len(known)} of {len(rows)} records were deleted or replaced meanwhile; reload()"
                )
            names = [known[row][0] for row in rows.tolist()]
            self.update(names, keys=keys, values=values)
            return self.locate(names)

        return self._store.run(update)  # what another thread writes comes before all of this or after it
