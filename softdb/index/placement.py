"""Interfaces of columns that are stored on the host or on devices. `softdb.device` implements columns on devices.

Code that computes on the CPU reads a `Snapshot`, whose `placed` is None.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Protocol, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from softdb.check import Metric
from softdb.index.query import Query
from softdb.store import Snapshot
from softdb.store.snapshot import Block

# errors that torch raises for a full or a lost device; before torch 2.8 AcceleratorError did not exist
DEVICE_ERRORS = torch.cuda.OutOfMemoryError, getattr(torch, "AcceleratorError", torch.cuda.OutOfMemoryError)

Rows = NDArray[np.int64]
Live = NDArray[np.bool_]


class SoftmaxPass(NamedTuple):
    """Arguments of a softmax over scale · metric(q, k) of every record that takes part."""

    queries: Tensor  # (q, d)
    metric: Metric
    scale: float | Tensor  # a tensor (q,): scales of the queries, for dot products and cosines
    keep: Tensor | None  # (size,) bool: records that take part; None: every live one
    mask: Tensor | None  # (q, size) bool: records that take part for each query
    num_classes: int | None
    pools: bool  # False: only lse is computed


class ColumnPass(Protocol):
    """Columns on a device that computes softmaxes over all records."""

    def pooled(self, what: SoftmaxPass) -> tuple[Tensor, Tensor] | None:  # (q, v), (q,)
        """Return the weighted mean of the values, and lse, on the queries' device. lse is NaN if a score overflows.

        Return None if the columns do not fit on the device.
        """


class TensorPass(ColumnPass, Protocol):
    """Keys and values that are plain tensors on a device. The device computes softmaxes and searches."""

    def nearest(self, what: SoftmaxPass, k: int) -> Rows | None:  # (q, k), -1 = none
        """Return the positions of the k nearest, best first, ties by position. Return None if a score overflows."""


class PlacedColumns(ColumnPass, Protocol):
    """The columns of one generation on devices. Rows and the mask of live records stay on the host.

    The methods correspond to those of `softdb.store.snapshot.Snapshot`.
    """

    snapshot: Snapshot

    @property
    def placed(self) -> PlacedColumns:
        """This object itself. For columns on the host the attribute of this name is None."""
        return self

    @property
    def generation(self) -> int:
        """Generation of the snapshot."""
        return self.snapshot.generation

    @property
    def live(self) -> Live:
        """Mask (size,) of the live records."""
        return self.snapshot.live

    @property
    def count(self) -> int:
        """Number of live records."""
        return self.snapshot.count

    @property
    def size(self) -> int:
        """Number of positions, dead records included."""
        return self.snapshot.size

    def rows(self, positions: Rows) -> Rows:
        """Return the rows at positions, as `Snapshot.rows` does."""
        return self.snapshot.rows(positions)

    def positions(self, rows: Rows) -> Rows:
        """Return the positions of rows, as `Snapshot.positions` does."""
        return self.snapshot.positions(rows)

    @property
    def value_size(self) -> float:
        """Root mean square of ‖v‖ over a sample of the values v."""

    def keys_at(self, positions: Rows) -> Tensor:
        """Return the keys at positions, as `Snapshot.keys_at` does, in a tensor on the device."""

    def values_at(self, positions: Rows) -> Tensor:
        """Return the values at positions, as `Snapshot.values_at` does, in a tensor on the device."""

    def blocks(self, size: int, allowed: Live | None = None, start: int = 0) -> Iterator[Block]:
        """Yield blocks of records as `Snapshot.blocks` does: keys and values on the device, positions on the host."""

    def place(self, pools: bool) -> str:
        """Return the text to append to an answer's `finder`: " on cuda:0" or " streamed to cuda:0"."""

    def radius_search(self, query: Query) -> Rows:  # (q, m), -1 = none
        """Return all records within a radius, as `softdb.index.flat.radius_search` does."""


RecordColumns: TypeAlias = Snapshot | PlacedColumns
"""The columns of one generation. `placed` is None for columns on the host, which kernels read in place."""
