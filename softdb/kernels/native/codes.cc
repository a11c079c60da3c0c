// How far keys lie from points.
#include "beyond.h"
#include "stored.h"

namespace softdb {
namespace SOFTDB_LEVEL {

// |k - c| of keys (m, d) from one point (d,), in float64. Cost m d.
void distances(const Table<const float>& keys, const double* centre, double* out) {
    for (int64_t i = 0; i < keys.rows; i++) {
        const float* key = keys[i];
        double total = 0;
#pragma omp simd reduction(+ : total)
        for (int64_t j = 0; j < keys.width; j++) {
            double apart = double(key[j]) - centre[j];
            total += apart * apart;
        }
        out[i] = __builtin_sqrt(total);
    }
}

// The largest |k_j - m_j| of each coordinate (d,), of the keys (m, d) that are not skipped (m,). Cost m d.
void extents(const Table<const float>& keys, const float* mean, const bool* skip, float* out) {
    fill(out, keys.width, 0.0f);
    for (int64_t i = 0; i < keys.rows; i++) {
        const float* key = keys[i];
        for (int64_t j = 0; j < keys.width && !skip[i]; j++) out[j] = max(out[j], fabsf(key[j] - mean[j]));
    }
}

}  // namespace SOFTDB_LEVEL
}  // namespace softdb
