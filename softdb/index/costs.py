"""What it costs to find: measured on the machine and the index at hand, when that is first searched, and kept with it.

Some twenty milliseconds of measuring, once for an index: single queries and a batch, by the index and by comparing
records.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch

from softdb.index.contract import Floats, Index, prepared, sampled
from softdb.index.flat import nearest
from softdb.index.rerank import ordered
from softdb.store import Segment, Snapshot

__all__ = ["FORCED", "Costs", "codes_of", "costs_of", "measured"]

NUMBERS = 1 << 19  # of keys that are compared: beyond the inner caches
LISTED = 512  # records that are scored one by one
LEAST = 64  # records that are compared to know what a comparison costs that compares next to nothing
BATCH = 64  # queries: so many that what a busy machine adds to a call does not count
TURNS = 4  # of which the fastest counts
VISITED = 256  # codes' worth of work for each record that a graph keeps in view
HARDER = 4  # times the usual effort, to know what a code costs
K = 10


class Costs(NamedTuple):
    """Of one index and its records, in seconds, or in any other unit: they are only held against each other."""

    called: float  # a search by the index, whatever it looks at
    code: float  # of a code that it compares, for a query, and of the candidates that go with it
    scored: float  # of a record that is scored for a query, one by one
    fetched: float  # of a record that is compared in a block, once for all queries
    compared: float  # and for each query
    alone: float = 0  # of a code for a single query; 0: as for several, which threads share
    begun: float = 0  # of comparing records at all
    few: int = 0  # records that are compared sooner than an index is asked, whatever it costs
    asked: float = 0  # a search by the index for a single query, whatever it looks at

    def search(self, index: Index, effort: int, queries: int = 1) -> float:
        """Of a search by the index."""
        codes = codes_of(index, effort)
        if queries == 1 and self.alone:
            return self.asked + self.alone * codes
        return self.called + queries * self.code * codes

    def one_by_one(self, records: int, queries: int = 1) -> float:
        """Of scoring records for each query."""
        return queries * records * self.scored

    def blocks(self, records: int, queries: int = 1) -> float:
        """Of comparing records with all queries at once."""
        return self.begun + records * (self.fetched + queries * self.compared)


FORCED = Costs(called=0, code=0, scored=1, fetched=1, compared=1)  # as if a search by the index cost nothing


def codes_of(index: Index, effort: int) -> float:
    """About how many codes a search with that effort compares."""
    effort = min(effort, index.effort_most)
    return effort / index.effort_most * index.inner.ntotal if index.effort_name == "nprobe" else VISITED * effort


def costs_of(snapshot: Snapshot, index: Index) -> Costs:
    """Those of an index, measured when it is first searched."""
    if index.costs is None:
        index.costs = measured(snapshot, index)
    costs: Costs = index.costs
    return costs


def measured(snapshot: Snapshot, index: Index) -> Costs:
    """By the clock, on stored keys.

    One way after the other, those by the index first: after a product of torch its idle threads keep the cores for some
    milliseconds, and FAISS, which has threads of its own, waits for them.
    """
    size = min(snapshot.size, max(256, NUMBERS // snapshot.segments[0].keys.shape[1]))
    few = sampled(snapshot.live, size, 5)
    keys = np.ascontiguousarray(snapshot.keys_at(few).float().numpy())
    some, least = (
        Snapshot.of(0, (Segment(0, 0, None, part, None),), np.ones(len(part), np.bool_))
        for part in (keys, keys[:LEAST])
    )
    queries: Floats = keys[np.linspace(0, len(keys) - 1, BATCH).astype(int)]
    listed = few[np.linspace(0, len(few) - 1, LISTED).astype(int)][None]
    c = max(64, index.fetch_k * index.tuned_for)

    def search(count: int, effort: int = index.effort) -> Callable[[], object]:
        def run() -> None:
            asked = prepared(queries[:count], index.metric)
            positions = snapshot.positions(index.find(asked, c, None, effort))
            ordered(snapshot, queries[:count], positions, index.tuned_for, index.metric, asked)

        return run

    def compare(records: Snapshot, count: int) -> Callable[[], object]:
        asked = torch.from_numpy(queries[:count])
        return lambda: nearest(records, asked, K, index.metric)

    most = min(HARDER * index.effort, index.effort_most)
    ways: dict[str, Callable[[], object]] = {
        "alone": search(1), "harder": search(1, most), "together": search(BATCH), "few": compare(least, 1),
        "one": compare(some, 1), "many": compare(some, BATCH),
        "listed": lambda: ordered(snapshot, queries[:1], listed, K, index.metric),
    }  # fmt: skip
    took = {name: _fastest(run) for name, run in ways.items()}
    codes, harder = (max(1.0, codes_of(index, effort)) for effort in (index.effort, most))
    each = max((took["together"] - took["alone"]) / (BATCH - 1), 0.1 * took["alone"])
    alone = took["alone"] / codes
    if harder > codes:
        alone = min(max((took["harder"] - took["alone"]) / (harder - codes), 0.01 * alone), alone)
    alike = max((took["many"] - took["one"]) / (BATCH - 1), 0.01 * took["one"]) / len(keys)
    return Costs(
        called=max(took["alone"] - each, 0.0),
        code=each / codes,
        alone=alone,
        asked=took["alone"] - alone * codes,
        scored=took["listed"] / LISTED,
        fetched=max((took["one"] - took["few"]) / len(keys) - alike, 0.0),
        compared=alike,
        begun=took["few"],
    )


def _fastest(run: Callable[[], object]) -> float:
    """Seconds of the fastest of a few turns, the first of which warms up."""
    return min([_seconds(run) for _ in range(TURNS + 1)][1:])


def _seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start
