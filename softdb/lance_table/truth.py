"""`Truth`: the Lance table that stores a cluster's records. Each commit makes a version; shards are built from one.

A table that softdb makes has the columns of softdb's exports: `id`, the primary key, `key`, `value`, `text` and
`payload` (JSON). The table's metadata hold the database's header; the table's configuration holds the number of
shards. Spark, Ray Data, DuckDB and LanceDB can read and write such a table. Other programs' tables are only read.

Durability: an object store keeps every acknowledged write. Lance does not sync files, so in a local folder softdb syncs
the files before a verb returns (`softdb.lance_table.storage`).
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from softdb import check
from softdb.check import Id, Schema, shown
from softdb.database.incoming import Given, RecordChecker
from softdb.errors import (
    BadInput,
    DatabaseLocked,
    DuplicateId,
    NotADatabase,
    ReadOnly,
    SoftDBError,
    StaleRead,
    UnknownId,
    WriteFailed,
)
from softdb.lance_table.changes import Changes, changes_between, transaction
from softdb.lance_table.storage import (
    LANCE,
    Synced,
    cause,
    dataset_at,
    failure,
    lance_errors,
    literal,
    merge_small_files,
    missing_file,
    require_storage,
)
from softdb.store import Batch
from softdb.store.entry import merged
from softdb.tables.arrow_tables import Table, column, needed, read_table
from softdb.tables.rows import Fields, Header, Rows

_TRIES = 20  # number of attempts to update while other handles write, too


class LeftOut(NamedTuple):
    """A row of the table that cannot be stored as a record."""

    id: Id | None
    reason: str


@dataclass
class Truth:
    """A Lance table, its columns and its schema. Can be pickled; the copy opens the table again."""

    url: str
    options: dict[str, str] | None  # Lance's options for the object store
    fields: Fields  # names of the columns of id, key and value
    own: bool  # True: softdb made the table; False: another program did, and the table is only read
    schema: Schema
    shards: int  # number of shards
    replicas: int  # number of actors for each shard
    encoder: str | None = None  # name of the encoder of the keys
    _opened: Any = field(default=None, repr=False, compare=False)
    _synced: Synced | None = field(default=None, repr=False, compare=False)
    payload: tuple[str, ...] | None = None  # columns of the payload; None: all others

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_opened": None, "_synced": None}

    @property
    def row_bytes(self) -> int:
        """Approximate size of a row in bytes."""
        return (self.schema.dim + (self.schema.value_dim or 0)) * self.schema.dtype.itemsize + 256

    @functools.cached_property
    def id_type(self) -> str:
        """Type of the ids: "integer" or "text"."""
        return "integer" if _arrow().types.is_integer(self.now().schema.field(self.fields.id).type) else "text"

    @property
    def digest(self) -> str:
        """Hash of the columns and schema with which a foreign table is read; "" for a table that softdb made."""
        arguments = json.dumps([*vars(self.fields).values(), self.payload, self.schema.described]).encode()
        return "" if self.own else blake2b(arguments, digest_size=8).hexdigest()

    def columns(self, dataset: Any) -> list[str] | None:
        """Return the names of the columns to read; None: all columns."""
        if self._others is None:
            return None
        needed_names = {self.fields.id, self.fields.key, self.fields.value, *self._others}
        return [name for name in dataset.schema.names if name in needed_names]

    # -- versions --------------------------------------------------------------------------------------------------

    def now(self) -> Any:
        """Open the newest version. Raises NotADatabase, StorageUnavailable, and BadInput if a column is missing."""
        if self._opened is None:
            self._opened = dataset_at(self.url, self.options)
        with lance_errors(self.url):
            dataset = self._opened.checkout_version(self._opened.latest_version)
        self._require_columns(dataset)
        return dataset

    @property
    def _others(self) -> tuple[str, ...] | None:
        """Columns to read other than id, key and value; None: all."""
        return ("text", "payload") if self.own else self.payload

    def _require_columns(self, dataset: Any) -> None:
        """Raise BadInput if a column to read is missing, or has another width than the schema says."""
        fields = self.fields
        widths = {fields.key: self.schema.dim, fields.value: self.schema.value_dim}
        for name in filter(None, (fields.id, fields.key, fields.value, *(self._others or ()))):
            if name not in dataset.schema.names:
                raise BadInput(f"{dataset.uri} has no column {name!r} any more; add it, or restore() a version with it")
            width, size = widths.get(name), getattr(dataset.schema.field(name).type, "list_size", None)
            if width is not None and size not in (None, width):
                problem = f"column {name!r} is {size} wide; expected {width}"
                raise BadInput(f"{dataset.uri}: {problem}; correct the column, or restore() an earlier version")

    def at(self, version: int) -> Any:
        """Open a version. Raises StaleRead if the version was cleaned up, and StorageUnavailable."""
        opened = self.now() if self._opened is None else self._opened
        try:
            dataset = opened.checkout_version(version)
        except LANCE as error:
            require_storage(self.url, error)
            raise StaleRead(
                f"version {version} of {self.url} cannot be opened ({cause(error)}): it was cleaned up, or does not "
                f"exist yet; refresh() shows version {self.newest()}"
            ) from None
        self._require_columns(dataset)
        return dataset

    def newest(self) -> int:
        """Return the newest version."""
        return int(self.now().version)

    def identity(self, dataset: Any) -> str:
        """Return a string that identifies a version of this table, even if another table replaces this one later."""
        with lance_errors(self.url):
            known = getattr(transaction(dataset, dataset.version), "uuid", None)
            return str(known or next(v["timestamp"] for v in dataset.versions() if v["version"] == dataset.version))

    # -- reading ---------------------------------------------------------------------------------------------------

    def rows(self, batch: Any, left_out: list[LeftOut] | None = None) -> Rows | None:
        """Convert an Arrow batch or table to records; return None if it has no rows.

        Adds rows that cannot be records to `left_out`. If `left_out` is None, such a row raises BadInput.
        """
        pa = _arrow()
        table = pa.table(batch) if isinstance(batch, pa.RecordBatch) else batch
        if not len(table):
            return None
        source, bad = Table(Path(self.url), table.schema, iter(table.combine_chunks().to_batches())), dict[int, str]()
        on_error = None if left_out is None else lambda _: None
        rows = next(read_table(source, self.fields, len(table), on_error, bad), None)
        wrong = [LeftOut(table[self.fields.id][row].as_py(), reason) for row, reason in bad.items()]
        if left_out is not None:
            left_out += wrong
        elif wrong:
            raise BadInput(f"the row with id {shown(wrong[0].id)}: {wrong[0].reason}")
        return rows

    def batch(self, records: Rows) -> Batch:
        """Check records, and convert them to a batch that a database stores. Raises BadInput, DuplicateId."""
        checker = RecordChecker(self.schema, lambda: None)
        given = Given(records.ids, records.keys, records.values, records.payloads, records.texts)
        return checker.batch(given, lambda *_: None)

    @property
    def local(self) -> bool:
        """True if the table is in a folder, not in an object store."""
        return "://" not in self.url

    def batches(self, dataset: Any, size: int, after: int = 0, count: int | None = None) -> Iterator[Any]:
        """Yield `count` rows (None: all), starting at position `after`, in batches of at most `size` rows."""
        columns = self.columns(dataset)
        scanner = dataset.scanner(columns, offset=after or None, limit=count, batch_size=size, scan_in_order=True)
        yield from self.read(scanner)

    def read(self, scanner: Any) -> Iterator[Any]:
        """Yield Arrow batches from a scanner. Raises StorageUnavailable, and CorruptionError if a file is damaged."""
        with lance_errors(self.url):
            yield from scanner.to_batches()

    def taken(self, dataset: Any, places: Any) -> Any:
        """Read only the rows at positions `places` (n,), ascending; return an Arrow table."""
        with lance_errors(self.url):
            return dataset.take(_arrow().array(places), self.columns(dataset))

    def changes(self, since: Any, dataset: Any) -> Changes | None:
        """Return the changes from version `since` to `dataset`, or to one between, as `changes_between`."""
        return changes_between(self.url, since, dataset, str(self.fields.id), self.columns(dataset))

    # -- writing ---------------------------------------------------------------------------------------------------

    def write(self, rows: Any, upsert: bool) -> int:
        """Insert or upsert rows (an Arrow table or reader of the same schema) in one commit; return the new version.

        Raises DuplicateId, also if another handle has inserted an id first.
        """
        newest = self.now()
        merge = newest.merge_insert("id").when_not_matched_insert_all()
        merge = merge.when_matched_update_all() if upsert else merge.when_matched_fail()
        return self._written(newest, lambda: merge.execute(rows))

    def update(self, ids: list[Id], given: Mapping[str, Any], merge_payloads: bool = False) -> int:
        """Replace columns of stored records, all or none; return the new version. Raises UnknownId, BadInput."""
        pa = _arrow()
        for _ in range(_TRIES):
            newest, columns = self.now(), dict(given)
            payloads = self._require_stored(newest, ids, columns)
            if merge_payloads and "payload" in columns:
                columns["payload"] = merged(ids, payloads, columns["payload"])
            schema = pa.schema([newest.schema.field(name) for name in ("id", *columns)])
            arrays = [self._ids(ids), *(column(columns[name], schema.field(name).type) for name in columns)]
            # after a conflict, check again that the records still exist
            merge = newest.merge_insert("id").when_matched_update_all().conflict_retries(0)
            try:
                return self._written(newest, lambda: merge.execute(pa.table(arrays, schema=schema)))  # noqa: B023
            except DatabaseLocked:
                continue
        raise _overtaken(self.url)

    def delete(self, ids: list[Id]) -> tuple[int, int]:
        """Delete records by id, ignoring missing ones; return the number deleted and the new version."""
        is_integer, newest = self.id_type == "integer", self.now()
        ids = [id for id in dict.fromkeys(ids) if (type(id) is int) is is_integer]  # others cannot be stored
        table = _arrow().table({"id": self._ids(ids)})
        merge, counts = newest.merge_insert("id").when_matched_delete(), dict[str, int]()
        version = self._written(newest, lambda: counts.update(merge.execute(table)))
        return counts["num_deleted_rows"], version

    def stored_shards(self, dataset: Any = None) -> int:
        """Return the number of shards that the table's configuration names, in the newest or in another version."""
        opened = self.now() if dataset is None else dataset
        return int(opened.config()["softdb.shards"]) if self.own else self.shards

    def with_shards(self, shards: int) -> Truth:
        """Return a copy of this object with another number of shards. The table is not changed."""
        return replace(self, shards=shards)

    def index(self, dataset: Any) -> dict[str, Any] | None:
        """Return the arguments of `build_index` that the table's configuration names; None if there are none."""
        text = dataset.config().get("softdb.index")
        return None if text is None else json.loads(text)

    def put_index(self, words: Mapping[str, Any]) -> int:
        """Store the arguments of `build_index` for shards that are built later; return the new version."""
        newest = self.now()
        return self._written(newest, lambda: newest.update_config({"softdb.index": json.dumps(words)}))

    def put_shards(self, shards: int) -> int:
        """Store another number of shards; return the new version. Raises DatabaseLocked if another handle writes."""
        newest = self.now()
        return self._written(newest, lambda: newest.update_config({"softdb.shards": str(shards)}))

    def compact(self) -> int:
        """Merge small files into large files, and index the ids; return the new version. No record changes."""
        newest = self.now()

        def work() -> None:
            newest.optimize.compact_files()
            newest.create_scalar_index("id", "BTREE", replace=True)

        return self._written(newest, work)

    def table(self, batch: Batch) -> Any:
        """Convert checked records to an Arrow table with the table's schema."""
        pa, n = _arrow(), len(batch.ids)
        schema = self.now().schema
        keyed = np.ones(n, np.bool_) if batch.keyed is None else batch.keyed
        columns = {
            "id": self._ids(batch.ids),
            "key": column(batch.keys, schema.field("key").type, keyed),
            "text": pa.array(batch.texts or [None] * n, schema.field("text").type),
            "payload": pa.array(batch.payloads, schema.field("payload").type),
        }
        if batch.values is not None:
            columns["value"] = column(batch.values, schema.field("value").type, keyed)
        columns |= {name: pa.nulls(n, schema.field(name).type) for name in schema.names if name not in columns}
        return pa.table([columns[name] for name in schema.names], schema=schema)

    def _ids(self, ids: list[Id]) -> Any:
        pa, is_integer = _arrow(), self.id_type == "integer"
        wrong = next((id for id in ids if (type(id) is int) is not is_integer), None)
        if wrong is not None:
            expected, other = ("int", "str") if is_integer else ("str", "int")
            problem = f"id {shown(wrong)} is of type {type(wrong).__name__}, but this table's ids are {expected}"
            raise BadInput(f"{problem}: pass {expected}, or make a table with create(…, ids={other!r})")
        return pa.array(ids, pa.int64() if is_integer else pa.string())

    def _require_stored(self, dataset: Any, ids: list[Id], columns: Mapping[str, Any]) -> list[str | None]:
        """Return the stored payloads. Raises UnknownId, and BadInput if a keyless record would get a key alone."""
        condition = f"id IN ({', '.join(map(literal, ids))})"
        with lance_errors(self.url):
            parts = {"id": "id", "keyed": "key IS NOT NULL", "payload": "payload"}
            table = dataset.scanner(columns=parts, filter=condition).to_table()
        keyed = dict(zip(table["id"].to_pylist(), table["keyed"].to_pylist(), strict=True))
        unknown = next((id for id in ids if id not in keyed), None)
        if unknown is not None:
            raise UnknownId(f"id {shown(unknown)} is not stored; upsert adds it")
        half = {"key", "value"} & set(dataset.schema.names) - set(columns)
        touched = {"key", "value"} & set(columns)
        if touched and half and (bare := next((id for id in ids if not keyed[id]), None)) is not None:
            raise BadInput(f"id {shown(bare)} has neither key nor value yet; give keys= and values=")
        payloads = dict(zip(table["id"].to_pylist(), table["payload"].to_pylist(), strict=True))
        return [payloads[id] for id in ids]

    def _written(self, dataset: Any, work: Callable[[], object]) -> int:
        """Run a write by `attempt`, merge small files, sync all files, and return the new version."""
        if not self.own:
            raise ReadOnly(f"{self.url} was made by another program; write with that program, then refresh()")
        self.attempt(work)
        merge_small_files(dataset)
        if self.local:
            self._synced = self._synced or Synced(Path(self.url))
            self._synced.sync()
        return int(dataset.version)

    def attempt(self, work: Callable[[], object]) -> None:
        """Run a write, and convert Lance's errors to softdb's."""
        try:
            work()
        except SoftDBError:
            raise
        except LANCE as error:
            text = str(error)
            twice = re.search(r"found matching row with key values: id = (.*?), /", text, re.DOTALL)
            if twice is not None:
                raise DuplicateId(f"id {twice[1]} is stored already; upsert replaces it") from None
            if "concurrent" in text:
                raise _overtaken(self.url) from None
            if missing_file(error) is not None:
                raise failure(self.url, error) from error
            raise WriteFailed(
                f"{self.url} could not be written ({cause(error)}); check what is stored, then retry"
            ) from error


def stored(url: str, options: dict[str, str] | None) -> Truth:
    """Open a table that `create` has made. Raises NotADatabase, BadInput."""
    dataset = dataset_at(url, options)
    description, config = (dataset.schema.metadata or {}).get(b"softdb"), dataset.config()
    if description is None or "softdb.shards" not in config:
        raise NotADatabase(f"{url} is a table that softdb has not made; open it by softdb.cluster.serve(url, keys=…)")
    header = Header.of(json.loads(description), url)
    schema = check.schema(**header.schema, stored=None)
    shards, replicas = int(config["softdb.shards"]), int(config["softdb.replicas"])
    fields = Fields(value="value" if schema.has_values else None)
    return Truth(url, options, fields, True, schema, shards, replicas, header.encoder, dataset)


def _overtaken(url: str) -> DatabaseLocked:
    return DatabaseLocked(f"too many processes write to {url} at once; nothing was written, try again")


def _arrow() -> Any:
    return needed("pyarrow", "cluster", "a cluster")
