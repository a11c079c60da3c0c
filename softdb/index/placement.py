"""Protocols of columns on the host or on devices. `softdb.device` implements those on devices.

An answer on the CPU reads a `Snapshot`, whose `placed` is None, and nothing else of this file.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from softdb.check import Metric
from softdb.index.query import Query
from softdb.store import Snapshot
from softdb.store.snapshot import Block

# torch's errors of a device that is full or lost; until 2.8 the latter had no name of its own
DEVICE_ERRORS = torch.cuda.OutOfMemoryError, getattr(torch, "AcceleratorError", torch.cuda.OutOfMemoryError)

Rows = NDArray[np.int64]
Live = NDArray[np.bool_]


class SoftmaxPass(NamedTuple):
    """The softmax of scale · metric(q, k) over every record that takes part."""

    queries: Tensor  # (q, d)
    metric: Metric
    scale: float
    keep: Tensor | None  # (size,) bool: records that take part; None: every live one
    mask: Tensor | None  # (q, size) bool, likewise for each query
    num_classes: int | None
    pools: bool  # False: lse alone is wanted


class ColumnPass(Protocol):
    """Columns on a device that computes softmax passes."""

    def pooled(self, what: SoftmaxPass) -> tuple[Tensor, Tensor] | None:  # (q, v), (q,)
        """Weighted mean of the values and lse, on the queries' device; lse is NaN if a score overflows.

        None if the columns do not fit on the device.
        """


class TensorPass(ColumnPass, Protocol):
    """Plain tensors on a device, which also searches them."""

    def nearest(self, what: SoftmaxPass, k: int) -> Rows | None:  # (q, k), -1 = none
        """Positions of the k nearest, best first, ties by position; None if a score overflows."""


class PlacedColumns(ColumnPass, Protocol):
    """A generation with columns on devices; rows and the mask of live records stay on the host.

    Read by position, as `softdb.store.snapshot.Snapshot` documents each method.
    """

    snapshot: Snapshot

    @property
    def placed(self) -> PlacedColumns:
        """Itself."""
        return self

    @property
    def generation(self) -> int:
        """The snapshot's."""
        return self.snapshot.generation

    @property
    def live(self) -> Live:
        """The snapshot's."""
        return self.snapshot.live

    @property
    def count(self) -> int:
        """The snapshot's."""
        return self.snapshot.count

    @property
    def size(self) -> int:
        """The snapshot's."""
        return self.snapshot.size

    def rows(self, positions: Rows) -> Rows:
        """As `Snapshot.rows`."""
        return self.snapshot.rows(positions)

    def positions(self, rows: Rows) -> Rows:
        """As `Snapshot.positions`."""
        return self.snapshot.positions(rows)

    @property
    def value_size(self) -> float:
        """As `Snapshot.value_size`."""

    def keys_at(self, positions: Rows) -> Tensor:
        """As `Snapshot.keys_at`, on the device."""

    def values_at(self, positions: Rows) -> Tensor:
        """As `Snapshot.values_at`, on the device."""

    def blocks(self, size: int, allowed: Live | None = None, start: int = 0) -> Iterator[Block]:
        """As `Snapshot.blocks`: keys and values on the device, positions on the host."""

    def place(self, pools: bool) -> str:
        """Suffix of an answer's `finder`: " on cuda:0" or " streamed to cuda:0"."""

    def scores_at(
        self,
        queries: NDArray[np.float32],  # (q, d)
        positions: Rows,  # (q, c), -1 = none
        metric: Metric,
        dtype: torch.dtype,
    ) -> NDArray[Any]:  # (q, c)
        """Exact scores of candidates, -inf for none, computed on the device; only scores are copied to the host."""

    def radius_search(self, query: Query) -> Rows:  # (q, m), -1 = none
        """As `softdb.index.flat.radius_search`."""


RecordColumns: TypeAlias = Snapshot | PlacedColumns
"""Columns of one generation. `placed` is None for columns on the host, which kernels read in place."""
