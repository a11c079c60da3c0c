"""What a forked child does with the handles of its parent: it reads on, and touches nothing of the parent's."""

from __future__ import annotations

import contextlib
import os
import sys
import weakref
from typing import Protocol

import torch

from softdb.errors import SoftDBError
from softdb.store.catalog import Catalog

__all__ = ["Handle", "abandon", "watch"]


class Handle(Protocol):
    """Something open that a child inherits."""

    def after_fork(self) -> None:
        """In a forked child: let go of what belongs to the parent."""


_handles: weakref.WeakSet[Handle] = weakref.WeakSet()
_abandoned: list[Catalog] = []  # connections of a parent process, kept from being closed in the child


def watch(handle: Handle) -> None:
    """Call the handle's `after_fork` in every child, for as long as it is in use."""
    _handles.add(handle)


def abandon(catalog: Catalog) -> None:
    """Keep an inherited connection open and unused: closing it could undo the parent's locks."""
    _abandoned.append(catalog)


def _after_fork() -> None:
    handles = list(_handles)
    if handles:  # the threads of torch and FAISS stayed in the parent; waiting for them would never end
        torch.set_num_threads(1)
        if "faiss" in sys.modules:
            sys.modules["faiss"].omp_set_num_threads(1)
    for handle in handles:
        with contextlib.suppress(SoftDBError):
            handle.after_fork()


os.register_at_fork(after_in_child=_after_fork)
