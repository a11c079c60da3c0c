"""The thread that uses a database's connection.

Guarantee: an operation runs to its end. Ctrl-C reaches the caller, never this thread, and an interrupted caller still
waits for the end. By then the operation has happened completely or not at all, and nothing reads the caller's arrays.
"""

from __future__ import annotations

import contextlib
import contextvars
import queue
import sys
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

from softdb.errors import SoftDBError


class _Job:
    """A call to run on the thread, and its outcome."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self.work, self.context = work, contextvars.copy_context()
        self.outcome: list[tuple[Any, BaseException | None]] = []
        self.taken = threading.Lock()  # acquired by the thread to run the call, or by the caller to cancel it
        self.over: queue.SimpleQueue[None] = queue.SimpleQueue()  # an item is put when the call has ended


class Worker:
    """A thread that runs calls one after the other, until `stop`."""

    def __init__(self, late: Callable[[], None]) -> None:
        """`late`: method that the thread calls at the time set by `ring`. Raises SoftDBError if no thread can start."""
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._busy = threading.Lock()  # held by the thread that uses the connection
        self._holder = -1  # identifier of the caller's thread that uses the connection; -1: none
        self._late = weakref.WeakMethod(late)
        self._at: float | None = None  # time.monotonic() at which to call `late`
        self._thread = threading.Thread(target=self._work, name="softdb-store", daemon=True)
        self.stopped = False
        try:
            self._thread.start()
        except BaseException as error:
            self.stop()
            if not isinstance(error, RuntimeError) or error.__context__ is not None:  # an interrupt during `start`
                raise error.__context__ or error from None
            raise SoftDBError(f"a database needs a thread of its own ({error}); end other threads") from None

    def _work(self) -> None:
        while True:
            try:
                job = self._jobs.get(timeout=None if self._at is None else max(0.0, self._at - time.monotonic()))
            except queue.Empty:
                self._at, job = None, _Job(self._late() or self.stop)
            if job is None:
                return
            with self._busy:
                if job.taken.acquire(blocking=False):
                    try:
                        job.outcome.append((job.context.run(job.work), None))
                    except BaseException as error:
                        job.outcome.append((None, error))
                    job.over.put(None)
            del job  # so that its arguments can be collected while the thread waits

    @property
    def inside(self) -> bool:
        """True if the calling thread uses the connection, as in a signal handler that interrupted its query."""
        return threading.get_ident() in (self._thread.ident, self._holder)

    def run(self, work: Callable[[], Any]) -> Any:
        """Run a call on the thread (here if the thread has ended), and return its result or raise its error."""
        if self.inside or sys.is_finalizing():  # no other thread uses the connection
            return work()
        job = _Job(work)
        try:
            self._jobs.put(job)
            if self.stopped:
                self._thread.join()
                if not job.outcome:
                    return work()
            job.over.get()
        except BaseException:
            while not job.outcome:  # cancel the call, or wait for its end, whatever further interrupts come
                with contextlib.suppress(BaseException):
                    if job.taken.acquire(blocking=False):
                        break
                    job.over.get(timeout=1)
            raise
        result, error = job.outcome.pop()
        try:
            if error is not None:
                raise error
            return result
        finally:
            del error  # its traceback refers to this frame: a reference cycle

    def run_between(self, work: Callable[[], Any]) -> Any:
        """Run one query in the calling thread, between operations. SQLite must not call Python for it."""
        if self.inside:
            return work()
        with self._busy:
            try:
                self._holder = threading.get_ident()
                return work()
            finally:
                self._holder = -1

    def submit(self, work: Callable[[], Any]) -> None:
        """Run a call on the thread without waiting for its end."""
        self._jobs.put(_Job(work))

    def ring(self, seconds: float) -> None:
        """Schedule a call of `late` in `seconds`. Only the thread itself may call this."""
        self._at = time.monotonic() + seconds

    def after_fork(self) -> None:
        """In a forked child, which lacks the thread: run calls in their callers' threads."""
        self._busy, self._holder, self.stopped = threading.Lock(), -1, True

    def stop(self) -> None:
        """End the thread after the calls that are queued."""
        self.stopped = True
        self._jobs.put(None)
