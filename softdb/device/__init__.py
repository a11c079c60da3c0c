"""GPUs: copies of a database's columns there, FAISS there, and Triton's kernels, which torch can stand in for.

It implements the protocols of `softdb.index.placement` and `softdb.index.contract.Devices`; `softdb.database` hands it
to them, and `index` and `attend` never import it. Begin with `board`, or with `pooled` for tensors alone.
"""

from __future__ import annotations

from softdb.device.availability import usable
from softdb.device.board import Board
from softdb.device.placed import placed_tensors, served
from softdb.device.pooled import nearest, pooled

__all__ = ["Board", "nearest", "placed_tensors", "pooled", "served", "usable"]
