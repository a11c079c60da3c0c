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
    Table<int64_t> found;        // (q, k), written to: best first, ties by place, then -1
    Table<float> scores;         // (q, k), written to; then -inf
    int64_t* scanned = nullptr;  // slots that were looked at, added to
};

// Records whose words are looked for.
struct Encode {
    Table<const float> residuals;   // (n, parts · word) turned
    Table<const float> centroids;   // (lists, parts · word) turned
    const int64_t* own = nullptr;   // (n,) the list of each
    const float* words = nullptr;   // (parts, word, 16)
    const float* halves = nullptr;  // (parts, 16) |w|² / 2
    int64_t parts = 0, word = 0;
    Table<uint8_t> codes;      // (n, parts / 2), written to
    float* along = nullptr;    // (n,), written to: <r, w> over all parts
    float* central = nullptr;  // (n,), written to: <c, w>
};

struct ListScan {
    Lists lists;
    Table<const float> turned;    // (q, parts · word) queries as codes see them
    Table<const int64_t> order;   // (q, m) lists, negative = none
    Table<const float> nearness;  // (q, m) their scores
    const uint16_t* allowed = nullptr;
    const uint32_t* places = nullptr;
    Table<int64_t> found;     // (q, c), written to
    Table<float> scores;      // (q, c), written to: by codes
    double* steps = nullptr;  // (q,), written to: of the rounded tables
};

}  // namespace softdb
