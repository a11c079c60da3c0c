# Functions and classes bound by native/bind_*.cc. Arrays: NumPy, C order; columns are float32 or float16.
from typing import Any

from numpy import bool_, float32, float64, int32, int64, uint8, uint16, uint32
from numpy.typing import NDArray

signatures: str  # SHA-256 of this file when the kernels were built

def levels() -> list[str]: ...
def level() -> str: ...
def use(level: str) -> bool: ...

# native/bind_attention.cc

def exponentials(x: NDArray[float32], out: NDArray[float32]) -> None: ...

class Piece:
    def __init__(
        self,
        keys: NDArray[Any],  # (n, d)
        values: NDArray[Any] | None,  # (n, v)
        labels: NDArray[int32] | None,  # (n,), instead of values
        rows: NDArray[int64] | None,  # (high,) row of each record; None: record i is row i
        places: NDArray[int64] | None,  # (high,) column of the mask for each record
        mask: NDArray[bool_] | None,  # (q, …) True = takes part
        low: int,
        high: int,
    ) -> None: ...

class Attention:
    def __init__(
        self,
        queries: NDArray[float32],  # (q, d)
        metric: str,
        inverse_temperature: float,
        negligible: float,
        num_classes: int = 0,
        centre: NDArray[float32] | None = None,  # (d,) to subtract from keys, as already from queries
        scales: NDArray[float32] | None = None,  # (q,) factors of the scores
    ) -> None: ...
    def scratch(self, value_width: int) -> int: ...
    def forward(
        self,
        piece: Piece,
        output: NDArray[float64],  # (q, v) or (num_classes, q), added to
        top: NDArray[float32],  # (q,) largest score, updated
        total: NDArray[float64],  # (q,) added to
        scratch: NDArray[float32],
    ) -> None: ...
    def backward(
        self,
        piece: Piece,
        output_grad: NDArray[float32],  # (q, v) or (num_classes, q)
        offset: NDArray[float32],  # (q,)
        inverse_total: NDArray[float32],  # (q,)
        top: NDArray[float32],  # (q,)
        query_grad: NDArray[float64],  # (q, d), added to
        mass: NDArray[float64],  # (q,), added to
        along_scores: NDArray[float64] | None,  # (q,), added to
        key_grad: NDArray[float32] | None,  # (n, d), added to
        value_grad: NDArray[float32] | None,  # (n, v), added to
        scratch: NDArray[float32],
    ) -> None: ...

# native/bind_records.cc. Metrics are 0 (dot), 1 (cosine; queries have length 1) and 2 (l2). Position -1: no record.

SIGNS: int

class Column:
    def __init__(
        self,
        addresses: NDArray[int64],  # (segments,) address of each segment
        starts: NDArray[int64],  # (segments + 1,) position of the first record of each segment
        width: int,
        kind: int,  # 0 float32, 1 float16, 2 int32 labels
    ) -> None: ...

def take_in(
    queries: NDArray[float32],  # (q, d) padded with zeros to whole SIMD vectors
    positions: NDArray[int64],  # (m,) negative = excluded
    keys: NDArray[float32],  # (m, d) padded like the queries
    lengths: NDArray[float64],  # (m,) descending
    matches: NDArray[int64],  # (q, k), changed: best first, ties by position, negative = none
    scores: NDArray[float32],  # (q, k), changed
) -> bool: ...
def prepare(vectors: NDArray[float32], out: NDArray[float32]) -> None: ...
def rerank(
    queries: NDArray[float32],  # (q, d)
    positions: NDArray[int64],  # (q, c)
    keys: Column,
    metric: int,
    matches: NDArray[int64],  # (q, k), written to
    scores: NDArray[float32],  # (q, k), written to
) -> bool: ...
def score(
    queries: NDArray[float32],  # (q, d)
    positions: NDArray[int64],  # (q, c)
    keys: Column,
    metric: int,
    scores: NDArray[float32],  # (q, c), written to
) -> None: ...
def scan(
    queries: NDArray[float32],  # (q, d)
    panels: NDArray[float32],  # (p, 16 d) the first queries, transposed in panels of 16
    keys: Column,
    metric: int,
    keep: NDArray[bool_],  # (size,)
    low: int,
    high: int,
    matches: NDArray[int64],  # (q, c), written to
    scores: NDArray[float32],  # (q, c), written to
) -> bool: ...
def rescore(
    queries: NDArray[float32],  # (q, d)
    positions: NDArray[int64],  # (q, c)
    floor: NDArray[float64],  # (q,)
    keys: Column,
    metric: int,
    matches: NDArray[int64],  # (q, c), written to
    exact: NDArray[float64],  # (q, c), written to
    k: int,
    unsure: NDArray[bool_],  # (q,), written to
) -> None: ...

# `arguments` are the members of the structures in native/lists.h and native/records.h, in their order.

FIGURES: int  # number of rows of `figures`: the fields of `softdb.index.sampler.Figures`
SKEWED: float

def sums(*arguments: Any) -> None: ...
def spread(*arguments: Any) -> None: ...
def f_quantile(z: float, above: float, below: float) -> float: ...
def bars(
    figures: NDArray[float64],  # (FIGURES, q), rows of the bars are written
    sums: NDArray[float32],  # (q, SIGNS v)
    z: float,  # quantile of the normal distribution at the confidence
    doubt: float,  # log(1 / (1 - confidence))
) -> None: ...

class Draw:
    def __init__(self, *arguments: Any) -> None: ...
    def answers(self, *arguments: Any) -> None: ...
    def run(self) -> None: ...
    def help(self) -> None: ...  # called by other threads while `run` draws for a single query

# Inverted lists. int8 matrices and codes are interleaved as native/lists.h describes.

class Lists:
    def __init__(
        self,
        d: int,
        rotation: NDArray[uint8],  # (groups, …)
        turns: NDArray[float32],  # (parts · word,) scale of each row of the rotation, padded to groups of 16
        centroids: NDArray[uint8],  # (groups, …)
        scales: NDArray[float32],  # (lists,) padded to groups of 16, like the next two
        lengths: NDArray[float32],  # (lists,) term to subtract from the score of each list
        inverse_spreads: NDArray[float32],  # (lists,)
        starts: NDArray[int64],  # (lists + 1,) first block of each
        codes: NDArray[uint8],  # (blocks, 8 parts)
        factors: NDArray[uint16],  # (blocks, 16) float16
        offsets: NDArray[uint16],  # likewise of l2; else (0, 16)
        unit: float,
        words: NDArray[float32],  # (parts · word, 16)
        parts: int,
        origin: NDArray[float32],  # (d,) of l2; else (0,)
    ) -> None: ...

def search_lists(
    lists: Lists,
    queries: NDArray[float32],  # (q, d)
    allowed: NDArray[uint16],  # (blocks,)
    sizes: NDArray[float32],  # (lists,) padded: number of allowed records
    places: NDArray[uint32],  # (slots,)
    keys: Column | None,
    metric: int,
    gap: float,  # these five: see `softdb.index.rule.Rule`
    linear: float,
    square: float,
    least: float,
    less: float,
    nearest: int,
    kept: int,
    matches: NDArray[int64],  # (q, k), written to
    scores: NDArray[float32],  # (q, k), written to
) -> int: ...  # slots that were scanned; where not all queries have k, or a score is NaN: minus that, minus 1
def nearest_lists(
    keys: NDArray[float32],  # (n, d)
    numbers: NDArray[uint8],  # (groups, 16 · width) the centroids as `Matrix.interleaved` returns them
    scales: NDArray[float32],  # (16 · groups,)
    halves: NDArray[float32],  # (16 · groups,) |c|² / 2, infinite for padding
    nearest: NDArray[int64],  # (n,), written to
) -> None: ...
def encode(
    keys: NDArray[float32],  # (n, d) minus the origin
    centroids: NDArray[float32],  # (lists, d)
    turn: NDArray[float32],  # (groups, 16 · d) the transposed rotation in groups of 16 columns, padded with zeros
    turned: NDArray[float32],  # (lists, parts · word) rotated centroids
    own: NDArray[int64],  # (n,) the list of each
    words: NDArray[float32],  # (parts · word, 16)
    halves: NDArray[float32],  # (parts, 16) |w|² / 2
    peak: float,  # what the largest error of a part counts
    codes: NDArray[uint8],  # (n, parts / 2), written to
    squares: NDArray[float32],  # (n,), written to: |r|²
    factors: NDArray[float32],  # (n,), written to
    central: NDArray[float32],  # (n,), written to: <c, w>
    errors: NDArray[float32],  # (n,), written to: |r - w|, or more where one part has most of it
) -> None: ...

class Sketch:
    def __init__(
        self,
        starts: NDArray[int64],  # (lists + 1,) first block of each
        codes: NDArray[uint8],  # (blocks, 8 parts)
        gains: NDArray[uint8],  # (blocks, 16) factors
        errors: NDArray[uint8],  # (blocks, 16) in steps
        offsets: NDArray[uint16],  # (blocks, 16) float16 of l2; else (0, 16)
        unit: float,
        error_step: float,
        words: NDArray[float32],  # (parts · word, 16)
        parts: int,
        spreads: NDArray[float32],  # (lists,)
        gained: NDArray[float32],  # (lists,) the largest factor
        radii: NDArray[float32],  # (lists,) length of the longest residual
        most_errors: NDArray[float32],  # (lists,) the largest error, in steps
        rotation: NDArray[float32],  # (parts · word, d)
        centroids: NDArray[float32],  # (lists, d)
        lengths: NDArray[float32],  # (lists,) |c|²
        origin: NDArray[float32],  # (d,)
        l2: bool,
    ) -> None: ...
