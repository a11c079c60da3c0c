"""Intact records of a damaged world, by the changed bytes, and the expected result of a salvage."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
from oracle import Id, State, differences, held
from rot_worlds import World

import softdb
from softdb.salvaging.cells import Spot
from softdb.salvaging.pages import Cell, Pages
from softdb.salvaging.remains import Remains

HEAD = 128  # bytes before the first slot of a column file

Slots = dict[Id, list[tuple[str, int, int]]]


class Watched(Pages):
    """Pages that say from which of them the last entry came."""

    def page(self, number: int) -> bytes | None:
        self.__dict__.setdefault("beyond", set()).add(number)
        return super().page(number)

    def _parse(self, number: int, data: bytes, table: bool) -> tuple[list[int], list[Spot]]:
        self.__dict__["at"] = number
        return super()._parse(number, data, table)

    def _cell(self, data: bytes, at: Spot, table: bool, limit: int | None = None) -> Cell:
        self.__dict__["beyond"] = {self.__dict__["at"]}
        return super()._cell(data, at, table, limit)


def pages_of(world: World) -> dict[Id, set[int]]:
    """The pages that each record, and its entry in the index of ids, lie on."""
    found: dict[Id, set[int]] = defaultdict(set)
    with closing(Remains(world.path / "catalog.sqlite")) as remains:
        remains.pages.__class__ = Watched
        for cell in remains.records():
            assert cell.columns is not None
            found[cell.columns[1]] |= remains.pages.__dict__["beyond"]  # type: ignore[index]
        for _, one in remains.ids():
            found[one] |= remains.pages.__dict__["beyond"]
    assert set(found) == set(world.state)
    return found


def slots_of(world: World, copy: Path) -> Slots:
    """File, offset and size of each record's key and value; the copy is opened."""
    found: Slots = defaultdict(list)
    with softdb.open(copy, mode="r") as db:
        for segment in db._store.snapshot.segments:
            for column, array in (("keys", segment.keys), ("values", segment.values)):
                if array is None:
                    continue
                for slot, row in enumerate(segment.rows_of(slice(None)).tolist()):
                    for one in (found.id for found in db._store.read(np.array([row])).values()):
                        place = f"{column}-{segment.number:08d}.npy", HEAD + slot * array[0].nbytes, array[0].nbytes
                        found[one].append(place)
    return found


def intact(world: World, damaged: Path, pages: dict[Id, set[int]], slots: Slots) -> set[Id]:
    """The ids of records none of whose bytes have changed."""
    files = {
        name: (_bytes(world.path / name), _bytes(damaged / name)) for name in {p[0] for s in slots.values() for p in s}
    }
    turned = _turned(world.path, damaged)
    found = set()
    for one in world.state:
        same = all(files[name][0][at : at + size] == files[name][1][at : at + size] for name, at, size in slots[one])
        if same and not pages[one] & turned:
            found.add(one)
    return found


def _turned(path: Path, damaged: Path) -> set[int]:
    """Pages of the catalogue that are not as they were."""
    with closing(Remains(path / "catalog.sqlite")) as before, closing(Remains(damaged / "catalog.sqlite")) as after:
        size = before.pages.size
        now = Pages(after._file, after.pages.log, size)
        return {n for n in range(1, before.pages.count + 1) if before.pages.page(n) != now.page(n)}


def _bytes(file: Path) -> bytes:
    return file.read_bytes() if file.exists() else b""


def fingerprint(path: Path) -> dict[str, Any]:
    """All that a directory says of itself."""
    return {
        str(file.relative_to(path)): (hashlib.sha256(file.read_bytes()).hexdigest(), file.stat().st_mtime_ns)
        for file in sorted(path.rglob("*"))
        if file.is_file()
    }


def salvaged(path: Path, to: Path, world: World, **words: Any) -> tuple[dict[str, Any], State]:
    """Salvage a damaged database; the result must be sound and the source untouched."""
    before = fingerprint(path)
    try:
        report = softdb.salvage(path, to, **words)
    finally:
        assert fingerprint(path) == before, "salvage has changed the damaged database"
    with softdb.open(to, mode="r", verify=True) as db:
        found = held(db)
        stats = db.stats().asdict()
    assert len(found) == report["records"]
    for name, value in world.schema.items():
        assert stats[name] == value
    return report, found


def wrong(found: State, world: World, unconfirmed: list[Id]) -> str:
    """Salvaged records that were never stored so; an unconfirmed id may be another's, its record may not."""
    sure = {one: truth for one, truth in found.items() if one not in unconfirmed}
    told = differences(sure, {one: world.state[one] for one in sure if one in world.state})
    loose = [one for one in unconfirmed if found[one] not in world.state.values()]
    return told or (f"unconfirmed and never stored: {loose}" if loose else "")
