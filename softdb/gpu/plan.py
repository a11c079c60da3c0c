"""How a pass is cut into programs: by its shape, its dtypes and the device's processors alone, so that it repeats."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from softdb.check import Metric
from softdb.gpu.asked import DevicePass

__all__ = ["Plan", "plan_of", "splits_of"]

LEAST = 16  # of each side of a product on tensor cores
ACCUMULATED = 1 << 14  # float32 sums a program holds: 64 KB of registers
STAGE = 32 << 10  # bytes of keys or values in flight: 99 KB of shared memory hold all, where compiled binaries say so
ROWS = 1 << 14  # records of a range at most: longer sums in float32 lose digits
WAVES = 4  # programs a processor, so that the last to end waits for little
PARTIAL = 1 << 26  # numbers of partial sums at most: 256 MB


class Plan(NamedTuple):
    """Sizes of a program's tiles."""

    BQ: int  # queries
    BN: int  # records
    BD: int  # numbers of a key at once
    BV: int  # numbers of a value, or classes, of a program
    BL: int  # numbers compared at once for distances
    warps: int
    stages: int

    @property
    def blocks(self) -> dict[str, int]:
        """As the kernels take them."""
        return {name: getattr(self, name) for name in ("BQ", "BN", "BD", "BV", "BL")}


def plan_of(what: DevicePass) -> Plan:
    """The sizes for a pass over columns of d and v numbers."""
    q, d = what.queries.shape[1:]
    size = max(what.keys.element_size(), 0 if what.values is None or what.labels else what.values.element_size())
    return _plan(min(q, 64), d, what.width, size, what.metric)


@functools.cache
def _plan(q: int, d: int, v: int, size: int, metric: Metric) -> Plan:
    queries = max(LEAST, _power(q))
    if metric is Metric.L2:
        queries = LEAST
    keys = min(_power(d), 256 if queries == LEAST else 128)
    values = min(_power(v), ACCUMULATED // queries)
    most = 64 if size == 2 else 32
    if metric is Metric.L2:
        most = 32
    records = max(LEAST, min(most, STAGE // (size * max(keys, values)) // LEAST * LEAST))
    records = 1 << (records.bit_length() - 1)
    stage = records * (keys + values) * size
    return Plan(
        queries, records, max(LEAST, keys), max(LEAST, values), LEAST,
        warps=8 if queries * values > 8192 or queries == 64 else 4,
        stages=3 if stage <= 24 << 10 else 2 if stage <= 48 << 10 else 1,
    )  # fmt: skip


def _power(number: int) -> int:
    """The least power of two that is no smaller."""
    return max(LEAST, 1 << max(0, number - 1).bit_length())


def splits_of(n: int, programs: int, numbers: int, plan: Plan, device: torch.device) -> tuple[int, int]:
    """Into how many ranges the records fall, and how many records each has.

    `programs`: how many a range takes, `numbers`: how many partial sums.
    """
    wanted = -(-WAVES * _processors(device) // programs)
    few = min(-(-n // ROWS), PARTIAL // max(1, numbers))
    rows = -(-n // max(1, wanted, few))
    rows = max(1, -(-rows // plan.BN)) * plan.BN
    return max(1, -(-n // rows)), rows


@functools.cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2
