"""Statistics of the cells of error_bars.py, the rules that they break, and the table for the docs."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import stats

__all__ = ["cell_of", "failures", "line", "shown", "summary", "table"]

Array = NDArray[Any]
Cell = dict[str, Any]
LEVEL = 1e-4  # significance level of the test that coverage is below the confidence
BARS = 3  # a met answer whose error exceeds this many bars is wrong
BEYOND_CELL, BEYOND_ALL = 3, 1 / 2000  # wrong answers allowed in a cell, and as a share of all cells' answers
WIDEST = 3  # largest median bar, as a multiple of the error's 95 % quantile
INFINITE = 0.05  # largest share of infinite bars outside the bad worlds
ENOUGH = {0.95: 2000}  # estimated answers that a cell should have, by confidence; 20,000 at any other
RULES = {
    "exception": "no exception",
    "coverage": f"coverage not below `confidence` (one-sided binomial test at {LEVEL:g})",
    "query": f"the same for each query (at {LEVEL:g}, over the number of queries)",
    "beyond": f"met and beyond {BARS} bars: at most {BEYOND_CELL} in a cell",
    "wide": f"median bar at most {WIDEST} × the error's 95 % quantile",
    "infinite": f"bar = inf in at most {INFINITE:.0%}, outside the bad worlds",
}


def cell_of(columns: Array, rounding: Array, confidence: float, small: bool) -> Cell:
    """Return the statistics of columns (draws, q, 5): error, bar, met, exact, records pooled; rounding is (q,)."""
    error, bar, met, exact, pooled = np.moveaxis(columns, 2, 0)
    answered = ~np.isnan(error)
    estimated = answered & (exact == 0)
    judged = estimated & np.isfinite(bar)
    strictly = judged & (error <= bar)
    inside = judged & (error <= bar + rounding)
    return {
        "answers": int(answered.sum()),
        "estimated": int(estimated.sum()),
        "estimated_share": _share(estimated, answered),
        "infinite_share": _share(estimated & np.isinf(bar), estimated),
        "judged": int(judged.sum()),
        "inside": _share(inside, judged),
        "inside_strictly": _share(strictly, judged),
        "p": _p(int(inside.sum()), int(judged.sum()), confidence),
        **_worst(inside.sum(0), judged.sum(0), confidence),
        "met_share": _share(judged & (met == 1), estimated),
        "met": int((judged & (met == 1)).sum()),
        "met_beyond_bars": int((judged & (met == 1) & (error > BARS * bar + rounding)).sum()),
        **_width(error, bar, np.broadcast_to(rounding, error.shape), judged, small),
        "records_pooled": shown(float(pooled[estimated].mean())) if estimated.any() else None,
    }


def _share(mask: Array, total: Array) -> float | None:
    return round(float(mask.sum() / total.sum()), 5) if total.any() else None


def _p(inside: int, total: int, confidence: float) -> float | None:
    """Return the p-value of `inside` or fewer of `total`, if each is inside with probability `confidence`."""
    return shown(float(stats.binom.cdf(inside, total, confidence))) if total else None


def _worst(inside: Array, judged: Array, confidence: float) -> Cell:
    """Return coverage and p-value of the query with the smallest p-value; inside and judged are (q,)."""
    if not judged.any():
        return {"worst_query": None, "worst_query_p": None, "queries_judged": 0}
    chances = np.where(judged > 0, stats.binom.cdf(inside, judged, confidence), 2.0)
    worst = int(chances.argmin())
    return {
        "worst_query": round(float(inside[worst] / judged[worst]), 4),
        "worst_query_p": shown(float(chances[worst])),
        "queries_judged": int((judged > 0).sum()),
    }


def _width(error: Array, bar: Array, rounding: Array, judged: Array, small: bool) -> Cell:
    """Return the median bar over the error's 95 % quantile; None if the errors are 0 or rounding alone."""
    if not judged.any():
        return {"bar": None, "error_95": None, "bar_over_error": None, "rounding_only": False}
    middle, high = float(np.median(bar[judged])), float(np.quantile(error[judged], 0.95))
    rounding_only = high == 0 or (small and high <= float(np.median(rounding[judged])))
    ratio = None if rounding_only or not math.isfinite(high) else shown(middle / high)
    return {"bar": shown(middle), "error_95": shown(high), "bar_over_error": ratio, "rounding_only": rounding_only}


def shown(number: float | None) -> float | None:
    """Round to four digits; return None for infinity, which JSON does not have."""
    return None if number is None or not math.isfinite(number) else float(f"{number:.4g}")


# -- verdicts ----------------------------------------------------------------------------------------------------------


def failures(cell: Cell) -> list[str]:
    """Return the names of the rules that a cell breaks."""
    broken = {
        "exception": bool(cell["exceptions"]),
        "coverage": cell["p"] is not None and cell["p"] < LEVEL,
        "query": cell["worst_query_p"] is not None and cell["worst_query_p"] * cell["queries_judged"] < LEVEL,
        "beyond": cell["met_beyond_bars"] > BEYOND_CELL,
        "wide": (cell["bar_over_error"] or 0) > WIDEST,
        "infinite": not cell["bad"] and (cell["infinite_share"] or 0) > INFINITE,
    }
    return [rule for rule, is_broken in broken.items() if is_broken]


def line(cell: Cell) -> str:
    """Format a cell as one line."""
    parts = [
        f"{cell['world']} n={cell['n']:,} {cell['verb']} {cell['temperature']} {cell['mode']} {cell['confidence']:g}:",
        f"estimated {_text(cell['estimated_share'])} of {cell['answers']},",
        f"inside {_text(cell['inside'])} (p {_text(cell['p'])}, worst query {_text(cell['worst_query'])}),",
        f"met {_text(cell['met_share'])}, beyond {BARS} bars {cell['met_beyond_bars']},",
        f"bar/error {'rounding' if cell['rounding_only'] else _text(cell['bar_over_error'])},",
        f"inf {_text(cell['infinite_share'])}, pooled {_text(cell['records_pooled'])},",
        f"{_text(cell['ms_a_query'])} ms",
        *(f"{times} × {text[:100]}" for text, times in cell["exceptions"].items()),
    ]
    broken = failures(cell)
    return " ".join(parts) + (f"  FAILS {', '.join(broken)}" if broken else "")


def summary(cells: Sequence[Cell]) -> list[str]:
    """Return a line for each rule, with the cells that fail it."""
    lines = [f"{len(cells)} cells, {sum(_few(cell) for cell in cells)} of them with fewer estimates than a test wants"]
    for rule, text in RULES.items():
        failing = [_name(cell) for cell in cells if rule in failures(cell)]
        lines.append(f"{len(failing)} fail: {text}" + "".join(f"\n    {name}" for name in failing))
    beyond, met = (sum(cell[column] for cell in cells) for column in ("met_beyond_bars", "met"))
    verdict = "holds" if beyond <= BEYOND_ALL * met else "fails"
    lines.append(
        f"{verdict}: met and beyond {BARS} bars, {beyond} of {met} met answers; at most 1 in 2,000 are allowed"
    )
    return lines


def _few(cell: Cell) -> bool:
    return bool(0 < cell["judged"] < ENOUGH.get(cell["confidence"], 20_000))


def _name(cell: Cell) -> str:
    figures = f"inside {_text(cell['inside'])}, worst query {_text(cell['worst_query'])}"
    more = f"beyond {cell['met_beyond_bars']}, bar/error {_text(cell['bar_over_error'])}"
    place = f"{cell['world']} {cell['n']:,} {cell['verb']} {cell['temperature']} {cell['mode']} {cell['confidence']:g}"
    return f"{place}: {figures}, {more}, inf {_text(cell['infinite_share'])}"


def _text(number: float | None) -> str:
    return "–" if number is None else f"{number:.4g}"


# -- the table ---------------------------------------------------------------------------------------------------------

HEADER = (
    "| world | records | verb | mode | confidence | estimated | inside, all | least, at T | worst query | met "
    "| met, beyond 3 bars | bar / error | bar = inf | pooled | ms | fails |"
)


def table(paths: Sequence[Path]) -> str:
    """Format results as Markdown: a row for each world, size, verb, mode and confidence, over all temperatures."""
    cells = [cell for path in paths for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]]
    groups: dict[tuple[Any, ...], list[Cell]] = {}
    for cell in cells:
        place = tuple(cell[column] for column in ("world", "n", "verb", "mode", "confidence"))
        groups.setdefault(place, []).append(cell)
    rows = [HEADER, "|" + "---|" * HEADER.count(" |")]
    rows += [_row(place, group) for place, group in groups.items()]
    return "\n".join([*rows, "", *(f"- {text}" for text in summary(cells))])


def _row(place: tuple[Any, ...], cells: list[Cell]) -> str:
    name, n, *rest = place
    judged = [cell for cell in cells if cell["judged"]]
    least = min(judged, key=lambda cell: float(cell["inside"]), default=None)
    widest = max((cell["bar_over_error"] for cell in judged if cell["bar_over_error"] is not None), default=None)
    broken = [f"{rule} ({sum(rule in failures(cell) for cell in cells)})" for rule in RULES if _any(rule, cells)]
    answers, estimated = (sum(cell[column] for cell in cells) for column in ("answers", "estimated"))
    columns = [
        name + (" (bad)" if cells[0]["bad"] else ""),
        f"{n:,}",
        *map(str, rest),
        _text(estimated / answers if answers else None),
        _text(_mean(judged, "inside", "judged")),
        "–" if least is None else f"{_text(least['inside'])}, {least['temperature']}",
        _text(min((cell["worst_query"] for cell in judged), default=None)),
        _text(_mean(cells, "met_share", "estimated")),
        str(sum(cell["met_beyond_bars"] for cell in cells)),
        _text(widest),
        _text(_mean(cells, "infinite_share", "estimated")),
        _text(_mean(cells, "records_pooled", "estimated")),
        _text(float(np.median([cell["ms_a_query"] or 0 for cell in cells]))),
        ", ".join(broken),
    ]
    return "| " + " | ".join(columns) + " |"


def _any(rule: str, cells: list[Cell]) -> bool:
    return any(rule in failures(cell) for cell in cells)


def _mean(cells: list[Cell], column: str, weight: str) -> float | None:
    """Return the mean of a column, weighted by another column."""
    pairs = [(cell[column], cell[weight]) for cell in cells if cell[column] is not None and cell[weight]]
    return sum(a * b for a, b in pairs) / sum(b for _, b in pairs) if pairs else None
