"""The explorer's map, a sample of the keys projected on their first two principal components, and `SearchResult`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from softdb.answers.records import parsed
from softdb.database import SoftDB
from softdb.scoring import score_of
from softdb.store.entry import RecordEntry
from softdb.tools.explore.display import named_id, title

SAMPLE = 2000  # largest number of records on the map
FEW = 3  # effective number of records with which the slider starts, for stored keys as queries
QUERIES = 64  # number of sampled keys used as queries to choose the range of temperatures

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Temperatures:
    """Range and start of the temperature slider."""

    low: float
    start: float
    high: float


@dataclass(frozen=True)
class Plane:
    """A map of m sampled records, with a range of temperatures that suits them.

    The sample consists of the rows with the smallest hashes, so that few writes change it little; a new map keeps the
    signs of the axes. As the cosine ignores lengths, it draws a query as if it had the keys' mean length.
    """

    generation: int
    reembedded: int  # the generation at which the keys were made
    entries: list[RecordEntry]  # m
    rows: NDArray[np.int64]  # (m,)
    keys: Tensor  # (m, d) float32
    centre: Floats  # (d,)
    axes: Floats  # (d, 2)
    share: float  # share of the keys' variance that the map shows
    length: float | None  # length that a query is scaled to before it is drawn; None: unchanged
    temperatures: Temperatures

    @classmethod
    def of(cls, db: SoftDB, before: Plane | None = None) -> Plane:
        """Make a map of an open database; `before` gives the signs of the axes. Cost m d min(m, d)."""
        snapshot, _ = db.core.view()
        live = np.flatnonzero(snapshot.live)
        rows, n = snapshot.rows(live), len(live)
        if len(rows) > SAMPLE:
            chosen = np.sort(np.argpartition(_hashed(rows), SAMPLE)[:SAMPLE])
            live, rows = live[chosen], rows[chosen]
        records = db.core.store.read(rows, texts=True)
        stored = np.array([row in records for row in rows.tolist()], np.bool_)
        positions = live[stored]
        keys = snapshot.keys_at(positions).float() if len(positions) else torch.zeros(0, db.core.schema.dim)
        vectors = keys.double().numpy()
        centre = vectors.mean(0) if len(vectors) else np.zeros(db.core.schema.dim)
        axes, share = _axes(vectors - centre)
        if before is not None and before.axes.shape == axes.shape:
            axes = axes * np.where((before.axes * axes).sum(0) < 0, -1, 1)
        length = float(np.linalg.norm(vectors, axis=1).mean()) if db.metric == "cosine" and len(vectors) else None
        entries = [records[row] for row in rows[stored].tolist()]
        range_ = _temperatures(score_of(db.core.schema.metric)(keys[:QUERIES], keys), n)
        generations = snapshot.generation, db.core.reembedded
        return cls(*generations, entries, rows[stored], keys, centre, axes, share, length, range_)

    @cached_property
    def names(self) -> list[list[str]]:  # m of [id, title]
        """The records' ids as users type them, and their titles."""
        payloads = parsed([entry.payload for entry in self.entries])
        pairs = zip(self.entries, payloads, strict=True)
        return [[named_id(entry.id), title(payload, entry.text)] for entry, payload in pairs]

    def at(self, vectors: Any) -> Floats:  # (…, d) -> (…, 2)
        """Return the coordinates of vectors on the map."""
        return (np.asarray(vectors, np.float64) - self.centre) @ self.axes

    def lights(self, db: SoftDB, query: Tensor | None, where: Any) -> list[float | None]:  # (1, d) -> m
        """Score the map's records for a query; None for records that the filter excludes, or without a query."""
        if query is None:
            return [None] * len(self.keys)
        scores = score_of(db.core.schema.metric)(query, self.keys)[0].tolist()
        if where is None:
            return list(scores)
        snapshot, allowed = db.core.view(where)
        positions = snapshot.positions(self.rows)
        keep = (positions >= 0) & (True if allowed is None else allowed[positions])
        return [score if allowed else None for score, allowed in zip(scores, keep.tolist(), strict=True)]

    def query_at(self, query: Tensor) -> Floats:  # (d,) -> (2,)
        """Return the coordinates of a query on the map, scaled to `length`."""
        return self.at(query.double().numpy() * self.drawn_scale(query))

    def drawn_scale(self, query: Tensor) -> float:  # (d,)
        """Return the factor that scales a query to `length`."""
        norm = float(query.norm())
        return 1.0 if self.length is None or not norm else self.length / norm


@dataclass(frozen=True)
class SearchResult:
    """The part of a reply that does not depend on the temperature."""

    generation: int
    query: Tensor | None  # (1, d); None for a search by words alone, which has no weights
    hits: list[dict[str, Any]]
    scores: list[float | None]  # scores of the hits' keys; None for a hit without a key
    ids: list[str | int]
    query_id: str | int | None  # id of the record whose key is the query
    by_words: bool  # True: the text has no vector, so words find the hits; the first one's key is the query
    plane: Plane
    places: list[list[float] | None]  # coordinates of the hits on the map
    lights: list[float | None]  # scores of the map's records; None if the filter excludes them
    milliseconds: float
    notes: list[str]


def _hashed(rows: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Return a fixed pseudorandom number for each row."""
    mixed = rows.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    mixed ^= mixed >> np.uint64(32)
    hashes: NDArray[np.uint64] = mixed * np.uint64(0xBF58476D1CE4E5B9)
    return hashes


def _axes(centred: Floats) -> tuple[Floats, float]:  # (m, d) -> (d, 2)
    """Return the first two principal directions and their share of the variance; zeros for a missing direction."""
    m, d = centred.shape
    axes, variance = np.zeros((d, 2)), float(np.square(centred).sum())
    if variance == 0:
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
    return axes, min(1.0, float(values[::-1][:2].clip(0).sum()) / variance)


def _temperatures(scores: Tensor, n: int) -> Temperatures:  # (q, m): the first q of m sampled records, out of n
    """Return temperatures from one at which the nearest record has all weight to one at which all weigh alike."""
    m = scores.shape[1]
    others = scores.clone()
    others.fill_diagonal_(-torch.inf)
    best = others.amax(1) if m > 1 else torch.zeros(0)
    gaps = best - others.masked_fill(others.isinf(), 0).sum(1) / max(1, m - 1)
    gaps = gaps[gaps.isfinite() & (gaps > 0)]
    gap = float(gaps.median()) if len(gaps) else 1.0
    low, middle, high = (float(f"{gap * factor:.1g}") for factor in (1 / 400, 1 / 10, 50))
    start = _start(scores, n, low / 1000, high) or middle
    return Temperatures(min(low, float(f"{start / 20:.1g}")), start, high)


def _start(scores: Tensor, n: int, low: float, high: float) -> float | None:
    """Return the temperature at which a stored key as query has FEW effective records, or √n if that is less.

    None if there is no such temperature between `low` and `high`.
    """
    few = min(FEW, math.sqrt(n))
    counts = torch.full(scores.shape, (n - 1) / max(1, scores.shape[1] - 1))  # records for each sampled one
    counts.fill_diagonal_(1)

    def effective(temperature: float) -> float:
        shares = torch.exp((scores - scores.amax(1, keepdim=True)) / temperature)
        return float(((counts * shares).sum(1).square() / (counts * shares.square()).sum(1)).median())

    if n < 3 or not effective(low) < few < effective(high):
        return None
    for _ in range(16):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if effective(middle) < few else (low, middle)
    return float(f"{high:.2g}")
