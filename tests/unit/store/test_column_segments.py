"""The column files: their sizes, bytes, directory and syncs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np
import pytest

from softdb.check import schema
from softdb.store import disk, files
from softdb.store.directory import Displaced
from softdb.store.segments import ColumnFiles, Piece, SegmentEntry, SegmentPart, capacity_for

SCHEMA = schema(3, 2, None, "float32", "cosine", None)
KEYS, VALUES = np.ones((4, 3), np.float32), np.full((4, 2), 2, np.float32)


@pytest.fixture
def folder(path: Path) -> Iterator[int]:
    path.mkdir()
    descriptor = os.open(path, os.O_RDONLY)
    yield descriptor
    os.close(descriptor)


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the synced files, in order."""
    names = list[str]()
    monkeypatch.setattr(disk, "sync", lambda descriptor: names.append(Path(f"/dev/fd/{descriptor}").resolve().name))
    return names


@pytest.mark.parametrize(
    ("stored", "coming", "capacity"),
    [(0, 1, 64), (0, 64, 64), (0, 65, 128), (100, 1, 128), (128, 1, 128), (1 << 20, 1, 1 << 20), (0, 1 << 30, 1 << 20)],
)
def test_capacities_double_within_limits(stored: int, coming: int, capacity: int) -> None:
    assert capacity_for(stored, coming) == capacity


def test_an_orphan_gives_way_to_a_new_segment_of_its_number(tmp_path: Path) -> None:
    for name in ("keys", "values", "rows"):
        (tmp_path / f"{name}-00000007.npy").write_bytes(b"of an append that did not commit" * 100)
    ColumnFiles(tmp_path, SCHEMA).create(7, 64, gaps=True)
    for name, shape in (("keys", (64, 3)), ("values", (64, 2)), ("rows", (64,))):
        np.testing.assert_array_equal(np.load(tmp_path / f"{name}-00000007.npy"), np.zeros(shape))


@pytest.mark.parametrize("relaxed", [False, True])
def test_a_renamed_directory_stays_in_use(path: Path, folder: int, relaxed: bool) -> None:
    renamed = path.with_name("renamed")
    columns = ColumnFiles(path, SCHEMA, relaxed, folder)
    columns.create(0, 64)
    path.rename(renamed)
    path.mkdir()
    strangers = [path / f"{name}-0000000{i}.npy" for name in ("keys", "values", "rows") for i in range(5)]
    for file in strangers:
        file.write_bytes(b"of a stranger")
    with columns.appending([Piece(SegmentEntry(0, 0, 64, 0), KEYS, VALUES)]):
        pass
    columns.create(1, 4, gaps=True, aside=True)
    columns.fill(1, 4, [SegmentPart(KEYS, VALUES, np.arange(4))])
    columns.create(2, 4)
    columns.write(Piece(SegmentEntry(2, 0, 4, 1), KEYS[:2], None))
    columns.create(3, 4)
    columns.remove([3])
    columns.create(4, 4)
    columns.sync()
    columns.clean({0, 1, 2, 3})
    np.testing.assert_array_equal(columns.open(0, 64)[0][:4], KEYS)
    np.testing.assert_array_equal(columns.open(1, 4)[1], VALUES)
    np.testing.assert_array_equal(columns.rows(1, 4), np.arange(4))
    np.testing.assert_array_equal(columns.like(SCHEMA).open(2, 4)[0].any(1), [False, True, True, False])
    assert {file.read_bytes() for file in strangers} == {b"of a stranger"}
    of_segments = [("keys", 0), ("keys", 1), ("keys", 2), ("rows", 1), ("values", 0), ("values", 1), ("values", 2)]
    assert sorted(file.name for file in renamed.iterdir()) == [f"{name}-{i:08d}.npy" for name, i in of_segments]


def test_full_columns_are_on_disk_without_a_sync(path: Path, folder: int, synced: list[str]) -> None:
    columns = ColumnFiles(path, SCHEMA, folder=folder)
    columns.create(0, 64)
    assert synced == [path.name] * 2
    with columns.appending([Piece(SegmentEntry(0, 0, 64, 0), KEYS, VALUES)]):
        pass
    assert synced[2:] == ["keys-00000000.npy", "values-00000000.npy"]
    columns.sync()
    assert len(synced) == 4


def test_relaxed_columns_and_their_names_come_to_disk_once_at_sync(path: Path, folder: int, synced: list[str]) -> None:
    columns = ColumnFiles(path, SCHEMA, relaxed=True, folder=folder)
    columns.sync()
    columns.create(0, 64)
    with columns.appending([Piece(SegmentEntry(0, 0, 64, 0), KEYS, VALUES)]):
        pass
    assert synced == []
    columns.create(1, 64, aside=True)  # an unpublished segment does not take existing names
    assert synced == [path.name] * 2
    columns.sync()
    assert synced[2:] == ["keys-00000000.npy", "values-00000000.npy", path.name]
    columns.sync()
    assert len(synced) == 5


def test_an_overwritten_column_is_reported(path: Path, folder: int) -> None:
    columns = ColumnFiles(path, SCHEMA, folder=folder)
    columns.create(0, 64)
    with columns.appending([Piece(SegmentEntry(0, 0, 64, 0), KEYS, VALUES)]):
        pass
    columns.require_unchanged()
    file = path / "values-00000000.npy"
    os.utime(file, ns=(0, 0))
    columns.require_unchanged()  # nothing was written since
    with (
        pytest.raises(Displaced, match=f"{file.name} was overwritten by another program"),
        columns.appending([Piece(SegmentEntry(0, 0, 64, 4), KEYS, VALUES)]),
    ):
        pass
    columns.marks.clear()
    with columns.appending([Piece(SegmentEntry(0, 0, 64, 4), KEYS, VALUES)]):
        os.utime(path / "keys-00000000.npy", ns=(0, 0))
    with pytest.raises(Displaced, match="keys-00000000"):
        columns.require_unchanged()


def test_a_map_is_made_once_and_dropped_with_its_segment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened, real = list[Path](), files.open_regular

    def counted(path: Path, folder: int | None) -> BinaryIO:
        opened.append(path)
        return real(path, folder)

    monkeypatch.setattr(files, "open_regular", counted)
    columns = ColumnFiles(tmp_path, SCHEMA)
    columns.create(0, 64)
    for keep, maps in (({0}, 2), ({0}, 2), (set[int](), 2), ({0}, 4)):
        columns.open(0, 64)
        columns.keep_only(keep)
        assert len(opened) == maps
