"""Statistics of the values of indexed records, for estimates, and the records that are set apart.

An estimate may leave a record undrawn only if the record's weight and value are bounded. The error of its code bounds
the weight; the few records whose code has an extreme error are set apart (`softdb.index.quantizer`). The distance
‖v - v̄‖ of each value v from the mean of the values is measured in one pass when an index is built. Records with an
extreme distance would make every bound loose, so they are set apart, too: they are scored for every query. The mean
value of each list is also stored; it corrects estimates.
In an index file the statistics follow the engine's bytes: one NumPy array for each field of `FORM`, in this order.
After records were added to an index, the statistics are measured again when first needed.
"""

from __future__ import annotations

import io
import logging
import zlib
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from softdb.index.contract import Numbers, Reach, Rows, sampled
from softdb.index.quantizer import FACTOR, ORDINARY, SHARE, sums_of
from softdb.index.sketches import Sketches
from softdb.store import Snapshot

_log = logging.getLogger("softdb")

SAMPLED = 1 << 14  # number of values from which the mean is estimated
WITNESSES = 256  # number of records whose checksums must match before stored statistics are used
GATHERED = 1 << 20  # numbers copied at once: they stay in the L2 or L3 cache
MOST_CLASSES = 1024  # most classes whose shares in each list are stored

# dtype and axes of each field; axis l: the lists of the index
FORM = {
    "apart": ("i8", "m"), "scales": ("f4", "m"), "means": ("f4", "lv"), "centre": ("f8", "v"),
    "value_radius": ("f8", ""), "witnesses": ("i8", "w"), "checksums": ("u4", "w"),
}  # fmt: skip


def reach_of(index: Sketches, snapshot: Snapshot, num_classes: int | None) -> Reach:
    """Return the statistics stored with an index if they describe the snapshot's records; else measure them."""
    if index.reach is None or not _is_of(index.reach, snapshot):
        index.reach = _measured(index, snapshot, num_classes)
    return index.reach


def _is_of(reach: Reach, snapshot: Snapshot) -> bool:
    """Return True if the statistics describe these records, and not those of a database whose index file was copied."""
    positions = snapshot.positions(reach.witnesses)
    present = positions >= 0  # compaction removed the other witnesses
    if present.any() and np.array_equal(_checksums(snapshot, positions[present]), reach.checksums[present]):
        return True
    _log.warning("the statistics in the index file describe other records; softdb measures them again")
    return False


def _checksums(snapshot: Snapshot, positions: Rows) -> NDArray[np.uint32]:  # (w,) -> (w,)
    """Return a CRC-32 over key and value of each record."""
    columns = zip(snapshot.keys_at(positions).numpy(), snapshot.values_at(positions).numpy(), strict=True)
    return np.array([zlib.crc32(value.tobytes(), zlib.crc32(key.tobytes())) for key, value in columns], np.uint32)


def packed(reach: Reach) -> bytes:
    """Return the statistics as bytes for an index file."""
    file = io.BytesIO()
    for name, (dtype, _) in FORM.items():
        np.save(file, np.asarray(getattr(reach, name), f"<{dtype}"), allow_pickle=False)
    return file.getvalue()


def unpacked(data: bytes | memoryview, index: Sketches) -> Reach:
    """Read the statistics that `packed` wrote. Raises ValueError if they do not fit the index."""
    file, fields, sizes = io.BytesIO(data), dict[str, Any](), {"l": index.lists}
    for name, (dtype, axes) in FORM.items():
        try:
            array = np.load(file, allow_pickle=False)
        except (EOFError, MemoryError) as error:
            raise ValueError(f"the field {name} is incomplete") from error
        shape = tuple(sizes.setdefault(axis, size) for axis, size in zip(axes, array.shape, strict=False))
        if (array.dtype, array.shape, len(axes)) != (np.dtype(f"<{dtype}"), shape, array.ndim):
            raise ValueError(f"the field {name} has a dtype or shape that does not fit the index")
        if not np.isfinite(array).all():
            raise ValueError(f"the field {name} is not finite")
        fields[name] = array if axes else float(array)
    apart = fields["apart"]
    if file.read(1) or (apart < 0).any() or (apart >= index.covered).any() or (np.diff(apart) <= 0).any():
        raise ValueError("the statistics have trailing bytes, or name records that the index does not hold")
    return Reach(**fields)


def _measured(index: Sketches, snapshot: Snapshot, num_classes: int | None) -> Reach:
    """Measure the statistics in one pass over the values. Cost n v."""
    layout, lists = index.layout, index.lists
    order = np.argsort(layout.rows[layout.slots])  # values are read in the order in which they are stored
    rows, own = layout.rows[layout.slots][order].astype(np.int64), np.repeat(np.arange(lists), layout.sizes)[order]
    positions, centre = snapshot.positions(rows), _centre(snapshot)
    far = np.zeros(len(rows))
    width = num_classes if num_classes is not None and num_classes <= MOST_CLASSES else len(centre)
    sums, counts = np.zeros((lists, width), np.float32), np.zeros(lists)
    step = max(1, GATHERED // max(1, snapshot.segments[0].keys.shape[1], width))

    def add(which: Rows) -> None:
        for low in range(0, len(which), step):
            chosen = which[low : low + step]
            values, where = snapshot.values_at(positions[chosen]), own[chosen]
            counts[:] += np.bincount(where, minlength=lists)
            if len(centre):
                numbers = values.float()
                apart = numbers - torch.from_numpy(centre).float()
                far[chosen] = torch.linalg.vector_norm(apart, dim=1, dtype=torch.float64).numpy()
                sums[:] += sums_of(numbers.numpy(), where, lists)
            elif width:
                np.add.at(sums, (where, values.numpy()), 1)

    present = np.flatnonzero(positions >= 0)
    add(present)
    limit = _limit(far)
    some = sampled(snapshot.live, WITNESSES, 5)
    outside = np.flatnonzero(far > limit)
    extreme = np.zeros(lists, np.bool_)  # lists whose mean an extreme value would dominate: summed again without it
    extreme[own[outside]] = True
    counts[extreme], sums[extreme] = 0, 0
    add(present[extreme[own[present]] & (far[present] <= limit)])
    means = np.asarray(sums / np.maximum(counts, 1)[:, None], np.float32)
    scales = (np.maximum(far[outside], limit) / max(limit, 1e-300)).astype(np.float32)
    return Reach(rows[outside], scales, means, centre, limit, snapshot.rows(some), _checksums(snapshot, some))


def _centre(snapshot: Snapshot) -> Numbers:
    """Return the mean (v,) of a sample of the values; for labels an empty array."""
    values = snapshot.values_at(sampled(snapshot.live, SAMPLED, 4))
    return values.double().mean(0).numpy() if values.is_floating_point() else np.zeros(0)


def _limit(measure: Numbers) -> float:
    """Return the distance above which a distance is extreme: at most a share SHARE of them are."""
    if not len(measure):
        return 0.0
    ordinary, rare = np.quantile(measure, (ORDINARY, 1 - SHARE))
    return min(float(measure.max()), max(FACTOR * float(ordinary), float(rare)))
