"""The thread that alone uses a database's connection.

Guarantee: an operation runs to its end. Ctrl-C comes to the caller, never to this thread; the caller waits for the end,
interrupted or not: then the operation has happened whole or not at all, and nothing reads the caller's arrays any more.
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
    """A call on its way to the thread and back; by locks that no interrupt leaves half held."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self.work, self.context = work, contextvars.copy_context()
        self.outcome: list[tuple[Any, BaseException | None]] = []
        self.taken = threading.Lock()  # by the thread, or by a caller who no longer wants it
        self.over: queue.SimpleQueue[None] = queue.SimpleQueue()  # is given something at the end


class Worker:
    """Calls on a thread of their own, one after the other, until `stop`."""

    def __init__(self, late: Callable[[], None]) -> None:
        """`late`: a method, called on the thread when `ring` has said so. Raises SoftDBError: no more threads."""
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._busy = threading.Lock()  # held by the thread that uses the connection
        self._holder = -1  # that thread, where it is a caller's
        self._late = weakref.WeakMethod(late)
        self._at: float | None = None  # when to call it, by time.monotonic()
        self._thread = threading.Thread(target=self._work, name="softdb-store", daemon=True)
        self.stopped = False
        try:
            self._thread.start()
        except BaseException as error:
            self.stop()
            if not isinstance(error, RuntimeError) or error.__context__ is not None:  # an interrupt within it
                raise error.__context__ or error from None
            raise SoftDBError(f"a database needs a thread of its own ({error}); end some others") from None

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
            del job  # what it holds may be collected

    @property
    def inside(self) -> bool:
        """True if the calling thread uses the connection; a signal's handler may have come into its query."""
        return threading.get_ident() in (self._thread.ident, self._holder)

    def run(self, work: Callable[[], Any]) -> Any:
        """Return the result of a call on the thread, or raise its error; after the thread's end, call it here."""
        if (
            threading.get_ident() in (self._thread.ident, self._holder) or sys.is_finalizing()
        ):  # no thread comes between
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
            while not job.outcome:  # wait for its end, or keep it from beginning; more interrupts are the first one's
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
            del error  # its traceback leads here

    def run_between(self, work: Callable[[], Any]) -> Any:
        """Call one query here, between operations. No Python may run within its statement: a signal's handler might."""
        if self.inside:
            return work()
        with self._busy:
            try:
                self._holder = threading.get_ident()
                return work()
            finally:
                self._holder = -1

    def submit(self, work: Callable[[], Any]) -> None:
        """Have the thread call something for whose end nobody waits."""
        self._jobs.put(_Job(work))

    def ring(self, seconds: float) -> None:
        """Call `late` in so many seconds. On the thread."""
        self._at = time.monotonic() + seconds

    def after_fork(self) -> None:
        """In a forked child, which does not have the thread: calls run in their callers'."""
        self._busy, self._holder, self.stopped = threading.Lock(), -1, True

    def stop(self) -> None:
        """End the thread when what was asked for is done."""
        self.stopped = True
        self._jobs.put(None)
