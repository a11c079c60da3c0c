"""Append records. Guarantee: the vectors of new rows are on disk before the catalogue commits these rows."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from softdb.check import Array, Id
from softdb.errors import BadInput
from softdb.store import gaps, textindex
from softdb.store.catalog import Catalog, CatalogState
from softdb.store.segments import ColumnFiles, Piece, SegmentEntry, capacity_for
from softdb.store.soundness import checksums


class Batch(NamedTuple):
    """Checked records that are to be stored."""

    ids: list[Id]  # n; empty: the store makes them
    keys: Array  # (n, d) in the column's dtype
    values: Array | None  # (n, v), labels (n,), or None
    payloads: list[str | None]  # n JSON texts
    texts: list[str | None] | None = None  # n; None: no record has a text
    keyed: NDArray[np.bool_] | None = None  # (n,) mask, False: no key, the key and value are zeros


def new_ids(catalog: Catalog, count: int) -> list[Id]:
    """Return `count` consecutive int ids in the open transaction. Raises BadInput for an id of more than 62 bits.

    They begin after all ids returned before and all rows, or, if one of them is stored, after the largest stored int.
    """
    first = max(catalog.setting("next_id"), catalog.state().next_row)
    if catalog.one("SELECT 1 FROM records WHERE id BETWEEN ? AND ? LIMIT 1", (first, first + count - 1)) is not None:
        first = 1 + int(catalog.one("SELECT max(id) FROM records WHERE id < ''")[0])  # ints precede all texts
    if first + count > 1 << 62:
        raise BadInput(f"the next id would be {first}, which is too large; give ids")
    catalog.put_setting("next_id", first + count)
    return list(range(first, first + count))


def append(
    catalog: Catalog,
    columns: ColumnFiles,
    batch: Batch,
    entries: list[SegmentEntry],  # all segments, in the order of rows
) -> tuple[CatalogState, list[SegmentEntry]]:  # state and all segments after the append
    """Write a batch's keys and values to free slots, and add its records to the open transaction."""
    state, wide = catalog.state(), batch.keys.shape[1] > 0  # width 0: undecided, no record has a key or takes a slot
    pieces = _place(catalog, columns, batch, entries, state.next_row) if wide else []
    filled = [piece.entry._replace(used=piece.entry.used + len(piece.keys)) for piece in pieces]
    with columns.appending(pieces):  # writes files while this thread computes checksums and runs SQLite
        keys, values = (_crcs(column, batch.keyed, len(batch.ids)) for column in (batch.keys, batch.values))
        catalog.add(state.next_row, batch.ids, batch.payloads, batch.texts or [None] * len(batch.ids), keys, values)
        if batch.texts is not None:
            textindex.add(catalog.connection, state.next_row)
        if not wide:
            gaps.put(catalog, (), len(batch.ids))
        elif batch.keyed is not None:
            catalog.set_tombstones(state.next_row + np.flatnonzero(~batch.keyed))
        for entry in filled:
            catalog.put_segment(entry)
    unchanged = entries[:-1] if entries and filled and entries[-1].number == filled[0].number else entries
    return catalog.advance(len(batch.ids)), [*unchanged, *filled]


def _crcs(column: Array | None, keyed: NDArray[np.bool_] | None, count: int) -> Iterable[int | None]:
    """Return `count` checksums of a column; None for records without a key, and for all if `column` is None."""
    crcs = [None] * count if column is None else checksums(column)
    return crcs if keyed is None else (crc if has else None for crc, has in zip(crcs, keyed.tolist(), strict=True))


def _place(
    catalog: Catalog, columns: ColumnFiles, batch: Batch, entries: list[SegmentEntry], next_row: int
) -> list[Piece]:
    """Cut a batch into one piece for each segment: first fill the last segment, then create new segments."""
    entry = SegmentEntry(-1, 0, 0, 0)
    if entries and entries[-1].first_row + entries[-1].used == next_row:
        entry = entries[-1]
    pieces: list[Piece] = []
    fresh: int | None = None  # number of the newest segment that this batch created
    done, count = 0, len(batch.ids)
    while done < count:
        if entry.used == entry.capacity:
            fresh = gaps.next_segment(catalog) if fresh is None else fresh + 1
            stored = sum(entry.used for entry in entries)
            entry = SegmentEntry(fresh, next_row + done, capacity_for(stored + done, count - done), 0)
            columns.create(fresh, entry.capacity)
        stop = min(count, done + entry.capacity - entry.used)
        values = None if batch.values is None else batch.values[done:stop]
        pieces.append(Piece(entry, batch.keys[done:stop], values))
        entry = entry._replace(used=entry.used + stop - done)
        done = stop
    return pieces
