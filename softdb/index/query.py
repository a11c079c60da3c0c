"""The Query, one question about the nearest records, checked. It is asked of a snapshot, or of a source."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, replace

import numpy as np
from torch import Tensor

from softdb.check import Metric
from softdb.filters import Grouping
from softdb.store.snapshot import Live, Rows


@dataclass(frozen=True)
class Query:
    """Queries, how many records each wants, by which metric, and which records take part.

    `least` stands for a radius in one form: the least score that is near enough, -r² for a distance r.
    """

    queries: Tensor  # (q, d) floating point, with their graph
    k: int  # records for each query; 0: all that score at least `least`
    metric: Metric
    allowed: Live | None = None  # (size,) over positions; None: every live record. Never changed: caches know it by id
    _: KW_ONLY
    least: float | None = None
    offset: int = 0  # the best so many are passed over
    diversity: float = 0.0
    fetch_k: int = 0  # candidates among which k diverse ones are chosen
    groups: Grouping | None = None  # of the records: k and offset count groups, of which each gives `group_size`
    group_size: int = 1
    excluded: Rows | None = None  # positions (q, e), or (1, e) for every query; -1 = none
    exact: bool = False  # ignore the index and compare all records
    certain: int | None = None  # of the k so many need the recall that the index was tuned to; None: all
    pairwise: bool = True  # few records may be ordered by their scores in float32

    def keep(self, live: Live) -> Live:  # (size,), (size,)
        """Return which of the live records take part."""
        return live if self.allowed is None else live & self.allowed

    def excluding_by_filter(self, size: int, most: int = -1) -> Query:
        """Return the same by `allowed`, where all queries exclude the same records, and more than `most`."""
        excluded = self.excluded
        if excluded is None or len(excluded) > 1 or excluded.shape[1] <= most:
            return self
        allowed = np.ones(size, np.bool_) if self.allowed is None else self.allowed.copy()
        allowed[excluded[excluded >= 0]] = False
        return replace(self, allowed=allowed, excluded=None)
