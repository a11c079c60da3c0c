"""Indexes on a GPU: FAISS' inverted lists there, searched with tensors of that GPU, on torch's own stream.

FAISS scans 4-bit codes on a CPU only. On a GPU `ivf` has a byte for each 2 to 16 numbers (memory is what counts there,
fewer bytes are faster), and `ivf-sq8` a byte a number, nearly exact; graphs and RaBitQ have no form there. FAISS' other
limits on a GPU are met in `probe`: at most 2048 results or lists a query (beyond, every record is compared), no
filter and no removal (more is fetched and what does not count is passed over; where too little is left, every match
is compared).

`faiss.contrib.torch_utils` is not used: it replaces the methods of every index in the process, and its `search` takes
no parameters. FAISS is given addresses instead.
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

MOST = 2048  # results or lists of a query: FAISS' limit on a GPU
PARTS = (96, 64, 56, 48, 40, 32, 28, 24, 20, 16, 12, 8, 4, 3, 2, 1)  # of a code: those that FAISS' kernels know
MANY, WIDE, WIDEST = 48, 8, 16  # numbers a part at most, 16 where there are 48 parts: wider ones tell too little apart
TABLES = 48  # parts whose tables of 256 float32 fit into 48 KiB of shared memory; beyond, they are float16
QUERIES = 4096  # searched at once

_log = logging.getLogger("softdb")


def gpu_faiss(device: torch.device | None = None) -> Any:
    """FAISS with its GPU part. Raises MissingDependency that says how to get it, or that it sees no such device."""
    faiss = faiss_module()
    if not hasattr(faiss, "StandardGpuResources"):
        raise MissingDependency(
            f"an index on a GPU needs the GPU build of FAISS, but the CPU build {faiss.__version__} is installed; "
            "pip uninstall faiss-cpu, then pip install 'softdb[gpu]'; or device='cpu', or kind='flat', which needs none"
        )
    if device is not None and (device.index or 0) >= faiss.get_num_gpus():  # asked for more, it ends the process
        raise MissingDependency(
            f"torch sees {device}, but FAISS {faiss.__version__} sees {faiss.get_num_gpus()} GPUs: its CUDA and "
            "the driver do not fit; install a FAISS for it, or ask for device='cpu', or kind='flat', which needs none"
        )
    return faiss


class _Resources(NamedTuple):
    """FAISS' streams and scratch memory, one for all indexes of a process: FAISS lets one thread use them at a time."""

    inner: Any
    lock: threading.RLock


@functools.cache
def _resources() -> _Resources:
    return _Resources(gpu_faiss().StandardGpuResources(), threading.RLock())


def current_stream(device: torch.device) -> int:
    """The address of the stream that torch works on there."""
    return int(torch.cuda.current_stream(device).cuda_stream)


@contextlib.contextmanager
def session(device: torch.device) -> Iterator[Any]:
    """FAISS' resources, ordered with what torch does on its current stream of a device."""
    faiss, held, ordinal = gpu_faiss(), _resources(), device.index or 0
    with held.lock:
        before = held.inner.getDefaultStream(ordinal)
        held.inner.setDefaultStream(ordinal, faiss.cast_integer_to_cudastream_t(current_stream(device)))
        try:
            yield held.inner
        finally:  # a stream of the caller's may not live as long as the resources
            held.inner.setDefaultStream(ordinal, before)


class OnGPU(IVF):
    """Inverted lists on a GPU. `engines` binds the classes below to a device, one of a database's `devices`."""

    device: ClassVar[torch.device]
    host: ClassVar[type[IVF]]  # the same on the CPU, which is what the cache holds

    def __init__(self, metric: Metric, inner: Any) -> None:
        super().__init__(metric, inner)
        self.effort_most = min(MOST, self.effort_most)

    @classmethod
    def train(cls, metric: Metric, sample: Floats, count: int, codes: str) -> Index:
        """Centroids and codes, there."""
        inner = cls.untrained(metric, sample, count, codes)
        with session(cls.device):
            inner.train(sample)
        return cls(metric, inner)

    @classmethod
    def uploaded(cls, inner: Any) -> Any:
        """A copy on the device."""
        faiss = gpu_faiss()
        options = faiss.GpuClonerOptions()
        options.use_cuvs = False  # another library, with other limits and codes, in some builds
        options.useFloat16 = isinstance(inner, faiss.IndexIVFPQ) and inner.pq.M > TABLES  # of the tables alone
        with session(cls.device) as resources:
            return faiss.index_cpu_to_gpu(resources, cls.device.index or 0, inner, options)

    def downloaded(self) -> Any:
        """A copy of the FAISS index on the CPU."""
        with session(self.device):
            return gpu_faiss().index_gpu_to_cpu(self.inner)

    def add(self, rows: Rows, keys: np.ndarray[Any, np.dtype[np.floating[Any]]]) -> None:
        """Take records (n, d) in."""
        with session(self.device):
            super().add(rows, keys)

    def near(
        self,
        queries: Tensor,  # (q, d) float32, on the device
        c: int,  # at most MOST
        effort: int | None = None,
    ) -> Tensor:  # (q, c) int64, -1 = none
        """The c rows of each query whose codes are nearest, on the device, with nothing copied to the host."""
        faiss, queries, q = gpu_faiss(), queries.contiguous(), len(queries)
        rows = torch.empty((q, c), dtype=torch.int64, device=queries.device)
        scores = torch.empty((q, c), dtype=torch.float32, device=queries.device)
        parameters = faiss.SearchParametersIVF(nprobe=min(effort or self.effort, self.effort_most))
        number, whole = faiss.cast_integer_to_float_ptr, faiss.cast_integer_to_idx_t_ptr
        with session(self.device):
            self.inner.search_c(
                q, number(queries.data_ptr()), c, number(scores.data_ptr()), whole(rows.data_ptr()), parameters
            )
        return rows

    def find(self, queries: Floats, c: int, rows: Rows | None = None, effort: int | None = None) -> Rows:
        """As `near`, for arrays of the host; no more than MOST are found, -1 follows."""
        if rows is not None:
            raise ValueError("an index on a GPU takes no filter: softdb.device.probe does without")
        found = np.full((len(queries), c), -1, np.int64)
        fetched = min(c, MOST)
        for low in range(0, len(queries), QUERIES):
            part = torch.from_numpy(queries[low : low + QUERIES]).to(self.device)
            found[low : low + QUERIES, :fetched] = self.near(part, fetched, effort).cpu().numpy()
        return found

    def copy(self) -> Index:
        """An index that can grow while this one is searched; it passes through the host's memory."""
        return self.restored(self.uploaded(self.downloaded()))

    def hosted(self) -> Index:
        """A copy on the CPU."""
        return self.restored(self.downloaded(), self.host)

    @property
    def place(self) -> str:
        """Name of the device."""
        return str(self.device)

    def dump(self) -> Any:
        """The codes as bytes of a CPU index, which any machine reads."""
        return faiss_module().serialize_index(self.downloaded())


class _DeviceIVF(OnGPU):
    """Inverted lists of product codes, a byte for each 2 to 16 numbers."""

    host: ClassVar[type[IVF]] = IVF

    @classmethod
    def codes(cls, dim: int) -> tuple[str, ...]:
        """The finest that FAISS knows for the width; a byte a number where none divides it."""
        widths = {parts: dim / parts for parts in PARTS if dim % parts == 0}
        fits = [parts for parts, width in widths.items() if width <= (WIDEST if parts >= MANY else WIDE)][:3]
        return tuple(f"PQ{parts}" for parts in reversed(fits)) or ("SQ8",)

    @classmethod
    def record_bytes(cls, dim: int, codes: str) -> int:
        """A byte a part."""
        return (dim if codes == "SQ8" else int(codes.removeprefix("PQ"))) + ID


class _DeviceIVFSQ8(OnGPU):
    """Inverted lists of a byte a number."""

    kind: ClassVar[str] = IVFSQ8.kind
    host: ClassVar[type[IVF]] = IVFSQ8
    codes = IVFSQ8.codes
    record_bytes = IVFSQ8.record_bytes


def engines(devices: Devices, device: torch.device) -> dict[str, type[OnGPU]]:
    """The engines with a form on a GPU, each for indexes on one device."""
    bound = {"devices": devices, "device": device}
    return {engine.kind: type(engine.__name__, (engine,), bound) for engine in (_DeviceIVF, _DeviceIVFSQ8)}


def uploaded(index: Index, engines: dict[str, type[OnGPU]], device: torch.device) -> Index:
    """An index of the CPU, copied to a device; as it is where its codes have no form there."""
    if not _movable(index, device):
        return index
    engine = engines[index.kind]
    return index.restored(engine.uploaded(index.inner), engine)


def _movable(index: Index, device: torch.device) -> bool:
    """Return True if an index of the CPU has a form on a GPU; one line in the log where it has none."""
    try:
        faiss, inner = gpu_faiss(device), index.inner
    except MissingDependency as error:
        _log.warning("the index stays on the CPU: %s", error)
        return False
    product = isinstance(inner, faiss.IndexIVFPQ) and inner.by_residual and inner.pq.nbits == 8 and inner.pq.M in PARTS
    if product or isinstance(inner, faiss.IndexIVFScalarQuantizer):
        return True
    _log.warning("the index stays on the CPU: its codes have no form on a GPU; build_index() makes one that has")
    return False
