// Inverted lists of 4-bit codes: a whole search, and a scan of lists that are given. lists.cc has the equations.
#pragma once

#include "records.h"

namespace softdb {

using HalfBits = uint16_t;  // of a float16

// A matrix of int8, with 128 added, and a scale a row. Rows of 16 stand together, their numbers (width / 4, 16, 4).
struct ByteMatrix {
    const uint8_t* numbers = nullptr;
    const float* scales = nullptr;  // (rows,)
    int64_t rows = 0, width = 0;    // multiples of 16 and of 4
};

// An index. A record has a slot: of its block of 16, one list after the other; the last block of a list may have spare
// ones.
struct Lists {
    ByteMatrix rotation, centroids;          // (parts · word, d), (lists, d); for l2 centroids are doubled
    const float* lengths = nullptr;          // (rows,) what a list's score is lowered by: |c|² for l2, else 0
    const float* inverse_spreads = nullptr;  // (rows,) 1 / root of the mean square of the residuals
    const int64_t* starts = nullptr;         // (lists + 1,) first block of each
    int64_t count = 0;                       // lists
    const uint8_t* codes = nullptr;          // (blocks, parts / 2, 16): byte 2 i of record i, 2 i + 1 of record 8 + i
    const HalfBits* factors = nullptr;       // (blocks, 16)
    const HalfBits* offsets = nullptr;       // (blocks, 16) in units of `unit`, for l2; else null
    float unit = 0;
    const float* words = nullptr;   // (parts, word, 16)
    int64_t parts = 0, word = 0;    // a multiple of 8; numbers of each
    const float* origin = nullptr;  // (d,) that keys are seen from, for l2; else null
};

// Which lists a query visits, besides its best: those where a g + b z + c z² exceeds `least` + `less` log min(1, 2 s),
// s the share of the records in its first lists that are allowed.
struct ListRule {
    float gap = 0, linear = 0, square = 0, least = 0, less = 0;
};

struct ListSearch {
    Lists lists;
    Table<const float> queries;         // (q, d) prepared
    const uint16_t* allowed = nullptr;  // (blocks,) a bit a slot
    const float* sizes = nullptr;       // (rows,) records of each list that are allowed
    const uint32_t* places = nullptr;   // (slots,) position or row of each
    Stored keys;                        // of kind none: the best by codes are returned, with their estimates
    Metric metric = Metric::dot;
    ListRule rule;
    int64_t nearest = 0;         // the threshold of lists is so many's estimate
    int64_t kept = 0;            // records by their codes, which are scored exactly
    Table<int64_t> matches;        // (q, k), written to: best first, ties by place, then -1
    Table<float> scores;         // (q, k), written to; then -inf
    int64_t* scanned = nullptr;  // slots that were looked at, added to
};

// Records whose words are looked for.
struct Encode {
    Table<const float> residuals;    // (n, parts · word) turned
    Table<const float> centroids;    // (lists, parts · word) turned
    const int64_t* own = nullptr;    // (n,) the list of each
    const float* squares = nullptr;  // (n,) |r|²
    const float* words = nullptr;    // (parts, word, 16)
    const float* halves = nullptr;   // (parts, 16) |w|² / 2
    int64_t parts = 0, word = 0;
    float peak = 0;           // what the largest error of a part counts: √d / kPeak
    Table<uint8_t> codes;     // (n, parts / 2), written to
    float* factors = nullptr;  // (n,), written to
    float* central = nullptr;  // (n,), written to: <c, w>
    float* errors = nullptr;   // (n,), written to: |r - w|, or more where one part has most of it
};

// Threads that share the steps of one draw: the step, its next part and their number; and how many are done.
struct Crew {
    int64_t ticket = 0, done = 0;  // 0 before the first step, -1 after the last
};

constexpr int64_t kMostThreads = 64;

// Records drawn by a scan of all codes, each by its own weight: draw.cc has the equations. Rows of `lists` are lists.
struct Draw {
    Lists lists;                        // of coarser codes; of matrices and factors there are none
    const uint8_t* gains = nullptr;     // (blocks, 16) factors, in steps of kGain
    const uint8_t* errors = nullptr;    // (blocks, 16) |k - k̂| in steps; kSetApart: set apart
    const float* gained = nullptr;      // (lists,) the largest factor
    const float* radii = nullptr;       // (lists,) length of the longest residual
    const float* most_errors = nullptr;  // (lists,) the largest error, in steps, of those that are not set apart
    const float* spreads = nullptr;     // (lists,) root of the mean square of the residuals
    float error_step = 0, largest = 0;  // the largest of those that are not set apart, in keys' own measure
    Table<const float> queries;         // (q, d) prepared
    Table<const float> rotation;        // (parts · word, d)
    Table<const float> centroids;       // (lists, d)
    const float* lengths = nullptr;     // (lists,) |c|², for l2
    const uint16_t* allowed = nullptr;  // (blocks,) a bit a slot
    const float* sizes = nullptr;       // (lists,) slots of each that are allowed
    const uint32_t* places = nullptr;   // (slots,) position of each
    const int64_t* apart = nullptr;     // (aparts,) slots with an infinite error: scored for every query
    const float* scales = nullptr;      // (aparts,) how much more their values count
    int64_t aparts = 0;
    Stored keys;
    Metric metric = Metric::dot;
    double factor = 0;                // logits are this times the score
    double least = 0;                 // NaN; or records count that reach this score, and are drawn by the chance of it
    int64_t budget = 0;               // how many to draw
    double points = 0;                // for samples, of which about so many are wanted; 0: no
    int64_t first_query = 0;          // number of the first query, so that equal ones have other samples
    double visible = 0;               // deviations of an error from which on too few draws would show it
    bool controls = false;            // whether estimates of all records are summed, to correct the draws by
    const uint64_t* seeds = nullptr;  // (d,) odd numbers, by which a query's numbers make its seed
    Table<int64_t> positions;         // (q, w), written to, then -1
    Table<double> scores;             // (q, w), written to, then -inf
    Table<double> chances;            // (q, w), written to: the probability of each, 1 for none
    Table<double> controlled;         // (q, w), written to: chances that codes tell, for counts; (q, 0) else
    Table<double> bounds;             // (figures, q), written to
    // of an answer, not of counts
    Stored values;
    Table<const float> means;         // (lists, v) mean values
    const double* centre = nullptr;   // (v,) from which no value is farther than
    double value_radius = 0;
    uint64_t salt = 0;                // of random signs
    double z = 0, doubt = 0;          // as `Bars`
    int64_t fewest = 0;               // draws below which nothing is known of the others,
    double slight = 0;                // unless none of them can be more of Ẑ
    Table<double> output;             // (q, v), written to
    Table<double> moved;              // (q, v), written to: what corrections add to Σ w v / p
    Table<double> first;              // (q, v), written to: Σ r y, as `Errors`
    Table<float> sums;                // (q, kSigns v), written to: Σ ±y
    Table<double> roots;              // (q, kSigns), written to: Σ ±r
    Table<double> weights;            // (q, w), written to: shares of the answer, descending, with all that is of records
    int64_t threads = 1;              // that share the steps of the only query
    Crew* crew = nullptr;             // then
    char* scratch = nullptr;
};

// Figures of a drawn answer. Weights and terms are relative to Ẑ, of counts to 1 record.
enum class Figure : int64_t {
    base,                            // log of the unit of the correction and of `moved`
    drawn,                           // number of records
    correction,                      // which Ẑ has beyond Σ w / p
    unseen, hidden, missed, alone,   // the largest w / p of a record not drawn; Σ w² / p, Σ w, Σ w² of errors not shown
    thinned,                         // the largest term of a record set apart that was left to chance
    expected,                        // variance as codes tell it
    lse, noise, noises, variance, variances,  // log Ẑ, Σ r², Σ r⁴, Σ ‖y‖², Σ ‖y‖⁴
    usual, drift, reach,             // of values: ‖v - o‖ by the shares in `hidden`, the length of their mean, the most
    bar, lse_bar, blind,             // quantiles of ‖ô - o‖ and |Ẑ / Z - 1|; how much of that is for what was not drawn
    count,
};

// Figures of answers of which the bars are wanted.
struct Bars {
    Table<double> figures;   // (figures, q), the bars written to
    Table<const float> sums;  // (q, kSigns v) Σ ±y
    double z = 0, doubt = 0;  // quantile of the normal at the confidence; log of the inverse of the rest
};

constexpr double kSkewed = 0.65;  // squared weights are skewed: so much of their effective number tells of the error

constexpr float kGain = 4.0f / 255;  // of factors in bytes
constexpr int kSetApart = 255;

}  // namespace softdb
