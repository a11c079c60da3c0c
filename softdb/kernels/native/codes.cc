// How far the codes of an index lie from the keys that they stand for: 4-bit codes, read as FAISS packs them.
//
// A list is cut into blocks of 32 records. In a block the codes of parts m and m + 1 take 32 bytes: in byte j of the
// first 16, the low half is part m of record kSlots[j], the high half that of record kSlots[j] + 16; the other 16 bytes
// hold part m + 1 (FAISS, impl/fast_scan/pq4_fast_scan.cpp). kPlaces is the byte of each record of sixteen.
#include "beyond.h"
#include "stored.h"

namespace softdb {
namespace SOFTDB_LEVEL {

namespace {

constexpr int kPlaces[16] = {0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15};

// |k - k̂|² of one part of a key, k̂ what its code decodes to.
SOFTDB_INLINE double part_error(const Coded& ask, int64_t record, int64_t m) {
    const int64_t slot = record % 32, width = ask.words.width;
    const uint8_t byte = ask.packed[record / 32 * ask.block + m / 2 * 32 + m % 2 * 16 + kPlaces[slot % 16]];
    const float* word = ask.words.first + (m * ask.words.codes + (slot >= 16 ? byte >> 4 : byte & 15)) * width;
    const float *key = ask.keys[record] + m * width, *base = ask.base + m * width;
    double total = 0;
    for (int64_t t = 0; t < width; t++) {
        double apart = double(key[t]) - double(base[t]) - double(word[t]);
        total += apart * apart;
    }
    return total;
}

}  // namespace

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

// |k - k̂| of each of the keys. Cost m d.
void packed_errors(const Coded& ask) {
    for (int64_t i = 0; i < ask.keys.rows; i++) {
        double total = 0;
        for (int64_t m = 0; m < ask.words.parts; m++) total += part_error(ask, i, m);
        ask.out[i] = __builtin_sqrt(total);
    }
}

// The largest error of each part of the codes (parts,), raised. Cost m d.
void part_errors(const Coded& ask) {
    for (int64_t i = 0; i < ask.keys.rows; i++)
        for (int64_t m = 0; m < ask.words.parts && !ask.skip[i]; m++)
            ask.out[m] = max(ask.out[m], __builtin_sqrt(part_error(ask, i, m)));
}

}  // namespace SOFTDB_LEVEL
}  // namespace softdb
