// Stored columns read in place, and sums over the numbers of two rows: q·k and |q - k|² in float32 or float64.
#pragma once

#include <cmath>

#include "records.h"
#include "vec.h"

namespace softdb {
namespace SOFTDB_LEVEL {

constexpr int kPairs = kLanes / 2;  // number of float64 in a register
typedef double Doubles __attribute__((vector_size(kPairs * 8)));
typedef float Singles __attribute__((vector_size(kPairs * 4)));

constexpr double kInfinity = __builtin_inf();

// Half a vector, as float64.
SOFTDB_INLINE Doubles load_wide(const float* at) {
    Singles result;
    std::memcpy(&result, at, sizeof result);
    return __builtin_convertvector(result, Doubles);
}

SOFTDB_INLINE Doubles load_wide(const Half* at) {
#if defined(__AVX512F__)
    return (Doubles)_mm512_cvtps_pd(_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)at)));
#elif defined(__AVX2__)
    return (Doubles)_mm256_cvtps_pd(_mm_cvtph_ps(_mm_loadl_epi64((const __m128i*)at)));
#else
    Half block[kLanes] = {};
    std::memcpy(block, at, kPairs * sizeof(Half));
    Vec result = load(block);
    return Doubles{double(result[0]), double(result[1])};
#endif
}

SOFTDB_INLINE double sum(Doubles x) {
    double total = x[0];
    for (int i = 1; i < kPairs; i++) total += x[i];
    return total;
}

inline constexpr auto product = [](auto a, auto b) { return a * b; };

// Σ term(a, b) over the numbers of two rows, in float32 or float64.
template <class Sum, class A, class B, class Term>
SOFTDB_INLINE Sum summed(const A* a, const B* b, int64_t d, Term term) {
    constexpr int lanes = sizeof(Sum) == 8 ? kPairs : kLanes;
    auto some = [](auto* at) {
        if constexpr (sizeof(Sum) == 8) return load_wide(at);
        else return load(at);
    };
    decltype(some(b)) sums[4] = {};
    int64_t j = 0;
    for (; j + 4 * lanes <= d; j += 4 * lanes)
        for (int u = 0; u < 4; u++) sums[u] += term(some(a + j + u * lanes), some(b + j + u * lanes));
    for (; j + lanes <= d; j += lanes) sums[0] += term(some(a + j), some(b + j));
    Sum total = sum((sums[0] + sums[1]) + (sums[2] + sums[3]));
    for (; j < d; j++) total += term(Sum(widen(a[j])), Sum(widen(b[j])));
    return total;
}

// The score of a query and a key: q.k, q.k / |k| or -|q - k|^2.
template <class Sum, class Number>
SOFTDB_INLINE Sum score_of(const float* query, const Number* key, int64_t d, Metric metric) {
    if (metric == Metric::l2) return -summed<Sum>(query, key, d, [](auto a, auto b) { return (a - b) * (a - b); });
    const Sum result = summed<Sum>(query, key, d, product);
    if (metric == Metric::dot) return result;
    const double square = summed<double>(key, key, d, product);  // float64 holds the squares of every float32
    return square > 0 ? Sum(result / __builtin_sqrt(square)) : Sum(0);
}

constexpr int64_t kLine = 64;     // bytes of a cache line
constexpr int64_t kFetched = 32;  // lines of a record that are prefetched; the processor prefetches those that follow
constexpr int64_t kLinesAtOnce = 64;  // lines that are prefetched together, as each record waits for the address of its page
constexpr int64_t kMostAhead = 8;     // largest number of records that are prefetched together

// Finds the address of a record in a column.
class Reader {
  public:
    explicit Reader(const Stored& column) : column(column) {
        bytes = column.kind == Kind::label ? 4 : column.width * (column.kind == Kind::half ? 2 : 4);
        lines = min(kFetched, (bytes + kLine - 1) / kLine);
        ahead = min(kMostAhead, kLinesAtOnce / max(lines, int64_t(1)));
    }

    const char* at(int64_t position) const {
        int64_t low = 0, high = column.segments;
        while (high - low > 1) {
            int64_t middle = (low + high) / 2;
            if (column.starts[middle] <= position) low = middle;
            else high = middle;
        }
        return (const char*)column.addresses[low] + (position - column.starts[low]) * bytes;
    }

    // Prefetches the j-th record of a list of positions, if there is one.
    void prefetch(const int64_t* positions, int64_t count, int64_t j) const {
        if (j >= count || positions[j] < 0) return;
        const char* place = at(positions[j]);
        for (int64_t line = 0; line < lines; line++) __builtin_prefetch(place + line * kLine, 0, 2);
    }

    int64_t ahead;  // number of records to prefetch together

  private:
    const Stored& column;
    int64_t bytes, lines;
};

// Calls visit(j, record) for positions (count,), skipping those below 0, and prefetches later records meanwhile.
template <class Visit>
SOFTDB_INLINE void each_record(const Reader& reader, const int64_t* positions, int64_t count, Visit visit) {
    const int64_t ahead = reader.ahead;
    for (int64_t j = 0; j < ahead; j++) reader.prefetch(positions, count, j);
    for (int64_t first = 0; first < count; first += ahead) {
        for (int64_t j = first + ahead; j < first + 2 * ahead; j++) reader.prefetch(positions, count, j);
        for (int64_t j = first; j < min(first + ahead, count); j++)
            if (positions[j] >= 0) visit(j, reader.at(positions[j]));
    }
}

template <class Number>
SOFTDB_INLINE void fill(Number* out, int64_t count, Number with) {
    for (int64_t i = 0; i < count; i++) out[i] = with;
}

}  // namespace SOFTDB_LEVEL
}  // namespace softdb
