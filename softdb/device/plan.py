"""Division of a pass into programs, determined by shapes, dtypes and the number of processors, so that it repeats."""

from __future__ import annotations

import enum
import functools
from typing import NamedTuple

import torch

from softdb.check import Metric
from softdb.device.passes import DevicePass

LEAST = 16  # least side of a product on tensor cores
ACCUMULATED = 1 << 14  # float32 sums that a program holds: 64 KB of registers
STAGE = 32 << 10  # bytes of keys and values in a pipeline stage
ROWS = 1 << 14  # most records of a range: longer sums in float32 lose digits
WAVES = 8  # programs for each processor, so that processors finish at about the same time
TILES = 4  # least tiles of a range, which share the program's fixed cost
PARTIAL = 1 << 26  # most numbers of partial sums: 256 MB


class Way(enum.Enum):
    """Kind of a pass."""

    FORWARD, TO_QUERIES, TO_RECORDS = range(3)


class Plan(NamedTuple):
    """Sizes of a program's tiles."""

    BQ: int  # queries
    BN: int  # records
    BD: int  # numbers of a key
    BV: int  # numbers of a value, or classes
    BL: int  # numbers of a key for distances
    warps: int
    stages: int

    @property
    def options(self) -> dict[str, int]:
        """Keyword arguments of the kernels."""
        tiles = {name: getattr(self, name) for name in ("BQ", "BN", "BD", "BV", "BL")}
        return tiles | {"num_warps": self.warps, "num_stages": self.stages}


def plan_of(inputs: DevicePass, way: Way = Way.FORWARD) -> Plan:
    """Return the tile sizes of a pass."""
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
    """Return the least power of two that is not smaller than `number`, at least LEAST."""
    return max(LEAST, 1 << max(0, number - 1).bit_length())


def splits_of(n: int, programs: int, numbers: int, plan: Plan, device: torch.device) -> tuple[int, int]:
    """Return the number of ranges of the records, and the number of records in each.

    `programs` is the number of programs of a range, `numbers` the number of its partial sums.
    """
    wanted = max(-(-WAVES * _processors(device) // max(1, programs)), -(-n // ROWS))
    rows = -(-n // max(1, min(wanted, PARTIAL // max(1, numbers))))
    rows = max(TILES, -(-rows // plan.BN)) * plan.BN
    return max(1, -(-n // rows)), rows


@functools.cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2
