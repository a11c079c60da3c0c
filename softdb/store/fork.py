"""Forking. Guarantee: a child reads on through its own connection, and changes nothing of its parent's.

SQLite knows a file once a process. A connection that a child opened beside an inherited one would rely on locks which
the inherited one remembers and the child does not hold: the parent's last close, or a new writer, would take the WAL
from under it, and it would read torn pages. So no thread is inside SQLite at the moment of a fork, and a child closes
all that it has inherited before it opens anything.

A child of a fork within another thread's import waits for ever for the end of that import. Python has no public way to
wait for it before: importlib shows its locks to nobody, and `imp.acquire_lock` went with Python 3.12. So CPython's own
`_imp.acquire_lock` and a module spec's `_initializing` are asked, here and nowhere else. Searches import nothing, but
any thread may import FAISS, torch or something of the user's at any time.
"""

from __future__ import annotations

import _imp
import contextlib
import ctypes
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable
from types import FrameType, ModuleType
from typing import Protocol, runtime_checkable

import apsw

from softdb.errors import SoftDBError
from softdb.store.catalog import Catalog

__all__ = ["Connected", "Inherited", "abandon", "keep_unused", "watch"]

PATIENCE = 30.0  # seconds that a fork waits for operations of other threads; after that the child's handle is closed


class Inherited(Protocol):
    """Something open that a child inherits."""

    def after_fork(self) -> None:
        """In a forked child, when all handles have been released: open what the child needs."""


@runtime_checkable
class Connected(Inherited, Protocol):
    """A handle with a connection to SQLite."""

    def acquire(self, seconds: float) -> Callable[[], None] | None:
        """Keep other threads out until the returned function is called; None where they did not leave."""

    def release_in_child(self, acquired: bool) -> None:
        """In a forked child: close what was inherited; where `acquire` failed, it may be inconsistent."""


class _Fork:
    """One fork in progress: which handles no other thread is inside of."""

    def __init__(self) -> None:
        self.lock = threading.Lock()  # one fork at a time; while it lasts, nothing new is watched
        self.mine = False
        self.acquired: dict[int, Callable[[], None]] = {}  # by the handle's id, how to let the others in again

    def begin(self, seconds: float) -> None:
        """Wait until no other thread is inside a handle, or imports something."""
        deadline = time.monotonic() + seconds
        self.mine = self.lock.acquire(timeout=seconds)
        waiting = [one for one in (list(_handles) if self.mine else ()) if isinstance(one, Connected)]
        for handle in waiting:  # one that is stuck must not cost the others their turn
            self._acquire(handle, min(1.0, seconds))
        for handle in waiting:
            if id(handle) not in self.acquired:
                self._acquire(handle, max(0.0, deadline - time.monotonic()))
        self._keep_from_importing(max(deadline, time.monotonic() + min(1.0, seconds)))

    def _acquire(self, handle: Connected, seconds: float) -> None:
        release = handle.acquire(seconds)
        if release is not None:
            self.acquired[id(handle)] = release

    def _keep_from_importing(self, deadline: float) -> None:
        """Wait until no other thread imports, as a first search does, and let none begin."""
        while True:
            _imp.acquire_lock()
            if not _importing() or time.monotonic() > deadline:
                return
            _imp.release_lock()
            time.sleep(0.01)

    def end(self) -> None:
        """Let the other threads go on."""
        _imp.release_lock()
        while self.acquired:
            self.acquired.popitem()[1]()
        if self.mine:
            self.mine = False
            self.lock.release()


_handles: weakref.WeakSet[Inherited] = weakref.WeakSet()
_fork = _Fork()


def watch(handle: Inherited) -> None:
    """Call the handle's methods around every fork, for as long as it is in use."""
    with _fork.lock:  # a set that grows cannot be gone through
        _handles.add(handle)


def abandon(catalog: Catalog) -> None:
    """In a forked child: close an inherited connection, whose locks a child does not have.

    That writes nothing. In a transaction it would: such a connection is kept open and never used. One in memory is
    the child's own.
    """
    connection = catalog.connection
    with contextlib.suppress(apsw.ConnectionClosedError):  # an interrupted close() has done it
        if not connection.filename:
            return
        if connection.in_transaction:  # the fork came from within a write of this very thread
            keep_unused(catalog)
            return
        connection.config(apsw.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 1)
        connection.close()


def keep_unused(catalog: Catalog) -> None:
    """In a forked child: let nothing, not even the end of the program, close an inherited connection."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(catalog.connection))


def _importing() -> bool:
    """Whether another thread imports something: a child would wait for ever for the end of that."""
    frame: FrameType | None = sys._getframe()
    mine = set()
    while frame is not None:
        mine.add(frame.f_globals.get("__name__"))
        frame = frame.f_back
    found = [one.__dict__ for name, one in list(sys.modules.items()) if name not in mine and type(one) is ModuleType]
    return any(getattr(names.get("__spec__"), "_initializing", False) for names in found)


def _after_in_child() -> None:
    global _fork
    acquired = set(_fork.acquired)
    _imp.release_lock()
    _fork = _Fork()
    handles = list(_handles)
    if handles:  # the threads of torch and FAISS stayed in the parent; waiting for them would never end
        if "torch" in sys.modules:
            sys.modules["torch"].set_num_threads(1)
        if "faiss" in sys.modules:
            sys.modules["faiss"].omp_set_num_threads(1)
    for handle in handles:  # what one of them cannot do must not keep the others from it
        if isinstance(handle, Connected):
            with contextlib.suppress(SoftDBError, OSError, apsw.Error):
                handle.release_in_child(id(handle) in acquired)
    for handle in handles:
        with contextlib.suppress(SoftDBError, OSError, apsw.Error):
            handle.after_fork()


os.register_at_fork(
    before=lambda: _fork.begin(PATIENCE), after_in_parent=lambda: _fork.end(), after_in_child=_after_in_child
)
