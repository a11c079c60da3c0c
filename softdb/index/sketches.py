"""Sketches: inverted lists of coarse codes, from which estimates draw records.

`Lists` stores sketches beside finer codes for searches. Other indexes, and exact search, have a separate `Sketches`.
"""

from __future__ import annotations

import copy
import io
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from softdb.check import Metric
from softdb.errors import BadInput
from softdb.index.contract import Floats, Index, Rows, prepared
from softdb.index.quantizer import (
    APART,
    BLOCK,
    GAIN,
    HIGHEST,
    NO_ROW,
    CodeBlocks,
    Coded,
    Matrix,
    Quantizer,
    nearest_centroids,
    sketch_of,
)  # fmt: skip
from softdb.index.rule import Rule
from softdb.kernels import native

FORM = 23  # number of arrays in an index file


class Sketches(Index):
    """An index of coarse codes in lists, for estimates only. A record takes d / 8 + 6 bytes, 2 more for l2.

    Cost of a draw: see draw.cc.
    """

    kind: ClassVar[str] = "sketch"
    searches: ClassVar[bool] = False

    def __init__(self, metric: Metric, inner: Quantizer, sketch: Quantizer, layout: CodeBlocks | None = None) -> None:
        super().__init__(metric, inner)
        self.sketch = sketch  # quantizer of coarse codes; `inner` is for finer codes and has no words here
        self.rule = Rule()
        self.parts = len(inner.words)
        self._pending: list[Coded] = []
        self._use(layout or CodeBlocks.of(_no_records(inner, sketch), len(inner.centroids.scales), metric is Metric.L2))

    @classmethod
    def codes(cls, dim: int) -> tuple[str, ...]:
        """Return the only codes for a width of keys: a word encodes 4, 2 or 1 numbers (see `sketch_of`)."""
        return (f"PQ{sketch_of(dim)[1]}x4",)

    @classmethod
    def record_bytes(cls, dim: int, codes: str) -> int:
        """Return the bytes of a record: half a byte for each part, factor, error, offset and row."""
        return sketch_of(dim)[1] // 2 + 8

    @classmethod
    def train(cls, metric: Metric, sample: Floats, count: int, codes: str) -> Index:
        """Return an empty index with centroids (by k-means), rotation and words trained on the sample."""
        sketch = Quantizer.train(sample, lists_in(count, sample), parts_in(codes), metric is Metric.L2)
        nothing = Matrix(sketch.rotation.numbers[:0], sketch.rotation.scales[:0])
        return cls(metric, sketch._replace(rotation=nothing, words=sketch.words[:0]), sketch)

    @classmethod
    def loaded(cls, metric: Metric, data: NDArray[np.uint8], dim: int | None) -> Index:
        """Read the bytes that `dump` wrote. Raises ValueError if they are damaged, RuntimeError without kernels."""
        native()  # raises RuntimeError without kernels
        file = io.BytesIO(data.tobytes())
        try:
            arrays = [np.load(file, allow_pickle=False) for _ in range(FORM)]
        except (EOFError, OSError, MemoryError) as error:
            raise ValueError("the index file is incomplete") from error
        turns, turn_scales, centroids, scales, words, origin, units, *sketched, rule = arrays[:11]
        layout = CodeBlocks(*arrays[11:])
        if units.shape != (4,):
            raise ValueError("an earlier version of softdb wrote the index file")
        inner = Quantizer(Matrix(turns, turn_scales), Matrix(centroids, scales), words, origin, *units[:2].tolist())
        sketch = Quantizer(Matrix(*sketched[:2]), inner.centroids, sketched[2], origin, *units[2:].tolist())
        _check(metric, (inner, sketch), layout, rule, dim)
        index = cls(metric, inner, sketch, layout)
        index.rule = Rule(*map(float, rule))
        return index

    def dump(self) -> NDArray[np.uint8]:
        """Return the index as bytes: arrays in NumPy's own format, one after the other, as `loaded` reads them."""
        inner, sketch, file = self.inner, self.sketch, io.BytesIO()
        units = np.array([inner.unit, inner.error_step, sketch.unit, sketch.error_step])
        trained = *inner.rotation, *inner.centroids, inner.words, inner.origin, units
        for array in (*trained, *sketch.rotation, sketch.words, np.array(self.rule), *self.layout):
            np.save(file, array, allow_pickle=False)
        return np.frombuffer(file.getbuffer(), np.uint8)

    def _use(self, layout: CodeBlocks) -> None:
        """Replace the records of the index by `layout`."""
        self.layout = layout
        self.filled = layout.allowed(np.ones(1, np.bool_), np.where(layout.rows == NO_ROW, 1, 0).astype(np.uint32))
        usual = np.sqrt(layout.squares.sum() / max(1, self.count))
        spreads = np.maximum(np.sqrt(layout.squares / np.maximum(layout.sizes, 1)), max(0.05 * usual, 1e-30))
        self.spreads = spreads.astype(np.float32)

    @property
    def sketches(self) -> Index:
        """This index itself: estimates draw from its codes."""
        return self

    @property
    def count(self) -> int:
        """Number of records in the index."""
        return int(self.layout.sizes.sum())

    def add(self, rows: Rows, keys: NDArray[np.floating]) -> None:
        """Add records. Cost n d (lists + parts · word)."""
        if int(rows[-1]) >= NO_ROW:
            raise BadInput(f"row {rows[-1]} is too large for an index of lists; expected rows below {NO_ROW}")
        seen = prepared(keys, self.metric)
        if self.metric is Metric.L2:
            seen = seen - self.inner.origin
        lists = nearest_centroids(self.inner.centroids, seen)
        self._pending.append(self._coded(rows, seen, lists))
        self.covered = int(rows[-1]) + 1
        self.longest = self.reach = None

    def _coded(self, rows: Rows, seen: Floats, lists: Rows) -> Coded:
        """Encode records with the coarse codes only."""
        coarse = self.sketch.coded(seen, lists)
        in_units, corrections = self._in_units(coarse.offsets(1.0), self.sketch)
        errors = np.ceil(coarse.errors / self.sketch.error_step)
        errors[~(errors < APART) | (np.abs(in_units) > HIGHEST)] = APART
        gains = np.rint(GAIN * np.maximum(coarse.factors, 1)).astype(np.uint8)
        none = np.zeros(len(rows), np.float16)
        return Coded(
            lists, np.empty((len(rows), 0), np.uint8), none, none, rows.astype(np.uint32), coarse.squares,
            np.float32(1.0001) * np.sqrt(coarse.squares), coarse.codes, gains, errors.astype(np.uint8), corrections,
        )  # fmt: skip

    def _in_units(self, offsets: Floats, by: Quantizer) -> tuple[Floats, NDArray[np.float16]]:
        """Return offsets in units of a quantizer, as float32 and rounded to float16. They are 0 except for l2."""
        in_units = offsets / by.unit if self.metric is Metric.L2 else np.zeros(len(offsets), np.float32)
        return in_units, np.clip(in_units, -HIGHEST, HIGHEST).astype(np.float16)

    def seal(self) -> None:
        """Merge the added records into the blocks of the lists. Cost n."""
        if self._pending:
            columns = zip(self.layout.coded(), *self._pending, strict=True)
            self._pending = []
            self._lay_out(Coded(*map(np.concatenate, columns)))

    def keep_only(self, rows: Rows) -> None:
        """Remove all records but those in `rows`. Cost n."""
        keep = np.zeros(self.covered, np.bool_)
        keep[rows] = True
        coded = self.layout.coded()
        self._lay_out(coded.take(keep[coded.rows]))

    def _lay_out(self, coded: Coded) -> None:
        self._use(CodeBlocks.of(coded, len(self.inner.centroids.scales), self.metric is Metric.L2))

    def copy(self) -> Index:
        """Return a copy. It shares the arrays, which are never changed in place."""
        twin = copy.copy(self)
        twin.report, twin._pending = dict(self.report), []
        return twin

    @property
    def lists(self) -> int:
        """Number of lists."""
        return len(self.spreads)


def lists_for(count: int) -> int:
    """Return the number of lists for n records: a power of two, 1.2 to 2.5 √n. More lists are slower to build."""
    return int(1 << max(0, int(np.log2(2 * np.sqrt(max(count, 1))) + 0.3)))


def lists_in(count: int, sample: Floats) -> int:
    """Return the number of lists for about `count` records, but at most what the sample can train."""
    return max(1, min(lists_for(count), len(sample) // 39))


def parts_in(codes: str) -> int:
    """Return the number of parts of a code from its name, for example 64 for "PQ64x4"."""
    return int(codes.removeprefix("PQ").partition("x")[0])


def _check(
    metric: Metric, by: tuple[Quantizer, Quantizer], layout: CodeBlocks, rule: NDArray[Any], dim: int | None
) -> None:
    """Raise ValueError if arrays do not fit together. Kernels do not check this."""
    inner, sketch = by
    (turned, d), lists, (parts, word, _) = inner.rotation.numbers.shape, len(inner.centroids.scales), inner.words.shape
    coarse, length, _ = sketch.words.shape
    blocks = len(layout.blocks)
    forms: dict[str, tuple[NDArray[Any], Any, tuple[int, ...]]] = {
        "rotation": (inner.rotation.numbers, np.int8, (parts * word, d)),
        "scales of the rotation": (inner.rotation.scales, np.float32, (turned,)),
        "centroids": (inner.centroids.numbers, np.int8, (lists, d)),
        "scales of the centroids": (inner.centroids.scales, np.float32, (lists,)),
        "words": (inner.words, np.float32, (parts, word, BLOCK)),
        "origin": (inner.origin, np.float32, (d,)),
        "coarse rotation": (sketch.rotation.numbers, np.int8, (coarse * length, d)),
        "scales of the coarse rotation": (sketch.rotation.scales, np.float32, (coarse * length,)),
        "coarse words": (sketch.words, np.float32, (coarse, length, BLOCK)),
        "rule": (rule, np.float64, (len(Rule._fields),)),
        "sizes": (layout.sizes, np.int64, (lists,)),
        "starts": (layout.starts, np.int64, (lists + 1,)),
        "codes": (layout.blocks, np.uint8, (blocks, parts // 2, BLOCK)),
        "factors": (layout.factors, np.float16, (blocks if parts else 0, BLOCK)),
        "offsets": (layout.offsets, np.float16, (blocks if parts and metric is Metric.L2 else 0, BLOCK)),
        "rows": (layout.rows, np.uint32, (blocks * BLOCK,)),
        "squares": (layout.squares, np.float32, (lists,)),
        "radii": (layout.radii, np.float32, (lists,)),
        "sketches": (layout.sketches, np.uint8, (blocks, coarse // 2, BLOCK)),
        "gains": (layout.gains, np.uint8, (blocks, BLOCK)),
        "errors": (layout.errors, np.uint8, (blocks, BLOCK)),
        "corrections": (layout.corrections, np.float16, (blocks if metric is Metric.L2 else 0, BLOCK)),
    }
    for name, (array, dtype, shape) in forms.items():
        if array.dtype != dtype or array.shape != shape:
            raise ValueError(f"the index has {name} {array.dtype} {array.shape}; expected {np.dtype(dtype)} {shape}")
    if dim is not None and d != dim:
        raise ValueError(f"the keys of the index are {d} wide; expected {dim}")
    ends = np.concatenate([[0], np.cumsum(-(-layout.sizes // BLOCK))])
    fits = (layout.sizes >= 0).all() and (layout.starts == ends).all() and blocks >= max(1, ends[-1])
    if parts % 8 or coarse % 8 or not lists or not fits:
        raise ValueError("the sizes of the lists in the index file do not match")
    if not layout.is_shuffled:
        raise ValueError("an earlier version of softdb wrote the index file")


def _no_records(inner: Quantizer, sketch: Quantizer) -> Coded:
    halves, octets = np.empty(0, np.float16), np.empty(0, np.uint8)
    codes, sketches = (np.empty((0, len(by.words) // 2), np.uint8) for by in (inner, sketch))
    squares, rows = np.empty(0, np.float32), np.empty(0, np.uint32)
    return Coded(np.empty(0, np.int64), codes, halves, halves, rows, squares, squares, sketches, octets, octets, halves)
