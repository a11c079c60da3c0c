"""Effects of compaction in the catalogue: rows that no segment holds any more, and segments whose rows have gaps.

The format, as MUSTs (a database that was never compacted has none of it):

* The setting `gone` is the number of rows below `state.next_row` that no segment holds; absent, 0. The used slots of
  all segments and `gone` MUST add up to `next_row`; while it is 0, segments MUST follow one another without a gap.
* `gaps` names the segments whose rows are not first_row, first_row + 1, …: such a segment N MUST have a column
  `rows-N.npy`, int64, shape (capacity,), whose used slots are strictly ascending from first_row on and have the CRC-32
  `rows_crc`; it MUST be full (`used` = capacity).
* The setting `last_segment` is the greatest number that a compaction has taken. The number of a new segment MUST be
  greater than it and than all numbers in use: readers identify memory maps by number, so none may be used twice.
* Rows that no segment holds MUST NOT have a bit in `tombstones`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from softdb.store.catalog import Catalog
from softdb.store.connect import damaged_catalog
from softdb.store.segments import NewSegment, SegmentEntry

MAX_SEGMENT = 10**8 - 2  # largest number: file names have eight digits


class Gaps(NamedTuple):
    """Number of rows that compaction removed, and checksums of the row columns of segments with gaps."""

    gone: int  # rows that no segment holds
    checksums: dict[int, int]  # segment number → CRC-32 of its row column


def read(catalog: Catalog) -> Gaps:
    """Return the number of removed rows, and the checksums of row columns, as stored. Raises CorruptionError."""
    gone = catalog.setting("gone")
    sql = "SELECT segment, rows_crc FROM gaps LIMIT (SELECT count(*) + 1 FROM segments)"  # or a cycle of pages
    stored = catalog.all(sql) if gone else []
    checksums = dict(stored)
    if len(checksums) < len(stored):
        raise damaged_catalog("names a segment twice in gaps")
    return Gaps(gone, checksums)


def follows(entry: SegmentEntry, row: int, gone: int) -> bool:
    """Return True if a segment may be next, when `row` follows the last one's rows; `gone`: number of removed rows."""
    return entry.first_row >= row if gone else entry.first_row == row


def next_segment(catalog: Catalog) -> int:
    """Return the number for a new segment, never used before. Raises CorruptionError."""
    greatest = catalog.one("SELECT coalesce(max(segment), -1) FROM segments")[0]
    last = max(int(greatest), catalog.setting("last_segment", -1))
    if last >= MAX_SEGMENT:
        raise damaged_catalog(f"names a segment {last}, beyond the last possible one")
    return 1 + last


def reserve(catalog: Catalog) -> int:
    """Reserve a number for a segment that will be written outside of the transaction."""
    number = next_segment(catalog)
    catalog.put_setting("last_segment", number)
    return number


def put(catalog: Catalog, dropped: Iterable[int], removed: int, new: Iterable[NewSegment] = ()) -> None:
    """Drop segments, add `removed` to the setting `gone`, and add new segments."""
    for table in ("segments", "gaps"):
        catalog.connection.executemany(f"DELETE FROM {table} WHERE segment = ?", [(number,) for number in dropped])
    for entry, rows_crc in new:
        catalog.put_segment(entry)
        if rows_crc is not None:
            catalog.connection.execute("INSERT INTO gaps VALUES(?, ?)", (entry.number, rows_crc))
    catalog.put_setting("gone", catalog.setting("gone") + removed)
