"""Building an index, choosing what to build, and tuning it until the recall asked for is measured."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch
from torch import Tensor

from softdb.check import Metric, shown
from softdb.errors import BadInput
from softdb.index.choose import KINDS, TRIED, Plan, Progress, budget, choose, plans
from softdb.index.contract import Floats, Index, Rows, faiss_module, prepared
from softdb.index.flat import nearest
from softdb.index.ivf import POINTS_A_LIST, lists_for
from softdb.index.search import find
from softdb.index.tune import Setting, recall_of, seconds_of, settle, steadied
from softdb.store import Snapshot

__all__ = ["KINDS", "Progress", "Target", "build", "checked", "tuned"]

SMALL = 20_000  # records that are compared exactly in about a millisecond: no index is faster
LEAST = 1000  # records that an index can be trained on
QUERIES = 512  # half of which the effort is tuned on, and half the recall is reported on
BLOCK = 50_000  # records added at once
TRAINED = 1 << 14  # records that codes are trained on at least
BUILT = 3  # indexes at most, where the one that looked best on a sample does not reach the recall
AIMS = 4  # times that the aim is raised where the other half's recall is lower than that of the half tuned on


class Target:
    """The recall to reach, for which k, measured on what."""

    def __init__(self, recall: float, k: int, queries: Tensor | None) -> None:
        self.recall, self.k, self.queries = recall, k, queries


def checked(kind: object, recall: object, memory: object = None) -> tuple[str, float, int | None]:
    """Kind, recall target and memory in bytes, or BadInput."""
    if kind not in ("auto", "flat", *KINDS):
        raise BadInput(f"kind is {shown(kind)}; choose one of 'auto', 'flat', {', '.join(map(repr, KINDS))}")
    if isinstance(recall, bool) or not isinstance(recall, int | float) or not 0 < recall <= 1:
        raise BadInput(f"recall is {shown(recall)}; expected a share above 0 and at most 1, such as 0.95")
    return str(kind), float(recall), budget(memory)


def build(
    snapshot: Snapshot,
    metric: Metric,
    kind: str,
    recall: float,
    k: int,
    queries: Tensor | None,
    progress: Progress | None,
    memory: int | None = None,
) -> tuple[Index | None, dict[str, Any]]:
    """An index over a snapshot and a report of what was measured; None where exact search serves better.

    Cost: a few indexes of at most 50,000 records to choose by, k-means over a sample, one pass over the keys, and the
    exact search of 512 queries. Memory: the codes, and a sample and a block of keys.
    """
    if kind == "flat" or (kind == "auto" and snapshot.count < SMALL):
        reason = "asked for" if kind == "flat" else f"{snapshot.count} records are searched exactly in a moment"
        return None, {"kind": "flat", "reason": reason, "recall": 1.0, "met": True}
    faiss_module()
    target = Target(recall, k, queries)
    if snapshot.count < LEAST:
        raise BadInput(f"{snapshot.count} records are too few to train an index on; it takes {LEAST}, or kind='flat'")
    dim = snapshot.segments[0].keys.shape[1]
    fit = plans(kind, dim, snapshot.count, memory)
    say = progress or (lambda *_: None)
    start = time.perf_counter()
    ranked = _ranked(snapshot, metric, fit, target, say)[:BUILT]
    chosen = time.perf_counter()
    index = plan = None
    while ranked and (index is None or not index.report["met"]):
        plan = ranked.pop(0)
        index = None  # its memory goes before the next is made
        begun = time.perf_counter()
        index = _filled(snapshot, metric, plan, say)
        built = time.perf_counter()
        index.report = {"codes": plan.codes, "lists": int(getattr(index.inner, "nlist", 0)) or None}
        tuned(snapshot, index, target, say)
        ranked = [other for other in ranked if other.size > plan.size]  # only finer codes can do better
    assert index is not None
    assert plan is not None
    if memory is not None and not index.report["met"] and kind == "auto":
        raise _short(index, plan, plans(kind, dim, snapshot.count, None), memory, target)
    index.report |= {"choose_seconds": round(chosen - start, 2), "build_seconds": round(built - begun, 2)}
    return index, index.report


def tuned(snapshot: Snapshot, index: Index, target: Target, say: Progress) -> None:
    """Set effort and candidates until the recall is measured, and report what queries that took no part in it find."""
    start = time.perf_counter()
    asked, own = _questions(snapshot, target.queries)
    index.tuned_for = target.k + 1
    exam = _Exam(snapshot, index, asked, own, target.k)
    setting, measured = _aimed(exam, target.recall, say)
    index.effort, index.candidates = setting.effort, setting.candidates
    index.report = {
        **{name: value for name, value in index.report.items() if name in ("codes", "lists")},
        "kind": index.kind,
        "recall": round(measured, 4),
        "target": target.recall,
        "met": measured >= target.recall,
        "k": target.k,
        "measured_on": "queries given" if own is None else "stored keys, each without itself",
        index.effort_name: index.effort,
        "candidates": index.candidates,
        "records": snapshot.count,
        "bytes": int(index.dump().nbytes),
        "tune_seconds": round(time.perf_counter() - start, 2),
    }


def _aimed(exam: _Exam, recall: float, say: Progress) -> tuple[Setting, float]:
    """A setting, and the recall of the half that it was not tuned on: the aim is raised while that is too low."""

    def told(done: int, whole: int) -> None:
        say("measuring", done, whole)

    goal = recall
    for aim in range(AIMS):
        setting = steadied(exam, exam.index.effort_most, settle(exam, exam.index, goal, told))
        measured = exam.recall(setting.effort, setting.candidates, held=True)
        if measured >= recall or setting.recall < goal or goal == 1:
            break
        goal = min(1.0, goal + 1.5 * (recall - measured) + (1 - recall) * (aim + 1) / 10)
    return setting, measured


class _Exam:
    """Questions to a whole database: one half to tune on, the other held aside."""

    def __init__(self, snapshot: Snapshot, index: Index, asked: Tensor, own: Rows | None, k: int) -> None:
        self.snapshot, self.index, self.asked, self.own = snapshot, index, asked, own
        self.wanted = k + (own is not None)
        self.truth = nearest(snapshot, asked, self.wanted, index.metric)
        self.known: dict[tuple[int, int, bool], float] = {}

    def recall(self, effort: int, candidates: int, held: bool = False) -> float:
        """The share of the true nearest that a search finds."""
        name = (effort, candidates, held)
        if name not in self.known:
            half = slice(1, None, 2) if held and len(self.asked) > 1 else slice(0, None, 2)
            found = self._search(self.asked[half], effort, candidates)
            self.known[name] = recall_of(found, self.truth[half], None if self.own is None else self.own[half])
        return self.known[name]

    def seconds(self, effort: int, candidates: int) -> float:
        """What a whole search costs."""

        def search(queries: Floats) -> Rows:
            return self._search(torch.from_numpy(queries), effort, candidates)

        return seconds_of(search, np.ascontiguousarray(self.asked.float().numpy()))

    def _search(self, queries: Tensor, effort: int, candidates: int) -> Rows:
        self.index.effort, self.index.candidates = effort, candidates
        return find(self.snapshot, self.index, queries, self.wanted, self.index.metric, None)


def _ranked(snapshot: Snapshot, metric: Metric, fit: list[Plan], target: Target, say: Progress) -> list[Plan]:
    """The plans in the order in which a trial prefers them."""
    if len(fit) == 1:
        return fit
    keys = prepared(snapshot.keys_at(_sample(snapshot, TRIED)).numpy(), metric)
    queries = None
    if target.queries is not None and len(target.queries):
        queries = prepared(_questions(snapshot, target.queries)[0][::2].float().numpy(), metric)
    preferred = choose(fit, metric, keys, queries, snapshot.count, target.recall, target.k, say)
    return [plan for plan, _ in preferred]


def _filled(snapshot: Snapshot, metric: Metric, plan: Plan, say: Progress) -> Index:
    say("training", 0, 1)
    sample = _sample(snapshot, max(TRAINED, POINTS_A_LIST * lists_for(snapshot.count)))
    keys = prepared(snapshot.keys_at(sample).numpy(), metric)
    index = plan.engine.train(metric, keys, snapshot.count, plan.codes)
    say("training", 1, 1)
    done = 0
    for block in snapshot.blocks(BLOCK):
        index.add(snapshot.rows(block.positions.numpy()), block.keys.numpy())
        done += len(block.positions)
        say("adding", done, snapshot.count)
    return index


def _sample(snapshot: Snapshot, most: int) -> Rows:  # (m,)
    """Positions of so many live records, by chance, ascending."""
    live = np.flatnonzero(snapshot.live)
    return np.sort(np.random.default_rng(0).choice(live, min(len(live), most), replace=False, shuffle=False))


def _questions(snapshot: Snapshot, queries: Tensor | None) -> tuple[Tensor, Rows | None]:
    """Queries to measure with, (q, d); stored keys come with their own positions (q,), which do not count as found."""
    random = np.random.default_rng(1)
    if queries is not None and len(queries):
        few = random.permutation(len(queries))[:QUERIES]
        return queries[torch.from_numpy(few)].cpu(), None
    own = random.choice(np.flatnonzero(snapshot.live), min(QUERIES, snapshot.count), replace=False)
    return snapshot.keys_at(own).float(), own


def _short(index: Index, plan: Plan, every: list[Plan], memory: int, target: Target) -> BadInput:
    """What to say where nothing within the memory reaches the recall."""
    finer = [other for other in every if other.size > memory]
    more = f"about {min(other.size for other in finer)} bytes or more" if finer else "kind='flat'"
    return BadInput(
        f"memory is {memory} bytes, within which {plan.name} comes closest: recall {index.report['recall']} of "
        f"{target.recall}; give {more}, or ask for less recall"
    )
