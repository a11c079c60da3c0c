"""Records, filters and queries of `filter_peers.py`, and the expected answers."""

from __future__ import annotations

import gzip
import json
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from filter_engines import Columns, Engine, Filter, Floats, K, Rows
from numpy.typing import NDArray
from serve import queries_near, world

__all__ = ["KINDS", "NEAR", "SHARES", "Case", "World", "clustered", "wordnet"]

SHARES = {"50 %": 0.5, "10 %": 0.1, "1 %": 0.01, "0.1 %": 0.001}
KINDS = ("uncorrelated", "correlated", "opposed")
NEAR = 100  # nearest records of a query, among which the share of matches is its correlation with a filter
ALIKE = 1e-5  # scores that differ by less may be in another order in float32


@dataclass
class World:
    """Records, and queries to choose from."""

    keys: Floats
    columns: Columns
    tuning: Floats  # queries that softdb's index is tuned on
    pool: Floats  # queries that the cases choose from
    near: Rows = field(init=False)  # (pool, NEAR)

    def __post_init__(self) -> None:
        """Find the NEAR nearest records of each query of the pool."""
        self.near = nearest(self.keys, self.pool, NEAR)[1]

    def filter(self, share: float, kind: str, shift: int) -> Filter:
        """Return a filter that matches about this share of the records; each shift gives another filter."""
        n = len(self.keys)
        if kind == "uncorrelated":
            return Filter("rank", shift, shift + round(share * n))
        if "side" in self.columns:
            return Filter("side", n - shift - round(share * n), n - shift)
        name = "pos" if share >= 0.1 else "topic"  # a few large groups, many small ones
        values, counts = np.unique(self.columns[name], return_counts=True)
        value = min((count, i) for i, count in enumerate(counts.tolist()) if count >= share * n)[1]
        return Filter("rank", shift, shift + round(share * n * n / counts[value]), {name: values[value].item()})

    def queries(self, share: float, kind: str, count: int) -> tuple[Floats, float]:
        """Return `count` queries of the pool (count, d), and the share of their nearest records that match."""
        matching = self.filter(share, kind, 0).mask(self.columns)[self.near].mean(axis=1)
        order = np.random.default_rng(3).permutation(len(self.pool))
        if kind != "uncorrelated":
            order = order[np.argsort(matching[order] * (-1 if kind == "correlated" else 1), kind="stable")]
        places = np.random.default_rng(4).permutation(order[:count])
        return self.pool[places], float(matching[places].mean())


def clustered(n: int, dim: int) -> World:
    """Return Gaussian clusters; the field `side` numbers the records along the direction in which they vary most."""
    keys = world(n, dim)
    sample = keys[:: max(1, n // 20_000)]
    direction = np.linalg.svd(sample - sample.mean(axis=0), full_matrices=False)[2][0]
    order = np.argsort(keys @ direction, kind="stable")
    side = np.empty(n, np.int64)
    side[order] = np.arange(n)
    queries = queries_near(keys, 5000)
    inside = [queries_near(keys[order[n - max(K, round(share * n)) :]], 500) for share in SHARES.values()]
    columns = {"rank": np.random.default_rng(2).permutation(n), "side": side}
    return World(keys, columns, queries[:1000], np.concatenate([queries[1000:], *inside]))


def wordnet(folder: Path) -> World:
    """Return WordNet's embedded glosses with part of speech and topic; queries are other dictionaries' definitions."""
    keys, queries = (np.load(folder / f"{name}.npy").astype(np.float32) for name in ("keys", "queries"))
    with gzip.open(folder / "records.jsonl.gz", "rt", encoding="utf-8") as lines:
        records = [json.loads(line) for line in lines]
    columns = {name: np.array([record[name] for record in records]) for name in ("pos", "topic")}
    columns["rank"] = np.random.default_rng(2).permutation(len(keys))
    queries = queries[np.random.default_rng(2).permutation(len(queries))]
    return World(keys, columns, queries[:1000], queries[1000:9000])


def nearest(keys: Floats, queries: Floats, k: int) -> tuple[Floats, Rows]:
    """Return the true nearest records: scores (q, k), best first, and rows (q, k)."""
    best = torch.full((len(queries), k), -torch.inf)
    rows = torch.full((len(queries), k), -1)
    for low in range(0, len(keys), 1 << 15):
        scores = torch.from_numpy(queries @ keys[low : low + (1 << 15)].T)
        top, order = scores.topk(min(k, scores.shape[1]), dim=1)
        best, places = torch.cat([best, top], 1).topk(k, dim=1)
        rows = torch.cat([rows, order + low], 1).gather(1, places)
    return best.numpy(), rows.numpy()


@dataclass
class Case:
    """A filter and queries, with the expected answers."""

    name: str
    wanted: Filter
    queries: Floats
    mask: NDArray[np.bool_]
    least: Floats  # (q,) score of the K-th nearest match

    @classmethod
    def of(cls, name: str, world: World, wanted: Filter, queries: Floats) -> Case:
        """Make a case, with the expected answers from a comparison of all matching records."""
        mask = wanted.mask(world.columns)
        if np.count_nonzero(mask) < K:
            raise SystemExit(f"{name}: {np.count_nonzero(mask)} match; expected at least {K}; give a larger --n")
        return cls(name, wanted, queries, mask, nearest(world.keys[mask], queries, K)[0][:, -1])

    def recall(self, keys: Floats, engine: Engine, rows: Rows, start: int = 0) -> tuple[float, bool]:
        """Return the recall of answers to the queries from `start` on, and whether each has K records.

        Raises SystemExit if a record does not match or comes twice.
        """
        inside = np.where(rows < 0, True, self.mask[rows])
        ordered = np.sort(np.where(rows < 0, -1 - np.arange(K), rows), axis=1)
        if not inside.all() or (ordered[:, 1:] == ordered[:, :-1]).any():
            raise SystemExit(f"{engine.name}: {self.name}: a record does not match or comes twice")
        batch = slice(start, start + len(rows))
        scores = np.einsum("qd,qkd->qk", self.queries[batch], keys[rows])
        right = (rows >= 0) & (scores >= self.least[batch, None] - ALIKE)
        return float(right.mean()), bool((rows >= 0).all())
