"""Small sources for tests: snapshots held in memory, and tensors, as what answers are asked of."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from softdb.attend import Columns, Request, Source, Stored
from softdb.attend.request import Live
from softdb.check import Metric, Schema
from softdb.store.snapshot import Snapshot
from softdb.weights import Softmax, Sparse


def stored(snapshot: Snapshot, dim: int = 1, num_classes: int | None = None, value_dim: int | None = None) -> Stored:
    """A snapshot as a source; widths are needed only where no stored column gives them."""
    for segment in snapshot.segments[:1]:
        dim = segment.keys.shape[1]
        labels = segment.values is not None and segment.values.ndim == 1
        value_dim = None if segment.values is None or labels else segment.values.shape[1]
        num_classes = num_classes if labels else None
    schema = Schema(dim, value_dim, num_classes, np.dtype(np.float32), Metric.DOT)
    finder: Any = None  # no search is run
    return Stored(snapshot, schema, finder, lambda rows, payloads=True, texts=False: {})


def stream(
    queries: Tensor,
    records: Snapshot | Columns,
    score: Any,
    temperature: float,
    *,
    allowed: Live | None = None,
    mask: Tensor | None = None,
    num_classes: int | None = None,
    value_dim: int | None = None,
    sparse: Sparse | None = None,
) -> tuple[Tensor, Tensor]:  # (q, v), (q,)
    """The answer over every record, and its log-normaliser."""
    request = Request(queries, score, sparse or Softmax(), temperature, allowed=allowed, mask=mask)
    source: Source
    if isinstance(records, Columns):
        source = Columns(records.keys, records.values, num_classes)
    else:
        source = stored(records, queries.shape[1], num_classes, value_dim)
    return source.stream(request)
