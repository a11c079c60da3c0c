"""Salvage of a catalogue with holes, and of one with an oversized setting."""

from __future__ import annotations

import sqlite3
import tracemalloc
from contextlib import closing
from pathlib import Path

import pytest
from worlds import holding

import softdb
from softdb.salvaging import pages

SPARSE = 64 << 30


@pytest.fixture
def damaged(path: Path) -> Path:
    holding([[i, 1] for i in range(500)], payloads=[{"text": "x" * 200}] * 500, path=path).close()
    return path


def test_holes_of_a_catalogue_are_not_read(damaged: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (damaged / "catalog.sqlite").open("r+b") as file:
        before = file.seek(0, 2) // pages.PAGE
        file.truncate(SPARSE)
        file.seek(SPARSE - 5)
        file.write(b"\r....")  # a page that is no hole, behind them all
    read, real = list[int](), pages.Pages.page

    def page(self: pages.Pages, number: int) -> bytes | None:
        read.append(number)
        assert len(read) < 100 * before, "pages of holes are read"
        return real(self, number)

    monkeypatch.setattr(pages.Pages, "page", page)
    report = softdb.salvage(damaged, tmp_path / "saved")
    assert (report["records"], report["lost_records"]) == (500, 0)
    assert SPARSE // pages.PAGE in read
    with softdb.open(tmp_path / "saved", mode="r") as db:
        assert db.verify() == 500


def test_an_oversized_setting_is_read_up_to_its_limit(damaged: Path, tmp_path: Path) -> None:
    size = 40 << 20
    with closing(sqlite3.connect(damaged / "catalog.sqlite")) as catalogue, catalogue:
        catalogue.execute("UPDATE settings SET value = zeroblob(?) WHERE name = 'metric'", (size,))
    tracemalloc.start()
    try:
        report = softdb.salvage(damaged, tmp_path / "saved", metric="dot")
        assert tracemalloc.get_traced_memory()[1] < size / 2
    finally:
        tracemalloc.stop()
    assert report["records"] == 500
