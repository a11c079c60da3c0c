// Scan blocks of 4-bit codes: lookup tables, sums for sixteen records in registers, and the best records.
#pragma once

#include "heap.h"
#include "lists.h"
#include "stored.h"

namespace softdb {
namespace SOFTDB_LEVEL {

constexpr int64_t kTogether = 64;      // queries of a batch that scan lists together, one bit each
constexpr int64_t kCached = 24 << 10;  // bytes of codes that stay in the L1 cache
constexpr int kBlock = 16;           // records
constexpr int64_t kBlocksAhead = 8;  // number of blocks that are prefetched ahead of the current one
constexpr int kTop = 127;            // the largest entry of a table: the sum of two fits in a byte

typedef uint8_t Bytes __attribute__((vector_size(kLanes * 4)));
typedef uint16_t Shorts __attribute__((vector_size(kLanes * 4)));
typedef uint16_t Eight __attribute__((vector_size(16)));

// Allocates from one piece of memory. Without memory it only measures how much is needed.
struct Memory {
    char* at;
    int64_t used = 0;
    template <class Number>
    Number* take(int64_t count) {
        Number* result = (Number*)(at + used);
        used += (count * int64_t(sizeof(Number)) + 63) / 64 * 64;
        return result;
    }
};

// State of one query's scan: its tables, and the best records so far.
struct ListState {
    uint8_t *low, *high;  // (parts / 2, 16) tables of the even and the odd parts
    float step, base;     // size of one unit of an entry; sum that an all-zero code stands for
    float threshold;      // estimates above it are kept
    int64_t count, kept, room;
    float* estimates;
    uint32_t* slots;
    int64_t* heap;  // (kept,)
};

SOFTDB_INLINE Bytes bytes_at(const uint8_t* at) {
    Bytes result;
    std::memcpy(&result, at, sizeof result);
    return result;
}

// Entries of 16-byte tables, one in each quarter of a register.
SOFTDB_INLINE Bytes lookup(Bytes table, Bytes index) {
#if defined(__AVX512BW__)
    return (Bytes)_mm512_shuffle_epi8((__m512i)table, (__m512i)index);
#elif defined(__AVX2__)
    return (Bytes)_mm256_shuffle_epi8((__m256i)table, (__m256i)index);
#elif defined(__aarch64__)
    return (Bytes)vqtbl1q_u8((uint8x16_t)table, (uint8x16_t)index);
#else
    return (Bytes)_mm_shuffle_epi8((__m128i)table, (__m128i)index);
#endif
}

constexpr int kGroup = 4;  // number of blocks whose sums are computed together

// Sums for some blocks: for the first eight records of each block, and for the other eight.
struct BlockSums {
    Eight first[kGroup], others[kGroup];
};

// The sums of the quarters of each.
template <int count>
SOFTDB_INLINE void fold(const Shorts* x, Eight* sums) {
#if defined(__AVX512BW__)
    if constexpr (count == 4) {
        const __m512i a = (__m512i)x[0], b = (__m512i)x[1], c = (__m512i)x[2], d = (__m512i)x[3];
        const __m512i ab = _mm512_add_epi16(_mm512_shuffle_i32x4(a, b, 0x44), _mm512_shuffle_i32x4(a, b, 0xEE));
        const __m512i cd = _mm512_add_epi16(_mm512_shuffle_i32x4(c, d, 0x44), _mm512_shuffle_i32x4(c, d, 0xEE));
        _mm512_storeu_si512(sums, _mm512_add_epi16(_mm512_shuffle_i32x4(ab, cd, 0x88), _mm512_shuffle_i32x4(ab, cd, 0xDD)));
        return;
    }
#endif
    for (int u = 0; u < count; u++) {
        Eight parts[kLanes / 4];
        std::memcpy(parts, x + u, sizeof parts);
        for (int half = kLanes / 8; half; half /= 2)
            for (int i = 0; i < half; i++) parts[i] += parts[i + half];
        sums[u] = parts[0];
    }
}

// Sums of `count` blocks, 16 records each. An entry takes a byte; the sum of the even bytes is what the sum of all, as
// whole numbers of 16 bits, has beyond that of the odd ones.
template <int count>
SOFTDB_INLINE void add_up(const uint8_t* codes, int64_t bytes, const uint8_t* low, const uint8_t* high, BlockSums& sums) {
    Shorts all[count] = {}, odd[count] = {};
    const Bytes half = Bytes{} + 15;
    for (int64_t at = 0; at < bytes; at += kLanes * 4) {
        const Bytes a = bytes_at(low + at), b = bytes_at(high + at);
        for (int u = 0; u < count; u++) {
            const Bytes code = bytes_at(codes + u * bytes + at);
            const Bytes entry = lookup(a, code & half) + lookup(b, (Bytes)((Shorts)code >> 4) & half);
            all[u] += (Shorts)entry, odd[u] += (Shorts)entry >> 8;
        }
    }
    for (int u = 0; u < count; u++) all[u] -= odd[u] << 8;
    fold<count>(all, sums.first);
    fold<count>(odd, sums.others);
}

constexpr int kAtOnce = 4;  // number of queries whose sums are computed together

// True if the processor has the instructions of `add_up_at_once`: byte permutes and dot products (VBMI and VNNI).
SOFTDB_INLINE bool adds_at_once() {
#if defined(__AVX512BW__)
    return __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("avx512vnni");
#else
    return false;
#endif
}

// Sums of some blocks for kAtOnce queries; those of query i begin at sums[i * groups], groups = ⌈blocks / kGroup⌉. Groups
// without an allowed slot are left out. In each 64 bytes of codes the four bytes of a record are brought together, so that
// a lookup has tables of 64 entries, and one instruction adds up four entries. Queries share all that precedes lookups.
#if defined(__AVX512BW__)
__attribute__((target("avx512vbmi,avx512vnni"))) inline void add_up_at_once(
    const uint8_t* codes, int64_t bytes, const uint16_t* allowed, int64_t blocks, const ListState* const* states,
    BlockSums* sums) {
    alignas(64) uint8_t from[64], part[64];
    for (int i = 0; i < 64; i++) {  // byte i belongs to record i / 4
        const int record = i / 4;
        from[i] = uint8_t(i % 4 * kBlock + (record < 8 ? 2 * record : 2 * record - kBlock + 1));
        part[i] = uint8_t(i % 4 * kBlock);
    }
    const __m512i order = _mm512_load_si512(from), parts = _mm512_load_si512(part);
    const __m512i half = _mm512_set1_epi8(15), ones = _mm512_set1_epi8(1);
    const int64_t groups = (blocks + kGroup - 1) / kGroup;
    for (int64_t block = 0; block < blocks; block++) {
        __builtin_prefetch(codes + (block + kBlocksAhead) * bytes, 0, 3);
        if (!allowed[block]) continue;
        __m512i totals[kAtOnce] = {};
        for (int64_t at = 0; at < bytes; at += 64) {
            const __m512i code = _mm512_permutexvar_epi8(order, _mm512_loadu_si512(codes + block * bytes + at));
            const __m512i low = _mm512_ternarylogic_epi32(code, half, parts, 0xEA);  // (code & half) | parts
            const __m512i high = _mm512_ternarylogic_epi32(_mm512_srli_epi16(code, 4), half, parts, 0xEA);
            for (int i = 0; i < kAtOnce; i++) {
                const __m512i a = _mm512_loadu_si512(states[i]->low + at), b = _mm512_loadu_si512(states[i]->high + at);
                totals[i] = _mm512_dpbusd_epi32(totals[i], _mm512_permutexvar_epi8(low, a), ones);
                totals[i] = _mm512_dpbusd_epi32(totals[i], _mm512_permutexvar_epi8(high, b), ones);
            }
        }
        for (int i = 0; i < kAtOnce; i++) {
            const __m256i both = _mm512_cvtepi32_epi16(totals[i]);
            BlockSums& result = sums[i * groups + block / kGroup];
            result.first[block % kGroup] = (Eight)_mm256_castsi256_si128(both);
            result.others[block % kGroup] = (Eight)_mm256_extracti128_si256(both, 1);
        }
    }
}
#else
inline void add_up_at_once(const uint8_t*, int64_t, const uint16_t*, int64_t, const ListState* const*, BlockSums*) {}
#endif

// The sums for kLanes records of a block, starting at record `first`.
SOFTDB_INLINE Vec widened(const BlockSums& sums, int block, int first) {
#if defined(__AVX512F__)
    (void)first;
    __m256i both = _mm256_set_m128i((__m128i)sums.others[block], (__m128i)sums.first[block]);
    return (Vec)_mm512_cvtepi32_ps(_mm512_cvtepu16_epi32(both));
#elif defined(__AVX2__)
    return (Vec)_mm256_cvtepi32_ps(_mm256_cvtepu16_epi32((__m128i)(first ? sums.others : sums.first)[block]));
#else
    typedef uint16_t Four __attribute__((vector_size(8)));
    Four some;
    std::memcpy(&some, (const char*)((first < 8 ? sums.first : sums.others) + block) + 2 * (first % 8), 8);
    return __builtin_convertvector(__builtin_convertvector(some, IntVec), Vec);
#endif
}

SOFTDB_INLINE float least_of(Vec x) {
    typedef float Quad __attribute__((vector_size(16)));
    Quad parts[kLanes / 4];
    std::memcpy(parts, &x, sizeof x);
    for (int half = kLanes / 8; half; half /= 2)
        for (int i = 0; i < half; i++) parts[i] = parts[i + half] < parts[i] ? parts[i + half] : parts[i];
    return min(min(parts[0][0], parts[0][1]), min(parts[0][2], parts[0][3]));
}

// A threshold that at least `wanted` of the numbers reach, and at most `slack` more if a few steps can separate
// them.
inline float level(const float* numbers, int64_t count, int64_t wanted, int64_t slack) {
    const int64_t whole = count / kLanes * kLanes;
    float low = numbers[0], high = numbers[0];
    if (whole) {
        Vec least = load(numbers), most = least;
        for (int64_t i = kLanes; i < whole; i += kLanes)
            least = smaller(load(numbers + i), least), most = greater(load(numbers + i), most);
        low = least_of(least), high = -least_of(-most);
    }
    for (int64_t i = whole; i < count; i++) low = min(low, numbers[i]), high = max(high, numbers[i]);
    int64_t reach = count, beyond = 0;
    for (int turn = 0; turn < 24 && reach > wanted + slack; turn++) {
        const float share = float(reach - wanted) / float(max(int64_t(1), reach - beyond));
        const float middle = low + (high - low) * (turn & 1 ? 0.5f : min(0.9f, max(0.1f, share)));
        if (!(middle > low && middle < high)) break;
        const Vec edge = everywhere(middle);
        IntVec reaching = {};
        for (int64_t i = 0; i < whole; i += kLanes) reaching -= load(numbers + i) >= edge;
        int64_t many = 0;
        for (int i = 0; i < kLanes; i++) many += reaching[i];
        for (int64_t i = whole; i < count; i++) many += numbers[i] >= middle;
        if (many >= wanted) low = middle, reach = many;
        else high = middle, beyond = many;
    }
    return low;
}

SOFTDB_INLINE void push(int64_t* heap, int64_t size, int64_t entry) {
    if (size && entry < heap[0]) sink(heap, size, entry);
}

// Keep the best records: the number to keep, or up to an eighth more.
inline void cut(ListState& state) {
    const int64_t most = state.kept + state.kept / 8;
    if (state.count <= most) return;
    const float least = level(state.estimates, state.count, state.kept, state.kept / 8);
    int64_t reach = 0;
    for (int64_t i = 0; i < state.count; i++) reach += state.estimates[i] >= least;
    state.threshold = least;
    if (reach <= most) {
        int64_t stay = 0;
        for (int64_t i = 0; i < state.count; i++) {
            const float estimate = state.estimates[i];
            state.estimates[stay] = estimate, state.slots[stay] = state.slots[i];
            stay += estimate >= least;
        }
        state.count = stay;
        return;
    }
    fill(state.heap, state.kept, kLast);  // many records have equal scores
    for (int64_t i = 0; i < state.count; i++)
        push(state.heap, state.kept, entry_of(state.estimates[i], state.slots[i]));
    state.threshold = score_in(state.heap[0]);
    for (int64_t i = 0; i < state.kept; i++)
        state.estimates[i] = score_in(state.heap[i]), state.slots[i] = uint32_t(state.heap[i]);
    state.count = state.kept;
}

// Append the records whose bit is set in `hits`; bit 0 is the record in the given slot.
SOFTDB_INLINE void keep(ListState& state, Vec estimates, uint32_t slot, uint32_t hits) {
#if defined(__AVX512F__)
    const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512i slots = _mm512_add_epi32(lanes, _mm512_set1_epi32(int(slot)));
    const __mmask16 mask = __mmask16(hits);
    _mm512_storeu_ps(state.estimates + state.count, _mm512_maskz_compress_ps(mask, (__m512)estimates));
    _mm512_storeu_si512(state.slots + state.count, _mm512_maskz_compress_epi32(mask, slots));
    state.count += __builtin_popcount(hits);
#else
    float each[kLanes];
    store(each, estimates);
    for (; hits; hits &= hits - 1) {
        const int which = __builtin_ctz(hits);
        state.estimates[state.count] = each[which], state.slots[state.count++] = slot + uint32_t(which);
    }
#endif
}

// Prefetch some blocks.
SOFTDB_INLINE void fetch(const Lists& lists, int64_t block, int64_t count) {
    const char* codes = (const char*)lists.codes + block * lists.parts * 8;
    for (int64_t line = 0; line < count * lists.parts * 8; line += kLine) __builtin_prefetch(codes + line, 0, 3);
    __builtin_prefetch(lists.factors + block * kBlock, 0, 3);
    if (lists.offsets) __builtin_prefetch(lists.offsets + block * kBlock, 0, 3);
}

// Call take(sums, block, u) for each block of a list with an allowed slot; sums.first[u] belongs to the block. `pass`
// returns true for a group of blocks to skip. `ready`: the sums, if `add_up_at_once` has computed them; else fetch(block)
// prefetches what follows a group of blocks.
template <class Fetch, class Pass, class Take>
SOFTDB_INLINE void each_block(const Lists& lists, const uint16_t* allowed, const ListState& state, int64_t first,
                              int64_t last, const BlockSums* ready, Fetch fetch, Pass pass, Take take) {
    const int64_t bytes = lists.parts * 8;
    BlockSums computed;
    int64_t block = first;
    for (; block + kGroup <= last; block += kGroup) {
        uint64_t any;
        std::memcpy(&any, allowed + block, sizeof any);
        if (!ready) fetch(block);
        if (!any) continue;
        if (!ready) add_up<kGroup>(lists.codes + block * bytes, bytes, state.low, state.high, computed);
        const BlockSums& sums = ready ? ready[(block - first) / kGroup] : computed;
        if (pass(sums)) continue;
        for (int u = 0; u < kGroup; u++) take(sums, block + u, u);
    }
    for (int64_t u = 0; block < last; block++, u++) {
        if (!allowed[block]) continue;
        if (ready) {
            take(ready[(block - first) / kGroup], block, int(u));
        } else {
            add_up<1>(lists.codes + block * bytes, bytes, state.low, state.high, computed);
            take(computed, block, 0);
        }
    }
}

// Scan the blocks of a list whose centroid has the score `score`.
SOFTDB_INLINE void scan_blocks(const Lists& lists, const uint16_t* allowed, ListState& state, float score, int64_t first,
                               int64_t last) {
    const float step = state.step, base = state.base, unit = lists.unit;
    auto none = [](const BlockSums&) { return false; };
    auto ahead = [&](int64_t block) { fetch(lists, block + kBlocksAhead, kGroup); };
    each_block(lists, allowed, state, first, last, nullptr, ahead, none, [&](const BlockSums& sums, int64_t block, int u) {
        for (int lane = 0; lane < kBlock; lane += kLanes) {
            const int64_t slot = block * kBlock + lane;
            Vec estimate = load(lists.factors + slot) * (widened(sums, u, lane) * step + base) + score;
            if (lists.offsets) estimate -= load(lists.offsets + slot) * unit;
            uint32_t hits = above(estimate, everywhere(state.threshold)) & uint32_t(allowed[block]) >> lane;
            if (hits) keep(state, estimate, uint32_t(slot), hits);
        }
        if (state.count > state.room) cut(state);
    });
}

// Build the tables of a rotated query: for each word of each part its term, in integer steps above the least.
inline void make_tables(const Lists& lists, const float* turned, float* entries, ListState& state) {
    constexpr int kVectors = kBlock / kLanes;
    typedef uint8_t Few __attribute__((vector_size(kLanes)));
    const float gain = lists.offsets ? 2.0f : 1.0f;
    Vec lowest = {}, highest = {};
    for (int64_t part = 0; part < lists.parts; part++) {
        Vec sums[kVectors] = {};
        for (int64_t j = part * lists.word; j < (part + 1) * lists.word; j++)
            for (int u = 0; u < kVectors; u++) sums[u] += load(lists.words + j * kBlock + u * kLanes) * (gain * turned[j]);
        for (int u = 0; u < kVectors; u++) {
            store(entries + part * kBlock + u * kLanes, sums[u]);
            lowest = smaller(sums[u], lowest), highest = greater(sums[u], highest);
        }
    }
    const float low = least_of(lowest), range = -least_of(-highest) - low;
    const float inverse = range > 0 ? kTop / range : 0;
    for (int64_t part = 0; part < lists.parts; part++) {
        uint8_t* table = (part % 2 ? state.high : state.low) + part / 2 * kBlock;
        for (int u = 0; u < kVectors; u++) {
            const Vec entry = load(entries + part * kBlock + u * kLanes);
            const Few steps = __builtin_convertvector((entry - low) * inverse + 0.5f, Few);
            std::memcpy(table + u * kLanes, &steps, kLanes);
        }
    }
    state.step = range / kTop, state.base = float(lists.parts) * low;
}

}  // namespace SOFTDB_LEVEL
}  // namespace softdb
