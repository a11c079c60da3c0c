"""Build an index: choose engine and codes, and tune the index until its measured recall meets the target."""

from __future__ import annotations

import functools
import time
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from softdb.check import Metric, shown
from softdb.errors import BadInput, MissingDependency
from softdb.index import flat
from softdb.index.choose import KINDS, TRIED, Option, Progress, SampledTrial, budget, choose, kinds, options
from softdb.index.contract import Devices, Floats, Index, Live, Rows, faiss_module, prepared, sampled
from softdb.index.ivf import IVF
from softdb.index.lists import Lists
from softdb.index.outliers import Outliers, affordable, lengths_of, longest_of, most_of
from softdb.index.quantizer import POINTS_A_LIST
from softdb.index.query import Query
from softdb.index.rerank import ordered
from softdb.index.sampler import FEWEST
from softdb.index.search import Searcher, indexed_until
from softdb.index.sketches import Sketches, lists_for
from softdb.index.tune import Setting, fastest, hits_of, recalls_of, seconds_of, steadied
from softdb.kernels import available
from softdb.store import Snapshot

SMALL = 20_000  # with fewer records no index is built: comparing all takes about a millisecond
LEAST = 1000  # least number of records that can train an index
QUERIES = 1024  # number of queries: one half for tuning, the other half for the reported recall
BLOCK = 10_000  # least number of records added at once; a build can be cancelled after each block
NUMBERS = 1 << 24  # numbers that kernels encode at once: idle threads of OpenMP spin and slow down the next few ms
TRAINED = 1 << 14  # least number of records in the sample that trains the codes
BUILT = 3  # largest number of indexes built: the next one only if the one before misses the recall
NORMS, EDGES = ("longest 1%", "next 9%", "rest"), (0.99, 0.9)  # classes of keys by length; quantiles between them
ALIKE = 1.001  # lengths whose ratio is below this count as equal, so that rounding does not separate them
FITTED = 256  # number of queries that fit the rule by which an index chooses lists
AIMS = 4  # largest number of tuning rounds, each for a higher goal, until held-out queries reach the target recall


class Target(NamedTuple):
    """Requirements on an index: its recall among the k nearest, its kind, and its memory."""

    recall: float
    k: int
    queries: Tensor | None = None  # queries that measure recall; None: stored keys
    kind: str = "auto"
    memory: int | None = None  # largest size of the index in bytes; None: no limit


def checked(
    kind: object, recall: object, memory: object = None, devices: Devices | None = None
) -> tuple[str, float, int | None]:
    """Return the kind, the target recall and the memory in bytes after checking them. Raises BadInput."""
    known = ("auto", "flat", *(kinds() if devices is None else devices.engines))
    if not isinstance(kind, str) or kind not in known:
        why, way = "", ""
        if isinstance(kind, str) and kind in KINDS and devices is not None:
            why, way = f", which has no form on {devices.name}", ", or device='cpu'"
        elif isinstance(kind, str) and kind in KINDS:
            why, way = ", which needs softdb's native kernels", ", or install softdb where a C++ compiler is"
        raise BadInput(f"kind is {shown(kind)}{why}; choose one of {', '.join(map(repr, known))}{way}")
    if isinstance(recall, bool) or not isinstance(recall, int | float) or not 0 < recall <= 1:
        raise BadInput(f"recall is {shown(recall)}; expected a share above 0 and at most 1, such as 0.95")
    return kind, float(recall), budget(memory)


def build(
    snapshot: Snapshot,
    metric: Metric,
    target: Target,
    progress: Progress | None = None,
    devices: Devices | None = None,  # devices to build on; None: the CPU
) -> tuple[Index | None, dict[str, Any]]:
    """Build an index over a snapshot. Return the index, or None if exact search is faster, and a report.

    Cost: a few trial indexes of at most 30,000 records, k-means over a sample, one pass over the keys, and exact
    searches for 1,024 queries. Memory: the codes, a sample of the keys, and one block of keys.
    """
    kind, memory = target.kind, target.memory
    fit = possible(snapshot, kind, memory, devices)
    on_progress = progress or (lambda *_: None)
    if not fit:
        index = _sketches(snapshot, metric, memory, on_progress) if devices is None and kind == "flat" else None
        reason = "asked for" if kind == "flat" else f"{snapshot.count} records are searched exactly in a moment"
        where = "cpu" if devices is None else devices.name
        report = {"kind": "flat", "reason": reason, "recall": 1.0, "met": True, "device": where}
        if index is not None:
            index.report = report = index.report | report
        return index, report
    target = target._replace(k=min(target.k, snapshot.count))
    start = time.perf_counter()
    ranked = _ranked(snapshot, metric, fit, target, on_progress)[:BUILT]
    chosen = time.perf_counter()
    index = option = None
    while ranked and (index is None or not index.report["met"]):
        option = ranked.pop(0)
        index = None  # frees the memory of one index before the next is built
        begun = time.perf_counter()
        index = _filled(snapshot, metric, option, on_progress)
        built = time.perf_counter()
        lists = index.lists if isinstance(index, Lists | IVF) else 0
        index.report = {"codes": option.codes, "lists": lists, "device": index.place}
        tuned(snapshot, index, target, on_progress)
        ranked = [other for other in ranked if other.size > option.size]  # only larger codes can reach a higher recall
    assert index is not None
    assert option is not None
    if memory is not None and not index.report["met"] and kind == "auto":
        raise _short(index, option, possible(snapshot, kind, None, devices), target)
    index.report |= {"choose_seconds": round(chosen - start, 2), "build_seconds": round(built - begun, 2)}
    on_progress("measuring", 1, 1)
    return index, index.report


def possible(snapshot: Snapshot, kind: str, memory: int | None, devices: Devices | None = None) -> list[Option]:
    """Return the engines and codes to try; none if exact search is faster. Raises MissingDependency and BadInput."""
    if kind == "flat" or (devices is not None and not devices.engines):
        return []
    if kind == "auto" and (snapshot.count < SMALL if devices is None else devices.small(snapshot)):
        return []
    if devices is None:
        faiss_module()
    else:
        devices.require_faiss()
    if snapshot.count < LEAST:
        raise BadInput(f"{snapshot.count} records are too few to train an index on; insert {LEAST}, or use kind flat")
    dim = snapshot.segments[0].keys.shape[1]
    return options(kind, dim, snapshot.count, memory, kinds() if devices is None else devices.engines)


def tuned(snapshot: Snapshot, index: Index, target: Target, progress: Progress) -> None:
    """Set the index's effort and `fetch_k` so that recall meets the target. Report the recall of held-out queries."""
    start = time.perf_counter()
    queries, own = _measured_queries(snapshot, target.queries)
    index.tuned_for = target.k + 1
    lengths = lengths_of(snapshot, snapshot.size) if index.metric is Metric.DOT else None
    index.room = index.longest = None
    if lengths is not None and index.devices is None:
        index.room = most_of(snapshot)
        index.longest = longest_of(snapshot, lengths[: indexed_until(snapshot, index)], index.room)
    trial = _FullTrial(snapshot, index, queries, own, target.k)
    trial.leave_out()
    trial.fit()
    setting, measured = _aimed(trial, target.recall, progress)
    index.effort, index.fetch_k = setting.effort, setting.fetch_k
    index.report = {
        **{name: index.report[name] for name in ("codes", "lists", "device") if name in index.report},
        "kind": index.kind,
        "recall": round(measured, 4),
        "target": target.recall,
        "met": measured >= target.recall,
        "k": target.k,
        "measured_on": "queries given" if own is None else "stored keys, each without itself",
        index.effort_name: index.effort,
        "fetch_k": index.fetch_k,
        **({} if lengths is None else _by_norm(trial, setting, lengths)),
        "records": snapshot.count,
        "bytes": _bytes(index),
        "tune_seconds": round(time.perf_counter() - start, 2),
    }


def _aimed(trial: _FullTrial, recall: float, progress: Progress) -> tuple[Setting, float]:
    """Return a setting and its recall for held-out queries. Raise the goal while that recall is too low."""

    def aimed_at(goal: float) -> Setting:
        measuring = functools.partial(progress, "measuring")
        return steadied(trial, trial.index, fastest(trial, trial.index, goal, measuring), goal)

    goal, best = recall, None
    for aim in range(AIMS):
        setting = aimed_at(goal)
        if best is None and trial.afford(setting):  # the index alone finds dropped outliers: aim again
            setting = aimed_at(goal)
        each = trial.recalls(setting.effort, setting.fetch_k, held_out=True)
        measured = round(float(each.mean()), 9)
        if best is None or best[1] < recall or measured >= recall:
            best = setting, measured
        sure = measured - float(each.std() / np.sqrt(len(each)))  # other queries most likely reach this recall
        if sure >= recall or setting.recall < goal or goal == 1:
            break
        goal = min(1.0, goal + 1.5 * (recall - sure) + (1 - recall) * aim / 10)
    assert best is not None
    return best


def _by_norm(trial: _FullTrial, setting: Setting, lengths: Floats) -> dict[str, Any]:
    """Report for inner products: the number of outliers compared, and the recall for each class of key lengths."""
    index = trial.index
    hit, counts, truth = trial.hits(setting)
    classes = (lengths[truth, None] <= ALIKE * np.nanquantile(lengths, EDGES)).sum(2)
    recalls: dict[str, Any] = {}
    for number, name in enumerate(NORMS):
        in_class = counts & (classes == number)
        of = int(in_class.sum())
        recalls[name] = {"recall": round(float(hit[in_class].mean()), 4) if of else None, "of": of}
    return {"outliers": 0 if index.longest is None else len(index.longest), "recall_by_norm": recalls}


class _FullTrial:
    """Measures settings of an index of all records. One half of the queries is for tuning, the other half is held out.

    Tuning ignores outliers of norm, so that the index also finds the nearest of the other records when a filter or a
    deletion excludes the outliers.
    """

    def __init__(self, snapshot: Snapshot, index: Index, queries: Tensor, own: Rows | None, k: int) -> None:
        self.snapshot, self.index, self.queries, self.own = snapshot, index, queries, own
        self.searcher = Searcher(index)
        self.wanted = k + (own is not None)
        self.truth: Rows = (index.devices or flat).nearest(snapshot, Query(queries, self.wanted, index.metric))
        self.known: dict[tuple[int, int, bool], NDArray[np.float64]] = {}  # (q / 2,) by effort, fetch_k, held_out
        self.ordinary: tuple[Rows, Rows] | None = None  # rows other than outliers, and their true nearest (q / 2, k)

    def fit(self) -> None:
        """Fit the index's rule to the half of the queries that is used for tuning."""
        half = self._half(False)
        queries = prepared(self.queries[half][:FITTED].float().numpy(), self.index.metric)
        rows, truth = (None, self.truth[half]) if self.ordinary is None else self.ordinary
        self.index.fit(queries, self.snapshot.rows(truth[:FITTED]), rows)

    def leave_out(self) -> None:
        """Exclude the index's outliers from tuning."""
        longest, snapshot = self.index.longest, self.snapshot
        if longest is None or not len(longest):
            return
        allowed = snapshot.live.copy()
        allowed[indexed_until(snapshot, self.index) :] = False
        allowed[snapshot.positions(longest)] = False
        tuned = Query(self.queries[self._half(False)], self.wanted, self.index.metric, allowed)
        truth = flat.nearest(snapshot, tuned)
        self.ordinary = snapshot.rows(np.flatnonzero(allowed)), truth
        self.known.clear()

    def recall(self, effort: int, fetch_k: int) -> float:
        """Return the mean recall of a setting for the half of the queries that is used for tuning."""
        return round(float(self.recalls(effort, fetch_k).mean()), 9)  # so that 0.9899999999999999 meets a goal of 0.99

    def recalls(self, effort: int, fetch_k: int, held_out: bool = False) -> NDArray[np.float64]:
        """Return the recall (q / 2,) of a setting for each query of one half."""
        name = (effort, fetch_k, held_out)
        if name not in self.known:
            half = self._half(held_out)
            queries = self.queries[half]
            if self.ordinary is None or held_out:
                matches, truth = self._search(queries, effort, fetch_k), self.truth[half]
            else:
                rows, truth = self.ordinary
                matches = self._candidates(queries, effort, fetch_k, rows)
            self.known[name] = recalls_of(matches, truth, None if self.own is None else self.own[half])
        return self.known[name]

    def _half(self, held_out: bool) -> slice:
        return slice(1, None, 2) if held_out and len(self.queries) > 1 else slice(0, None, 2)

    def _candidates(self, queries: Tensor, effort: int, fetch_k: int, rows: Rows) -> Rows:
        """Return the candidates (q, c) that a search would score exactly."""
        vectors, self.index.fetch_k = prepared(queries.float().numpy(), self.index.metric), fetch_k
        return self.snapshot.positions(self.index.find(vectors, self.index.candidates_for(self.wanted), rows, effort))

    def hits(self, setting: Setting) -> tuple[Live, Live, Rows]:  # (q, k) each
        """Return for held-out queries: masks of the true nearest found and of those that count; their positions."""
        half = self._half(held_out=True)
        matches, truth = self._search(self.queries[half], setting.effort, setting.fetch_k), self.truth[half]
        return *hits_of(matches, truth, None if self.own is None else self.own[half]), truth

    def afford(self, setting: Setting) -> bool:
        """Drop outliers until comparing them costs a small share of a search. Return True if some were dropped."""
        index, every = self.index, self.index.longest
        if every is None or not len(every):
            return False
        half = self._half(held_out=False)
        queries, truth = np.ascontiguousarray(self.queries[half].float().numpy()), self.truth[half]
        worst = ordered(self.snapshot, queries, truth, truth.shape[1], index.metric)[1][:, -1]
        least = worst / np.maximum(np.linalg.norm(queries, axis=1), 1e-30)
        cost, lengths = self.seconds(setting.effort, setting.fetch_k), Outliers(self.snapshot, every).lengths
        index.longest = every[: affordable(lengths, least, cost, queries.shape[1])]
        if len(index.longest) == len(every):
            return False
        index.room = len(index.longest)
        self.leave_out()
        return True

    def seconds(self, effort: int, fetch_k: int) -> float:
        """Return the seconds of a search for one query, or the engine's own measure of cost."""
        self.index.fetch_k, queries = fetch_k, np.ascontiguousarray(self.queries.float().numpy())
        counted = self.index.cost(prepared(queries, self.index.metric), self.wanted, effort)
        if counted is not None:
            return counted
        return seconds_of(lambda some: self._search(torch.from_numpy(some), effort, fetch_k), queries)

    def _search(self, queries: Tensor, effort: int, fetch_k: int) -> Rows:
        self.index.effort, self.index.fetch_k = effort, fetch_k
        query = Query(queries, self.wanted, self.index.metric, pairwise=False)
        devices = self.index.devices
        if devices is None:
            return self.searcher.nearest(self.snapshot, query).positions
        result = devices.find(self.snapshot, self.index, query)
        return devices.nearest(self.snapshot, query) if result is None else result.positions


def _ranked(snapshot: Snapshot, metric: Metric, fit: list[Option], target: Target, progress: Progress) -> list[Option]:
    """Return the options sorted by preference, after trials on a sample."""
    if len(fit) == 1:
        return fit
    keys = prepared(snapshot.keys_at(sampled(snapshot.live, TRIED, 0)).numpy(), metric)
    queries = None
    if target.queries is not None and len(target.queries):
        queries = prepared(_measured_queries(snapshot, target.queries)[0][::2].float().numpy(), metric)
    trial = SampledTrial(metric, keys, queries, target.k, len(keys) / snapshot.count)
    return choose(fit, trial, target.recall, progress)


def _filled(snapshot: Snapshot, metric: Metric, option: Option, progress: Progress) -> Index:
    progress("training", 0, 1)
    sample = sampled(snapshot.live, max(TRAINED, POINTS_A_LIST * lists_for(snapshot.count)), 0)
    keys = prepared(snapshot.keys_at(sample).numpy(), metric)
    index = option.engine.train(metric, keys, snapshot.count, option.codes)
    if index.sketches is None and available():
        index.companion = Sketches.train(metric, keys, snapshot.count, *Sketches.codes(keys.shape[1]))
    progress("training", 1, 1)
    done, size = 0, max(BLOCK, NUMBERS // keys.shape[1] if isinstance(index, Sketches) else 0)
    for block in snapshot.blocks(size):
        index.add(snapshot.rows(block.positions.numpy()), block.keys.numpy())
        done += len(block.positions)
        progress("adding", done, snapshot.count)
    index.seal()
    return index


def _sketches(snapshot: Snapshot, metric: Metric, memory: int | None, progress: Progress) -> Index | None:
    """Return an index for estimates alone. None: too few records or too little memory, or no FAISS or kernels."""
    if snapshot.count < FEWEST or not available():
        return None
    dim = snapshot.segments[0].keys.shape[1]
    try:
        faiss_module()
        (option,) = options(Sketches.kind, dim, snapshot.count, memory, {Sketches.kind: Sketches})
    except (MissingDependency, BadInput):
        return None
    start = time.perf_counter()
    index = _filled(snapshot, metric, option, progress)
    facts = {"codes": option.codes, "records": snapshot.count, "bytes": _bytes(index)}
    index.report = {**facts, "build_seconds": round(time.perf_counter() - start, 2)}
    return index


def _bytes(index: Index) -> int:
    """Return the size of an index and its companion in bytes."""
    return int(index.dump().nbytes) + (0 if index.companion is None else int(index.companion.dump().nbytes))


def _measured_queries(snapshot: Snapshot, queries: Tensor | None) -> tuple[Tensor, Rows | None]:
    """Return queries (q, d) to measure with and, for stored keys, their positions (q,), which are not matches."""
    random = np.random.default_rng(1)
    if queries is not None and len(queries):
        few = random.permutation(len(queries))[:QUERIES]
        return queries[torch.from_numpy(few)].cpu(), None
    own = random.choice(np.flatnonzero(snapshot.live), min(QUERIES, snapshot.count), replace=False)
    return snapshot.keys_at(own).float(), own


def _short(index: Index, option: Option, every: list[Option], target: Target) -> BadInput:
    """Return the error for the case that no index within the memory limit reaches the recall."""
    finer = [other for other in every if other.size > (target.memory or 0)]
    remedy = f"give about {min(other.size for other in finer)} bytes or more" if finer else "use kind flat"
    return BadInput(
        f"memory is {target.memory} bytes, within which {option.name} comes closest: recall {index.report['recall']}, "
        f"expected {target.recall}; {remedy}, or a lower recall"
    )
