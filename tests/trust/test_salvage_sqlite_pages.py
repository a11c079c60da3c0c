"""SQLite files read without SQLite: equal where they are sound, nothing invented where they are not."""

from __future__ import annotations

import contextlib
import shutil
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import apsw
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from softdb.salvaging.cells import Damaged, record
from softdb.salvaging.log import Log
from softdb.salvaging.pages import Cell, Pages
from softdb.store import files


def random_file(path: Path, seed: int, size: int, folded: bool) -> tuple[list[Any], list[Any]]:
    """A table and an index of every type that SQLite stores, in a file and its log; and their rows."""
    rng = np.random.default_rng(seed)
    connection = apsw.Connection(str(path / "made"))
    connection.execute(f"PRAGMA page_size = {size}")
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("CREATE TABLE t(row INTEGER PRIMARY KEY, a, b); CREATE INDEX i ON t(a, b)")
    for _ in range(3):
        for _ in range(150):
            length = int(rng.choice([0, 5, 100, 3000, 20_000], p=[0.2, 0.5, 0.25, 0.04, 0.01]))
            values: list[Any] = [None, 0, 1, -1, 2**62, -(2**40), 1.5, "é" * length, bytes(length)]
            row = int(rng.integers(-(2**62), 2**62)) if rng.random() < 0.1 else int(rng.integers(1 << 30))
            a, b = (values[int(rng.integers(len(values)))] for _ in range(2))
            connection.execute("INSERT OR REPLACE INTO t VALUES(?, ?, ?)", (row, a, b))
        connection.execute("DELETE FROM t WHERE row % 3 = 0")
        if folded:
            connection.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_TRUNCATE)
            folded = False
    for file in path.glob("made*"):
        shutil.copy(file, path / file.name.replace("made", "read"))
    table = connection.execute("SELECT * FROM t ORDER BY row").fetchall()
    index = connection.execute("SELECT a, b, row FROM t INDEXED BY i ORDER BY a, b, row").fetchall()
    connection.close()
    return table, index


@contextlib.contextmanager
def opened(path: Path, size: int = 4096) -> Iterator[Pages]:
    with contextlib.ExitStack() as stack:
        file = apsw.VFSFile("", str(path), [apsw.SQLITE_OPEN_MAIN_DB | apsw.SQLITE_OPEN_READONLY, 0])
        stack.callback(file.xClose)
        log = path.with_name(path.name + "-wal")
        yield Pages(file, Log(stack.enter_context(files.open_regular(log))) if log.exists() else None, size)


def roots(pages: Pages) -> dict[Any, Any]:
    return {cell.columns[1]: cell.columns[3] for cell in pages.walk(1) if cell.columns}


@pytest.mark.few(3)
@pytest.mark.parametrize("folded", [True, False])
@pytest.mark.parametrize("size", [512, 4096, 65536])
@pytest.mark.parametrize("seed", [0, 1])
def test_trees_are_read_as_sqlite_reads_them(tmp_path: Path, seed: int, size: int, folded: bool) -> None:
    table, index = random_file(tmp_path, seed, size, folded)
    with opened(tmp_path / "read", size) as pages:
        actual = roots(pages)
        assert [(cell.row, *(cell.columns or ())[1:]) for cell in pages.walk(actual["t"])] == table
        entries = [cell.columns for cell in pages.walk(actual["i"], False)]
        assert sorted(map(repr, entries)) == sorted(map(repr, index))
        assert pages.damaged == set()
        free = pages.free()
        assert free is not None
        assert not free & pages.seen


def test_a_log_ends_where_it_is_damaged(tmp_path: Path) -> None:
    """Cut the log byte by byte: the last complete commit is read."""
    connection = apsw.Connection(str(tmp_path / "made"))
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("CREATE TABLE t(a)")
    for i in range(3):
        connection.execute("INSERT INTO t VALUES(?)", (i,))
    for file in tmp_path.glob("made*"):
        shutil.copy(file, tmp_path / file.name.replace("made", "read"))
    connection.close()
    log = tmp_path / "read-wal"
    data = log.read_bytes()
    counts = []
    for at in range(0, len(data), 97):
        log.write_bytes(data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :])
        with opened(tmp_path / "read") as pages:
            counts.append(sum(1 for _ in pages.walk(2)) if pages.kind(2) == 13 else 0)
            assert pages.log is None or pages.log.cut
    assert counts == sorted(counts)
    assert set(counts) == {0, 1, 2}


def leaf(tmp_path: Path, *statements: str) -> tuple[Path, int]:
    """A table of one page, its third."""
    connection = apsw.Connection(str(tmp_path / "read"))
    for statement in ("CREATE TABLE other(a)", "CREATE TABLE t(row INTEGER PRIMARY KEY, a)", *statements):
        connection.execute(statement)
    ((root,),) = connection.execute("SELECT rootpage FROM sqlite_schema WHERE name = 't'")
    connection.close()
    return tmp_path / "read", int(root)


def rows(path: Path, root: int) -> tuple[list[int], set[int]]:
    with opened(path) as pages:
        return [cell.row for cell in pages.walk(root)], pages.damaged


def patched(path: Path, root: int, at: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek((root - 1) * 4096 + at)
        file.write(data)


def test_bytes_in_freed_space_are_no_entries(tmp_path: Path) -> None:
    path, root = leaf(tmp_path, *(f"INSERT INTO t VALUES({i}, 'text {i}')" for i in (1, 2, 3)))
    page = path.read_bytes()[(root - 1) * 4096 : root * 4096]
    (pointer,) = struct.unpack_from(">H", page, 8 + 2 * 2)  # of the third
    connection = apsw.Connection(str(path))
    connection.execute("PRAGMA secure_delete = OFF")
    connection.execute("DELETE FROM t WHERE row = 3")
    connection.close()
    assert path.read_bytes().count(b"text 3") == 1
    patched(path, root, 3, struct.pack(">H", 3))
    patched(path, root, 8 + 2 * 2, struct.pack(">H", pointer))
    assert rows(path, root) == ([1, 2], {root})


def test_a_freed_block_is_no_entry(tmp_path: Path) -> None:
    path, root = leaf(tmp_path, *(f"INSERT INTO t VALUES({i}, 'text {i}')" for i in (1, 2, 3)))
    page = path.read_bytes()[(root - 1) * 4096 : root * 4096]
    (pointer,) = struct.unpack_from(">H", page, 8 + 2)  # of the second
    connection = apsw.Connection(str(path))
    connection.execute("DELETE FROM t WHERE row = 2")
    connection.close()
    patched(path, root, 3, struct.pack(">H", 3))
    patched(path, root, 8 + 2 * 2, struct.pack(">H", pointer))
    actual, damaged = rows(path, root)
    assert (sorted(set(actual) & {1, 3}), damaged) == ([1, 3], {root})
    assert 2 not in actual


def test_entries_that_overlap_are_left_out(tmp_path: Path) -> None:
    path, root = leaf(tmp_path, *(f"INSERT INTO t VALUES({i}, '{'x' * 60}')" for i in (1, 2, 3, 4)))
    page = path.read_bytes()[(root - 1) * 4096 : root * 4096]
    pointers = struct.unpack_from(">4H", page, 8)
    patched(path, root, pointers[2] + 20, page[pointers[3] : pointers[3] + 10])
    patched(path, root, 8 + 6, struct.pack(">H", pointers[2] + 20))  # reaches into the second
    assert rows(path, root) == ([1], {root})


def test_a_tree_that_leads_into_itself_ends(tmp_path: Path) -> None:
    path, root = leaf(tmp_path, *(f"INSERT INTO t VALUES({i}, zeroblob(500))" for i in range(100)))
    page = path.read_bytes()[(root - 1) * 4096 : root * 4096]
    assert page[0] == 5
    (first,) = struct.unpack_from(">H", page, 12)
    patched(path, root, first, struct.pack(">I", root))
    actual, damaged = rows(path, root)
    assert root in damaged
    assert 0 < len(actual) < 100
    assert len(set(actual)) == len(actual)


@settings(max_examples=400, deadline=None, derandomize=True, database=None)
@given(st.binary(max_size=60))
def test_a_record_is_read_or_damaged(data: bytes) -> None:
    try:
        columns = record(data)
    except Damaged:
        return
    assert all(isinstance(column, int | float | str | bytes | None) for column in columns)


@settings(max_examples=200, deadline=None, derandomize=True, database=None)
@given(st.data())
def test_a_page_of_anything_is_read_or_damaged(data: st.DataObject) -> None:
    page = bytearray(4096)
    page[0] = data.draw(st.sampled_from([2, 5, 10, 13]))
    page[1:40] = data.draw(st.binary(min_size=39, max_size=39))
    page[4000:] = data.draw(st.binary(min_size=96, max_size=96))

    class Alone(Pages):
        def page(self, number: int) -> bytes | None:
            return bytes(page) if 0 < number < 4 else None

    class Nothing:
        def xFileSize(self) -> int:
            return 3 * 4096

    pages = Alone(Nothing(), None)  # type: ignore[arg-type]
    for table in (True, False):
        assert all(isinstance(cell, Cell) for cell in pages.walk(2, table))


def test_uncommitted_pages_are_not_read(tmp_path: Path) -> None:
    connection = apsw.Connection(str(tmp_path / "made"))
    for statement in ("PRAGMA journal_mode = WAL", "PRAGMA cache_size = 5", "CREATE TABLE t(a)"):
        connection.execute(statement)
    connection.execute("INSERT INTO t VALUES('kept')")
    connection.execute("BEGIN")
    for _ in range(100):
        connection.execute("INSERT INTO t VALUES(zeroblob(3000))")
    for file in tmp_path.glob("made*"):
        shutil.copy(file, tmp_path / file.name.replace("made", "read"))
    connection.execute("ROLLBACK")
    connection.close()
    assert (tmp_path / "read-wal").stat().st_size > 100_000  # pages that did not fit into memory
    with opened(tmp_path / "read") as pages:
        assert [cell.columns for cell in pages.walk(2)] == [("kept",)]
