"""What one writing process with eight threads, and the processes that read beside it, do at once, and check meanwhile.

A shared byte a batch says how far it is: a view that began after a batch was acknowledged must hold it, one that began
after its deletion must not, and each holds it whole.
"""

from __future__ import annotations

import contextlib
import itertools
import shutil
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import crowd_batches as batches
import numpy as np
import torch
from numpy.typing import NDArray

import softdb
from softdb.errors import Cancelled

torch.set_num_threads(1)

LASTING, REPLACED = 330, 20  # batches that are there from the beginning; the first of them are replaced all the time
MOST = 1_000_000  # batches
COMING, THERE, GOING, GONE = 1, 2, 3, 4
KEPT = 30  # batches beyond those that last: with more, the deleting thread deletes
PATIENCE = 60  # seconds that a slow machine gets to do everything once

States = NDArray[np.int8]


class Views:
    """Checks of one database through every kind of question."""

    def __init__(self, db: softdb.SoftDB, states: Any, seed: int) -> None:
        self.db, self.random = db, np.random.default_rng(seed)
        self.states: States = np.frombuffer(states, np.int8)
        self.counts: Counter[str] = Counter()
        self.generation = 0

    def look(self) -> None:
        """One view, of a kind drawn at random."""
        before = self.states.copy()
        for _ in range(50):  # cheap, and most of what a commit may come between is in it
            newest = self.db.refresh()
            assert newest >= self.generation, f"generation {newest} after {self.generation}"
            self.generation = newest
        known = np.flatnonzero(before)
        batch = int(self.random.choice(known[-200:] if self.random.random() < 0.5 else known))
        kind = self.random.choice(["scan", "pieces", "count", "get", "search", "attend"])
        found = getattr(self, kind)(batch)
        if found is None:
            self.counts["overtaken"] += 1
            return
        seen, among = found
        after = self.states.copy()
        steady = [one for one in among if before[one] == after[one] == THERE]
        back = [one for one in seen if before[one] == GONE]
        assert set(steady) <= seen, f"{kind}: acknowledged but not seen: {sorted(set(steady) - seen)[:5]}"
        assert not back, f"{kind}: deleted but seen: {back[:5]}"
        self.counts["views"] += 1
        self.counts["batches seen whole"] += len(seen)

    def _moving(self, batch: int) -> bool:
        return batch < REPLACED or self.states[batch] in (GOING, GONE)

    def scan(self, _: int) -> tuple[set[int], NDArray[np.int64]]:
        """All at once."""
        records = list(self.db.scan(10**7))
        seen = batches.whole(records, lambda batch: batch < REPLACED)
        return seen, np.arange(REPLACED, len(self.states))

    def pieces(self, _: int) -> tuple[set[int], NDArray[np.int64]]:
        """Check a scan, which may lack records deleted or replaced before it reached them."""
        seen = batches.whole(list(self.db.scan(1000)), self._moving)
        return seen, np.arange(REPLACED, len(self.states))

    def count(self, batch: int) -> tuple[set[int], list[int]]:
        """A filter sees the newest generation whole."""
        count = self.db.count({"batch": batch})
        assert count in (0, batches.SIZE), f"count sees {count} of batch {batch}"
        return ({batch} if count else set()), [batch]

    def get(self, batch: int) -> tuple[set[int], list[int]] | None:
        """Ids that a later commit has replaced or deleted are unknown to a reader until it refreshes."""
        try:
            return batches.whole([self.db.get(batches.ids(batch))]), [batch]
        except softdb.UnknownId as error:
            return None if "refresh() shows it" in str(error) else (set(), [batch])

    def search(self, batch: int) -> tuple[set[int], list[int]] | None:
        """The nearest of a batch are the batch."""
        try:
            names = [str(one) for one in self.db.search(batches.near(batch), k=batches.SIZE, exact=True).ids[0]]
        except softdb.StaleRead:
            return None
        mine = [name for name in names if name.startswith(f"{batch}:")]
        assert len(mine) in (0, batches.SIZE), f"search sees {len(mine)} of batch {batch}"
        self._by_index(batch)
        return ({batch} if mine else set()), [batch]

    def _by_index(self, batch: int) -> None:
        """Check an index search, whose hits may be incomplete but never deleted."""
        before = self.states.copy()
        self.db.refresh()
        try:
            names = self.db.search(batches.near(batch), k=20).ids[0]
        except softdb.StaleRead:
            return
        back = [name for name in names if name is not None and before[int(str(name).split(":")[0])] == GONE]
        assert not back, f"the index finds what was deleted: {back}"

    def attend(self, batch: int) -> tuple[set[int], list[int]]:
        """A mean over a batch is of all its records, and of one version."""
        pooled = self.db.attend(torch.zeros(1, batches.DIM), weights="uniform", where={"batch": batch})
        many, (mean, version) = int(pooled.n_pooled[0]), pooled.output[0].tolist()
        assert many in (0, batches.SIZE), f"attend sees {many} of batch {batch}"
        assert not many or (mean == batch and version == int(version)), f"attend mixes {mean}, {version}"
        return ({batch} if many else set()), [batch]


def reads(line: Connection, path: Path, states: Any, seed: int) -> None:
    """Run checks in a process until it is stopped, then send their counts."""
    with softdb.open(path, mode="r") as db:
        views = Views(db, states, seed)
        line.send("reading")
        while not line.poll():
            views.look()
        line.send(views.counts)


class Crowd:
    """The writing process: eight threads on one handle, until one of them fails or time is up."""

    EACH = ("batches written", "batches replaced", "batches deleted", "compactions")  # what must have happened

    def __init__(self, path: Path, states: Any, seed: int) -> None:
        self.db = softdb.open(path)
        self.path, self.raw = path, states
        self.states: States = np.frombuffer(states, np.int8)
        self.random = np.random.default_rng(seed)
        self.numbers = itertools.count(LASTING)
        self.stop = threading.Event()
        self.errors: list[str] = []
        self.counts: Counter[str] = Counter()

    def works(self, seed: int) -> list[Callable[[int], None]]:
        """Loop of the threads."""
        views = [Views(self.db, self.raw, seed + i) for i in range(2)]
        return [
            self.insert, self.insert, self.replace, self.delete, self.compact, self.build,
            lambda _: views[0].look(), lambda _: views[1].look(),
        ]  # fmt: skip

    def insert(self, _: int) -> None:
        number = next(self.numbers)
        self.states[number] = COMING
        batches.write(self.db, number)
        self.states[number] = THERE
        self.counts["batches written"] += 1

    def replace(self, turn: int) -> None:
        number = turn % REPLACED
        self.db.upsert(batches.ids(number), **batches.content(number, turn))
        self.counts["batches replaced"] += 1

    def delete(self, turn: int) -> None:
        there = np.flatnonzero(self.states[LASTING : LASTING + 10**5] == THERE) + LASTING
        if len(there) <= KEPT:
            time.sleep(0.01)
            return
        number = int(there[turn % KEPT])
        self.states[number] = GOING
        gone = self.db.delete(where={"batch": number}) if turn % 2 else self.db.delete(batches.ids(number))
        self.states[number] = GONE
        assert gone == batches.SIZE, f"delete says {gone}"
        self.counts["batches deleted"] += 1

    def compact(self, turn: int) -> None:
        self.db.compact()
        self.counts["compactions"] += 1
        if turn % 10 == 0:
            self.copy()
        time.sleep(0.05)

    def copy(self) -> None:
        there = {int(one) for one in np.flatnonzero(self.states == THERE) if one >= LASTING}
        copy = self.path.with_name("copy")
        self.db.snapshot(copy)
        with softdb.open(copy, mode="r", verify=True) as db:
            seen = batches.whole(list(db.scan(10**6)))
        lost = {one for one in there - seen if self.states[one] == THERE}
        assert not lost, f"a copy lacks {sorted(lost)[:5]}"
        shutil.rmtree(copy)
        self.counts["copies"] += 1

    def build(self, turn: int) -> None:
        build = self.db.build_index(("ivf", "hnsw")[turn % 2], background=True)
        while not build.done:
            if self.stop.wait(0.02):
                build.cancel()
        with contextlib.suppress(Cancelled):
            build.result()
            self.counts["indexes built"] += 1

    def repeat(self, work: Callable[[int], None]) -> None:
        """One thread."""
        try:
            for turn in itertools.count(1):
                if self.stop.is_set():
                    return
                work(turn)
        except BaseException:
            self.errors.append(traceback.format_exc())
            self.stop.set()


def writes(line: Connection, path: Path, states: Any, seconds: float, seed: int) -> None:
    """Run a Crowd in a process and send its counts."""
    crowd = Crowd(path, states, seed)
    threads = [threading.Thread(target=crowd.repeat, args=(work,)) for work in crowd.works(seed)]
    for thread in threads:
        thread.start()
    most, start = 0, time.monotonic()

    def over() -> bool:
        took = time.monotonic() - start
        return took > seconds and (took > seconds + PATIENCE or all(crowd.counts[one] for one in crowd.EACH))

    while not over() and not crowd.stop.wait(0.05):
        most = max(most, (path / "catalog.sqlite-wal").stat().st_size)
    crowd.stop.set()
    for thread in threads:
        thread.join()
    assert not crowd.errors, "\n".join(crowd.errors)
    crowd.db.close()
    line.send((crowd.counts, most))
