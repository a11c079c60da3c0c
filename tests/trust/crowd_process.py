"""Processes for concurrency tests: quick to start, with timeouts and readable failures."""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import pickle
import select
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

import pytest

from softdb.store.session import Session

STDERR = 2  # where a process that is aborted tells where it was
SECONDS = 60.0  # that anything may take before it hangs

CONTEXT = multiprocessing.get_context("forkserver")  # a process that has imported softdb and torch, and forks
CONTEXT.set_forkserver_preload(["softdb", "pytest", "crowd_work", "tap"])


class Other:
    """Another process that runs `work(line, *args)`; `line` is its end of a pipe. What it raises, `hear` raises."""

    def __init__(self, work: Callable[..., None], *args: Any) -> None:
        self.line, theirs = CONTEXT.Pipe()
        self.name = work.__name__
        self.process = CONTEXT.Process(target=_told, args=(work, theirs, *args), daemon=True)
        self.process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def hear(self, seconds: float = SECONDS) -> Any:
        """Return the next message."""
        if not self.line.poll(seconds):
            os.kill(self.pid, signal.SIGABRT)  # it tells where it is
            self.process.join(SECONDS)
            raise AssertionError(f"{self.name} (process {self.pid}) says nothing for {seconds} s")
        try:
            said = self.line.recv()
        except EOFError:
            self.process.join(SECONDS)
            raise AssertionError(f"{self.name} ended with {self.process.exitcode} and no word") from None
        if isinstance(said, Failure):
            raise AssertionError(f"{self.name}: {said.text}")
        return said

    def say(self, what: Any = None) -> None:
        """Tell it something."""
        with contextlib.suppress(BrokenPipeError):  # `hear` says why
            self.line.send(what)

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Send it a signal that ends it, and wait for that."""
        os.kill(self.pid, number)
        self.process.join(SECONDS)
        assert self.process.exitcode == -number

    def end(self) -> None:
        """Wait for its end, which is a good one."""
        self.process.join(SECONDS)
        assert self.process.exitcode == 0, f"{self.name} ended with {self.process.exitcode}"


class Failure:
    """An error that another process raised."""

    def __init__(self, text: str) -> None:
        self.text = text


def _told(work: Callable[..., None], line: Connection, *args: Any) -> None:
    faulthandler.enable(STDERR)
    try:
        work(line, *args)
    except BaseException:
        with contextlib.suppress(OSError):
            line.send(Failure(traceback.format_exc()))


@contextlib.contextmanager
def other(work: Callable[..., None], *args: Any) -> Iterator[Other]:
    """Another process for as long as the block; killed at its end if it is still there."""
    process = Other(work, *args)
    try:
        yield process
    finally:
        process.process.kill()
        process.process.join(SECONDS)
        process.line.close()


def when_a_fork_waits(patch: pytest.MonkeyPatch) -> threading.Event:
    """Set as soon as a fork asks a handle to stand still."""
    asked, before = threading.Event(), Session.before_fork

    def waits(session: Session) -> Callable[[], None]:
        asked.set()
        return before(session)

    patch.setattr(Session, "before_fork", waits)
    return asked


class Forked:
    """A child forked off this process; it works, sends its result, and leaves by `os._exit`."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self.pipe, theirs = os.pipe()
        self.pid = os.fork()
        if self.pid:
            os.close(theirs)
            return
        faulthandler.enable(STDERR)  # no timer of its own: a fork of this child would wait for that for ever
        try:
            found: Any = work()
        except BaseException:
            found = Failure(traceback.format_exc())
        with os.fdopen(theirs, "wb") as pipe:
            pipe.write(pickle.dumps(found))
        os._exit(0)

    def found(self, seconds: float = SECONDS) -> Any:
        """Return the result of the child's work; raise AssertionError if it raised or hangs."""
        end, data = time.monotonic() + seconds, b""
        while True:
            ready = select.select([self.pipe], [], [], max(0.0, end - time.monotonic()))[0]
            if not ready:
                os.kill(self.pid, signal.SIGABRT)  # it tells where it is
            piece = os.read(self.pipe, 1 << 16) if ready else b""
            data += piece
            if not piece:
                break
        os.close(self.pipe)
        _, status = os.waitpid(self.pid, 0)
        assert data, f"a forked child ended with status {status} and no word: it hangs or died"
        found = pickle.loads(data)
        assert not isinstance(found, Failure), found.text
        return found
