"""FAISS' GPU part, pretended on the CPU: it refuses what a GPU refuses, records what it is asked, and answers."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import faiss
import numpy as np
import pytest
import torch

from softdb.device import Board, faiss_lists, probe

MOST = 2048
DEVICE = torch.device("cpu", 0)  # tells itself apart from the plain "cpu" where it is shown


class Resources:
    """Stand-in for a stream, on which work is ordered."""

    def __init__(self) -> None:
        self.stream: Any = "FAISS' own"
        self.set: list[Any] = []

    def getDefaultStream(self, device: int) -> Any:
        return self.stream

    def setDefaultStream(self, device: int, stream: Any) -> None:
        assert device == 0
        self.stream = stream
        self.set.append(stream)


class GpuIndex:
    """An index of the CPU behind the walls of a GPU."""

    def __init__(self, fake: FakeGpu, resources: Resources, inner: Any) -> None:
        self.fake, self.resources, self.inner, self.busy = fake, resources, inner, threading.Lock()

    def __getattr__(self, name: str) -> Any:
        assert name in ("ntotal", "nlist", "d", "cp", "is_trained"), f"a GPU index has no {name}"
        return getattr(self.inner, name)

    def _ordered(self) -> None:
        assert self.resources.stream == self.fake.stream, "not on torch's stream"

    def train(self, sample: Any) -> None:
        self._ordered()
        self.inner.train(sample)

    def add_with_ids(self, keys: Any, rows: Any) -> None:
        self._ordered()
        self.inner.add_with_ids(keys, rows)

    def search_c(self, q: int, queries: Any, c: int, scores: Any, rows: Any, parameters: Any) -> None:
        assert self.busy.acquire(blocking=False), "two threads at once"
        try:
            self._ordered()
            assert 0 < c <= MOST
            assert 0 < parameters.nprobe <= MOST
            assert parameters.sel is None
            self.fake.asked.append((q, c, parameters.nprobe))
            self.inner.search_c(q, queries, c, scores, rows, parameters)
        finally:
            self.busy.release()

    def remove_ids(self, selector: Any) -> None:
        raise RuntimeError("remove_ids not implemented for this type of index")


class Options:
    """Options of a copy of an index."""

    use_cuvs = True  # as builds with cuVS have it
    useFloat16 = False


class FakeGpu:
    """Log of the work, and torch's stream."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, int, int]] = []  # queries, results, lists of each search
        self.uploads = 0
        self.stream: Any = 7

    def to_gpu(self, resources: Resources, device: int, inner: Any, options: Options) -> GpuIndex:
        """A copy, of what a GPU takes."""
        assert device == 0
        assert not options.use_cuvs
        kind: Any = faiss.IndexIVFPQ
        if isinstance(inner, kind):
            assert inner.pq.nbits == 8
            assert inner.by_residual
            assert inner.pq.M in (1, 2, 3, 4, 8, 12, 16, 20, 24, 28, 32, 40, 48, 56, 64, 96)
            assert options.useFloat16 or inner.pq.M * 1024 <= 48 << 10
            inner.do_polysemous_training = False  # which only a CPU does, for seconds
            inner.pq.cp.niter, inner.pq.cp.max_points_per_centroid = 5, 16
        else:
            assert isinstance(inner, faiss.IndexIVFScalarQuantizer)
        self.uploads += 1
        return GpuIndex(self, resources, faiss.clone_index(inner))

    def to_cpu(self, index: GpuIndex) -> Any:
        return faiss.clone_index(index.inner)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGpu]:
    """FAISS with a GPU part, and every database on a board that is really the CPU."""
    pretended = FakeGpu()
    for name, what in {
        "StandardGpuResources": Resources,
        "GpuClonerOptions": Options,
        "index_cpu_to_gpu": pretended.to_gpu,
        "index_gpu_to_cpu": pretended.to_cpu,
        "get_num_gpus": lambda: 1,
        "cast_integer_to_cudastream_t": lambda address: address,
    }.items():
        monkeypatch.setattr(faiss, name, what, raising=False)
    monkeypatch.setattr(faiss_lists, "current_stream", lambda device: pretended.stream)
    monkeypatch.setattr(probe, "FEW", 500)
    monkeypatch.setattr(Board, "of", classmethod(lambda cls, devices, dtype=None: cls(DEVICE, dtype=dtype)))
    faiss_lists._resources.cache_clear()
    yield pretended
    faiss_lists._resources.cache_clear()


def pretend(monkeypatch: pytest.MonkeyPatch, cards: int = 1) -> None:
    """Let "cpu:0" mean so many devices that are really the CPU; "cpu" stays the CPU."""

    def of(cls: type[Board], devices: Any, dtype: Any = None) -> Board | None:
        there = devices is not None and devices[0].index is not None
        return None if not there else cls(*(torch.device("cpu", i) for i in range(cards)), dtype=dtype)

    monkeypatch.setattr(Board, "of", classmethod(of))


def recall(found: Any, exact: Any) -> float:
    """Share of the true nearest that were found."""
    there = exact >= 0
    return float(((found[:, None] == exact[:, :, None]).any(2) & there).sum() / max(1, np.count_nonzero(there)))
