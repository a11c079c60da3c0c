"""`Meter`: counts and times the messages that a shard answers, for `stats()` and, in an actor, for Ray's metrics."""

from __future__ import annotations

import functools
import socket
import sys
import threading
from collections import Counter, deque
from typing import Any

import numpy as np

from softdb.reports import IndexReport, ShardReport

WINDOW = 1000  # number of newest messages of which the seconds are kept
BOUNDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)  # seconds between the bins of Ray's histogram


class Meter:
    """Measurements of one shard. Safe to use from several threads."""

    def __init__(self, table: str, shard: int) -> None:
        self._tags = {"table": table, "shard": str(shard)}
        self._seconds, self._counts = deque[float](maxlen=WINDOW), Counter[str]()
        self._lock = threading.Lock()

    def answered(self, kind: str, seconds: float) -> None:
        """Note the answer to a message of a kind."""
        with self._lock:
            self._seconds.append(seconds)
            self._counts[kind] += 1
        if (exported := _exported()) is not None:
            exported["queries"].inc(1, {**self._tags, "kind": kind})
            exported["seconds"].observe(seconds, {**self._tags, "kind": kind})

    def report(self, index: IndexReport | None, records: int, version: int, lag: int, served: int) -> ShardReport:
        """Return a report of the shard, and export its numbers."""
        with self._lock:
            seconds, answered = np.array(self._seconds or [0.0]), sum(self._counts.values())
        p50, p99 = (round(float(np.quantile(seconds, share)), 6) for share in (0.5, 0.99))
        kind, recall = (None, None) if index is None else (index.kind, index.live_recall)
        if (exported := _exported()) is not None:
            for name, value in (("version", version), ("lag", lag), ("served", served), ("recall", recall)):
                if value is not None:
                    exported[name].set(value, self._tags)
        shard, node = int(self._tags["shard"]), socket.gethostname()
        return ShardReport(shard, node, version, lag, served, records, kind, recall, answered, p50, p99)


@functools.cache
def _exported() -> dict[str, Any] | None:
    """Return Ray's metrics of this process; None outside an actor."""
    ray: Any = sys.modules.get("ray")
    if ray is None or not ray.is_initialized() or ray.get_runtime_context().get_actor_id() is None:
        return None
    from ray.util import metrics

    tags = ("table", "shard")
    gauges = {
        "version": "version of the table that a shard serves",
        "lag": "commits of the table that a shard has not taken in yet",
        "served": "versions that a shard serves",
        "recall": "recall of the index, measured on live searches",
    }
    return {
        "queries": metrics.Counter("softdb_queries", "messages answered", (*tags, "kind")),
        "seconds": metrics.Histogram("softdb_seconds", "seconds of an answer", list(BOUNDS), (*tags, "kind")),
        **{name: metrics.Gauge(f"softdb_{name}", text, tags) for name, text in gauges.items()},
    }
