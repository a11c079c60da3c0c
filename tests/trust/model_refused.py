"""Wrong input: what must be refused by a typed error that says why, with nothing changed."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from model_oracle import Records
from model_world import Draw, Id

import softdb
from softdb import BadInput, DuplicateId, UnknownId

Refusal = tuple[str, type[Exception], str, Callable[[], object]]  # name, error, message and call


def refusals(db: softdb.SoftDB, model: Records, draw: Draw, folder: Path) -> list[Refusal]:
    """All wrong inputs for this database in its state."""
    found = [*_batches(db, model, draw), *_numbers(db, model, draw), *_questions(db, model, draw, folder)]
    return found + (_stored(db, model, draw) if len(model) else [])


def _deep(depth: int) -> Any:
    return [] if depth == 0 else [_deep(depth - 1)]


def _batches(db: softdb.SoftDB, model: Records, draw: Draw) -> list[Refusal]:
    """Wrong ids and payloads, each behind valid records."""
    ids = draw.fresh(3, model.records)
    keys, values = draw.vectors(3, model.kind.dim, model.kind), draw.values(3, model.kind)
    wrong_ids: list[tuple[Any, type[Exception], str]] = [
        (True, BadInput, "is of type bool"),
        (1.0, BadInput, "is of type float"),
        (None, BadInput, "is of type NoneType"),
        (b"x", BadInput, "is of type bytes"),
        (2**63, BadInput, "more than 64 bits"),
        (-(2**63) - 1, BadInput, "more than 64 bits"),
        ("\ud800", BadInput, "lone surrogate"),
        (ids[0], DuplicateId, "comes twice"),
    ]
    wrong_payloads: list[tuple[Any, str]] = [
        (float("inf"), "cannot represent"),
        ({"x": [float("-inf")]}, "cannot represent"),
        ({1: 2}, "JSON keys are text"),
        ({"x": {1, 2}}, "holds a set"),
        (b"x", "holds a bytes"),
        (_deep(65), "nests deeper"),
        ({"x": "\ud800"}, "lone surrogate"),
    ]
    verbs: list[tuple[str, Callable[..., object]]] = [("insert", db.insert), ("upsert", db.upsert)]
    name, verb = draw.random.choice(verbs)
    return [
        *(
            (f"{name}: id {one!r}", error, match, functools.partial(verb, [*ids[:2], one], keys, values))
            for one, error, match in wrong_ids
        ),
        *(
            (f"{name}: payload {one!r}", BadInput, match, functools.partial(verb, ids, keys, values, [1, None, one]))
            for one, match in wrong_payloads
        ),
        (f"{name}: no ids", BadInput, "empty batch", lambda: verb([], keys[:0], values)),
        (f"{name}: two payloads", BadInput, "2 payloads for 3 ids", lambda: verb(ids, keys, values, [1, 2])),
    ]


def _numbers(db: softdb.SoftDB, model: Records, draw: Draw) -> list[Refusal]:
    """Keys and values."""
    kind, ids = model.kind, draw.fresh(3, model.records)
    keys, values = draw.vectors(3, kind.dim, kind), draw.values(3, kind)
    nan, wide, large = keys.copy(), np.ones((3, kind.dim + 1)), keys.copy()
    nan[2, -1] = draw.random.choice([np.nan, np.inf, -np.inf])
    large[1, 0] = 65520 if kind.dtype == "float16" else 1e39
    found: list[Refusal] = [
        ("keys: NaN", BadInput, "NaN or infinity", lambda: db.upsert(ids, nan, values)),
        ("keys: too wide", BadInput, "wide", lambda: db.upsert(ids, wide, values)),
        ("keys: too large", BadInput, "NaN or infinity", lambda: db.upsert(ids, large, values)),
        ("keys: ragged", BadInput, "ragged|dimensions|wide", lambda: db.upsert(ids, [[1], [1, 2], [3]], values)),
        ("keys: text", BadInput, "expected real numbers|without an encoder", lambda: db.upsert(ids, "abc", values)),
        ("keys: two", BadInput, "2 keys for 3 ids", lambda: db.upsert(ids, keys[:2], values)),
    ]
    if not kind.has_values:
        return [*found, ("values", BadInput, "no value column", lambda: db.upsert(ids, keys, keys))]
    found.append(("no values", BadInput, "values are missing", lambda: db.upsert(ids, keys)))
    if kind.num_classes is not None:
        high = np.array([0, 0, kind.num_classes])
        return [
            *found,
            ("label too high", BadInput, "out of range", lambda: db.upsert(ids, keys, high)),
            ("label -1", BadInput, "out of range", lambda: db.upsert(ids, keys, [0, -1, 0])),
            ("label 0.5", BadInput, "integer class labels", lambda: db.upsert(ids, keys, [0.5, 0, 0])),
        ]
    bad = np.ones((3, kind.value_dim or 0))
    bad[0, 0] = np.nan
    return [*found, ("values: NaN", BadInput, "NaN or infinity", lambda: db.upsert(ids, keys, bad))]


def _stored(db: softdb.SoftDB, model: Records, draw: Draw) -> list[Refusal]:
    """Input that is wrong because of the stored records."""
    (one,), fresh = draw.some(1, model.records), draw.fresh(2, model.records)
    ids: list[Id] = [*fresh, one]
    keys, values = draw.vectors(3, model.kind.dim, model.kind), draw.values(3, model.kind)
    return [
        ("insert what is stored", DuplicateId, "is stored already", lambda: db.insert(ids, keys, values, [1, 2, 3])),
        ("update: not stored", UnknownId, "is not stored", lambda: db.update([one, fresh[0]], payloads=[1, 2])),
        ("update: keys, not stored", UnknownId, "is not stored", lambda: db.update([one, fresh[0]], keys=keys[:2])),
        ("update: nothing", BadInput, "nothing to change", lambda: db.update([one])),
        ("update: bad payload", BadInput, "holds a set", lambda: db.update([one], keys[:1], payloads=[{1}])),
        ("upsert: bad payload", BadInput, "holds a set", lambda: db.upsert(ids, keys, values, [1, 2, {3}])),
        ("update: payload {}", BadInput, "JSON keys", lambda: db.update([one], payloads=[{None: 1}])),
    ]


def _questions(db: softdb.SoftDB, model: Records, draw: Draw, folder: Path) -> list[Refusal]:
    """Deletes, filters, queries, files."""
    fresh = draw.fresh(2, model.records)
    query = np.ones((2, model.kind.dim))
    where: list[tuple[dict[Any, Any], str]] = [
        ({"x": {"$gt": None}}, "only numbers and strings"),
        ({"x": {"$near": 1}}, "unknown operator"),
        ({"$x": 1}, "unknown operator"),
        ({1: 1}, "field names are str"),
        ({"x": float("nan")}, "compared with"),
        ({"x": 2**63}, "compared with"),
        ({"x": {}}, "empty dict"),
        ({"x": {"$in": 3}}, "take a list"),
        ({"\ud800": 1}, "not Unicode"),
    ]
    filters: list[Refusal] = []
    for one, match in where:
        filters += [
            (f"delete where {one!r}", BadInput, match, functools.partial(db.delete, where=one)),
            (f"search where {one!r}", BadInput, match, functools.partial(db.search, query, where=one)),
        ]
    (folder / "taken").mkdir(exist_ok=True)
    (folder / "taken" / "file").touch()
    return [
        *filters,
        ("get", UnknownId, "is not stored", lambda: db.get(fresh)),
        ("delete: neither", BadInput, "give ids or where", lambda: db.delete()),
        ("delete: both", BadInput, "give ids or where", lambda: db.delete(fresh, {})),
        ("delete: None", BadInput, "expected str or int", lambda: db.delete([None])),  # type: ignore[list-item]
        ("search: k=0", BadInput, "expected a whole number", lambda: db.search(query, k=0)),
        ("search: wide", BadInput, "wide", lambda: db.search(np.ones(model.kind.dim + 1))),
        ("search: NaN", BadInput, "NaN or infinity", lambda: db.search(query * np.nan)),
        ("search: both", BadInput, "radius and k are both given", lambda: db.search(query, k=1, radius=0.5)),
        ("attend: temperature 0", BadInput, "finite number above 0", lambda: db.attend(query, temperature=0)),
        ("attend: mask", BadInput, "mask has shape", lambda: db.attend(query, mask=np.ones(len(model) + 1, bool))),
        ("index_field", BadInput, "can have no index", lambda: db.index_field("year", "q\0")),
        ("drop_field", BadInput, "has no index", lambda: db.drop_field("never declared")),
        ("build_index: kind", BadInput, "kind", lambda: db.build_index("tree")),
        ("snapshot: taken", BadInput, "that is not empty", lambda: db.snapshot(folder / "taken")),
        ("open: nothing", softdb.NotADatabase, "holds no database", lambda: softdb.open(folder / "nothing", mode="r")),
    ]
