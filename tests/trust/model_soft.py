"""Range searches and soft queries beside a dense softmax in float64."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from model_oracle import TOLERANCE, Records
from model_world import Array, Id

import softdb

Where = dict[str, Any] | None


def radius_hits(db: softdb.SoftDB, model: Records, queries: Array, where: Where, share: float) -> None:
    """Every record that is near enough and no other; those on the edge may be either."""
    ids = model.compared(where)
    scores, slack = model.scores(queries, ids)
    least = float(np.quantile(scores, share)) if scores.size else 0.5
    if model.kind.metric == "cosine":
        least = min(1.0, max(-1.0, least))
    radius = math.sqrt(max(0.0, -least)) if model.kind.metric == "l2" else least
    least = -radius * radius if model.kind.metric == "l2" else least
    hits = db.search(queries, radius=radius, where=where)
    rows, found = model.rows(ids), np.asarray(hits.rows)
    for i in range(len(queries)):
        live = found[i][found[i] >= 0]
        assert len(set(live)) == len(live), "a record is found twice"
        assert set(rows[scores[i] >= least + slack[i]]) <= set(live), f"radius {radius}: a record is not found"
        assert set(live) <= set(rows[scores[i] >= least - slack[i]]), f"radius {radius}: a record is too far away"
    counts = db.count_within(queries, radius, where=where)
    low, high = (scores >= least + slack).sum(1), (scores >= least - slack).sum(1)
    value, exact = counts.value.numpy(), counts.exact.numpy()
    assert ((value >= low) & (value <= high))[exact].all(), f"{value} near records where {low} to {high} were expected"


def _logits(model: Records, queries: Array, ids: list[Id]) -> tuple[Array, float, float]:
    """(q, m) logits, their temperature, and how far the logits may be off."""
    scores, slack = model.scores(queries, ids)
    temperature = max(1.0, float(np.abs(scores).max(initial=0)) / 10)
    return scores / temperature, temperature, float(slack.max(initial=0)) / temperature


def _lse(logits: Array) -> Array:
    top = logits.max(1, initial=-np.inf, keepdims=True)
    top[np.isneginf(top)] = 0
    with np.errstate(divide="ignore"):
        found: Array = np.log(np.exp(logits - top).sum(1)) + top[:, 0]
    return found


def _close(found: Any, expected: Array, slack: float, what: str) -> None:
    given = np.asarray(found.detach().double())
    assert given.shape == expected.shape
    with np.errstate(invalid="ignore"):
        near = (np.abs(given - expected) <= slack) | (given == expected)
    assert near.all(), f"{what} is {given[~near]} where {expected[~near]} was expected, within {slack}"


def attended(db: softdb.SoftDB, model: Records, queries: Array, where: Where, mask: Array | None) -> None:
    """The mean of the values by softmax weights, and the log-normaliser."""
    ids = model.compared(where)
    logits, temperature, slack = _logits(model, queries, ids)
    if mask is not None:
        places = {one: i for i, one in enumerate(model.compared(None))}
        logits[~mask[:, [places[one] for one in ids]]] = -np.inf
    lse, values = _lse(logits), model.values(ids)
    weights = np.exp(logits - np.where(np.isneginf(lse), 0, lse)[:, None])
    output = weights @ values
    far = (2 * slack + TOLERANCE) * float(np.linalg.norm(values, axis=1).max(initial=0)) + 1e-30
    truncations = [None, len(ids)] if 0 < len(ids) <= 64 else [None]
    for k in truncations:
        pooled = db.attend(queries, temperature=temperature, where=where, mask=mask, k=k)
        _close(pooled.lse, lse, slack + TOLERANCE * (1 + np.abs(lse[np.isfinite(lse)]).max(initial=0)), "lse")
        _close(pooled.output, output, far, "output")
        assert bool(pooled.exact.all())


def partition(db: softdb.SoftDB, model: Records, queries: Array, where: Where) -> None:
    """The log-normaliser alone, estimated where there is an index to draw from."""
    logits, temperature, slack = _logits(model, queries, model.compared(where))
    found, lse = db.log_partition(queries, temperature=temperature, where=where), _lse(logits)
    exact = np.asarray(found.exact)
    near = slack + TOLERANCE * (1 + np.abs(lse[np.isfinite(lse)]).max(initial=0))
    _close(found.value[found.exact], lse[exact], near, "log Z")
    assert not np.isnan(np.asarray(found.value)).any()


def sampled(db: softdb.SoftDB, model: Records, queries: Array, where: Where, seed: int) -> None:
    """Draws are live records that take part, and their probabilities are those of the softmax."""
    ids = model.compared(where)
    logits, temperature, slack = _logits(model, queries, ids)
    generator = torch.Generator().manual_seed(seed)
    drawn = db.sample(queries, 4, temperature=temperature, where=where, generator=generator)
    rows = np.asarray(drawn.hits.rows)
    if not ids:
        assert (rows == -1).all()
        assert bool(torch.isneginf(drawn.log_prob).all())
        return
    places = {int(row): i for i, row in enumerate(model.rows(ids))}
    assert set(rows.flat) <= set(places), "a record was drawn that takes no part"
    chosen = np.array([[places[int(row)] for row in line] for line in rows])
    expected = np.take_along_axis(logits, chosen, 1) - _lse(logits)[:, None]
    _close(drawn.log_prob, expected, 2 * slack + TOLERANCE * (1 + np.abs(expected).max()), "log_prob")
    assert drawn.hits.ids == [[ids[i] for i in line] for line in chosen]
