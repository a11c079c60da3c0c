"""Indexes on a GPU: FAISS' inverted lists, searched with tensors on the GPU, on torch's own stream.

FAISS scans 4-bit codes on a CPU only. On a GPU, index `ivf` codes 2 to 16 elements of a key in a byte (few bytes are
fast and save memory), and `ivf-sq8` codes each element in a byte, nearly exactly. FAISS on a GPU has two more limits,
which module `probe` handles. It returns at most 2048 results a query; for more, all records are compared. It has no
filters and deletions; more records are fetched and filtered afterwards, and if too few remain, all are compared.

`faiss.contrib.torch_utils` is not used: it replaces the methods of every index in the process, and its `search` takes
no parameters. FAISS gets the tensors' addresses instead.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
from collections.abc import Iterator
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from softdb.check import Metric
from softdb.errors import MissingDependency
from softdb.index.contract import Devices, Floats, Index, Rows, faiss_module
from softdb.index.ivf import ID, IVF, IVFSQ8

MOST = 2048  # largest number of results, or of lists, for a query: FAISS' limit on a GPU
PARTS = (96, 64, 56, 48, 40, 32, 28, 24, 20, 16, 12, 8, 4, 3, 2, 1)  # numbers of subvectors that FAISS supports
MANY, WIDE, WIDEST = 48, 8, 16  # a subvector has at most WIDE elements, or WIDEST if there are MANY or more
TABLES = 48  # most subvectors whose float32 tables fit in 48 KiB of shared memory; else float16 tables
QUERIES = 4096  # number of queries searched at once

_log = logging.getLogger("softdb")


def gpu_faiss(device: torch.device | None = None) -> Any:
    """Import FAISS. Raises MissingDependency if FAISS has no GPU support, or does not see the device."""
    faiss = faiss_module()
    if not hasattr(faiss, "StandardGpuResources"):
        raise MissingDependency(
            f"an index on a GPU needs the GPU build of FAISS, but the CPU build {faiss.__version__} is installed; "
            "pip uninstall faiss-cpu, then pip install 'softdb[gpu]'; or use device='cpu', or kind flat, without it"
        )
    if device is not None and (device.index or 0) >= faiss.get_num_gpus():  # FAISS would end the process
        raise MissingDependency(
            f"torch sees {device}, but FAISS {faiss.__version__} sees {faiss.get_num_gpus()} GPUs: its CUDA and "
            "the driver do not fit; install a FAISS for the driver, or use device='cpu', or kind flat, without it"
        )
    return faiss


class _Resources(NamedTuple):
    """FAISS' streams and scratch memory for this process, with a lock: only one thread at a time may use them."""

    inner: Any
    lock: threading.RLock


@functools.cache
def _resources() -> _Resources:
    return _Resources(gpu_faiss().StandardGpuResources(), threading.RLock())


def current_stream(device: torch.device) -> int:
    """Return the address of torch's current CUDA stream on a device."""
    return int(torch.cuda.current_stream(device).cuda_stream)


@contextlib.contextmanager
def session(device: torch.device) -> Iterator[Any]:
    """Lock FAISS' resources for a `with` block, in which FAISS runs on torch's current stream of the device."""
    faiss, resources, ordinal = gpu_faiss(), _resources(), device.index or 0
    with resources.lock:
        before = resources.inner.getDefaultStream(ordinal)
        resources.inner.setDefaultStream(ordinal, faiss.cast_integer_to_cudastream_t(current_stream(device)))
        try:
            yield resources.inner
        finally:  # the caller's stream may end before the resources
            resources.inner.setDefaultStream(ordinal, before)


class OnGPU(IVF):
    """Base of indexes with inverted lists on a GPU. `engines` makes subclasses for one device of a database."""

    device: ClassVar[torch.device]
    host: ClassVar[type[IVF]]  # class of the index on the CPU, which is stored on disk

    def __init__(self, metric: Metric, inner: Any) -> None:
        super().__init__(metric, inner)
        self.effort_most = min(MOST, self.effort_most)

    @classmethod
    def train(cls, metric: Metric, sample: Floats, count: int, codes: str) -> Index:
        """Train centroids and codes on the device; return the empty index."""
        with session(cls.device):
            return super().train(metric, sample, count, codes)

    @classmethod
    def uploaded(cls, inner: Any) -> Any:
        """Copy a FAISS index from the CPU to the device."""
        faiss = gpu_faiss()
        options = faiss.GpuClonerOptions()
        options.use_cuvs = False  # cuVS, which some builds use, has other limits and codes
        options.useFloat16 = isinstance(inner, faiss.IndexIVFPQ) and inner.pq.M > TABLES  # affects lookup tables only
        with session(cls.device) as resources:
            return faiss.index_cpu_to_gpu(resources, cls.device.index or 0, inner, options)

    def downloaded(self) -> Any:
        """Copy the FAISS index from the device to the CPU."""
        with session(self.device):
            return gpu_faiss().index_gpu_to_cpu(self.inner)

    def add(self, rows: Rows, keys: np.ndarray[Any, np.dtype[np.floating[Any]]]) -> None:
        """Add rows (n,) with keys (n, d)."""
        with session(self.device):
            super().add(rows, keys)

    def near(
        self,
        queries: Tensor,  # (q, d) float32, on the device
        c: int,  # at most MOST
        effort: int | None = None,
    ) -> Tensor:  # (q, c) int64, -1 = none
        """Return, on the device, the c rows whose codes are nearest to each query. Copies nothing to the host."""
        faiss, queries, q = gpu_faiss(), queries.contiguous(), len(queries)
        rows = torch.empty((q, c), dtype=torch.int64, device=queries.device)
        scores = torch.empty((q, c), dtype=torch.float32, device=queries.device)
        parameters = faiss.SearchParametersIVF(nprobe=min(effort or self.effort, self.effort_most))
        number, integer = faiss.cast_integer_to_float_ptr, faiss.cast_integer_to_idx_t_ptr
        with session(self.device):
            self.inner.search_c(
                q, number(queries.data_ptr()), c, number(scores.data_ptr()), integer(rows.data_ptr()), parameters
            )
        return rows

    def find(self, queries: Floats, c: int, rows: Rows | None = None, effort: int | None = None) -> Rows:
        """Return the c rows (q, c) nearest to each query, as numpy arrays; at most MOST rows, then -1."""
        if rows is not None:
            raise ValueError("an index on a GPU takes no filter; use softdb.device.probe")
        matches = np.full((len(queries), c), -1, np.int64)
        fetched = min(c, MOST)
        for low in range(0, len(queries), QUERIES):
            chunk = torch.from_numpy(queries[low : low + QUERIES]).to(self.device)
            matches[low : low + QUERIES, :fetched] = self.near(chunk, fetched, effort).cpu().numpy()
        return matches

    def copy(self) -> Index:
        """Copy this index, through the host's memory, so that the copy can grow while this index is searched."""
        return self.restored(self.uploaded(self.downloaded()))

    def hosted(self) -> Index:
        """Copy this index to the CPU."""
        return self.restored(self.downloaded(), self.host)

    @property
    def place(self) -> str:
        """Name of the device."""
        return str(self.device)

    def dump(self) -> Any:
        """Serialize the index as a CPU index, which a machine without a GPU can read, too."""
        return faiss_module().serialize_index(self.downloaded())


class _DeviceIVF(OnGPU):
    """Index of kind "ivf" on a GPU: product codes, a byte for 2 to 16 elements of a key."""

    host: ClassVar[type[IVF]] = IVF

    @classmethod
    def codes(cls, dim: int) -> tuple[str, ...]:
        """Return names of the finest product codes that FAISS supports for keys of width `dim`, else ("SQ8",)."""
        widths = {parts: dim / parts for parts in PARTS if dim % parts == 0}
        fits = [parts for parts, width in widths.items() if width <= (WIDEST if parts >= MANY else WIDE)][:3]
        return tuple(f"PQ{parts}" for parts in reversed(fits)) or ("SQ8",)

    @classmethod
    def record_bytes(cls, dim: int, codes: str) -> int:
        """Return the bytes that the index needs for a record: the code and the id."""
        return (dim if codes == "SQ8" else int(codes.removeprefix("PQ"))) + ID


class _DeviceIVFSQ8(OnGPU):
    """Index of kind "ivf-sq8" on a GPU: a byte for each element of a key."""

    kind: ClassVar[str] = IVFSQ8.kind
    host: ClassVar[type[IVF]] = IVFSQ8
    codes = IVFSQ8.codes
    record_bytes = IVFSQ8.record_bytes


def engines(devices: Devices, device: torch.device) -> dict[str, type[OnGPU]]:
    """Return {kind: class} of the indexes for GPUs, with subclasses that know the device."""
    bound = {"devices": devices, "device": device}
    return {engine.kind: type(engine.__name__, (engine,), bound) for engine in (_DeviceIVF, _DeviceIVFSQ8)}


def uploaded(index: Index, engines: dict[str, type[OnGPU]], device: torch.device) -> Index:
    """Copy an index to a device; return the index itself if FAISS does not support the codes on a GPU."""
    if not _movable(index, device):
        return index
    engine = engines[index.kind]
    return index.restored(engine.uploaded(index.inner), engine)


def _movable(index: Index, device: torch.device) -> bool:
    """Return True if FAISS can copy this index to the device; else log a warning and return False."""
    try:
        faiss, inner = gpu_faiss(device), index.inner
    except MissingDependency as error:
        _log.warning("the index stays on the CPU: %s", error)
        return False
    product = isinstance(inner, faiss.IndexIVFPQ) and inner.by_residual and inner.pq.nbits == 8 and inner.pq.M in PARTS
    if product or isinstance(inner, faiss.IndexIVFScalarQuantizer):
        return True
    _log.warning("the index stays on the CPU: its codes have no form on a GPU; build_index() makes an index for it")
    return False
