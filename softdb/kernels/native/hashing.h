// Permanent random numbers: hashes of positions or slots.
#pragma once

#include "vec.h"

namespace softdb {
namespace SOFTDB_LEVEL {

// Hash a number x to a uint32 by the mixing function of SplitMix64 (Steele, Lea and Flood 2014, figure 17).
SOFTDB_INLINE uint32_t hashed(uint64_t x, uint64_t seed) {
    x += 0x9E3779B97F4A7C15u * (seed + 1);
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    return uint32_t((x ^ (x >> 31)) >> 32);
}

}  // namespace SOFTDB_LEVEL
}  // namespace softdb
