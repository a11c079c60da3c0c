"""`Verbs`: the methods to write, read and export records, which a database and a cluster share."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from softdb import check
from softdb.answers import Record, Records, frames
from softdb.check import Id
from softdb.database import arrow
from softdb.database.from_rows import NO_ROWS, columns_of
from softdb.database.incoming import NO_KEYS, Given, WriteKind
from softdb.database.questions import Questions, verb
from softdb.errors import BadInput
from softdb.index.choose import Progress
from softdb.reports import Stats
from softdb.tables.rows import Fields
from softdb.typing import Ids, IdsOrRows, Keys, Numbers, Texts, Values, Vectors
from softdb.visible import table

H = TypeVar("H", bound="Verbs")

_FACTS = {  # the lines of `Stats` that a notebook shows
    "records", "keyless", "dim", "value_dim", "num_classes", "dtype", "metric", "encoder", "fields", "text_index",
    "bytes", "index", "index.kind", "index.recall",
}  # fmt: skip


class Verbs(Questions):
    """Methods that a database and a cluster have in common."""

    # -- the handle ------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Close files and release the lock or the shards; later calls raise Closed. Safe to call twice.

        Raises WriteFailed if changes of a database with `durability="relaxed"` could not be written to disk.
        """
        self.core.close()

    def __enter__(self: H) -> H:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def closed(self) -> bool:
        """True if `close` was called."""
        return self.core.closed

    @property
    def path(self) -> Path | None:
        """Directory of the database; None for a database in memory."""
        return self.core.path

    @property
    def fields(self) -> tuple[str, ...]:
        """Declared fields of the payload, sorted."""
        return self.core.fields

    @property
    def dim(self) -> int | Any:  # not `int | None`: only a database without keys can be undecided
        """d, the width of a key; None while it is undecided, until the first records with keys."""
        return self.core.schema.dim or None

    @property
    def value_dim(self) -> int | None:
        """v, the width of a value; None if values are labels, or the keys serve as values."""
        return self.core.schema.value_dim

    @property
    def num_classes(self) -> int | None:
        """Number of classes, if values are integer labels from 0 to num_classes - 1; else None."""
        return self.core.schema.num_classes

    @property
    def dtype(self) -> str:
        """Dtype of stored vectors, "float32" or "float16"."""
        return str(self.core.schema.dtype.name)

    @property
    def metric(self) -> str:
        """Metric of queries and keys: "dot", "cosine" or "l2"."""
        return self.core.schema.metric.value

    @property
    def encoder_name(self) -> str | None:
        """Stored name of the encoder that made the keys; None if no name is stored."""
        return self.core.encoder_name

    @verb
    def stats(self) -> Stats:
        """Describe the database and its size. Cost: reads its directory; `dim`, `metric` and `count()` are cheaper.

        >>> db.stats().records
        3
        """
        return self.core.stats()

    # -- writing -------------------------------------------------------------------------------------------------------

    @verb
    def insert(
        self,
        ids: IdsOrRows | None = None,
        keys: Keys | None = None,
        values: Values | None = None,
        payloads: Any = None,
        *,
        texts: Texts | None = None,
        fields: Fields | Mapping[str, str | None] | None = None,
        progress: Progress | bool | None = None,
    ) -> list[Id]:
        """Add records, all or none, and return their ids; the records are on disk when this returns.

        >>> db.insert([{"id": "ran", "key": [0.8, 0.6], "year": 1985}])  # rows: dicts, a DataFrame, an Arrow table
        ['ran']
        >>> db.insert(["up", "her"], keys[:2], payloads=[{"year": 2009}, {"year": 2013}])  # columns
        ['up', 'her']
        >>> made = db.insert(keys=keys)  # ids are made
        >>> db.insert(["untold"], texts=["A text"])  # without an encoder a record without a key
        ['untold']

        A record without a key is found by its id, by filters and by its text, never by vector or soft query.

        Args:
            ids: n of `str` or `int`; None: made, as ints that continue those made before (in a cluster random).
                Or n rows in place of all columns: dicts (a list, one dict, a generator), `Records`, a DataFrame, an
                Arrow table or a dataset of Hugging Face, with columns id, key (or vector or embedding), text, value,
                and fields of the payload. A missing cell (None, NaN, NaT) is left out. See docs/documents.md.
            keys: (n, d) numbers; or, with an encoder, n texts that are embedded but not stored. A list may hold None:
                that record has no key. keys=None embeds `texts`; without an encoder no record of the batch gets a key.
            values: (n, v) numbers or (n,) integer labels, if the database was created with values. A record without a
                key has the value None.
            payloads: n JSON values, or None. NaN becomes null, an array a list, a date or time text in ISO 8601.
            texts: n texts of at most 16 MiB of UTF-8 each, or None, stored with the records.
            fields: other names of the columns id, key, text and value, or None for no column: a dict, or `Fields`.
            progress: of the embedding: called with the stage, the amount done and the total; True draws a bar.

        Raises:
            DuplicateId: an id is stored already or comes twice.
            BadInput: an argument does not fit; nothing was written.
            ReadOnly, WriteFailed: this handle may not, or can no longer, write.
        """
        given = self._given(WriteKind.INSERT, fields, ids, keys, values, payloads, texts)
        return [] if given is NO_ROWS else self.core.put(WriteKind.INSERT, given, progress)

    @verb
    def upsert(
        self,
        ids: IdsOrRows | None = None,
        keys: Keys | None = None,
        values: Values | None = None,
        payloads: Any = None,
        *,
        texts: Texts | None = None,
        fields: Fields | Mapping[str, str | None] | None = None,
        progress: Progress | bool | None = None,
    ) -> list[Id]:
        """Insert records; a stored record of the same id is replaced, with payload and text. Arguments as `insert`.

        Raises the errors of `insert` but DuplicateId for a stored id.

        >>> db.upsert(["heat"], [[0.0, 1.0]])
        ['heat']
        """
        given = self._given(WriteKind.UPSERT, fields, ids, keys, values, payloads, texts)
        are_payloads = given is not NO_ROWS and given.keys is None and given.texts is None and given.ids is not None
        if are_payloads and self.dim and any(self.core.stored(check.identifiers(given.ids))):
            raise BadInput(NO_KEYS)  # the stored records would lose theirs
        return [] if given is NO_ROWS else self.core.put(WriteKind.UPSERT, given, progress)

    @verb
    def update(
        self,
        ids: IdsOrRows,
        keys: Vectors | None = None,
        values: Numbers | None = None,
        payloads: Any = None,
        *,
        texts: Texts | None = None,
        fields: Fields | Mapping[str, str | None] | None = None,
        merge: bool = False,
        progress: Progress | bool | None = None,
    ) -> list[Id]:
        """Replace the given parts of stored records, all or none, and return the ids. Raises UnknownId for another id.

        >>> db.update(["heat"], payloads=[{"seen": True}], merge=True)  # the other fields of the payload stay
        ['heat']
        >>> ids = db.update([{"id": "heat", "seen": True}], merge=True)  # rows, as `insert` takes them

        With an encoder, texts without keys are embedded, so that key and text agree; to keep old keys, pass them, too.
        To give a record its first key in a database with values, pass its value, too. A text of None removes the text.

        With `merge` each field of a given payload replaces that field or is added, and all others stay; None as a field
        is null, and as a payload changes nothing. Raises BadInput for a payload that is no object. In rows, a missing
        cell leaves its field out, and a column of keys, values or texts must be complete.
        """
        change = WriteKind.MERGE if merge else WriteKind.UPDATE
        given = self._given(change, fields, ids, keys, values, payloads, texts)
        return [] if given is NO_ROWS else self.core.put(change, given, progress)

    def _given(self, change: WriteKind, fields: Any, *parts: Any) -> Given:
        return columns_of(change, Given(*parts), fields, self.core.schema.has_values, self.core.encoder)

    @verb
    def delete(self, ids: Ids | None = None, where: dict[str, Any] | None = None) -> int:
        """Delete records by id (unknown ids are ignored) or by filter, and return the number of deleted records.

        Raises BadInput for ids together with a filter, BadFilter, and ReadOnly for a handle that only reads.

        >>> db.delete(["heat"]), db.delete(where={"year": {"$gt": 2000}})
        (1, 1)
        """
        if (ids is None) == (where is None):
            raise BadInput("give ids or where, one of them; where={} deletes every record")
        names = None if ids is None else check.identifiers(ids, unique=False)
        if names and isinstance(ids, str) and re.search(r"\w !?[<=>]", ids) and not self.core.stored(names)[0]:
            raise BadInput(f"no id is {check.shown(ids)}; pass a condition as where={{'price': {{'$gt': 50}}}}")
        return self.core.delete(names, where)

    # -- reading -------------------------------------------------------------------------------------------------------

    @verb
    def get(
        self, ids: Ids | None = None, where: dict[str, Any] | None = None, *, limit: int | None = None, offset: int = 0
    ) -> Records:
        """Return the records with these ids, in their order, or those that a filter matches, in the order of `scan`.

        >>> db.get(["heat", "alien"]).ids
        ['heat', 'alien']
        >>> page = db.get(where={"year": {"$gt": 1990}}, limit=10, offset=20)

        With ids and `where`: those of the ids that match. `limit` and `offset` choose a part of them. If
        records are inserted or replaced between two pages, they come last; if deleted, later ones move forward.

        Raises UnknownId (a KeyError) for an id that is not stored, also one that filter or page leaves out.
        """
        names = None if ids is None else check.identifiers(ids, unique=False)
        return self.core.get(names, where, check.page(limit, offset))

    @verb
    def __getitem__(self, name: Id) -> Record:
        return self.get([name])[0]

    @verb
    def __contains__(self, name: object) -> bool:
        return bool(self.core.stored(check.identifiers([name]))[0])

    @verb
    def __len__(self) -> int:
        return self.core.count(None)

    @verb
    def count(self, where: dict[str, Any] | None = None) -> int:
        """Return the number of records, or of records that match a filter, with a key or without.

        Raises BadFilter for a filter that cannot be used.

        >>> db.count(), db.count({"year": {"$lt": 2000}})
        (3, 2)
        """
        return self.core.count(where)

    @verb
    def scan(
        self, batch_size: int = 1000, where: dict[str, Any] | None = None, *, limit: int | None = None, offset: int = 0
    ) -> Iterator[Records]:
        """Yield all records, or those that match a filter, in batches, in the order of their last insertion.

        The scan yields the records that were stored when it began, except those deleted or replaced before their turn.
        `limit` and `offset` choose a part of them, as in `get`.

        Raises BadInput for a batch size below 1, and BadFilter.

        >>> [records.ids for records in db.scan(2)]
        [['alien', 'heat'], ['amelie']]
        """
        return self.core.scan(check.integer(batch_size, "batch_size"), where, check.page(limit, offset))

    # -- tables --------------------------------------------------------------------------------------------------------

    @verb
    def __iter__(self) -> Iterator[Record]:
        """Yield the records in the order of `scan`, reading batch by batch."""
        return (record for records in self.scan() for record in records)

    def _repr_html_(self) -> str:
        try:
            facts, first = [line for line in self.stats().lines() if line[0] in _FACTS], next(self.scan(5), None)
            return table(["", repr(self)], facts, "") + ("" if first is None else first._repr_html_())
        except Exception as error:  # closed, damaged, or a shard does not answer; a notebook still shows the handle
            return table([repr(self)], [], f"{type(error).__name__}: {error}")

    __reversed__ = None  # else Python would call __getitem__ with len(self) - 1 … 0

    @verb
    def to_pandas(
        self, columns: Sequence[str] | None = None, where: dict[str, Any] | None = None, *, limit: int | None = None
    ) -> Any:
        """Return all records, or those that a filter matches, as a pandas DataFrame, in the order of `scan`.

        >>> frame = db.to_pandas(["id", "year"], where={"year": {"$gt": 1990}}, limit=1000)

        `columns` are those of `to_arrow`; None: id, key, value if the database has values, text if a record has a text,
        and every field of the payloads. `key` holds arrays (d,), `value` arrays (v,) or integers; None for a record
        without a key. A field is empty in records that lack it; its integers are then of dtype Int64. If a payload
        is no object, or has a field named as another column, `payload` holds whole payloads. `insert` takes the frame.

        Raises MissingDependency without pandas.
        """
        return frames.frame(self.scan(10_000, where, limit=limit), columns)

    @verb
    def to_arrow(self, columns: Sequence[str] | None = None, where: dict[str, Any] | None = None) -> Any:
        """Return all records, or those that a filter matches, as a `pyarrow.Table`, in the order of `scan`.

        >>> db.to_arrow(["id", "year"]).column_names  # fields of the payload, each a column
        ['id', 'year']

        Args:
            columns: some of id, key, value, text, payload, and names of fields of the payload; None: id, key, text and
                payload, and value if the database has values.
            where: a filter.

        `id` is int64 or string; with ids of both types string, with a further column `id_is_int`. `key` is a fixed-size
        list of the database's dtype, null for a record without a key; `value` such a list, or an int64; `payload` is
        JSON. The table's metadata describes the database, so that `softdb.formats.import_records` can restore it.

        Raises MissingDependency without pyarrow, and BadInput for a field whose values differ in type.
        """
        return arrow.table(self.core, self.scan(10_000, where), columns)

    @verb
    def scan_arrow(self, batch_size: int = 10_000, where: dict[str, Any] | None = None) -> Any:
        """Return the table of `to_arrow` as a `pyarrow.RecordBatchReader`, read batch by batch in O(batch) memory.

        As with `scan`, later inserts are not seen, and records deleted before their turn are missing.

        Raises the errors of `to_arrow`.

        >>> db.scan_arrow().read_all().num_rows
        3
        """
        return arrow.reader(self.core, self.scan(batch_size, where))
