"""Plots of soft queries with matplotlib (extra `softdb[plot]`)."""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from softdb import check
from softdb.answers import Pooled
from softdb.errors import BadInput, MissingDependency

__all__ = ["attention_heatmap", "figure", "save", "temperature_sweep", "weight_bars"]

MAX_LABELS = 40  # largest number of records whose ids a heat map shows


def figure(columns: int = 1, width: float = 6.0, height: float = 4.0) -> tuple[Any, list[Any]]:
    """Return a figure and its axes, each of width × height inches; needs no display and no pyplot."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise MissingDependency("pictures need matplotlib; pip install 'softdb[plot]'") from None
    new = Figure(figsize=(width * columns, height), layout="constrained")
    FigureCanvasAgg(new)
    return new, list(new.subplots(1, columns, squeeze=False)[0])


def save(drawn: Any, path: str | os.PathLike[str]) -> None:
    """Write a figure to a file; its suffix (.png, .pdf, .svg) sets the format. Raises BadInput if that fails."""
    try:
        drawn.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise BadInput(
            f"the picture cannot be written to {os.fspath(path)} ({error}); give a path ending in .png"
        ) from None


def temperature_sweep(
    ax: Any,  # matplotlib axes; None makes them
    temperatures: Sequence[float],  # (t,) ascending
    weights: Any,  # (t, n)
    labels: Sequence[str],  # n
) -> Any:
    """Plot each record's weight against the temperature, from database lookup to average pooling. Returns the axes."""
    shares, heats = _checked(weights, temperatures, labels)
    ax = figure()[1][0] if ax is None else ax
    strongest = shares[0].max()
    for record, label in enumerate(labels):
        bold = shares[0, record] == strongest
        ax.plot(heats, shares[:, record], label=label, linewidth=2.5 if bold else 1.2, zorder=3 if bold else 2)
    ax.axhline(1 / len(labels), color="0.6", linestyle=":", linewidth=1, zorder=1)
    ax.set(xscale="log", xlabel="temperature", ylabel="weight", ylim=(-0.02, 1.02), xlim=(heats[0], heats[-1]))
    ax.text(0.02, 0.9, "database lookup", transform=ax.transAxes, color="0.4")
    ax.text(0.98, 0.27, "average pooling", transform=ax.transAxes, ha="right", color="0.4")
    ax.legend(frameon=False, loc="upper right")
    return ax


def attention_heatmap(
    ax: Any,  # matplotlib axes; None makes them
    weights: Any,  # a Pooled answer with weights, or numbers (q, n)
    queries: Sequence[str] | None = None,  # q labels
    records: Sequence[str] | None = None,  # n labels
) -> Any:
    """Draw weights as shades, one row per query and one column per record. Returns the axes.

    For an answer of `attend(k=)`, or another with weights, the columns are the records with a weight for any query, in
    the order of rows, with ids if there are at most 40. (The columns of `pooled.weights` are ranks, not records.)
    Raises BadInput for an answer without weights, shapes that do not fit, and negative weights.
    """
    if isinstance(weights, Pooled):
        weights, ids = _by_record(weights)
        records = ids if records is None and len(ids) <= MAX_LABELS else records
    shares = _matrix(weights)
    for name, labels, count in (("queries", queries, len(shares)), ("records", records, shares.shape[1])):
        if labels is not None and len(labels) != count:
            raise BadInput(f"{len(labels)} {name} for weights of shape {shares.shape}; give {count} labels, or None")
    ax = figure()[1][0] if ax is None else ax
    image = ax.imshow(shares, cmap="Blues", vmin=0, aspect="auto", interpolation="nearest")
    ax.figure.colorbar(image, ax=ax, label="weight")
    ax.set(xlabel="record", ylabel="query")
    if queries is not None:
        ax.set_yticks(range(len(queries)), queries)
    if records is not None:
        ax.set_xticks(range(len(records)), records, rotation=45, ha="right")
    return ax


def _by_record(pooled: Pooled) -> tuple[NDArray[np.float64], list[str]]:  # (q, n), n ids
    """Return the weights of all records that have one for any query, in the order of rows, and their ids."""
    if pooled.hits is None or pooled.weights is None:
        raise BadInput("this answer has no weights by record; query with k=, or with need_weights=True")
    hits = pooled.hits.flat
    rows = hits.rows.cpu().numpy()
    query, rank = np.nonzero(rows >= 0)
    _, first, column = np.unique(rows[query, rank], return_index=True, return_inverse=True)
    shares = np.zeros((len(rows), len(first)))
    np.add.at(shares, (query, column), _floats(pooled.weights).reshape(rows.shape)[query, rank])
    ids = list(chain.from_iterable(hits.ids)) if len(first) <= MAX_LABELS else []
    return shares, [str(ids[i]) for i in first] if ids else [""] * len(first)


def weight_bars(
    ax: Any,  # matplotlib axes; None makes them
    weights: Any,  # (t, n)
    labels: Sequence[str],  # n
    titles: Sequence[str],  # t
    colors: Sequence[str | None] | None = None,  # n colours of matplotlib
) -> Any:
    """Draw the weights of t soft queries as stacked bars, one bar per query. Returns the axes."""
    shares, _ = _checked(weights, range(1, len(titles) + 1), labels)
    ax = figure()[1][0] if ax is None else ax
    below = np.zeros(len(titles))
    for record, (label, color) in enumerate(zip(labels, colors or [None] * len(labels), strict=True)):
        ax.bar(titles, shares[:, record], bottom=below, label=label, width=0.6, color=color)
        below += shares[:, record]
    ax.set(ylabel="weight", ylim=(0, 1))
    return ax


def _checked(weights: Any, temperatures: Sequence[float], labels: Sequence[str]) -> tuple[Any, Any]:
    shares, heats = _floats(weights), np.asarray(temperatures, np.float64)
    expected = (len(heats), len(labels))
    if shares.shape != expected or not shares.size:
        raise BadInput(
            f"weights have shape {shares.shape}; expected {expected}: temperatures by labels, at least one of each"
        )
    check.finite(shares, "weights")
    if not (np.isfinite(heats).all() and (heats > 0).all()):
        raise BadInput(f"temperatures are {check.shown(list(temperatures))}; expected finite numbers above 0")
    return shares, heats


def _matrix(weights: Any) -> Any:
    shares = _floats(weights)
    if shares.ndim != 2 or not shares.size:
        raise BadInput(f"weights have shape {shares.shape}; expected (q, n) with q and n at least 1")
    check.finite(shares, "weights")
    if (shares < 0).any():
        raise BadInput(f"the smallest weight is {shares.min()}; expected weights of at least 0, not scores")
    return shares


def _floats(weights: Any) -> Any:
    return np.asarray(weights.detach().cpu() if check.is_tensor(weights) else weights, np.float64)
