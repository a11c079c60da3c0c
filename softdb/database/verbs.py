"""`Verbs`: the verbs of records and tables, written once for a database and a cluster."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from softdb import check
from softdb.answers import Record, Records
from softdb.check import Id
from softdb.database import arrow
from softdb.database.incoming import Given, WriteKind
from softdb.database.questions import Questions, verb
from softdb.errors import BadInput
from softdb.index.choose import Progress
from softdb.reports import Stats
from softdb.typing import Ids, Keys, Numbers, Texts, Values, Vectors


class Verbs(Questions):
    """Verbs that a database and a cluster have in common."""

    # -- the handle ------------------------------------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        """True if `close` was called."""
        return self.core.closed

    @property
    def path(self) -> Path | None:
        """Its directory; None in memory."""
        return self.core.path

    @property
    def fields(self) -> tuple[str, ...]:
        """Declared fields of the payload, sorted."""
        return self.core.fields

    @property
    def dim(self) -> int:
        """d, the width of a key."""
        return self.core.schema.dim

    @property
    def value_dim(self) -> int | None:
        """v, the width of a value; None where values are labels, or the keys themselves."""
        return self.core.schema.value_dim

    @property
    def num_classes(self) -> int | None:
        """Values are integer labels below this; None where they are not labels."""
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
        """The name of the encoder that made the keys; None where none is remembered."""
        return self.core.encoder_name

    @verb
    def stats(self) -> Stats:
        """Describe the database and its size. Cost: a walk over its directory; see `dim`, `metric`, `count()`."""
        return self.core.stats()

    # -- writing -------------------------------------------------------------------------------------------------------

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
        self.core.put(WriteKind.INSERT, Given(ids, keys, values, payloads, texts), progress)

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
        self.core.put(WriteKind.UPSERT, Given(ids, keys, values, payloads, texts), progress)

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
        self.core.put(WriteKind.UPDATE, Given(ids, keys, values, payloads, texts), progress)

    @verb
    def delete(self, ids: Ids | None = None, where: dict[str, Any] | None = None) -> int:
        """Delete records by id (missing ones are fine) or by filter, and return how many there were."""
        if (ids is None) == (where is None):
            raise BadInput("give ids or where, one of them; where={} deletes every record")
        return self.core.delete(None if ids is None else check.identifiers(ids, unique=False), where)

    # -- reading -------------------------------------------------------------------------------------------------------

    @verb
    def get(self, ids: Ids) -> Records:
        """The records of those ids, in that order. Raises UnknownId (a KeyError) naming one that is not stored."""
        return self.core.get(check.identifiers(ids, unique=False))

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
        """Return the number of records, or of those that a filter matches, with a key or without."""
        return self.core.count(where)

    @verb
    def scan(self, batch_size: int = 1000, where: dict[str, Any] | None = None) -> Iterator[Records]:
        """All records, or those that a filter matches, in the order of their last insertion, in batches.

        The scan is of the generation it began with, less the records deleted or replaced before it reached them.
        """
        return self.core.scan(check.integer(batch_size, "batch_size"), where)

    # -- tables --------------------------------------------------------------------------------------------------------

    @verb
    def __iter__(self) -> Iterator[Id]:
        """The ids of the generation it begins with, in the order of `scan`, less those deleted or replaced since."""
        return (name for records in self.scan() for name in records.ids)

    __reversed__ = None  # else Python would count the ids down from len(self)

    @verb
    def to_arrow(self, columns: Sequence[str] | None = None, where: dict[str, Any] | None = None) -> Any:
        """All records, or those that a filter matches, as a `pyarrow.Table` in memory, in the order of `scan`.

            db.to_arrow().to_pandas()
            db.to_arrow(["id", "year"])      # fields of the payload, each a column

        Args:
            columns: some of id, key, value, text, payload and names of fields of the payload; None: the first five, so
                many as there are.
            where: a filter.

        `id` is int64 or string; where ids are of both kinds a string, with a column `id_is_int`. `key` is a fixed-size
        list of the database's dtype, null where a record has none; `value` such a list, or an int64; `payload` is JSON.
        The table's metadata says what the database is: `softdb.formats.import_records` gives the same one back.

        Raises MissingDependency without pyarrow, and BadInput for a field whose values have no one type.
        """
        return arrow.table(self.core, self.scan(10_000, where), columns)

    @verb
    def scan_arrow(self, batch_size: int = 10_000, where: dict[str, Any] | None = None) -> Any:
        """The table of `to_arrow` as a `pyarrow.RecordBatchReader`, read batch by batch in O(batch) memory.

        The scan is of the generation it began with, as of `scan`.
        """
        return arrow.reader(self.core, self.scan(batch_size, where))
