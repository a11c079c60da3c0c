"""Building an index, and raising its effort until the recall asked for is measured."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from softdb.check import Metric, shown
from softdb.errors import BadInput
from softdb.index.contract import Index, Live, Rows, faiss_module, prepared
from softdb.index.flat import nearest
from softdb.index.hnsw import HNSW
from softdb.index.ivf import IVF, POINTS_A_LIST, lists_for
from softdb.index.search import find
from softdb.store import Snapshot

__all__ = ["KINDS", "Progress", "build", "checked"]

KINDS: dict[str, type[IVF] | type[HNSW]] = {"ivf": IVF, "hnsw": HNSW}
Progress = Callable[[str, int, int], None]  # what is being done, how much of it is done, the whole

SMALL = 20_000  # records that are compared exactly in about a millisecond: no index is faster
LEAST = 1000  # records that an index can be trained on
QUERIES = 256  # on which recall is measured
BLOCK = 50_000  # records added at once
CANDIDATES_MOST = 160  # looked at again for each of the k: beyond this the codes are not worth their scan


def checked(kind: object, recall: object) -> tuple[str, float]:
    """Kind and recall target, or BadInput."""
    if kind not in ("auto", "flat", *KINDS):
        raise BadInput(f"kind is {shown(kind)}; choose one of 'auto', 'flat', {', '.join(map(repr, KINDS))}")
    if isinstance(recall, bool) or not isinstance(recall, int | float) or not 0 < recall <= 1:
        raise BadInput(f"recall is {shown(recall)}; expected a share above 0 and at most 1, such as 0.95")
    return str(kind), float(recall)


def build(
    snapshot: Snapshot,
    metric: Metric,
    kind: str,
    recall: float,
    k: int,
    queries: Tensor | None,
    progress: Progress | None,
) -> tuple[Index | None, dict[str, Any]]:
    """An index over a snapshot and a report of what was measured; None where exact search serves better.

    Cost: k-means over a sample, one pass over the keys, and the exact search of 256 queries. Memory: the codes, and a
    sample and a block of keys.
    """
    if kind == "flat" or (kind == "auto" and snapshot.count < SMALL):
        reason = "asked for" if kind == "flat" else f"{snapshot.count} records are searched exactly in a moment"
        return None, {"kind": "flat", "reason": reason, "recall": 1.0, "met": True}
    faiss_module()
    if snapshot.count < LEAST:
        raise BadInput(f"{snapshot.count} records are too few to train an index on; it takes {LEAST}, or kind='flat'")
    say = progress or (lambda *_: None)
    start = time.perf_counter()
    index = _filled(snapshot, metric, KINDS["ivf" if kind == "auto" else kind], say)
    built = time.perf_counter() - start
    measured = _tuned(snapshot, index, recall, k, queries, say)
    index.report = {
        "kind": index.kind,
        "recall": round(measured, 4),
        "target": recall,
        "met": measured >= recall,
        "k": k,
        "measured_on": "queries given" if queries is not None else "stored keys, each without itself",
        index.effort_name: index.effort,
        "candidates": index.candidates,
        "records": snapshot.count,
        "bytes": int(index.dump().nbytes),
        "build_seconds": round(built, 2),
        "tune_seconds": round(time.perf_counter() - start - built, 2),
    }
    return index, index.report


def _filled(snapshot: Snapshot, metric: Metric, engine: type[IVF] | type[HNSW], say: Progress) -> Index:
    say("training", 0, 1)
    live = np.flatnonzero(snapshot.live)
    wanted = min(len(live), POINTS_A_LIST * lists_for(len(live)))
    sample = np.sort(np.random.default_rng(0).choice(live, wanted, replace=False, shuffle=False))
    index = engine.train(metric, prepared(snapshot.keys_at(sample).numpy(), metric), len(live))
    say("training", 1, 1)
    done = 0
    for block in snapshot.blocks(BLOCK):
        index.add(snapshot.rows(block.positions.numpy()), block.keys.numpy())
        done += len(block.positions)
        say("adding", done, snapshot.count)
    return index


def _tuned(snapshot: Snapshot, index: Index, recall: float, k: int, queries: Tensor | None, say: Progress) -> float:
    """Raise the effort, then the candidates, until the recall is measured; returns the recall reached."""
    asked, own = _questions(snapshot, queries)
    index.tuned_for = k + 1
    wanted = k + (own is not None)
    truth = nearest(snapshot, asked, wanted, index.metric)
    steps = max(1, index.effort_most.bit_length())
    reached, lowest = 0.0, 1
    while True:
        index.effort = lowest
        for step in range(steps):
            say("measuring", step + 1, steps)
            found = find(snapshot, index, asked, wanted, index.metric, None)
            before, reached = reached, _recall(found, truth, own)
            if reached >= recall or index.effort >= index.effort_most:
                break
            index.effort = min(2 * index.effort, index.effort_most)
        # where the widest look is not enough, the codes put true neighbours too far back: look at more of them again
        if reached >= recall or index.candidates >= CANDIDATES_MOST:
            return reached
        index.candidates *= 2
        lowest = max(1, index.effort // 8) if reached > before else lowest


def _questions(snapshot: Snapshot, queries: Tensor | None) -> tuple[Tensor, Rows | None]:
    """Queries to measure with, (q, d); stored keys come with their own positions (q,), which do not count as found."""
    random = np.random.default_rng(1)
    if queries is not None and len(queries):
        few = random.permutation(len(queries))[:QUERIES]
        return queries[torch.from_numpy(few)].cpu(), None
    own = random.choice(np.flatnonzero(snapshot.live), min(QUERIES, snapshot.count), replace=False)
    return snapshot.keys_at(own).float(), own


def _recall(found: Rows, truth: Rows, own: Rows | None) -> float:
    """Share of the true nearest that were found, (q, k) each, own positions left out."""
    hit: Live = (truth[:, :, None] == found[:, None, :]).any(2)
    counts = truth >= 0
    if own is not None:
        counts &= truth != own[:, None]
    return float((hit & counts).sum() / max(1, counts.sum()))
