"""Databases and encoders for tests of softdb.nn.View, and plain torch over all encoded keys."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import softdb
from softdb.nn import View
from worlds import D

WIDE, CLASSES = 4, 6
KINDS: list[dict[str, Any]] = [{}, {"num_classes": CLASSES}, {"value_dim": None}]


def mlp(d: int = D, wide: int = WIDE, dtype: torch.dtype = torch.float64) -> torch.nn.Sequential:
    return torch.nn.Sequential(torch.nn.Linear(d, 7), torch.nn.Tanh(), torch.nn.Linear(7, wide)).to(dtype)


def loops(metric: str, queries: Tensor, encoded: Tensor) -> Tensor:
    """Scores (q, n), one by one, from the equations."""
    rows = []
    for q in queries:
        for key in encoded:
            if metric == "dot":
                rows.append((q * key).sum())
            elif metric == "l2":
                rows.append(-(q - key).square().sum())
            else:
                rows.append((q * key).sum() / (q.square().sum().sqrt() * key.square().sum().sqrt()))
    return torch.stack(rows).view(len(queries), len(encoded))


def dense(
    db: softdb.SoftDB, encoder: Callable[[Tensor], Tensor], metric: str, queries: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    """Output and lse over every record, by plain torch."""
    records = db.get(list(range(len(db))))
    encoded = encoder(records.keys.to(queries.dtype))
    scores = loops(metric, queries, encoded) / temperature
    if records.values is None:
        values = encoded
    elif records.values.is_floating_point():
        values = records.values.to(queries.dtype)
    else:
        values = torch.nn.functional.one_hot(records.values, CLASSES).to(queries.dtype)
    return scores.softmax(1) @ values, scores.logsumexp(1)


def move(encoder: torch.nn.Module, by: float) -> None:
    """Move the parameters of an encoder, as training does."""
    with torch.no_grad():
        for parameter in encoder.parameters():
            parameter.add_(by * torch.randn_like(parameter))


def true_ids(view: View, queries: Tensor, k: int, metric: str = "l2") -> list[list[Any]]:
    """Ids of the k best by the current encoder, by sorting every score."""
    found: list[Any] = [record for batch in view.db.scan() for record in zip(batch.ids, batch.keys, strict=True)]
    with torch.no_grad():
        encoded = view.encoder(torch.stack([key for _, key in found]).to(queries.dtype))
        order = loops(metric, queries, encoded).sort(dim=1, descending=True, stable=True).indices[:, :k]
    return [[found[i][0] for i in row] for row in order.tolist()]


class Gated(torch.nn.Module):
    """An encoder that waits until it may go on, in threads other than the first."""

    def __init__(self, gate: threading.Event) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(D, WIDE).double()
        self.held = _Gate(gate)

    def forward(self, keys: Tensor) -> Tensor:
        if threading.current_thread() is not threading.main_thread():
            assert self.held.gate.wait(60)
            if self.held.broken:
                raise RuntimeError("out of memory")
        encoded: Tensor = self.inner(keys)
        return encoded


class _Gate:
    def __init__(self, gate: threading.Event) -> None:
        self.gate, self.broken = gate, False

    def __deepcopy__(self, memo: dict[int, Any]) -> _Gate:
        return self
