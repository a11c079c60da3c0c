"""What the benchmarks share: the machine and its rates, versions and command of a report, memory, and the disk."""

from __future__ import annotations

import contextlib
import functools
import os
import tempfile
import threading
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

import softdb

if find_spec("softdb.tools") is None:  # of an older softdb: this one's serves
    softdb.__path__.append(str(Path(__file__).resolve().parent.parent / "softdb"))

from softdb.tools.bench import report
from softdb.tools.bench.report import MIB, command, commit, in_turn, spread, versions, write_json

__all__ = [
    "IN_MEMORY",
    "MB",
    "MIB",
    "Peak",
    "anonymous_bytes",
    "bytes_on_disk",
    "command",
    "commit",
    "disk_write_rate",
    "file_system",
    "files_in",
    "in_turn",
    "machine",
    "spread",
    "versions",
    "write_json",
]

SIDE, READ, TURNS = 2048, 1 << 25, 5  # of the matrices of sgemm; numbers that are read; of which the fastest counts
MB = 1_000_000  # rates are in megabytes, as disks are sold
IN_MEMORY = {"tmpfs", "ramfs"}  # an fsync there costs nothing and keeps nothing


def machine() -> dict[str, Any]:
    """As reports have it, with the kernels in use and the rates that no answer can beat, which are printed, too."""
    found = report.machine() | {"kernels": _kernels(), **_rates(torch.get_num_threads())}
    print("machine: {cpu}, kernels {kernels}, {threads} threads, reads {read_gb_s} GB/s, ".format(**found), end="")
    print(f"sgemm {found['sgemm_gflop_s']} GFLOP/s", flush=True)
    return found


def _kernels() -> str:
    if find_spec("softdb.kernels") is None:  # of an older softdb
        return "none"
    from softdb.kernels import in_use

    return in_use()


@functools.cache
def _rates(threads: int) -> dict[str, Any]:
    """Bytes that torch sums a second, and what its product of two matrices does: the fastest of a few turns."""
    numbers, one, other = torch.ones(READ), torch.ones(SIDE, SIDE), torch.ones(SIDE, SIDE)
    seconds = in_turn({"read": numbers.sum, "multiply": functools.partial(torch.mm, one, other)}, TURNS)
    read, multiplied = min(seconds["read"]), min(seconds["multiply"])
    return {
        "threads": threads,
        "read_gb_s": round(4 * READ / read / 1e9, 1),
        "sgemm_gflop_s": round(2 * SIDE**3 / multiplied / 1e9, 1),
    }


def file_system(folder: Path) -> str:
    """The type of the file system that holds the folder, as in /proc/mounts."""
    best, kind = "", "unknown"
    for line in _mounts():
        point, this = line.split()[1:3]
        if folder.resolve().is_relative_to(point) and len(point) >= len(best):
            best, kind = point, this
    return kind


def _mounts() -> list[str]:
    try:
        return Path("/proc/mounts").read_text(encoding="utf-8").splitlines()
    except OSError:
        return []


def disk_write_rate(folder: Path, size: int = 1 << 30, block: int = 5 * MIB) -> dict[str, Any]:
    """MB/s of sequential pwrites of `block` bytes: each followed by an fsync, and with one fsync at the end."""
    os.sync()  # earlier writes still in memory must not be billed to this one
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
                raise OSError(f"disk_write_rate: a short write at {offset} in {folder}; is the disk full?")
            if each:
                os.fsync(file)
        os.fsync(file)
        return size // block * block / MB / (time.perf_counter() - start)
    finally:
        os.close(file)
        os.unlink(path)


def anonymous_bytes(process: int) -> int:
    """Memory of a process and its children that is not backed by a file, in bytes; 0 once they have ended."""
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
    """The largest private memory (RssAnon) of this process while the block runs."""

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
        """How many bytes it grew by."""
        return self.bytes - self.before


def files_in(folder: Path) -> Iterator[Path]:
    """Every regular file below the folder."""
    return (path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())


def bytes_on_disk(folder: Path) -> dict[str, int]:
    """Bytes allocated by the file system below the folder, and the files' own lengths."""
    stats = [path.stat() for path in files_in(folder)]
    return {"allocated": sum(s.st_blocks * 512 for s in stats), "length": sum(s.st_size for s in stats)}
