"""Functions that the benchmarks share: provenance of a result, rates of the machine, private memory, and the disk."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

import torch

import softdb

if find_spec("softdb.tools") is None:  # an older softdb is being measured: take softdb.tools from this checkout
    softdb.__path__.append(str(Path(__file__).resolve().parent.parent / "softdb"))

from softdb.tools.bench import report
from softdb.tools.bench.report import MIB, in_turn, spread, versions, write_json

__all__ = [
    "IN_MEMORY", "MB", "MIB", "Peak", "anonymous_bytes", "bytes_on_disk", "disk_write_rate", "each_of",
    "file_system", "files_in", "in_turn", "machine", "provenance", "spread", "versions", "write_json",
]  # fmt: skip

SIDE = 2048  # rows and columns of the matrices that sgemm multiplies
NUMBERS_READ = 1 << 25  # float32 numbers that are summed to measure the read rate
RATE_ROUNDS = 5  # the fastest round counts
MB = 1_000_000  # rates are in megabytes, as disks are sold
IN_MEMORY = {"tmpfs", "ramfs"}  # an fsync on these file systems costs nothing and keeps nothing

Batch = TypeVar("Batch")


def provenance(packages: Iterable[str]) -> dict[str, Any]:
    """Return what every result file names: machine with its rates, versions, date (UTC), command and commit."""
    return {
        "machine": machine(),
        "versions": versions(packages),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "command": report.command(),
        "commit": report.commit() or "not recorded",
    }


def machine() -> dict[str, Any]:
    """Return and print the machine, its kernels, and its read and sgemm rates, which bound every time below."""
    facts = report.machine() | {"kernels": _kernels(), **_rates(torch.get_num_threads())}
    print("machine: {cpu}, kernels {kernels}, {threads} threads, reads {read_gb_s} GB/s, ".format(**facts), end="")
    print(f"sgemm {facts['sgemm_gflop_s']} GFLOP/s", flush=True)
    return facts


def _kernels() -> str:
    if find_spec("softdb.kernels") is None:  # an older softdb
        return "none"
    from softdb.kernels import in_use

    return in_use()


@functools.cache
def _rates(threads: int) -> dict[str, Any]:
    """Return the rates at which torch sums numbers and multiplies two matrices, each in the fastest of a few rounds."""
    numbers, left, right = torch.ones(NUMBERS_READ), torch.ones(SIDE, SIDE), torch.ones(SIDE, SIDE)
    seconds = in_turn({"read": numbers.sum, "multiply": functools.partial(torch.mm, left, right)}, RATE_ROUNDS)
    read, multiply = min(seconds["read"]), min(seconds["multiply"])
    return {
        "threads": threads,
        "read_gb_s": round(4 * NUMBERS_READ / read / 1e9, 1),
        "sgemm_gflop_s": round(2 * SIDE**3 / multiply / 1e9, 1),
    }


def each_of(batches: Iterable[Batch], call: Callable[[Batch], object]) -> Callable[[], object]:
    """Return a function that calls `call` with the next batch each time, so that no timed query is repeated.

    After the last batch it starts again with the first.
    """
    following = itertools.cycle(batches)
    return lambda: call(next(following))


def file_system(folder: Path) -> str:
    """Return the type of the file system that holds the folder, as in /proc/mounts."""
    longest, kind = "", "unknown"
    for line in _mounts():
        point, point_kind = line.split()[1:3]
        if folder.resolve().is_relative_to(point) and len(point) >= len(longest):
            longest, kind = point, point_kind
    return kind


def _mounts() -> list[str]:
    try:
        return Path("/proc/mounts").read_text(encoding="utf-8").splitlines()
    except OSError:
        return []


def disk_write_rate(folder: Path, size: int = 1 << 30, block: int = 5 * MIB) -> dict[str, Any]:
    """Return MB/s of sequential writes of `block` bytes: with an fsync after each, and with one fsync at the end."""
    os.sync()  # writes that are still in memory must not be counted in this one
    return {
        "file_system": file_system(folder),
        "bytes": size // block * block,
        "block_bytes": block,
        "each_fsync_mb_s": round(_write_rate(folder, size, block, each=True), 1),
        "one_fsync_mb_s": round(_write_rate(folder, size, block, each=False), 1),
    }


def _write_rate(folder: Path, size: int, block: int, each: bool) -> float:
    data = os.urandom(block)  # zeros may be compressed or left as holes
    file, path = tempfile.mkstemp(dir=folder)
    try:
        start = time.perf_counter()
        for offset in range(0, size // block * block, block):
            if os.pwrite(file, data, offset) != block:
                raise OSError(f"disk_write_rate: short write at {offset} in {folder}; free space on this disk")
            if each:
                os.fsync(file)
        os.fsync(file)
        return size // block * block / MB / (time.perf_counter() - start)
    finally:
        os.close(file)
        os.unlink(path)


def anonymous_bytes(process: int) -> int:
    """Return the bytes of memory of a process and its children that no file backs; 0 once they have ended."""
    total = 0
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{process}/status").read_text(encoding="utf-8").splitlines():
            if line.startswith("RssAnon:"):
                total += int(line.split()[1]) * 1024
        for task in Path(f"/proc/{process}/task").iterdir():
            children = (task / "children").read_text(encoding="utf-8").split()
            total += sum(anonymous_bytes(int(child)) for child in children)
    return total


class Peak:
    """Largest private memory (RssAnon) of this process while the block runs, in bytes."""

    def __enter__(self) -> Peak:
        self.before = self.bytes = anonymous_bytes(os.getpid())
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._stop.wait(0.002):
            self.bytes = max(self.bytes, anonymous_bytes(os.getpid()))

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    @property
    def more(self) -> int:
        """Bytes by which private memory grew."""
        return self.bytes - self.before


def files_in(folder: Path) -> Iterator[Path]:
    """Yield every regular file below the folder."""
    return (path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())


def bytes_on_disk(folder: Path) -> dict[str, int]:
    """Return the bytes that the file system has allocated below the folder, and the sum of the files' lengths."""
    stats = [path.stat() for path in files_in(folder)]
    return {"allocated": sum(s.st_blocks * 512 for s in stats), "length": sum(s.st_size for s in stats)}
