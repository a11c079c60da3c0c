"""Forking. Guarantee: a child reads on through its own connection, and changes nothing of its parent's.

SQLite knows a file once a process. A connection that a child opened beside an inherited one would rely on locks which
the inherited one remembers and the child does not hold: the parent's last close, or a new writer, would take the WAL
from under it, and it would read torn pages. So no thread is inside SQLite at the moment of a fork, and a child closes
all that it has inherited before it opens anything, which each handle does at its next call.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Protocol, runtime_checkable

import apsw

from softdb.errors import SoftDBError
from softdb.store.worker import Worker


class Inherited(Protocol):
    """Something open that a child inherits."""

    def after_fork(self) -> None:
        """In a forked child: close what was inherited, and hold no lock that a thread of the parent held."""


@runtime_checkable
class Connected(Inherited, Protocol):
    """A handle with a connection to SQLite."""

    def before_fork(self) -> Callable[[], None]:
        """Wait until no other thread uses the connection, and keep it so until the returned function is called."""


_handles: weakref.WeakSet[Inherited] = weakref.WeakSet()
_lock = threading.Lock()  # one fork at a time; while it lasts, nothing new is watched
_paused: list[Callable[[], None]] = []  # lets the threads of the handles go on


def watch(handle: Inherited) -> None:
    """Call the handle's methods around every fork, for as long as it is in use."""
    with _lock:
        _handles.add(handle)


def abandon(connection: apsw.Connection) -> None:
    """In a forked child: close an inherited connection, whose locks a child does not have; that writes nothing.

    In a transaction, where the fork came from within a write of this very thread, it would: then nothing, not even the
    end of the program, closes it.
    """
    with contextlib.suppress(apsw.ConnectionClosedError):  # an interrupted close() has done it
        if connection.in_transaction:
            threading.Thread(target=_keep, args=(connection,), daemon=True).start()
            return
        connection.config(apsw.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 1)
        connection.close()


def hold(worker: Worker, last: Callable[[], None]) -> Callable[[], None]:
    """Keep a thread still, after a `last` call, until the returned function is called."""
    still, go = threading.Event(), threading.Event()

    def stand_still() -> None:
        try:
            last()
        finally:
            still.set()
            go.wait()

    if not worker.inside:  # else nobody else is
        worker.submit(stand_still)
        while not (still.is_set() or worker.stopped):
            with contextlib.suppress(BaseException):  # no interrupt lets a fork go on
                still.wait(1)
    return go.set


def _keep(_: apsw.Connection) -> None:
    threading.Event().wait()


def _before() -> None:
    _lock.acquire()
    _paused[:] = [handle.before_fork() for handle in list(_handles) if isinstance(handle, Connected)]


def _after_in_parent() -> None:
    while _paused:
        _paused.pop()()
    _lock.release()


def _after_in_child() -> None:
    global _lock
    _lock = threading.Lock()
    _paused.clear()
    handles = list(_handles)
    if handles:  # the threads of torch and FAISS stayed in the parent; waiting for them would never end
        if "torch" in sys.modules:
            sys.modules["torch"].set_num_threads(1)
        if "faiss" in sys.modules:
            sys.modules["faiss"].omp_set_num_threads(1)
    for handle in handles:  # what one of them cannot do must not keep the others from it
        with contextlib.suppress(SoftDBError, OSError, apsw.Error):
            handle.after_fork()


os.register_at_fork(before=_before, after_in_parent=_after_in_parent, after_in_child=_after_in_child)
