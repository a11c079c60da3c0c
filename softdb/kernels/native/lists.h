// Arguments of searches and draws in inverted lists of 4-bit codes. Equations are in lists.cc and draw.cc.
#pragma once

#include "records.h"

namespace softdb {

using HalfBits = uint16_t;  // the bits of a float16

// A matrix of int8 with 128 added, and a scale for each row. 16 rows form a group in the order (width / 4, 16, 4).
struct ByteMatrix {
    const uint8_t* numbers = nullptr;
    const float* scales = nullptr;  // (rows,)
    int64_t rows = 0, width = 0;    // multiples of 16 and of 4
};

// An index. Each record has a slot in a block of 16 slots. Blocks are sorted by list; the last block of a list may have
// empty slots.
struct Lists {
    ByteMatrix rotation, centroids;          // (parts · word, d), (lists, d); for l2 centroids are doubled
    const float* lengths = nullptr;          // (rows,) term to subtract from each list's score: |c|² for l2, else 0
    const float* inverse_spreads = nullptr;  // (rows,) 1 / root mean square of the residuals in each list
    const int64_t* starts = nullptr;         // (lists + 1,) first block of each list
    int64_t count = 0;                       // number of lists
    const uint8_t* codes = nullptr;          // (blocks, parts / 2, 16): byte 2 i of record i, 2 i + 1 of record 8 + i
    const HalfBits* factors = nullptr;       // (blocks, 16)
    const HalfBits* offsets = nullptr;       // (blocks, 16) in units of `unit`, for l2; else null
    float unit = 0;
    const float* words = nullptr;   // (parts, word, 16)
    int64_t parts = 0, word = 0;    // a multiple of 8; numbers of each
    const float* origin = nullptr;  // (d,) subtracted from keys, for l2; else null
};

// The rule for the lists that a query scans after its first ones: a g + b z + c z² > `least` + `less` log min(1, 2 s),
// where s is the allowed share of the records in its first lists.
struct ListRule {
    float gap = 0, linear = 0, square = 0, least = 0, less = 0;
};

struct ListSearch {
    Lists lists;
    Table<const float> queries;         // (q, d) prepared
    const uint16_t* allowed = nullptr;  // (blocks,) one bit for each slot
    const float* sizes = nullptr;       // (rows,) number of allowed records in each list
    const uint32_t* places = nullptr;   // (slots,) position or row of the record in each slot
    Stored keys;                        // kind none: rank by codes and return estimated scores
    Metric metric = Metric::dot;
    ListRule rule;
    int64_t nearest = 0;         // k of the threshold t
    int64_t kept = 0;            // number of candidates that are scored exactly
    Table<int64_t> matches;        // (q, k), written to: best first, ties by place, then -1
    Table<float> scores;         // (q, k), written to; then -inf
    int64_t* scanned = nullptr;  // number of slots scanned, added to
};

// Keys to assign to the nearest of the centroids.
struct NearestLists {
    Table<const float> keys;         // (n, d)
    ByteMatrix centroids;
    const float* halves = nullptr;   // (rows,) |c|² / 2; infinite for a row of padding
    int64_t* nearest = nullptr;      // (n,), written to
};

// Records to encode.
struct Encode {
    Table<const float> keys;         // (n, d) minus the origin
    Table<const float> centroids;    // (lists, d)
    Table<const float> turn;         // (groups, 16 d) Rᵀ in groups of 16 columns, padded with zeros
    Table<const float> turned;       // (lists, parts · word) rotated centroids
    const int64_t* own = nullptr;    // (n,) list of each record
    const float* words = nullptr;    // (parts, word, 16)
    const float* halves = nullptr;   // (parts, 16) |w|² / 2
    int64_t parts = 0, word = 0;
    float peak = 0;           // factor on the largest error of a part: √d / PEAK (quantizer.py)
    Table<uint8_t> codes;     // (n, parts / 2), written to
    float* squares = nullptr;  // (n,), written to: |r|²
    float* factors = nullptr;  // (n,), written to
    float* central = nullptr;  // (n,), written to: <c, w>
    float* errors = nullptr;   // (n,), written to: |r - w|, or more if one part has most of the error
};

// State of the threads that share the steps of one draw: the step, its next part, the number of parts, parts done.
struct Crew {
    int64_t ticket = 0, done = 0;  // 0 before the first step, -1 after the last
};

constexpr int64_t kMostThreads = 64;

// Arguments of a draw of records in a scan of codes (equations in draw.cc).
struct Draw {
    Lists lists;                        // the coarse codes; matrices and factors are not set
    const uint8_t* gains = nullptr;     // (blocks, 16) factors, in steps of kGain
    const uint8_t* errors = nullptr;    // (blocks, 16) |k - k̂| in steps of `error_step`; kSetApart: set apart
    const float* gained = nullptr;      // (lists,) the largest factor in each list
    const float* radii = nullptr;       // (lists,) length of the longest residual in each list
    const float* most_errors = nullptr;  // (lists,) the largest error in steps, without records set apart
    const float* spreads = nullptr;     // (lists,) root of the mean square of the residuals
    float error_step = 0, largest = 0;  // distance of one step; largest error as a distance, without records set apart
    Table<const float> queries;         // (q, d) prepared
    Table<const float> rotation;        // (parts · word, d)
    Table<const float> centroids;       // (lists, d)
    const float* lengths = nullptr;     // (lists,) |c|², for l2
    const uint16_t* allowed = nullptr;  // (blocks,) one bit for each slot
    const float* sizes = nullptr;       // (lists,) number of allowed slots in each list
    const uint32_t* places = nullptr;   // (slots,) position of the record in each slot
    const int64_t* apart = nullptr;     // (aparts,) slots of the records set apart, which are scored for every query
    const float* scales = nullptr;      // (aparts,) distance of each value from the mean in units of the radius, at least 1
    int64_t aparts = 0;
    Stored keys;
    Metric metric = Metric::dot;
    const double* factors = nullptr;  // (q,) logit / score
    double least = 0;                 // NaN: draw by weight; else count records with at least this score
    int64_t budget = 0;               // number of records to draw
    double points = 0;                // for samples: expected number of points; 0: no samples
    int64_t first_query = 0;          // number of the first query, so that equal queries get different samples
    double visible = 0;               // draws may show no error of more deviations than this
    bool controls = false;            // true: correct the answer by control variates
    const uint64_t* seeds = nullptr;  // (d,) odd factors of the hash that turns a query into its seed
    Table<int64_t> positions;         // (q, w), written to, then -1
    Table<double> scores;             // (q, w), written to, then -inf
    Table<double> chances;            // (q, w), written to: probability of each record, 1 for none
    Table<double> controlled;         // for counts (q, w), written to: probability by code to count; else (q, 0)
    Table<double> bounds;             // (figures, q), written to
    // the following are for answers, not for counts
    Stored values;
    Table<const float> means;         // (lists, v) mean values
    const double* centre = nullptr;   // (v,) values that are not set apart are at most `value_radius` away
    double value_radius = 0;
    uint64_t salt = 0;                // seed of random signs
    double z = 0, doubt = 0;          // as `Bars`
    int64_t fewest = 0;               // with fewer draws the error has no bound,
    double slight = 0;                // unless no undrawn record can be a larger share of Ẑ
    int64_t shown = 0;                // number of records to sort by weight
    Table<double> output;             // (q, v), written to
    Table<double> moved;              // (q, v), written to: term that corrections add to Σ w v / p
    Table<double> first;              // (q, v), written to: Σ r y, as `Errors`
    Table<float> sums;                // (q, kSigns v), written to: Σ ±y
    Table<double> roots;              // (q, kSigns), written to: Σ ±r
    Table<double> weights;            // (q, w), written to: shares of the answer, the `shown` largest first; so all (q, w) arrays
    int64_t threads = 1;              // number of threads that share the steps of a single query
    Crew* crew = nullptr;             // state of these threads; null for one thread
    char* scratch = nullptr;
};

// Statistics of an answer from draws. Weights and terms are relative to Ẑ; in counts a record weighs 1.
enum class Figure : int64_t {
    base,                            // log of the unit of the correction and of `moved`
    drawn,                           // number of records
    correction,                      // term that controls add to Σ w / p
    unseen, hidden, missed, alone,   // largest w / p of an undrawn record; Σ w² / p, Σ w, Σ w² of errors not shown
    thinned,                         // the largest term of a record that thinning may drop
    expected,                        // variance that the codes predict
    lse, noise, noises, variance, variances,  // log Ẑ, Σ r², Σ r⁴, Σ ‖y‖², Σ ‖y‖⁴
    usual, drift, reach,             // of v - o: rms length and length of the mean, weighted as in `hidden`; the largest length
    length,                          // of the answer
    entropy,                         // mean of -log weight over the draws
    scanned,                         // share of the codes that were read
    error, lse_error,                // standard errors √Σ ‖y‖², √Σ r²
    bar, lse_bar,                    // quantiles of ‖ô - o‖ and |Ẑ / Z - 1|
    count,
};

// Arguments of `bars`, which computes error bars.
struct Bars {
    Table<double> figures;   // (figures, q), rows of the bars are written
    Table<const float> sums;  // (q, kSigns v) Σ ±y
    double z = 0, doubt = 0;  // quantile of the normal distribution at the confidence; log(1 / (1 - confidence))
};

constexpr double kSkewed = 0.65;  // usable share of the effective number of squared weights, which are skewed

constexpr float kGain = 4.0f / 255;  // one step of a factor in a byte
constexpr int kSetApart = 255;

}  // namespace softdb
