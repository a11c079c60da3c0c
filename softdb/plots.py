"""Plots of soft queries with matplotlib (extra `softdb[plot]`)."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from softdb import check
from softdb.answers import Pooled
from softdb.errors import BadInput
from softdb.tables.arrow_tables import needed

__all__ = ["COLORS", "STYLE", "attention_heatmap", "figure", "save", "style", "temperature_sweep", "weight_bars"]

MAX_LABELS = 40  # largest number of records whose ids a heat map shows
WIDTH = 7.0  # inches of a picture; a page shows it about 700 pixels wide, where text of 8 points is readable
#: Colours of series: any two differ by more than 20 in CIELAB, also to eyes that lack the cones for red, green or blue.
COLORS = ("#093f8c", "#f0941b", "#2a8c74", "#c0121c", "#8f66c9", "#5cb8e4", "#3f2214")
#: The style as rcParams of matplotlib.
STYLE: dict[Any, Any] = {
    "axes.prop_cycle": f"cycler('color', {list(COLORS)})",
    "axes.axisbelow": True,
    "axes.edgecolor": "0.3",
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 10,
    "figure.facecolor": "white",  # opaque, for dark pages
    "figure.titlesize": 11,
    "font.family": "DejaVu Sans",  # comes with matplotlib
    "font.size": 9,
    "grid.color": "0.9",
    "grid.linewidth": 0.8,
    "image.cmap": "Blues",
    "legend.borderpad": 0.3,
    "legend.edgecolor": "white",
    "legend.fontsize": 8.5,
    "legend.framealpha": 0.85,
    "lines.linewidth": 1.8,
    "lines.markersize": 5,
    "savefig.dpi": 150,
    "svg.hashsalt": "softdb",  # the same ids each time
}


@contextmanager
def style() -> Iterator[None]:
    """Give colours, fonts, lines and grid to all that is drawn in its block, or in a function that it decorates.

    >>> with plots.style():
    ...     drawn, (axes,) = plots.figure()
    ...     lines = axes.plot([0.4, 0.6])
    """
    with needed("matplotlib", "plot", "a picture").rc_context(STYLE):
        yield


@style()
def figure(columns: int = 1, rows: int = 1, height: float = 4.0, **subplots: Any) -> tuple[Any, list[Any]]:
    """Return a figure, 7 inches wide and `height` high, and its axes row by row; needs no display and no pyplot.

    Other arguments are those of matplotlib's `Figure.subplots`, such as sharex and sharey.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    new = Figure(figsize=(WIDTH, height), layout="constrained")
    FigureCanvasAgg(new)
    return new, list(new.subplots(rows, columns, squeeze=False, **subplots).flat)


@style()
def save(drawn: Any, path: str | os.PathLike[str]) -> None:
    """Write a figure to a file; its suffix (.png, .pdf, .svg) sets the format. Raises BadInput if that fails.

    The file holds neither date nor version, so that the same figure gives the same bytes.
    """
    nameless = {
        ".png": {"Software": None},
        ".svg": {"Date": None, "Creator": None},
        ".pdf": {"CreationDate": None, "Creator": None, "Producer": None},
    }
    try:
        drawn.savefig(path, metadata=nameless.get(os.path.splitext(path)[1].lower()))
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
    ax.text(0.02, 0.88, "database\nlookup", transform=ax.transAxes, color="0.4", va="top")
    ax.text(0.98, 0.27, "average pooling", transform=ax.transAxes, ha="right", color="0.4")
    ax.legend(loc="upper right")
    return ax


def attention_heatmap(
    ax: Any,  # matplotlib axes; None makes them
    weights: Any,  # a Pooled answer with weights, or numbers (q, n)
    queries: Sequence[str] | None = None,  # q labels
    records: Sequence[str] | None = None,  # n labels
    *,
    vmax: float | None = None,  # weight of the darkest shade; None is the largest weight
    colorbar: bool = True,
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
    image = ax.imshow(shares, cmap="Blues", vmin=0, vmax=vmax, aspect="auto", interpolation="nearest")
    ax.grid(visible=False)
    if colorbar:
        ax.figure.colorbar(image, ax=ax, label="weight")
    ax.set(xlabel="record", ylabel="query")
    if queries is not None:
        ax.set_yticks(range(len(queries)), queries)
    if records is not None:
        tilt: dict[str, Any] = {"rotation": 45, "ha": "right"} if max(map(len, records)) > 2 else {}
        ax.set_xticks(range(len(records)), records, **tilt)
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
        ax.bar(titles, shares[:, record], bottom=below, label=label, width=0.7, color=color, edgecolor="w")
        below += shares[:, record]
    ax.set(ylabel="weight", ylim=(0, 1))
    ax.grid(visible=False, axis="x")
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
