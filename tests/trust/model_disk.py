"""The model test on disk: reopening, crashes, readers beside the writer; and, of its own kind, an approximate index."""

from __future__ import annotations

import functools
import shutil
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule
from model_ask import AskedMachine
from model_machine import SEEDS, Durability
from model_oracle import Records
from model_world import KINDS, PLAIN_FIELDS, Draw, Kind

import softdb

DURABILITIES: st.SearchStrategy[Durability] = st.sampled_from(["full", "relaxed"])

on_disk = precondition(lambda self: self.path is not None)
with_reader = precondition(lambda self: self.reader is not None)


class Kept(NamedTuple):
    """A state that a crash may leave."""

    generation: int
    model: Records
    fields: set[str]


class _OnDisk(AskedMachine):
    """Questions to a directory; databases in memory come here by their snapshots."""

    reader: softdb.SoftDB | None = None  # a second handle
    seen: Records  # what the reader must hold
    seen_generation = 0

    kept: list[Kept]  # what a crash may leave, oldest first

    @invariant()
    def remembers(self) -> None:
        """Relaxed changes may be lost, whole verbs from the last one back to the last flush."""
        waiting = self.durability == "relaxed" and self.path is not None and self.db.stats().unflushed
        before = self.kept if waiting else []
        self.kept = [*before, Kept(self.generation, self.model.copy(), set(self.fields))]

    @rule()
    def flush(self) -> None:
        self.db.flush()
        assert self.db.stats().unflushed == 0

    def release(self) -> None:
        super().release()
        if self.reader is not None:
            self.reader.close()
        self.reader = None

    # -- ending --------------------------------------------------------------------------------------------------------

    @on_disk
    @rule(verify=st.booleans(), reader=st.booleans(), durability=DURABILITIES)
    def reopen(self, verify: bool, reader: bool, durability: Durability) -> None:
        self.release()
        self.db.close()
        with pytest.raises(softdb.Closed, match="open the database again"):
            len(self.db)
        self.durability, self.db = durability, softdb.open(self.path, verify=verify, durability=durability)
        self.same_again()
        self.tally["model: reopenings"] += 1
        if reader:
            self.open_reader(verify)

    def same_again(self) -> None:
        self.model.holds(self.db)
        stats = self.db.stats()
        assert {name: getattr(stats, name) for name in self.kind.schema} == self.kind.schema
        assert stats.fields == sorted(self.fields)

    @on_disk
    @rule(torn=st.booleans(), shared=st.booleans())
    def crash(self, torn: bool, shared: bool) -> None:
        """The directory as a SIGKILL leaves it, and perhaps what an append that did not commit has left."""
        self.release()
        assert self.path is not None
        left = self.place()
        ignored = None if shared else shutil.ignore_patterns("*-shm")
        self.db._store.run(shutil.copytree, self.path, left, ignore=ignored)  # nothing is flushed meanwhile
        self.db.close()
        shutil.rmtree(self.path)
        orphans = [left / "keys-99999999.npy", left / "index" / "hnsw-0123456789abcdef.faiss.tmp"]
        if torn:
            (left / "index").mkdir(exist_ok=True)
            for orphan in orphans:
                orphan.write_bytes(b"half")
        self.path, self.db = left, softdb.open(left, durability=self.durability)
        self.choose()
        self.same_again()
        assert not orphans[0].exists(), "the columns of an append that did not commit are still there"
        self.tally["model: crashes"] += 1

    def choose(self) -> None:
        """Go on from the state that a crash has left, which must be one that there was."""
        self.generation, fields = self.db.refresh(), set(self.db.stats().fields)
        left = [one for one in self.kept if one.generation <= self.generation]
        assert left, f"generation {self.generation} was left, {self.kept[0].generation} was flushed"
        left = [one for one in left if one.generation == left[-1].generation]
        assert fields in [one.fields for one in left]
        self.tally["model: crashes that undid relaxed changes"] += left[-1].model.records != self.model.records
        self.model, self.fields = left[-1].model.copy(), fields

    @on_disk
    @rule()
    def second_writer(self) -> None:
        with pytest.raises(softdb.DatabaseLocked, match="is being written by process"):
            softdb.open(self.path)

    # -- a reader ------------------------------------------------------------------------------------------------------

    @on_disk
    @rule(verify=st.booleans())
    def open_reader(self, verify: bool) -> None:
        self.release()
        self.db.flush()  # a reader sees flushed changes only
        self.reader = softdb.open(self.path, mode="r", verify=verify)
        self.caught_up(self.reader)

    def caught_up(self, reader: softdb.SoftDB) -> None:
        """It holds what the writer has committed."""
        self.seen = self.model.copy()
        generation = reader.refresh()
        assert generation == self.db.refresh() >= self.seen_generation, "a reader went back"
        self.seen_generation = generation
        assert len(reader) == len(self.seen)

    @with_reader
    @rule(seed=SEEDS, k=st.integers(1, 20))
    def reader_looks(self, seed: int, k: int) -> None:
        """Its vectors are those of one earlier commit; ids and payloads are looked up in the newest."""
        assert self.reader is not None
        self.db.flush()
        assert len(self.reader) == self.reader.count() == len(self.seen)
        draw, now = Draw(seed), {stored.row: one for one, stored in self.model.records.items()}
        queries = draw.queries(self.kind, self.seen.keys(draw.some(3, self.seen.compared(None))))
        hits = self.reader.search(queries, k=k, exact=True)
        if all(row in now for row in np.asarray(hits.rows).flat if row >= 0):
            self.seen.best(hits, queries, k, self.seen.compared(None))
        else:
            with pytest.raises(softdb.StaleRead, match="gone or replaced"):
                _ = hits.ids
        there = [one for one, stored in self.seen.records.items() if now.get(stored.row) == one]
        found = list(self.reader.scan(37))
        assert [one for part in found for one in part.ids] == there
        for part in found:
            self.model.same(part, part.ids)
        changed = list((self.seen.records.keys() | self.model.records.keys()) - set(there))
        for one in draw.some(3, sorted(changed, key=repr)):  # gone, replaced, or new
            assert one not in self.reader
            with pytest.raises(softdb.UnknownId, match=r"refresh\(\) shows it"):
                self.reader.get([one])

    @invariant()
    def reader_agrees(self) -> None:
        if self.reader is not None and self.steps % (3 if self.durability == "full" else 15) == 0:
            self.reader_looks(self.steps, 5)

    @with_reader
    @rule(seed=SEEDS, how=st.sampled_from(["refresh", "where", "verify", "snapshot"]))
    def reader_refreshes(self, seed: int, how: str) -> None:
        assert self.reader is not None
        self.db.flush()
        if how == "where":  # a filter needs vectors and payloads of one commit
            where = self.where(Draw(seed))
            assert [one for part in self.reader.scan(50, where) for one in part.ids] == self.model.matching(where)
            assert len(self.reader) == len(self.model)
        elif how == "verify":
            assert self.reader.verify() == len(self.model)
        elif how == "snapshot":
            copy = self.place()
            assert self.reader.snapshot(copy).records == len(self.model)
            with softdb.open(copy, mode="r") as db:
                self.model.holds(db)
            shutil.rmtree(copy)
        self.caught_up(self.reader)
        if how != "where":
            self.model.holds(self.reader)

    @with_reader
    @rule(seed=SEEDS)
    def reader_writes(self, seed: int) -> None:
        assert self.reader is not None
        key = np.ones((1, self.kind.dim))
        value = Draw(seed).values(1, self.kind)
        with pytest.raises(softdb.ReadOnly, match="read-only"):
            self.reader.upsert(Draw(seed).fresh(1, self.model.records), key, value)
        for write in (self.reader.compact, functools.partial(self.reader.delete, where={})):
            with pytest.raises(softdb.ReadOnly, match="read-only"):
                write()


class SmallMachine(_OnDisk):
    """Any kind of database, from nothing to some 200 records."""

    @initialize(kind=KINDS, memory=st.sampled_from([False, False, True]), fields=st.booleans(), durability=DURABILITIES)
    def start(self, kind: Kind, memory: bool, fields: bool, durability: Durability) -> None:
        self.begin(kind, memory, PLAIN_FIELDS[:2] if fields else [], durability)


class IndexedMachine(_OnDisk):
    """A thousand records and more, and an index over lists: it may miss a record, never show a wrong one."""

    most = 1600
    indexed = True

    def __init__(self, root: Path, tally: Counter[str]) -> None:
        super().__init__(root, tally)
        self.builds = 0

    @initialize(metric=st.sampled_from(["dot", "cosine", "l2"]), dtype=st.sampled_from(["float32", "float16"]))
    def start(self, metric: str, dtype: str) -> None:
        self.begin(Kind(8, None, 3, dtype, metric), False, ["year"])
        self.fill(1200, 0)
        self.db.build_index("ivf", recall=0.9)

    def fill(self, n: int, seed: int) -> None:
        draw = Draw(seed)
        keys = draw.numbers.standard_normal((n, self.kind.dim))
        ids, values, payloads = draw.fresh(n, self.model.records), draw.values(n, self.kind), draw.payloads(n)
        texts = draw.texts(n)
        self.db.insert(ids, keys, values, payloads, texts=texts)
        self.model.put(ids, keys, values, payloads, texts)

    @precondition(lambda self: len(self.model.compared(None)) < 1000)
    @rule(seed=SEEDS)
    def refill(self, seed: int) -> None:
        self.fill(500, seed)

    @precondition(lambda self: self.builds < 3 and len(self.model.compared(None)) >= 1000)
    @rule(kind=st.sampled_from(["ivf", "hnsw"]))
    def build_other(self, kind: str) -> None:
        self.builds += 1
        self.db.build_index(kind, recall=0.9)

    @rule(seed=SEEDS)
    def rewrite_all(self, seed: int) -> None:
        """Every record anew: rows go on, past the edges of segments, tombstones and checksums."""
        draw, ids = Draw(seed), self.model.compared(None)
        if not ids:
            return
        keys = draw.numbers.standard_normal((len(ids), self.kind.dim))
        self.db.update(ids, keys)
        self.model.change(ids, keys, None, None)
