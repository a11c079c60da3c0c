// Parts of a draw: permanent random numbers, buffers of the records that they select, and the measures to draw by.
#pragma once

#include "hashing.h"
#include "list_scan.h"

namespace softdb {
namespace SOFTDB_LEVEL {

typedef uint32_t UIntVec __attribute__((vector_size(kLanes * 4)));
constexpr float kApart = 1e30f;        // records with at least this σ² are set apart
constexpr float kTame = 4;             // estimates with at most this σ² are trusted as means
constexpr float kShift = 2;            // e^kShift is the largest control: weights of float32 cancel up to their rounding
constexpr float kLog2 = 0.69314718f;

SOFTDB_INLINE void pause() {
#if defined(__x86_64__)
    _mm_pause();
#else
    __asm__ volatile("yield");
#endif
}

// Take the next part of the step with this ticket. Return -1 if no part is left or the step has ended.
SOFTDB_INLINE int64_t take(Crew& crew, int64_t ticket) {
    while (ticket > 0 && (ticket >> 8 & 255) < (ticket & 255))
        if (__atomic_compare_exchange_n(&crew.ticket, &ticket, ticket + 256, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE))
            return ticket >> 8 & 255;
    return -1;
}

// kLanes numbers, 0 for lanes whose bit is not set.
SOFTDB_INLINE Vec where(uint32_t bits, Vec x) {
#if defined(__AVX512F__)
    return (Vec)_mm512_maskz_mov_ps(__mmask16(bits), (__m512)x);
#else
    IntVec lane;
    for (int i = 0; i < kLanes; i++) lane[i] = 1 << i;
    return (Vec)((IntVec)x & ((lane & int32_t(bits)) != 0));
#endif
}

// kLanes bytes as float32.
SOFTDB_INLINE Vec octets(const uint8_t* at) {
    typedef uint8_t Few __attribute__((vector_size(kLanes)));
    Few some;
    std::memcpy(&some, at, kLanes);
#if defined(__AVX512F__)
    return (Vec)_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32((__m128i)some));
#else
    return __builtin_convertvector(__builtin_convertvector(some, IntVec), Vec);
#endif
}

// -log u of the permanent random numbers of kLanes slots, interpolated linearly between powers of two.
SOFTDB_INLINE Vec random_waits(uint32_t slot, uint32_t low, uint32_t high) {
    UIntVec x;
    for (int i = 0; i < kLanes; i++) x[i] = uint32_t(i) * 0x9E3779B1u;
    x += slot * 0x9E3779B1u + low;  // then the finalizer of MurmurHash3
    x ^= x >> 16, x *= 0x85EBCA6Bu, x ^= high;
    x ^= x >> 13, x *= 0xC2B2AE35u, x ^= x >> 16;
    const Vec u = __builtin_convertvector((IntVec)(x >> 1), Vec) + 0.5f;
    return __builtin_convertvector((158 << 23) - (IntVec)u, Vec) * (kLog2 / float(1 << 23));
}

// P(-log u >= y): the bits of a float64 are its exponent and a linear interpolation to the next power of two.
SOFTDB_INLINE double chance_of(double y) {
    if (!(y > 0)) return 1;
    const int64_t bits = int64_t((max(-y / double(kLog2), -1000.0) + 1023) * 4503599627370496.0);
    double chance;
    std::memcpy(&chance, &bits, sizeof chance);
    return chance;
}

// The power of two that is about 1 / x; 1 if x is 0 or not finite.
SOFTDB_INLINE float unit_of(double x) {
    return x > 0 && x < 1e300 ? float(__builtin_ldexp(1.0, -int(max(-120.0, min(120.0, __builtin_floor(__builtin_log2(x))))))) : 1.0f;
}

SOFTDB_INLINE double uniform(uint64_t turn, uint64_t seed) { return (double(hashed(turn, seed)) + 0.5) / 4294967296.0; }

SOFTDB_INLINE Vec root(Vec x) {
#if defined(__AVX512F__)
    return (Vec)_mm512_sqrt_ps((__m512)x);
#else
    float each[kLanes];
    store(each, x);
    for (int i = 0; i < kLanes; i++) each[i] = __builtin_sqrtf(each[i]);
    return load(each);
#endif
}

// Φ(x), to 1e-7 (Abramowitz and Stegun 1964, 26.2.17).
SOFTDB_INLINE Vec normal(Vec x) {
    const Vec far = x < 0.0f ? -x : x, t = 1.0f / (1.0f + 0.2316419f * far);
    Vec p = t * 1.330274429f - 1.821255978f;
    p = p * t + 1.781477937f;
    p = p * t - 0.356563782f;
    p = p * t + 0.319381530f;
    const Vec beyond = p * t * 0.3989422804f * exp_negative(far * far * -0.5f);
    return x < 0.0f ? beyond : 1.0f - beyond;
}

// log x, interpolated linearly between powers of two, as in `random_waits`.
SOFTDB_INLINE float about_log(float x) {
    int32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    return float(bits - (127 << 23)) * (kLog2 / float(1 << 23));
}

SOFTDB_INLINE Vec exp_at_most(Vec x) { return exp_negative(smaller(x, Vec{})); }  // min(e^x, 1)

// A buffer of selected records and their estimates.
struct Kept {
    float *keys, *shares, *logits, *squares;  // l - log u, l, b, σ²
    uint32_t* slots;
    int64_t count, room;
    float threshold;
};

// True if no sum of a block, or of a group of blocks, is above a limit.
SOFTDB_INLINE bool none_above(const BlockSums& sums, int u, Eight edge) {
    typedef int16_t SignedEight __attribute__((vector_size(16)));
    const SignedEight over = (sums.first[u] > edge) | (sums.others[u] > edge);
    uint64_t halves[2];
    std::memcpy(halves, &over, sizeof over);
    return !(halves[0] | halves[1]);
}

SOFTDB_INLINE bool none_above(const BlockSums& sums, Eight edge) {
#if defined(__AVX512BW__)
    const __m512i edges = _mm512_broadcast_i32x4((__m128i)edge);
    const __m512i first = _mm512_loadu_si512(sums.first), others = _mm512_loadu_si512(sums.others);
    return !(_mm512_cmpgt_epu16_mask(first, edges) | _mm512_cmpgt_epu16_mask(others, edges));
#else
    bool none = true;
    for (int u = 0; u < kGroup; u++) none = none && none_above(sums, u, edge);
    return none;
#endif
}

// Not inlined, as the scan would run out of registers.
inline __attribute__((noinline)) void append(Kept& kept, Vec keys, Vec shares, Vec logits, Vec squares, uint32_t slot, uint32_t hits) {
#if defined(__AVX512F__)
    const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __mmask16 mask = __mmask16(hits);
    _mm512_storeu_ps(kept.keys + kept.count, _mm512_maskz_compress_ps(mask, (__m512)keys));
    _mm512_storeu_ps(kept.shares + kept.count, _mm512_maskz_compress_ps(mask, (__m512)shares));
    _mm512_storeu_ps(kept.logits + kept.count, _mm512_maskz_compress_ps(mask, (__m512)logits));
    _mm512_storeu_ps(kept.squares + kept.count, _mm512_maskz_compress_ps(mask, (__m512)squares));
    const __m512i slots = _mm512_add_epi32(lanes, _mm512_set1_epi32(int(slot)));
    _mm512_storeu_si512(kept.slots + kept.count, _mm512_maskz_compress_epi32(mask, slots));
    kept.count += __builtin_popcount(hits);
#else
    for (; hits; hits &= hits - 1) {
        const int i = __builtin_ctz(hits);
        kept.keys[kept.count] = keys[i], kept.shares[kept.count] = shares[i], kept.logits[kept.count] = logits[i];
        kept.squares[kept.count] = squares[i];
        kept.slots[kept.count++] = slot + uint32_t(i);
    }
#endif
}

// The `wanted`-th largest of the numbers.
inline float largest_but(const float* numbers, int64_t count, int64_t wanted) {
    float low = level(numbers, count, wanted, 0);
    for (;;) {
        int64_t many = 0;
        float least = __builtin_inff();
        for (int64_t i = 0; i < count; i++)
            if (numbers[i] >= low) many++, least = min(least, numbers[i]);
        if (many <= wanted || !(least < __builtin_inff())) return least;
        int64_t alike = 0;
        for (int64_t i = 0; i < count; i++) alike += numbers[i] == least;
        if (many - alike < wanted) return least;
        low = least + max(__builtin_fabsf(least) * 1e-7f, 1e-30f);
    }
}

// Keep the records above a threshold.
inline void raise(Kept& kept, float threshold) {
    int64_t stay = 0;
    for (int64_t i = 0; i < kept.count; i++) {
        const float key = kept.keys[i];
        kept.keys[stay] = key, kept.shares[stay] = kept.shares[i];
        kept.logits[stay] = kept.logits[i], kept.squares[stay] = kept.squares[i], kept.slots[stay] = kept.slots[i];
        stay += key > threshold;
    }
    kept.count = stay, kept.threshold = threshold;
}

struct WeightDesign {  // draw by weight
    static constexpr bool windowed = true;  // scans only a part of a list; controls are the same for all its records
    // The largest b for which l is at most this large, for a σ² of at most v.
    static float cold(float floor, float v) { return min(floor - v, -2 * v); }
    static SOFTDB_INLINE Vec shares(Vec b, Vec v) {
        if (!above(b, v * -2.0f)) return b + v;
        const Vec below = smaller(b, Vec{}), capped = below * below * (-0.25f / v);
        const Vec shares = b < v * -2.0f ? b + v : capped;
        return shares;
    }
};

struct CountDesign {  // draw by the probability that a record lies on the other side of the radius
    static constexpr bool windowed = false;
    static float cold(float floor, float v) { return -__builtin_sqrtf(v) * max(2.4f, 2 * __builtin_sqrtf(max(-floor, 0.0f))); }
    static SOFTDB_INLINE Vec shares(Vec b, Vec v) { return b * b / (v * -4.0f); }
    static SOFTDB_INLINE Vec controls(Vec b, Vec v) {  // about Φ(x); 0 or 1 beyond 2.4 deviations
        const Vec t = smaller(root(b * b / v) * (1 / 2.4f), everywhere(1.0f)), half = t * (0.75f - 0.25f * t * t);
        return v < kApart ? 0.5f + (b < 0.0f ? -half : half) : Vec{};
    }
};

}  // namespace SOFTDB_LEVEL
}  // namespace softdb
