"""Records: written, read by id, scanned, filtered by the payload."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from softdb import check
from softdb.answers import Record, Records
from softdb.check import Array, Id
from softdb.database.embedding import embedded, telling
from softdb.database.handle import Handle, verb
from softdb.errors import BadInput, StaleRead
from softdb.index.choose import Progress
from softdb.store import Batch, Snapshot
from softdb.store.entry import RecordEntry
from softdb.store.keyed import Keyed
from softdb.store.paths import field_names
from softdb.typing import Ids, Keys, Numbers, Texts, Values, Vectors

__all__ = ["RecordParts", "RecordVerbs"]


class RecordParts(NamedTuple):
    """Checked parts of stored records; None: as they are."""

    ids: list[Id]  # n
    keys: Array | None  # (n, d)
    values: Array | None  # (n, v), or labels (n,)
    payloads: list[str | None] | None  # n JSON texts
    texts: list[str | None] | None  # n


class RecordVerbs(Handle):
    """What is asked of a database by id or by filter."""

    # -- writing ---------------------------------------------------------------------------------------------------

    @verb
    def insert(
        self,
        ids: Ids,
        keys: Keys | None = None,
        values: Values | None = None,
        payloads: Any = None,
        *,
        texts: Texts | None = None,
        progress: Progress | bool | None = None,
    ) -> None:
        """Add records; on disk when this returns, all of them or none.

            db.insert(ids, keys)                              # vectors
            db.insert(ids, texts=texts)                       # with an encoder: texts, and the keys it makes of them
            db.insert(ids, texts=texts, payloads=payloads)    # without one: records without a key

        A record without a key is found by its id, by filters and by its text, never by vector or soft query.

        Args:
            ids: n of `str` or `int`.
            keys: (n, d) numbers; or n texts where the database has an encoder, which are embedded and not kept. A list
                may hold None: that record has no key. None: the texts are embedded; without an encoder no record of
                the batch has a key.
            values: (n, v) numbers, (n,) integer labels, or None: as the database was made. None in a list, or in place
                of it, where there is no key.
            payloads: n JSON values, or None.
            texts: n texts of at most 16 MiB of UTF-8 each, or None, kept with the records.
            progress: of the embedding: called with what is being done, how much of it is done, and the whole; True
                draws a bar.

        Raises:
            DuplicateId: an id is stored already or comes twice.
            BadInput: something does not fit; nothing was written.
            ReadOnly, WriteFailed: this handle may not, or can no longer, write.
        """
        self._put(self._store.insert, ids, keys, values, payloads, texts, progress)

    @verb
    def upsert(
        self,
        ids: Ids,
        keys: Keys | None = None,
        values: Values | None = None,
        payloads: Any = None,
        *,
        texts: Texts | None = None,
        progress: Progress | bool | None = None,
    ) -> None:
        """As `insert`, but a record whose id is stored already is replaced whole, its payload and text, too."""
        self._put(self._store.upsert, ids, keys, values, payloads, texts, progress)

    @verb
    def update(
        self,
        ids: Ids,
        keys: Vectors | None = None,
        values: Numbers | None = None,
        payloads: Any = None,
        *,
        texts: Texts | None = None,
        progress: Progress | bool | None = None,
    ) -> None:
        """Replace the given parts of stored records, all or none. Raises UnknownId for an id that is not stored.

        With an encoder, texts alone are embedded, too, so that key and text agree; give the keys to keep them. A record
        without a key gets one so, in a database with values together with its value. None among the texts removes one.
        """
        done = False
        with telling(progress) as say:
            while not done:
                made = self._store.keyed
                parts = self.parts(ids, keys, values, payloads, texts, say)
                done = self._store.run(self._if_made, made, self._store.update, *parts)

    def parts(
        self, ids: Ids, keys: Vectors | None, values: Numbers | None, payloads: Any, texts: Texts | None, say: Progress
    ) -> RecordParts:
        """RecordParts of records as `update` takes them, checked; not written. Raises as it does."""
        if keys is None and values is None and payloads is None and texts is None:
            raise BadInput("nothing to change was given; pass keys, values, payloads or texts")
        names, schema = self._identifiers(ids), self._store.schema
        kept = check.texts(texts, len(names))
        new = None if payloads is None else check.payloads(payloads, len(names))
        vectors = None if keys is None else self._keys(keys, len(names), say)
        if keys is None and kept is not None and self._encoder() is not None:
            vectors = embedded(kept, "texts", self._encoder, schema, say)
        return RecordParts(
            names, vectors, None if values is None else check.values(values, schema, len(names)), new, kept
        )

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
        snapshot, rows, *parts = self._store.require(names, whole=True)
        return self._records(snapshot, list(map(RecordEntry, rows.tolist(), names, *parts)))

    @verb
    def __getitem__(self, name: Id) -> Record:
        return self.get([name])[0]

    @verb
    def __contains__(self, name: object) -> bool:
        return bool(self._store.locate(check.identifiers([name])).rows[0] >= 0)

    @verb
    def __len__(self) -> int:
        return self._store.snapshot.records

    @verb
    def count(self, where: dict[str, Any] | None = None) -> int:
        """How many records there are, or how many a filter matches, with a key or without."""
        return len(self) if where is None else len(self._store.matching_rows(where)[1])

    @verb
    def scan(self, batch_size: int = 1000, where: dict[str, Any] | None = None) -> Iterator[Records]:
        """All records, or those that a filter matches, in the order of their last insertion, in batches.

        The scan is of the generation it began with, less the records deleted or replaced before it reached them.
        """
        snapshot = self._store.snapshot
        snapshot, rows = (snapshot, snapshot.all_rows) if where is None else self._store.matching_rows(where)
        return self._scan(check.integer(batch_size, "batch_size"), snapshot, rows)

    @property
    def id_types(self) -> set[str]:
        """Which of "integer" and "text" ids there are."""
        return self._store.id_types()

    def matching(self, where: dict[str, Any] | None = None) -> NDArray[np.int64]:
        """Rows of all records, or of those that a filter matches, with a key or without, ascending."""
        return self._store.snapshot.all_rows if where is None else self._store.matching_rows(where)[1]

    def _scan(self, size: int, snapshot: Snapshot, rows: NDArray[np.int64]) -> Iterator[Records]:
        for start in range(0, len(rows), size):
            mine = rows[start : start + size]
            found = self._store.read(mine, texts=True)
            kept = [found[row] for row in mine.tolist() if row in found]
            if kept:
                yield self._records(snapshot, kept)

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

    @verb
    def order_fields(self) -> None:
        """Remember the order of declared fields now, of up to four; else a field's, once filters ask much of it.

        What matches a range of values is then a slice of it. Cost: some 0.1 µs a record and field, and 4 bytes.
        """
        self._store.order_fields()

    def _put(
        self,
        write: Callable[[Batch], None],
        ids: Ids,
        keys: Keys | None,
        values: Values | None,
        payloads: Any,
        texts: Texts | None,
        progress: Progress | bool | None,
    ) -> None:
        done = False
        with telling(progress) as say:
            while not done:
                made = self._store.keyed
                done = self._store.run(self._if_made, made, write, self.batch(ids, keys, values, payloads, texts, say))

    def batch(
        self,
        ids: Ids,
        keys: Keys | None,
        values: Values | None,
        payloads: Any,
        texts: Texts | None,
        say: Progress,
    ) -> Batch:
        """Records as `insert` takes them, checked; not written. Raises as it does."""
        names = self._identifiers(ids)
        kept, new = check.texts(texts, len(names)), check.payloads(payloads, len(names))
        if keys is None and texts is None and (payloads is None or self._encoder() is not None):
            raise BadInput("keys are missing; give keys, or texts, or keys=[None, …] for records without a key")
        column, keyed = self._keys_of(keys, kept, len(names), say)
        own = self._values_of(values, keyed, len(names))
        return Batch(names, column, own, new, kept, None if keyed.all() else keyed)

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

    def _keys(self, keys: Vectors, count: int, say: Progress) -> Array:
        schema = self._store.schema
        if isinstance(keys, list | tuple) and keys and all(isinstance(one, str) for one in keys):
            return check.filled(embedded(list(keys), "keys", self._encoder, schema, say), "keys", count)
        array = check.matrix(check.encoded(keys, "keys", self._encoder), "keys", schema.dim, schema.dtype)
        return check.filled(array, "keys", count)

    def _keys_of(
        self, keys: Keys | None, texts: list[str | None] | None, count: int, say: Progress
    ) -> tuple[Array, NDArray[np.bool_]]:  # (n, d), (n,)
        """The keys of new records, and which have one; zeros stand for the others."""
        schema, keyed = self._store.schema, np.ones(count, np.bool_)
        if keys is None and texts is not None and self._encoder() is not None:
            return embedded(texts, "texts", self._encoder, schema, say), keyed
        if keys is None:
            keyed[:] = False
        elif isinstance(keys, list | tuple) and any(one is None for one in keys):
            keyed = np.array([one is not None for one in check.filled(keys, "keys", count)])
            keys = [one for one in keys if one is not None]
        if keyed.all():
            return self._keys(keys, count, say), keyed  # type: ignore[arg-type]
        column = np.zeros((count, schema.dim), schema.dtype)
        if keyed.any():
            column[keyed] = self._keys(keys, int(np.count_nonzero(keyed)), say)  # type: ignore[arg-type]
        return column, keyed

    def _values_of(self, values: Any, keyed: NDArray[np.bool_], count: int) -> Array | None:
        """The values of new records, zeros for those without a key."""
        schema = self._store.schema
        if keyed.all() or (values is not None and not schema.has_values):
            return check.values(values, schema, count)
        try:
            given = [None] * count if values is None else check.filled(list(values), "values", count)
        except (TypeError, RuntimeError):  # of what cannot be iterated: a number, a nested tensor
            raise BadInput(f"values are {check.shown(values)}; expected a list with one for each id") from None
        extra = np.flatnonzero([one is not None and not own for one, own in zip(given, keyed, strict=True)])
        if len(extra):
            raise BadInput(f"record {extra[0]} of the batch has a value and no key; give both, or None for both")
        if not schema.has_values:
            return None
        column = np.zeros((count, *(() if schema.value_dim is None else (schema.value_dim,))), schema.value_dtype)
        if keyed.any():
            kept = None if values is None else [one for one in given if one is not None]
            column[keyed] = check.values(kept, schema, int(np.count_nonzero(keyed)))
        return column

    def _records(self, snapshot: Snapshot, found: list[RecordEntry]) -> Records:
        """The records of a generation that are found."""
        schema, rows = self._store.schema, np.array([one.row for one in found], np.int64)
        keyed = snapshot.keyed(rows)
        positions = np.where(keyed, snapshot.positions(rows), -1)
        if keyed.any():
            keys, values = snapshot.keys_at(positions), snapshot.values_at(positions) if schema.has_values else None
        else:  # the snapshot may have no columns to gather from
            keys = torch.from_numpy(np.zeros((len(found), schema.dim), schema.dtype))
            labels = torch.zeros(len(found), dtype=torch.int64)
            none = labels if schema.value_dim is None else keys.new_zeros(len(found), schema.value_dim)
            values = none if schema.has_values else None
        payloads, texts = [one.payload for one in found], [one.text for one in found]
        return Records([one.id for one in found], keys, values, payloads, texts, torch.from_numpy(keyed))

    def apply(self, removed: list[Id], batches: Sequence[Batch], source: str) -> None:
        """Take in what has changed in a table: `removed` go, batches come, and `source` is noted, in one transaction.

        Raises DuplicateId, and writes nothing, for an id that is stored already and not among `removed`.
        """
        self._store.apply(removed, batches, source)

    @property
    def taken_from(self) -> str | None:
        """The `source` that `apply` has noted last; None where records came in otherwise."""
        return self._store.source()

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
            names = [known[row].id for row in rows.tolist()]
            self.update(names, keys=keys, values=values)
            return self.locate(names)

        return self._store.run(update)  # what another thread writes comes before all of this or after it
