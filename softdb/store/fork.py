"""Forks. Guarantee: a forked child reads through a connection of its own, and changes none of its parent's files.

Within a process, SQLite's connections to one file share their locks. A child's new connection would rely on locks that
the inherited one remembers but the child does not hold: the parent's last close, or a new writer, could remove the WAL
while the child reads torn pages. So no thread is inside SQLite at the moment of a fork, and a child closes all
inherited connections before a handle, at its next call, opens a new one.
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
    """A handle with files or threads that a forked child inherits."""

    def after_fork(self) -> None:
        """In a forked child: close inherited files, and replace locks that a thread of the parent may hold."""


@runtime_checkable
class Connected(Inherited, Protocol):
    """A handle with a connection to SQLite."""

    def before_fork(self) -> Callable[[], None]:
        """Wait until no other thread uses the connection, and block them until the returned function is called."""


_handles: weakref.WeakSet[Inherited] = weakref.WeakSet()
_lock = threading.Lock()  # held during a fork and while a handle is added
_paused: list[Callable[[], None]] = []  # functions that let the threads of the handles continue


def watch(handle: Inherited) -> None:
    """Call `before_fork` and `after_fork` of a handle around every fork, as long as the handle exists."""
    with _lock:
        _handles.add(handle)


def abandon(connection: apsw.Connection) -> None:
    """In a forked child: close an inherited connection without writing, as the child does not hold its locks.

    If this thread forked within its own transaction, closing would write: then keep the connection open until the
    process has ended.
    """
    with contextlib.suppress(apsw.ConnectionClosedError):  # an interrupted close() has closed it already
        if connection.in_transaction:
            threading.Thread(target=_keep, args=(connection,), daemon=True).start()
            return
        connection.config(apsw.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 1)
        connection.close()


def hold(worker: Worker, last: Callable[[], None]) -> Callable[[], None]:
    """Call `last` on a worker's thread, then pause the thread until the returned function is called."""
    paused, resume = threading.Event(), threading.Event()

    def pause() -> None:
        try:
            last()
        finally:
            paused.set()
            resume.wait()

    if not worker.inside:  # else the calling thread alone uses the connection
        worker.submit(pause)
        while not (paused.is_set() or worker.stopped):
            with contextlib.suppress(BaseException):  # an interrupt must not let the fork proceed
                paused.wait(1)
    return resume.set


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
    if handles:  # the threads of torch and FAISS stayed in the parent: waiting for them would never end
        if "torch" in sys.modules:
            sys.modules["torch"].set_num_threads(1)
        if "faiss" in sys.modules:
            sys.modules["faiss"].omp_set_num_threads(1)
    for handle in handles:  # an error of one handle must not stop the others
        with contextlib.suppress(SoftDBError, OSError, apsw.Error):
            handle.after_fork()


os.register_at_fork(before=_before, after_in_parent=_after_in_parent, after_in_child=_after_in_child)
