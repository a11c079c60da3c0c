"""Build an index in the caller's thread or in another one, report progress, and allow the build to be cancelled."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

import torch

from softdb.check import shown
from softdb.errors import BadInput, Cancelled

Report = TypeVar("Report")
Progress = Callable[[str, int, int], None]  # step, amount done, total

_log = logging.getLogger("softdb")


class Step(NamedTuple):
    """Step of a build, the amount done, and the total."""

    what: str
    done: int
    whole: int

    def __str__(self) -> str:
        return f"{self.what} {100 * self.done // max(1, self.whole)} %"


class Build(Generic[Report]):
    """An index that is being built; `db.build_index(background=True)` returns one at once.

        build = db.build_index(background=True)
        build.progress        # Step(what="adding", done=50000, whole=117659)
        build.result()        # waits, and returns the report of build_index()

    The old index, or exact search, answers until the new one is complete. `db.close()` and the end of the program
    cancel a build. A failure in the background is logged, too.
    """

    def __init__(self, work: Callable[[Progress], Report], progress: Progress | None = None) -> None:
        self._work: Callable[[Progress], Report] | None = work
        self._on_progress = progress
        self._step = Step("starting", 0, 1)
        self._thread: threading.Thread | None = None
        self._threads: int | None = None  # number of threads that FAISS may use; None: unchanged
        self._runner: int | None = None  # identifier of the thread that builds
        self._begun = False
        self._ended = False  # set before the event `_finished`, in case an interrupt comes in between
        self._finished = threading.Event()
        self._stop: str | None = None  # reason to stop
        self._report: Report | None = None
        self._error: BaseException | None = None

    @property
    def done(self) -> bool:
        """True if the build has succeeded, failed or been cancelled."""
        return self._ended

    @property
    def running(self) -> bool:
        """True if the build has begun and not ended."""
        return self._begun and not self._ended

    @property
    def progress(self) -> Step:
        """The current step of the build, the amount done, and the total."""
        return self._step

    def result(self, timeout: float | None = None) -> Report:
        """Wait for the report of the finished index.

        Raises:
            TimeoutError: the build has not ended after `timeout` seconds. The build continues.
            Cancelled: the build was cancelled.
            BadInput and others: the errors of `build_index()`.
        """
        seconds = _seconds(timeout)
        if self._runs_here():
            raise BadInput("result() was called by the build's own progress callback, where it would wait for ever")
        if not self._wait(seconds):
            raise TimeoutError(f"the index is not built after {timeout} seconds ({self._step}); wait again or cancel()")
        if self._error is not None:
            raise self._error
        assert self._report is not None
        return self._report

    def cancel(self) -> None:
        """Stop the build at its next step; the old index stays in use. Do nothing if the build has ended."""
        self._stop = self._stop or "cancel() was called"

    def run(self) -> Report:
        """Build in the calling thread."""
        self._perform()
        return self.result()

    def start(self) -> None:
        """Build in a new thread."""
        faiss = sys.modules.get("faiss")
        if faiss is not None:  # OpenMP has a setting in each thread; `_aside` copies the caller's
            self._threads = faiss.omp_get_max_threads()
        self._thread = threading.Thread(target=self._aside, name="softdb-build")
        try:
            self._thread.start()
            self._begun = True
        except RuntimeError as error:  # the system cannot start another thread
            self._error, self._thread, self._work, self._ended = error, None, None, True
            self._finished.set()
            raise

    def stop(self, reason: str, wait: bool = True) -> None:
        """Cancel the build for a reason, which its error names; with `wait` return when the build has stopped."""
        self._stop = self._stop or reason
        if not wait or self._runs_here() or not self._begun:  # called in a progress callback: stops after it
            return
        self._wait(None)
        if self._thread is not None:
            self._thread.join()

    def after_fork(self) -> None:
        """Mark the build as ended in a forked child process, which has no copy of the build's thread."""
        if not self._ended:
            self._stop = "it continues in the parent process only"
            self._error, self._work = Cancelled(self._reason()), None
        self._finished, self._ended = threading.Event(), True  # the old event's lock may stay locked in the child
        self._finished.set()

    def _aside(self) -> None:
        if self._threads is not None:
            torch.get_num_threads()  # torch's first call in a thread sets OpenMP's number of threads: set ours after it
            sys.modules["faiss"].omp_set_num_threads(self._threads)
        self._perform()
        if self._error is not None and not isinstance(self._error, Cancelled):
            _log.warning("the index was not built, the old index stays in use: %s", self._error)

    def _perform(self) -> None:
        assert self._work is not None
        try:
            self._begun = True  # set here, so that stop() does not wait for a build that an interrupt ended earlier
            self._runner = threading.get_ident()
            self._report = self._work(self._advance)
        except BaseException as error:
            self._error = error  # errors of any kind; result() raises them
        finally:  # no calls before `_ended` is set, as an interrupt may end a call
            self._work = self._on_progress = self._runner = None  # release the objects that the callbacks refer to
            self._ended = True
            self._finished.set()

    def _wait(self, seconds: float | None) -> bool:
        """Wait until the build has ended. Return False after a timeout."""
        return self._ended or self._finished.wait(seconds)

    def _runs_here(self) -> bool:
        return self._runner == threading.get_ident()

    def _advance(self, what: str, done: int, total: int) -> None:
        self._step = Step(what, done, total)
        if self._on_progress is not None:
            self._on_progress(what, done, total)
        # asked from other threads only: after a Ctrl-C within is_alive(), CPython would report the main thread as dead
        if self._thread is not None and not threading.main_thread().is_alive():
            self._stop = self._stop or "the program ended"
        if self._stop is not None:
            raise Cancelled(self._reason())

    def _reason(self) -> str:
        return f"the build was cancelled while {self._step}: {self._stop}; the old index stays in use"

    def __repr__(self) -> str:
        if not self.done:
            return f"<Build: {self._step}>"
        if self._error is not None:
            return f"<Build: {'cancelled' if isinstance(self._error, Cancelled) else 'failed'}>"
        return f"<Build: done, {self._report!r}>"


def _seconds(timeout: object) -> float | None:
    """Return a timeout for `Event.wait`, checked. Raises BadInput."""
    if timeout is None:
        return None
    if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not timeout >= 0:
        raise BadInput(f"timeout is {shown(timeout)}; expected seconds, 0 or more, or None to wait for the end")
    return min(float(timeout), threading.TIMEOUT_MAX)
