// What the kernels over single records are asked: candidates of an index, draws from its lists, its codes. Pointers and
// sizes, checked by whoever calls. They know nothing of Python.
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

// What a record's numbers are: float32, float16, an int32 class, or of no interest.
enum class Kind { wide, half, label, none };

// A stored column where it lies, in segments.
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
    Table<int64_t> found;  // (q, k), written to: positions, best first, ties by position, then -1
    Table<float> scores;   // (q, k), written to; then -inf
};

// The longest keys, and answers among whose k best they are put. Rows are filled up with zeros to whole vectors.
struct TakeIn {
    Table<const float> queries;          // (q, d)
    const int64_t* positions = nullptr;  // (m,) negative = takes no part
    Table<const float> keys;             // (m, d)
    const double* lengths = nullptr;     // (m,) |k|, descending
    Table<int64_t> found;                // (q, k) positions, best first, ties by position, negative = none
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
    Table<int64_t> found;        // (q, c), written to: positions, best first, ties by position, then -1
    Table<float> scores;         // (q, c), written to; then -inf
};

struct Settle {
    Table<const float> queries;      // (q, d)
    Table<const int64_t> positions;  // (q, c), -1 = none, at least k others
    const double* floor = nullptr;   // (q,) no record beyond the candidates scored more in float32; -inf: there is none
    Stored keys;
    Metric metric = Metric::dot;
    Table<int64_t> found;       // (q, c), written to: positions, best first, ties by position; then -1
    Table<double> exact;        // (q, c), written to: their scores in float64
    int64_t k = 0;              // of them are wanted
    bool* unsure = nullptr;     // (q,), written to: whether rounding or a tie may have kept one of the k out
};

// A softmax over candidates, of float32 or float64 logits.
template <class Number>
struct Pool {
    Table<const Number> logits;      // (q, k), log-weights included; -inf = takes no part
    Table<const int64_t> positions;  // (q, k), -1 = none
    Stored values;
    Table<Number> output;       // (q, v), written to
    Number* lse = nullptr;      // (q,), written to
    double* scratch = nullptr;  // (v,)
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

constexpr int64_t kSigns = 16;    // random sums that the shape of an error is taken from
constexpr int64_t kChunk = 256;   // candidates added at once, whose values stay in cache
constexpr int64_t kWidest = 16;   // lanes of the widest vector

// What an answer's error is made of: c = (1 - p) w² of each candidate, p its probability, w its share of the answer o.
template <class Number>
struct Spread {
    Table<const Number> logits;      // (q, k), log-weights included; -inf = takes no part
    Table<const float> logs;         // (q, k) log of the inverse of each candidate's probability
    Table<const int64_t> positions;  // (q, k), -1 = none
    Stored values;
    Table<const Number> output;   // (q, v) the answer
    const Number* lse = nullptr;  // (q,) its normaliser
    uint64_t salt = 0;            // of the random signs: parts that are merged need their own
    Table<Number> weights;        // (q, k), written to: shares of the answer
    Table<double> found;          // (3, q), written to: Σ c, Σ c², Σ c ‖v - o‖²
    Table<double> first;          // (q, v), written to: Σ c (v - o)
    Table<float> sums;            // (q, kSigns v), written to: Σ ±√c (v - o)
    Table<double> roots;          // (q, kSigns), written to: Σ ±√c
    double* centred = nullptr;    // (v,) scratch
    float* parts = nullptr;       // kChunk (v + kWidest + kSigns) scratch
};

// Among how many directions each error is spread, tr(C)² / tr(C²), C its covariance.
struct Directions {
    Table<const float> sums;           // (q, kSigns v)
    const double* variance = nullptr;  // (q,)
    double* out = nullptr;             // (q,), written to
};

// The lists of an index as queries see them, in logits.
struct Propose {
    const int64_t* found = nullptr;  // (q,) how many records are near, and looked at one by one
    Table<const double> near;        // (5, q) of the others in the lists searched, as `Caps` has it: the last of the near
                                     // by its code (-inf: there are no others), cap, deviation from codes, share
                                     // hidden, edge
    Table<const double> means;       // (q, lists) mean of the logits in a list
    Table<const double> deviations;  // (q, lists)
    Table<const double> excess;      // (q, lists) how many times as far as others the farthest record may lie
    const int64_t* sizes = nullptr;  // (lists,)
    Table<const bool> searched;      // (q, lists)
    double visible = 0;              // deviations from which on too few draws would show a record
    double least = 0;                // a record matters by its weight: NaN; or by its chance to reach this logit
    Table<double> caps;    // (q, lists) the largest logit that a record may have; lowered where the list was searched
    Table<double> logits;  // (q, lists), written to: log of how much a record of each list matters
    Table<double> hiding;  // (q, lists), written to: half the log of the mean square of the weights not shown
    Table<double> left;    // (q, lists), written to: about how many of it are not near
    double* above = nullptr;  // (lists,) scratch
};

// The rows of each list by their random numbers.
struct Frame {
    const int64_t* rows = nullptr;      // (n,)
    const uint32_t* chances = nullptr;  // (n,) ascending within a list
    const int64_t* starts = nullptr;    // (lists + 1,)
};

struct Draw {
    Table<const int64_t> near;   // (q, c) rows that are taken already, negative = none
    Table<const double> logits;  // (q, lists) log of how much a record of each list matters
    Table<const double> caps;    // (q, lists) the largest logit that one of its records may have
    Table<const double> hiding;  // (q, lists) half the log of the mean square of the weights that draws may not show
    Table<const double> left;    // (q, lists) about how many of a list are not near
    Frame frame;
    double budget = 0;               // about how many to draw
    double plain = 0;                // share of the budget that goes to all alike
    double capped = 0;               // and that goes by the caps
    double least = 0;                // a record that may not reach this logit adds nothing; NaN: all do, by their weight
    const uint64_t* seeds = nullptr;  // (q,)
    Table<int64_t> rows;             // (q, w), written to
    Table<float> logs;               // (q, w), written to: log of the inverse of a row's probability
    int64_t* counts = nullptr;       // (q,), written to; above w where there was no room
    Table<double> bounds;            // (3, q), written to: log of the largest term that a record not drawn may be; log
                                     // of Σ y² / p over what draws may not show, and over all
    int64_t* table = nullptr;        // (table_length,) scratch
    int64_t table_length = 0;        // a power of two, at least twice c
    double* shares = nullptr;        // (lists,) scratch
};

struct Subsample {
    Table<const int64_t> rows;        // (q, w)
    Table<const double> logits;       // (q, w) how much each matters, its log-weight included; -inf = not at all
    const double* scales = nullptr;   // (w,) at least 1: by how much more the values of some matter
    Table<const float> logs;          // (q, w) log of the inverse of its probability
    double budget = 0;                // about how many to keep
    const uint64_t* seeds = nullptr;  // (q,)
    Table<int64_t> kept;              // (q, k), written to: places of those that are kept
    Table<float> kept_logs;           // (q, k), written to
    int64_t* counts = nullptr;        // (q,), written to; above k where there was no room
    double* largest = nullptr;  // (q,), written to: log of the term of each that was not sure to be kept; -inf: all were
    double* shares = nullptr;   // (2 w,) scratch
};

struct LogSums {
    Table<const double> logits;      // (q, w), log-weights included; -inf = takes no part
    Table<const float> log_weights;  // (q, w) log of the inverse of a record's probability
    Table<double> found;  // (3, q), written to: log Σ e^a; log Σ e^(2 a), and the largest a, of those drawn by chance
};

struct ToSearch {
    Table<const double> means;       // (q, lists) mean score of a list
    Table<const double> deviations;  // (q, lists)
    Table<const double> caps;        // (q, lists) the largest score that one of its records may have
    Table<const int64_t> order;      // (q, lists) the lists, the highest caps first
    const int64_t* sizes = nullptr;  // (lists,)
    double factor = 0;               // logits are this times the score
    double small = 0;                // those not searched may hold so many times what all are thought to hold
    int64_t enough = 0;              // how many are searched at least
    int64_t* counts = nullptr;       // (q,), written to: how many of them to search
};

struct Peaks {
    Table<const float> queries;  // (q, d)
    Table<const float> means;    // (lists, d)
    Table<const float> extents;  // (lists, d) the largest |k_j - m_j| in a list
    bool l2 = false;             // whether scores are squared distances, else products
    Table<double> out;           // (q, lists), written to
};

struct Caps {
    Table<const float> queries;  // (q, d)
    Table<const float> turned;   // (q, parts · word) as the parts of codes see them, from where keys lie about; or empty
    Table<const float> codes;    // (q, c) scores by codes, -inf = none
    Table<const double> scores;  // (q, at least c), -inf = none
    const double* rounding = nullptr;  // (q,) how far rounding may put a score by codes off
    bool l2 = false;                     // whether scores are squared distances, else products
    const double* errors = nullptr;      // (levels,) ‖k - k̂‖ of parts of the records, the last the largest
    const double* log_shares = nullptr;  // (levels,) log of the share of the records in each part
    int64_t levels = 0;
    double usual = 0;               // root of the mean square of ‖k - k̂‖
    const double* part_errors = nullptr;  // (parts,) the largest error of each part of the codes
    int64_t parts = 0;
    double factor = 0;              // logits are this times the score
    double certain = 0;             // deviations that no error exceeds
    double visible = 0;             // deviations of an error from which on too few draws would show it
    Table<double> found;  // (5, q), written to: last, cap, noise, half the log of the share hidden, edge
};

constexpr double kMore = 3;  // deviations that the other parts of a code may add to one that is extreme

}  // namespace softdb
