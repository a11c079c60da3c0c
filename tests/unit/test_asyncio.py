"""The recipe of docs/answers.md: calls in threads of asyncio, concurrent, cancelled and interrupted."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import softdb
from softdb.store import disk

SECONDS = 60.0  # after that something hangs


def test_many_tasks_search_and_write_at_once(path: Path) -> None:
    keys = np.eye(40, dtype=np.float32)

    async def work(db: softdb.SoftDB, i: int) -> list[int | str]:
        await asyncio.to_thread(db.insert, [i], keys[i : i + 1])
        hits = await asyncio.to_thread(db.search, keys[i : i + 1], k=1)
        return hits.ids[0]

    async def main(db: softdb.SoftDB) -> list[list[int | str]]:
        return await asyncio.gather(*(work(db, i) for i in range(40)))

    with softdb.open(path, dim=40) as db:
        assert asyncio.run(main(db)) == [[i] for i in range(40)]
        assert db.verify() == 40


@pytest.mark.parametrize("step", ["open", "write", "sync"])
def test_a_cancelled_write_is_complete_or_absent(path: Path, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    within, go, real = threading.Event(), threading.Event(), getattr(disk, step)

    def held(*args: Any, **words: Any) -> Any:
        within.set()
        assert go.wait(SECONDS)
        return real(*args, **words)

    async def cancelled(db: softdb.SoftDB, first: int, begins: bool) -> None:
        task = asyncio.create_task(asyncio.to_thread(db.insert, range(first, first + 500), np.ones((500, 8))))
        if begins:
            assert await asyncio.to_thread(within.wait, SECONDS)
        task.cancel()
        with pytest.raises(asyncio.CancelledError, match=r"^$"):
            await task

    async def main(db: softdb.SoftDB) -> None:
        await cancelled(db, 0, begins=False)
        with monkeypatch.context() as patch:
            patch.setattr(disk, step, held)
            await cancelled(db, 500, begins=True)
            assert (await asyncio.to_thread(db.search, np.ones((1, 8)), k=3)).ids == [[]]  # in the midst of the write
            go.set()
            await asyncio.to_thread(db.refresh)  # after the write
        assert (await asyncio.to_thread(db.search, np.ones((1, 8)), k=3)).ids == [[500, 501, 502]]

    with softdb.open(path, dim=8) as db:
        asyncio.run(main(db))
        assert db.verify() == 500
    with softdb.open(path) as db:
        assert db.verify() == 500
        assert set(range(500, 1000)) == {one for records in db.scan() for one in records.ids}


def test_an_interrupt_ends_a_program_and_leaves_complete_batches(path: Path) -> None:
    program = f"""
import asyncio, numpy as np, softdb
async def main():
    with softdb.open({str(path)!r}, dim=8) as db:
        for i in range(100_000):
            await asyncio.to_thread(db.insert, range(100 * i, 100 * (i + 1)), np.ones((100, 8)))
            print(i, flush=True)
asyncio.run(main())
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if int(line) == 5:
                process.send_signal(signal.SIGINT)
                break
        reports = [5, *map(int, process.stdout.read().split())]
        assert process.stderr is not None
        assert b"KeyboardInterrupt" in process.stderr.read()
    assert process.returncode in (-signal.SIGINT, 130, 1)
    with softdb.open(path) as db:
        assert db.verify() in (100 * (reports[-1] + 1), 100 * (reports[-1] + 2))
