"""Recall under filters meets its target, whether the filter correlates with the keys or not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import softdb

pytest.importorskip("faiss")
pytest.importorskip("softdb.kernels._native")

N, D = 40_000, 48
GOAL = 0.95


def clustered(random: np.random.Generator, count: int) -> NDArray[Any]:
    """Clusters, the i-th with 1 / i of the records of the first."""
    sizes = 1 / np.arange(1, 201)
    centres = np.random.default_rng(1).standard_normal((200, D))
    drawn = random.choice(200, count, p=sizes / sizes.sum())
    return centres[drawn] + 0.7 * random.standard_normal((count, D))


def flat(random: np.random.Generator, count: int) -> NDArray[Any]:
    """Keys near a space of 12 dimensions, without clusters."""
    within = np.random.default_rng(1).standard_normal((12, D))
    return random.standard_normal((count, 12)) @ within + 0.1 * random.standard_normal((count, D))


@pytest.mark.slow
@pytest.mark.parametrize(("world", "metric"), [(clustered, "l2"), (clustered, "dot"), (flat, "cosine")])
def test_filtered_recall_meets_its_target(world: Any, metric: Any) -> None:
    random = np.random.default_rng(0)
    keys, tuned, queries = (world(random, count).astype(np.float32) for count in (N, 500, 200))
    ranks = np.argsort(np.argsort([random.random(N), keys[:, 3], keys @ keys[5]], axis=1), axis=1) / N
    names = "random", "coordinate", "likeness"
    with softdb.open(None, dim=D, metric=metric) as db:
        payloads = [dict(zip(names, line, strict=True)) for line in ranks.T.tolist()]
        db.insert(range(N), keys, payloads=payloads)
        db.build_index("ivf", recall=GOAL, queries=tuned)
        recalls = {
            (name, share): recall(db, queries, {name: {"$gt": 1 - share}})
            for name in names
            for share in (0.5, 0.1, 0.01)
        }
    assert min(recalls.values()) > GOAL - 0.04, recalls
    assert np.mean(list(recalls.values())) > GOAL


def recall(db: softdb.SoftDB, queries: Any, where: dict[str, Any]) -> float:
    near, exact = (db.search(queries, where=where, exact=exact).rows for exact in (False, True))
    return float((near[:, :, None] == exact[:, None]).any(2).float().mean())
