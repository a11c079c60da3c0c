"""What every benchmark reports beside its numbers: the machine, the versions, the disk's own rate."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

MB = 1_000_000  # rates are in megabytes, as disks are sold
MIB = 1 << 20  # sizes are in mebibytes, as memory is sold
IN_MEMORY = {"tmpfs", "ramfs"}  # an fsync there costs nothing and keeps nothing


def machine() -> dict[str, Any]:
    """Processor, cores that this process may use, memory, kernel and Python."""
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
        "load_average": [round(load, 2) for load in os.getloadavg()],  # a busy machine shows itself here
    }


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or "unknown"
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else "unknown"


def versions(packages: Iterable[str]) -> dict[str, str]:
    """The installed version of each package; one used from its source tree has none."""
    found = {}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def commit() -> str | None:
    """The commit that is measured, with `+` when files differ from it; None outside a repository."""
    here = Path(__file__).parent

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=here, capture_output=True, text=True, check=True).stdout.strip()

    try:
        return git("rev-parse", "HEAD") + ("+" if git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def command() -> str:
    """The command line as given, absolute paths cut to their last name: a result names no one's folders."""
    words = [Path(sys.executable).name, *sys.argv]
    return shlex.join(":".join(_name(part) if part.startswith("/") else part for part in w.split(":")) for w in words)


def _name(path: str) -> str:
    return Path(path).name


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
    path = folder / "disk_write_rate.bin"
    data = os.urandom(block)  # zeros may be compressed or left as holes
    file = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600)
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
        path.unlink()


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


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, least and greatest."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def write_json(path: Path, result: dict[str, Any]) -> None:
    """Write a result as indented JSON, so that a diff of two results can be read."""
    path.write_text(json.dumps(result, indent=1, ensure_ascii=False, allow_nan=False) + "\n", encoding="utf-8")
