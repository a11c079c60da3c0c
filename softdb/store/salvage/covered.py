"""Where the records of a damaged version 1 lie: its checksums are of runs of slots, so a run is intact or lost whole.

Nothing ties a record to its slot but the table `segments`: it is trusted only where all that is known of rows and
records fits it.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from zlib import crc32

import apsw
import numpy as np

from softdb.store import files
from softdb.store.gaps import adds_up, follows
from softdb.store.salvage.placing import ColumnSpec, Numbers, at_once, crcs_in, file_of, read_slots, rows_in
from softdb.store.salvage.remains import Remains, SlotRun, is_dead
from softdb.store.segments import SegmentEntry

__all__ = ["place_runs"]

_AT_ONCE = 8192  # rows


def place_runs(remains: Remains, directory: Path, which: list[ColumnSpec], scratch: apsw.Connection) -> list[str]:
    """Fill in where the records of the table `found` lie, and their checksums; returns what was not to be trusted."""
    notes, gaps, runs = [], remains.gaps(), remains.runs()
    for entry, why in _checked(remains):
        rows = entry.first_row + np.arange(entry.used) if entry.number not in gaps else None
        column = rows_in(directory, entry.number) if rows is None else None
        if column is not None and crc32(column.astype("<i8").tobytes()) == gaps[entry.number]:
            rows = column[: entry.used]
        if rows is None or why or not _fits(remains, scratch, rows):
            notes.append(f"segment {entry.number} is lost: {why or 'nothing shows which rows lie in it'}")
            continue
        here = [run for run in runs if run.segment == entry.number]
        for one in which:
            _place(scratch, directory, one, entry, rows, here)
    return notes


def _checked(remains: Remains) -> list[tuple[SegmentEntry, str]]:
    """The segments, and what is wrong with each."""
    entries, state, gone = remains.segments(), remains.state(), remains.settings().get("gone", 0)
    if state is None or not isinstance(gone, int):
        return [(entry, "it is not known how many rows there are") for entry in entries]
    if not adds_up(entries, state.next_row, gone):
        return [(entry, "segments and rows do not add up") for entry in entries]
    checked, row = [], 0
    for entry in entries:
        checked.append((entry, "" if follows(entry, row, gone) else "its rows do not follow those before"))
        row = entry.first_row + entry.used
    return checked


def _fits(remains: Remains, scratch: apsw.Connection, rows: Numbers) -> bool:
    """Whether each row of a segment has a record, or a trace of one, or a tombstone."""
    dead = remains.dead()
    sql = "SELECT row FROM found WHERE row BETWEEN ? AND ?"
    for low in range(0, len(rows), _AT_ONCE):
        part = rows[low : low + _AT_ONCE]
        known = np.array(scratch.execute(sql, (int(part[0]), int(part[-1]))).fetchall(), np.int64).reshape(-1)
        if not all(is_dead(dead, row) for row in np.setdiff1d(part, known).tolist()):
            return False
    return True


def _place(
    scratch: apsw.Connection,
    directory: Path,
    column: ColumnSpec,
    entry: SegmentEntry,
    rows: Numbers,
    runs: list[SlotRun],
) -> None:
    """Give the records of intact runs their places."""
    path = file_of(directory, column.name, entry.number)
    crc = {"keys": "key_crc", "values": "value_crc"}[column.name]
    crcs = crcs_in(path, column.bytes)
    scratch.executemany(
        f"UPDATE found SET {column.name}_file = ? WHERE row = ?", [(entry.number, row) for row in rows.tolist()]
    )
    reach = 0
    for run in sorted(runs, key=lambda run: run.slot):
        if run.slot < reach:
            continue  # none covers what another does
        reach = run.slot + run.length
        expected = run.keys_crc if column.name == "keys" else run.values_crc
        stop = run.slot + run.length
        if stop > min(entry.used, len(crcs)) or _crc(path, column, run.slot, stop) != expected:
            continue
        places = zip(crcs[run.slot : stop].tolist(), range(run.slot, stop), rows[run.slot : stop].tolist(), strict=True)
        sql = f"UPDATE found SET {crc} = ?, {column.name}_slot = ? WHERE row = ? AND why IS NULL"
        scratch.executemany(sql, places)


def _crc(path: Path, column: ColumnSpec, low: int, high: int) -> int:
    """The CRC-32 of consecutive slots; what cannot be read gives another."""
    crc = 0
    with contextlib.suppress(OSError), files.open_regular(path) as file:
        step = at_once(column.bytes)
        for start in range(low, high, step):
            crc = crc32(b"".join(read_slots(file, column.bytes, start, min(start + step, high))), crc)
    return crc
