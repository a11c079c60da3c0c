"""Answers on GPUs: copies of a database's columns, FAISS indexes, and Triton kernels or equal torch operations.

The package implements the protocols of `softdb.index.placement` and `softdb.index.contract.Devices`. `softdb.database`
passes objects of this package to `index` and `attend`, which never import it. Begin reading with module `board`.
"""

from __future__ import annotations

from softdb.device.availability import usable
from softdb.device.board import Board
from softdb.device.placed import placed_tensors, served
from softdb.device.pooled import nearest, pooled

__all__ = ["Board", "nearest", "placed_tensors", "pooled", "served", "usable"]
