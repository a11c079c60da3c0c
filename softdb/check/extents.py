"""Check arguments of searches and estimates: k or a radius, tolerance, excluded ids, diversity, generator."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict

import numpy as np

from softdb.check.ids import Id, identifiers
from softdb.check.plain import dense, integer, is_tensor, number, share, shown
from softdb.check.schemas import Metric
from softdb.errors import BadInput

if TYPE_CHECKING:
    from torch import Generator

__all__ = [
    "DEFAULT_K", "Extent", "Tolerance", "draws", "excluded", "extent", "generator", "least_score", "page", "tolerance",
]  # fmt: skip

DEFAULT_K = 10


def page(limit: int | None, offset: int) -> slice:
    """Return `limit` records after the first `offset` as a slice of all; None: all that follow. Raises BadInput."""
    first = integer(offset, "offset", 0)
    return slice(first, None if limit is None else first + integer(limit, "limit", 0))


class Extent(TypedDict):
    """Number and order of a search's hits, as keywords of a `Query`."""

    k: int
    least: float | None
    offset: int
    diversity: float
    fetch_k: int
    group_size: int


def extent(metric: Metric, k: object, radius: object, offset: object = 0, **others: object) -> Extent:
    """Check the arguments k, radius and offset of a search, and `others`. Raises BadInput if arguments contradict.

    `others`: diversity, fetch_k, group_by and group_size. Returns them as keywords of a `Query`.
    """
    skipped = integer(offset, "offset", 0)
    if radius is None:
        count = integer(DEFAULT_K if k is None else k, "k")
        diversity, fetch_k = _diversity(others.get("diversity"), others.get("fetch_k"), count, skipped)
        size = _group_size(others.get("group_by"), others.get("group_size"), others.get("diversity"))
        return Extent(k=count, least=None, offset=skipped, diversity=diversity, fetch_k=fetch_k, group_size=size)
    for name, value in {"k": k, "offset": skipped or None, **others}.items():
        if value is not None:
            raise BadInput(
                f"radius and {name} are both given ({shown(radius)}, {shown(value)}); a radius finds every record "
                f"that is near enough: give one of them"
            )
    return Extent(k=0, least=least_score(radius, metric), offset=0, diversity=0.0, fetch_k=0, group_size=1)


class Tolerance(NamedTuple):
    """Largest accepted error of an estimate: bar ≤ atol + rtol max(‖o‖, 0.1 rms‖v‖)."""

    rtol: float
    atol: float
    confidence: float  # share of the answers whose error must be within their bar
    most: int | None  # maximum number of draws for a query; None: up to all records


def tolerance(rtol: object, atol: object, confidence: object, max_draws: object, k: object) -> Tolerance | None:
    """Return a tolerance, or None if neither rtol nor atol is given; raise BadInput for bad values or a given k."""
    absolute = number(atol, "atol", "a number of at least 0", lambda x: x >= 0)
    if rtol is None and not absolute:
        if max_draws is not None:
            raise BadInput("max_draws bounds an estimate, but no tolerance is asked for; give rtol or atol, too")
        return None
    if k is not None:
        raise BadInput(
            f"k and a tolerance are both given (k {shown(k)}, rtol {shown(rtol)}, atol {shown(atol)}); k truncates, a "
            "tolerance estimates what truncation would miss: give one of them"
        )
    expected = "a number above 0 and below 1, or 0 with an atol above 0"
    relative = 0.0 if rtol is None else number(rtol, "rtol", expected, lambda x: 0 <= x < 1)
    if relative == absolute == 0:
        raise BadInput(f"rtol is {relative}; expected {expected}")
    expected = "a number between 0 and 1, such as 0.95"
    level = number(confidence, "confidence", expected, lambda x: 0 < x < 1)
    most = None if max_draws is None else integer(max_draws, "max_draws")
    return Tolerance(relative, absolute, level, most)


def excluded(value: object, queries: int) -> list[list[Id]]:
    """Return lists of ids to exclude: one for all queries, or one for each query; no list for None."""
    if value is None:
        return []
    if isinstance(value, np.ndarray):
        value = value.tolist()
    elif is_tensor(value):
        value = dense(value, "exclude_ids").tolist()
    collections = (list, tuple, set, frozenset)
    items: list[Any] = list(value) if isinstance(value, collections) else [value]
    nested = [isinstance(item, (*collections, np.ndarray)) or is_tensor(item) for item in items]
    if not any(nested):
        return [identifiers(value, unique=False)]
    if not all(nested):
        raise BadInput("exclude_ids mix ids and lists of ids; give one list of ids, or one list for each query")
    if len(items) != queries:
        raise BadInput(
            f"exclude_ids are {len(items)} lists for {queries} queries; give one list for each, or one list of ids"
        )
    return [identifiers(item, unique=False) for item in items]


def draws(rtol: object, atol: object, max_draws: object, k: object) -> Tolerance | None:
    """Return a tolerance as `tolerance` does; for max_draws alone, a tolerance that is never met."""
    if max_draws is None or rtol is not None or atol != 0.0:
        return tolerance(rtol, atol, 0.95, max_draws, k)
    if k is not None:
        raise BadInput(f"k is {shown(k)} and max_draws {shown(max_draws)}; k truncates, draws do not; give one of them")
    return Tolerance(0.0, 0.0, 0.95, integer(max_draws, "max_draws"))


def generator(value: object) -> Generator | None:
    """Return a torch.Generator or None; raise BadInput for anything else."""
    import torch

    if value is None or isinstance(value, torch.Generator):
        return value
    raise BadInput(f"generator is {shown(value)}; expected a torch.Generator, such as torch.Generator().manual_seed(3)")


def least_score(radius: object, metric: Metric) -> float:
    """Return the least score within a radius: -r² for a distance r, else the radius itself."""
    expected, fits = {
        Metric.L2: ("a distance of at least 0", lambda x: x >= 0),
        Metric.COSINE: ("a similarity from -1 to 1", lambda x: abs(x) <= 1),
        Metric.DOT: ("the least score, a finite number", math.isfinite),
    }[metric]
    bound = number(radius, "radius", f"{expected}, for the metric {metric.value!r}", fits)
    if metric is not Metric.L2:
        return bound
    if not math.isfinite(bound * bound):
        raise BadInput(f"radius is {bound}, whose square is not finite; expected {expected}, of at most 1e154")
    return -bound * bound


def _diversity(value: object, fetch_k: object, k: int, offset: int) -> tuple[float, int]:
    """Return the diversity (None: 0), and the number of records from which the hits are chosen."""
    if value is None:
        if fetch_k is not None:
            raise BadInput(f"fetch_k is {shown(fetch_k)} without diversity; give both, or leave fetch_k out")
        return 0.0, offset + k
    count = 4 * (offset + k) if fetch_k is None else integer(fetch_k, "fetch_k")
    if count < offset + k:
        after = f" and offset {offset}" if offset else ""
        raise BadInput(f"fetch_k is {count} but k is {shown(k)}{after}; expected a fetch_k of at least k + offset")
    return share(value, "diversity"), count


def _group_size(field: object, size: object, diversity: object) -> int:
    """Return the number of hits for each group; 1 if group_by is not given."""
    if field is None:
        if size is not None:
            raise BadInput(f"group_size is {shown(size)} without group_by; give both, or leave group_size out")
        return 1
    if not isinstance(field, str):
        raise BadInput(f'group_by is {shown(field)}; expected the name of a field of the payload, such as "doc"')
    if diversity is not None:
        raise BadInput(f"group_by and diversity are both given ({shown(field)}, {shown(diversity)}); give one of them")
    return integer(1 if size is None else size, "group_size")
