"""Checks of a database whose writer was killed, and a sequence of many such writers."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from children import Order, Told
from kill_verbs import DIM, Act, World, put
from oracle import State, check, differences, held

import softdb

LOST, BACK, HALF = (f"kills: {what}" for what in ("acknowledged records lost", "deleted records back", "half batches"))


def after_kill(order: Order, told: Told) -> list[State]:
    """The states that a database may be in: that of the last act which was done, or of the one begun.

    A relaxed one may be that of any before, if it was not closed.
    """
    states = history(order, told.begun)
    return states if order.relaxed and told.killed else states[told.done :]


def history(order: Order, acts: int) -> list[State]:
    """Records that are stored before the first act and after each."""
    states = [order.state]
    for n in range(order.first, order.first + acts):
        states.append(order.acts(n, states[-1]).after)
    return states


def examine(order: Order, told: Told, tally: Counter[str], modes: tuple[str, ...] = ("r", "rw")) -> State:
    """Open a child's directory, compare, and return the records. Raise AssertionError with the command to repeat."""
    allowed = after_kill(order, told)
    tally["kills"] += told.killed
    for name in (LOST, BACK, HALF):
        tally[name] += 0
    state = allowed[0]
    try:
        for mode in modes:
            with Opened(order, told, mode) as db:
                if db is None:
                    continue
                count(held(db), allowed, tally)
                state = check(db, *allowed)
                answers(db, state)
                allowed = [state]
        copies(order, told)
    except (AssertionError, softdb.SoftDBError) as error:
        where = f"{told.steps[-1:]} after {told.done} acts ({told.begun} begun)"
        raise AssertionError(f"killed at {where} by {shown(order)}: {type(error).__name__} {error}") from error
    return state


def shown(order: Order) -> str:
    """An order as text, without its records."""
    return (
        f"acts={order.acts} schema={order.schema} first={order.first} count={order.count} kill={order.kill} "
        f"pages={order.pages} aside={order.aside} relaxed={order.relaxed} stored={len(order.state)}"
    )


class Opened:
    """A database, None where it was not made yet and nothing was acknowledged."""

    def __init__(self, order: Order, told: Told, mode: str) -> None:
        self.order, self.told, self.mode = order, told, mode
        self.db: softdb.SoftDB | None = None

    def __enter__(self) -> softdb.SoftDB | None:
        new = self.order.first == 0 and not self.order.state and not self.told.begun
        try:
            if self.mode == "rw":
                self.db = softdb.open(self.order.path, dim=DIM, **self.order.schema)
            else:
                self.db = softdb.open(self.order.path, mode="r")
        except (softdb.NotADatabase, softdb.CorruptionError):
            if not new or self.mode == "rw":
                raise
        return self.db

    def __exit__(self, *_: object) -> None:
        if self.db is not None:
            self.db.close()


def count(found: State, allowed: list[State], tally: Counter[str]) -> None:
    """Publish what went wrong, by name, before anything is raised."""
    if "" in [differences(found, state) for state in allowed]:
        return
    tally[LOST] += sum(all(one in state for state in allowed) and one not in found for one in allowed[0])
    tally[BACK] += sum(all(one not in state for state in allowed) for one in found)
    tally[HALF] += 1


def answers(db: softdb.SoftDB, state: State) -> None:
    """A search over everything, with an index and without, gives what brute force does."""
    ids = [one for one, held in state.items() if held.key is not None]
    if not ids:
        return
    keys = np.stack([state[one].key for one in ids]).astype(np.float64)
    queries = np.random.default_rng(len(state)).standard_normal((3, DIM))
    products = queries @ keys.T
    squares = (queries**2).sum(1)[:, None] - 2 * products + (keys**2).sum(1)
    scores = products if db.stats().metric == "dot" else -squares
    k = min(10, len(ids))
    expected = -np.sort(-scores, axis=1)[:, :k]
    hits = db.search(queries, k=k, exact=True)
    np.testing.assert_allclose(np.asarray(hits.scores), expected, rtol=1e-5, atol=1e-5)
    approximate = db.search(queries, k=k)
    for row, names in enumerate(approximate.ids):
        found = [scores[row, ids.index(name)] for name in names]
        np.testing.assert_allclose(np.asarray(approximate.scores)[row], found, rtol=1e-5, atol=1e-5)


def copies(order: Order, told: Told) -> None:
    """A copy that was acknowledged is whole, one that was cut short is whole or no database."""
    states = history(order, told.begun)
    for path in order.path.parent.glob("copy-*"):
        n = int(path.name.removeprefix("copy-"))
        try:
            with softdb.open(path, mode="r") as db:
                check(db, states[n - order.first])
        except softdb.NotADatabase:
            assert n == order.first + told.done, f"an acknowledged copy, {path.name}, is no database"
        shutil.rmtree(path)


@dataclass
class Life:
    """A database, its records, and the number of acts done to it."""

    path: Path
    acts: Callable[[int, State], Act]
    schema: dict[str, Any]
    state: State
    n: int = 0

    def order(self, **more: Any) -> Order:
        return Order(self.path, self.schema, self.state, self.acts, self.n, **more)

    def survived(self, order: Order, told: Told, tally: Counter[str], modes: tuple[str, ...]) -> None:
        """Continue with the directory that the child has left."""
        self.state = examine(order, told, tally, modes)
        self.n += told.begun


def stocked(path: Path, schema: dict[str, Any], records: int) -> State:
    """Make a database of some records."""
    world = World(path, schema)
    random = np.random.default_rng(records)
    one = put("insert", [f"old {i}" for i in range(records)], random, schema, 0, {})
    one.do(world)
    world.db.close()
    return one.after
