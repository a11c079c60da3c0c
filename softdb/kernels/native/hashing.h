// Random numbers that go with numbers for ever, and the normal distribution.
#pragma once

#include <cmath>

#include "vec.h"

namespace softdb {
namespace SOFTDB_LEVEL {

// A number's own random uint32: the mixing of SplitMix64 (Steele, Lea and Flood 2014, figure 17).
SOFTDB_INLINE uint32_t hashed(uint64_t x, uint64_t seed) {
    x += 0x9E3779B97F4A7C15u * (seed + 1);
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    return uint32_t((x ^ (x >> 31)) >> 32);
}

// log Φ(x); far below 0 by its asymptotic series (Abramowitz and Stegun 1964, 26.2.12).
SOFTDB_INLINE double log_normal(double x) {
    if (x > 0) return log1p(-0.5 * erfc(x * M_SQRT1_2));
    if (x > -10) return log(0.5 * erfc(-x * M_SQRT1_2));
    double square = 1 / (x * x), series = 1 - square * (1 - square * (3 - 15 * square));
    return -0.5 * x * x - log(-x * 2.5066282746310002) + log(series);
}

}  // namespace SOFTDB_LEVEL
}  // namespace softdb
