"""Inverted lists of FAISS: a GPU's index when it is on the CPU, for index files and for moves between devices.

An index of kind "ivf" that is built on the CPU is another class, `softdb.index.lists`, which no GPU can hold.
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from softdb.check import Metric
from softdb.index.contract import Floats, Index, faiss_module, measure_of

POINTS_A_LIST = 64  # largest number of training points for each centroid
ROUNDS = 10  # rounds of k-means; more rounds change recall by less than 0.001
ID = 8  # bytes of an id


def lists_for(count: int) -> int:
    """Return the number of lists for `count` records: about √count, a power of two."""
    return int(1 << max(0, round(np.log2(np.sqrt(max(count, 1))))))


class IVF(Index):
    """Inverted lists with one byte for each number of a key. A search reads all centroids and the probed codes."""

    kind: ClassVar[str] = "ivf"
    effort_name: ClassVar[str] = "nprobe"

    def __init__(self, metric: Metric, inner: Any) -> None:
        super().__init__(metric, inner)
        self.effort_most = int(inner.nlist)

    @classmethod
    def loaded(cls, metric: Metric, data: NDArray[np.uint8], dim: int | None) -> Index:
        """Read the bytes that `dump` wrote. Raises ValueError for an index of an earlier version of softdb."""
        index = super().loaded(metric, data, dim)
        if isinstance(index, IVF) and isinstance(index.inner, faiss_module().IndexIVFFastScan):
            raise ValueError("an earlier version of softdb made its 4-bit codes")
        return index

    @classmethod
    def record_bytes(cls, dim: int, codes: str) -> int:
        """Return the bytes of a record: one for each number of its key, and an id."""
        return dim + ID

    @classmethod
    def train(cls, metric: Metric, sample: Floats, count: int, codes: str) -> Index:
        """Return an empty index whose centroids (by k-means) and codes are trained on the sample."""
        lists = max(1, min(lists_for(count), len(sample) // 39))
        inner = cls.uploaded(faiss_module().index_factory(sample.shape[1], f"IVF{lists},{codes}", measure_of(metric)))
        inner.cp.niter, inner.cp.seed, inner.cp.max_points_per_centroid = ROUNDS, 1234, POINTS_A_LIST
        inner.train(sample)
        return cls(metric, inner)

    @classmethod
    def uploaded(cls, inner: Any) -> Any:
        """Move a FAISS index to this engine's device and return it. On the CPU: return it unchanged."""
        return inner

    def parameters(self, effort: int, selector: Any) -> Any:
        """Return FAISS search parameters. The effort is the number of lists that are probed."""
        return faiss_module().SearchParametersIVF(nprobe=effort, **({} if selector is None else {"sel": selector}))

    @property
    def lists(self) -> int:
        """Number of lists."""
        return int(self.inner.nlist)


class IVFSQ8(IVF):
    """Inverted lists with 8-bit scalar codes, under the name "ivf-sq8" that the engine has on GPUs."""

    kind: ClassVar[str] = "ivf-sq8"
