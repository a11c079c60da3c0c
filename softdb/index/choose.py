"""Choose an engine and its codes by trials on a sample of the records, within a limit on memory."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from softdb.check import Metric, shown
from softdb.errors import BadInput
from softdb.index.contract import Floats, Index, faiss_module, measure_of
from softdb.index.hnsw import HNSW
from softdb.index.lists import Lists
from softdb.index.quantizer import POINTS_A_LIST
from softdb.index.sketches import lists_for
from softdb.index.tune import Setting, fastest, recalls_of, seconds_of
from softdb.kernels import available

Progress = Callable[[str, int, int], None]  # step, amount done, total

KINDS: dict[str, type[Index]] = {engine.kind: engine for engine in (Lists, HNSW)}
TRIED = 30_000  # records in a trial index
QUERIES = 200  # queries in a trial
LARGER = 1.1  # larger codes are preferred only if they are faster by this factor
RESCORED = 2e-10  # seconds for one multiplication of an exact score
UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "KI": 2**10, "MI": 2**20, "GI": 2**30}


def kinds() -> dict[str, type[Index]]:
    """Return the engines that can be built, by name. Lists need the native kernels."""
    return {kind: engine for kind, engine in KINDS.items() if available() or not engine.filters_inside}


class Option(NamedTuple):
    """An engine, the name of its codes, and the size of such an index."""

    engine: type[Index]
    codes: str
    size: int  # bytes

    @property
    def name(self) -> str:
        """The kind of index and its codes, for example "ivf PQ64x4"."""
        return f"{self.engine.kind} {self.codes}"


def budget(memory: object) -> int | None:
    """Return a memory limit in bytes, from a number or a text such as "200MB". None: no limit. Raises BadInput."""
    wrong = BadInput(f"memory is {shown(memory)}; expected a number of bytes above 0, or text such as '200MB'")
    if isinstance(memory, str):
        parts = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMG]?I?)B?\s*", memory.upper())
        if parts is None or parts[2] not in UNITS:
            raise wrong
        memory = int(float(parts[1]) * UNITS[parts[2]])
    if memory is None:
        return None
    if isinstance(memory, bool) or not isinstance(memory, int | np.integer) or memory < 1:
        raise wrong
    return int(memory)


def options(kind: str, dim: int, count: int, memory: int | None, engines: Mapping[str, type[Index]]) -> list[Option]:
    """Return the options that fit into the memory, in the order of the trials. Raises BadInput if no option fits."""
    fixed = (lists_for(count) + dim) * (dim + 200) + 64 * dim  # bytes of centroids, last blocks, rotation and words
    every = [
        Option(engine, codes, count * engine.record_bytes(dim, codes) + fixed)
        for engine in (engines.values() if kind == "auto" else [engines[kind]])
        for codes in engine.codes(dim)[0 if memory else -2 :]  # a memory limit allows the smallest codes, too
    ]
    fit = [option for option in every if memory is None or option.size <= memory]
    if not fit:
        least = min(every, key=lambda option: option.size)
        raise BadInput(
            f"memory is {memory} bytes, but the smallest index of kind {kind!r}, {least.name}, takes about "
            f"{least.size}; give that memory, or use kind flat, which takes none"
        )
    return fit


def choose(fit: list[Option], trial: SampledTrial, goal: float, progress: Progress) -> list[Option]:
    """Return the options by preference: first those that meet the goal, by speed; then the other options, by recall.

    Lists are tried first. Other engines are tried only if no lists meet the goal.
    """
    tried: list[tuple[Option, Setting]] = []
    for done, option in enumerate(fit):
        progress("choosing", done, len(fit))
        if option.engine.kind != Lists.kind and any(setting.recall >= goal for _, setting in tried):
            break
        trial.build(option)
        tried.append((option, fastest(trial, trial.index, goal, lambda *_: None)))
    progress("choosing", len(fit), len(fit))
    # options with larger codes come later in `tried`, so they must be clearly faster
    ranked = sorted(tried, key=lambda pair: (pair[1].seconds * LARGER ** tried.index(pair), -pair[1].recall))
    return [option for option, _ in ranked]


class SampledTrial:
    """Measures options on a sample. If the sample holds a share s of the records, each query looks for its s k nearest.

    Neighbours are farther apart in a sample than among all records, so codes separate them more easily: finding the
    k nearest in a sample would need fewer candidates than finding the k nearest of all records.
    """

    index: Index

    def __init__(
        self,
        metric: Metric,
        keys: Floats,  # (m, d) prepared, a sample of the records
        queries: Floats | None,  # (q, d) prepared; None: some of the keys
        k: int,
        share: float,  # records in the sample, over all records
    ) -> None:
        self.metric, self.keys = metric, keys
        random = np.random.default_rng(2)
        own = None if queries is not None else random.choice(len(keys), min(QUERIES, len(keys)), replace=False)
        self.queries = np.ascontiguousarray(keys[own] if queries is None else queries[:QUERIES])
        self.own, self.k, self.nearest = own, k, max(1, round(k * share))
        trained = min(len(keys), max(POINTS_A_LIST * lists_for(len(keys)), 1 << 14))
        self.training = keys[np.sort(random.choice(len(keys), trained, replace=False))]
        wanted = self.nearest + (own is not None)
        self.truth = faiss_module().knn(self.queries, keys, wanted, metric=measure_of(metric))[1]

    def build(self, option: Option) -> None:
        """Build the index of an option over the sample, and use it for the following measurements."""
        self.index = option.engine.train(self.metric, self.training, len(self.keys), option.codes)
        self.index.add(np.arange(len(self.keys)), self.keys)
        self.index.seal()
        self.index.fit(self.queries, self.truth)

    def recall(self, effort: int, fetch_k: int) -> float:
        """Return the mean recall of a setting: the share of the true nearest among the candidates found by code."""
        matches = self.index.find(self.queries, fetch_k * self.nearest + (self.own is not None), None, effort)
        return float(recalls_of(matches, self.truth, self.own).mean())

    def seconds(self, effort: int, fetch_k: int) -> float:
        """Return the seconds of a query, or the engine's own cost, with as many candidates as a full search has."""
        c, self.index.fetch_k = fetch_k * self.k, fetch_k
        counted = self.index.cost(self.queries, self.k, effort)
        if counted is not None:
            return counted
        finding: float = seconds_of(lambda queries: self.index.find(queries, c, None, effort), self.queries)
        return finding + RESCORED * c * int(self.queries.shape[1])
