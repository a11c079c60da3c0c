"""A database with ties, queries and their positives, for tests of the losses."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from reference import Floats, cosine, dot, negative_l2
from torch import Tensor
from worlds import awkward

import softdb

N, D, Q, CLASSES = 40, 5, 4, 3
POSITIVES: list[Any] = [3, [0, 1], [7, 20, 8], [39]]  # a zero key, a pair of duplicates
SCORES: dict[Any, Callable[[Floats, Floats], float]] = {"dot": dot, "cosine": cosine, "l2": negative_l2}


def filled(metric: Any = "dot", **words: Any) -> tuple[softdb.SoftDB, Floats]:
    """A database of awkward records, ids 0 … N - 1, and its keys."""
    keys = awkward(np.random.default_rng(3), N, D)
    db = softdb.open(None, dim=D, metric=metric, **words)
    values: Any = None
    if "value_dim" in words:
        values = np.random.default_rng(4).standard_normal((N, words["value_dim"]))
    elif "num_classes" in words:
        values = np.arange(N) % words["num_classes"]
    db.insert(range(N), keys, values, [{"odd": i % 2 == 1} for i in range(N)])
    return db, keys.astype(np.float64)


def asking(seed: int = 0, q: int = Q) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(q, D, dtype=torch.float64, generator=generator, requires_grad=True)


def log_sum(logits: list[float]) -> float:
    top = max(logits)
    return math.log(sum(math.exp(one - top) for one in logits)) + top


def logits_of(queries: Tensor, keys: Floats, metric: str, temperature: float) -> list[list[float]]:
    asked = queries.detach().numpy().astype(np.float64)
    return [[SCORES[metric](q, key) / temperature for key in keys] for q in asked]


@functools.cache
def clustered() -> tuple[softdb.SoftDB, Tensor, list[list[int]]]:
    """30 000 records of 60 clusters with an IVF index; queries near their positives."""
    random = np.random.default_rng(0)
    centres = random.standard_normal((60, 16))
    keys = centres[random.integers(0, 60, 30_000)] + 0.7 * random.standard_normal((30_000, 16))
    keys /= np.linalg.norm(keys, axis=1, keepdims=True)
    db = softdb.open(None, dim=16)
    db.insert(range(30_000), keys)
    db.build_index("ivf", recall=0.9)
    positives = random.integers(0, 30_000, (6, 2))
    queries = keys[positives[:, 0]] + 0.1 * random.standard_normal((6, 16))
    return db, torch.tensor(queries, dtype=torch.float32), positives.tolist()
