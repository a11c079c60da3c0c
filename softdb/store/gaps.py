"""Traces of compaction in the catalogue: rows that no segment holds any more, and segments whose rows have gaps.

The format, as MUSTs (none of it is there before a first compaction):

* The setting `gone` is the number of rows below `state.next_row` that no segment holds; absent, 0. The used slots of
  all segments and `gone` MUST add up to `next_row`; while it is 0, segments MUST follow one another without a gap.
* `gaps` names the segments whose rows are not first_row, first_row + 1, …: such a segment N MUST have a column
  `rows-N.npy`, int64, shape (capacity,), whose used part is strictly ascending from first_row on and has the CRC-32
  `rows_crc`; it MUST be full (`used` = capacity).
* The setting `last_segment` is the greatest number that a compaction has taken; a new segment MUST have a greater one,
  greater than those of all segments, too: readers know their maps by the number, so none is ever used again.
* Rows that no segment holds MUST NOT have a bit in `tombstones`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from softdb.store.catalog import Catalog
from softdb.store.connect import damaged_catalog
from softdb.store.segments import SegmentEntry

MAX_SEGMENT = 10**8 - 2  # their files are named by eight digits


class Gaps(NamedTuple):
    """Missing rows, and their segments."""

    gone: int  # rows that no segment holds
    checksums: dict[int, int]  # of the row columns, by segment


def read(catalog: Catalog) -> Gaps:
    """Read the traces of compactions."""
    gone = catalog.setting("gone")
    sql = "SELECT segment, rows_crc FROM gaps LIMIT (SELECT count(*) + 1 FROM segments)"  # pages may form a cycle
    found = catalog.all(sql) if gone else []
    checksums = dict(found)
    if len(checksums) < len(found):
        raise damaged_catalog("names a segment twice in gaps")
    return Gaps(gone, checksums)


def follows(entry: SegmentEntry, row: int, gone: int) -> bool:
    """Return True if a segment may come where the rows before it end at `row`."""
    return entry.first_row >= row if gone else entry.first_row == row


def adds_up(entries: Iterable[SegmentEntry], next_row: int, gone: int) -> bool:
    """Return True if segments and what was compacted away are all rows there were."""
    return sum(entry.used for entry in entries) + gone == next_row


def next_segment(catalog: Catalog) -> int:
    """The number of the next new segment."""
    greatest = catalog.one("SELECT coalesce(max(segment), -1) FROM segments")[0]
    last = max(int(greatest), catalog.setting("last_segment", -1))
    if last >= MAX_SEGMENT:
        raise damaged_catalog(f"says that there was a segment {last}")
    return 1 + last


def reserve(catalog: Catalog) -> int:
    """Take a number for a segment that will be written outside of the transaction."""
    number = next_segment(catalog)
    catalog.put_setting("last_segment", number)
    return number


def put(catalog: Catalog, dropped: Iterable[int], removed: int, new: tuple[int, int] | None) -> None:
    """Segments are dropped, rows with them, and a segment with this number and rows checksum may have come."""
    for table in ("segments", "gaps"):
        catalog.connection.executemany(f"DELETE FROM {table} WHERE segment = ?", [(number,) for number in dropped])
    if new is not None:
        catalog.connection.execute("INSERT INTO gaps VALUES(?, ?)", new)
    catalog.put_setting("gone", catalog.setting("gone") + removed)
