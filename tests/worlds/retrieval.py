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

import softdb
import worlds
from worlds import D, N, clusters, indexed

Q, CLASSES = 4, 3
POSITIVES: list[Any] = [3, [0, 1], [7, 20, 8], [39]]  # a zero key, a pair of duplicates
SCORES: dict[Any, Callable[[Floats, Floats], float]] = {"dot": dot, "cosine": cosine, "l2": negative_l2}


def with_keys(metric: Any = "dot", value_dim: int | None = None, **schema: Any) -> tuple[softdb.SoftDB, Floats]:
    """Open a database of awkward records with ids 0 … N - 1; return it and its keys."""
    db = worlds.filled(N, D, value_dim, metric=metric, **schema)
    return db, db.get(range(N)).keys.double().numpy()


def asking(seed: int = 0, q: int = Q) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(q, D, dtype=torch.float64, generator=generator, requires_grad=True)


def log_sum(logits: list[float]) -> float:
    top = max(logits)
    return math.log(sum(math.exp(logit - top) for logit in logits)) + top


def logits_of(queries: Tensor, keys: Floats, metric: str, temperature: float) -> list[list[float]]:
    asked = queries.detach().numpy().astype(np.float64)
    return [[SCORES[metric](q, key) / temperature for key in keys] for q in asked]


@functools.cache
def clustered() -> tuple[softdb.SoftDB, Tensor, list[list[int]]]:
    """30 000 records of 60 clusters with an IVF index; queries near their positives."""
    random = np.random.default_rng(0)
    keys = clusters(random, 30_000)
    keys /= np.linalg.norm(keys, axis=1, keepdims=True)
    db = indexed(keys, recall=0.9)
    positives = random.integers(0, 30_000, (6, 2))
    queries = keys[positives[:, 0]] + 0.1 * random.standard_normal((6, 16))
    return db, torch.tensor(queries, dtype=torch.float32), positives.tolist()
