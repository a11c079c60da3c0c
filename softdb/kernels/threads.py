"""Share the work of kernels among Python threads. Kernels release the GIL.

Python threads are used, not OpenMP or a pool in C++, for three reasons. Idle Python threads sleep, while OpenMP's spin
beside those of FAISS and torch. A forked child can make new ones, while GNU's OpenMP hangs there. And the division of
work depends only on the number of threads, so the same query gives the same bits. Starting work in threads takes about
50 µs, so the caller's thread does work smaller than WORTH_A_THREAD alone.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch

WORTH_A_THREAD = 1 << 22  # least number of multiplications for each thread

Part = TypeVar("Part")
Result = TypeVar("Result")


def workers(products: int) -> int:
    """Return the number of threads to use for `products` multiplications."""
    return max(1, min(torch.get_num_threads(), products // WORTH_A_THREAD))


def by_lines(
    loop: Callable[..., Result], given: Callable[[slice], tuple[Any, ...]], lines: int, products: int
) -> list[Result]:
    """Run a kernel over `lines` rows of an array, which cost `products` multiplications, with a slice for each thread.

    `given` returns the kernel's arguments for a slice. Return the results for all slices.
    """
    count = max(1, min(lines, workers(products)))
    if count == 1:
        return [loop(*given(slice(lines)))]
    runs = [slice(lines * i // count, lines * (i + 1) // count) for i in range(count)]
    return share_out(lambda run: loop(*given(run)), runs)


def share_out(work: Callable[[Part], Result], parts: Sequence[Part]) -> list[Result]:
    """Call `work` for each part in a thread, and return the results in order."""
    if len(parts) == 1:
        return [work(parts[0])]
    return list(_pool(os.getpid(), len(parts)).map(work, parts))


def with_help(run: Callable[[], None], help_out: Callable[[], None], count: int) -> None:
    """Run a kernel whose steps `count` threads share. The caller begins at once; the others join later."""
    with contextlib.suppress(RuntimeError):  # if no thread can be started, the caller does all the work
        for _ in range(count - 1):
            _pool(os.getpid(), count).submit(help_out)
    run()


@functools.lru_cache(maxsize=1)
def _pool(process: int, count: int) -> ThreadPoolExecutor:
    """Return a cached pool of threads. `process` is the process id, so that a forked child makes a new pool."""
    return ThreadPoolExecutor(count, "softdb")
