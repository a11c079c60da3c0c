// Arguments of the kernels over single records: candidates, stored columns, sums. The caller has checked pointers and
// sizes. Kernels do not use Python.
#pragma once

#include <cstdint>

#include "arguments.h"

namespace softdb {

// An array of rows; `pitch` numbers from one row to the next.
template <class Number>
struct Table {
    Number* first = nullptr;
    int64_t rows = 0, width = 0, pitch = 0;
    inline __attribute__((always_inline)) Number* operator[](int64_t row) const { return first + row * pitch; }
};

// Type of a record's numbers: float32, float16, an int32 class, or unused.
enum class Kind { wide, half, label, none };

// A stored column, in segments.
struct Stored {
    const int64_t* addresses = nullptr;  // (segments,) address of each segment
    const int64_t* starts = nullptr;     // (segments + 1,) position of the first record of each segment
    int64_t segments = 0;
    int64_t width = 0;  // numbers of a record; for labels the number of classes
    Kind kind = Kind::wide;
};

struct Rerank {
    Table<const float> queries;      // (q, d); of length 1 for the cosine
    Table<const int64_t> positions;  // (q, c), negative = none
    Stored keys;
    Metric metric = Metric::dot;
    Table<int64_t> matches;  // (q, k), written to: positions, best first, ties by position, then -1
    Table<float> scores;   // (q, k), written to; then -inf
};

// The longest keys, and the k best of each query to merge them into. Rows are padded with zeros to whole vectors.
struct TakeIn {
    Table<const float> queries;          // (q, d)
    const int64_t* positions = nullptr;  // (m,) negative = excluded
    Table<const float> keys;             // (m, d)
    const double* lengths = nullptr;     // (m,) |k|, descending
    Table<int64_t> matches;                // (q, k) positions, best first, ties by position, negative = none
    Table<float> scores;                 // (q, k)
};

struct Score {
    Table<const float> queries;      // (q, d); of length 1 for the cosine
    Table<const int64_t> positions;  // (q, c), negative = none
    Stored keys;
    Metric metric = Metric::dot;
    Table<float> scores;  // (q, c), written to: -inf = none
};

// Arguments of `scan` (the best of all records by float32 scores) and `rescore` (their order by float64 scores).
struct Scan {
    Table<const float> queries;  // (q, d); of length 1 for the cosine
    Table<const float> panels;   // (p, 16 d) the first queries, transposed in panels of 16, the last one padded
    Stored keys;
    Metric metric = Metric::dot;
    const bool* keep = nullptr;  // (size,) over positions, true = compared
    int64_t low = 0, high = 0;   // first position; end
    Table<int64_t> matches;        // (q, c), written to: positions, best first, ties by position, then -1
    Table<float> scores;         // (q, c), written to; then -inf
};

struct Rescore {
    Table<const float> queries;      // (q, d)
    Table<const int64_t> positions;  // (q, c), -1 = none; at least k are not -1
    const double* floor = nullptr;   // (q,) largest possible float32 score of a record that is no candidate; -inf: no such record
    Stored keys;
    Metric metric = Metric::dot;
    Table<int64_t> matches;       // (q, c), written to: positions, best first, ties by position; then -1
    Table<double> exact;        // (q, c), written to: their scores in float64
    int64_t k = 0;              // number of records wanted
    bool* unsure = nullptr;     // (q,), written to: true if rounding or a tie may have excluded one of the k best
};

// Σ w v over candidates.
template <class Number>
struct Sums {
    Table<const Number> weights;     // (q, k)
    Table<const int64_t> positions;  // (q, k), -1 = none
    Stored values;
    Table<Number> output;       // (q, v), written to
    double* scratch = nullptr;  // (v,)
};

constexpr int64_t kSigns = 16;  // number of groups of candidates whose signed sums estimate the error's covariance

// The drawn candidates of one query.
struct Terms {
    const int64_t* positions = nullptr;  // (k,) -1 = none
    const double* chances = nullptr;     // (k,) 1 - p, p the probability of each candidate
    int64_t count = 0;
    Stored values;
    const double* controls = nullptr;  // (k,) control to subtract from each weight, relative to Ẑ; null: none
    const double* doubts = nullptr;    // (k,) term of each candidate in `hidden`
    const int32_t* own = nullptr;      // (k,) list of each candidate, a row of `means`
    Table<const float> means;          // (lists, v) mean values
    uint64_t salt = 0;                 // seed of random signs; parts that are merged need different salts
    float unit = 1;                    // about 1 / the largest distance |v - o|, a power of two: so no square overflows
};

// Sums over the error terms y = √(1 - p) (w (v - o) - h (m - o)) and r = √(1 - p) (w - h) of candidates. p: probability of
// the candidate, w: its share of the answer o, h: its control, m: mean value of its list.
struct Errors {
    double noise = 0, noises = 0, variance = 0, variances = 0;  // Σ r², Σ r⁴, Σ ‖y‖², Σ ‖y‖⁴
    double doubt = 0, apart = 0;   // Σ of the doubts; Σ of the doubts times ‖v - o‖²
    double* first = nullptr;       // (v,) Σ r y
    double* drift = nullptr;       // (v,) Σ doubts (v - o)
    float* signed_sums = nullptr;  // (kSigns, v) Σ ±y of each group
    double* roots = nullptr;       // (kSigns,) Σ ±r
};

}  // namespace softdb
