"""Questions to a stranger's directory, asked by children that may not take long or much, and take nobody along.

`Nursery` keeps a process that has softdb and has used no threads; each task runs in a fork of it with a limit on its
address space and an alarm. What comes back is how it ended: "fine", the name of a SoftDBError, "raw …" for any other
exception, "signal …", or "hang".
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOM = 2 << 30  # bytes of address space that a child may take beyond what it begins with
SECONDS = 120  # a child that has not answered by then hangs; the slowest take one


class Ended(NamedTuple):
    """Outcome of a task."""

    how: str  # "fine", a SoftDBError's name, "raw …", "signal …", "hang"
    told: Any = None  # what the task returned, or the error's message

    @property
    def decent(self) -> bool:
        """True if the task answered or refused."""
        return not self.how.startswith(("raw", "signal", "hang"))


class Nursery:
    """A process that forks a child for each task, `module:function` of this folder with JSON arguments."""

    def __init__(self) -> None:
        folder, package = Path(__file__).parent, Path(importlib.import_module("softdb").__file__ or "").parents[1]
        paths = os.pathsep.join([str(folder), str(package), os.environ.get("PYTHONPATH", "")])
        self.process = subprocess.Popen(
            [sys.executable, "-W", "error", "-W", "ignore:no record has the field", __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
            text=True,
        )

    def run(self, task: str, *arguments: Any, seconds: float = SECONDS) -> Ended:
        """One task in a child of its own."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        order = {"task": task, "arguments": arguments, "seconds": seconds, "key": os.environ["SOFTDB_KEY_FILE"]}
        self.process.stdin.write(json.dumps(order, default=str) + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        assert answer, "the nursery died"
        return Ended(*json.loads(answer))

    def close(self) -> None:
        """Send it away."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.wait(60)
        self.process.stdout.close()


def _serve() -> None:
    """The nursery's own loop."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a child prints is no answer
    _warm()
    for line in sys.stdin:
        order = json.loads(line)
        with tempfile.TemporaryFile() as told:
            child = os.fork()
            if not child:
                _work(order, told.fileno())
            status = os.waitpid(child, 0)[1]
            told.seek(0)
            text = told.read().decode()
        if os.WIFSIGNALED(status):
            number = os.WTERMSIG(status)
            end: list[Any] = ["hang" if number == signal.SIGALRM else f"signal {number}", text]
        else:
            end = json.loads(text) if text else [f"raw exit {os.waitstatus_to_exitcode(status)}"]
        answers.write(json.dumps(end) + "\n")
        answers.flush()
    answers.close()


def _warm() -> None:
    """Import and compile once for all children, which saves each a second."""
    import softdb.formats
    import softdb.train

    with softdb.open(None, dim=2) as db:
        db.insert([1, 2], [[1, 0], [0, 1]], payloads=[{"x": 1}, None])
        for _, ask in _questions(db):
            with contextlib.suppress(softdb.SoftDBError):
                ask()


def _work(order: dict[str, Any], out: int) -> None:
    """One task, in the child, which ends here."""
    try:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, order["seconds"])
        taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (taken + ROOM, taken + ROOM))
        os.environ["SOFTDB_KEY_FILE"] = order["key"]
        module, _, name = order["task"].partition(":")
        end = _ended(getattr(importlib.import_module(module), name), order["arguments"])
        os.pwrite(out, json.dumps(end, default=str).encode(), 0)
    finally:
        os._exit(0)


def _ended(task: Callable[..., Any], arguments: list[Any]) -> list[Any]:
    import softdb

    try:
        return ["fine", task(*arguments)]
    except softdb.SoftDBError as error:
        return [type(error).__name__, str(error)]
    except BaseException as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        return [f"raw {type(error).__name__}", f"{error} in {where.filename}:{where.lineno}"]


def explore(path: str, mode: str, change: bool = False, verify: bool = False) -> dict[str, Any]:
    """Open a directory and ask everything of it; a question that is refused by name does not end the round.

    With `change`, write to it, too. Returns what was refused, by verb, and what it holds, where that can be read.
    """
    import softdb

    refused: dict[str, str] = {}
    found: dict[str, Any] = {}
    with softdb.open(path, mode=mode, verify=verify) as db:  # type: ignore[arg-type]
        for verb, ask in [*_questions(db), *(_changes(db, Path(path)) if change else ())]:
            try:
                found[verb] = ask()
            except softdb.SoftDBError as error:
                refused[verb] = f"{type(error).__name__}: {error}"
    return {"refused": refused, "held": found.get("scan"), "sound": "verify" not in refused}


def _questions(db: Any) -> Iterator[tuple[str, Callable[[], Any]]]:
    dim = db.stats().dim
    query = [[1.0] * min(dim, 1 << 20)]
    yield (
        "scan",
        lambda: [
            [one, key, payload]
            for records in db.scan(100)
            for one, key, payload in zip(records.ids, records.keys.tolist(), records.payloads, strict=True)
        ],
    )
    yield "len", lambda: len(db)
    yield "get", lambda: db.get(["a"]).payloads
    yield "in", lambda: ("a" in db, 3 in db, "no" in db)
    yield "search", lambda: db.search(query, k=3).ids
    yield "payloads", lambda: db.search(query, k=3).payloads
    yield "filter", lambda: db.count({"x": {"$gte": 1}})
    yield "contains", lambda: db.count({"tags": {"$contains": "t"}})
    yield "attend", lambda: db.attend(query).output.shape
    yield "filtered", lambda: db.search(query, k=3, where={"x": {"$ne": 1}}).ids
    yield "stats", lambda: db.stats().bytes
    yield "refresh", lambda: db.refresh()
    yield "verify", lambda: db.verify()


def _changes(db: Any, path: Path) -> Iterator[tuple[str, Callable[[], Any]]]:
    key = [[1.0] * db.stats().dim]
    values = {"values": [[1.0] * db.stats().value_dim]} if db.stats().value_dim else {}
    yield "insert", lambda: db.insert(["fresh"], key, payloads=[{"x": 5}], **values)
    yield "update", lambda: db.update(["fresh"], payloads=[{"x": 6}])
    yield "upsert", lambda: db.upsert(["a"], key, payloads=[{"x": 7}], **values)
    yield "index_field", lambda: db.index_field("x")
    yield "delete where", lambda: db.delete(where={"x": 6})
    yield "delete", lambda: db.delete(["a"])
    yield "compact", lambda: db.compact()
    yield "snapshot", lambda: db.snapshot(path.with_name(path.name + " copy"))
    yield "verify after", lambda: db.verify()


def imported(file: str, path: str) -> int:
    """Import a file into a new database of the width that it says."""
    import softdb
    from softdb.formats import import_records, read_records

    batches = read_records(file)
    with softdb.open(path, dim=3) as db:
        return import_records(db, batches)


def replayed(path: str, count: int) -> dict[str, Any]:
    """Search by an index that was put there, and exactly; `wrong` scores are those of no record."""
    import softdb

    with softdb.open(path, mode="r") as db:
        queries = db.get(list(range(0, count, count // 100))).keys
        hits, exact = db.search(queries, k=5), db.search(queries, k=5, exact=True)
        wrong = int((hits.scores > exact.scores + 1e-3).sum())
        index = db.stats().index
        return {"last": int(hits.rows.max()), "wrong": wrong, "kind": index and index.kind}


def projection(file: str) -> list[int]:
    """Load a trained projection."""
    import softdb.train

    return list(softdb.train.load(file).weight.shape)


def checkpoint(file: str) -> list[str]:
    """Load a checkpoint of a training."""
    from softdb.train import checkpoint as of

    return list(of.read(Path(file), {}))


if __name__ == "__main__":
    _serve()
