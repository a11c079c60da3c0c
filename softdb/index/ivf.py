"""IVF: lists around centroids, 4-bit product-quantised codes scanned in registers (fast-scan).

Jégou et al. 2011, "Product quantization for nearest neighbor search"; André et al. 2015, "Cache locality is not
enough: high-performance nearest neighbor search with product quantization fast scan".
On sentence embeddings, lists with 4-bit codes and exact scores afterwards beat every graph at equal recall.
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from softdb.check import Metric
from softdb.index.contract import Floats, Index, faiss_module

__all__ = ["IVF", "lists_for"]

POINTS_A_LIST = 64  # that a list's centroid is trained on
ROUNDS = 10  # of k-means: more changes recall by less than 0.001


def lists_for(count: int) -> int:
    """About 4 √n lists, a power of two."""
    return int(1 << max(0, round(np.log2(4 * np.sqrt(max(count, 1))))))


def _parts(dim: int) -> int:
    """Codes a key: one for each 4 numbers, or for fewer where 4 does not divide the width or leaves less than 16."""
    return dim // next(width for width in (4, 3, 2, 1) if width == 1 or (dim % width == 0 and dim // width >= 16))


class IVF(Index):
    """Inverted lists of 4-bit codes: d / 8 bytes and an id a record. Search cost: (lists + probed records) codes."""

    kind: ClassVar[str] = "ivf"
    effort_name: ClassVar[str] = "nprobe"

    def __init__(self, metric: Metric, inner: Any) -> None:
        super().__init__(metric, inner)
        self.effort_most = int(inner.nlist)

    @classmethod
    def train(cls, metric: Metric, sample: Floats, count: int) -> Index:
        """Centroids by k-means, sub-codes by k-means on what the centroids leave."""
        faiss, dim = faiss_module(), sample.shape[1]
        lists = max(1, min(lists_for(count), len(sample) // 39))
        measure = faiss.METRIC_L2 if metric is Metric.L2 else faiss.METRIC_INNER_PRODUCT
        inner = faiss.index_factory(dim, f"IVF{lists},PQ{_parts(dim)}x4fs", measure)
        inner.cp.niter, inner.cp.seed, inner.cp.max_points_per_centroid = ROUNDS, 1234, POINTS_A_LIST
        inner.train(sample)
        return cls(metric, inner)

    def parameters(self, effort: int, selector: Any) -> Any:
        """How many lists are probed."""
        if selector is None:
            return faiss_module().SearchParametersIVF(nprobe=effort)
        return faiss_module().SearchParametersIVF(nprobe=effort, sel=selector)
