"""Threads that share the kernels' work, which release the GIL.

Python's own threads, not OpenMP or a pool of ours in C++: they sleep when there is nothing to do (OpenMP's spin, beside
FAISS' and torch's); a forked child has none and makes its own (GNU's OpenMP hangs there); and who does which part never
depends on who is first, so that for one number of threads the same question gives the same bits. To hand out the work
takes some 50 µs, so work below WORTH_A_THREAD is not handed out.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch

WORTH_A_THREAD = 1 << 22  # products

Part = TypeVar("Part")
Found = TypeVar("Found")


def workers(products: int) -> int:
    """Number of threads for so many products."""
    return max(1, min(torch.get_num_threads(), products // WORTH_A_THREAD))


def by_lines(
    loop: Callable[..., Found], given: Callable[[slice], tuple[Any, ...]], lines: int, products: int
) -> list[Found]:
    """Runs a kernel over so many lines, which cost so many products together, in runs: one a thread.

    `given` makes the kernel's arguments for a run of lines. Returns what it returned for each.
    """
    count = max(1, min(lines, workers(products)))
    if count == 1:
        return [loop(*given(slice(lines)))]
    runs = [slice(lines * i // count, lines * (i + 1) // count) for i in range(count)]
    return share_out(lambda part: loop(*given(part)), runs)


def share_out(work: Callable[[Part], Found], parts: Sequence[Part]) -> list[Found]:
    """Return the results of the work for each part, one thread a part."""
    if len(parts) == 1:
        return [work(parts[0])]
    return list(_pool(os.getpid(), len(parts)).map(work, parts))


def with_help(run: Callable[[], None], help_out: Callable[[], None], count: int) -> None:
    """Run a kernel whose steps `count` threads share: the caller's, and others, for which it never waits to begin."""
    with contextlib.suppress(RuntimeError):  # where no thread can be started, the caller's does it all
        for _ in range(count - 1):
            _pool(os.getpid(), count).submit(help_out)
    run()


@functools.lru_cache(maxsize=1)
def _pool(process: int, count: int) -> ThreadPoolExecutor:
    """Threads that wait for work; a forked child has none of its parent's."""
    return ThreadPoolExecutor(count, "softdb")
