"""Search by text, and hybrid search: merge the hits by text and the hits by vector into one sorted list."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from softdb.attend.request import Live, Positions
from softdb.attend.scoring import score_rows
from softdb.check import Fusion
from softdb.filters import TextScores
from softdb.index.placement import RecordColumns
from softdb.index.query import Query
from softdb.scoring import score_of

RANKED = 60  # constant c of reciprocal rank fusion, Σ 1 / (c + rank)

Floats = NDArray[np.float64]


class TextQuery(NamedTuple):
    """A search by text: the texts, the number of records wanted for each, and the records that take part."""

    texts: TextScores
    k: int
    keep: Live | None  # (m,) bool over the records with a text, True = takes part; None: all
    left_out: Positions | None  # rows to exclude, (q, e), or (1, e) for every query; -1 = none

    def best(self, i: int, k: int) -> tuple[Positions, Floats]:  # (≤ k,), (m,)
        """Return indices into `texts.rows` of the k best records for text number i, and the scores of all m records."""
        scores, keep, rows = self.texts.scores(i), self.keep, self.texts.rows
        if self.left_out is not None:
            others = ~np.isin(rows, self.left_out[min(i, len(self.left_out) - 1)])
            keep = others if keep is None else others & keep
        return _best(scores, k, keep), scores


def text_hits(query: TextQuery) -> tuple[Tensor, Tensor]:  # (q, k) rows, (q, k) float64
    """Return rows and BM25 scores for each text, best first, ties sorted by row."""
    rows = np.full((len(query.texts.words), query.k), -1)
    scores = np.full(rows.shape, -np.inf)
    for i in range(len(rows)):
        best, every = query.best(i, query.k)
        rows[i, : len(best)], scores[i, : len(best)] = query.texts.rows[best], every[best]
    return torch.from_numpy(rows), torch.from_numpy(scores)


def _best(scores: Floats, k: int, keep: Live | None) -> Positions:
    """Return the indices of the k best scores above 0, best first, (m,) -> (≤ k,)."""
    places = np.flatnonzero(scores if keep is None else scores * keep)
    if len(places) > k:
        positive = scores[places]
        places = places[positive >= np.partition(positive, -k)[-k]]
    return places[np.argsort(-scores[places], kind="stable")[:k]]


def fused_hits(
    fusion: Fusion,
    by_text: TextQuery,
    query: Query,  # the search by vector
    nearest: Positions,  # (q, c) rows of the nearest by vector, best first, -1 = none; c ≥ k
    columns: RecordColumns,
) -> tuple[Tensor, Tensor]:  # (q, ≤ k) rows, (q, ≤ k) scores
    """Merge the c best records by text and the c nearest by vector; return the k best (see `SoftDB.search`).

    A record without a text has text score 0. A record without a key has the least vector score of the candidates.
    """
    count, queries, texts = nearest.shape[1], query.queries, by_text.texts
    if not count:
        return torch.from_numpy(nearest).to(queries.device), queries[:, :0]
    rows = np.concatenate([nearest, np.full_like(nearest, -1)], 1)  # (q, 2 c), no row twice
    scores, ranks = np.zeros(rows.shape), np.full((2, *rows.shape), np.inf)
    ranks[0, :, :count] = np.arange(1, count + 1)
    for i, own_rows in enumerate(rows):
        best, text_scores = by_text.best(i, count)
        new = ~np.isin(texts.rows[best], own_rows)
        own_rows[count : count + np.count_nonzero(new)] = texts.rows[best[new]]
        places = np.minimum(texts.rows.searchsorted(own_rows), len(texts.rows) - 1)
        scores[i] = np.where(texts.rows[places] == own_rows, text_scores[places], 0) if len(text_scores) else 0
        place = dict(zip(texts.rows[best].tolist(), range(1, count + 1), strict=False))
        ranks[1, i] = [place.get(row, np.inf) for row in own_rows.tolist()]
    live = torch.from_numpy(rows >= 0).to(queries.device)
    if fusion.ranks:
        fused = torch.from_numpy((1 / (RANKED + ranks)).sum(0)).to(queries)
    else:
        fused = _summed(fusion, query, torch.from_numpy(scores).to(queries), rows, columns)
    fused, order = fused.masked_fill(~live, -torch.inf).sort(dim=1, descending=True, stable=True)
    return torch.from_numpy(rows).to(queries.device).gather(1, order)[:, : by_text.k], fused[:, : by_text.k]


def _summed(
    fusion: Fusion,
    query: Query,
    scores: Tensor,  # (q, c) BM25 scores
    rows: Positions,  # (q, c)
    columns: RecordColumns,
) -> Tensor:  # (q, c)
    """Return weighted sums of vector scores, with gradient, and text scores."""
    positions = columns.positions(rows)
    if len(columns.live):
        positions[(positions >= 0) & ~columns.live[positions]] = -1
        vectors = score_rows(score_of(query.metric), query.queries, columns, positions)
    else:  # no record has a key
        vectors = query.queries.new_full(rows.shape, -torch.inf)
    plain = vectors.detach()
    high = plain.amax(1, keepdim=True)
    low = plain.masked_fill(plain.isinf(), torch.inf).amin(1, keepdim=True)
    some = high.isfinite()
    vectors = torch.where(plain.isinf(), torch.where(some, low, 0), vectors)
    if fusion.weight is not None:
        return vectors + fusion.weight * scores
    vectors = (vectors - torch.where(some, low, 0)) / torch.where(some & (high > low), high - low, 1)
    most = scores.amax(1, keepdim=True)
    return (1 - fusion.share) * vectors + fusion.share * scores / torch.where(most > 0, most, 1)
