"""Mutations of a protocol: a log with one kind of sync left out, or with two neighbouring steps in the other order.

A test that explores the cuts of a mutated log must find a violation, or the step is not needed.
"""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from power import Explorer, Fates, Violation, allowed_at
from power_disk import DROP, KEEP, Disk, Fate, Step, label_of
from power_log import History

__all__ = ["Mutation", "labelled", "mutations", "violation", "without"]

MARKS = ("begin", "acknowledged", "flushed")
_OF_SQLITE = re.compile(r": sync catalog\.sqlite|: sync_directory .*catalog\.sqlite-")
REACH = 16  # steps after a change in which it is looked for first
CHANGES = ("write", "truncate", "entry")
_WITHIN, _CLOSELY, _AT_THE_END, _ELSEWHERE = "where it is changed", "and closely", "where verbs end", "elsewhere"


class Mutation(NamedTuple):
    """A log that is not the one that was taken down."""

    name: str
    steps: list[Step]
    changed: set[int]  # places in the new log where a change may show at once


class _Unit(NamedTuple):
    """Steps of one name that follow each other; a commit and a checkpoint are each one."""

    label: str
    steps: list[Step]


def labelled(history: History) -> list[str]:
    """The full name of every step. What SQLite does by itself is the same in every verb; its commits are the verbs'."""
    disk, names = Disk(history.image), []
    for place, step in enumerate(history.steps):
        name = label_of(step, disk)
        if _OF_SQLITE.search(name) and not name.endswith("(write)"):
            name = f"SQLite: {name.partition(': ')[2]}"
        names.append(name)
        disk.do(place, step)
    return names


def mutations(history: History) -> Iterator[Mutation]:
    """Every kind of sync left out, then every two neighbours in the other order."""
    names = labelled(history)
    for name in dict.fromkeys(name for name, step in zip(names, history.steps, strict=True) if step.act == "sync"):
        yield without(history, name)
    units = _units(history.steps, names)
    for some in (units, list(_with_marks(units))):
        pairs = [(a.label, b.label) for a, b in itertools.pairwise(some) if _may_swap(a, b)]
        known = {unit.label for unit in units} if some is not units else set()
        yield from (_swapped(some, pair) for pair in dict.fromkeys(pairs) if not known.issuperset(pair))


def _with_marks(units: list[_Unit]) -> Iterator[_Unit]:
    """Commits together with the mark of acknowledged commits: a step after both may not come before."""
    marked = False
    for unit, after in zip(units, [*units[1:], _Unit("", [])], strict=True):
        if not marked:
            marked = ": commit of " in unit.label and after.label.endswith(": write committed")
            yield _Unit(f"{unit.label} and its mark", unit.steps + after.steps) if marked else unit
        else:
            marked = False


def without(history: History, *left_out: str) -> Mutation:
    """The log without steps of some names."""
    kept: list[Step] = []
    starts = []
    for name, step in zip(labelled(history), history.steps, strict=True):
        if name in left_out:
            starts.append(len(kept))
        else:
            kept.append(step)
    return Mutation(f"without {' and '.join(left_out)}", kept, _reach(kept, starts))


def _reach(steps: list[Step], starts: Iterable[int], length: int = 0) -> set[int]:
    """Places from some on, as far as they belong to the same verb and are not far away."""
    found: set[int] = set()
    for start in starts:
        near = range(start, min(len(steps), start + length + REACH))
        found |= {start, *itertools.takewhile(lambda i: steps[i].act not in MARKS, near)}
    return found


def _units(steps: list[Step], names: list[str]) -> list[_Unit]:
    units: list[_Unit] = []
    for name, step in zip(names, steps, strict=True):
        last = units[-1] if units else None
        if last is not None and step.act not in MARKS and (last.label == name or _belongs(last, step)):
            last.steps.append(step)
        else:
            units.append(_Unit(name, [step]))
    return [_Unit(_named(unit), unit.steps) for unit in units]


def _belongs(unit: _Unit, step: Step) -> bool:
    """Return whether a sync or a truncation ends SQLite's work on these writes."""
    last = unit.steps[-1]
    return last.act in ("write", "truncate") and last.node == step.node and ".sqlite" in step.label


def _named(unit: _Unit) -> str:
    phase, _, first = unit.steps[0].label.partition(": ")
    if unit.steps[0].act == "write" and unit.steps[-1].act == "sync" and ".sqlite" in first:
        what = "head" if not unit.steps[0].offset and len(unit.steps) == 2 else "commit"
        return f"{phase}: {what if '-wal' in first else 'pages'} of {first.split()[-1]}"
    return unit.label


def _may_swap(first: _Unit, second: _Unit) -> bool:
    """Return whether the other order of two units is possible and may matter to a cut."""
    both = first.steps + second.steps
    if any(step.act in MARKS for step in both) or not any(step.act == "sync" for step in both):
        return False  # between two steps without a sync anything goes already
    made = {node for step in first.steps if step.makes for _, node in step.entries}
    if made & {node for step in second.steps for node in (step.node, *(node for _, node in step.entries))}:
        return False
    return not {step.node for step in first.steps} & {step.node for step in second.steps}  # else as without the sync


def _swapped(units: list[_Unit], pair: tuple[str, str]) -> Mutation:
    steps: list[Step] = []
    starts, length = [], 0
    i = 0
    while i < len(units):
        here = units[i : i + 2]
        if tuple(unit.label for unit in here) == pair and _may_swap(*here):
            starts.append(len(steps))
            length = max(length, len(here[0].steps) + len(here[1].steps))
            steps += here[1].steps + here[0].steps
            i += 2
        else:
            steps += units[i].steps
            i += 1
    return Mutation(f"{pair[1]} before {pair[0]}", steps, _reach(steps, starts, length))


def violation(
    explorer: Explorer,
    mutation: Mutation,
    limit: int,  # states that are opened at most
) -> Violation | None:
    """Violations that the explorer finds in a mutated log, beginning near the mutation."""
    durable = _durable(explorer.history)
    mutated = Explorer(explorer.history._replace(steps=mutation.steps), explorer.judge, explorer.seed)
    for where, most in ((_WITHIN, limit), (_CLOSELY, limit), (_AT_THE_END, limit // 4), (_ELSEWHERE, limit // 8)):
        most += len(explorer.judge.known)
        for found in _cuts(mutated, mutation, durable, where):
            if found is not None:
                return found
            if len(explorer.judge.known) >= most:
                break
    return None


def _durable(history: History) -> dict[int, int]:
    """For each change, by identity: how many changes and marks there were when a sync covered it."""
    disk, count, found = Disk(history.image), 0, dict[int, int]()
    for place, step in enumerate(history.steps):
        if step.act == "sync":
            found.update({id(one): count for _, one in disk.pending.get(step.node, ())})
        else:
            count += 1
        disk.do(place, step)
    return found


def _cuts(explorer: Explorer, mutation: Mutation, durable: dict[int, int], where: str) -> Iterator[Violation | None]:
    """Cuts where something is not durable that was so in the true log, or has been done earlier than there."""
    disk, allowed, count = Disk(explorer.history.image), allowed_at(explorer.history), 0
    for place, step in enumerate(mutation.steps):
        disk.do(place, step)
        count += step.act != "sync"
        late = [one for one, change in disk.waiting() if durable.get(id(change), 1 << 60) < count]
        within = place in mutation.changed
        here = (_AT_THE_END,) if step.act == "flushed" else (_WITHIN, _CLOSELY) if within else (_ELSEWHERE,)
        if where in here and (late or within):
            rng = random.Random(f"{explorer.seed} {place}")
            newest = place if step.act in CHANGES else None
            chosen = _at_rest(disk, late, rng) if where == _AT_THE_END else _in_flight(disk, late, newest)
            for fates in _closely(disk, late, newest, rng) if where == _CLOSELY else chosen:
                yield explorer.cut(disk, place + 1, fates, step, allowed[place + 1])


def _at_rest(disk: Disk, late: list[int], rng: random.Random) -> Iterator[Fates]:
    """When a verb has ended."""
    waiting = disk.waiting()
    yield dict.fromkeys(late, DROP)
    yield {place: DROP for place, _ in waiting}
    yield {place: KEEP if place in late else DROP for place, _ in waiting}
    yield {place: Fate("zeros") for place, step in waiting if place in late and step.act == "write"}
    yield {place: Fate("garbage", rng.randrange(1 << 30)) for place, step in waiting if step.act == "write"}
    yield dict.fromkeys(late[-1:], DROP)
    yield {place: DROP for place, _ in waiting if place not in late[-1:]}


def _in_flight(disk: Disk, late: list[int], newest: int | None) -> Iterator[Fates]:
    """Within a verb, where the order of its steps shows."""
    yield dict.fromkeys(late, DROP)
    yield {place: KEEP if place == newest else DROP for place, _ in disk.waiting()}


def _closely(disk: Disk, late: list[int], newest: int | None, rng: random.Random) -> Iterator[Fates]:
    """Within a verb, with less that is likely."""
    gone, rest = dict.fromkeys(late, DROP), {place: DROP for place, _ in disk.waiting()}
    yield rest
    torn = {one for one, step in disk.waiting() if one in gone and step.act == "write"}
    yield {one: Fate("garbage", rng.randrange(1 << 30)) for one in sorted(torn)}
    if newest is not None:
        yield {**gone, newest: KEEP}
        for kind in ("zeros", "garbage"):
            yield {**gone, newest: Fate(kind, rng.randrange(1 << 30))}
        for place in late[-1:]:
            yield {place: DROP, newest: Fate("garbage", rng.randrange(1 << 30))}
