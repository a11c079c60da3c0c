"""The class `Query`: a checked search for the nearest records of a snapshot or a source."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, replace

import numpy as np
from torch import Tensor

from softdb.check import Metric
from softdb.filters import Grouping
from softdb.store.snapshot import Live, Rows


@dataclass(frozen=True)
class Query:
    """One search: the query vectors, the number of records wanted for each, the metric, and the records that take part.

    `least` is a radius as a score: the least score of a match, -r² for a distance r.
    """

    queries: Tensor  # (q, d) floating point, maybe with gradients
    k: int  # records for each query; 0: all that score at least `least`
    metric: Metric
    allowed: Live | None = None  # (size,) bool; None: every live record. Never changed: caches compare its identity
    _: KW_ONLY
    least: float | None = None
    offset: int = 0  # number of the best records that are skipped
    diversity: float = 0.0
    fetch_k: int = 0  # candidates among which k diverse ones are chosen
    groups: Grouping | None = None  # if given, k and offset count groups of `group_size` records
    group_size: int = 1
    excluded: Rows | None = None  # positions (q, e), or (1, e) for every query; -1 = none
    exact: bool = False  # ignore the index and compare all records
    certain: int | None = None  # number of the k records that need the tuned recall; None: all
    pairwise: bool = True  # True: few records may be ordered by float32 scores

    def keep(self, live: Live) -> Live:  # (size,), (size,)
        """Return the mask of the records that take part, given the mask of live records."""
        return live if self.allowed is None else live & self.allowed

    def excluding_by_filter(self, size: int, most: int = -1) -> Query:
        """Return a query with `excluded` merged into `allowed`, if more than `most` and shared by all; else self."""
        excluded = self.excluded
        if excluded is None or len(excluded) > 1 or excluded.shape[1] <= most:
            return self
        allowed = np.ones(size, np.bool_) if self.allowed is None else self.allowed.copy()
        allowed[excluded[excluded >= 0]] = False
        return replace(self, allowed=allowed, excluded=None)
