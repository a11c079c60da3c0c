"""The soft query and the nearest records by Triton on a CUDA device, and the same in torch where Triton is not."""

from __future__ import annotations

from softdb.gpu.nearest import nearest
from softdb.gpu.pooled import pooled
from softdb.gpu.usable import usable

__all__ = ["nearest", "pooled", "usable"]
