"""The quantizer that encodes records by centroids, a rotation and words; and the layout of encoded records in blocks.

The code of a record is the number of its list, a 4-bit word for each part of its rotated residual, and a factor that
makes estimates exact along the residual; `softdb/kernels/native/lists.cc` has equations. Jégou et al. 2011, "Product
quantization for nearest neighbor search"; Ge et al. 2013, "Optimized product quantization", for the rotation: the
eigenvectors of the residuals' covariance, assigned to parts of about equal products of variances; Gao and Long 2024,
"RaBitQ", arXiv 2405.12497, for the factor.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from softdb.index.contract import Floats, Live, Rows
from softdb.kernels import native
from softdb.kernels.threads import by_lines

POINTS_A_LIST = 40  # largest number of training points for each centroid
ROUNDS = 8  # rounds of k-means; more rounds change recall by less than 0.001
TRAINED, EACH = 6000, 8  # number of residuals that train the rotation and the words: max(TRAINED, EACH · d)
BLOCK = 16  # number of records in a block of codes; also number of words that a part can have
CODE = 127  # the largest int8
EXACT = 1 << 19  # largest integer to which residuals are rounded for their covariance
DISTINCT = 1e-6  # added to variances, relative to their mean, so that equal ones have the same axes on any machine
HIGHEST = 60_000  # largest float16 value that is stored
SKETCHED = (64, 4), (32, 2), (1, 1)  # least width of keys, and numbers of a key that one word of a sketch encodes
PEAK = 4.0  # an error within one part counts √d / PEAK times, as a query may differ from the code in that part only
ROUNDED = 1.02, 0.01  # errors become 1.02 error + 0.01 |r|, for the rounding of rotations and factors
SHARE = 0.0002  # largest share of records that are set apart as extreme
ORDINARY, FACTOR = 0.9, 1.5  # no value below FACTOR times the ORDINARY quantile is extreme
GAIN = 63.75  # a factor, 0 … 4, is stored in one byte as round(GAIN · factor)
APART = 255  # value of the error byte of a record that is set apart
NO_ROW = int(np.iinfo(np.uint32).max)
_ORDER = [0, 8, 1, 9, 2, 10, 3, 11, 4, 12, 5, 13, 6, 14, 7, 15]  # order of a block's records in the bytes of codes

Places = NDArray[np.uint32]
_NO_WORDS = np.empty((0, 1, BLOCK), np.float32)
_COUNTS = np.unpackbits(np.arange(1 << 16, dtype=np.uint16).view(np.uint8)).reshape(-1, 16).sum(1, dtype=np.uint8)


class Matrix(NamedTuple):
    """A matrix whose rows are int8 numbers times one scale for each row. Kernels multiply queries by it."""

    numbers: NDArray[np.int8]  # (r, d)
    scales: Floats  # (r,)

    @classmethod
    def of(cls, rows: Floats) -> Matrix:  # (r, d)
        """Round a float32 matrix (r, d) to int8 with a scale for each row."""
        scales = np.abs(rows).max(1, initial=0) / CODE
        scales[scales == 0] = 1
        return cls(np.rint(rows / scales[:, None]).astype(np.int8), scales.astype(np.float32))

    @property
    def rows(self) -> Floats:  # (r, d)
        """The matrix as float32 numbers."""
        rows: Floats = self.numbers * self.scales[:, None]
        return rows

    def interleaved(self) -> NDArray[np.uint8]:  # (groups, …)
        """Return the kernels' layout of the matrix: uint8 with 128 added; groups of 16 rows, 4 numbers of each row."""
        rows, width = self.numbers.shape
        padded = np.full((-(-rows // BLOCK) * BLOCK, -(-width // 4) * 4), 128, np.uint8)
        padded[:rows, :width] = self.numbers.view(np.uint8) ^ 128
        groups = padded.reshape(-1, BLOCK, padded.shape[1] // 4, 4).transpose(0, 2, 1, 3)
        return np.ascontiguousarray(groups).reshape(len(groups), -1)


class Quantizer(NamedTuple):
    """Trained centroids, rotation and words, which encode keys."""

    rotation: Matrix  # (parts · word, d)
    centroids: Matrix  # (lists, d)
    words: Floats  # (parts, word, 16)
    origin: Floats  # (d,) subtracted from keys: their mean for l2, else 0
    unit: float  # size of one unit of stored offsets, as a squared distance
    error_step: float  # size of one step of an error byte, as a distance

    @classmethod
    def train(cls, sample: Floats, lists: int, parts: int, is_l2: bool) -> Quantizer:  # (m, d)
        """Train centroids (by k-means), then the rotation, then the words, on a sample of keys."""
        d = sample.shape[1]
        origin = sample.mean(0) if is_l2 else np.zeros(d, np.float32)
        sample = np.ascontiguousarray(sample - origin)
        nothing = Matrix.of(np.empty((0, d), np.float32))
        lists_only = cls(nothing, Matrix.of(_means(sample, lists)), _NO_WORDS, origin.astype(np.float32), 1.0, 1.0)
        return lists_only._worded(sample, parts, -(-d // parts), is_l2)

    def _worded(self, sample: Floats, parts: int, word: int, is_l2: bool) -> Quantizer:  # (m, d)
        """Return a quantizer with the same lists, and a rotation and words trained on a sample minus `origin`."""
        some = np.ascontiguousarray(sample[:: max(1, len(sample) // max(TRAINED, EACH * sample.shape[1]))])
        residuals = some - self.centroids.rows[nearest_centroids(self.centroids, some)]
        rotation = Matrix.of(_balanced(residuals, parts, word))
        words = _words(product(residuals, rotation.rows.T), parts)
        return self._replace(rotation=rotation, words=words)._in_units(some, is_l2)

    def _in_units(self, sample: Floats, is_l2: bool) -> Quantizer:
        """Return the quantizer with units so large that offsets and errors beyond those of the sample can be stored."""
        coded = self.coded(sample, nearest_centroids(self.centroids, sample))
        offsets = np.maximum(np.abs(coded.offsets()), np.abs(coded.offsets(1.0)))
        unit = float(max(offsets.max(), 1e-30)) * 8 / HIGHEST if is_l2 else 1.0
        usual, rare = FACTOR * float(np.quantile(coded.errors, ORDINARY)), int(SHARE * len(sample)) + 2
        extreme = float(np.partition(coded.errors, -min(rare, len(sample)))[-min(rare, len(sample))])
        return self._replace(unit=unit, error_step=max(usual, extreme, 1e-30) / (APART - 1))

    def sketched(self, sample: Floats, is_l2: bool) -> Quantizer:  # (m, d)
        """Train a quantizer with the same lists and coarser codes, about one bit per number of a key."""
        word, parts = sketch_of(sample.shape[1])
        return self._worded(sample - self.origin, parts, word, is_l2)

    def coded(self, keys: Floats, lists: Rows) -> Codes:  # (n, d), (n,)
        """Encode keys minus `origin`, given the list of each. Cost n d parts · word."""
        centroids, turn = self.centroids.rows, self.rotation.rows.T
        padded = np.zeros((len(turn), -(-turn.shape[1] // BLOCK) * BLOCK), np.float32)
        padded[:, : turn.shape[1]] = turn
        groups = padded.reshape(len(turn), -1, BLOCK).transpose(1, 0, 2).reshape(-1, len(turn) * BLOCK)
        shared = centroids, groups, product(centroids, turn)
        words = self.words.reshape(-1, BLOCK), np.square(self.words).sum(1) / 2, keys.shape[1] ** 0.5 / PEAK
        codes = np.empty((len(keys), len(self.words) // 2), np.uint8)
        numbers = squares, factors, central, errors = np.empty((4, len(keys)), np.float32)

        def arguments(run: slice) -> tuple[Any, ...]:
            return keys[run], *shared, lists[run], *words, codes[run], *(line[run] for line in numbers)

        by_lines(native().encode, arguments, len(keys), len(keys) * padded.size)
        errors *= ROUNDED[0]
        errors += ROUNDED[1] * np.sqrt(squares)
        return Codes(codes, factors, central, errors, squares)


class Codes(NamedTuple):
    """Codes of n records as `Quantizer.coded` returns them: measures in float32, not yet rounded for storage."""

    codes: NDArray[np.uint8]  # (n, parts / 2)
    factors: Floats  # (n,)
    central: Floats  # (n,) <c, w>
    errors: Floats  # (n,) |k - k̂|, or more if one part of the code has most of the error
    squares: Floats  # (n,) |r|²

    def offsets(self, factor: float | None = None) -> Floats:  # (n,)
        """Return 2 f <c, w> + |r|², the term of an l2 score that all queries share; f is `factor` or each record's."""
        offsets: Floats = 2 * (self.factors if factor is None else factor) * self.central + self.squares
        return offsets


class Coded(NamedTuple):
    """Encoded records with the list of each, in the order of insertion."""

    lists: Rows  # (n,)
    codes: NDArray[np.uint8]  # (n, parts / 2)
    factors: NDArray[np.float16]  # (n,)
    offsets: NDArray[np.float16]  # (n,) in units of the quantizer; for l2
    rows: NDArray[np.uint32]  # (n,)
    squares: Floats  # (n,) |r|²
    radii: Floats  # (n,) |r| or a little more
    sketches: NDArray[np.uint8]  # (n, parts / 2) the coarser codes
    gains: NDArray[np.uint8]  # (n,) factors of the coarser codes, at least 1, in steps of 1 / GAIN
    errors: NDArray[np.uint8]  # (n,) errors of the coarser codes in steps of `error_step`, rounded up
    corrections: NDArray[np.float16]  # (n,) `offsets(1.0)` of the coarser codes, in units

    def take(self, which: NDArray[Any]) -> Coded:
        """Return the records that a mask or an array of indices selects."""
        return Coded(*(column[which] for column in self))


class Allowed(NamedTuple):
    """Slots that a scan may return."""

    bits: NDArray[np.uint16]  # (blocks,) a bit for each slot
    sizes: Floats  # (lists,) number of these slots in each list, padded with zeros to a multiple of 16


class CodeBlocks(NamedTuple):
    """Encoded records as kernels read them: list by list in blocks of 16. A list's last block may have empty slots.

    A list is in random order, so that a run of its blocks is a random sample of its records (`is_shuffled`).
    """

    sizes: Rows  # (lists,) number of records
    starts: Rows  # (lists + 1,) number of the first block
    blocks: NDArray[np.uint8]  # (blocks, parts / 2, 16) finer codes; parts may be 0
    factors: NDArray[np.float16]  # (blocks, 16); without finer codes (0, 16)
    offsets: NDArray[np.float16]  # (blocks, 16) for l2 with finer codes, else (0, 16)
    rows: NDArray[np.uint32]  # (slots,) NO_ROW for an empty slot
    squares: Floats  # (lists,) Σ |r|²
    radii: Floats  # (lists,) max |r|
    sketches: NDArray[np.uint8]  # (blocks, parts / 2, 16) coarser codes
    gains: NDArray[np.uint8]  # (blocks, 16) factors of the coarser codes
    errors: NDArray[np.uint8]  # (blocks, 16) errors of the coarser codes; APART: set apart
    corrections: NDArray[np.float16]  # (blocks, 16) offsets of the coarser codes for l2, else (0, 16)

    @classmethod
    def of(cls, coded: Coded, lists: int, is_l2: bool) -> CodeBlocks:
        """Arrange encoded records in blocks, sorted by list and then by a hash of the row. Cost n log n."""
        coded = coded.take(np.argsort(_in_order(coded.lists, coded.rows)))
        sizes = np.bincount(coded.lists, minlength=lists)
        starts = np.concatenate([[0], np.cumsum(-(-sizes // BLOCK))])
        count, slots = max(1, int(starts[-1])), _slots(sizes, starts)

        def spread(numbers: NDArray[Any], spare: int = 0) -> NDArray[Any]:
            slotted = np.full((count * BLOCK, *numbers.shape[1:]), spare, numbers.dtype)
            slotted[slots] = numbers
            return slotted

        def blocked(codes: NDArray[np.uint8]) -> NDArray[np.uint8]:
            ordered = spread(codes).reshape(count, BLOCK, -1)[:, _ORDER]
            return np.ascontiguousarray(ordered.transpose(0, 2, 1))

        def each(numbers: NDArray[Any], wanted: bool = True) -> NDArray[Any]:
            return (spread(numbers) if wanted else numbers[:0]).reshape(-1, BLOCK)

        fine, radii = coded.codes.shape[1] > 0, np.zeros(lists, np.float32)
        np.maximum.at(radii, coded.lists, coded.radii)
        return cls(
            sizes.astype(np.int64), starts.astype(np.int64), blocked(coded.codes), each(coded.factors, fine),
            each(coded.offsets, fine and is_l2), spread(coded.rows, NO_ROW),
            np.bincount(coded.lists, coded.squares, lists).astype(np.float32), radii, blocked(coded.sketches),
            each(coded.gains), each(coded.errors), each(coded.corrections, is_l2),
        )  # fmt: skip

    @property
    def slots(self) -> Rows:  # (n,)
        """Slots of the records, sorted by list."""
        return _slots(self.sizes, self.starts)

    @property
    def is_shuffled(self) -> bool:
        """True if the lists are in the order that `of` gives them."""
        order = _in_order(np.repeat(np.arange(len(self.sizes)), self.sizes), self.rows[self.slots])
        return bool((order[1:] > order[:-1]).all())

    def coded(self) -> Coded:
        """Return the records sorted by list, undoing `of`. Each has the mean |r|² and the largest |r| of its list."""
        slots, squares = self.slots, self.squares / np.maximum(self.sizes, 1)

        def flat(blocks: NDArray[np.uint8]) -> NDArray[np.uint8]:
            ordered = np.empty((len(blocks), BLOCK, blocks.shape[1]), np.uint8)
            ordered[:, _ORDER] = blocks.transpose(0, 2, 1)
            return ordered.reshape(len(blocks) * BLOCK, blocks.shape[1])[slots]

        def each(numbers: NDArray[Any]) -> NDArray[Any]:
            return numbers.reshape(-1)[slots] if len(numbers) else np.zeros(len(slots), numbers.dtype)

        return Coded(
            np.repeat(np.arange(len(self.sizes)), self.sizes), flat(self.blocks), each(self.factors),
            each(self.offsets), self.rows[slots], np.repeat(squares, self.sizes).astype(np.float32),
            np.repeat(self.radii, self.sizes), flat(self.sketches), each(self.gains), each(self.errors),
            each(self.corrections),
        )  # fmt: skip

    def allowed(self, keep: Live, places: Places) -> Allowed:  # (size,), (slots,)
        """Return the slots of records that `keep` allows; places[slot] is the record's index in `keep`. Cost n."""
        taking_part = np.append(keep, False)[np.minimum(places, len(keep))]
        bits = np.packbits(taking_part, bitorder="little").view(np.uint16)
        counts = np.concatenate([[0], np.cumsum(_COUNTS[bits], dtype=np.int64)])
        sizes = np.zeros(-(-len(self.sizes) // BLOCK) * BLOCK, np.float32)
        sizes[: len(self.sizes)] = np.diff(counts[self.starts])
        return Allowed(bits, sizes)


def sketch_of(dim: int) -> tuple[int, int]:
    """Return the numbers of a key that one word of a sketch encodes, and the number of parts of a sketch."""
    word = next(length for least, length in SKETCHED if dim >= least)
    return word, -(-dim // (8 * word)) * 8


def _in_order(lists: Rows, rows: NDArray[np.uint32]) -> NDArray[np.uint64]:  # (n,), (n,) -> (n,)
    """Return numbers by which records are sorted: by list, then by a hash of the row (the finalizer of MurmurHash3)."""
    mixed = rows ^ rows >> np.uint32(16)
    for factor, shift in ((0x85EBCA6B, 13), (0xC2B2AE35, 16)):
        mixed *= np.uint32(factor)
        mixed ^= mixed >> np.uint32(shift)
    order: NDArray[np.uint64] = lists.astype(np.uint64) << np.uint64(32) | mixed
    return order


def _slots(sizes: Rows, starts: Rows) -> Rows:  # (lists,), (lists + 1,) -> (n,)
    """Return the slots of the records, list by list, from the sizes and the first blocks of lists."""
    first = starts[:-1] * BLOCK - np.concatenate([[0], np.cumsum(sizes)[:-1]])
    slots: Rows = np.arange(int(sizes.sum())) + np.repeat(first, sizes)
    return slots


def _words(turned: Floats, parts: int) -> Floats:  # (m, parts · word) -> (parts, word, 16)
    """Train the 16 words of each part by k-means, as `_means` does, in all parts at once."""
    random, m = np.random.default_rng(1234), len(turned)
    points = np.ascontiguousarray(turned.reshape(m, parts, -1).transpose(1, 2, 0))  # (parts, word, m)
    words = points[:, :, random.choice(m, BLOCK, replace=m < BLOCK)]
    for _ in range(ROUNDS):
        halves, table = torch.from_numpy(np.square(words).sum(1)[:, None] / 2), torch.from_numpy(words)
        own = torch.baddbmm(halves, torch.from_numpy(points).mT, table, beta=-1).argmax(2).numpy()  # (parts, m)
        cells = (own + BLOCK * np.arange(parts)[:, None]).ravel()
        sizes = np.bincount(cells, minlength=BLOCK * parts).reshape(parts, 1, BLOCK)
        sums = [np.bincount(cells, column.ravel(), BLOCK * parts) for column in points.transpose(1, 0, 2)]
        others = points[:, :, random.integers(0, m, BLOCK)]
        means = np.stack(sums).reshape(-1, parts, BLOCK).transpose(1, 0, 2)
        words = np.where(sizes, means / np.maximum(sizes, 1), others).astype(np.float32)
    return np.ascontiguousarray(words)


def _balanced(residuals: Floats, parts: int, word: int) -> Floats:  # (m, d) -> (parts · word, d)
    """Return a rotation to principal axes. Each axis is assigned to the part with the least product of variances."""
    d = residuals.shape[1]
    steps = np.rint(residuals * (EXACT / max(np.abs(residuals).max(), 1e-30))).astype(np.float64)
    products = steps.T @ steps  # sums of integers below 2**53 are exact, so their order does not matter
    values, axes = np.linalg.eigh(products + np.diag(np.linspace(0, DISTINCT * np.trace(products) / d, d)))
    logs = np.log(np.maximum(values[::-1], 1e-12 * max(values[-1], 1e-30)))
    logs -= logs.min() - 1e-3
    sums, counts = np.zeros(parts), np.zeros(parts, np.int64)
    axes_of = np.zeros((parts * word, len(values)), np.float32)
    for axis, log in zip(axes.T[::-1], logs, strict=True):
        place = int(np.argmin(np.where(counts < word, sums, np.inf)))
        axes_of[place * word + counts[place]] = axis
        sums[place] += log
        counts[place] += 1
    return axes_of


def nearest_centroids(centroids: Matrix, keys: Floats) -> Rows:  # (l, d), (n, d) -> (n,)
    """Return the number of the nearest centroid of each key, as nearly as int8 products tell (`nearest_lists`)."""
    scales, halves = np.full((2, -(-len(centroids.scales) // BLOCK) * BLOCK), np.inf, np.float32)
    scales[:], scales[: len(centroids.scales)] = 1, centroids.scales
    halves[: len(centroids.scales)] = np.square(centroids.rows).sum(1) / 2
    numbers, nearest = centroids.interleaved(), np.empty(len(keys), np.int64)

    def arguments(run: slice) -> tuple[Any, ...]:
        return keys[run], numbers, scales, halves, nearest[run]

    by_lines(native().nearest_lists, arguments, len(keys), len(keys) * numbers.size // 4)
    return nearest


def _means(points: Floats, lists: int) -> Floats:  # (m, d) -> (lists, d)
    """Return centroids by k-means from random points. An empty list restarts from another one.

    Sums run in the order of the points, so that the number of threads does not change the result. Lloyd 1982.
    """
    random = np.random.default_rng(1234)
    if len(points) > POINTS_A_LIST * lists:
        points = points[np.sort(random.permutation(len(points))[: POINTS_A_LIST * lists])]
    means = points[random.permutation(len(points))[:lists]]
    for _ in range(ROUNDS):
        own = nearest_centroids(Matrix.of(means), points)
        sizes = np.bincount(own, minlength=lists)
        means = np.asarray(sums_of(points, own, lists) / np.maximum(sizes, 1)[:, None], np.float32)
        empty = np.flatnonzero(sizes == 0)
        means[empty] = points[random.integers(0, len(points), len(empty))]
    return means


def sums_of(points: Floats, own: Rows, lists: int) -> Floats:  # (n, d), (n,) -> (lists, d)
    """Return the sum of the points of each list, in their order."""
    sums = torch.zeros(lists, points.shape[1])
    result: Floats = sums.index_add_(0, torch.from_numpy(own), torch.from_numpy(points)).numpy()
    return result


def product(a: Floats, b: Floats) -> Floats:  # (n, d), (d, m) -> (n, m)
    """Return a matrix product. MKL's, unlike OpenBLAS', has the same bits for any number of threads."""
    numbers: Floats = torch.mm(torch.from_numpy(a), torch.from_numpy(b)).numpy()
    return numbers
