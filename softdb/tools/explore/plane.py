"""A sample of the keys on a plane: their two principal components."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from softdb.database import SoftDB
from softdb.scoring import score_of
from softdb.store.entry import RecordEntry

SAMPLE = 2000  # records on the map
FEW = 3  # records that the answer is a mean of where the slider starts; of what is not stored, some hundred
QUERIES = 64  # of them, whose scores say which temperatures are cold and hot

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Temperatures:
    """The ends of the slider, and where it starts."""

    low: float
    start: float
    high: float


@dataclass(frozen=True)
class Plane:
    """A sample of the records on a plane.

    The sample are the rows with the smallest hashes, so that it changes little as the database does; the axes keep
    their signs. A cosine does not see lengths, so a query is drawn as long as keys are.
    """

    generation: int
    made: int  # the generation that made the keys
    entries: list[RecordEntry]  # m
    rows: NDArray[np.int64]  # (m,)
    keys: Tensor  # (m, d) float32
    centre: Floats  # (d,)
    axes: Floats  # (d, 2)
    share: float  # of the variance, that the plane shows
    length: float | None  # that queries are drawn with
    temperatures: Temperatures

    @classmethod
    def of(cls, db: SoftDB, before: Plane | None = None) -> Plane:
        """Of the generation that a handle sees; the last one's axes keep their signs. Cost m d min(m, d)."""
        snapshot, _ = db.core.view()
        live = np.flatnonzero(snapshot.live)
        rows, whole = snapshot.rows(live), len(live)
        if len(rows) > SAMPLE:
            chosen = np.sort(np.argpartition(_hashed(rows), SAMPLE)[:SAMPLE])
            live, rows = live[chosen], rows[chosen]
        found = db.core.store.read(rows, texts=True)
        there = np.array([row in found for row in rows.tolist()], np.bool_)
        positions = live[there]
        keys = snapshot.keys_at(positions).float() if len(positions) else torch.zeros(0, db.dim)
        wide = keys.double().numpy()
        centre = wide.mean(0) if len(wide) else np.zeros(db.dim)
        axes, share = _axes(wide - centre)
        made = db.core.reembedded
        if before is not None and before.axes.shape == axes.shape:
            axes = axes * np.where((before.axes * axes).sum(0) < 0, -1, 1)
        length = float(np.linalg.norm(wide, axis=1).mean()) if db.metric == "cosine" and len(wide) else None
        entries = [found[row] for row in rows[there].tolist()]
        hot = _temperatures(score_of(db.core.schema.metric)(keys[:QUERIES], keys), whole)
        return cls(snapshot.generation, made, entries, rows[there], keys, centre, axes, share, length, hot)

    def at(self, vectors: Any) -> Floats:  # (…, d) -> (…, 2)
        """Coordinates of vectors."""
        found: Floats = (np.asarray(vectors, np.float64) - self.centre) @ self.axes
        return found

    def lights(self, db: SoftDB, query: Tensor | None, where: Any) -> list[float | None]:  # (1, d) -> m
        """The scores of the map's records; None without a query, and of those that the filter leaves out."""
        if query is None:
            return [None] * len(self.keys)
        scores = score_of(db.core.schema.metric)(query, self.keys)[0].tolist()
        if where is None:
            return list(scores)
        snapshot, allowed = db.core.view(where)
        positions = snapshot.positions(self.rows)
        keep = (positions >= 0) & (True if allowed is None else allowed[positions])
        return [score if own else None for score, own in zip(scores, keep.tolist(), strict=True)]

    def query_at(self, query: Tensor) -> Floats:  # (d,) -> (2,)
        """Coordinates of a query."""
        vector = query.double().numpy()
        norm = float(np.linalg.norm(vector))
        return self.at(vector if self.length is None or not norm else vector * (self.length / norm))


def _hashed(rows: NDArray[np.int64]) -> NDArray[np.uint64]:
    """A fixed number for each row, as good as random."""
    mixed = rows.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    mixed ^= mixed >> np.uint64(32)
    found: NDArray[np.uint64] = mixed * np.uint64(0xBF58476D1CE4E5B9)
    return found


def _axes(centred: Floats) -> tuple[Floats, float]:  # (m, d) -> (d, 2)
    """The two directions of largest variance, and their share of it; zeros where there are none."""
    m, d = centred.shape
    axes, whole = np.zeros((d, 2)), float(np.square(centred).sum())
    if whole == 0:
        return axes, 0.0
    square = centred.T @ centred if d <= m else centred @ centred.T
    values, vectors = np.linalg.eigh(square)
    best = vectors[:, ::-1][:, :2]
    if d > m:
        best = centred.T @ best
    norms = np.linalg.norm(best, axis=0)
    best = best[:, norms > 1e-9 * norms[0]] / norms[norms > 1e-9 * norms[0]]
    best = best * np.where(best[np.abs(best).argmax(0), np.arange(best.shape[1])] < 0, -1, 1)
    axes[:, : best.shape[1]] = best
    return axes, min(1.0, float(values[::-1][:2].clip(0).sum()) / whole)


def _temperatures(scores: Tensor, n: int) -> Temperatures:  # (q, m), of the q first of m records out of n
    """From where the nearest record takes all to where all weigh alike: by how far the best score is above others."""
    m = scores.shape[1]
    others = scores.clone()
    others.fill_diagonal_(-torch.inf)
    best = others.amax(1) if m > 1 else torch.zeros(0)
    gaps = best - others.masked_fill(others.isinf(), 0).sum(1) / max(1, m - 1)
    gaps = gaps[gaps.isfinite() & (gaps > 0)]
    gap = float(gaps.median()) if len(gaps) else 1.0
    low, between, high = (float(f"{gap * by:.1g}") for by in (1 / 400, 1 / 10, 50))
    start = _start(scores, n, low / 1000, high) or between
    return Temperatures(min(low, float(f"{start / 20:.1g}")), start, high)


def _start(scores: Tensor, n: int, low: float, high: float) -> float | None:
    """The temperature at which about FEW records, or √n where that is less, answer a question by a stored record.

    None where there is no such temperature.
    """
    few = min(FEW, math.sqrt(n))
    each = torch.full(scores.shape, (n - 1) / max(1, scores.shape[1] - 1))  # records that one of the sample stands for
    each.fill_diagonal_(1)

    def effective(temperature: float) -> float:
        shares = torch.exp((scores - scores.amax(1, keepdim=True)) / temperature)
        return float(((each * shares).sum(1).square() / (each * shares.square()).sum(1)).median())

    if n < 3 or not effective(low) < few < effective(high):
        return None
    for _ in range(16):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if effective(middle) < few else (low, middle)
    return float(f"{high:.2g}")
