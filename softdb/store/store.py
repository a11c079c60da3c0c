"""Operations on the records of one database: each reads one generation, or is one write transaction.

Operations of all threads run one after the other on the store's thread.
"""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any, NamedTuple

import apsw
import numpy as np
from numpy.typing import NDArray

from softdb.check import Array, Id, shown
from softdb.errors import BadInput, DuplicateId, UnknownId
from softdb.store import files, keyed, textindex
from softdb.store.append import Batch, append, new_ids
from softdb.store.connect import damaged_catalog, typed_errors
from softdb.store.entry import RecordEntry, merged
from softdb.store.keyed import Keyed
from softdb.store.session import Session, lookup, on_thread
from softdb.store.snapshot import Snapshot
from softdb.store.soundness import damaged, damaged_texts, require_sound


class Located(NamedTuple):
    """Rows of ids in a snapshot, with payloads and texts if requested."""

    snapshot: Snapshot
    rows: NDArray[np.int64]  # (n,), -1 for ids that the snapshot does not hold
    payloads: list[str | None]  # n JSON texts, None if not requested
    texts: list[str | None]  # n


class Store(Session):
    """The records of one database. Callers check the arguments; `softdb.database.SoftDB` is the public interface."""

    # -- reading ---------------------------------------------------------------------------------------------------

    @lookup
    def locate(self, ids: list[Id], whole: bool = False) -> Located:
        """Find the rows of ids in the snapshot, of records with or without a key; `whole`: with payloads and texts."""
        stored, snapshot = self.catalog.lookup(ids, whole), self.snapshot
        entries = [stored.get(name) or RecordEntry(-1, name) for name in ids]
        rows = np.fromiter((entry.row for entry in entries), np.int64, len(ids))
        rows[~snapshot.holds(rows)] = -1  # the record was written after the generation that this reader sees
        return Located(snapshot, rows, [entry.payload for entry in entries], [entry.text for entry in entries])

    def require(self, ids: list[Id], whole: bool = False) -> Located:
        """Find the rows of ids, as `locate` does. Raises UnknownId, naming the first id that is not stored."""
        located = self.locate(ids, whole)
        rows = located.rows
        if (rows < 0).any():
            missing = np.flatnonzero(rows < 0)
            several = f" ({len(missing)} of {len(ids)} ids are unknown)" if len(ids) > 1 else ""
            name, text = ids[missing[0]], str(ids[missing[0]])
            other = text if name != text else int(text) if text.isdecimal() and len(text) < 19 else None
            apart = other is not None and self.locate([other]).rows[0] >= 0
            also = f"; {shown(other)} is, and differs: ids are str or int" if apart else ""
            raise UnknownId(f"id {shown(name)} is not stored{several}{also}{self._describe_lag()}")
        return located

    @on_thread
    def _describe_lag(self) -> str:
        with typed_errors():
            newest = self.catalog.state().generation
        own = self.snapshot.generation
        if newest == own:
            return ""
        return f", or was replaced since generation {own} ({newest} is the newest: refresh() shows it)"

    @lookup
    def read(self, rows: NDArray[np.int64], payloads: bool = True, texts: bool = False) -> dict[int, RecordEntry]:
        """Return {row: entry} for the rows that are still stored; entries have payload and text if requested."""
        return self.catalog.read(rows, payloads, texts)

    @on_thread
    def checksums(self, first: int, last: int) -> list[Any]:
        """Call `Catalog.checksums` for rows first … last."""
        with typed_errors():
            return self.catalog.checksums(first, last)

    @on_thread
    def damaged_texts(self, column: str, among: NDArray[np.int64] | None = None) -> list[int]:
        """Call `Catalog.damaged_texts`, which returns the rows of damaged payloads or texts."""
        with typed_errors():
            return self.catalog.damaged_texts(column, among)

    @on_thread
    def retain(self, since: int) -> None:
        """Keep records that are deleted after generation `since` readable for pinned stores; see `Retired`."""
        with typed_errors():
            self.catalog.retired.retain(since)

    # -- writing ---------------------------------------------------------------------------------------------------

    @on_thread
    def insert(
        self, batch: Batch, origin: Keyed | None = None, new: Keyed | None = None, replace: bool = False
    ) -> list[Id] | None:
        """Add records, and return their ids. Raises DuplicateId if an id is stored already; then nothing is written.

        `origin`: the store's `keyed` when the batch was checked; if changed since, write nothing and return None.
        `new`: the origin to store, with another encoder or fingerprint. The first keys decide undecided widths.
        `replace`: delete stored records of the same ids first.
        """
        if origin is not None and self.keyed is not origin:
            return None
        with self.write_transaction() as change:
            if not batch.ids:
                batch = batch._replace(ids=new_ids(self.catalog, len(batch.payloads)))
            replaced = replace and self._delete_ids(batch.ids)
            try:
                changed = self._put_origin(batch.keys, new)
                appended = append(self.catalog, self.columns, batch, self.reader.loader.entries(self.catalog))
                change.appended = appended if batch.keyed is None and not changed and not replaced else None
            except apsw.ConstraintError:
                self.writer.rollback()
                stored = self.catalog.lookup(batch.ids)
                first = next((name for name in batch.ids if name in stored), None)
                if first is None:
                    raise damaged_catalog("has records in rows beyond the last assigned one") from None
                raise DuplicateId(
                    f"id {shown(first)} is stored already ({len(stored)} of {len(batch.ids)} ids); upsert() replaces it"
                ) from None
        return batch.ids

    def _put_origin(self, keys: Array, new: Keyed | None) -> bool:
        """Store a new origin, with the widths of the first keys. Return False if nothing had to be stored."""
        new = new or self.keyed
        if not new.schema.dim and keys.shape[1]:
            new = new._replace(schema=dataclasses.replace(new.schema, dim=keys.shape[1]))
            self.columns.reshape(new.schema)  # if the commit fails, no segment exists, and the next keys reshape again
        if new == self.keyed:
            return False
        keyed.put(self.catalog, new)
        return True

    @on_thread
    def update(
        self,
        ids: list[Id],
        keys: Array | None,
        values: Array | None,
        payloads: list[str | None] | None,
        texts: list[str | None] | None = None,
        *,
        merge: bool = False,
        origin: Keyed | None = None,
        new: Keyed | None = None,
    ) -> list[Id] | None:
        """Replace keys, values, payloads or texts of stored records; an argument that is None stays as stored.

        `merge`: replace only the given fields of payloads. `origin`, `new` and the answer: as in `insert`.

        Raises UnknownId, CorruptionError, and BadInput for a value without a key or a payload that cannot be merged;
        then nothing is written.
        """
        if origin is not None and self.keyed is not origin:
            return None
        with self.write_transaction():
            in_place = keys is None and values is None
            snapshot, rows, old_payloads, old_texts = self.require(ids, whole=merge or not in_place)
            if merge and payloads is not None:
                payloads = merged(ids, old_payloads, payloads)
            if in_place:
                for column, given in (("payload", payloads), ("text", texts)):
                    if given is not None:
                        self.catalog.replace_texts(column, rows.tolist(), given)
                if texts is not None:
                    textindex.replace(self.catalog.connection, rows.tolist())
                self.catalog.advance(0)
                return ids
            self._require_keys(ids, snapshot.keyed(rows), keys, values)
            positions = snapshot.positions(rows)
            self._require_sound(snapshot, rows)
            if keys is None:
                keys = snapshot.keys_at(positions).numpy()
            if values is None:
                values = snapshot.stored_values(positions)
            self._delete(rows)
            batch = Batch(ids, keys, values, payloads or old_payloads, texts or old_texts)
            self._put_origin(keys, new)
            append(self.catalog, self.columns, batch, self.reader.loader.entries(self.catalog))
        return ids

    @on_thread
    def apply(self, removed: list[Id], batches: Sequence[Batch], source: str) -> None:
        """Delete the ids `removed`, append batches, and store their `source` (table and version), in one transaction.

        Ids in `removed` need not be stored. Raises DuplicateId if a batch has a stored id; then nothing is written.
        """
        with self.write_transaction() as change:
            stored = self._delete_ids(removed)
            if stored or not batches:  # every new `source` gets a generation of its own
                self.catalog.advance(0)
            appended = self.catalog.state(), self.reader.loader.entries(self.catalog)
            done = 0
            try:
                for batch in batches:
                    appended = append(self.catalog, self.columns, batch, appended[1])
                    done += 1
            except apsw.ConstraintError:
                self.writer.rollback()
                stored_ids = self.catalog.lookup(batch.ids).keys() - removed
                counts = Counter([*stored_ids, *(name for other in batches[: done + 1] for name in other.ids)])
                twice = next(name for name in batch.ids if counts[name] > 1)
                raise DuplicateId(f"the table holds id {shown(twice)} twice; keep one of the two") from None
            self.catalog.put_setting("source", source)
            change.appended = appended if len(batches) == 1 and not stored and batches[0].keyed is None else None

    @on_thread
    def source(self) -> str | None:
        """Return the `source` that `apply` stored last."""
        with typed_errors():
            source = self.catalog.settings().get("source")
        return source if isinstance(source, str) else None

    def _require_keys(self, ids: list[Id], keyed: NDArray[np.bool_], keys: Array | None, values: Array | None) -> None:
        """Raise BadInput if a record without a key would get a key without a value, or a value without a key."""
        missing = "a key" if keys is None else "a value" if values is None and self.schema.has_values else ""
        if missing and not keyed.all():
            name = shown(ids[int(np.flatnonzero(~keyed)[0])])
            raise BadInput(f"id {name} has neither key nor value, and {missing} for it is not given; give both")

    def _delete(self, rows: NDArray[np.int64]) -> None:
        """Delete the records of rows in the open transaction, and their texts from the text index."""
        self.catalog.delete(rows, rows[self.snapshot.positions(rows) >= 0])
        textindex.remove(self.catalog.connection, rows.tolist())

    def _delete_ids(self, ids: list[Id]) -> bool:
        """Delete the records of ids in the open transaction. Return False if none is stored."""
        stored = self.catalog.lookup(ids)
        if stored:
            self._delete(np.fromiter((entry.row for entry in stored.values()), np.int64))
        return bool(stored)

    def _require_sound(self, snapshot: Snapshot, rows: NDArray[np.int64]) -> None:
        """Raise CorruptionError if records of `rows` fail their checksums: rewriting them would hide the damage."""
        damage = (item for segment in snapshot.segments for item in damaged(self.checksums, segment, rows))
        texts = damaged_texts(self.damaged_texts, rows)
        require_sound(chain(damage, texts), "or upsert the whole records")

    @on_thread
    def delete(self, ids: list[Id]) -> int:
        """Delete the records of ids, ignoring ids that are not stored, and return the number of deleted records."""
        with self.write_transaction():
            rows = np.unique(self.locate(ids).rows)
            return self.delete_rows(rows[rows >= 0])

    def delete_rows(self, rows: NDArray[np.int64]) -> int:
        """Delete the records of rows in the open transaction, and return the number of deleted records."""
        if len(rows):
            self._delete(rows)
            self.catalog.advance(0)
        return len(rows)

    def note_encoder(self, name: str | None, fingerprint: str | None = None) -> None:
        """Store the name and the fingerprint of the encoder that makes the keys."""
        self.note_origin(self.keyed._replace(encoder=name, fingerprint=fingerprint))

    @on_thread
    def note_origin(self, origin: Keyed) -> None:
        """Store another origin of keys that are stored already, or of a database without keys."""
        with self.write_transaction(durable=True):
            keyed.put(self.catalog, origin)
            self.catalog.advance(0)

    @on_thread
    def id_types(self) -> set[str]:
        """Return the types of stored ids, "integer" and "text". Cost: two lookups in the index of ids."""
        ends = (f"(SELECT typeof(id) FROM records ORDER BY id {order} LIMIT 1)" for order in ("ASC", "DESC"))
        with typed_errors():
            return {kind for kind in self.catalog.one(f"SELECT {', '.join(ends)}") if kind is not None}

    # -- declared fields -------------------------------------------------------------------------------------------

    @on_thread
    def fields(self) -> tuple[str, ...]:
        """Return the payload fields that have an index now."""
        with typed_errors():
            return self.catalog.fields()

    @on_thread
    def index_fields(self, names: Iterable[str]) -> None:
        """Index payload fields, all or none of them; skip fields that are indexed already. No record changes."""
        with self.write_transaction(durable=True):
            for name in names:
                self.catalog.index_field(name)

    @on_thread
    def drop_field(self, name: str) -> None:
        """Drop a field's index. Raises BadInput if the field has no index."""
        with self.write_transaction(durable=True):
            fields = self.catalog.fields()
            if name not in fields:
                raise BadInput(f"field {shown(name)} has no index; indexed fields: {', '.join(fields) or 'none'}")
            self.catalog.drop_field(name)

    @on_thread
    def text_index(self) -> str | None:
        """Return the tokenizer of the text index, None if there is no index now."""
        with typed_errors():
            return textindex.tokenizer(self.catalog.connection)

    @on_thread
    def index_text(self, tokenizer: str | None) -> None:
        """Index the texts, or drop the index for None. Records stay; cached text results are invalidated."""
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
        """Reduce the size of the catalogue's file. No record changes."""
        if self.relaxed:
            self.flush()
        with self.writer.rewriting():
            self.catalog.shrink()

    def occupied(self) -> int:
        """Return the bytes that the database occupies on disk; 0 in memory."""
        return 0 if self.path is None else files.occupied(self.path)

    # -- the index file: a cache that the catalogue names --------------------------------------------------------------

    @on_thread
    def index_entry(self) -> dict[str, Any] | None:
        """Return the catalogue's entry of the index file; None if absent or unreadable."""
        with typed_errors():
            row = self.catalog.one("SELECT entry FROM indexes WHERE name = 'keys'")
        try:
            entry = None if row is None else json.loads(row[0])
        except (ValueError, TypeError, RecursionError):
            entry = None  # the index is a cache: an unreadable entry counts as absent
        return entry if isinstance(entry, dict) else None

    @on_thread
    def put_index_entry(self, entry: dict[str, Any] | None) -> None:
        """Store the entry of an index file, which is on disk already, in the catalogue; None: remove the entry."""
        with self.write_transaction(durable=True):
            self.catalog.connection.execute("DELETE FROM indexes WHERE name = 'keys'")
            if entry is not None:
                self.catalog.connection.execute("INSERT INTO indexes VALUES('keys', ?)", (json.dumps(entry),))
