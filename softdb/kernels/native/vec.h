// Vectors of float32 as wide as the level's registers, in GCC's and Clang's vector extensions.
//
// This header and all that include it are compiled once for each level. What they define stands in the level's namespace
// or is inlined: a function of another namespace, such as one of the standard library's, would be compiled with AVX-512
// in one object file and without in another, and the linker would keep either of them.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#define SOFTDB_INLINE inline __attribute__((always_inline))

namespace softdb {
namespace SOFTDB_LEVEL {

#if defined(__AVX512F__)
constexpr int kLanes = 16, kRegisters = 32;
#elif defined(__AVX2__)
constexpr int kLanes = 8, kRegisters = 16;
#elif defined(__aarch64__)
constexpr int kLanes = 4, kRegisters = 32;
#else
constexpr int kLanes = 4, kRegisters = 16;
#endif

typedef float Vec __attribute__((vector_size(kLanes * 4)));
typedef int32_t IntVec __attribute__((vector_size(kLanes * 4)));
typedef double Wide __attribute__((vector_size(kLanes * 8)));  // as many float64, in two registers

using Half = uint16_t;  // the bits of a float16

template <class T>
SOFTDB_INLINE T min(T a, T b) { return b < a ? b : a; }
template <class T>
SOFTDB_INLINE T max(T a, T b) { return a < b ? b : a; }

SOFTDB_INLINE Vec everywhere(float x) { return x - Vec{}; }

SOFTDB_INLINE Vec load(const float* at) {
    Vec result;
    std::memcpy(&result, at, sizeof result);
    return result;
}

SOFTDB_INLINE void store(float* at, Vec x) { std::memcpy(at, &x, sizeof x); }

// float32 of float16
SOFTDB_INLINE Vec load(const Half* at) {
#if defined(__AVX512F__)
    return (Vec)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)at));
#elif defined(__AVX2__)
    return (Vec)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)at));
#elif defined(__aarch64__)
    return (Vec)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(at)));
#else
    typedef uint16_t Halves __attribute__((vector_size(kLanes * 2)));
    Halves halves;
    std::memcpy(&halves, at, sizeof halves);
    IntVec bits = __builtin_convertvector(halves, IntVec);
    IntVec sign = (bits & 0x8000) << 16, rest = (bits & 0x7fff) << 13;
    Vec scaled = (Vec)rest * 0x1p112f;  // the exponent's other bias; a subnormal float16 becomes a normal float32
    IntVec special = (rest >= 0x0f800000) & 0x7f800000;  // infinite, or NaN
    return (Vec)((IntVec)scaled | special | sign);
#endif
}

SOFTDB_INLINE float widen(Half x) {
    Half block[kLanes] = {x};
    return load(block)[0];
}
SOFTDB_INLINE float widen(float x) { return x; }

SOFTDB_INLINE Vec greater(Vec a, Vec b) { return a > b ? a : b; }
SOFTDB_INLINE Vec smaller(Vec a, Vec b) { return a < b ? a : b; }

// A mask with a bit for each lane in which a > b.
SOFTDB_INLINE uint32_t above(Vec a, Vec b) {
#if defined(__AVX512F__)
    return _mm512_cmp_ps_mask((__m512)a, (__m512)b, _CMP_GT_OQ);
#elif defined(__AVX2__)
    return uint32_t(_mm256_movemask_ps((__m256)(a > b)));
#elif defined(__aarch64__)
    const uint32x4_t bits = {1, 2, 4, 8};
    return vaddvq_u32(vandq_u32((uint32x4_t)(a > b), bits));
#else
    return uint32_t(_mm_movemask_ps((__m128)(a > b)));
#endif
}

// The sum of the lanes.
SOFTDB_INLINE float sum(Vec x) {
    typedef float Quad __attribute__((vector_size(16)));
    Quad parts[kLanes / 4];
    std::memcpy(parts, &x, sizeof x);
    for (int half = kLanes / 8; half; half /= 2)
        for (int i = 0; i < half; i++) parts[i] += parts[i + half];
    return (parts[0][0] + parts[0][2]) + (parts[0][1] + parts[0][3]);
}

// e^x for x <= 0, to two units in the last place; 0 below -87 (Moshier's Cephes, expf).
SOFTDB_INLINE Vec exp_negative(Vec x) {
    const Vec least = everywhere(-87.0f);
    const float round = 12582912.0f;  // 1.5 * 2^23: adding it rounds to a whole number
    Vec bounded = greater(x, least);
    Vec shifted = bounded * 1.44269504088896341f + round;
    Vec whole = shifted - round;
    Vec rest = bounded - whole * 0.693359375f;
    rest = rest - whole * -2.12194440e-4f;
    Vec p = rest * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * rest + 8.3334519073e-3f;
    p = p * rest + 4.1665795894e-2f;
    p = p * rest + 1.6666665459e-1f;
    p = p * rest + 5.0000001201e-1f;
    p = p * (rest * rest) + rest + 1.0f;
    IntVec raised = (IntVec)p + ((IntVec)shifted << 23);
    return (Vec)(raised & (x >= least));
}

}  // namespace SOFTDB_LEVEL
}  // namespace softdb
