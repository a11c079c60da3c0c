"""Verifying: every fault that opening lets through is named."""

from __future__ import annotations

from pathlib import Path

import apsw
import numpy as np
import pytest

import softdb
from softdb.store.segments import checksum

ROWS = "rows-00000001.npy"


@pytest.fixture
def compacted(path: Path) -> Path:
    """A directory with rows 1, 3, 5, … in segment 1; the even ones lie nowhere."""
    with softdb.open(path, dim=2) as db:
        db.insert(list(range(100)), np.ones((100, 2)))
        db.delete(list(range(0, 100, 2)))
        db.compact()
    assert (path / ROWS).exists()
    return path


@pytest.mark.parametrize("third", [3, 2], ids=["equal", "falling"])
def test_rows_that_do_not_ascend_are_named_though_their_checksum_agrees(compacted: Path, third: int) -> None:
    rows = np.load(compacted / ROWS, mmap_mode="r+")
    rows[2] = third
    rows.flush()
    connection = apsw.Connection(str(compacted / "catalog.sqlite"))
    connection.execute("UPDATE gaps SET rows_crc = ?", (checksum(rows[:50]),))
    connection.close()
    with softdb.open(compacted) as db, pytest.raises(softdb.CorruptionError, match=rf"{ROWS} does not ascend"):
        db.verify()


def test_tombstones_that_no_segment_holds_are_counted(compacted: Path) -> None:
    with softdb.open(compacted) as db:
        with db._store.write_transaction():
            db._store.catalog.set_tombstones(np.array([0, 4, 98]))
        with pytest.raises(softdb.CorruptionError, match=r"1 damaged: catalog.sqlite: 3 rows are marked dead that no"):
            db.verify()
