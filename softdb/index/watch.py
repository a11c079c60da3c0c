"""The watch over recall: a few live searches are compared with exact ones after they are answered."""

from __future__ import annotations

import functools
import threading
import warnings
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

from softdb.errors import RecallWarning
from softdb.index.contract import Index, Rows
from softdb.index.timing import timed

SHARE = 0.01  # share of the search time that checks may take
WINDOW = 500  # number of the last checks that count
LEAST = 20  # checks before a warning
DEVIATIONS = 3.0  # width of the bound: a recall as tuned falls below by chance once in 700 windows
RATE = 1e9  # numbers compared a second, before the first check


def upper_bound(share: float, count: int, deviations: float = DEVIATIONS) -> float:
    """Upper confidence bound of a share, given its mean over `count` observations.

        (p + z²/2n + z √(p (1 - p) / n + z²/4n²)) / (1 + z²/n)

    Wilson 1927, "Probable inference". It is conservative for means of numbers in 0 … 1, as none have a larger variance.
    """
    square = deviations**2 / count
    spread = deviations * float(np.sqrt(share * (1 - share) / count + square / (4 * count)))
    return (share + square / 2 + spread) / (1 + square)


class Watch:
    """Measured recall of live searches by one index.

    A check compares one query of a batch, if the time of all checks stays below `share` of the search time. Safe to use
    from several threads, of which one checks at a time.
    """

    def __init__(self, share: float = SHARE, window: int = WINDOW) -> None:
        self._share = share
        self._lock = threading.Lock()
        self._checking = threading.Lock()
        self._random = np.random.default_rng()
        self._recalls: deque[float] = deque(maxlen=window)
        self._report: dict[str, Any] = {}  # of the watched index
        self._checked = 0
        self._warned = False
        self._searched = self._spent = 0.0  # seconds
        self._pace = 1 / RATE  # seconds a number

    def change(self, share: float, window: int) -> None:
        """Set share and window; measurements stay."""
        with self._lock:
            self._share, self._recalls = share, deque(self._recalls, maxlen=window)

    def after_fork(self) -> None:
        """Replace the locks in a forked child, where no thread would release them."""
        self._lock, self._checking = threading.Lock(), threading.Lock()

    def follow(self, index: Index) -> None:
        """Watch an index that has grown; measurements stay."""
        with self._lock:
            self._report = index.report

    def report(self, index: Index) -> dict[str, Any]:
        """Recall of the checked searches, and their number since the index was built."""
        with self._lock:
            self._keep_to(index)
            mean = round(float(np.mean(self._recalls)), 4) if self._recalls else None
            return {"live_recall": mean, "live_checked": self._checked}

    def saw(
        self,
        index: Index,
        seconds: float,  # of the search
        matches: Rows,  # (q, k) its answer
        numbers: int,  # records times width, which an exact search compares
        exact: Callable[[int], Rows],  # number of a query -> (k,) its true nearest
    ) -> None:
        """Note an answered search, and check one of its queries if the budget allows.

        Warn with RecallWarning, once for an index, if the recall is surely below the tuned one.
        """
        with self._lock:
            self._keep_to(index)
            self._searched += seconds
            due = len(matches) and self._spent + numbers * self._pace <= self._share * self._searched
        if not due or not self._checking.acquire(blocking=False):
            return
        try:
            which = int(self._random.integers(len(matches)))
            truth, spent = timed(functools.partial(exact, which))
        finally:
            self._checking.release()
        truth = truth[truth >= 0]
        with self._lock:
            self._spent += spent
            self._pace = spent / max(1, numbers)
            if index.report is not self._report or not len(truth):
                return
            self._recalls.append(float(np.isin(truth, matches[which]).mean()))
            self._checked += 1
            message = self._verdict()
        if message:
            warnings.warn(message, RecallWarning, stacklevel=2)

    def _verdict(self) -> str | None:
        """Return the warning if it is due, once."""
        promised = min(self._report.get("target", 0.0), self._report.get("recall", 0.0))
        count = len(self._recalls)
        if self._warned or count < min(LEAST, self._recalls.maxlen or LEAST):
            return None
        mean = float(np.mean(self._recalls))
        if upper_bound(mean, count) >= promised:
            return None
        self._warned = True
        return (
            f"the index finds {mean:.3f} of the true nearest in the last {count} searches that were checked, not the "
            f"{promised:.3f} it was tuned for: queries or records have drifted; call tune(queries=...) or "
            "build_index(queries=...) with queries of the kind that come now"
        )

    def _keep_to(self, index: Index) -> None:
        """Start over if another index, or another tuning, is in use."""
        if index.report is self._report:
            return
        self._report = index.report
        self._recalls.clear()
        self._checked, self._warned = 0, False
        self._searched = self._spent = 0.0
