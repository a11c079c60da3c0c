"""Range search: every record that is near enough, by the exact finder's products."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from softdb.check import Metric
from softdb.index.contract import Live, Rows
from softdb.index.flat import World
from softdb.store import Snapshot

__all__ = ["within"]

QUERIES = 256  # compared with a block at once


def within(
    snapshot: Snapshot,
    queries: Tensor,  # (q, d) floating point, any device
    least: float,
    metric: Metric,
    allowed: Live | None = None,  # (size,) over positions; None: every live record
) -> Rows:  # (q, m) ascending, then -1, where m is the most that a query has
    """Positions of every allowed live record whose score may reach `least`, in whatever precision it is computed.

    None is missed; those that rounding may bring in are there too. Cost q n d, memory O(block + hits).
    """
    keep = snapshot.live if allowed is None else snapshot.live & allowed
    count = int(np.count_nonzero(keep))
    if not count or not len(queries):
        return np.empty((len(queries), 0), np.int64)
    queries = queries.detach().to("cpu", torch.promote_types(queries.dtype, torch.float32))
    # a distance summed from differences is off by d roundings at most; what a product misplaced farther drops out here
    slack = torch.finfo(queries.dtype).eps * (queries.shape[1] + 8) * abs(least) if metric is Metric.L2 else np.inf
    world = World(snapshot, keep, 0, count, metric)
    which, found = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    for low in range(0, len(queries), QUERIES):
        part = queries[low : low + QUERIES]
        for query, places, scores in world.reaching(part, torch.full((len(part),), least, dtype=torch.float64)):
            near = scores >= least - slack
            which.append(query[near] + low)
            found.append(places[near])
    return _padded(np.concatenate(which), np.concatenate(found), len(queries))


def _padded(
    which: Rows,  # (p,) query of each hit
    found: Rows,  # (p,)
    queries: int,
) -> Rows:  # (q, m)
    """One line of hits for each query."""
    counts = np.bincount(which, minlength=queries)
    order = np.lexsort((found, which))
    column = np.arange(len(found)) - np.repeat(np.cumsum(counts) - counts, counts)
    lines = np.full((queries, int(counts.max())), -1, np.int64)
    lines[which[order], column] = found[order]
    return lines
