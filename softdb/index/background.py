"""A build of an index that can be followed and cancelled, in a thread of its own or in the caller's."""

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
Say = Callable[[str, int, int], None]

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
    cancel a build. One that fails in the background is told in the log, too.
    """

    def __init__(self, work: Callable[[Say], Report], progress: Say | None = None) -> None:
        self._work: Callable[[Say], Report] | None = work
        self._told = progress
        self._step = Step("starting", 0, 1)
        self._thread: threading.Thread | None = None
        self._threads: int | None = None  # of FAISS; None: as it is
        self._runner: int | None = None  # the thread that builds
        self._begun = False
        self._ended = False  # an interrupt may come before the event is set, not before this
        self._finished = threading.Event()
        self._stop: str | None = None  # why it shall not go on
        self._report: Report | None = None
        self._error: BaseException | None = None

    @property
    def done(self) -> bool:
        """True if it has ended: built, failed or cancelled."""
        return self._ended

    @property
    def running(self) -> bool:
        """True if it has begun and not ended."""
        return self._begun and not self._ended

    @property
    def progress(self) -> Step:
        """Step, the amount done, and the total."""
        return self._step

    def result(self, timeout: float | None = None) -> Report:
        """Wait for the report of the finished index.

        Raises:
            TimeoutError: it has not ended after `timeout` seconds; it goes on.
            Cancelled: it was cancelled.
            BadInput and others: what `build_index()` would have raised.
        """
        seconds = _seconds(timeout)
        if self._runs_here():
            raise BadInput("result() was called by the build's own progress callback, and would wait for ever")
        if not self._wait(seconds):
            raise TimeoutError(f"the index is not built after {timeout} seconds ({self._step}); wait on, or cancel()")
        if self._error is not None:
            raise self._error
        assert self._report is not None
        return self._report

    def cancel(self) -> None:
        """Stop at the next step; the old index stays. What has ended is left as it is."""
        self._stop = self._stop or "cancel() was called"

    def run(self) -> Report:
        """Build in the calling thread."""
        self._perform()
        return self.result()

    def start(self) -> None:
        """Build in a thread of its own."""
        faiss = sys.modules.get("faiss")
        if faiss is not None:  # OpenMP keeps the number of threads for each thread
            self._threads = faiss.omp_get_max_threads()
        self._thread = threading.Thread(target=self._aside, name="softdb-build")
        try:
            self._thread.start()
            self._begun = True
        except RuntimeError as error:  # the system gives no more threads
            self._error, self._thread, self._work, self._ended = error, None, None, True
            self._finished.set()
            raise

    def stop(self, reason: str) -> None:
        """Cancel, and wait until nothing of it goes on."""
        self._stop = self._stop or reason
        if self._runs_here() or not self._begun:  # where its own progress callback asks, it stops when that returns
            return
        self._wait(None)
        if self._thread is not None:
            self._thread.join()

    def after_fork(self) -> None:
        """In a forked child, which has no such thread: it has ended here."""
        if not self._ended:
            self._stop = "it goes on in the parent process alone"
            self._error, self._work = Cancelled(self._reason()), None
        self._finished, self._ended = threading.Event(), True  # the lock of the other may be held for ever
        self._finished.set()

    def _aside(self) -> None:
        if self._threads is not None:
            torch.get_num_threads()  # torch sets OpenMP's number once in every thread, later it would undo ours
            sys.modules["faiss"].omp_set_num_threads(self._threads)
        self._perform()
        if self._error is not None and not isinstance(self._error, Cancelled):
            _log.warning("the index was not built, the old one serves on: %s", self._error)

    def _perform(self) -> None:
        assert self._work is not None
        try:
            self._begun = True  # here: an interrupt before this leaves nothing that would be waited for
            self._runner = threading.get_ident()
            self._report = self._work(self._say)
        except BaseException as error:
            self._error = error  # of whatever kind: whoever waits for the result gets it
        finally:  # no calls here before it has ended: an interrupt may come with one
            self._work = self._told = self._runner = None  # and what they keep alive
            self._ended = True
            self._finished.set()

    def _wait(self, seconds: float | None) -> bool:
        """Wait for the end, and return whether it came."""
        return self._ended or self._finished.wait(seconds)

    def _runs_here(self) -> bool:
        return self._runner == threading.get_ident()

    def _say(self, what: str, done: int, whole: int) -> None:
        self._step = Step(what, done, whole)
        if self._told is not None:
            self._told(what, done, whole)
        # CPython takes the main thread for dead once a Ctrl-C has come into this question: not asked there
        if self._thread is not None and not threading.main_thread().is_alive():
            self._stop = self._stop or "the program ended"
        if self._stop is not None:
            raise Cancelled(self._reason())

    def _reason(self) -> str:
        return f"the build was cancelled while {self._step}: {self._stop}; the old index serves on"

    def __repr__(self) -> str:
        if not self.done:
            return f"<Build: {self._step}>"
        if self._error is not None:
            return f"<Build: {'cancelled' if isinstance(self._error, Cancelled) else 'failed'}>"
        return f"<Build: done, {self._report!r}>"


def _seconds(timeout: object) -> float | None:
    """Return a timeout as `Event.wait` takes it. Raises BadInput."""
    if timeout is None:
        return None
    if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not timeout >= 0:
        raise BadInput(f"timeout is {shown(timeout)}; expected seconds, 0 or more, or None to wait for the end")
    return min(float(timeout), threading.TIMEOUT_MAX)
