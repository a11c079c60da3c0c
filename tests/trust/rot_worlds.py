"""Small databases of every kind to damage, their expected answers, and the kinds of damage."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from oracle import State, differences, held
from worlds import holding

import softdb

COUNT = 40
ASKED = np.random.default_rng(9).standard_normal((3, 3)).astype(np.float32)
FILTERS: list[dict[str, Any]] = [{"n": {"$lt": 12}}, {"kind": "b"}, {"$or": [{"n": 5}, {"kind": {"$exists": False}}]}]


@dataclass
class World:
    """A database's directory, and all that it must answer."""

    name: str
    path: Path
    state: State
    answers: list[Any]
    schema: dict[str, Any]
    states: list[State]  # that the write-ahead log leads through, the last is `state`


def answers(db: softdb.SoftDB) -> list[Any]:
    """Answers of a database to every question."""
    found: list[Any] = [len(db), db.count()]
    for where in (None, *FILTERS):
        hits = db.search(ASKED, k=7, where=where)
        pooled = db.attend(ASKED, where=where)
        found += [list(hits.ids), hits.scores.tolist(), hits.payloads, hits.texts]
        found += [pooled.output.tolist(), db.count(where)]
    return found


def payload(i: int) -> Any:
    """Objects, texts, nothing; some are longer than a page of the catalogue."""
    if i % 9 == 0:
        return None
    if i % 9 == 1:
        return "text é\0"
    return {"n": i, "kind": "abc"[i % 3], "long": "x" * (5000 if i == 20 else i)}


def _filled(path: Path, rng: np.random.Generator, **schema: Any) -> softdb.SoftDB:
    db = softdb.open(path, dim=3, **schema)
    for low in range(0, COUNT, COUNT // 2):
        ids = [f"r{i}" if i % 2 else i for i in range(low, low + COUNT // 2)]
        payloads = list(map(payload, range(low, low + len(ids))))
        db.insert(ids, rng.standard_normal((len(ids), 3)), _values(rng, len(ids), schema), payloads)
    return db


def _values(rng: np.random.Generator, count: int, schema: dict[str, Any]) -> Any:
    if "num_classes" in schema:
        return rng.integers(0, schema["num_classes"], count)
    return rng.standard_normal((count, schema["value_dim"])) if "value_dim" in schema else None


def _change(db: softdb.SoftDB, rng: np.random.Generator, schema: dict[str, Any]) -> list[State]:
    """Tombstones, replaced records and replaced payloads; the records before each change."""
    states = [held(db)]
    db.delete([2, "r3", 10])
    states.append(held(db))
    db.upsert(["r5", "new"], rng.standard_normal((2, 3)), _values(rng, 2, schema), [{"n": 5}, {"kind": "b"}])
    states.append(held(db))
    db.update([4, "r7"], payloads=[{"n": "replaced"}, None])
    return states


def plain(path: Path, rng: np.random.Generator) -> tuple[dict[str, Any], list[State]]:
    """float32, keys alone, declared fields, the note of an encoder, a text index."""
    schema: dict[str, Any] = {"metric": "l2"}
    with _filled(path, rng, **schema) as db:
        db.index_field("n", "kind")
        db.update([0, "r1", 4], texts=["a fox", None, "the fox and the dog"])
        db.index_text()
        _change(db, rng, schema)
        db.core.store.note_encoder("ngrams")
    return schema, []


def indexed(path: Path, rng: np.random.Generator) -> tuple[dict[str, Any], list[State]]:
    """Enough records for an index file."""
    schema: dict[str, Any] = {"metric": "l2"}
    with holding(rng.standard_normal((1000, 3)), payloads=list(map(payload, range(1000))), path=path, **schema) as db:
        db.build_index("ivf", recall=1.0)
    return schema, []


def compacted(path: Path, rng: np.random.Generator) -> tuple[dict[str, Any], list[State]]:
    """float16 and labels; two segments, one with gaps; tombstones since."""
    schema: dict[str, Any] = {"num_classes": 5, "dtype": "float16", "metric": "cosine"}
    with _filled(path, rng, **schema) as db:
        db.delete([0, 6, 8, "r9", "r11", 20])
        db.compact()
        ids = list(range(100, 170))
        db.insert(ids, rng.standard_normal((70, 3)), _values(rng, 70, schema), list(map(payload, range(70))))
        _change(db, rng, schema)
    return schema, []


def logged(path: Path, rng: np.random.Generator) -> tuple[dict[str, Any], list[State]]:
    """Values as wide as keys; the last commits are in the write-ahead log alone."""
    schema: dict[str, Any] = {"value_dim": 3}
    made = path.with_name(path.name + "-open")
    db = _filled(made, rng, **schema)
    db.close()
    db = softdb.open(made)
    states = _change(db, rng, schema)
    shutil.copytree(made, path)
    db.close()
    shutil.rmtree(made)
    return schema, states


KINDS: dict[str, Callable[[Path, np.random.Generator], tuple[dict[str, Any], list[State]]]] = {
    "plain": plain,
    "indexed": indexed,
    "compacted": compacted,
    "logged": logged,
}


def make(name: str, path: Path, seed: int = 0) -> World:
    """A world at a path, which is only to be copied."""
    schema, states = KINDS[name](path, np.random.default_rng(seed))
    shutil.copytree(path, path.with_name(path.name + "-asked"))
    with softdb.open(path.with_name(path.name + "-asked"), verify=True) as db:
        state, said = held(db), answers(db)
        assert (name == "indexed") == (db.stats().index is not None)
    assert (path / "catalog.sqlite-wal").exists() == (name == "logged")
    return World(name, path, state, said, {"dim": 3, **schema}, [*states, state])


@dataclass(frozen=True)
class Damage:
    """Damage to one file; `str` gives all that is needed to repeat it."""

    file: str
    kind: str
    at: int = 0
    size: int = 0

    def do(self, path: Path, other: Path) -> bool:
        """Do it in a copy; `other` is where files to swap with lie. Whether anything has changed."""
        file = path / self.file
        before = file.read_bytes()
        if self.kind == "delete":
            file.unlink()
            return True
        if self.kind == "swap":
            return self._swap(path)
        file.write_bytes(self._changed(before, other))
        return file.read_bytes() != before

    def _changed(self, data: bytes, other: Path) -> bytes:
        if self.kind == "flip":
            return data[: self.at] + bytes([data[self.at] ^ self.size]) + data[self.at + 1 :]
        if self.kind == "zero":
            gone = max(0, min(self.size, len(data) - self.at))
            return data[: self.at] + bytes(gone) + data[self.at + gone :]
        if self.kind == "cut":
            return data[: self.at]
        if self.kind == "append":
            return data + bytes(range(1, 1 + self.size))
        kind = self.file.rpartition("-")[0]
        return next(one for one in (other / self.file, *other.glob(f"{kind}-*")) if one.exists()).read_bytes()

    def _swap(self, path: Path) -> bool:
        """Change places with the next file of its kind."""
        file, kind = path / self.file, self.file.split("-")[0]
        partner = next((one for one in sorted(path.glob(f"{kind}-*.npy")) if one != file), None)
        if partner is None:
            return False
        ours, theirs = file.read_bytes(), partner.read_bytes()
        file.write_bytes(theirs)
        partner.write_bytes(ours)
        return True


def files_of(world: World) -> list[str]:
    """The files of a world."""
    return sorted(str(file.relative_to(world.path)) for file in world.path.rglob("*") if file.is_file())


def coarse(file: str, size: int) -> Iterator[Damage]:
    """All but flips."""
    for at in sorted({0, 1, 16, 100, 128, 511, size // 3, size // 2, size - 1, size - 4096, size - size % 4096}):
        if 0 <= at < size:
            yield Damage(file, "cut", at)
    for at in range(0, size, 4096):
        yield Damage(file, "zero", at, 4096)
    for at in (0, 128, 512, size // 2):
        if at < size:
            yield Damage(file, "zero", at, 100)
    yield Damage(file, "zero", 0, size)
    yield from (Damage(file, "append", 0, count) for count in (1, 100))
    yield from (Damage(file, kind) for kind in ("delete", "swap", "stranger"))


def flips(file: str, size: int, rng: np.random.Generator, count: int | None) -> Iterator[Damage]:
    """One bit of each byte; of `count` bytes drawn, where that is given."""
    places = np.arange(size) if count is None else rng.choice(size, min(count, size), replace=False)
    for at in places.tolist():
        yield Damage(file, "flip", at, 1 << int(rng.integers(8)))


def copied(world: World, damage: Damage, other: Path, to: Path) -> bool:
    """A damaged copy of a world; False where the damage changes nothing."""
    shutil.rmtree(to, ignore_errors=True)
    shutil.copytree(world.path, to)
    return damage.do(to, other)


def same(found: State, said: list[Any], world: World) -> str:
    """Differences between a database's answers and the expected ones; empty if there are none."""
    told = differences(found, world.state)
    if not told and said != world.answers:
        told = "answers differ"
    return told
