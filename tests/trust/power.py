"""Power cuts: every state that a history may leave is opened and compared with the acknowledged records."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import random
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from oracle import Model, Truth, check, held, text_of
from power_disk import DROP, KEEP, TEARS, Digests, Disk, Fate, Image, Step
from power_log import Held, History, Timeline, fingerprint, put

import softdb
from softdb.index import cache
from softdb.opening import existing

__all__ = ["Explorer", "Judge", "Violation", "allowed_at", "fates"]

Outcome = set[int] | str
Fates = dict[int, Fate]  # of steps by their position in the log; KEEP by default
ALL = 4  # up to this many unsynced steps are tried in every combination
MORE = "one more"  # the record that is added to what a cut has left


@dataclass
class Violation:
    """A cut that leaves a wrong database, with all that is needed to repeat it."""

    place: int  # number of steps taken
    fates: Fates
    step: str  # the last one
    told: str

    def __str__(self) -> str:
        lost = {place: tuple(fate) for place, fate in self.fates.items() if fate != KEEP}
        return f"power lost after step {self.place} ({self.step}), fates {lost}: {self.told}"


class Judge:
    """Opens what a cut has left, and says which states of its timeline each database is in."""

    def __init__(self, root: Path, timelines: list[Timeline]) -> None:
        self.root = root
        self.timelines = timelines
        self.prints = [[fingerprint(state) for state in timeline.states] for timeline in timelines]
        self.known: dict[bytes, Outcome] = {}  # by digest of all that the database may depend on

    def outcomes(self, image: Image, digests: Digests) -> list[Outcome]:
        """For each timeline the numbers of the states that its database is in, or its fault."""
        return [self._outcome(number, image, digests) for number in range(len(self.timelines))]

    def _outcome(self, number: int, image: Image, digests: Digests) -> Outcome:
        others = tuple(timeline.path + "/" for i, timeline in enumerate(self.timelines) if i != number)
        seen = {path: digest for path, digest in digests.items() if not path.startswith(others)}
        key = hash_of(seen) + bytes([number])
        if key not in self.known:
            shutil.rmtree(self.root, ignore_errors=True)
            self.root.mkdir()
            put({path: image[path] for path in seen}, self.root)
            self.known[key] = self._one(number, whole=len(self.known) % 8 == 0)
        return self.known[key]

    def _one(self, number: int, whole: bool) -> Outcome:
        """Outcome of an image. `whole`: ask it in every way, and by a reader first."""
        timeline = self.timelines[number]
        path = self.root / timeline.path
        try:
            refused = _read(path) if whole else None
            try:
                db = existing(path)
            except softdb.NotADatabase:
                return self._absent(number)
            if db.dim is None and timeline.create is not None:  # the cut fell into its creation
                db.close()
                return self._absent(number)
            with db:
                db.verify()
                state = _held(db, whole)
                assert not (refused and state.records), f"a reader is refused what a writer opens: {refused}"
                found = fingerprint(state)
                if found not in self.prints[number]:
                    return f"{timeline.path} is in none of its states, it holds {len(state.records)} records"
                after = _one_more(db, state)
            _require(path, after)
            if whole:
                _go_on(path)
            if (self.root / "state").exists():
                cache._key()  # raises where an index could never be saved again
        except Exception as error:
            return f"{timeline.path}: {type(error).__name__}: {error}"
        return {i for i, one in enumerate(self.prints[number]) if one == found}

    def _absent(self, number: int) -> Outcome:
        """There is no database; it can be made by the call that made it before."""
        timeline = self.timelines[number]
        if timeline.create is not None:
            with softdb.open(self.root / timeline.path, **timeline.create) as db:
                after = _one_more(db, _held(db, True))
            assert len(after.records) == 1, "a new database is not empty"
            _require(self.root / timeline.path, after)
        return {0}


def hash_of(digests: Digests) -> bytes:
    """One digest of many."""
    text = repr(sorted(digests.items())).encode()
    return hashlib.blake2b(text, digest_size=16).digest()


def _read(path: Path) -> softdb.SoftDBError | None:
    """A reader sees what there is, if it is first, too. Returns why it is refused."""
    try:
        with softdb.open(path, mode="r", verify=True) as db:
            _held(db, True)
    except softdb.SoftDBError as error:
        return error
    return None


def _held(db: softdb.SoftDB, whole: bool) -> Held:
    """Return the records of a database; with `whole`, ask it in every other way, too."""
    state = held(db)
    assert len(db) == len(state), f"{len(db)} records are counted, {len(state)} held"
    if whole:
        check(db, state)
    elif state and db._store.index_entry() is not None:
        some = db.search(np.zeros((1, db.dim), np.float32), k=3).ids[0]
        assert set(some) <= set(state), f"search finds {some}"
    return Held(state, tuple(db.stats().fields))


def _one_more(db: softdb.SoftDB, state: Held) -> Held:
    """Write one more record, and return the records expected then."""
    schema = db._store.schema
    key = np.ones(schema.dim, schema.dtype)
    value: Any = np.ones(schema.value_dim, schema.dtype) if schema.value_dim else 1 if schema.num_classes else None
    db.insert([MORE], key[None], None if value is None else [value], payloads=[{"n": 1}])
    return Held({**state.records, MORE: Truth(key, value, {"n": 1})}, state.fields)


def _require(path: Path, state: Held) -> None:
    """Raise AssertionError unless another handle finds exactly that."""
    with softdb.open(path, mode="r", verify=True) as db:
        found = Held(held(db), tuple(db.stats().fields))
    assert fingerprint(found) == fingerprint(state), (
        f"{len(found.records)} records, {found.fields} after one more, not {len(state.records)}, {state.fields}"
    )


def _go_on(path: Path) -> None:
    """Whatever a run that made new keys has left, one by its encoder makes the right ones."""
    for folder in path.glob("reembed-*"):
        model = Model("another", 3)
        with contextlib.suppress(softdb.SoftDBError), softdb.open(folder, mode="r") as gathered:
            model = Model(gathered.encoder_name or "another", gathered.dim)
        with softdb.open(path) as db:
            before = held(db)
            db.reembed(model, field=text_of)
            check(db, model.of(before, {"value_dim": 1} if db.core.schema.has_values else {}))
            assert not folder.exists()


@dataclass
class Explorer:
    """Takes a history's cuts one after another."""

    history: History
    judge: Judge
    seed: int = 0
    seen: set[bytes] = field(default_factory=set)  # digests of images: each counts once
    tally: Counter[str] = field(default_factory=Counter)

    def cut(self, disk: Disk, place: int, fates: Fates, step: Step, allowed: list[range]) -> Violation | None:
        """Cut the power after `place` steps."""
        image, digests = disk.after(lambda one: fates.get(one, KEEP))
        self.tally["power loss: states explored"] += hash_of(digests) not in self.seen
        self.seen.add(hash_of(digests))
        for outcome, right in zip(self.judge.outcomes(image, digests), allowed, strict=True):
            if isinstance(outcome, str):
                return Violation(place, fates, step.label, outcome)
            if not outcome & set(right):
                told = f"it is in state {sorted(outcome)}, one of {list(right)} was acknowledged"
                return Violation(place, fates, step.label, told)
        return None

    def explore(
        self,
        random_ones: int,  # mixtures at each step
        start: int = 0,  # first step to cut at
        tears: int = 1,  # kinds that each write is torn in
        share: float = 1,  # of the states that are opened, drawn anew at each step
    ) -> Violation | None:
        """The first violation that is found, in order of the log."""
        disk, allowed = Disk(self.history.image), allowed_at(self.history)
        for place, step in enumerate(self.history.steps):
            disk.do(place, step)
            if place < start or step.act in ("begin", "flushed"):
                continue
            rng = random.Random(f"{self.seed} {place}")
            newest = place if step.act in ("write", "truncate", "entry") else None
            for one in fates(disk.waiting(), newest, rng, random_ones, tears):
                if rng.random() >= share:
                    continue
                found = self.cut(disk, place + 1, one, step, allowed[place + 1])
                if found is not None:
                    return found
        return None


def allowed_at(history: History) -> list[list[range]]:
    """By number of steps taken: for each timeline the states that a cut may leave."""
    bounds = [[0, 0, 0] for _ in history.timelines]  # numbers of states: durable, acknowledged, that may show
    found = [[range(1) for _ in bounds]]
    for step in history.steps:
        if step.act in ("begin", "acknowledged", "flushed"):
            mine = bounds[step.node]
            if step.act == "begin":
                mine[2] = step.offset
            elif step.act == "acknowledged":
                mine[1] = step.offset
            else:
                mine[0] = mine[1]
        found.append([range(low, high + 1) for low, _, high in bounds])
    return found


def fates(
    waiting: list[tuple[int, Step]],
    newest: int | None,  # the step just taken: it is kept or torn, for without it the disk is as one step before
    rng: random.Random,
    random_ones: int,
    tears: int,
) -> Iterator[Fates]:
    """Fates of steps that no sync covers: all of them if few, else the extremes and a sample."""
    places = [place for place, step in waiting if "lock" not in step.label]  # anything may stand in a lock file
    rest = {place: DROP for place, _ in waiting}
    yield {}
    yield {**rest, **({} if newest is None else {newest: KEEP})}
    if len(places) <= ALL:
        for some in itertools.product((KEEP, DROP), repeat=len(places)):
            chosen = dict(zip(places, some, strict=True))
            if newest is None or chosen.get(newest) != DROP:
                yield chosen
    else:
        for one in (places[0], places[-2], rng.choice(places)):
            if one != newest:
                yield {one: DROP}
                yield {place: KEEP if place in (one, newest) else DROP for place in places}
    writes = [place for place, step in waiting if step.act == "write" and place in places]
    torn = writes if newest is None else [newest] if newest in writes else []
    for place in torn[-8:]:
        for kind in rng.sample(TEARS, tears):
            fate = Fate(kind, rng.randrange(1 << 30))
            yield {place: fate}
            yield {**rest, place: fate}
    for _ in range(random_ones if len(places) > 1 else 0):
        yield _mixture(waiting, newest, rng)


def _mixture(waiting: Iterable[tuple[int, Step]], newest: int | None, rng: random.Random) -> Fates:
    share = rng.random()
    chosen: Fates = {}
    for place, step in waiting:
        if step.act == "write" and rng.random() < 0.2:
            chosen[place] = Fate(rng.choice(TEARS), rng.randrange(1 << 30))
        elif place != newest and rng.random() < share:
            chosen[place] = DROP
    return chosen
