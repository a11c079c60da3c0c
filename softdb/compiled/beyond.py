"""What lies beyond the records that were scored: which lists to search, how wrong codes are, what draws add up to."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from softdb.compiled.decorators import compiled
from softdb.compiled.draw import log_normal

__all__ = ["caps", "log_sums", "peaks", "to_search"]

MORE = 3.0  # deviations that the other parts of a code may add to one that is extreme


@compiled
def to_search(
    means: Any,  # (q, lists) float64 mean score of a list
    deviations: Any,  # (q, lists) float64
    caps: Any,  # (q, lists) float64 the largest score that one of its records may have
    sizes: Any,  # (lists,) int64
    factor: Any,  # logits are this times the score
    small: Any,  # those not searched may hold so many times what all are thought to hold
    enough: Any,  # how many are searched at least
    order: Any,  # (q, lists) int64, written to: the lists, the highest caps first
    counts: Any,  # (q,) int64, written to: how many of them to search
) -> None:
    """Lists whose records may be heavy. Cost q lists log(lists)."""
    q, lists = means.shape
    for i in range(q):
        order[i] = np.argsort(-caps[i])
        top = factor * caps[i, order[i, 0]]
        whole = 0.0
        for j in range(lists):
            logit = min(factor * means[i, j] + 0.5 * (factor * deviations[i, j]) ** 2, factor * caps[i, j])
            whole += sizes[j] * np.exp(logit - top)
        beyond, count = 0.0, lists
        while count > enough:
            which = order[i, count - 1]
            beyond += sizes[which] * np.exp(factor * caps[i, which] - top)
            if beyond > small * whole:
                break
            count -= 1
        counts[i] = count


@compiled
def _rounding(query: Any, words: Any, l2: Any) -> Any:
    """How far FAISS' scores by codes may be off: it rounds its tables to 8 bits, all parts of them alike."""
    parts, codes, width = words.shape
    widest, total = 0.0, 0.0
    for m in range(parts):
        low, high = np.inf, -np.inf
        for c in range(codes):
            entry = 0.0
            for t in range(width):
                one, other = np.float64(query[m * width + t]), np.float64(words[m, c, t])
                entry += (one - other) ** 2 if l2 else one * other
            low, high = min(low, entry), max(high, entry)
        widest, total = max(widest, high - low), total + high - low
    return (0.5 * parts + 1) * max(widest / 255, total / 65535)


@compiled
def _peak(query: Any, words: Any, origin: Any, parts: Any) -> Any:
    """The most that the error of a single part of a code may add to a product with the query."""
    count, _, width = words.shape
    most = 0.0
    for m in range(count):
        square = 0.0
        for t in range(width):
            square += (np.float64(query[m * width + t]) - np.float64(origin[m * width + t])) ** 2
        most = max(most, math.sqrt(square) * parts[m])
    return most


@compiled
def peaks(
    queries: Any,  # (q, d) float32
    means: Any,  # (lists, d) float32
    extents: Any,  # (lists, d) float32 the largest |k_j - m_j| in a list
    l2: Any,  # whether scores are squared distances, else products
    out: Any,  # (q, lists) float64, written to
) -> None:
    """The most that a single coordinate may move the score of a record from that of the mean. Cost q lists d."""
    (q, d), lists = queries.shape, len(means)
    for i in range(q):
        for j in range(lists):
            most = np.float32(0)
            for t in range(d):
                side = 2 * (queries[i, t] - means[j, t]) if l2 else queries[i, t]
                most = max(most, abs(side) * extents[j, t])
            out[i, j] = most


@compiled
def caps(
    queries: Any,  # (q, d) float32
    codes: Any,  # (q, c) float32 scores by codes, -inf = none
    scores: Any,  # (q, c) float64, -inf = none
    words: Any,  # (parts, 16, d / parts) float32 what codes stand for; parts = 0: unknown
    l2: Any,  # whether scores are squared distances, else products
    errors: Any,  # (levels,) float64 ‖k - k̂‖ of parts of the records, the last the largest
    log_shares: Any,  # (levels,) float64 log of the share of the records in each part
    usual: Any,  # root of the mean square of ‖k - k̂‖
    parts: Any,  # (parts,) float64 the largest error of each part of the codes
    origin: Any,  # (d,) float32 where keys lie about: 0 for products
    factor: Any,  # logits are this times the score
    certain: Any,  # deviations that no error exceeds
    visible: Any,  # deviations of an error from which on too few draws would show it
    found: Any,  # (5, q) float64, written to: last, cap, noise, half the log of the share hidden, edge
) -> None:
    """What records may score whose codes are not among the near. Cost q (c + d · 16 + levels)."""
    (q, c), d, levels = codes.shape, queries.shape[1], len(errors)
    largest, root = errors[-1], math.sqrt(d)
    for i in range(q):
        count, total, square, apart, last = 0.0, 0.0, 0.0, 0.0, np.inf
        for j in range(c):
            code = np.float64(codes[i, j])
            last = min(last, code)
            if code > -np.inf and scores[i, j] > -np.inf:
                error = scores[i, j] - code
                count, total, square, apart = count + 1, total + error, square + error * error, apart - 4 * code
        edge = last + (_rounding(queries[i], words, l2) if len(words) else 0.0)
        if l2:
            length = 2 * math.sqrt(max(-edge, 0.0))
            slope = math.sqrt(square / apart) if apart > 0 else 0.0
            sure = -(max(0.5 * length - largest, 0.0) ** 2)
            wide = max(slope / usual, 1 / root) * length
        else:
            length = 0.0
            for t in range(d):
                length += np.float64(queries[i, t]) ** 2
            length = math.sqrt(length)
            mean = total / max(count, 1.0)
            deviation = math.sqrt(max(square / max(count, 1.0) - mean * mean, 0.0))
            sure = edge + length * largest
            edge += max(mean, 0.0)
            wide = max(deviation / usual, length / root)
        if last == -np.inf:
            wide = 0.0
        noise = wide * usual
        # what codes leave unresolved in a few records may lie all in one part of them
        peak = _peak(queries[i], words, origin, parts) * (2 if l2 else 1)
        if largest > 0 and last > -np.inf:
            wide = max(wide, (peak + MORE * noise) / (certain * largest))
        top = -np.inf
        for level in range(levels):
            spread = factor * wide * errors[level]
            top = max(top, 2 * spread * spread + log_normal(2 * spread - visible) + log_shares[level])
        hidden = 0.0
        for level in range(levels):
            spread = factor * wide * errors[level]
            hidden += math.exp(2 * spread * spread + log_normal(2 * spread - visible) + log_shares[level] - top)
        found[0, i], found[2, i], found[4, i] = last, noise, edge
        found[1, i] = min(sure, edge + certain * wide * largest) if last > -np.inf else -np.inf
        found[3, i] = 0.5 * (top + math.log(hidden)) - (factor * noise) ** 2


@compiled
def log_sums(
    logits: Any,  # (q, w) float64, log-weights included; -inf = takes no part
    log_weights: Any,  # (q, w) float32 log of the inverse of a record's probability
    found: Any,  # (3, q) float64, written to: log Σ e^a; log Σ e^(2 a), and the largest a, of those drawn by chance
) -> None:
    """What was drawn adds up to. Cost q w."""
    q, w = logits.shape
    for i in range(q):
        top, largest = -np.inf, -np.inf
        for j in range(w):
            top = max(top, logits[i, j])
            if log_weights[i, j] > 0:
                largest = max(largest, logits[i, j])
        total, squares = 0.0, 0.0
        if top > -np.inf:
            for j in range(w):
                total += math.exp(logits[i, j] - top)
                if log_weights[i, j] > 0 and logits[i, j] > -np.inf:
                    squares += math.exp(2 * (logits[i, j] - largest))
        found[0, i], found[1, i], found[2, i] = top + np.log(total), 2 * largest + np.log(squares), largest
