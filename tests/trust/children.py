"""Processes that write to a database, report their progress and die, forked in milliseconds from a warm one.

`Nursery` keeps that one, which has softdb and has used no threads. A child says "begin n" before its n-th act and
"done n" after it on a pipe. It is reaped when the nursery is told to: a process that is killed still has its number.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import signal
import socket
import struct
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from kill_verbs import Act, World, act
from oracle import State
from tap import Op, Tap, tapped

import softdb
from softdb.store import segments
from softdb.store import writer as writing

WHEN = ("before", "half", "after")
PATIENCE = 120  # seconds after which a child is stuck


class Kill(NamedTuple):
    """The step at which a child kills itself."""

    when: str  # before, half of a write, after
    nth: int  # of those that count, from 0 on
    point: str | None = None  # the steps that count; None: all


@dataclass
class Order:
    """Commands for a child."""

    path: Path
    schema: dict[str, Any]
    state: State  # the stored records
    acts: Callable[[int, State], Act]  # the n-th act; a function of a module
    first: int  # n of the first act
    count: int
    kill: Kill | None = None
    watch: bool = False  # tell each step
    key_file: str = field(default_factory=lambda: os.environ["SOFTDB_KEY_FILE"])
    pages: int | None = None  # after which SQLite folds its log in; None: as it does
    aside: bool = False  # columns are written by a thread of their own, as large ones are
    relaxed: bool = False  # and flushed after milliseconds


@dataclass(frozen=True)
class Seeded:
    """The acts of a life."""

    seed: int
    schema: dict[str, Any]

    def __call__(self, n: int, state: State) -> Act:
        return act(self.seed, n, self.schema, state)


@dataclass
class Told:
    """Messages from a child."""

    begun: int  # acts begun, the last perhaps unfinished
    done: int
    killed: bool
    steps: list[str]  # those that it passed, or the one at which it died


class Suicide(Tap):
    """Counts the steps and kills the process at one of them; says which that was, or all."""

    def __init__(self, order: Order, say: Callable[[str], None]) -> None:
        self.kill, self.watch, self.say = order.kill, order.watch, say
        self.seen = 0

    def before(self, op: Op) -> None:
        if self._is_it(op, "before"):
            self._die(op)
        if self._is_it(op, "half"):
            self._write_half(op)
            self._die(op)

    def after(self, op: Op) -> None:
        if self._is_it(op, "after"):
            self._die(op)
        if self.watch:
            self.say(f"step {op.point}")
        self.seen += self.kill is not None and self.kill.point in (None, op.point)  # those alone that were made

    def _is_it(self, op: Op, when: str) -> bool:
        kill = self.kill
        return kill is not None and kill.when == when and kill.point in (None, op.point) and kill.nth == self.seen

    def _write_half(self, op: Op) -> None:
        if op.name == "write":
            descriptor = os.open(op.path, os.O_WRONLY)
            os.pwrite(descriptor, op.data[: len(op.data) // 2], op.offset)

    def _die(self, op: Op) -> None:
        self.say(f"step {op.point}")
        os.kill(os.getpid(), signal.SIGKILL)


def live(order: Order, say: Callable[[str], None]) -> None:
    """A child's life."""
    os.environ["SOFTDB_KEY_FILE"] = order.key_file
    if order.aside:
        segments.BACKGROUND_BYTES = 1
    writing.DELAY = 0.005
    if order.pages is not None:
        writing.PAGES = order.pages
    with contextlib.ExitStack() as around:
        if order.kill is not None or order.watch:
            around.enter_context(tapped(Suicide(order, say), order.path.parent))
        say("start")
        world, state = World(order.path, order.schema, order.relaxed), order.state
        for n in range(order.first, order.first + order.count):
            one = order.acts(n, state)
            say(f"begin {n}")
            one.do(world)
            say(f"done {n}")
            state = one.after
        world.db.close()
        say("end")


class Nursery:
    """The process that children are forked from."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair()
        here = str(Path(__file__).parent)
        code = f"import sys; sys.path.insert(0, {here!r}); import children; children.serve({theirs.fileno()})"
        one = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        self._process = subprocess.Popen(
            [sys.executable, "-c", code], pass_fds=[theirs.fileno()], env={**os.environ, **one}
        )
        theirs.close()

    def close(self) -> None:
        self._socket.close()
        self._process.wait(PATIENCE)

    @contextlib.contextmanager
    def child(self, order: Order) -> Iterator[Child]:
        """A child that has started; at the end it is dead."""
        reading, writing = os.pipe()
        body = pickle.dumps(order)
        socket.send_fds(self._socket, [struct.pack("<q", len(body))], [writing])
        os.close(writing)
        self._socket.sendall(body)
        (pid,) = struct.unpack("<q", _exactly(self._socket, 8))
        child = Child(pid, reading, order)
        try:
            yield child
        finally:
            os.kill(pid, signal.SIGKILL)  # dead or not, it is not reaped yet
            self._socket.sendall(b"r")
            (child.status,) = struct.unpack("<q", _exactly(self._socket, 8))
            os.close(reading)

    def run(self, order: Order, seconds: float | None = None) -> Told:
        """Outcome of a child that was killed after some seconds, unless it ended or killed itself."""
        with self.child(order) as child:
            child.hear("start")
            if seconds is not None:
                time.sleep(seconds)
                os.kill(child.pid, signal.SIGKILL)
            child.hear(None)
        return child.told()


class Child:
    """A child, as the parent of the nursery sees it."""

    def __init__(self, pid: int, pipe: int, order: Order) -> None:
        self.pid, self.order, self.status = pid, order, 0
        self._pipe, self._text = pipe, ""

    def hear(self, until: str | None) -> None:
        """Read the child's output up to a line, or all of it."""
        while until is None or f"{until}\n" not in self._text:
            ready, _, _ = select.select([self._pipe], [], [], PATIENCE)
            assert ready, f"child {self.pid} is stuck after {self._text[-200:]!r}"
            more = os.read(self._pipe, 1 << 16)
            if not more:
                return
            self._text += more.decode()

    def told(self) -> Told:
        """All that it said. Raises AssertionError where it failed by itself."""
        lines = self._text.split("\n")
        broken = [i for i, line in enumerate(lines) if line.startswith("error")]
        assert not broken, "a child failed: " + "\n".join(lines[broken[0] :])
        words = [line.split(" ", 1) for line in lines[:-1]]
        begun, done = (sum(1 for first, *_ in words if first == word) for word in ("begin", "done"))
        ended = ["end"] in words
        assert ended or os.WTERMSIG(self.status) == signal.SIGKILL, f"a child died of status {self.status}"
        return Told(begun, done, not ended, [rest[0] for first, *rest in words if first == "step"])


def serve(descriptor: int) -> None:
    """Fork a child for each order until the orders end."""
    _warm_up()
    orders = socket.socket(fileno=descriptor)
    while True:
        head, pipes, _, _ = socket.recv_fds(orders, 8, 1)
        if not head:
            return
        head += _exactly(orders, 8 - len(head)) if len(head) < 8 else b""
        body = _exactly(orders, struct.unpack("<q", head)[0])
        pid = os.fork()
        if not pid:
            orders.close()
            _be_child(pickle.loads(body), pipes[0])
        os.close(pipes[0])
        orders.sendall(struct.pack("<q", pid))
        assert _exactly(orders, 1) == b"r"
        orders.sendall(struct.pack("<q", os.waitpid(pid, 0)[1]))


def _warm_up() -> None:
    """Import all that a child will use, without threads, which it would not have."""
    import faiss  # noqa: F401

    with softdb.open(None, dim=2) as db:
        db.insert(["a", "b"], np.eye(2))
        db.search(np.eye(2), k=1)
    tasks, end = Path("/proc/self/task"), time.monotonic() + PATIENCE
    while tasks.is_dir() and len(list(tasks.iterdir())) > 1:  # a closed handle's thread ends soon
        assert time.monotonic() < end
        time.sleep(0.01)


def _be_child(order: Order, pipe: int) -> None:
    def say(line: str) -> None:
        os.write(pipe, f"{line}\n".encode())

    try:
        live(order, say)
    except BaseException:
        say("error " + traceback.format_exc())
    finally:
        os._exit(0)


def _exactly(source: socket.socket, size: int) -> bytes:
    parts = b""
    while len(parts) < size:
        more = source.recv(size - len(parts))
        if not more:
            raise EOFError("the nursery is closed")
        parts += more
    return parts
