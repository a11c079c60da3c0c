"""Error estimates of answers from draws: sums that can be merged over parts of the records, and the error bar."""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from softdb.index.contract import Floats, Numbers
from softdb.index.sampler import DrawnAnswer, Figures
from softdb.kernels import native

LARGEST = {"unseen", "thinned", "usual", "drift", "reach"}  # merging keeps the largest of these, sums of the others


class ErrorEstimate(NamedTuple):
    """Sums over the error terms y and r of an answer from draws. For a candidate with weight w, probability p, value v,

        y = √(1 - p) (w (v - o) - h (m - o)),   r = √(1 - p) (w - h)

    where o is the answer, h the control (0 without a correction) and m the mean value of the candidate's list. The sums
    of parts that share no record can be merged (`joined`).
    """

    output: Numbers  # (q, v) the answer
    lse: Numbers  # (q,)
    noise: Numbers  # (q,) Σ r²: the variance of Ẑ / Z
    noises: Numbers  # (q,) Σ r⁴
    variance: Numbers  # (q,) Σ ‖y‖²
    variances: Numbers  # (q,) Σ ‖y‖⁴
    first: Numbers  # (q, v) Σ r y
    signed: Floats  # (q, SIGNS, v) Σ ±y
    roots: Numbers  # (q, SIGNS) Σ ±r
    unseen: Numbers  # (q,) bound on the term w / p of any undrawn record
    hidden: Numbers  # (q,) Σ w² / p over records with code errors so rare that no draw may show them
    missed: Numbers  # (q,) expected Σ w of the records in `hidden`
    alone: Numbers  # (q,) expected Σ w² of the records in `hidden`
    thinned: Numbers  # (q,) the largest term of a record that thinning may drop; 0 if there is none
    usual: Numbers  # (q,) root mean square distance ‖v - o‖ of a value from the answer, weighted as in `hidden`
    drift: Numbers  # (q,) length of the mean of v - o, weighted as in `hidden`
    reach: Numbers  # (q,) largest distance of a value from the answer

    @classmethod
    def of(cls, figures: Figures, answer: DrawnAnswer) -> ErrorEstimate:
        """Return the error estimate from the sums that the kernel computed."""
        columns = figures._asdict() | answer._asdict()
        return cls(*(columns[name] for name in cls._fields))


class Bars(NamedTuple):
    """Errors that an answer from draws may have, compared with the answer over all records."""

    bar: Numbers  # (q,) quantile of the output's error ‖ô - o‖
    stderr: Numbers  # (q,)
    lse_bar: Numbers  # (q,) quantile of the normaliser's error |Ẑ / Z - 1|
    lse_stderr: Numbers  # (q,)

    @classmethod
    def of(cls, figures: Figures) -> Bars:
        """Return the errors that the kernel computed."""
        return cls(figures.bar, figures.stderr, figures.lse_bar, figures.lse_stderr)


def sure(output: Numbers, lse: Numbers) -> ErrorEstimate:
    """Return the error estimate of an exact answer, in which all sums are 0."""
    (q, v), signs = output.shape, native().SIGNS
    none, signed = np.zeros(q), np.zeros((q, signs, v), np.float32)
    no_sums = np.zeros((q, v)), signed, np.zeros((q, signs))
    return ErrorEstimate(output, lse, none, none, none, none, *no_sums, none, none, none, none, none, none, none, none)


def joined(parts: Sequence[ErrorEstimate]) -> ErrorEstimate:
    """Merge the error estimates of parts that share no record. Associative and commutative up to rounding.

    o is the merged answer. With z = Z_part / Z and s = o_part - o, r of a part becomes z r and y becomes z (y + r s).
    So Σ ‖y‖² becomes z² (Σ ‖y‖² + 2 s·Σ r y + ‖s‖² Σ r²), and so on; Σ ‖y‖⁴ is scaled by the square of its growth.
    """
    lses = np.stack([part.lse for part in parts])  # (parts, q)
    top = np.where(np.isneginf(lses.max(0)), 0, lses.max(0))
    with np.errstate(divide="ignore"):
        lse = top + np.log(np.exp(lses - top).sum(0))
    shares = np.exp(lses - np.where(np.isneginf(lse), 0, lse))  # (parts, q)
    output = sum(share[:, None] * part.output for share, part in zip(shares, parts, strict=True))
    moved = [_recentre(part, share, part.output - output) for share, part in zip(shares, parts, strict=True)]
    columns = zip(ErrorEstimate._fields[2:], zip(*moved, strict=True), strict=True)
    merged = [(np.max if name in LARGEST else np.sum)(each, axis=0) for name, each in columns]
    return ErrorEstimate(output, lse, *merged)


def parts_of_error(parts: Sequence[ErrorEstimate], union: ErrorEstimate, pools: bool) -> Numbers:  # (parts, q)
    """Return the contribution of each part to the squared error of the merged output, or of Z relative to Z."""
    shares = [np.exp(part.lse - np.where(np.isneginf(union.lse), 0, union.lse)) for part in parts]
    errors = [_variance(part, part.output - union.output) if pools else part.noise for part in parts]
    return np.stack([share**2 * error for share, error in zip(shares, errors, strict=True)])


def _variance(part: ErrorEstimate, shift: Numbers) -> Numbers:  # (q, v)
    """Return Σ ‖y‖² of a part relative to the merged answer o, where `shift` = o_part - o."""
    along, far = np.einsum("qv,qv->q", shift, part.first), np.einsum("qv,qv->q", shift, shift)
    variance: Numbers = np.maximum(part.variance + 2 * along + far * part.noise, 0)
    return variance


def _recentre(part: ErrorEstimate, share: Numbers, shift: Numbers) -> tuple[Any, ...]:  # (q,), (q, v)
    """Shift and scale the sums of one part, so that they refer to the merged answer."""
    square = share**2
    far = np.einsum("qv,qv->q", shift, shift)
    signed = share[:, None, None].astype(np.float32) * part.signed
    signed += (share[:, None, None] * part.roots[:, :, None] * shift[:, None, :]).astype(np.float32)
    least, lesser = np.maximum(share, 1e-300), np.maximum(square, 1e-300)  # not 0, so that infinite sums stay infinite
    scaled = (
        (least, part.unseen),
        (lesser, part.hidden),
        (least, part.missed),
        (lesser, part.alone),
        (share, part.thinned),
    )
    variance = _variance(part, shift)
    grown = np.divide(variance, part.variance, out=np.ones_like(variance), where=part.variance > 0)
    return (
        square * part.noise, square**2 * part.noises, square * variance, square**2 * grown**2 * part.variances,
        square[:, None] * (part.first + shift * part.noise[:, None]), signed, share[:, None] * part.roots,
        *(np.multiply(scale, column, out=np.zeros_like(column), where=column != 0) for scale, column in scaled),
        *(np.where(share > 0, length + np.sqrt(far), 0) for length in (part.usual, part.drift, part.reach)),
    )  # fmt: skip


def bars(spread: ErrorEstimate, confidence: float) -> Bars:
    """Return standard errors and error bars; docs/error-bars.md derives them.

    The error that draws show is √F stderr, where F is the quantile of an F distribution with ν and m degrees of
    freedom. ‖ô - o‖² is distributed as Σ λ χ², λ the eigenvalues of the error's covariance C = Σ y yᵀ. This is about
    stderr² χ²_ν / ν with ν = tr(C)² / tr(C²) (Satterthwaite 1946): one direction gives 1.96 stderr, many give 1.1.
    tr(C²) is Σ ‖y‖⁴ plus, for pairs of draws, the mean of (x·x')² over x = Σ ±y of groups with random signs
    (Hutchinson 1989). C is estimated from m = (Σ ‖y‖²)² / Σ ‖y‖⁴ draws.

    For the error that draws do not show, L = log(1 / (1 - confidence)). With that confidence the weights of undrawn
    records sum to at most √(2 L Σ w² / p) (Bernstein's inequality for the lower side of a sum of positive terms) and to
    at most L times the largest term; by their codes they sum to about `missed`. Undrawn values are about `usual`, and
    at most `reach`, away from the answer. Thinned records add L / 3 times the largest of their terms.
    """
    figures = np.zeros((native().FIGURES, len(spread.lse)))
    for row, name in enumerate(Figures._fields):
        figures[row] = getattr(spread, name, 0.0)
    signed = np.ascontiguousarray(spread.signed.reshape(len(spread.lse), -1))
    native().bars(figures, signed, normal_quantile(confidence), math.log(1 / (1 - confidence)))
    return Bars.of(Figures(*figures))


@functools.lru_cache(maxsize=16)
def normal_quantile(confidence: float) -> float:
    """Return the quantile of the standard normal distribution at `confidence`."""
    return statistics.NormalDist().inv_cdf(confidence)


def f_quantile(confidence: float, above: float, below: float) -> float:
    """Return a quantile of the F distribution with `above` and `below` degrees of freedom, right to a tenth."""
    quantile: float = native().f_quantile(normal_quantile(confidence), above, below)
    return quantile
