// Search inverted lists of 4-bit codes in one call. A record k of list j, with centroid c, is coded as
//
//     k ≈ c + f Rᵀ w        R a rotation, w one of 16 words for each part of the rotated residual R (k - c), and
//                           f = |r|² / <r, Rᵀ w>, which makes the estimate exact along the residual r itself
//     q·k ≈ q·c + f Σ_m <(Rq)_m, w_m>;      for l2  -|q - k|² + |q|² ≈ 2 q·c - |c|² + 2 f Σ_m … - (2 c·f Rᵀw + |r|²)
//
// (Jégou et al. 2011, product quantization; Gao and Long 2024, RaBitQ, for f). The sums are looked up sixteen records at
// a time in tables of 7 bits, which stay in registers (André et al. 2015, fast scan). A query
//
//     1. is multiplied with R and all centroids, both int8;
//     2. scans its few best lists; t is the estimate of the k-th best record in them;
//     3. scans every list with  a g + b z + c z² > least:  g = (s - t) / (ρ u) is how far the mean score s of its
//        records lies above t in their deviations (ρ of the residuals; u = |q|, 2 |q - c| for l2, whose s is the
//        centroid's score less ρ²), z is the centroid's score standardised over the lists (index/rule.py; lists.h explains
//        the changes by a filter);
//     4. scores the best `kept` records exactly, reading stored keys in place.
//
// A batch does steps 3 and 4 list by list, so that codes are read once for all of its queries. Cost of a query:
// (lists + parts · word) d / 2 products of int16, parts / 2 bytes a slot scanned, 2 kept d for exact scores.
#include "level.h"

#include "heap.h"
#include "list_scan.h"
#include "stored.h"

namespace softdb {
namespace SOFTDB_LEVEL {

namespace {

constexpr int64_t kFirst = 4;          // number of lists that are always scanned
constexpr int64_t kWide = 4096;        // records of the first lists that are kept at once
constexpr float kLeastFactor = 0.25f;  // <r, w> is at least this times |r|², so that no factor is above 4
constexpr int kQuery = 63;             // largest integer of a rounded query: two products with uint8 fit into int16

// Memory of one query.
struct Query {
    ListState state;
    float* scores;    // (lists,)
    float length;     // |q|²
    float last;       // estimate of the k-th best in its first lists
    float visited;    // lists with at least this score have been scanned
    float share;      // allowed share of the slots in these lists
};

// sums + Σ u s over four numbers of kLanes rows (kLanes, 4): u of uint8, s the same four int8 of the query, at most 63.
// `dots`: the processor has dot products of bytes (VNNI), for which the compiler's options do not ask.
template <bool dots>
SOFTDB_INLINE IntVec with_products(IntVec sums, const uint8_t* at, int32_t four) {
#if defined(__AVX512BW__)
    if constexpr (dots) {
        const __m512i numbers = _mm512_loadu_si512(at), query = _mm512_set1_epi32(four);
        __asm__("vpdpbusd %2, %1, %0" : "+v"(sums) : "v"(numbers), "v"(query));
        return sums;
    }
    __m512i pairs = _mm512_maddubs_epi16(_mm512_loadu_si512(at), _mm512_set1_epi32(four));
    return sums + (IntVec)_mm512_madd_epi16(pairs, _mm512_set1_epi16(1));
#elif defined(__AVX2__)
    __m256i pairs = _mm256_maddubs_epi16(_mm256_loadu_si256((const __m256i*)at), _mm256_set1_epi32(four));
    return sums + (IntVec)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
#elif defined(__aarch64__)
    uint8x16_t numbers = vld1q_u8(at);
    int16x8_t query = vmovl_s8(vreinterpret_s8_s32(vdup_n_s32(four)));
    int16x8_t low = vmulq_s16(vreinterpretq_s16_u16(vmovl_u8(vget_low_u8(numbers))), query);
    int16x8_t high = vmulq_s16(vreinterpretq_s16_u16(vmovl_high_u8(numbers)), query);
    return sums + (IntVec)vpaddlq_s16(vpaddq_s16(low, high));
#else
    __m128i pairs = _mm_maddubs_epi16(_mm_loadu_si128((const __m128i*)at), _mm_set1_epi32(four));
    return sums + (IntVec)_mm_madd_epi16(pairs, _mm_set1_epi16(1));
#endif
}

// True if the kernels of this level use dot products of bytes where the processor has them.
SOFTDB_INLINE bool has_dots() {
#if defined(__AVX512BW__)
    return __builtin_cpu_supports("avx512vnni");
#else
    return false;
#endif
}

// A query rounded to integers.
struct Steps {
    int8_t* numbers;  // (width,)
    float step;
    int32_t sum;
};

// Round a query (width,) to integers, padded with zeros to whole vectors.
void round_off(const float* query, int64_t width, Steps& out) {
    Vec largest = {};
    for (int64_t j = 0; j < width; j += kLanes) {
        const Vec x = load(query + j);
        largest = greater(greater(x, -x), largest);
    }
    const float top = -least_of(-largest), inverse = top > 0 ? kQuery / top : 0;
    IntVec sum = {};
    for (int64_t j = 0; j < width; j += kLanes) {
        const Vec x = load(query + j) * inverse;
        const IntVec near = __builtin_convertvector(x + (x < 0 ? everywhere(-0.5f) : everywhere(0.5f)), IntVec);
        sum += near;
        for (int i = 0; i < kLanes; i++) out.numbers[j + i] = int8_t(near[i]);
    }
    out.step = top / kQuery, out.sum = 0;
    for (int i = 0; i < kLanes; i++) out.sum += sum[i];
}

// Multiply a matrix with a query; the result has `rows` numbers.
template <bool dots>
void multiply(const ByteMatrix& matrix, const Steps& query, float* out) {
    constexpr int kVectors = kBlock / kLanes;
    const IntVec zero = IntVec{} + 128 * query.sum;  // numbers are stored with 128 added
    for (int64_t row = 0; row < matrix.rows; row += kBlock) {
        const uint8_t* at = matrix.numbers + row * matrix.width;
        IntVec sums[2][kVectors] = {};
        auto add = [&](int64_t j, int which) {
            int32_t four;
            std::memcpy(&four, query.numbers + j, 4);
            for (int u = 0; u < kVectors; u++)
                sums[which][u] = with_products<dots>(sums[which][u], at + j * kBlock + u * kLanes * 4, four);
        };
        int64_t j = 0;
        for (; j + 8 <= matrix.width; j += 8) add(j, 0), add(j + 4, 1);
        if (j < matrix.width) add(j, 0);
        for (int u = 0; u < kVectors; u++) {
            const Vec whole = __builtin_convertvector(sums[0][u] + sums[1][u] - zero, Vec);
            store(out + row + u * kLanes, whole * load(matrix.scales + row + u * kLanes) * query.step);
        }
    }
}

// Buffer size for this number of records to keep, and records added since the buffer was last cut.
void make_room(Memory& memory, int64_t room, ListState& state) {
    state.room = room;
    state.estimates = memory.take<float>(room + 2 * kBlock);
    state.slots = memory.take<uint32_t>(room + 2 * kBlock);
}

ListState state_in(Memory& memory, const Lists& lists, int64_t kept) {
    ListState state;
    state.low = memory.take<uint8_t>(lists.parts * 8);
    state.high = memory.take<uint8_t>(lists.parts * 8);
    state.heap = memory.take<int64_t>(kept);
    state.kept = kept;
    make_room(memory, 3 * kept + 64, state);
    return state;
}

// The search that lists.h declares, for one element type of the keys.
struct Search {
    const ListSearch& args;
    const Lists& lists;
    Query* queries;
    ListState wide;    // state of a query in step 2
    float *centred, *turned, *entries;
    Steps steps;
    uint64_t* visits;  // (lists,) bits of the queries that scan each list
    int64_t* positions;
    int64_t scanned = 0;
    const bool dots = has_dots();

    Search(const ListSearch& args, Memory& memory) : args(args), lists(args.lists) {
        const int64_t together = min(kTogether, max(args.queries.rows, int64_t(1))), d = lists.rotation.width;
        queries = memory.take<Query>(together);
        centred = memory.take<float>(d + kLanes);
        steps.numbers = memory.take<int8_t>(d + kLanes);
        turned = memory.take<float>(lists.rotation.rows);
        entries = memory.take<float>(lists.parts * kBlock);
        visits = memory.take<uint64_t>(lists.count);
        positions = memory.take<int64_t>(2 * args.kept + 64);
        make_room(memory, max(kWide, 3 * args.kept + 64), wide);
        for (int64_t i = 0; i < together; i++) {
            ListState state = state_in(memory, lists, args.kept);
            float* scores = memory.take<float>(lists.centroids.rows);
            if (memory.at) queries[i] = {state, scores, 0, 0, 0, 1};
        }
    }

    void scan(Query& query, int64_t list, int64_t first, int64_t last) {
        scan_blocks(lists, args.allowed, query.state, query.scores[list], first, last);
        scanned += (last - first) * kBlock;
    }

    // Call visit(list) for the lists whose bit is set in test(first of kLanes lists).
    template <class Test, class Visit>
    void each_list(Test test, Visit visit) const {
        for (int64_t j = 0; j < lists.count; j += kLanes) {
            uint32_t bits = test(j);
            if (lists.count - j < kLanes) bits &= (1u << (lists.count - j)) - 1;
            for (; bits; bits &= bits - 1) visit(j + __builtin_ctz(bits));
        }
    }

    // Scan the lists in `visits`, prefetching the next list meanwhile.
    template <class Each>
    void scan_each(Each each, Query& query) {
        int64_t pending = -1;
        auto flush = [&] {
            if (pending >= 0) scan(query, pending, lists.starts[pending], lists.starts[pending + 1]);
        };
        each([&](int64_t j) {
            fetch(lists, lists.starts[j], kBlocksAhead);
            flush();
            pending = j;
        });
        flush();
    }

    // Give lists without allowed records a score below all others.
    void put_last(float* scores) const {
        Vec least = load(scores), most = least;
        for (int64_t j = 0; j < lists.centroids.rows; j += kLanes)
            least = smaller(load(scores + j), least), most = greater(load(scores + j), most);
        const float low = least_of(least), last = low - 0.05f * (-least_of(-most) - low);
        for (int64_t j = 0; j < lists.centroids.rows; j += kLanes)
            store(scores + j, load(args.sizes + j) > 0 ? load(scores + j) : everywhere(last));
    }

    // Steps 1 and 2.
    void begin(Query& query, const float* given) {
        const int64_t d = args.queries.width;
        fill(centred, lists.rotation.width + kLanes, 0.0f);
        for (int64_t j = 0; j < d; j++) centred[j] = given[j];
        for (int64_t j = 0; lists.origin && j < d; j++) centred[j] -= lists.origin[j];
        query.length = summed<float>(centred, centred, d, product);
        round_off(centred, lists.rotation.width, steps);
        const auto times = dots ? multiply<true> : multiply<false>;
        times(lists.rotation, steps, turned);
        times(lists.centroids, steps, query.scores);
        for (int64_t j = 0; j < lists.centroids.rows; j += kLanes)
            store(query.scores + j, load(query.scores + j) - load(lists.lengths + j));
        put_last(query.scores);
        ListState& state = query.state;
        make_tables(lists, turned, entries, state);
        const ListState own = state;
        state.estimates = wide.estimates, state.slots = wide.slots, state.room = wide.room;
        state.count = 0, state.threshold = -kInfinity;
        query.visited = kInfinity;
        const int64_t before = scanned;
        float allowed = 0;
        for (int64_t first = kFirst; query.visited > -kInfinity; first *= 4) {
            const float least = first < lists.count ? level(query.scores, lists.count, first, first / 2) : -kInfinity;
            scan_each([&](auto visit) {
                each_list([&](int64_t j) {
                    const Vec scores = load(query.scores + j);
                    return ~above(everywhere(least), scores) & above(everywhere(query.visited), scores);
                }, [&](int64_t j) { allowed += args.sizes[j], visit(j); });
            }, query);
            query.visited = least;
            if (state.count >= args.nearest) break;
        }
        query.share = allowed / float(max(scanned - before, int64_t(1)));
        query.last = state.count < args.nearest ? -kInfinity : level(state.estimates, state.count, args.nearest, 0);
        cut(state);
        std::memcpy(own.estimates, state.estimates, state.count * sizeof(float));
        std::memcpy(own.slots, state.slots, state.count * sizeof(uint32_t));
        state.estimates = own.estimates, state.slots = own.slots, state.room = own.room;
    }

    // Step 3: call visit(list) for lists that are not scanned yet and may hold a match.
    template <class Visit>
    void choose(const Query& query, Visit visit) const {
        const float *scores = query.scores, t = query.last, shift = scores[0];
        if (!(query.visited > -kInfinity)) return;
        Vec total = {}, square = {};
        for (int64_t j = 0; j + kLanes <= lists.count; j += kLanes) {
            const Vec x = load(scores + j) - shift;
            total += x, square += x * x;
        }
        const float whole = float(max(lists.count / kLanes * kLanes, int64_t(1)));
        const float apart = sum(total) / whole, variance = sum(square) / whole - apart * apart;
        const float inverse = variance > 0 ? 1 / __builtin_sqrtf(variance) : 0, middle = shift + apart;
        const float a = args.rule.gap, b = args.rule.linear, c = args.rule.square;
        const float rare = log(max(min(2 * query.share, 1.0f), 1e-6f)), least = args.rule.least + args.rule.less * rare;
        const float length = query.length, plain = 1 / max(__builtin_sqrtf(length), 1e-30f);
        each_list([&](int64_t j) {
            const Vec score = load(scores + j);
            Vec side = everywhere(plain);
            if (lists.offsets) {
                float apart[kLanes];
                store(apart, greater(length - score, everywhere(1e-30f)));
                for (int i = 0; i < kLanes; i++) apart[i] = 0.5f / __builtin_sqrtf(apart[i]);
                side = load(apart);
            }
            const Vec tight = load(lists.inverse_spreads + j), mean = lists.offsets ? score - 1 / (tight * tight) : score;
            const Vec z = (score - middle) * inverse, g = (mean - t) * side * tight;
            return above(a * g + z * (b + c * z), everywhere(least)) & above(everywhere(query.visited), score) &
                   above(load(args.sizes + j), Vec{});
        }, visit);
    }

    // Step 4. Return true if k records were found, the query is finite and no score is NaN.
    bool finish(Query& query, int64_t i) {
        ListState& state = query.state;
        const int64_t k = args.matches.width;
        int64_t* heap = args.matches[i];
        const bool finite = query.length < kInfinity;
        if (args.keys.kind != Kind::none) {
            cut(state);
            for (int64_t j = 0; j < state.count; j++) positions[j] = args.places[state.slots[j]];
            return rerank({{args.queries[i], 1, args.queries.width, 0}, {positions, 1, state.count, 0}, args.keys,
                           args.metric, {heap, 1, k, 0}, {args.scores[i], 1, k, 0}}) && finite;
        }
        fill(heap, k, kLast);
        for (int64_t j = 0; j < state.count; j++)
            push(heap, k, entry_of(state.estimates[j], args.places[state.slots[j]]));
        const bool whole = k < 1 || heap[0] != kLast;
        sort(heap, k, k);
        unpack(heap, k, args.scores[i]);
        return whole && finite;
    }

    bool run() {
        bool whole = true;
        const int64_t step = max(kCached / (lists.parts * 8) / 2 * 2, int64_t(2));  // blocks
        for (int64_t low = 0; low < args.queries.rows; low += kTogether) {
            const int64_t count = min(kTogether, args.queries.rows - low);
            if (count > 1) fill(visits, lists.count, uint64_t(0));
            for (int64_t i = 0; i < count; i++) {
                begin(queries[i], args.queries[low + i]);
                if (count > 1) choose(queries[i], [&](int64_t j) { visits[j] |= uint64_t(1) << i; });
                else scan_each([&](auto visit) { choose(queries[i], visit); }, queries[i]);
            }
            for (int64_t j = 0; count > 1 && j < lists.count; j++)
                for (int64_t first = lists.starts[j], last = lists.starts[j + 1]; first < last; first += step)
                    for (uint64_t left = visits[j]; left; left &= left - 1)
                        scan(queries[__builtin_ctzll(left)], j, first, min(first + step, last));
            for (int64_t i = 0; i < count; i++) whole &= finish(queries[i], low + i);
        }
        *args.scanned += scanned;
        return whole;
    }
};

}  // namespace

// Bytes of memory that a search needs.
int64_t list_scratch(const ListSearch& args) {
    Memory memory{nullptr};
    Search search(args, memory);
    return memory.used;
}

// The whole search. Return true if every query has k records and is finite, and no score is NaN.
bool search_lists(const ListSearch& args, char* scratch) {
    Memory memory{scratch};
    Search search(args, memory);
    return search.run();
}

constexpr int kKeys = kLanes / 2;  // keys that share each load of centroids: their sums take eight registers

int64_t nearest_scratch(const NearestLists& args) {
    return (4 + kKeys) * (args.centroids.width + kLanes);
}

// Assign keys to their nearest centroid, argmin |k - c|² = argmax k·c - |c|² / 2, the first of equal ones. Keys are
// rounded to integers as queries are, so sums of products are exact in any order. Cost n lists d products of int8.
template <bool dots>
void assign(const NearestLists& args, char* scratch) {
    constexpr int kVectors = kBlock / kLanes;
    const ByteMatrix& matrix = args.centroids;
    const int64_t padded = matrix.width + kLanes;
    float* key = (float*)scratch;
    int8_t* numbers = (int8_t*)(key + padded);
    IntVec lanes;
    for (int i = 0; i < kLanes; i++) lanes[i] = i;
    fill(key, padded, 0.0f);
    for (int64_t first = 0; first < args.keys.rows; first += kKeys) {
        Steps steps[kKeys];
        Vec best[kKeys];
        IntVec nearest[kKeys];
        for (int i = 0; i < kKeys; i++) {
            const float* given = args.keys[min(first + i, args.keys.rows - 1)];
            for (int64_t j = 0; j < args.keys.width; j++) key[j] = given[j];
            steps[i].numbers = numbers + i * padded;
            round_off(key, matrix.width, steps[i]);
            best[i] = everywhere(-kInfinity), nearest[i] = IntVec{};
        }
        for (int64_t row = 0; row < matrix.rows; row += kBlock) {
            const uint8_t* at = matrix.numbers + row * matrix.width;
            IntVec sums[kKeys][kVectors] = {};
            for (int64_t j = 0; j < matrix.width; j += 4)
                for (int i = 0; i < kKeys; i++) {
                    int32_t four;
                    std::memcpy(&four, steps[i].numbers + j, 4);
                    for (int u = 0; u < kVectors; u++)
                        sums[i][u] = with_products<dots>(sums[i][u], at + j * kBlock + u * kLanes * 4, four);
                }
            for (int i = 0; i < kKeys; i++)
                for (int u = 0; u < kVectors; u++) {
                    const Vec whole = __builtin_convertvector(sums[i][u] - 128 * steps[i].sum, Vec);
                    const int64_t place = row + u * kLanes;
                    const Vec score = whole * load(matrix.scales + place) * steps[i].step - load(args.halves + place);
                    nearest[i] = score > best[i] ? lanes + int32_t(place) : nearest[i];
                    best[i] = greater(score, best[i]);
                }
        }
        for (int i = 0; i < kKeys && first + i < args.keys.rows; i++) {
            const float top = -least_of(-best[i]);
            int32_t number = INT32_MAX;
            for (int lane = 0; lane < kLanes; lane++)
                if (best[i][lane] == top) number = min(number, int32_t(nearest[i][lane]));
            args.nearest[first + i] = number == INT32_MAX ? 0 : number;
        }
    }
}

void nearest_lists(const NearestLists& args, char* scratch) { (has_dots() ? assign<true> : assign<false>)(args, scratch); }

constexpr int kTurned = kLanes / 2;  // residuals that are rotated together: their sums take eight registers

int64_t encode_scratch(const Encode& args) {
    return kTurned * (args.keys.width + args.turn.rows * kBlock) * int64_t(sizeof(float));
}

// Residuals r = k - c of up to kTurned records from `first`, |r|² and R r. Cost 2 d parts · word each.
void turn_residuals(const Encode& args, int64_t first, int64_t count, float* residuals, float* turned) {
    const int64_t d = args.keys.width, width = args.turn.rows * kBlock;
    for (int64_t i = 0; i < kTurned; i++) {
        const int64_t record = first + min(i, count - 1);
        const float *key = args.keys[record], *centroid = args.centroids[args.own[record]];
        float* residual = residuals + i * d;
        for (int64_t t = 0; t < d; t++) residual[t] = key[t] - centroid[t];
        if (i < count) args.squares[record] = summed<float>(residual, residual, d, product);
    }
    for (int64_t j = 0; j < width; j += kBlock) {
        constexpr int kVectors = kBlock / kLanes;
        Vec sums[kTurned][kVectors] = {};
        for (int64_t t = 0; t < d; t++)
            for (int u = 0; u < kVectors; u++) {
                const Vec turn = load(args.turn[j / kBlock] + t * kBlock + u * kLanes);
                for (int i = 0; i < kTurned; i++) sums[i][u] += turn * residuals[i * d + t];
            }
        for (int i = 0; i < kTurned; i++)
            for (int u = 0; u < kVectors; u++) store(turned + i * width + j + u * kLanes, sums[i][u]);
    }
}

// Encode keys by their rotated residuals: the first nearest word of each part, argmin |y - w|² = argmax <y, w> - |w|² / 2; the factor f =
// |r|² / <r, w>; and the error of the estimate f w. Cost n parts · word (2 d + 16).
void encode(const Encode& args, char* scratch) {
    constexpr int kVectors = kBlock / kLanes;
    float *residuals = (float*)scratch, *turned = residuals + kTurned * args.keys.width;
    for (int64_t i = 0; i < args.keys.rows; i++) {
        if (i % kTurned == 0) turn_residuals(args, i, min(args.keys.rows - i, int64_t(kTurned)), residuals, turned);
        const float *residual = turned + i % kTurned * args.turn.rows * kBlock, *centroid = args.turned[args.own[i]];
        float along = 0, central = 0;
        for (int64_t part = 0; part < args.parts; part++) {
            const float* words = args.words + part * args.word * kBlock;
            Vec scores[kVectors];
            for (int u = 0; u < kVectors; u++) scores[u] = -load(args.halves + part * kBlock + u * kLanes);
            for (int64_t t = 0; t < args.word; t++)
                for (int u = 0; u < kVectors; u++)
                    scores[u] += load(words + t * kBlock + u * kLanes) * residual[part * args.word + t];
            Vec most = scores[0];
            for (int u = 1; u < kVectors; u++) most = greater(scores[u], most);
            const Vec top = everywhere(-least_of(-most));
            uint32_t best = 0;
            for (int u = 0; u < kVectors; u++) best |= (~above(top, scores[u]) & ((1u << kLanes) - 1)) << (u * kLanes);
            const int word = best ? __builtin_ctz(best) : 0;
            for (int64_t t = 0; t < args.word; t++) {
                along += words[t * kBlock + word] * residual[part * args.word + t];
                central += words[t * kBlock + word] * centroid[part * args.word + t];
            }
            uint8_t& pair = args.codes[i][part / 2];
            pair = uint8_t(part % 2 ? pair | word << 4 : word);
        }
        const float square = args.squares[i], factor = square > 0 ? square / max(along, kLeastFactor * square) : 0;
        float error = 0, worst = 0;
        for (int64_t part = 0; part < args.parts; part++) {
            const int word = args.codes[i][part / 2] >> (part % 2 * 4) & 15;
            float apart = 0;
            for (int64_t t = part * args.word; t < (part + 1) * args.word; t++) {
                const float left = residual[t] - args.words[t * kBlock + word];
                apart += left * left;
            }
            error += apart, worst = max(worst, apart);
        }
        args.factors[i] = factor, args.central[i] = central;
        args.errors[i] = max(__builtin_sqrtf(error), args.peak * __builtin_sqrtf(worst));
    }
}

}  // namespace SOFTDB_LEVEL
}  // namespace softdb
