"""Short texts for answers, bounded in size."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import islice
from typing import Any

from torch import Tensor

__all__ = ["LINES", "SHOWN", "json_cell", "listed", "numbers", "part_of", "shape"]

SHOWN = 3  # maximum number of queries, hits or records in a repr
LINES = 20  # maximum number of lines in a table


def listed(texts: Iterator[str], count: int) -> str:
    """Return the first SHOWN of `count` texts, separated by commas, and an ellipsis if `count` is larger."""
    return ", ".join([*islice(texts, SHOWN), *(["…"] if count > SHOWN else [])])


def part_of(count: int, total: int) -> str:
    """Return "count of total", or only the total if both are equal."""
    return f"{total:,}" if count == total else f"{count:,} of {total:,}"


def numbers(tensor: Tensor | None) -> str:
    """Return as text a number, or the first SHOWN numbers of a vector; "" for None."""
    if tensor is None or not tensor.ndim:
        return "" if tensor is None else f"{tensor.item():.6g}"
    return f"[{listed((f'{x:.4g}' for x in tensor[: SHOWN + 1].tolist()), len(tensor))}]"


def json_cell(payload: Any) -> str:
    """Return a payload as compact JSON; "" for None."""
    return "" if payload is None else json.dumps(payload, ensure_ascii=False, separators=(",", ":"))


def shape(tensor: Tensor) -> str:
    """Return the shape and dtype of a tensor as text."""
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
