// A heap of the c best of n records. Entries are int64 made of score and position. Cost log c for each insertion.
#pragma once

#include "vec.h"

namespace softdb {
namespace SOFTDB_LEVEL {

constexpr int64_t kLast = INT64_MAX;

// Score and position in one int64: smaller entries are better, ties by position.
SOFTDB_INLINE int64_t entry_of(float score, int64_t position) {
    float least = 0.0f - score;  // turns -0 into 0
    int32_t order;
    std::memcpy(&order, &least, 4);
    if (order < 0) order ^= 0x7FFFFFFF;  // integers that sort as the floats do
    return int64_t(uint64_t(int64_t(order)) << 32) | position;
}

SOFTDB_INLINE float score_in(int64_t entry) {
    int32_t order = int32_t(entry >> 32);
    if (order < 0) order ^= 0x7FFFFFFF;
    float least;
    std::memcpy(&least, &order, 4);
    return 0.0f - least;
}

// Sift an entry down from an index, in a heap whose greatest entry is first.
SOFTDB_INLINE void sink(int64_t* heap, int64_t size, int64_t entry, int64_t place = 0) {
    for (int64_t below; (below = 2 * place + 1) < size; place = below) {
        if (below + 1 < size && heap[below + 1] > heap[below]) below++;
        if (heap[below] <= entry) break;
        heap[place] = heap[below];
    }
    heap[place] = entry;
}

// Move the `count` greatest entries of a heap to its end, in ascending order.
SOFTDB_INLINE void sort(int64_t* heap, int64_t size, int64_t count) {
    for (int64_t last = size - 1; last > 0 && last >= size - count; last--) {
        int64_t entry = heap[last];
        heap[last] = heap[0];
        sink(heap, last, entry);
    }
}

// Convert a sorted heap to positions and scores, -1 and -inf for missing records.
SOFTDB_INLINE void unpack(int64_t* heap, int64_t size, float* scores) {
    for (int64_t place = 0; place < size; place++) {
        bool none = heap[place] == kLast;
        scores[place] = none ? -__builtin_inff() : score_in(heap[place]);
        heap[place] = none ? -1 : heap[place] & 0xFFFFFFFF;
    }
}

}  // namespace SOFTDB_LEVEL
}  // namespace softdb
