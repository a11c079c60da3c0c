"""Verify names every fault that opening accepts."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import apsw
import numpy as np
import pytest
from worlds import holding

import softdb
from softdb.store.segments import checksum

verifying = importlib.import_module("softdb.store.verify")

ROWS = "rows-00000001.npy"


@pytest.fixture
def compacted(path: Path) -> Path:
    """A directory with rows 1, 3, 5, … in segment 1; the even ones lie nowhere."""
    with holding(np.ones((100, 2)), path=path) as db:
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
        with pytest.raises(softdb.CorruptionError, match=r"1 damaged: catalog.sqlite: 3 rows that no segment"):
            db.verify()


def test_a_record_whose_row_lies_nowhere_is_counted(compacted: Path) -> None:
    connection = apsw.Connection(str(compacted / "catalog.sqlite"))
    connection.execute(
        "INSERT INTO records SELECT 4, 'more', payload, key_crc, value_crc, payload_crc, text_crc, text "
        "FROM records WHERE row = 5"
    )
    connection.close()
    with (
        softdb.open(compacted) as db,
        pytest.raises(softdb.CorruptionError, match=r"1 damaged: .*: 1 rows are live in"),
    ):
        db.verify()


def put(db: softdb.SoftDB, texts: dict[int, str]) -> None:
    """Put payloads' texts in some rows, with their checksums."""
    with db._store.write_transaction():
        db._store.catalog.replace_texts("payload", texts, texts.values())


@pytest.mark.parametrize(
    ("texts", "named"),
    [
        ({7: "1" * 5000}, "7"),  # JSON to SQLite, and no number that Python reads
        ({7: "[" * 5000}, "7"),
        ({9: "{"}, "9"),
        (dict.fromkeys(range(1, 25, 2), "{"), "1, 3, 5, 7, 9, 11, 13, 15, 17"),
        (dict.fromkeys(range(1, 25, 2), "1" * 5000), "1, 3, 5, 7, 9, 11, 13, 15, 17"),
    ],
    ids=["number", "deep", "JSON", "nine of JSON", "nine of numbers"],
)
def test_payloads_that_python_cannot_read_are_named_nine_at_most(
    compacted: Path, texts: dict[int, str], named: str
) -> None:
    with softdb.open(compacted) as db:
        put(db, texts)
        with pytest.raises(softdb.CorruptionError, match=rf"1 damaged: .*not text or JSON, rows {named}: restore"):
            db.verify()


def test_a_payload_too_deep_for_python_is_named(compacted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def deep(text: str) -> None:
        raise RecursionError("maximum recursion depth exceeded")

    with softdb.open(compacted) as db:
        put(db, {7: json.dumps("x" * 5000)})
        assert db.verify() == 50
        monkeypatch.setattr(verifying.json, "loads", deep)
        with pytest.raises(softdb.CorruptionError, match=r"not text or JSON, rows 7: restore"):
            db.verify()


@pytest.mark.parametrize(
    ("error", "named"),
    [
        (apsw.CorruptError("malformed"), "catalog.sqlite: malformed"),
        (apsw.IOError("disk I/O error"), "catalog.sqlite: disk I/O error"),
        (softdb.CorruptionError("catalog.sqlite has a cycle"), "catalog.sqlite has a cycle"),
    ],
)
def test_a_catalogue_that_cannot_be_read_does_not_hide_other_damage(
    compacted: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, named: str
) -> None:
    def unread(*_: object) -> None:
        raise error

    with (compacted / "keys-00000001.npy").open("r+b") as file:
        file.seek(128)
        file.write(b"\xff")
    monkeypatch.setattr(verifying, "_check_catalogue", unread)
    expected = f"2 damaged: {named}; keys-00000001.npy: row 1 differs"
    with softdb.open(compacted) as db, pytest.raises(softdb.CorruptionError, match=expected):
        db.verify()
