"""Databases for tests of softdb.nn.Memory, and what dense torch makes of their records."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

import softdb
from softdb.nn import Memory
from worlds import N, V, clusters, holding


def large(n: int = 12_000, **schema: Any) -> softdb.SoftDB:
    """Open a database of enough records for an index, in clusters."""
    random = np.random.default_rng(0)
    return holding(clusters(random, n, spread=1, apart=3), random.standard_normal((n, V)), **schema)


def stored(db: softdb.SoftDB, n: int = N) -> tuple[Tensor, Tensor]:
    records = db.get(list(range(n)))
    return records.keys, records.keys if records.values is None else records.values


def moved(memory: Memory, which: Tensor, to: Tensor) -> None:
    """Move keys as training would, and tell the memory that they had a gradient."""
    assert memory.keys is not None
    with torch.no_grad():
        memory.keys[which] = to
    memory.keys.grad = torch.sparse_coo_tensor(which[None], torch.zeros(len(which), to.shape[1]), memory.keys.shape)
    memory._mark(memory.keys)
    memory.keys.grad = None


def trained(memory: Memory, queries: Tensor, steps: int = 3) -> None:
    optimizer: torch.optim.Optimizer = torch.optim.SparseAdam(list(memory.parameters()), lr=0.05)
    for _ in range(steps):
        optimizer.zero_grad()
        memory(queries).output.square().sum().backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    optimizer.zero_grad()
