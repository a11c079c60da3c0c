"""A pinned store goes on to read its generation: records, filters, searches and sums, while the database changes."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import softdb
from softdb.database import SoftDB
from softdb.database.versions import pinned
from softdb.store import Batch

DIM, IDS = 6, 60
Model = dict[str, tuple[Any, Any]]  # id -> key and payload


def changed(db: SoftDB, model: Model, chance: random.Random) -> None:
    """Upsert some records, and delete, compact or flush now and then."""
    ids = chance.sample([f"i{i}" for i in range(IDS)], 5)
    keys = np.random.default_rng(chance.randrange(1 << 30)).normal(size=(5, DIM)).astype(np.float32)
    payloads = [{"n": chance.randrange(4)} for _ in ids]
    db.upsert(ids, keys, payloads=payloads)
    model.update(zip(ids, zip(keys, payloads, strict=True), strict=True))
    if chance.random() < 0.5:
        for name in chance.sample(sorted(model), 3):
            db.delete([name])
            del model[name]
    if chance.random() < 0.2:
        db.compact()
    if chance.random() < 0.2:
        db.flush()


def require_same(view: SoftDB, model: Model, chance: random.Random) -> None:
    every = [f"i{i}" for i in range(IDS)]
    assert len(view) == len(model)
    assert [name in view for name in every] == [name in model for name in every]
    records = view.get(sorted(model))
    assert records.payloads == [model[name][1] for name in sorted(model)]
    keys = torch.from_numpy(np.stack([model[name][0] for name in sorted(model)]))
    assert torch.equal(records.keys, keys)
    wanted = chance.randrange(4)
    matches = [name for name in sorted(model) if model[name][1] == {"n": wanted}]
    assert sorted(name for batch in view.scan(where={"n": wanted}) for name in batch.ids) == matches
    query = torch.randn(2, DIM, generator=torch.Generator().manual_seed(wanted))
    hits = view.search(query, k=3, where={"n": wanted})
    for line, names, payloads in zip(query, hits.ids, hits.payloads, strict=True):
        best = sorted(matches, key=lambda name: -float(torch.from_numpy(model[name][0]) @ line))[:3]
        assert names[: len(best)] == best
        assert payloads[: len(best)] == [{"n": wanted}] * len(best)
    torch.testing.assert_close(view.attend(query).output, (query @ keys.T).softmax(1) @ keys, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("durability", ["full", "relaxed"])
def test_pinned_generations_answer_as_they_did(tmp_path: Path, durability: Any) -> None:
    chance, model, views = random.Random(0), Model(), list[tuple[SoftDB, Model]]()
    with softdb.open(tmp_path / "db", dim=DIM, durability=durability) as db:
        db.core.store.retain(-1)
        for _ in range(40):
            changed(db, model, chance)
            if model and chance.random() < 0.4:
                views.append((pinned(db), dict(model)))
            for view, old in chance.sample(views, min(3, len(views))):
                require_same(view, old, chance)
    assert len(views) > 10


def test_records_that_no_pinned_store_needs_are_forgotten() -> None:
    with softdb.open(None, dim=DIM) as db:
        db.core.store.retain(0)
        views = []
        for i in range(3):
            db.upsert(["a"], np.full((1, DIM), i), payloads=[{"i": i}])
            views.append(pinned(db))
        assert [view["a"].payload for view in views] == [{"i": 0}, {"i": 1}, {"i": 2}]
        db.core.store.retain(views[1].generation)
        assert [view["a"].payload for view in views[1:]] == [{"i": 1}, {"i": 2}]
        count = db.core.store.catalog.one("SELECT count(*) FROM retired")[0]
        assert count == 1


def test_a_pinned_store_outlives_neither_its_store_nor_closes_it() -> None:
    db = softdb.open(None, dim=DIM)
    db.insert(["a"], np.ones((1, DIM)))
    view = pinned(db)
    del view
    assert "a" in db
    view = pinned(db)
    db.close()
    with pytest.raises(softdb.errors.Closed):
        view.get(["a"])


def test_an_undone_delete_does_not_come_twice(tmp_path: Path) -> None:
    """A failed write rolls back the retained records with it."""
    with softdb.open(tmp_path / "db", dim=DIM) as db:
        db.core.store.retain(-1)
        db.insert(["a", "b"], np.ones((2, DIM)))
        view = pinned(db)
        with pytest.raises(softdb.errors.DuplicateId):
            db.core.store.apply(["a"], [Batch(["b"], np.ones((1, DIM), np.float32), None, [None], [None])], "{}")
        assert db.core.store.catalog.one("SELECT count(*) FROM retired")[0] == 0
        assert len(view) == len(db) == 2
        assert view.get(["a", "b"]).ids == ["a", "b"]


def test_filters_of_pinned_stores_take_numbers_and_arrays_of_numpy() -> None:
    db = softdb.open(None, dim=2)
    db.insert(list("abc"), np.eye(3, 2), payloads=[{"n": n} for n in range(3)])
    db.core.store.retain(-1)
    view = pinned(db)
    db.delete(["b"])
    for where in ({"n": np.int64(1)}, {"n": {"$in": np.arange(1, 2)}}):
        for _ in range(2):  # the second time from the cache
            assert view.search(np.ones((1, 2)), k=3, where=where).ids == [["b"]]
            assert db.search(np.ones((1, 2)), k=3, where=where).ids == [[]]
