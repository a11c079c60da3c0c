"""The recipe of docs/answers.md: calls in threads of asyncio; many at once, cancelled, interrupted."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import softdb


def test_many_tasks_at_once_ask_and_write(path: Path) -> None:
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


def test_a_cancelled_write_is_whole_or_not_there(path: Path) -> None:
    async def main(db: softdb.SoftDB) -> None:
        for i in range(8):
            task = asyncio.create_task(asyncio.to_thread(db.insert, range(500 * i, 500 * (i + 1)), np.ones((500, 8))))
            await asyncio.sleep(0.0005 * i)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        assert len((await asyncio.to_thread(db.search, np.ones((1, 8)), k=3)).ids[0]) <= 3  # the handle goes on

    with softdb.open(path, dim=8) as db:
        asyncio.run(main(db))  # waits for its threads
        stored = db.verify()
        assert stored % 500 == 0
        assert all(len({500 * i in db, 500 * i + 499 in db}) == 1 for i in range(8))
    with softdb.open(path) as db:
        assert db.verify() == stored


def test_an_interrupt_ends_a_program_and_leaves_whole_batches(path: Path) -> None:
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
        told = [5, *map(int, process.stdout.read().split())]
        assert process.stderr is not None
        assert b"KeyboardInterrupt" in process.stderr.read()
    assert process.returncode in (-signal.SIGINT, 130, 1)
    with softdb.open(path) as db:
        assert db.verify() in (100 * (told[-1] + 1), 100 * (told[-1] + 2))
