"""What the compiled loops read and write: columns, the records visited, the queries, and memory in the cache."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from softdb.compiled.decorators import compiled, inlined
from softdb.compiled.tile import LANES, widen, widen_vector

__all__ = ["BLOCK", "COPIED", "HALVES", "WIDE", "Column", "Part", "Scratch", "Task", "lanes_of", "load", "row_of"]

BLOCK = 256  # records whose keys and values stay in the cache while every group of queries passes over them
WIDE, COPIED, HALVES = 0, 1, 2  # where a block lies: in the column as float32, in scratch, in the column as float16

_ZERO, _LOWEST = np.float32(0), np.finfo(np.float32).min


class Column(NamedTuple):
    """A column of the records: float32 in `wide`, or float16 as uint16 in `halves`; the other one is empty."""

    wide: Any  # (n · width,) float32
    halves: Any  # (n · width,) uint16
    width: int
    pitch: int  # of its rows in scratch: the width rounded up to whole vectors


class Part(NamedTuple):
    """Which records of the columns are visited."""

    rows: Any  # (high,) int64 where each is; empty: a record's number is its place
    places: Any  # (high,) int64 the mask's column of each; empty: no mask
    mask: Any  # (q, …) bool, True = takes part
    low: int
    high: int


class Task(NamedTuple):
    """What the queries ask, in groups."""

    queries: Any  # (groups, d, group), or (group, pitch) where few; float32, flat, seen from the centre
    cosine: bool  # whether to divide by ‖k‖
    difference: bool  # minus squared distances, else products
    inverse_temperature: Any  # float32
    negligible: Any  # float32: logits so far below the top add nothing
    top: Any  # (groups · group,) float32, the largest score so far
    centre: Any  # (d,) float32 that keys are seen from, or empty
    nowhere: Any  # (0,) float32


class Scratch(NamedTuple):
    """Memory that stays in the cache; all float32 and flat."""

    keys: Any  # (BLOCK, pitch)
    values: Any  # (BLOCK, pitch)
    scores: Any  # (BLOCK, group)
    grads: Any  # (BLOCK, group)
    rows: Any  # (BLOCK, the wider pitch)
    sums: Any  # (group, the wider pitch)
    inverse: Any  # (BLOCK,)
    best: Any  # (group,), or (LANES,) for one query
    doubt: Any  # as best: NaN where a score is not finite


@inlined
def lanes_of(scratch: Any, size: Any, count: Any) -> Any:
    """How (count, size) scores of a block are looped over: their rows, and numbers a row.

    One query's scores are laid out as rows of whole vectors; what fills the last row weighs nothing.
    """
    if size > 1:
        return count, size
    rows = (count + LANES - 1) // LANES
    for i in range(count, rows * LANES):
        scratch.scores[i] = _LOWEST
    return rows, LANES


@inlined
def row_of(part: Any, i: Any) -> Any:
    """The record that is visited as the i-th."""
    return part.rows[i] if part.rows.size else i


@compiled
def load(
    column: Any, part: Any, first: Any, count: Any, centre: Any, scratch: Any, whole_vectors: Any, halves_serve: Any
) -> Any:
    """A block: where it lies, where it starts there, and how far apart its rows are.

    In place if its records lie side by side, as float32 (or halves serve), in rows of whole vectors if that is needed.
    """
    begin, end = row_of(part, first), row_of(part, first + count - 1)
    side_by_side = end - begin == count - 1 and not centre.size
    if side_by_side and (not whole_vectors or column.width == column.pitch):
        if not column.halves.size:
            return WIDE, begin * column.width, column.width
        if halves_serve:
            return HALVES, begin * column.width, column.width
    if side_by_side and column.width % LANES == 0:  # and halves: one run of whole vectors
        for x in range(0, count * column.width, LANES):
            widen_vector(column.halves, begin * column.width + x, scratch, x)
        return COPIED, 0, column.pitch
    for i in range(count):
        _copy(column, row_of(part, first + i) * column.width, centre, scratch, i * column.pitch)
    return COPIED, 0, column.pitch


@compiled
def _copy(column: Any, start: Any, centre: Any, scratch: Any, to: Any) -> None:
    """One row as float32, seen from a centre, padded with zeros."""
    if column.halves.size:
        whole = column.width // LANES * LANES
        for x in range(0, whole, LANES):
            widen_vector(column.halves, start + x, scratch, to + x)
        for x in range(whole, column.width):
            scratch[to + x] = widen(column.halves[start + x])
    else:
        for x in range(column.width):
            scratch[to + x] = column.wide[start + x]
    for x in range(len(centre)):
        scratch[to + x] -= centre[x]
    for x in range(column.width, column.pitch):
        scratch[to + x] = _ZERO
