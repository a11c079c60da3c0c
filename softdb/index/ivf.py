"""Inverted lists of FAISS: the form on the CPU of an index that was made on a GPU, in which it is kept and moved.

`softdb.index.lists` is what an index of kind "ivf" is on the CPU; it has no form on a GPU.
"""

from __future__ import annotations

import functools
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from softdb.check import Metric
from softdb.index.contract import Floats, Index, Numbers, Rows, faiss_module, measure_of

POINTS_A_LIST = 64  # that a list's centroid is trained on
ROUNDS = 10  # of k-means: more changes recall by less than 0.001
ID = 8  # bytes


def lists_for(count: int) -> int:
    """About √n lists, a power of two."""
    return int(1 << max(0, round(np.log2(np.sqrt(max(count, 1))))))


class IVF(Index):
    """Inverted lists of bytes. Cost: (lists + probed records) codes."""

    parts = 0  # of a code whose errors are known one by one
    kind: ClassVar[str] = "ivf"
    effort_name: ClassVar[str] = "nprobe"

    def __init__(self, metric: Metric, inner: Any) -> None:
        super().__init__(metric, inner)
        self.effort_most = int(inner.nlist)

    @classmethod
    def loaded(cls, metric: Metric, data: NDArray[np.uint8], dim: int | None) -> Index:
        """By FAISS' own reader."""
        index = super().loaded(metric, data, dim)
        if isinstance(index, IVF) and isinstance(index.inner, faiss_module().IndexIVFFastScan):
            raise ValueError("its 4-bit codes are FAISS', as an earlier version made them")
        return index

    @classmethod
    def codes(cls, dim: int) -> tuple[str, ...]:
        """A byte a number."""
        return ("SQ8",)

    @classmethod
    def record_bytes(cls, dim: int, codes: str) -> int:
        """A byte a number."""
        return dim + ID

    @classmethod
    def train(cls, metric: Metric, sample: Floats, count: int, codes: str) -> Index:
        """Centroids by k-means, then the codes."""
        inner = cls.untrained(metric, sample, count, codes)
        inner.train(sample)
        return cls(metric, inner)

    @classmethod
    def untrained(cls, metric: Metric, sample: Floats, count: int, codes: str) -> Any:
        """The FAISS index that `train` trains."""
        lists = max(1, min(lists_for(count), len(sample) // 39))
        inner = cls.uploaded(faiss_module().index_factory(sample.shape[1], f"IVF{lists},{codes}", measure_of(metric)))
        inner.cp.niter, inner.cp.seed, inner.cp.max_points_per_centroid = ROUNDS, 1234, POINTS_A_LIST
        return inner

    @classmethod
    def uploaded(cls, inner: Any) -> Any:
        """A FAISS index of the CPU, where this engine's lie."""
        return inner

    def parameters(self, effort: int, selector: Any) -> Any:
        """Search parameters; the effort is the number of lists that are probed."""
        return _probing(effort) if selector is None else faiss_module().SearchParametersIVF(nprobe=effort, sel=selector)

    @property
    def lists(self) -> int:
        """Number of lists."""
        return int(self.inner.nlist)

    @property
    def centroids(self) -> Floats:
        """(lists, d)."""
        found: Floats = self.inner.quantizer.reconstruct_n(0, self.inner.nlist)
        return found

    def members(self) -> tuple[Rows, Rows]:
        """Copies of FAISS' ids."""
        faiss, lists = faiss_module(), self.inner.invlists
        sizes = [lists.list_size(i) for i in range(lists.nlist)]
        starts = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
        rows = np.empty(starts[-1], np.int64)
        for i, size in enumerate(sizes):
            if size:
                rows[starts[i] : starts[i + 1]] = faiss.rev_swig_ptr(lists.get_ids(i), size)
        return rows, starts

    def turned(self, vectors: Floats) -> Floats:  # (q, d) -> (q, 0)
        """Vectors as the parts of codes see them: there are none."""
        return vectors[:, :0]

    def near_in_lists(self, queries: Floats, order: Rows, nearness: Floats, count: int) -> tuple[Rows, Floats, Numbers]:
        """As `Lists.near_in_lists`, by FAISS, whose scores by bytes are not rounded."""
        faiss, q, l2 = faiss_module(), len(queries), self.metric is Metric.L2
        distances = -nearness if l2 else nearness
        rows, codes = np.empty((q, count), np.int64), np.empty((q, count), np.float32)
        asked, pointer = np.ascontiguousarray(queries), faiss.swig_ptr
        self.inner.search_preassigned_c(
            q, pointer(asked), count, pointer(order), pointer(distances), pointer(codes), pointer(rows), False,
            faiss.SearchParametersIVF(nprobe=order.shape[1]),
        )  # fmt: skip
        if l2:
            np.negative(codes, out=codes)
        codes[rows < 0] = -np.inf
        return rows, codes, np.zeros(q)


class IVFSQ8(IVF):
    """Inverted lists of 8-bit scalar codes, under the name that a GPU has for them."""

    kind: ClassVar[str] = "ivf-sq8"


@functools.lru_cache(maxsize=64)
def _probing(effort: int) -> Any:
    """Parameters that FAISS only reads: to make them takes microseconds, which a single query feels."""
    return faiss_module().SearchParametersIVF(nprobe=effort)
