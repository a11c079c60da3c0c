"""Inverted lists of FAISS: the form of a GPU's index on the CPU, for files and for moves between devices.

`softdb.index.lists` is what an index of kind "ivf" is on the CPU; it has no form on a GPU.
"""

from __future__ import annotations

import functools
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from softdb.check import Metric
from softdb.index.contract import Floats, Index, faiss_module, measure_of

POINTS_A_LIST = 64  # most points that train a centroid
ROUNDS = 10  # of k-means: more changes recall by less than 0.001
ID = 8  # bytes of an id


def lists_for(count: int) -> int:
    """About √n lists, a power of two."""
    return int(1 << max(0, round(np.log2(np.sqrt(max(count, 1))))))


class IVF(Index):
    """Inverted lists of bytes. Cost: (lists + probed records) codes."""

    kind: ClassVar[str] = "ivf"
    effort_name: ClassVar[str] = "nprobe"

    def __init__(self, metric: Metric, inner: Any) -> None:
        super().__init__(metric, inner)
        self.effort_most = int(inner.nlist)

    @classmethod
    def loaded(cls, metric: Metric, data: NDArray[np.uint8], dim: int | None) -> Index:
        """Read what `dump` wrote."""
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
        """A FAISS index on this engine's device."""
        return inner

    def parameters(self, effort: int, selector: Any) -> Any:
        """Search parameters; the effort is the number of lists that are probed."""
        return _probing(effort) if selector is None else faiss_module().SearchParametersIVF(nprobe=effort, sel=selector)

    @property
    def lists(self) -> int:
        """Number of lists."""
        return int(self.inner.nlist)


class IVFSQ8(IVF):
    """Inverted lists of 8-bit scalar codes, under the engine's name on GPUs."""

    kind: ClassVar[str] = "ivf-sq8"


@functools.lru_cache(maxsize=64)
def _probing(effort: int) -> Any:
    """Search parameters, cached, as making them takes microseconds. FAISS only reads them."""
    return faiss_module().SearchParametersIVF(nprobe=effort)
