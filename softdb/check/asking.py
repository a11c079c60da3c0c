"""Arguments of searches and estimates: k or a radius, tolerance, excluded ids, diversity, generator."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from softdb.check.ids import Id, identifiers
from softdb.check.plain import dense, integer, is_tensor, shown
from softdb.check.schemas import Metric
from softdb.errors import BadInput

if TYPE_CHECKING:
    from torch import Generator

__all__ = ["Asked", "Tolerance", "asked", "excluded", "generator", "share", "tolerance"]

DEFAULT_K = 10


class Asked(NamedTuple):
    """What a search shall find."""

    k: int
    least: float | None  # the least score; then k does not count
    diversity: float
    fetch_k: int  # among which the k are chosen


def asked(k: object, radius: object, diversity: object, fetch_k: object, metric: Metric) -> Asked:
    """k, a radius, or k diverse ones among more; BadInput where they contradict each other."""
    if radius is None:
        number = integer(DEFAULT_K if k is None else k, "k")
        return Asked(number, None, *_diversity(diversity, fetch_k, number))
    for name, value in (("k", k), ("diversity", diversity), ("fetch_k", fetch_k)):
        if value is not None:
            raise BadInput(
                f"radius and {name} are both given ({shown(radius)}, {shown(value)}); a radius finds every record "
                f"that is near enough: give one of them"
            )
    return Asked(0, _least_score(radius, metric), 0.0, 0)


class Tolerance(NamedTuple):
    """What error of a soft query is small enough: bar ≤ atol + rtol max(‖o‖, 0.1 rms‖v‖)."""

    rtol: float
    atol: float
    confidence: float  # the share of answers whose error shall be within their bar
    most: int | None  # records pooled for it at most; None: every record, where it takes that


def tolerance(rtol: object, atol: object, confidence: object, max_draws: object, k: object) -> Tolerance | None:
    """A tolerance, None where none is asked for; BadInput where it makes no sense or k is given, too."""
    if rtol is None and atol == 0 and not isinstance(atol, bool):
        if max_draws is not None:
            raise BadInput("max_draws bounds an estimate, but no tolerance is asked for; give rtol or atol, too")
        return None
    if k is not None:
        raise BadInput(
            f"k and a tolerance are both given (k {shown(k)}, rtol {shown(rtol)}, atol {shown(atol)}); k truncates, a "
            "tolerance estimates what truncation would miss: give one of them"
        )
    relative = 0.0 if rtol is None else _number(rtol, "rtol", "a number above 0 and below 1, such as 0.05")
    absolute = _number(atol, "atol", "a number of at least 0")
    if not 0 <= relative < 1 or (relative == 0 and absolute == 0):
        raise BadInput(f"rtol is {relative}; expected a number above 0 and below 1, or 0 with an atol above 0")
    if absolute < 0:
        raise BadInput(f"atol is {absolute}; expected a number of at least 0")
    sure = _number(confidence, "confidence", "a number between 0 and 1, such as 0.95")
    if not 0 < sure < 1:
        raise BadInput(f"confidence is {sure}; expected a number between 0 and 1, such as 0.95")
    most = None if max_draws is None else integer(max_draws, "max_draws")
    return Tolerance(relative, absolute, sure, most)


def excluded(value: object, queries: int) -> list[list[Id]]:
    """Ids to leave out: one list for all queries, or one for each of several; empty where none are."""
    if value is None:
        return []
    if isinstance(value, np.ndarray):
        value = value.tolist()
    elif is_tensor(value):
        value = dense(value, "exclude_ids").tolist()
    if not isinstance(value, list | tuple | set | frozenset):
        return [identifiers(value, unique=False)]
    nested = [isinstance(one, list | tuple | set | frozenset | np.ndarray) or is_tensor(one) for one in value]
    if not any(nested):
        return [identifiers(value, unique=False)]
    if not all(nested):
        raise BadInput("exclude_ids mix ids and lists of ids; give one list of ids, or one list for each query")
    if len(value) != queries:
        raise BadInput(
            f"exclude_ids are {len(value)} lists for {queries} queries; give one list for each, or one list of ids"
        )
    lists: list[Any] = list(value)
    return [identifiers(one, unique=False) for one in lists]


def generator(value: object) -> Generator | None:
    """torch's random numbers, or None."""
    import torch

    if value is None or isinstance(value, torch.Generator):
        return value
    raise BadInput(f"generator is {shown(value)}; expected a torch.Generator, such as torch.Generator().manual_seed(3)")


def share(value: object, name: str) -> float:
    """A number from 0 to 1."""
    number = _number(value, name, "a number from 0 to 1")
    if not 0 <= number <= 1:
        raise BadInput(f"{name} is {shown(value)}; expected a number from 0 to 1")
    return number


def _least_score(radius: object, metric: Metric) -> float:
    """The least score that a radius asks for: -r² for a distance r, else the radius itself."""
    expected = {
        Metric.L2: "a distance of at least 0",
        Metric.COSINE: "a similarity from -1 to 1",
        Metric.DOT: "the least score, a finite number",
    }[metric]
    number = _number(radius, "radius", expected)
    if (metric is Metric.L2 and number < 0) or (metric is Metric.COSINE and abs(number) > 1):
        raise BadInput(f"radius is {shown(radius)}; expected {expected}, for the metric {metric.value!r}")
    if metric is not Metric.L2:
        return number
    if not math.isfinite(number * number):
        raise BadInput(f"radius is {number}, whose square is not finite; expected {expected}, of at most 1e154")
    return -number * number


def _diversity(value: object, fetch_k: object, k: int) -> tuple[float, int]:
    """Diversity, 0 where none is asked for, and among how many the k are chosen."""
    if value is None:
        if fetch_k is not None:
            raise BadInput(f"fetch_k is {shown(fetch_k)} without diversity; give both, or leave fetch_k out")
        return 0.0, k
    number = share(value, "diversity")
    if fetch_k is None:
        return number, 4 * k
    count = integer(fetch_k, "fetch_k")
    if count < k:
        raise BadInput(f"fetch_k is {count} but k is {k}; choose the k among at least as many")
    return number, count


def _number(value: object, name: str, expected: str) -> float:
    if is_tensor(value) and value.requires_grad:
        raise BadInput(f"{name} is a tensor that wants a gradient, but it only selects records; pass a plain number")
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, RuntimeError, OverflowError):
        raise BadInput(f"{name} is {shown(value)}; expected {expected}") from None
    if isinstance(value, bool | str) or not math.isfinite(number):
        raise BadInput(f"{name} is {shown(value)}; expected {expected}")
    return number
