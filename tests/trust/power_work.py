"""Workloads: the verbs of a database's life, each recorded with the state that it leaves."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import apsw
import numpy as np
from oracle import Model, ModelFailed, State, Truth, text_of
from power_log import Held, Record

import softdb
from softdb.store import disk

__all__ = ["Work", "a_life", "another_model", "labels", "relaxed", "rounds", "without_values"]


class Work:
    """One database under a recorder. Every verb is the database's own, and records the expected state."""

    def __init__(self, record: Record, path: Path, durable: bool = True, **create: Any) -> None:
        self.record, self.path, self.durable = record, path, durable
        self.create: dict[str, Any] = {"dim": 4, **create}
        self.state: State = {}
        self.fields: tuple[str, ...] = ()
        self.rng = np.random.default_rng(0)
        self.db: Any = None
        self.longer = 1  # times the id's text in a payload
        self.timeline = record.timeline(path, self.create)

    # -- the handle --------------------------------------------------------------------------------------------------

    def make(self) -> None:
        """Create the database."""
        self.record.phase = "create"
        self.fields = tuple(sorted(self.create.get("fields", ())))
        states = [Held({}), Held({}, self.fields)][not self.fields :]  # made, then the fields declared
        self.record.begin(self.timeline, len(states))
        self.db = softdb.open(self.path, **self.create)
        self.record.acknowledge(self.timeline, *states, durable=self.durable)

    def reopen(self, **options: Any) -> None:
        """Close the handle and open another one."""
        self.close()
        self._begin("reopen")
        self.db = softdb.open(self.path, **options)
        self.fields = tuple(sorted({*self.fields, *options.get("fields", ())}))
        self._done(self.state)

    def close(self) -> None:
        """Close the handle."""
        self.record.phase = "close"
        self.db.close()
        self.record.flushed(self.timeline)

    # -- verbs -------------------------------------------------------------------------------------------------------

    def insert(self, *ids: int | str) -> None:
        """Add records of these ids."""
        self._add("append", self.db.insert, list(ids))

    def upsert(self, *ids: int | str) -> None:
        """Add or replace records of these ids."""
        self._add("append", self.db.upsert, list(ids))

    def update_keys(self, *ids: int | str) -> None:
        """Give stored records new keys."""
        keys, old = self._keys(len(ids)), [self.state[one] for one in ids]
        values = self._values(len(ids)) if any(one.key is None for one in old) else None
        self._begin("append")
        self.db.update(list(ids), keys, values)
        own = [one.value for one in old] if values is None else values
        new = {one: replace(old[i], key=keys[i], value=own[i]) for i, one in enumerate(ids)}
        self._done({**self.state, **new})

    def update_payloads(self, *ids: int | str) -> None:
        """Give stored records new payloads, and new texts where no encoder would make keys of them."""
        payloads, texts, old = self._payloads(ids), self._texts(ids), [self.state[one].text for one in ids]
        given = {} if self.db.encoder_name else {"texts": texts}
        self._begin("catalogue")
        self.db.update(list(ids), payloads=payloads, **given)
        texts = given.get("texts", old)
        new = {one: replace(self.state[one], payload=payloads[i], text=texts[i]) for i, one in enumerate(ids)}
        self._done({**self.state, **new})

    def delete(self, *ids: int | str) -> None:
        """Delete stored records."""
        self._begin("catalogue")
        assert self.db.delete(list(ids)) == len(ids)
        self._done({one: truth for one, truth in self.state.items() if one not in ids})

    # -- what changes no record --------------------------------------------------------------------------------------

    def index_field(self, name: str) -> None:
        """Declare a field."""
        self._begin("catalogue")
        self.db.index_field(name)
        self.fields = tuple(sorted({*self.fields, name}))
        self._done(self.state)

    def index_text(self) -> None:
        """Index the texts: from then on `verify` compares the index with them."""
        self._begin("catalogue")
        self.db.index_text()
        self._done(self.state)

    def drop_field(self, name: str) -> None:
        """Drop a declared field."""
        self._begin("catalogue")
        self.db.drop_field(name)
        self.fields = tuple(field for field in self.fields if field != name)
        self._done(self.state)

    def build_index(self, kind: str) -> None:
        """Build an index file and have the catalogue know it."""
        self.record.phase = "index"
        self.db.build_index(kind)

    def compact(self) -> None:
        """Compact."""
        self.record.phase = "compact"
        self.db.compact()

    def reembed(self, name: str, dim: int, most: int | None = None) -> None:
        """Reembed by an encoder that fails after so many texts, which changes nothing."""
        model = Model(name, dim, most)
        self._begin("reembed")
        try:
            self.db.reembed(model, field=text_of, batch_size=16)
        except ModelFailed:
            self._done(self.state)
            return
        self.create = {**self.create, "dim": dim}
        self._done(model.of(self.state, self.create))

    def checkpoint(self) -> None:
        """Checkpoint as SQLite does by itself after a thousand pages."""
        self.record.phase = "checkpoint"
        with self.db._store.writer.rewriting():
            self.db._store.catalog.connection.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_PASSIVE)

    def snapshot(self, path: Path) -> None:
        """Copy the database, and watch the copy from then on."""
        timeline = self.record.timeline(path)
        self.record.phase = "snapshot"
        self.record.begin(timeline)
        self.db.snapshot(path)
        self.record.acknowledge(timeline, Held(self.state, self.fields))

    def flush(self) -> None:
        """Make all that was acknowledged durable."""
        self.record.phase = "flush"
        self.db.flush()
        self.record.flushed(self.timeline)

    # -- their parts -------------------------------------------------------------------------------------------------

    def _begin(self, phase: str) -> None:
        self.record.phase = phase
        self.record.begin(self.timeline)

    def _done(self, state: State) -> None:
        self.state = state
        self.record.acknowledge(self.timeline, Held(state, self.fields), durable=self.durable)

    def _add(self, phase: str, verb: Any, ids: list[int | str]) -> None:
        """Every fifth of several without a key."""
        given, values, payloads = self._keys(len(ids)), self._values(len(ids)), self._payloads(ids)
        keyless, texts = [i % 5 == 4 for i in range(len(ids))], self._texts(ids)
        keys = [None if none else given[i] for i, none in enumerate(keyless)]
        own = None if values is None else [None if none else values[i] for i, none in enumerate(keyless)]
        self._begin(phase)
        verb(ids, keys, own, payloads, texts=texts)
        new = {one: Truth(keys[i], None if own is None else own[i], payloads[i], texts[i]) for i, one in enumerate(ids)}
        self._done({**self.state, **new})

    def _keys(self, count: int) -> Any:
        dtype = self.create.get("dtype", "float32")
        return self.rng.standard_normal((count, self.create["dim"])).astype(dtype)

    def _values(self, count: int) -> Any:
        if "num_classes" in self.create:
            return self.rng.integers(0, self.create["num_classes"], count)
        width = self.create.get("value_dim")
        dtype = self.create.get("dtype", "float32")
        return None if width is None else self.rng.standard_normal((count, width)).astype(dtype)

    def _texts(self, ids: Any) -> list[str | None]:
        return [None if n % 3 else f"{n} {one}" * self.longer for n, one in enumerate(ids)]

    def _payloads(self, ids: Any) -> list[Any]:
        some = self.rng.integers(0, 1000, len(ids)).tolist()
        return [{"n": n, "of": str(one) * self.longer} for n, one in zip(some, ids, strict=True)]


# -- workloads -------------------------------------------------------------------------------------------------------


def a_life(record: Record, root: Path) -> None:
    """Every verb, each once or twice: the log that is mutated, so no longer than it must be."""
    work = Work(record, root / "data" / "db", value_dim=2, fields=["n"])
    work.make()
    work.insert(*range(40))
    work.insert(40)
    work.insert(*range(41, 101))  # fills a segment and begins another
    work.index_text()
    work.upsert(3, 4, 5, "a", "b")
    work.delete(*range(20, 40))
    work.build_index("ivf")
    work.checkpoint()
    work.delete(11)  # a WAL that begins anew with a short commit,
    work.update_payloads(12)
    work.checkpoint()
    work.insert(*(f"c{i}" for i in range(70)))  # and anew with a longer one: old commits show if its head is lost
    work.compact()
    work.insert("d")
    work.snapshot(root / "copy")
    work.drop_field("n")
    work.reopen()
    work.insert("e")
    work.close()


def without_values(record: Record, root: Path) -> None:
    """The key serves as the value: one column, in a directory that the user has made and not synced."""
    record.phase = "user"
    disk.make(root / "mine")
    disk.make(root / "mine" / "db")
    work = Work(record, root / "mine" / "db", dtype="float16", metric="l2")
    work.make()
    work.insert("a")
    work.insert(*range(70))
    work.delete(*range(0, 70, 2))
    work.compact()
    work.insert("b")
    work.close()


def labels(record: Record, root: Path) -> None:
    """Labels and payloads of several pages; a reader all the while; everything deleted; a copy of a copy."""
    work = Work(record, root / "db", num_classes=5, metric="cosine")
    work.longer = 700
    work.make()
    with softdb.open(work.path, mode="r") as reader:
        work.insert(*range(30))
        work.upsert(*range(20, 50))
        reader.refresh()
        work.delete(*range(50))
        work.compact()
        work.insert(*range(5))
        work.snapshot(root / "copies" / "first")
        work.index_field("of")
        work.update_keys(1, 2)
    work.reopen(verify=True)
    work.compact()
    work.snapshot(root / "copies" / "second")
    work.close()


def relaxed(record: Record, root: Path) -> None:
    """Verbs that gather and come to disk at `flush` and at `close`: whole ones may be lost, from the last one back."""
    work = Work(record, root / "db", durable=False, value_dim=2, durability="relaxed")
    work.make()
    work.index_text()
    work.insert(*range(50))
    work.insert("a")
    work.flush()
    work.insert(*range(50, 120))
    work.update_payloads(1, 2)
    work.upsert(3, 4, "b")
    work.delete(*range(10, 20))
    work.flush()
    work.update_keys(5, 6)
    work.build_index("ivf")
    work.delete(7)
    work.compact()
    work.insert("c")
    work.snapshot(root / "copy")
    work.insert("d")
    work.reopen(durability="relaxed")
    work.insert("e")
    work.close()


def another_model(record: Record, root: Path) -> None:
    """Reembedding by encoders of several widths; one run fails and another resumes it."""
    work = Work(record, root / "db", value_dim=2, fields=["n"])
    work.make()
    work.insert(*range(70))
    work.delete(*range(0, 70, 9))
    work.build_index("ivf")
    work.reembed("one", 3)
    work.insert("a", "b")
    work.reembed("two", 5, most=40)
    work.update_payloads(1, 2)
    work.reopen()
    work.insert("c")
    work.reembed("two", 5)
    work.upsert("a", 3)
    work.compact()
    work.reembed("three", 5)
    work.snapshot(root / "copy")
    work.close()


def rounds(record: Record, root: Path) -> None:
    """Several rounds of growing, deleting, compacting, with indexes built anew and the WAL begun anew."""
    work = Work(record, root / "data" / "a" / "b" / "db", value_dim=3, metric="l2")
    work.make()
    for n in range(4):
        ids = [f"{n}-{i}" for i in range(90 + 30 * n)]
        work.insert(*ids)
        work.build_index("ivf")
        work.upsert(*ids[:7], f"{n}-more")
        work.checkpoint()
        work.update_payloads(*ids[5:9])
        work.delete(*ids[::3])
        work.compact()
        if n % 2:
            work.reopen(fields=["n"])
        work.insert(f"{n}-last")
    work.build_index("flat")
    work.snapshot(root / "copy")
    work.close()
