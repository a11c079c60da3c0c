"""IVF: lists around centroids, and in them short codes that are scanned in registers (fast-scan).

Jégou et al. 2011, "Product quantization for nearest neighbor search"; André et al. 2015, "Cache locality is not
enough: high-performance nearest neighbor search with product quantization fast scan"; Gao and Long 2024, "RaBitQ",
arXiv 2405.12497. Lists with 4-bit codes and exact scores afterwards beat every graph at equal recall: on sentence
embeddings with a code for 4 numbers, on keys in dense clusters with a code for each.
"""

from __future__ import annotations

import functools
from typing import Any, ClassVar

import numpy as np

from softdb.check import Metric
from softdb.index.contract import Floats, Index, faiss_module, measure_of

POINTS_A_LIST = 64  # that a list's centroid is trained on
ROUNDS = 10  # of k-means: more changes recall by less than 0.001
EXPLAINED = 0.5  # share of the keys' variance, from which on codes of what the centroids leave are the better ones
ID = 8  # bytes
FACTORS = 8  # bytes of a RaBitQ code, beside its bits


def lists_for(count: int) -> int:
    """About √n lists, a power of two: short codes are scanned so fast that more lists only cost recall."""
    return int(1 << max(0, round(np.log2(np.sqrt(max(count, 1))))))


def _parts(dim: int, widest: int) -> int:
    """Codes a key: one for each `widest` numbers, or for fewer where that does not divide the width or leaves few."""
    fits = (width for width in range(widest, 1, -1) if dim % width == 0 and dim // width >= 16)
    return dim // next(fits, 1)


class IVF(Index):
    """Inverted lists of 4-bit codes: d / 8 to d / 2 bytes and an id a record. Cost: (lists + probed records) codes."""

    kind: ClassVar[str] = "ivf"
    effort_name: ClassVar[str] = "nprobe"
    chooses_residual: ClassVar[bool] = True  # whether to code keys or what the centroids leave; else FAISS' default

    def __init__(self, metric: Metric, inner: Any) -> None:
        super().__init__(metric, inner)
        self.effort_most = int(inner.nlist)

    @classmethod
    def codes(cls, dim: int) -> tuple[str, ...]:
        """A 4-bit code for each 4, 2 or 1 numbers."""
        return tuple(f"PQ{parts}x4fs" for parts in dict.fromkeys(_parts(dim, widest) for widest in (4, 2, 1)))

    @classmethod
    def record_bytes(cls, dim: int, codes: str) -> int:
        """Half a byte a part."""
        return -(-int(codes.removeprefix("PQ").partition("x")[0]) // 2) + ID

    @classmethod
    def train(cls, metric: Metric, sample: Floats, count: int, codes: str) -> Index:
        """Centroids by k-means, then the codes."""
        inner = cls.untrained(metric, sample, count, codes)
        inner.train_q1(len(sample), faiss_module().swig_ptr(sample), False, measure_of(metric))
        if cls.chooses_residual:
            # for L2 every probed list would need tables of its own: five times slower than finer codes
            inner.by_residual = metric is not Metric.L2 and _explained(inner.quantizer, sample) > EXPLAINED
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


class IVFSQ8(IVF):
    """Inverted lists of 8-bit scalar codes: d bytes and an id a record. Exact almost, and slow to scan."""

    kind: ClassVar[str] = "ivf-sq8"
    chooses_residual: ClassVar[bool] = False

    @classmethod
    def codes(cls, dim: int) -> tuple[str, ...]:
        """A byte a number."""
        return ("SQ8",)

    @classmethod
    def record_bytes(cls, dim: int, codes: str) -> int:
        """A byte a number."""
        return dim + ID


class IVFRaBitQ(IVF):
    """Inverted lists of a bit a number, rotated by their signs alone: the best recall for d / 8 bytes a record."""

    kind: ClassVar[str] = "ivf-rabitq"
    chooses_residual: ClassVar[bool] = False  # the codes are made for what the centroids leave

    @classmethod
    def codes(cls, dim: int) -> tuple[str, ...]:
        """A bit a number."""
        return ("RaBitQfs",)

    @classmethod
    def record_bytes(cls, dim: int, codes: str) -> int:
        """A bit a number and what corrects it."""
        return -(-dim // 8) + FACTORS + ID


@functools.lru_cache(maxsize=64)
def _probing(effort: int) -> Any:
    """Parameters that FAISS only reads: to make them takes microseconds, which a single query feels."""
    return faiss_module().SearchParametersIVF(nprobe=effort)


def _explained(quantizer: Any, sample: Floats) -> float:
    """Share of the variance of keys (m, d) that their centroids explain."""
    some = sample[:: max(1, len(sample) // 4096)]
    centroids = quantizer.reconstruct_n(0, quantizer.ntotal)[quantizer.search(some, 1)[1][:, 0]]
    whole = float(np.square(some - some.mean(0)).sum())
    return 1 - float(np.square(some - centroids).sum()) / whole if whole else 0.0
