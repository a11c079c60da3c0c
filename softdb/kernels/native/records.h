// Arguments of the kernels over single records: candidates, stored columns, sums. Pointers and sizes, which the caller
// checks. Kernels know nothing of Python.
#pragma once

#include <cstdint>

#include "arguments.h"

namespace softdb {

// Rows of numbers, `pitch` apart.
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
    const int64_t* addresses = nullptr;  // (segments,) where each begins
    const int64_t* starts = nullptr;     // (segments + 1,) position of its first record
    int64_t segments = 0;
    int64_t width = 0;  // numbers of a record; of classes how many there are
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

// The longest keys, and answers among whose k best they are put. Rows are filled up with zeros to whole vectors.
struct TakeIn {
    Table<const float> queries;          // (q, d)
    const int64_t* positions = nullptr;  // (m,) negative = takes no part
    Table<const float> keys;             // (m, d)
    const double* lengths = nullptr;     // (m,) |k|, descending
    Table<int64_t> matches;                // (q, k) positions, best first, ties by position, negative = none
    Table<float> scores;                 // (q, k)
};

struct Prepare {
    Table<const float> queries;  // (q, d)
    bool cosine = false;
    Table<float> out;  // (q, d), written to for the cosine: of length 1, or zeros
};

struct Score {
    Table<const float> queries;      // (q, d); of length 1 for the cosine
    Table<const int64_t> positions;  // (q, c), negative = none
    Stored keys;
    Metric metric = Metric::dot;
    Table<float> scores;     // (q, c), written to: -inf = none
    Table<double> precisely;  // the same in float64; one of the two is given
};

// The best of all records by scores in float32, and those that were found by scores in float64.
struct Scan {
    Table<const float> queries;  // (q, d); of length 1 for the cosine
    Stored keys;
    Metric metric = Metric::dot;
    const bool* keep = nullptr;  // (size,) over positions: which are compared
    int64_t low = 0, high = 0;   // positions
    Table<int64_t> matches;        // (q, c), written to: positions, best first, ties by position, then -1
    Table<float> scores;         // (q, c), written to; then -inf
};

struct Rescore {
    Table<const float> queries;      // (q, d)
    Table<const int64_t> positions;  // (q, c), -1 = none, at least k others
    const double* floor = nullptr;   // (q,) no record beyond the candidates scored more in float32; -inf: there is none
    Stored keys;
    Metric metric = Metric::dot;
    Table<int64_t> matches;       // (q, c), written to: positions, best first, ties by position; then -1
    Table<double> exact;        // (q, c), written to: their scores in float64
    int64_t k = 0;              // of them are wanted
    bool* unsure = nullptr;     // (q,), written to: whether rounding or a tie may have kept one of the k out
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

constexpr int64_t kSigns = 16;  // groups of candidates, of whose signed sums the shape of an error is taken

// Candidates of one query that stand for all records.
struct Terms {
    const int64_t* positions = nullptr;  // (k,) -1 = none
    const double* chances = nullptr;     // (k,) 1 - p, p the probability with which each was drawn
    int64_t count = 0;
    Stored values;
    const double* controls = nullptr;  // (k,) what each weight is lowered by, as a share of the answer; null: nothing
    const double* doubts = nullptr;    // (k,) shares of each in what too few draws may show
    const int32_t* own = nullptr;      // (k,) rows of `means`
    Table<const float> means;          // (lists, v) mean values
    uint64_t salt = 0;                 // of the random signs: parts that are merged need their own
};

// Sums over the terms of an answer's error: y = √(1 - p) (w (v - o) - h (m - o)) of each candidate, p its probability, w
// its share of the answer o, h what a control lowers that by, m the mean value of its list; and r = √(1 - p) (w - h).
struct Errors {
    double noise = 0, noises = 0, variance = 0, variances = 0;  // Σ r², Σ r⁴, Σ ‖y‖², Σ ‖y‖⁴
    double doubt = 0, apart = 0;   // Σ of the doubts, and of them times ‖v - o‖²
    double* first = nullptr;       // (v,) Σ r y
    double* drift = nullptr;       // (v,) Σ doubts (v - o)
    float* signed_sums = nullptr;  // (kSigns, v) Σ ±y of each group
    double* roots = nullptr;       // (kSigns,) Σ ±r
};

}  // namespace softdb
