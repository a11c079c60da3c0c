"""Divide a pass into programs (kernel instances). Equal shapes, dtypes and devices give equal divisions."""

from __future__ import annotations

import enum
import functools
from typing import NamedTuple

import torch

from softdb.check import Metric
from softdb.device.passes import DevicePass

LEAST = 16  # least number of rows or columns of a matrix product on tensor cores
ACCUMULATED = 1 << 14  # largest number of float32 sums in a program: 64 KB of registers
STAGE = 32 << 10  # largest size in bytes of keys and values in a pipeline stage
ROWS = 1 << 14  # largest number of records in a range: longer sums in float32 lose digits
WAVES = 8  # number of programs for each processor, so that processors finish at about the same time
TILES = 4  # least number of tiles in a range, since a program has a fixed cost
PARTIAL = 1 << 26  # largest number of partial sums in float32: 256 MB


class Way(enum.Enum):
    """Kind of a pass: forward, or backward to the queries, or backward to keys and values."""

    FORWARD, TO_QUERIES, TO_RECORDS = range(3)


class Plan(NamedTuple):
    """Tile sizes of a program, and Triton's launch options: keyword arguments of the kernels."""

    BQ: int  # number of queries
    BN: int  # number of records
    BD: int  # columns of a key
    BV: int  # columns of a value, or classes
    BL: int  # columns of a key for l2 distances
    num_warps: int
    num_stages: int


def plan_of(inputs: DevicePass, way: Way = Way.FORWARD) -> Plan:
    """Choose the tile sizes for a pass."""
    q, d = inputs.queries.shape[1:]
    dtypes = {inputs.keys.dtype} if inputs.values is None or inputs.labels else {inputs.keys.dtype, inputs.values.dtype}
    narrow = torch.float32 not in dtypes and way is not Way.TO_RECORDS  # products on tensor cores
    parts = 0 if not narrow else 3 if torch.bfloat16 in dtypes else 2
    return _plan(min(q, 64), d, inputs.width, parts, inputs.metric is Metric.L2, way)


@functools.cache
def _plan(q: int, d: int, v: int, parts: int, by_distance: bool, way: Way) -> Plan:
    size, forward = 2 if parts else 4, way is Way.FORWARD
    if by_distance or way is Way.TO_RECORDS:
        queries = LEAST
    else:
        queries = min(_power(q), 64 if forward or (parts == 2 and max(d, v) <= 128) else 32)
    widest = 64 if way is Way.TO_RECORDS else 256 if forward and queries == LEAST else 128
    keys, values = min(_power(d), widest), min(_power(v), ACCUMULATED // queries if forward else widest)
    most = 64 if parts == 2 and not by_distance and (forward or queries == LEAST) else 32
    records = LEAST
    while records < most and 2 * records * (keys + values) * size <= (STAGE if forward or parts else STAGE // 2):
        records *= 2
    return Plan(queries, records, keys, values, LEAST, 8 if queries == 64 or queries * values > 8192 else 4, 2)


def _power(number: int) -> int:
    """Return the least power of two that is at least `number` and at least LEAST."""
    return max(LEAST, 1 << max(0, number - 1).bit_length())


def splits_of(n: int, programs: int, numbers: int, plan: Plan, device: torch.device) -> tuple[int, int]:
    """Return the number of ranges of the records, and the number of records in each.

    `programs` is the number of programs for one range; `numbers` is the number of partial sums for one range.
    """
    wanted = max(-(-WAVES * _processors(device) // max(1, programs)), -(-n // ROWS))
    rows = -(-n // max(1, min(wanted, PARTIAL // max(1, numbers))))
    rows = max(TILES, -(-rows // plan.BN)) * plan.BN
    return max(1, -(-n // rows)), rows


@functools.cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2
