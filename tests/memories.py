"""Databases for tests of softdb.nn.Memory, and what dense torch makes of their records."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import softdb
from softdb.nn import Memory

N, D, V = 40, 5, 3


def filled(n: int = N, d: int = D, v: int | None = V, path: Any = None, **words: Any) -> softdb.SoftDB:
    """Ids 0 … n - 1; with ties, a duplicate and a zero key."""
    db = softdb.open(path, dim=d, value_dim=v, **words)
    keys = torch.randn(n, d)
    if n > 3:
        keys[1], keys[2], keys[3] = keys[0], 0, -keys[0]
    values = torch.arange(n) % 4 if "num_classes" in words else None if v is None else torch.randn(n, v)
    if n:
        db.insert(list(range(n)), keys, values, [{"odd": i % 2 == 1} for i in range(n)])
    return db


def large(n: int = 12_000, d: int = 16, **words: Any) -> softdb.SoftDB:
    """Enough records for an index, in clusters."""
    centres = torch.randn(64, d) * 3
    db = softdb.open(None, dim=d, value_dim=V, **words)
    db.insert(list(range(n)), centres[torch.arange(n) % 64] + torch.randn(n, d), torch.randn(n, V))
    return db


def stored(db: softdb.SoftDB, n: int = N) -> tuple[Tensor, Tensor]:
    records = db.get(list(range(n)))
    return records.keys, records.keys if records.values is None else records.values


def moved(memory: Memory, which: Tensor, to: Tensor) -> None:
    """As if trained: keys stand elsewhere, and the memory knows that they had a gradient."""
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
