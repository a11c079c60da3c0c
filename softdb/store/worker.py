"""The thread that alone uses a database's connection.

Guarantee: an operation runs to its end. Ctrl-C and the exceptions that one thread sets in another come to whoever asked
for the operation, never to this thread; and who asked waits for the end, interrupted or not, so that afterwards the
operation has happened whole or not at all, and nothing reads the caller's arrays any more.
"""

from __future__ import annotations

import _thread
import contextlib
import contextvars
import math
import queue
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from softdb.errors import SoftDBError

__all__ = ["Unwanted", "Worker"]

T = TypeVar("T")


class Unwanted(BaseException):
    """Raised within an operation whose caller was interrupted; the caller raises the interrupt."""


class _Job:
    """A call on its way to the thread and back."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self.work, self.context = work, contextvars.copy_context()
        self.result: Any = None
        self.error: BaseException | None = None
        self.taken = _thread.allocate_lock()  # by the thread, or by a caller who no longer wants it
        self.cancelled = self.over = False
        self.end = _thread.allocate_lock()  # released when it is over
        self.end.acquire()

    def run(self, busy: _thread.LockType) -> None:
        if self.taken.acquire(blocking=False):
            try:
                with busy:
                    self.result = self.context.run(self.work)
            except BaseException as error:
                self.error = error
            self.over = True
            self.end.release()

    def give_up(self) -> None:
        """Wait until it is over, or keep it from beginning; a second interrupt is the first one's."""
        self.cancelled = True
        while not self.over:
            with contextlib.suppress(BaseException):
                if self.taken.acquire(blocking=False):
                    return
                self.end.acquire(timeout=1)


class _JobQueue:
    """What a thread works off; it knows nothing else, so that a store may be collected."""

    def __init__(self, late: Callable[[], None]) -> None:
        self.jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self.present: _Job | None = None
        self.busy = _thread.allocate_lock()  # held by whoever uses the connection
        self.holder = -1  # a thread other than this one that holds it
        self.thread = -1
        self.at = math.inf  # when `late` is to be called, by time.monotonic()
        self._late = weakref.WeakMethod(late)

    def work(self) -> None:
        self.thread = _thread.get_ident()
        while True:
            try:
                wait = None if self.at == math.inf else max(0.0, self.at - time.monotonic())
                job = self.jobs.get(timeout=wait)
            except queue.Empty:
                self.at, late = math.inf, self._late()
                job = None if late is None else _Job(late)
            if job is None:
                return
            self.present = job
            job.run(self.busy)
            self.present = job = late = None  # what it holds may be collected


class Worker:
    """Calls on a thread of their own, one after the other."""

    def __init__(self, late: Callable[[], None]) -> None:
        """`late`: a method, called on the thread when `ring` has said so. Raises SoftDBError: no more threads."""
        self._queue = _JobQueue(late)
        self._gate = _thread.allocate_lock()  # between a last call and the end
        self._stopped = False
        try:
            _thread.start_new_thread(self._queue.work, ())
        except BaseException as error:
            self._queue.jobs.put(None)
            if isinstance(error, RuntimeError):
                raise SoftDBError(f"a database needs a thread of its own ({error}); end some others") from None
            raise

    def run(self, work: Callable[[], T]) -> T:
        """The result of a call on the thread, or its error; on the thread itself, or after its end, of a plain call."""
        if _thread.get_ident() == self._queue.thread or sys.is_finalizing():  # then no other thread runs any more
            return work()
        if _thread.get_ident() == self._queue.holder:  # by a signal's handler, which has come into a query
            with self._released():
                return self.run(work)
        job = _Job(work)
        try:
            if not self._put(job):
                return work()
            job.end.acquire()
        except BaseException:
            job.give_up()
            raise
        try:
            if job.error is not None:
                raise job.error
            result: T = job.result
            return result
        finally:
            del job  # its error's traceback leads here

    def run_between(self, work: Callable[[], T]) -> T:
        """A call in the caller's thread, between operations: one query, whose interruption leaves nothing.

        No Python may run within its statement: a signal's handler would ask the connection something else there.
        """
        queue, mine = self._queue, _thread.get_ident()
        if mine in (queue.thread, queue.holder):
            return work()
        with queue.busy:
            try:
                queue.holder = mine
                return work()
            finally:
                queue.holder = -1

    @contextlib.contextmanager
    def _released(self) -> Iterator[None]:
        """Let the thread work while this one is in the middle of `run_between`."""
        queue, mine = self._queue, self._queue.holder
        try:
            queue.holder = -1
            queue.busy.release()
            yield
        finally:
            queue.busy.acquire()
            queue.holder = mine

    def park(self, seconds: float, last: Callable[[], None]) -> Callable[[], None] | None:
        """Keep the thread from working, after a `last` call, until the returned function is called.

        None where it does not come to it in time.
        """
        if _thread.get_ident() in (self._queue.thread, self._queue.holder):  # nobody else is inside SQLite
            return lambda: None
        parked, go = _thread.allocate_lock(), _thread.allocate_lock()
        parked.acquire()
        go.acquire()

        def hold() -> None:
            last()
            parked.release()
            go.acquire()

        job = _Job(hold)
        if self._put(job) and not parked.acquire(timeout=seconds) and job.taken.acquire(blocking=False):
            return None
        return go.release

    def ring(self, seconds: float) -> None:
        """Call `late` in so many seconds, unless it is to be called earlier. On the thread."""
        self._queue.at = min(self._queue.at, time.monotonic() + seconds)

    def require_wanted(self) -> None:
        """Raise Unwanted where the caller of the present operation was interrupted."""
        if self._queue.present is not None and self._queue.present.cancelled:
            raise Unwanted

    def stop(self) -> None:
        """End the thread when what was asked for is done."""
        with self._gate:
            if not self._stopped:
                self._stopped = True
                self._queue.jobs.put(None)

    def _put(self, job: _Job) -> bool:
        with self._gate:
            if not self._stopped:
                self._queue.jobs.put(job)
            return not self._stopped
