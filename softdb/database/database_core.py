"""`DatabaseCore`: store, finder and encoders of one database, with internal access to its records."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from softdb import check
from softdb.answers import Hits, Pooled, Records
from softdb.attend import Stored
from softdb.check import Id, Schema
from softdb.database.core import ALL, Core, Rows, SearchArguments, with_one_encoder
from softdb.database.embedding import telling
from softdb.database.incoming import UPDATES, Given, RecordChecker, WriteKind
from softdb.database.texts import search_by_text
from softdb.database.writing import encoder_for, entry_for
from softdb.device import Board
from softdb.encoders import of_name
from softdb.errors import BadInput, DeviceFailed, SoftDBError, StaleRead
from softdb.filters import FilteredStore
from softdb.index import Finder
from softdb.index.choose import Progress
from softdb.index.query import Query
from softdb.reports import CompactReport, Stats
from softdb.store import Snapshot
from softdb.store.compact import compact
from softdb.store.entry import RecordEntry
from softdb.store.stats import stats
from softdb.typing import Vectors

_log = logging.getLogger("softdb")


class DatabaseCore(Core[Stored]):
    """Store, finder and encoders of one database. Only methods that take queries or new records check arguments."""

    def __init__(
        self,
        store: FilteredStore,
        encoder: check.Encoder | None,
        devices: Sequence[torch.device] | None = None,
        dtype: torch.dtype | None = None,  # dtype of the columns on a device; None: as stored
    ) -> None:
        self.store, self.finder = store, Finder(store, Board.of(devices, dtype))
        self.encoders = {store.keyed.since: encoder}  # generation since which keys are in use -> their encoder
        self.devices = devices

    @property
    def device(self) -> torch.device | None:  # type: ignore[override]
        """First device of the columns; None: the CPU."""
        return None if self.devices is None else self.devices[0]

    @property
    def schema(self) -> Schema:
        """Widths, dtype and metric of the generation that this handle sees."""
        return self.store.schema

    @property
    def encoder_name(self) -> str | None:
        """Stored name of the encoder that made the keys; None if no name is stored."""
        return self.store.keyed.encoder

    @property
    def header(self) -> dict[str, Any]:
        """Description of the database in an export: schema, declared fields, the encoder's name and fingerprint."""
        return super().header | ({"fingerprint": text} if (text := self.store.keyed.fingerprint) else {})

    @property
    def path(self) -> Path | None:
        """Directory of the database; None for a database in memory."""
        return self.store.path

    @property
    def fields(self) -> tuple[str, ...]:
        """Declared fields of the payload, sorted."""
        self.store.require_open()
        return tuple(self.store.fields())

    @property
    def id_types(self) -> set[str]:
        """Types of the stored ids: "integer", "text" or both."""
        return self.store.id_types()

    @property
    def keyed(self) -> int:
        """Number of records with a key."""
        return self.store.snapshot.count

    @property
    def reembedded(self) -> int:
        """Generation of the last re-embedding; 0 if there was none."""
        return self.store.keyed.since

    @property
    def closed(self) -> bool:
        """True after `close`."""
        return self.store.closed

    def require_open(self) -> None:
        """Raise Closed after `close`."""
        self.store.require_open()

    def device_failed(self, verb: str, error: Exception) -> DeviceFailed:
        """Return a DeviceFailed for the error of a device, with advice."""
        reason = str(error).split("\n")[0]
        if isinstance(error, torch.cuda.OutOfMemoryError):
            advice = "ask fewer queries at once, free memory there, or go on with db.to('cpu')"
        else:
            advice = "a device that was lost works again only in a new process; go on with db.to('cpu')"
        return DeviceFailed(f"{verb.strip('_')}: {self.finder.place} failed ({reason}); nothing is lost: {advice}")

    def encoder(self) -> check.Encoder | None:
        """Return the encoder of the keys in the generation that this handle sees, or None."""
        keyed = self.store.keyed
        encoder = self.encoders.get(keyed.since)
        if encoder is None and keyed.encoder is not None:
            encoder = self.encoders[keyed.since] = of_name(keyed.encoder, keyed.schema.dim)
        return encoder

    # -- questions -------------------------------------------------------------------------------------------------

    def as_queries(self, queries: Vectors, by: Any = None) -> Tensor:
        """Check queries, or encode query texts; return vectors (q, d), or as wide as a score needs. Raises BadInput."""
        if self.finder.devices is not None:
            self.finder.devices.require_process()
        return super().as_queries(queries, by)

    def search(self, search: SearchArguments) -> Hits:
        """Search with the arguments of `Questions.search`. Raises BadInput."""
        (
            queries, k, texts, mode, fusion, where, exact, radius, exclude_ids, diversity, fetch_k, offset, group_by,
            group_size,
        ) = search  # fmt: skip
        if texts is not None or mode is not None or fusion is not None or queries is None:
            words = check.words(queries, texts, mode, fusion, lambda: self.encoder() is not None)
            if words.mode is not check.Mode.VECTOR:
                words.require_none(radius=radius, diversity=diversity, group_by=group_by, group_size=group_size)
                return search_by_text(self.store, self.source, self.as_queries, words, search)
            queries = words.queries
        if (radius is None and exclude_ids is None and diversity is None and fetch_k is None) and (
            group_by is None and group_size is None and type(offset) is int and offset == 0
        ):
            fast = None if exact else self._search_fast(queries, k, where)
            if fast is not None:
                return fast
        extent = check.extent(
            self.schema.metric, k, radius, offset, diversity=diversity, fetch_k=fetch_k, group_by=group_by,
            group_size=group_size,
        )  # fmt: skip
        query, source = with_one_encoder(
            self.store, lambda: self.query(queries, extent, where, exclude_ids, group_by, exact)
        )
        return source.hits(query)

    def _search_fast(self, queries: Vectors, k: int | None, where: dict[str, Any] | None) -> Hits | None:
        """Search for k records with little overhead; None if `search` must take its general path, and raise errors."""
        snapshot, keyed = self.store.loader.loaded
        vectors = check.vectors(queries, keyed.schema.dim) if self.device is None else None
        count = check.DEFAULT_K if k is None else k
        allowed = None if where is None else self.store.known_matching(where, snapshot)
        if vectors is None or type(count) is not int or count < 1 or (where is not None and allowed is None):
            return None
        hits = self.finder.find_plainly(snapshot, vectors, count, allowed)
        if hits is None or hits.scores is None:
            return None
        return Hits(torch.from_numpy(snapshot.rows(hits.positions)), torch.from_numpy(hits.scores), self.store.read)

    def estimate_plainly(self, queries: Any, parameters: tuple[Any, ...]) -> Pooled | None:
        """Answer `attend` as before with the same parameters; None if it must take its general path."""
        return self.source(self.view()[0]).estimate_plainly(queries, parameters) if self.device is None else None

    def query(
        self,
        queries: Any,
        extent: check.Extent,
        where: dict[str, Any] | None = None,
        exclude_ids: Any = None,
        group_by: str | None = None,
        exact: bool = False,
    ) -> tuple[Query, Stored]:
        """Check arguments of `search`; return the query and its source, both of the same generation."""
        tensor, metric = self.as_queries(queries), self.store.loader.loaded.keyed.schema.metric
        ids = check.excluded(exclude_ids, len(tensor))
        if not ids and group_by is None:
            snapshot, allowed = self.view(where)
            query = Query(tensor, metric=metric, allowed=allowed, exact=exact, **extent)
            return query, self.source(snapshot, tensor.device)

        def look_up() -> tuple[Snapshot, Query]:
            with self.store.read_transaction():
                groups = None if group_by is None else self.store.groups(group_by)[1]
                snapshot, allowed = self.view(where)
                rows = self.store.locate([name for names in ids for name in names])[1]
                excluded = snapshot.positions(check.padded(rows, [len(names) for names in ids])) if ids else None
            query = Query(tensor, metric=metric, allowed=allowed, exact=exact, **extent)
            return snapshot, replace(query, groups=groups, excluded=excluded)

        snapshot, query = self.store.run(look_up)
        return query, self.source(snapshot, tensor.device)

    def taking_part(
        self, queries: Any, by: Any, where: dict[str, Any] | None, mask: Any
    ) -> tuple[Tensor, NDArray[np.bool_] | None, Tensor | None, Stored]:
        """Check queries for a score, and the mask; return both, the filter's mask of positions, and the source."""

        def prepare() -> tuple[Tensor, NDArray[np.bool_] | None, Stored]:
            tensor = self.as_queries(queries, by)
            snapshot, allowed = self.view(where)
            return tensor, allowed, self.source(snapshot, tensor.device)

        tensor, allowed, source = with_one_encoder(self.store, prepare)
        if mask is not None:
            mask = check.mask(mask, (*check.leading(queries, len(tensor)), source.snapshot.count)).to(tensor.device)
        return tensor, allowed, mask, source

    def source(self, snapshot: Snapshot, device: torch.device | None = None) -> Stored:
        """Return the records of a snapshot as a source for queries on a device; None: the CPU."""
        placed = None if device is None else self.finder.columns(snapshot, device)
        return Stored(snapshot, self.store.schema, self.finder, self.store.read, placed)

    # -- records ---------------------------------------------------------------------------------------------------

    def view(self, where: dict[str, Any] | None = None) -> tuple[Snapshot, NDArray[np.bool_] | None]:
        """Return the snapshot that this handle sees, and a mask (size,) of positions that match `where`; None: all."""
        return (self.store.loader.loaded.snapshot, None) if where is None else self.store.matching(where)

    def matching(self, where: dict[str, Any] | None = None) -> Rows:
        """Return the rows of the records that match a filter, with a key or without, ascending."""
        return self.store.snapshot.all_rows if where is None else self.store.matching_rows(where)[1]

    def stored(self, ids: list[Id], where: dict[str, Any] | None = None) -> NDArray[np.bool_]:
        """Return True for each id that is stored, with a key or without, and matched by `where`."""
        rows = self.store.locate(ids).rows
        return rows >= 0 if where is None else np.isin(rows, self.matching(where))

    def locate(self, ids: list[Id], required: bool = False) -> tuple[Snapshot, Rows]:
        """Return the newest snapshot and rows (n,) of ids in it; -1 (if `required`: an error) if there is no key."""
        snapshot, rows, *_ = (self.store.require if required else self.store.locate)(ids)
        keyless = ~snapshot.keyed(rows)
        if required and keyless.any():
            raise BadInput(f"id {check.shown(ids[int(keyless.argmax())])} has no key; give it one with update()")
        return snapshot, np.where(keyless, -1, rows)

    def located(self, ids: list[Id], where: dict[str, Any] | None = None, required: bool = False) -> Rows:
        """Return rows of ids; -1 if not stored, without a key (if required: an error), or not matched by `where`."""
        snapshot, rows = self.locate(ids, required)
        allowed = self.view(where)[1]
        if allowed is None:
            return rows
        positions = snapshot.positions(rows)
        return np.where((positions >= 0) & allowed[positions], rows, -1)

    def values_at(self, rows: Rows) -> Tensor:  # (q, k), -1 = none
        """Return values (q, k, v), or labels (q, k), by row; zeros for -1. Raises StaleRead for a deleted record."""
        snapshot, schema = self.store.snapshot, self.store.schema
        if not snapshot.size:
            return torch.zeros(*rows.shape, schema.pooled_dim)
        positions = snapshot.positions(rows)
        if ((positions < 0) & (rows >= 0)).any():
            raise StaleRead("a record was deleted while the query was answered; attend again")
        return snapshot.values_at(positions)

    def sample_keys(self, count: int) -> Tensor:
        """Return at most `count` of the stored keys, spread evenly over the records."""
        snapshot = self.store.snapshot
        live = np.flatnonzero(snapshot.live)
        if not len(live):
            return torch.zeros(0, self.store.schema.dim)
        return snapshot.keys_at(live[np.linspace(0, len(live) - 1, min(count, len(live))).astype(np.int64)])

    def get(self, ids: list[Id] | None, where: dict[str, Any] | None = None, page: slice = ALL) -> Records:
        """Return a part of the records with these ids, or of all, that `where` matches; see `Core.get`."""
        if ids is not None and where is None:
            snapshot, rows, *parts = self.store.require(ids, whole=True)
            return self.records(snapshot, list(map(RecordEntry, rows.tolist(), ids, *parts))[page])

        def select() -> tuple[Snapshot, list[RecordEntry]]:
            with self.store.read_transaction() as snapshot:
                own = None if ids is None else self.store.require(ids).rows
                rows = self.matching(where) if own is None else own[np.isin(own, self.matching(where))]
                entries = self.store.read(rows[page], texts=True)
                return snapshot, [entries[row] for row in rows[page].tolist()]

        return self.records(*self.store.run(select))

    def count(self, where: dict[str, Any] | None) -> int:
        """Return the number of records that match a filter, with a key or without."""
        return self.store.snapshot.records if where is None else len(self.store.matching_rows(where)[1])

    def scan(self, size: int, where: dict[str, Any] | None, page: slice = ALL) -> Iterator[Records]:
        """Yield records that exist at the call, except those deleted or replaced before the scan reaches them."""
        snapshot = self.store.snapshot
        snapshot, rows = (snapshot, snapshot.all_rows) if where is None else self.store.matching_rows(where)
        return self._scan(size, snapshot, rows[page])

    def _scan(self, size: int, snapshot: Snapshot, rows: Rows) -> Iterator[Records]:
        for start in range(0, len(rows), size):
            batch = rows[start : start + size]
            entries = self.store.read(batch, texts=True)
            if entries:
                yield self.records(snapshot, [entries[row] for row in batch.tolist() if row in entries])

    def records(self, snapshot: Snapshot, entries: list[RecordEntry]) -> Records:
        """Join entries of the catalogue with their keys and values in a snapshot."""
        schema, rows = self.store.schema, np.array([entry.row for entry in entries], np.int64)
        keyed = snapshot.keyed(rows)
        positions = np.where(keyed, snapshot.positions(rows), -1)
        if keyed.any():
            keys, values = snapshot.keys_at(positions), snapshot.values_at(positions) if schema.has_values else None
        else:  # the snapshot may have no columns to gather from
            keys = torch.from_numpy(np.zeros((len(entries), schema.dim), schema.dtype))
            labels = torch.zeros(len(entries), dtype=torch.int64)
            zeros = labels if schema.value_dim is None else keys.new_zeros(len(entries), schema.value_dim)
            values = zeros if schema.has_values else None
        payloads, texts = [entry.payload for entry in entries], [entry.text for entry in entries]
        return Records([entry.id for entry in entries], keys, values, payloads, texts, torch.from_numpy(keyed))

    # -- writing ---------------------------------------------------------------------------------------------------

    def put(self, change: WriteKind, given: Given, progress: Progress | bool | None) -> list[Id]:
        """Check records and write them; start again if the width was decided or changed by another thread meanwhile."""
        ids, encoder_of = None, functools.partial(encoder_for, self, change, given)
        with telling(progress) as callback:
            while ids is None:
                keyed = self.store.keyed
                checker = RecordChecker(keyed.schema, encoder_of)
                records: Any = (checker.parts if change in UPDATES else checker.batch)(given, callback)
                new = entry_for(keyed, encoder_of(), given, records.keys)
                if change in UPDATES:
                    ids = self.store.update(*records, merge=change is WriteKind.MERGE, origin=keyed, new=new)
                else:
                    ids = self.store.insert(records, keyed, new, change is WriteKind.UPSERT)
        return ids

    def delete(self, ids: list[Id] | None, where: dict[str, Any] | None) -> int:
        """Delete records by id, or those that a filter matches, and return the number of deleted records."""
        return self.store.delete_matching({} if where is None else where) if ids is None else self.store.delete(ids)

    def rewrite(self, rows: Rows, keys: Tensor | None, values: Tensor | None) -> tuple[Snapshot, Rows]:
        """Update the records at rows (m,) in one transaction; return the new snapshot and the records' new rows (m,).

        Raises StaleRead, and writes nothing, if a record was deleted or replaced.
        """

        def update() -> tuple[Snapshot, Rows]:
            entries = self.store.read(rows)
            if len(entries) < len(rows):
                raise StaleRead(
                    f"{len(rows) - len(entries)} of {len(rows)} records were deleted or replaced meanwhile; reload()"
                )
            ids = [entries[row].id for row in rows.tolist()]
            self.put(WriteKind.UPDATE, Given(ids, keys, values, None, None), None)
            return self.locate(ids)

        return self.store.run(update)  # on the store's thread, so that no other write happens in between

    # -- maintenance -----------------------------------------------------------------------------------------------

    def stats(self) -> Stats:
        """Return the size and state of the database."""
        return stats(self.store, self.finder.report(), self.finder.device_report())

    def compact(self) -> CompactReport:
        """Compact the store, then the index."""
        report = compact(self.store)
        try:
            self.finder.compact()
        except OSError as error:  # the index is a cache: this handle uses it, and writes it again when it closes
            _log.warning("compact: the index could not be written: %s", error)
        return replace(report, bytes=self.store.occupied())

    def close(self) -> None:
        """Close the finder, then the store. Raises WriteFailed."""
        try:
            if not self.store.closed:
                self.finder.close()
        except (OSError, SoftDBError) as error:  # the index is a cache: no record is lost
            _log.warning("close: the index could not be written; build_index() makes it anew: %s", error)
        finally:
            self.store.close()
