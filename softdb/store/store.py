"""The operations on the records of one database: each reads one generation, or is one write transaction.

They run on the store's thread, one after the other, whoever asks.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import apsw
import numpy as np
from numpy.typing import NDArray

from softdb.check import Array, Id, shown
from softdb.errors import BadInput, CorruptionError, DuplicateId, UnknownId
from softdb.store import files, keyed, textindex
from softdb.store.append import Batch, append
from softdb.store.connect import damaged_catalog, typed_errors
from softdb.store.entry import RecordEntry
from softdb.store.keyed import Keyed
from softdb.store.session import Session, lookup, on_thread
from softdb.store.snapshot import Snapshot
from softdb.store.soundness import damaged, damaged_texts


class Located(NamedTuple):
    """Positions of ids in a snapshot."""

    snapshot: Snapshot
    rows: NDArray[np.int64]  # (n,), -1 for those that it does not hold
    payloads: list[str | None]  # n JSON texts, None where not asked for
    texts: list[str | None]  # n


class Store(Session):
    """The records of one database. Arguments are checked already; see `softdb.database.SoftDB` for the public face."""

    # -- reading ---------------------------------------------------------------------------------------------------

    @lookup
    def locate(self, ids: list[Id], whole: bool = False) -> Located:
        """Locate ids in the snapshot, those with a key or without; `whole`: with payloads and texts."""
        with typed_errors():
            known, snapshot = self.catalog.lookup(ids, whole), self.snapshot
        found = [known.get(one) or RecordEntry(-1, one) for one in ids]
        rows = np.fromiter((one.row for one in found), np.int64, len(ids))
        rows[~snapshot.holds(rows)] = -1  # written after a reader's generation
        return Located(snapshot, rows, [one.payload for one in found], [one.text for one in found])

    def require(self, ids: list[Id], whole: bool = False) -> Located:
        """As `locate`. Raises UnknownId naming the first that is not stored."""
        located = self.locate(ids, whole)
        rows = located.rows
        if (rows < 0).any():
            missing = np.flatnonzero(rows < 0)
            several = f" ({len(missing)} of {len(ids)} ids are unknown)" if len(ids) > 1 else ""
            raise UnknownId(f"id {shown(ids[missing[0]])} is not stored{several}{self._behind()}; check it with `in`")
        return located

    @on_thread
    def _behind(self) -> str:
        with typed_errors():
            newest = self.catalog.state().generation
        mine = self.snapshot.generation
        return (
            ""
            if newest == mine
            else f", or was replaced since generation {mine} ({newest} is the newest: refresh() shows it)"
        )

    @lookup
    def read(self, rows: NDArray[np.int64], payloads: bool = True, texts: bool = False) -> dict[int, RecordEntry]:
        """Ids of rows, and their payloads and texts if asked for; those deleted since are absent."""
        with typed_errors():
            return self.catalog.read(rows, payloads, texts)

    @on_thread
    def checksums(self, first: int, last: int) -> list[Any]:
        """Checksums of the records in rows first … last, as of `Catalog.checksums`."""
        with typed_errors():
            return self.catalog.checksums(first, last)

    @on_thread
    def damaged_texts(self, column: str, among: NDArray[np.int64] | None = None) -> list[int]:
        """See `Catalog.damaged_texts`."""
        with typed_errors():
            return self.catalog.damaged_texts(column, among)

    # -- writing ---------------------------------------------------------------------------------------------------

    @on_thread
    def insert(self, batch: Batch, made: Keyed | None = None) -> bool:
        """Add records, and return True. Raises DuplicateId when an id is stored already; then nothing is written.

        `made`: what the keys were checked for; return False, with nothing written, where all were made anew since.
        """
        if made is not None and self.keyed is not made:
            return False
        with self.write_transaction() as change:
            try:
                appended = append(self.catalog, self.columns, batch, self.reader.loader.entries(self.catalog))
                change.appended = appended if batch.keyed is None else None
            except apsw.ConstraintError:
                self.writer.rollback()
                stored = self.catalog.lookup(batch.ids)
                first = next((one for one in batch.ids if one in stored), None)
                if first is None:
                    raise damaged_catalog("has records in rows beyond the last assigned one") from None
                raise DuplicateId(
                    f"id {shown(first)} is stored already ({len(stored)} of {len(batch.ids)} ids); upsert replaces"
                ) from None
        return True

    @on_thread
    def upsert(self, batch: Batch, made: Keyed | None = None) -> bool:
        """As `insert`, but records whose ids are stored already are replaced."""
        if made is not None and self.keyed is not made:
            return False
        with self.write_transaction():
            stored = self.catalog.lookup(batch.ids)
            if stored:
                self._delete(np.fromiter((one.row for one in stored.values()), np.int64))
            append(self.catalog, self.columns, batch, self.reader.loader.entries(self.catalog))
        return True

    @on_thread
    def update(
        self,
        ids: list[Id],
        keys: Array | None,
        values: Array | None,
        payloads: list[str | None] | None,
        texts: list[str | None] | None = None,
    ) -> None:
        """Replace the given parts of stored records. Raises UnknownId, and BadInput for a value without a key.

        Then nothing is written.
        """
        with self.write_transaction():
            in_place = keys is None and values is None
            snapshot, rows, old_payloads, old_texts = self.require(ids, whole=not in_place)
            if in_place:
                for column, new in (("payload", payloads), ("text", texts)):
                    if new is not None:
                        self.catalog.replace_texts(column, rows.tolist(), new)
                if texts is not None:
                    textindex.replace(self.catalog.connection, rows.tolist())
                self.catalog.advance(0)
                return
            self._require_keys(ids, snapshot.keyed(rows), keys, values)
            positions = snapshot.positions(rows)
            self._require_sound(snapshot, rows)
            if keys is None:
                keys = snapshot.keys_at(positions).numpy()
            if values is None and self.schema.has_values:
                values = snapshot.values_at(positions).numpy().astype(self.schema.value_dtype)
            self._delete(rows)
            batch = Batch(ids, keys, values, payloads or old_payloads, texts or old_texts)
            append(self.catalog, self.columns, batch, self.reader.loader.entries(self.catalog))

    @on_thread
    def apply(self, removed: list[Id], batches: Sequence[Batch], source: str) -> None:
        """Delete `removed` (missing ones are fine), append batches, and note the table and version they came from.

        One transaction. Raises DuplicateId when an id is stored already then; nothing is written.
        """
        with self.write_transaction() as change:
            stored = self.catalog.lookup(removed)
            if stored:
                self._delete(np.fromiter((one.row for one in stored.values()), np.int64))
            if stored or not batches:  # each `source` has a generation of its own
                self.catalog.advance(0)
            appended = self.catalog.state(), self.reader.loader.entries(self.catalog)
            done = 0
            try:
                for batch in batches:
                    appended = append(self.catalog, self.columns, batch, appended[1])
                    done += 1
            except apsw.ConstraintError:
                self.writer.rollback()
                before = {one for other in batches[:done] for one in other.ids} | set(self.catalog.lookup(batch.ids))
                twice = next((one for one in batch.ids if one in before), None)
                raise DuplicateId(f"the table holds id {shown(twice)} twice; keep one of the two") from None
            self.catalog.put_setting("source", source)
            change.appended = appended if len(batches) == 1 and not stored and batches[0].keyed is None else None

    @on_thread
    def source(self) -> str | None:
        """Return the last note of `apply`."""
        with typed_errors():
            found = self.catalog.settings().get("source")
        return found if isinstance(found, str) else None

    def _require_keys(self, ids: list[Id], keyed: NDArray[np.bool_], keys: Array | None, values: Array | None) -> None:
        """BadInput where a record would have one of key and value, and not the other."""
        missing = "a key" if keys is None else "a value" if values is None and self.schema.has_values else ""
        if missing and not keyed.all():
            name = shown(ids[int(np.flatnonzero(~keyed)[0])])
            raise BadInput(f"id {name} has neither key nor value as yet, and {missing} for it is not given; give both")

    def _delete(self, rows: NDArray[np.int64]) -> None:
        """Delete the records of rows in the open transaction."""
        self.catalog.delete(rows, rows[self.snapshot.positions(rows) >= 0])
        textindex.remove(self.catalog.connection, rows.tolist())

    def _require_sound(self, snapshot: Snapshot, rows: NDArray[np.int64]) -> None:
        """Raise CorruptionError where records differ from their checksums: what is written anew would hide it."""
        found = [str(one) for segment in snapshot.segments for one in damaged(self.checksums, segment, rows)]
        found += map(str, damaged_texts(self.damaged_texts, rows))
        if found:
            raise CorruptionError("; ".join(found) + ": restore them from a copy, or upsert the records whole")

    @on_thread
    def delete(self, ids: list[Id]) -> int:
        """Delete the records of ids, missing ones are fine, and return how many."""
        with self.write_transaction():
            rows = np.unique(self.locate(ids).rows)
            return self.delete_rows(rows[rows >= 0])

    def delete_rows(self, rows: NDArray[np.int64]) -> int:
        """Delete the records of rows in the open transaction, and return how many."""
        if len(rows):
            self._delete(rows)
            self.catalog.advance(0)
        return len(rows)

    @on_thread
    def note_encoder(self, name: str) -> None:
        """Note what makes the keys."""
        with self.write_transaction(durable=True):
            keyed.note(self.catalog, name)
            self.catalog.advance(0)

    @on_thread
    def id_types(self) -> set[str]:
        """Return the types of ids, "integer" and "text", as of now. Cost: two looks into their index."""
        ends = (f"(SELECT typeof(id) FROM records ORDER BY id {order} LIMIT 1)" for order in ("ASC", "DESC"))
        with typed_errors():
            return {kind for kind in self.catalog.one(f"SELECT {', '.join(ends)}") if kind is not None}

    # -- declared fields -------------------------------------------------------------------------------------------

    @on_thread
    def fields(self) -> tuple[str, ...]:
        """The fields of the payload that have an index, as of now."""
        with typed_errors():
            return self.catalog.fields()

    @on_thread
    def index_fields(self, names: Iterable[str]) -> None:
        """Index fields of the payload, all or none; those that are indexed stay so. No record changes."""
        with self.write_transaction(durable=True):
            for name in names:
                self.catalog.index_field(name)

    @on_thread
    def drop_field(self, name: str) -> None:
        """Drop a field's index. Raises BadInput where it has none."""
        with self.write_transaction(durable=True):
            fields = self.catalog.fields()
            if name not in fields:
                raise BadInput(f"field {shown(name)} has no index; indexed fields: {', '.join(fields) or 'none'}")
            self.catalog.drop_field(name)

    @on_thread
    def text_index(self) -> str | None:
        """The tokenizer of the text index, None where there is none, as of now."""
        with typed_errors():
            return textindex.tokenizer(self.catalog.connection)

    @on_thread
    def index_text(self, tokenizer: str | None) -> None:
        """Index the texts, or drop the index for None. No record changes; what was worked out from texts is void."""
        with self.write_transaction(durable=True):
            connection = self.catalog.connection
            if textindex.tokenizer(connection) != tokenizer:
                textindex.drop(connection)
                if tokenizer is not None:
                    textindex.make(connection, tokenizer)
                self.catalog.put_setting("payloads_replaced", self.catalog.advance(0).generation)

    # -- the files -------------------------------------------------------------------------------------------------

    @on_thread
    def shrink(self) -> None:
        """Make the catalogue's file as small as it can be. No record changes."""
        if self.relaxed:
            self.flush()
        with self.writer.rewriting():
            self.catalog.shrink()

    def occupied(self) -> int:
        """Bytes on disk; 0 in memory."""
        return 0 if self.path is None else files.occupied(self.path)

    # -- indexes: a cache, known to the catalogue by name --------------------------------------------------------------

    @on_thread
    def index_entry(self) -> dict[str, Any] | None:
        """Return the catalogue's entry of the index file, if there is one."""
        with typed_errors():
            found = self.catalog.one("SELECT entry FROM indexes WHERE name = 'keys'")
        try:
            entry = None if found is None else json.loads(found[0])
        except (ValueError, TypeError, RecursionError):
            entry = None  # a cache that cannot be read is a cache that is not there
        return entry if isinstance(entry, dict) else None

    @on_thread
    def put_index_entry(self, entry: dict[str, Any] | None) -> None:
        """Make the catalogue know an index file that is on disk already, or none. No record changes."""
        with self.write_transaction(durable=True):
            self.catalog.connection.execute("DELETE FROM indexes WHERE name = 'keys'")
            if entry is not None:
                self.catalog.connection.execute("INSERT INTO indexes VALUES('keys', ?)", (json.dumps(entry),))
