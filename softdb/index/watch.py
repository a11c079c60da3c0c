"""Watch the recall of live searches: after a few of them, repeat the search exactly and compare the answers."""

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

SHARE = 0.01  # time that checks may take, over the time of all searches
WINDOW = 500  # number of recent checks over which recall is averaged
LEAST = 20  # least number of checks before a warning
DEVIATIONS = 3.0  # z of the confidence bound: a false warning in one window of 700, if the index has the tuned recall
RATE = 1e9  # numbers that an exact search compares in a second, assumed before the first check


def upper_bound(share: float, count: int, deviations: float = DEVIATIONS) -> float:
    """Return the upper confidence bound of a share, given its mean over `count` observations.

        (p + z²/2n + z √(p (1 - p) / n + z²/4n²)) / (1 + z²/n)

    Wilson 1927, "Probable inference". The bound is conservative for means of numbers in 0 … 1.
    """
    square = deviations**2 / count
    spread = deviations * float(np.sqrt(share * (1 - share) / count + square / (4 * count)))
    return (share + square / 2 + spread) / (1 + square)


class Watch:
    """Measures the recall of live searches by one index.

    A check compares one query of a batch, if the time of all checks stays below `share` of the search time. Safe to use
    from several threads, of which one checks at a time.
    """

    def __init__(self, share: float = SHARE, window: int = WINDOW) -> None:
        self._share = share
        self._lock = threading.Lock()
        self._checking = threading.Lock()
        self._random = np.random.default_rng()
        self._recalls: deque[float] = deque(maxlen=window)
        self._report: dict[str, Any] = {}  # report of the watched index
        self._checked = 0
        self._warned = False
        self._searched = self._spent = 0.0  # seconds
        self._pace = 1 / RATE  # seconds of an exact search for each number compared

    def change(self, share: float, window: int) -> None:
        """Set the share of time for checks and the number of recent checks; keep the measurements."""
        with self._lock:
            self._share, self._recalls = share, deque(self._recalls, maxlen=window)

    def after_fork(self) -> None:
        """Replace the locks in a forked child, where no thread would release them."""
        self._lock, self._checking = threading.Lock(), threading.Lock()

    def follow(self, index: Index) -> None:
        """Watch a copy that replaced the index after records were added or removed; keep the measurements."""
        with self._lock:
            self._report = index.report

    def report(self, index: Index) -> dict[str, Any]:
        """Return the mean recall of the recent checks, and the number of checks since the index was built or tuned."""
        with self._lock:
            self._keep_to(index)
            mean = round(float(np.mean(self._recalls)), 4) if self._recalls else None
            return {"live_recall": mean, "live_checked": self._checked}

    def saw(
        self,
        index: Index,
        seconds: float,  # time of the search
        matches: Rows,  # (q, k) answer of the search
        numbers: int,  # numbers that an exact search compares: records times width
        exact: Callable[[int], Rows],  # number of a query -> (k,) the positions of its true nearest
    ) -> None:
        """Count an answered search, and check one of its queries if the time for checks allows.

        Issue a RecallWarning, once for an index, if the recall is surely below the tuned recall.
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
        """Return the text of a warning if recall is surely too low and no warning was given before; else None."""
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
        """Reset the measurements if another index, or another tuning of the index, is in use."""
        if index.report is self._report:
            return
        self._report = index.report
        self._recalls.clear()
        self._checked, self._warned = 0, False
        self._searched = self._spent = 0.0
