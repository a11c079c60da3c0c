"""Batches whose records belong together, to detect a view that holds a batch in part or mixes two.

Batch b has the ids "b:0" … "b:SIZE-1", each with key (APART b, i, 1, …), value (b, version) and payload
{"batch": b, "of": SIZE, "version": version}.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

import softdb

SIZE = 16  # records a batch
DIM = 8
APART = 100  # farther than the records of one batch are from each other


def ids(batch: int) -> list[str]:
    """The ids of a batch."""
    return [f"{batch}:{i}" for i in range(SIZE)]


def content(batch: int, version: int = 0) -> dict[str, Any]:
    """Keys, values and payloads of a batch, as words for a verb."""
    keys = np.zeros((SIZE, DIM), np.float32)
    keys[:, 0], keys[:, 1], keys[:, 2] = APART * batch, np.arange(SIZE), 1
    payloads = [{"batch": batch, "of": SIZE, "version": version} for _ in range(SIZE)]
    return {"keys": keys, "values": np.tile(np.array([batch, version], np.float32), (SIZE, 1)), "payloads": payloads}


def near(batch: int) -> torch.Tensor:
    """A query whose SIZE nearest are a batch."""
    return torch.tensor([[float(APART * batch), 7.4, 1.0] + [0.0] * (DIM - 3)])


def write(db: softdb.SoftDB, batch: int) -> None:
    """Insert a batch."""
    db.insert(ids(batch), **content(batch))


def open_empty(path: Any, **how: Any) -> softdb.SoftDB:
    """A new database for such batches."""
    return softdb.open(path, dim=DIM, value_dim=2, metric="l2", **how)


def whole(records: list[softdb.Records], in_part: Callable[[int], bool] = lambda _: False) -> set[int]:
    """The batches that some records make up. Raises AssertionError where one is mixed, or there in part but may not."""
    counts: Counter[int] = Counter()
    versions: dict[int, int] = {}
    for part in records:
        keys, values = part.keys.numpy(), part.values
        assert values is not None
        for i, (name, payload) in enumerate(zip(part.ids, part.payloads, strict=True)):
            batch, place = map(int, str(name).split(":"))
            version = versions.setdefault(batch, payload["version"])
            named = (payload["batch"], payload["of"], payload["version"])
            said = (*keys[i, :2].tolist(), *values[i].tolist(), *named)
            assert said == (APART * batch, place, batch, version, batch, SIZE, version), f"{name} is mixed: {said}"
            counts[batch] += 1
    torn = {batch: count for batch, count in counts.items() if count != SIZE and not in_part(batch)}
    assert not torn, f"batches in part (number: records of {SIZE}): {torn}"
    return {batch for batch, count in counts.items() if count == SIZE}


def seen(db: softdb.SoftDB) -> set[int]:
    """Batches of a database at rest, read in every way; all ways must agree."""
    found = whole(list(db.scan(100)))
    assert len(db) == db.count() == SIZE * len(found)
    for batch in sorted(found)[:: max(1, len(found) // 3)]:
        assert db.count({"batch": batch}) == SIZE
        assert whole([db.get(ids(batch))]) == {batch}
        assert sorted(map(str, db.search(near(batch), k=SIZE, exact=True).ids[0])) == sorted(ids(batch))
    if found:
        pooled = db.attend(torch.zeros(1, DIM), weights="uniform").output[0, 0]
        assert abs(float(pooled) - float(np.mean(sorted(found)))) <= 1e-3 * max(found)
    return found
