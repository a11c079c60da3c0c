// A block of rows of a column: the stored memory if possible, else a float32 copy padded to whole vectors.
#pragma once

#include "arguments.h"
#include "vec.h"

namespace softdb {
namespace SOFTDB_LEVEL {

struct Block {
    const float* wide = nullptr;
    const Half* half = nullptr;  // instead of `wide`
    int64_t pitch = 0;           // numbers from one row to the next
};

SOFTDB_INLINE int64_t padded(int64_t width, int64_t unit = kLanes) { return (width + unit - 1) / unit * unit; }

SOFTDB_INLINE int64_t row_of(const Part& part, int64_t i) { return part.rows ? part.rows[i] : i; }

// True if the records i ... i + count - 1 are contiguous in the columns.
SOFTDB_INLINE bool side_by_side(const Part& part, int64_t i, int64_t count) {
    return row_of(part, i + count - 1) - row_of(part, i) == count - 1;
}

// Copy one row as float32 minus a centre, padded with zeros.
template <class T>
SOFTDB_INLINE void copy_row(const T* from, int64_t width, const float* centre, float* to) {
    int64_t x = 0;
    for (; x + kLanes <= width; x += kLanes) {
        Vec result = load(from + x);
        store(to + x, centre ? result - load(centre + x) : result);
    }
    for (int64_t rest = x; rest < width; rest++) to[rest] = widen(from[rest]) - (centre ? centre[rest] : 0);
    for (int64_t rest = width; rest < padded(width); rest++) to[rest] = 0;
}

// Rows of records i ... i + count - 1: padded to whole vectors if `whole_vectors`, maybe float16 if `halves_serve`.
inline Block load_block(
    const Column& column, const Part& part, int64_t i, int64_t count, const float* centre, float* scratch,
    bool whole_vectors, bool halves_serve
) {
    const float* wide = static_cast<const float*>(column.data);
    const Half* half = static_cast<const Half*>(column.data);
    int64_t width = column.width, pitch = padded(width);
    Block result;
    if (!centre && side_by_side(part, i, count) && (!whole_vectors || width == pitch) && (!column.half || halves_serve)) {
        int64_t start = row_of(part, i) * width;
        if (column.half) result.half = half + start;
        else result.wide = wide + start;
        result.pitch = width;
        return result;
    }
    for (int64_t r = 0; r < count; r++) {
        int64_t start = row_of(part, i + r) * width;
        if (column.half) copy_row(half + start, width, centre, scratch + r * pitch);
        else copy_row(wide + start, width, centre, scratch + r * pitch);
    }
    result.wide = scratch;
    result.pitch = pitch;
    return result;
}

}  // namespace SOFTDB_LEVEL
}  // namespace softdb
