"""The state machine of the model test: every change to a database, in any order, beside the oracle."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import note
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from model_oracle import Records
from model_refused import refusals
from model_world import PLAIN_FIELDS, Draw, Id, Kind

import softdb

Durability = Literal["full", "relaxed"]

SEEDS = st.integers(0, 2**32 - 1)
COUNTS = st.integers(1, 8)
MOST = 250  # records; beyond it nothing is inserted

holding = precondition(lambda self: len(self.model) > 0)
with_room = precondition(lambda self: len(self.model) < self.most)


def _given(draw: Draw, column: Any, keyed: Any) -> Any:
    """A column of new records as someone might pass it, None where there is no key."""
    if column is None or keyed.all():
        return draw.form(column)
    return [one if own else None for one, own in zip(column.tolist(), keyed, strict=True)]


class DatabaseMachine(RuleBasedStateMachine):
    """A database, on disk or in memory, and its expected records."""

    most = MOST
    indexed = False  # whether searches may be approximate

    def __init__(self, root: Path, tally: Counter[str]) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(dir=root))
        self.tally = tally
        self.steps = -1  # the invariants hold once before the first
        self.names = 0
        # asked again and again: what they match is remembered, and carried from commit to commit
        self.filters: list[dict[str, Any]] = [{name: {"$exists": True}} for name in ("year", "lang", "tags")]

    def begin(self, kind: Kind, memory: bool, fields: list[str], durability: Durability = "full") -> None:
        self.kind, self.path, self.durability = kind, None if memory else self.place(), durability
        self.db = softdb.open(self.path, fields=fields, durability=durability, **kind.schema)
        self.model, self.fields, self.generation = Records(kind), set(fields), 0

    def place(self) -> Path:
        """A path where nothing is."""
        self.names += 1
        return self.folder / f"db{self.names}"

    def teardown(self) -> None:
        self.tally["model: operations"] += max(0, self.steps)
        self.tally["model: runs"] += 1
        with contextlib.suppress(Exception):
            self.release()
            self.db.close()
        shutil.rmtree(self.folder)

    def where(self, draw: Draw) -> dict[str, Any]:
        """A filter, new or repeated."""
        if draw.random.random() < 0.5:
            where = draw.where([stored.payload for stored in self.model.records.values()])
            if draw.random.random() < 0.4:
                where = (where if draw.random.random() < 0.3 else {}) | draw.about_texts(self.model.tokenizer)
            self.filters = [*self.filters[:3], where, *self.filters[3:5]]
        return draw.random.choice(self.askable)

    @property
    def askable(self) -> list[dict[str, Any]]:
        """The filters, less those that need a text index where there is none."""
        return [one for one in self.filters if self.model.tokenizer or "$match" not in one.get("$text", ())]

    def counted(self, filters: list[dict[str, Any]]) -> None:
        for where in filters:
            assert self.db.count(where) == len(self.model.matching(where)), f"count of {where!r}"

    def queries(self, draw: Draw) -> Any:
        return draw.queries(self.kind, self.model.keys(draw.some(3, self.model.compared(None))))

    # -- always --------------------------------------------------------------------------------------------------------

    @invariant()
    def agrees(self) -> None:
        """Cheap checks: length, generation, a few records to the bit, a few missing ids."""
        self.steps += 1
        ids = list(self.model.records)
        assert len(self.db) == self.db.count() == len(ids)
        generation = self.db.refresh()
        assert generation >= self.generation, "the generation went back"
        self.generation = generation
        some = ids[self.steps % 7 :: 1 + len(ids) // 3]
        if some:
            self.model.same(self.db.get(some), some)
        for one in (self.steps, str(self.steps), "never"):
            assert (one in self.db) == (one in self.model.records)
        if self.steps % 2:
            self.counted([self.askable[self.steps // 2 % len(self.askable)]])

    # -- writing -------------------------------------------------------------------------------------------------------

    def put(self, verb: Callable[..., object], draw: Draw, ids: list[Id]) -> None:
        keys, values = draw.vectors(len(ids), self.kind.dim, self.kind), draw.values(len(ids), self.kind)
        payloads = draw.payloads(len(ids)) if draw.random.random() < 0.8 else None
        texts = draw.texts(len(ids)) if draw.random.random() < 0.6 else None
        keyed = draw.keyed(len(ids))
        verb(ids, *(_given(draw, column, keyed) for column in (keys, values)), payloads, texts=texts)
        self.model.put(ids, keys, values, payloads or [None] * len(ids), texts, keyed)
        self.model.same(self.db.get(ids), ids)

    @with_room
    @rule(seed=SEEDS, n=COUNTS)
    def insert(self, seed: int, n: int) -> None:
        draw = Draw(seed)
        self.put(self.db.insert, draw, draw.fresh(n, self.model.records))

    @with_room
    @rule(seed=SEEDS, n=st.integers(40, 140))
    def insert_many(self, seed: int, n: int) -> None:
        draw = Draw(seed)
        self.put(self.db.insert, draw, draw.fresh(n, self.model.records))

    @with_room
    @rule(seed=SEEDS, n=COUNTS, stored=COUNTS)
    def upsert(self, seed: int, n: int, stored: int) -> None:
        draw = Draw(seed)
        ids = draw.some(stored, self.model.records) + draw.fresh(n, self.model.records)
        self.put(self.db.upsert, draw, draw.shuffled(ids))

    @holding
    @rule(seed=SEEDS, n=COUNTS, parts=st.sampled_from(["k", "v", "p", "kp", "vp", "kv", "t", "t", "kt", "pt"]))
    def update(self, seed: int, n: int, parts: str) -> None:
        draw = Draw(seed)
        ids = draw.some(n, self.model.records)
        keys = draw.vectors(len(ids), self.kind.dim, self.kind) if "k" in parts else None
        values = draw.values(len(ids), self.kind) if "v" in parts else None
        if (keys is not None or values is not None) and any(self.model.records[one].key is None for one in ids):
            keys, values = draw.vectors(len(ids), self.kind.dim, self.kind), draw.values(len(ids), self.kind)
        payloads = draw.payloads(len(ids)) if "p" in parts else None
        texts = draw.texts(len(ids)) if "t" in parts else None
        if keys is None and values is None and payloads is None and texts is None:
            return
        self.counted(self.askable[:4])
        self.db.update(ids, draw.form(keys), draw.form(values), payloads, texts=texts)
        self.model.change(ids, keys, values, payloads, texts)
        self.model.same(self.db.get(ids), ids)
        self.counted(self.askable[:4])

    @rule(seed=SEEDS, n=COUNTS, missing=st.integers(0, 2))
    def delete(self, seed: int, n: int, missing: int) -> None:
        draw = Draw(seed)
        ids = draw.some(n, self.model.records) + draw.fresh(missing, self.model.records)
        ids += ids[:1]  # twice is fine
        assert self.db.delete(draw.shuffled(ids)) == self.model.remove(ids)

    @rule(seed=SEEDS)
    def delete_where(self, seed: int) -> None:
        draw = Draw(seed)
        where = self.where(draw)
        ids = self.model.matching(where)
        if len(ids) > 20 and draw.random.random() < 0.9:  # else hardly anything stays for the other rules
            return
        assert self.db.delete(where=where) == self.model.remove(ids)

    @rule(seed=SEEDS, share=st.sampled_from([0.3, 0.7, 1.0]))
    def delete_many(self, seed: int, share: float) -> None:
        ids = Draw(seed).some(int(share * len(self.model)), self.model.records)
        assert self.db.delete(ids) == self.model.remove(ids)

    @rule(seed=SEEDS, pick=st.integers(0, 9))
    def refuse(self, seed: int, pick: int) -> None:
        """Wrong input raises its error and changes nothing, not even changes that wait for a flush."""
        draw = Draw(seed)
        self.put(self.db.insert, draw, draw.fresh(1, self.model.records))
        self.generation = self.db.refresh()
        every = refusals(self.db, self.model, draw, self.folder)
        for name, error, match, call in every[pick % 4 :: 4]:
            note(f"{name} must be refused")
            with pytest.raises(error, match=match):
                call()
            self.tally["model: wrong inputs refused"] += 1
            assert self.db.refresh() == self.generation, f"{name} was refused, but the generation has changed"
        assert self.db.verify() == len(self.model)

    # -- fields, index, files ------------------------------------------------------------------------------------------

    @rule(names=st.lists(st.sampled_from(PLAIN_FIELDS), min_size=1, max_size=3))
    def index_field(self, names: list[str]) -> None:
        self.db.index_field(*names)
        self.fields |= set(names)
        assert self.db.stats().fields == sorted(self.fields)

    @rule(name=st.sampled_from(PLAIN_FIELDS))
    def drop_field(self, name: str) -> None:
        if name in self.fields:
            self.db.drop_field(name)
            self.fields.remove(name)
        else:
            with pytest.raises(softdb.BadInput, match="has no index"):
                self.db.drop_field(name)
        assert self.db.stats().fields == sorted(self.fields)

    @rule(name=st.sampled_from(["words", "words", "trigram"]))
    def index_text(self, name: Literal["words", "trigram"]) -> None:
        self.db.index_text(name)
        self.model.tokenizer = name
        assert self.db.text_index == name

    @rule()
    def drop_text_index(self) -> None:
        self.db.drop_text_index()
        self.model.tokenizer = self.db.text_index
        assert self.model.tokenizer is None
        with pytest.raises(softdb.BadInput, match="no text index"):
            self.db.search(texts="fox", mode="text")
        with pytest.raises(softdb.BadFilter, match="no text index"):
            self.db.count({"$text": {"$match": "fox"}})

    @rule()
    def build_index(self) -> None:
        self.db.build_index("flat")

    @rule()
    def compact(self) -> None:
        report = self.db.compact()
        self.tally["model: compactions"] += 1
        assert (report.records, self.db.stats().dead) == (len(self.model), 0)
        self.model.holds(self.db)

    @rule(stay=st.booleans())
    def snapshot(self, stay: bool) -> None:
        """A copy opens by itself; the run may go on in it."""
        copy = self.place()
        report = self.db.snapshot(copy)
        self.tally["model: snapshots"] += 1
        assert report.records == len(self.model)
        with softdb.open(copy, mode="r") as db:
            self.model.holds(db)
            assert db.stats().fields == sorted(self.fields)
        if stay:
            shutil.rmtree(copy)
        else:
            self.move(copy)

    def move(self, path: Path) -> None:
        """Go on in another directory."""
        self.release()
        self.db.close()
        if self.path is not None:
            shutil.rmtree(self.path)
        self.path, self.db = path, softdb.open(path, durability=self.durability)
        self.model.holds(self.db)
        assert self.db.stats().fields == sorted(self.fields)

    def release(self) -> None:
        """Close other handles of the directory, and forget the earlier questions of this one."""
