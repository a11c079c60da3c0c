"""The expected contents of a database as a dict of records, and its comparison with the database."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

import softdb
import softdb.answers

Id = int | str
Array = NDArray[Any]


@dataclass(frozen=True, eq=False)
class Truth:
    """One record as it must come back."""

    key: Any  # (d,), None where it has none
    value: Array | int | None  # (v,), a label, or None
    payload: Any
    text: str | None = None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Truth) and (
            np.array_equal(self.key, other.key)
            and np.array_equal(np.asarray(self.value), np.asarray(other.value))
            and bool(self.payload == other.payload)
            and self.text == other.text
        )


State = dict[Id, Truth]


class Model:
    """An encoder of texts that is a pure function of its name: numbers that are the same in either precision."""

    def __init__(self, name: str, dim: int, most: int | None = None) -> None:
        self.name, self.dim, self.most = name, dim, most  # the texts after which it fails

    def __call__(self, texts: Sequence[str]) -> Array:
        if self.most is not None:
            self.most -= len(texts)
            if self.most < 0:
                raise ModelFailed
        return np.stack([self.key(text) for text in texts])

    def key(self, text: str) -> Array:
        random = np.random.default_rng([crc32(self.name.encode()), crc32(text.encode())])
        numbers: Array = random.standard_normal(self.dim).astype(np.float16).astype(np.float32)
        return numbers

    def of(self, state: State, schema: dict[str, Any]) -> State:
        """Return the records after an encoder has made all keys anew; no value means no key where values exist."""
        valued = {"value_dim", "num_classes"} & set(schema)
        return {
            one: held if held.key is None and valued else replace(held, key=self.key(words(one, held.payload)))
            for one, held in state.items()
        }


class ModelFailed(Exception):
    """An error of an encoder."""


def words(one: Id, payload: Any) -> str:
    """The text of a record."""
    return f"{one!r} {payload}"


def text_of(record: softdb.answers.Record) -> str:
    """The truth of a stored record."""
    return words(record.id, record.payload)


def held(db: softdb.SoftDB) -> State:
    """Everything that a database holds, through `scan`."""
    found: State = {}
    for records in db.scan(1000):
        keys = np.asarray(records.keys)
        values = [None] * len(records.ids) if records.values is None else np.asarray(records.values)
        for i, one in enumerate(records.ids):
            assert one not in found, f"scan gives {one!r} twice"
            own = bool(records.keyed[i])
            key, value = (keys[i].copy(), _plain(values[i])) if own else (None, None)
            found[one] = Truth(key, value, records.payloads[i], records.texts[i])
    return found


def _plain(value: Any) -> Array | int | None:
    return value if value is None or np.ndim(value) else int(value)


def differences(found: State, expected: State) -> str:
    """In words, for a failing test; empty where there are none."""
    lost = [one for one in expected if one not in found]
    back = [one for one in found if one not in expected]
    other = [one for one in expected if one in found and found[one] != expected[one]]
    parts = [
        f"{len(ids)} {what}: {ids[:5]}" for what, ids in (("lost", lost), ("back", back), ("changed", other)) if ids
    ]
    return "; ".join(parts)


def check(db: softdb.SoftDB, *allowed: State) -> State:
    """Raise AssertionError unless the database holds exactly one of the states, by every kind of question.

    Returns that state.
    """
    found = held(db)
    told = [differences(found, state) for state in allowed]
    assert "" in told, f"none of {len(allowed)} states: {' | '.join(told)}"
    state = allowed[told.index("")]
    assert len(db) == db.count() == len(state)
    db.verify()
    if state:
        ids = list(state)
        records = db.get(ids)
        for i, one in enumerate(ids):
            assert one in db
            key = np.asarray(records.keys)[i] if records.keyed[i] else None
            assert np.array_equal(key, state[one].key), f"get gives another key for {one!r}"  # type: ignore[arg-type]
        hits = db.search(np.zeros((1, db.dim), np.float32), k=len(ids))
        keyed = [one for one in ids if state[one].key is not None]
        assert sorted(map(repr, hits.ids[0])) == sorted(map(repr, keyed)), "search and scan see different records"
        assert hits.texts[0] == [state[one].text for one in hits.ids[0]]
    return state
