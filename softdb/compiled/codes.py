"""How far the codes of an index lie from the keys that they stand for: 4-bit codes, read as FAISS packs them.

A list is cut into blocks of 32 records. In a block the codes of parts m and m + 1 take 32 bytes: in byte j of the first
16, the low half is part m of record `_SLOTS[j]`, the high half that of record `_SLOTS[j]` + 16; the other 16 bytes hold
part m + 1 (FAISS, impl/fast_scan/pq4_fast_scan.cpp).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from softdb.compiled.decorators import compiled

__all__ = ["distances", "extents", "packed_errors", "part_errors"]

_PLACES = np.array([0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15])  # byte of each record of sixteen


@compiled
def distances(keys: Any, centre: Any, out: Any) -> None:
    """‖k - c‖ of keys (m, d) from one point (d,), in float64. Cost m d."""
    for i in range(len(keys)):
        total = 0.0
        for j in range(keys.shape[1]):
            apart = np.float64(keys[i, j]) - np.float64(centre[j])
            total += apart * apart
        out[i] = np.sqrt(total)


@compiled
def packed_errors(
    keys: Any,  # (m, d) float32, prepared, in the order of the list
    packed: Any,  # (blocks, bytes) uint8
    words: Any,  # (parts, 16, d / parts) float32 what each code stands for
    base: Any,  # (d,) float32 what the code is added to: the list's centroid, or zeros
    out: Any,  # (m,) float64, written to
) -> None:
    """‖k - k̂‖ of the keys in one list, k̂ what their codes decode to. Cost m d."""
    parts, width = words.shape[0], words.shape[2]
    for i in range(len(keys)):
        block, slot = packed[i // 32], i % 32
        place, total = _PLACES[slot % 16], 0.0
        for m in range(parts):
            byte = np.int64(block[(m // 2) * 32 + (m % 2) * 16 + place])
            code = byte >> 4 if slot >= 16 else byte & 15
            for t in range(width):
                j = m * width + t
                apart = np.float64(keys[i, j]) - np.float64(base[j]) - np.float64(words[m, code, t])
                total += apart * apart
        out[i] = np.sqrt(total)


@compiled
def extents(keys: Any, mean: Any, skip: Any, out: Any) -> None:
    """The largest |k_j - m_j| of each coordinate (d,), of the keys (m, d) that are not skipped (m,). Cost m d."""
    out[:] = 0
    for i in range(len(keys)):
        if not skip[i]:
            for j in range(keys.shape[1]):
                out[j] = max(out[j], abs(keys[i, j] - mean[j]))


@compiled
def part_errors(
    keys: Any,  # (m, d) float32, prepared, in the order of the list
    packed: Any,  # (blocks, bytes) uint8
    words: Any,  # (parts, 16, d / parts) float32
    base: Any,  # (d,) float32
    skip: Any,  # (m,) bool
    out: Any,  # (parts,) float64, raised
) -> None:
    """The largest error of each part of a code, as `packed_errors` has them for the whole. Cost m d."""
    parts, width = words.shape[0], words.shape[2]
    for i in range(len(keys)):
        block, slot = packed[i // 32], i % 32
        place = _PLACES[slot % 16]
        if skip[i]:
            continue
        for m in range(parts):
            byte = np.int64(block[(m // 2) * 32 + (m % 2) * 16 + place])
            code, total = byte >> 4 if slot >= 16 else byte & 15, 0.0
            for t in range(width):
                j = m * width + t
                apart = np.float64(keys[i, j]) - np.float64(base[j]) - np.float64(words[m, code, t])
                total += apart * apart
            out[m] = max(out[m], np.sqrt(total))
