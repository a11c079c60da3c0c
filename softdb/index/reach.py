"""Reach of records beyond what the index knows of them: code errors, radii of the lists, and the records apart.

An estimate may leave a record undrawn only where something bounds its weight. What bounds it is measured once, in two
passes over the keys: the error ‖k - k̂‖ of each code, the distance ‖k - m‖ of each key from the mean of its list, the
distance ‖v - v̄‖ of each value from the mean. The few records in which one of them is extreme would make every bound
loose: they are set apart, and scored exactly for every query. It is measured when an index is built, and stands behind
FAISS' bytes in the index file: arrays in NumPy's own format, one after the other, in the order of `FORM`. Of an index
that has grown since, it is measured when it is first needed.
"""

from __future__ import annotations

import io
import logging
import zlib
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from softdb.check import Metric
from softdb.index.contract import Floats, Live, Numbers, Reach, Rows, prepared, sampled
from softdb.index.ivf import IVF
from softdb.index.lists import Lists
from softdb.index.quantizer import nearest_centroids
from softdb.kernels import native
from softdb.store import Snapshot

_log = logging.getLogger("softdb")

SHARE = 0.0002  # of the records that may be set apart for the error of the code, the radius, the value
LONG = 0.01  # likewise for its length, where scores are products: a long key may carry most of the weight
ORDINARY, FACTOR = 0.9, 1.5  # no farther than so many times what this share of the records stays below
SAMPLED = 1 << 14  # values that their mean is taken from, and keys that the shape of the lists is
WITNESSES = 256  # records that are looked at again before what was kept is used
GATHERED = 1 << 22  # numbers copied at once
PARTS, FINER = 16, 16  # of the errors that are told apart, and how often the last of these is halved


# type and axes of each field; d, l, p: the index' width, lists and parts of a code; `is_apart` follows
FORM = {
    "apart": ("i8", "m"), "scales": ("f8", "m"), "mean_error": ("f8", ""), "errors": ("f8", "e"),
    "log_shares": ("f8", "e"), "means": ("f4", "ld"), "radii": ("f8", "l"), "mean_radii": ("f8", "l"),
    "extents": ("f4", "ld"), "part_errors": ("f8", "p"), "centre": ("f8", "v"), "value_radius": ("f8", ""),
    "root": ("f4", "dd"), "spread": ("f8", ""), "witnesses": ("i8", "w"), "checksums": ("u4", "w"),
}  # fmt: skip


class _Measures(NamedTuple):
    """Of each record in the order of the lists; NaN where it is gone, or where it does not matter."""

    errors: Numbers
    radii: Numbers
    values: Numbers
    lengths: Numbers


_SHARES = SHARE, SHARE, SHARE, LONG  # of each measure


def reach_of(index: Lists | IVF, snapshot: Snapshot) -> Reach:
    """As it was kept with an IVF index of these records, or measured now, and kept."""
    if index.reach is None or not _is_of(index.reach, snapshot):
        index.reach = _measured(index, snapshot)
    return index.reach


def _is_of(reach: Reach, snapshot: Snapshot) -> bool:
    """True if it was measured of these records: a signed index file of another database may stand in this one's."""
    positions = snapshot.positions(reach.witnesses)
    there = positions >= 0  # the others were compacted away
    if there.any() and np.array_equal(_checksums(snapshot, positions[there]), reach.checksums[there]):
        return True
    _log.warning("what the index file tells of the records is not of these; it is measured anew")
    return False


def _checksums(snapshot: Snapshot, positions: Rows) -> NDArray[np.uint32]:  # (w,) -> (w,)
    """Of keys and values."""
    columns = zip(snapshot.keys_at(positions).numpy(), snapshot.values_at(positions).numpy(), strict=True)
    return np.array([zlib.crc32(value.tobytes(), zlib.crc32(key.tobytes())) for key, value in columns], np.uint32)


def packed(reach: Reach) -> bytes:
    """Return the bytes that an index file holds."""
    file = io.BytesIO()
    for name, (dtype, _) in FORM.items():
        np.save(file, np.asarray(getattr(reach, name), f"<{dtype}"), allow_pickle=False)
    return file.getvalue()


def unpacked(data: bytes | memoryview, index: Lists | IVF) -> Reach:
    """Read what `packed` wrote. Raises ValueError where it is not of such an index: that file may be another's."""
    file, found = io.BytesIO(data), dict[str, Any]()
    lists, d = index.centroids.shape
    sizes = {"d": d, "l": lists, "p": index.parts}
    for name, (dtype, axes) in FORM.items():
        try:
            array = np.load(file, allow_pickle=False)
        except (EOFError, MemoryError) as error:
            raise ValueError(f"{name} is cut off") from error
        shape = tuple(sizes.setdefault(axis, size) for axis, size in zip(axes, array.shape, strict=False))
        if (array.dtype, array.shape, len(axes)) != (np.dtype(f"<{dtype}"), shape, array.ndim):
            raise ValueError(f"{name} is not that of such an index")
        if not np.isfinite(array).all():
            raise ValueError(f"{name} is not finite")
        found[name] = array if axes else float(array)
    apart = found["apart"]
    if file.read(1) or (apart < 0).any() or (apart >= index.covered).any() or (np.diff(apart) <= 0).any():
        raise ValueError("there is more than an index tells of its records, or of records that it has not")
    is_apart = np.zeros(index.covered, np.bool_)
    is_apart[apart] = True
    return Reach(is_apart=is_apart, **found)


def _measured(index: Lists | IVF, snapshot: Snapshot) -> Reach:
    """Two passes over keys, one over values. Cost n (d + v) + d³; memory for the time: four numbers a record."""
    (rows, starts), centre, means = index.members(), _centre(snapshot), index.centroids.copy()
    found = _Measures(*np.full((len(_SHARES), len(rows)), np.nan))
    records = _InLists(index, snapshot, rows, starts)

    for batch in map(records.batch, records.runs):
        _measure(records, batch, centre, means, found)
    if not index.parts:  # the radius takes the place of the error
        found = found._replace(errors=found.radii)
    limits = [_limit(one, share) for one, share in zip(found, _SHARES, strict=True)]
    outside = np.zeros(len(rows), np.bool_)
    for one, limit in zip(found, limits, strict=True):
        outside |= one > limit
    radii, mean_radii = _by_list(np.where(outside, np.nan, found.radii), starts)
    inside = found.errors[~outside & np.isfinite(found.errors)]
    is_apart = np.zeros(index.covered, np.bool_)
    is_apart[rows[outside]] = True
    order = np.argsort(rows[outside])
    radius = max(limits[2], 1e-300)
    some = sampled(snapshot.live, WITNESSES, 5)
    return Reach(
        rows[outside][order], is_apart, np.maximum(np.nan_to_num(found.values[outside][order]) / radius, 1.0),
        float(np.sqrt(np.square(inside).mean())) if len(inside) else 0.0, *_levels(inside),
        means, radii, mean_radii, *_peaks(records, means, outside), centre, limits[2],
        *_shape(index, snapshot, means), snapshot.rows(some), _checksums(snapshot, some),
    )  # fmt: skip


def _shape(index: Lists | IVF, snapshot: Snapshot, means: Floats) -> tuple[Floats, float]:  # (d, d)
    """Shape of the keys around the means of their lists: one root of the covariance for all lists, and `spread`."""
    keys = prepared(snapshot.keys_at(sampled(snapshot.live, SAMPLED, 3)).numpy(), index.metric)
    left = keys - means[nearest_centroids(index.centroids, keys)]
    squares = np.einsum("md,md->m", left, left, dtype=np.float64)
    whole = max(float(squares.mean()), 1e-12)
    values, vectors = np.linalg.eigh((left.T @ left / len(left)).astype(np.float64))
    root = (vectors * np.sqrt(np.maximum(values, 0) / whole)).astype(np.float32)
    return root, float(squares.var()) / whole**2


class _ListRun(NamedTuple):
    """The records of some lists."""

    run: range
    part: slice  # of all records
    positions: Rows  # (m,), -1 = gone
    stored: Tensor  # (m, d) keys
    keys: Floats  # (m, d) the same, prepared
    lists: list[tuple[int, slice]]  # those that are not empty, and which of the m records are theirs


@dataclass(frozen=True)
class _InLists:
    """The records that an index holds, list by list."""

    index: Lists | IVF
    snapshot: Snapshot
    rows: Rows  # (n,)
    starts: Rows  # (lists + 1,)

    @property
    def runs(self) -> list[range]:
        """The lists in runs that are copied at once."""
        width = self.snapshot.segments[0].keys.shape[1]
        most, found, first, lists = GATHERED // max(1, width), [], 0, len(self.starts) - 1
        for which in range(1, lists):
            if self.starts[which + 1] - self.starts[first] > most:
                found.append(range(first, which))
                first = which
        return [*found, range(first, lists)]

    def batch(self, run: range) -> _ListRun:
        """A run of lists, the keys copied."""
        starts = self.starts
        part = slice(starts[run.start], starts[run.stop])
        positions = self.snapshot.positions(self.rows[part])
        stored = self.snapshot.keys_at(positions)
        places = [(i, slice(starts[i] - part.start, starts[i + 1] - part.start)) for i in run]
        filled = [(i, place) for i, place in places if place.start < place.stop]
        return _ListRun(run, part, positions, stored, prepared(stored.numpy(), self.index.metric), filled)


def _measure(
    records: _InLists,
    batch: _ListRun,
    centre: Numbers,
    means: Floats,  # (lists, d), written to
    out: _Measures,
) -> None:
    loops, gone, nothing = native(), batch.positions < 0, np.zeros(means.shape[1])
    errors, radii, values, lengths = (one[batch.part] for one in out)
    for which, here in batch.lists:
        keys = batch.keys[here]
        if not gone[here].all():
            means[which] = keys[~gone[here]].mean(0, dtype=np.float64)
        loops.distances(keys, means[which].astype(np.float64), radii[here])
        if records.index.metric is Metric.DOT:
            loops.distances(keys, nothing, lengths[here])
    if isinstance(records.index, Lists):
        apart = records.index.code_errors(batch.run, batch.keys)
        errors[:] = np.sqrt(np.einsum("md,md->m", apart, apart, dtype=np.float64))
    if len(centre):
        snapshot = records.snapshot
        own = batch.stored if snapshot.segments[0].values is None else snapshot.values_at(batch.positions)
        loops.distances(np.ascontiguousarray(own.float().numpy()), centre, values)
    else:
        values[:] = 0
    for one in (errors, radii, values, lengths):
        one[gone] = np.nan


def _peaks(records: _InLists, means: Floats, outside: Live) -> tuple[Floats, Numbers]:  # (lists, d), (parts,)
    """Reach of records in a single coordinate, or their error in a single part of their codes: a second pass."""
    index, loops = records.index, native()
    extents, largest = np.zeros(means.shape, np.float32), np.zeros(index.parts)
    for batch in map(records.batch, records.runs):
        skip = outside[batch.part] | (batch.positions < 0)
        for which, here in batch.lists:
            loops.extents(batch.keys[here], means[which], skip[here], extents[which])
        if isinstance(index, Lists):
            turned = index.turned(index.code_errors(batch.run, batch.keys)[~skip])
            squares = np.square(turned).reshape(len(turned), index.parts, turned.shape[1] // index.parts).sum(2)
            np.maximum(largest, np.sqrt(squares.max(0, initial=0)), out=largest)
    return extents, largest


def _centre(snapshot: Snapshot) -> Numbers:
    """The mean of some values, (v,); of labels (0,)."""
    values = snapshot.values_at(sampled(snapshot.live, SAMPLED, 4))
    return values.double().mean(0).numpy() if values.is_floating_point() else np.zeros(0)


def _limit(measure: Numbers, share: float) -> float:
    """Limit beyond which a measure is extreme: few stand out of the others."""
    there = measure[np.isfinite(measure)]
    if not len(there):
        return 0.0
    ordinary, rare = np.quantile(there, (ORDINARY, 1 - share))
    return min(float(there.max()), max(FACTOR * float(ordinary), float(rare)))


def _levels(errors: Numbers) -> tuple[Numbers, Numbers]:  # (levels,), (levels,)
    """The upper ends of parts of the errors, the finer the larger they are, and log of the share of each."""
    ends = np.concatenate([np.arange(1, PARTS) / PARTS, 1 - 0.5 ** np.arange(1, FINER + 1) / PARTS, [1.0]])
    shares = np.log(np.diff(ends, prepend=0))
    return (np.quantile(errors, ends) if len(errors) else np.zeros(len(ends))), shares


def _by_list(radii: Numbers, starts: Rows) -> tuple[Numbers, Numbers]:  # (lists,), (lists,)
    """The largest and the root mean square of each list, 0 of an empty one."""
    there = np.isfinite(radii)
    filled = np.where(there, radii, 0.0)
    largest, squares, counts = np.zeros((3, len(starts) - 1))
    some = np.flatnonzero(np.diff(starts))  # reduceat takes no empty ranges
    if len(some):
        at = starts[some]
        largest[some] = np.maximum.reduceat(filled, at)
        squares[some] = np.add.reduceat(np.square(filled), at)
        counts[some] = np.add.reduceat(there.astype(np.float64), at)
    return largest, np.sqrt(squares / np.maximum(counts, 1))
