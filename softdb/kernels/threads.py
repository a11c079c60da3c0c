"""Threads that share the work of kernels, which release the GIL.

They are Python threads, neither OpenMP nor a pool in C++. Idle threads sleep, while OpenMP's spin beside FAISS' and
torch's; a forked child makes its own, while GNU's OpenMP hangs there; and the division of work depends on the number of
threads alone, so that the same query gives the same bits. Handing out work takes some 50 µs, so less work than
WORTH_A_THREAD stays in the caller's thread.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch

WORTH_A_THREAD = 1 << 22  # least products of a thread

Part = TypeVar("Part")
Result = TypeVar("Result")


def workers(products: int) -> int:
    """Number of threads for `products` products."""
    return max(1, min(torch.get_num_threads(), products // WORTH_A_THREAD))


def by_lines(
    loop: Callable[..., Result], given: Callable[[slice], tuple[Any, ...]], lines: int, products: int
) -> list[Result]:
    """Run a kernel over `lines` lines, which cost `products` products, with a run of lines for each thread.

    `given` makes the kernel's arguments for a run. Return the results of all runs.
    """
    count = max(1, min(lines, workers(products)))
    if count == 1:
        return [loop(*given(slice(lines)))]
    runs = [slice(lines * i // count, lines * (i + 1) // count) for i in range(count)]
    return share_out(lambda run: loop(*given(run)), runs)


def share_out(work: Callable[[Part], Result], parts: Sequence[Part]) -> list[Result]:
    """Return the results of `work` for each part, with a thread for each."""
    if len(parts) == 1:
        return [work(parts[0])]
    return list(_pool(os.getpid(), len(parts)).map(work, parts))


def with_help(run: Callable[[], None], help_out: Callable[[], None], count: int) -> None:
    """Run a kernel whose steps `count` threads share. The caller does not wait for the others to begin."""
    with contextlib.suppress(RuntimeError):  # if no thread can be started, the caller does all the work
        for _ in range(count - 1):
            _pool(os.getpid(), count).submit(help_out)
    run()


@functools.lru_cache(maxsize=1)
def _pool(process: int, count: int) -> ThreadPoolExecutor:
    """A pool of idle threads. `process` is the process id, so that a forked child makes its own."""
    return ThreadPoolExecutor(count, "softdb")
