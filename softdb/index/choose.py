"""Choice of engine and codes by trials on a sample of the records, within the memory allowed."""

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
TRIED = 30_000  # records of a trial
QUERIES = 200  # queries of a trial
LARGER = 1.1  # least factor of speed that the next larger codes must gain
RESCORED = 2e-10  # seconds a product of an exact score
UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "KI": 2**10, "MI": 2**20, "GI": 2**30}


def kinds() -> dict[str, type[Index]]:
    """Engines that can be built; lists need the kernels."""
    return {kind: engine for kind, engine in KINDS.items() if available() or not engine.filters_inside}


class Option(NamedTuple):
    """An engine, its codes, and the size of an index of them."""

    engine: type[Index]
    codes: str
    size: int  # bytes

    @property
    def name(self) -> str:
        """Kind and codes, as reports name them."""
        return f"{self.engine.kind} {self.codes}"


def budget(memory: object) -> int | None:
    """Bytes of memory, from a number or text such as "200MB". Raises BadInput."""
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
    """Options that fit into the memory, in the order of trials. Raises BadInput if none fits."""
    fixed = (lists_for(count) + dim) * (dim + 200) + 64 * dim  # centroids and lists' last blocks, rotation, words
    every = [
        Option(engine, codes, count * engine.record_bytes(dim, codes) + fixed)
        for engine in (engines.values() if kind == "auto" else [engines[kind]])
        for codes in engine.codes(dim)[0 if memory else -2 :]  # the smallest of three only if memory is limited
    ]
    fit = [option for option in every if memory is None or option.size <= memory]
    if not fit:
        least = min(every, key=lambda option: option.size)
        raise BadInput(
            f"memory is {memory} bytes, which no index of kind {kind!r} meets; the smallest, {least.name}, takes about "
            f"{least.size}; give that much, or use kind flat, which takes none"
        )
    return fit


def choose(fit: list[Option], trial: SampledTrial, goal: float, progress: Progress) -> list[Option]:
    """The options by preference: those that meet the goal, the fastest first, then the others, by recall.

    Lists are tried first; other engines only if no lists meet the goal.
    """
    tried: list[tuple[Option, Setting]] = []
    for done, option in enumerate(fit):
        progress("choosing", done, len(fit))
        if option.engine.kind != Lists.kind and any(setting.recall >= goal for _, setting in tried):
            break
        trial.build(option)
        tried.append((option, fastest(trial, trial.index, goal, lambda *_: None)))
    progress("choosing", len(fit), len(fit))
    # larger codes must be clearly faster
    ranked = sorted(tried, key=lambda pair: (pair[1].seconds * LARGER ** tried.index(pair), -pair[1].recall))
    return [option for option, _ in ranked]


class SampledTrial:
    """A trial on a sample. If it holds a share s of the records, it looks for the s k nearest among s c candidates.

    Neighbours in a sample are farther apart, so codes separate them more easily: the k nearest of a tenth of the
    records would need fewer candidates than the k nearest of all.
    """

    index: Index

    def __init__(
        self,
        metric: Metric,
        keys: Floats,  # (m, d) prepared, a sample of the records
        queries: Floats | None,  # (q, d) prepared; None: some of the keys
        k: int,
        share: float,  # of the records that the sample holds
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
        """Build the index to try next."""
        self.index = option.engine.train(self.metric, self.training, len(self.keys), option.codes)
        self.index.add(np.arange(len(self.keys)), self.keys)
        self.index.seal()
        self.index.fit(self.queries, self.truth)

    def recall(self, effort: int, fetch_k: int) -> float:
        """Recall among the candidates that would be scored exactly."""
        matches = self.index.find(self.queries, fetch_k * self.nearest + (self.own is not None), None, effort)
        return float(recalls_of(matches, self.truth, self.own).mean())

    def seconds(self, effort: int, fetch_k: int) -> float:
        """Seconds of a query, or another cost, with as many candidates as a search of all records has."""
        c, self.index.fetch_k = fetch_k * self.k, fetch_k
        counted = self.index.cost(self.queries, self.k, effort)
        if counted is not None:
            return counted
        finding: float = seconds_of(lambda queries: self.index.find(queries, c, None, effort), self.queries)
        return finding + RESCORED * c * int(self.queries.shape[1])
