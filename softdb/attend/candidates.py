"""Candidates of a search: split queries into chunks that fit into memory, drop excluded records, score the others."""

from __future__ import annotations

from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from softdb.attend.request import Positions
from softdb.attend.scoring import metric_in_place, score_rows
from softdb.check import Metric
from softdb.index.contract import Floats
from softdb.index.placement import RecordColumns
from softdb.index.rerank import ordered
from softdb.scoring import Score, ScoreFunction, score_of

GATHERED = 1 << 24  # numbers of candidate keys gathered at once: 64 MB
Own = TypeVar("Own", Positions, Positions | None)


def chunks(queries: Tensor, positions: Own, count: int) -> list[tuple[Tensor, Own]]:
    """Split queries into chunks of at most max(1, count), each with its lines of `positions` (one line is for all)."""
    if len(queries) <= count:
        return [(queries, positions)]
    parts = torch.split(queries, max(1, count))
    if positions is None or len(positions) == 1:
        return [(chunk, positions) for chunk in parts]
    return list(zip(parts, np.split(positions, range(len(parts[0]), len(queries), len(parts[0]))), strict=True))


def without(
    positions: Positions,  # (q, c) best first
    scores: Floats | None,  # (q, c)
    excluded: Positions | None,  # (q, e), or (1, e) for every query; -1 = none
    k: int | None,  # number of positions to keep; None: all
) -> tuple[Positions, Floats | None]:  # (q, k), (q, k)
    """Return the first k positions of each query that are not excluded, and their scores."""
    if excluded is not None:
        drop = np.zeros(positions.shape, np.bool_)
        for column in excluded.T:
            drop |= positions == column[:, None]
        order = np.argsort(drop | (positions < 0), axis=1, kind="stable")
        positions = np.take_along_axis(np.where(drop, -1, positions), order, 1)
        if scores is not None:
            scores = np.take_along_axis(np.where(drop, np.float32(-np.inf), scores), order, 1)
    return positions[:, :k], None if scores is None else scores[:, :k]


def scored(
    queries: Tensor,  # (q, d)
    snapshot: RecordColumns,
    metric: Metric,
    positions: Positions,  # (q, k)
    scores: Floats | None,  # (q, c ≥ k) if the finder computed them, else None
) -> tuple[Tensor, Tensor]:  # (q, k), (q, k)
    """Return rows and exact scores, best first, with gradients for the queries. Reuse `scores` if none is needed."""
    score = score_of(metric)
    if snapshot.placed is None and metric_in_place(score, queries, snapshot) is not None:
        if scores is None:
            positions, scores = ordered(snapshot, queries.detach().numpy(), positions, positions.shape[1], metric)
        scores = scores[:, : positions.shape[1]]
        if not np.isnan(scores).any():  # NaN: too large for float32; torch scores instead
            return torch.from_numpy(snapshot.rows(positions)), torch.from_numpy(scores)
    exact, order = score_rows(score, queries, snapshot, positions).sort(dim=1, descending=True, stable=True)
    return torch.from_numpy(snapshot.rows(positions)).to(queries.device).gather(1, order), exact


def score_all(score: Score | ScoreFunction, queries: Tensor, columns: RecordColumns, positions: Positions) -> Tensor:
    """Return the scores (q, k) of any number of candidates (q, k) by `score_rows`, with GATHERED numbers at once."""
    width, lines = max(1, GATHERED // queries.shape[1]), []
    for chunk, own in chunks(queries, positions, width // max(1, positions.shape[1])):
        pieces = np.split(own, range(width, own.shape[1], width), axis=1)
        lines.append(torch.cat([score_rows(score, chunk, columns, piece) for piece in pieces], 1))
    return torch.cat(lines)


def joined(parts: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Concatenate rows and scores (q_i, k_i) of all parts, padded with -1 and -inf to the largest k_i."""
    if len(parts) == 1:
        return parts[0]
    width = max(rows.shape[1] for rows, _ in parts)
    rows, scores = (
        torch.cat(
            [torch.nn.functional.pad(columns[i], (0, width - columns[i].shape[1]), value=none) for columns in parts]
        )
        for i, none in enumerate((-1, -torch.inf))
    )
    return rows, scores
