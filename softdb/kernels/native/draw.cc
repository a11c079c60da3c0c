// Records drawn by one scan of all codes, with the drawing built in. Logits are a = φ s, weights e^a, Z their sum.
//
// A code gives a record's logit â and how far it may be off: σ = κ φ u ε / √d, with ε = |k - k̂| of the record and
// u = |q|, or 2 |q - c| for l2; κ is what the errors of some records, scored exactly, show for this query. With b = â - B,
// B about log Z, the root of the mean square of a weight, none of which exceeds Z, is about e^(B + l),
//
//     l = b + σ²  where b <= -2 σ²;      -b² / 4 σ²  where b < 0;      0 else
//
// Its random number u is permanent: a hash of its slot and the query's seed. It is drawn where l - log u >= τ, τ the
// (m + 1)-th largest of these; so its probability is p = min(1, e^(l - τ)), given τ, and sums over those drawn,
// divided by p, are unbiased and their terms uncorrelated (Duffield, Lund and Thorup 2007, priority sampling). A share
// of the draws goes to all alike (kPlain). log u is taken by the line between powers of two, and p accordingly.
//
// Where estimates are good their sums over all records, list by list, are kept, S_j = Σ h with h = e^(b + σ²/2): the sums
// over those drawn are corrected by β (S_j - Σ h / p), whose mean is zero (Särndal, Swensson and Wretman 1992, chapter
// 6). β is 1 where that lowers the squared errors of the records that were scored first, which no draw decides; else 0.
//
// For counts B is the radius, and what is drawn by is how unsure it is that a record lies inside: h = Φ(b / σ) about,
// l = -(b / σ)² / 4.
//
// Of what is not drawn docs/error-bars.md derives two bounds, relative to e^B: `unseen`, the largest w / p, from
// a <= â + z σ, z = 5, or a <= â + √d σ for certain; and `hidden`, Σ w² / p over errors beyond x deviations, Φ(2 σ - x)
// of the mean square, estimated from those drawn.
//
// Cost of a query: parts / 2 + 4 bytes a slot, 2 m d for exact scores.
#include "draw.h"

#include "hashing.h"
#include "list_scan.h"

namespace softdb {
namespace SOFTDB_LEVEL {

namespace {

typedef uint32_t UIntVec __attribute__((vector_size(kLanes * 4)));

constexpr int64_t kTogether = 64;      // queries that take the codes of a list together
constexpr int64_t kCached = 24 << 10;  // bytes of codes that stay in the first cache
constexpr int64_t kNear = 2048;        // slots of the best lists that are looked at first
constexpr int64_t kBest = 48;          // of these so many are scored, the best by their codes, and as many others
constexpr int64_t kSome = 512;         // blocks of all lists that are looked at then
constexpr int64_t kBins = 256;
constexpr float kBin = 0.125f, kDeepest = -kBins * kBin;  // of logits of weights
constexpr double kPlain = 0.05;        // share of the draws that goes to all alike
constexpr double kMore = 1.3;          // times as many pass the first threshold as are wanted
constexpr float kLeastThreshold = -14; // draws below it change nothing
constexpr float kApart = 1e30f;        // σ² from which on a record is set apart
constexpr double kUsual = 1.5;         // deviations of residuals along a query that lies anywhere
constexpr float kTame = 4;             // σ² up to which an estimate controls
constexpr float kShift = 20;           // e^kShift is the largest control
constexpr double kAbsurd = 20;         // deviations from which on codes are believed nothing
constexpr double kMargin = 1.3;        // times as many deviations as one that exceeds kCertain
constexpr double kCertain = 5;         // deviations that none is expected to exceed
constexpr double kLeastSpread = 0.7;  // of κ: no less than that share of what errors of any direction would show
constexpr double kPrior = 8;           // records that are taken to err as much as the isotropic error does
constexpr float kRounded = 1.0f / (1 << 24);  // mean square of the rounding of an offset, and somewhat more
constexpr float kLog2 = 0.69314718f;

// Those of kLanes numbers that have a bit; 0 for the others.
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

// -log u of the permanent random numbers of kLanes slots, by the line between powers of two.
SOFTDB_INLINE Vec chances(uint32_t slot, uint32_t low, uint32_t high) {
    UIntVec x;
    for (int i = 0; i < kLanes; i++) x[i] = i;
    x = (x + slot) * 0x9E3779B1u + low;  // the finalizer of MurmurHash3
    x ^= x >> 16, x *= 0x85EBCA6Bu, x ^= high;
    x ^= x >> 13, x *= 0xC2B2AE35u, x ^= x >> 16;
    const Vec u = __builtin_convertvector((IntVec)(x >> 1), Vec) + 0.5f;
    return __builtin_convertvector((158 << 23) - (IntVec)u, Vec) * (kLog2 / float(1 << 23));
}

// P(-log u >= y) of these.
double chance_of(double y) {
    if (!(y > 0)) return 1;
    const double low = -y / double(kLog2), whole = floor(low);
    return ldexp(1 + (low - whole), int(max(whole, -1000.0)));
}

// Φ(x)
SOFTDB_INLINE double normal(double x) { return 0.5 * erfc(-x * M_SQRT1_2); }

// Records that were kept, and what is known of them.
struct Kept {
    float *keys, *shares, *logits;  // l - log u, l, b
    uint32_t* slots;
    int64_t count, room;
    float threshold;
};

struct Query {
    ListState tables;
    Kept kept, other;  // of the thread that scans the other half of the lists, where there are two
    double* raw;     // (lists,) logits of the centroids
    float* slopes;   // (lists,) σ of an error of one step
    float* bounds;   // (lists,) of y
    float* usual;    // (lists,) the most that an estimate along a residual is by chance
    double base;     // B
    double spread;   // κ
    double beta;     // 1 where estimates correct, else 0
    double rate;     // at which all alike are drawn
    float floor;     // l that amounts to that
    float rough;     // mean square of the rounding of tables
    double length;   // |q|², from the origin
    uint32_t low, high;
};

// Whether none of sixteen sums is above an edge.
SOFTDB_INLINE bool none_above(const Eight* sums, Eight edge) {
#if defined(__x86_64__)
    const __m128i over = _mm_or_si128(_mm_subs_epu16((__m128i)sums[0], (__m128i)edge), _mm_subs_epu16((__m128i)sums[1], (__m128i)edge));
    return _mm_testz_si128(over, over);
#else
    const Eight over = (Eight)(sums[0] > edge) | (Eight)(sums[1] > edge);
    uint64_t halves[2];
    std::memcpy(halves, &over, sizeof over);
    return !(halves[0] | halves[1]);
#endif
}

SOFTDB_INLINE void append(Kept& kept, Vec keys, Vec shares, Vec logits, uint32_t slot, uint32_t hits) {
#if defined(__AVX512F__)
    const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __mmask16 mask = __mmask16(hits);
    _mm512_storeu_ps(kept.keys + kept.count, _mm512_maskz_compress_ps(mask, (__m512)keys));
    _mm512_storeu_ps(kept.shares + kept.count, _mm512_maskz_compress_ps(mask, (__m512)shares));
    _mm512_storeu_ps(kept.logits + kept.count, _mm512_maskz_compress_ps(mask, (__m512)logits));
    const __m512i slots = _mm512_add_epi32(lanes, _mm512_set1_epi32(int(slot)));
    _mm512_storeu_si512(kept.slots + kept.count, _mm512_maskz_compress_epi32(mask, slots));
    kept.count += __builtin_popcount(hits);
#else
    for (; hits; hits &= hits - 1) {
        const int i = __builtin_ctz(hits);
        kept.keys[kept.count] = keys[i], kept.shares[kept.count] = shares[i], kept.logits[kept.count] = logits[i];
        kept.slots[kept.count++] = slot + uint32_t(i);
    }
#endif
}

// The `wanted`-th largest of the numbers.
float largest_but(const float* numbers, int64_t count, int64_t wanted) {
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

// Leaves those above a threshold.
void raise(Kept& kept, float threshold) {
    int64_t stay = 0;
    for (int64_t i = 0; i < kept.count; i++) {
        const float key = kept.keys[i];
        kept.keys[stay] = key, kept.shares[stay] = kept.shares[i];
        kept.logits[stay] = kept.logits[i], kept.slots[stay] = kept.slots[i];
        stay += key > threshold;
    }
    kept.count = stay, kept.threshold = threshold;
}

struct Weights {  // by the weight
    // The b up to which shares are at most so large, for a σ² of at most v.
    static float cold(float floor, float v) { return min(floor - v, -2 * v); }
    static SOFTDB_INLINE Vec shares(Vec b, Vec v) {
        const Vec below = smaller(b, Vec{}), capped = below * below * (-0.25f / v);
        const Vec found = b < v * -2.0f ? b + v : capped;
        return found;
    }
    static SOFTDB_INLINE Vec controls(Vec b, Vec v) {
        const Vec x = smaller(b + v * 0.5f - kShift, Vec{});
        return (Vec)((IntVec)exp_negative(x) & (v <= kTame));
    }
};

struct Chances {  // by the chance to lie on the other side
    static float cold(float floor, float v) { return -__builtin_sqrtf(v) * max(2.4f, 2 * __builtin_sqrtf(max(-floor, 0.0f))); }
    static SOFTDB_INLINE Vec shares(Vec b, Vec v) { return b * b / (v * -4.0f); }
    static SOFTDB_INLINE Vec controls(Vec b, Vec v) {  // about Φ(x), 0 and 1 from 2.4 deviations on
        const Vec far = (b < 0.0f ? -b : b), over = far * far / v;
        float each[kLanes];
        store(each, over);
        for (int i = 0; i < kLanes; i++) each[i] = __builtin_sqrtf(each[i]);
        const Vec t = smaller(load(each) * (1 / 2.4f), everywhere(1.0f)), half = t * (0.75f - 0.25f * t * t);
        return v < kApart ? 0.5f + (b < 0.0f ? -half : half) : Vec{};
    }
};

// Draws for some queries.
template <class Design>
struct Drawing {
    const Draw& ask;
    const Lists& lists;
    Query* queries;
    float *entries, *order, *some_logits, *some_squares, *some_others;
    uint32_t* some_slots;
    int64_t stride, total = 0, scratch_room, *places;
    double* exact;

    // `fresh`: nothing is in memory yet.
    Drawing(const Draw& ask, Memory& memory, bool fresh) : ask(ask), lists(ask.lists) {
        const int64_t together = min(kTogether, max(ask.queries.rows, int64_t(1))), blocks = lists.starts[lists.count];
        stride = max(int64_t(1), blocks / kSome);
        queries = memory.take<Query>(together);
        entries = memory.take<float>(lists.parts * kBlock);
        order = memory.take<float>(lists.count + kLanes);
        const int64_t some = max(max((blocks / stride + 1) * kBlock, 3 * kNear), 2 * ask.aparts) + 2 * kBlock;
        some_logits = memory.take<float>(some);
        some_squares = memory.take<float>(some), some_others = memory.take<float>(some);
        some_slots = memory.take<uint32_t>(some);
        const int64_t room = 3 * ask.budget + 64;
        scratch_room = max(room + ask.aparts + ask.budget, 4 * kBest);
        places = memory.take<int64_t>(scratch_room + 2 * kBlock);
        exact = memory.take<double>(scratch_room + 2 * kBlock);
        for (int64_t i = 0; i < together; i++) {
            Query query;
            query.tables.low = memory.take<uint8_t>(lists.parts * 8);
            query.tables.high = memory.take<uint8_t>(lists.parts * 8);
            query.raw = memory.take<double>(lists.count);
            query.slopes = memory.take<float>(lists.count), query.usual = memory.take<float>(lists.count);
            query.bounds = memory.take<float>(lists.count);
            query.kept = kept_in(memory, room, ask.halves ? 2 * room : room);
            query.other = kept_in(memory, room, ask.halves ? room : 0);
            if (memory.at && fresh) queries[i] = query;
        }
        for (int64_t j = 0; memory.at && j < lists.count; j++) total += int64_t(ask.sizes[j]);
    }

    static Kept kept_in(Memory& memory, int64_t room, int64_t places) {
        Kept kept{};
        kept.room = room, places += 2 * kBlock;
        kept.keys = memory.take<float>(places), kept.shares = memory.take<float>(places);
        kept.logits = memory.take<float>(places), kept.slots = memory.take<uint32_t>(places);
        return kept;
    }

    // Estimates of the records of one list, as one query sees it. y is what the code says, b = own + y, and more where y
    // is larger than chance has it: then the record lies along the query.
    struct Ear {
        float step, base, unit, own, slope, rough, usual;

        SOFTDB_INLINE Vec said(const Lists& lists, const Eight* sums, int lane, int64_t slot) const {
            const Vec y = widened(sums, lane) * step + base;
            return lists.offsets ? y - load(lists.offsets + slot) * unit : y;
        }
        SOFTDB_INLINE Vec logit(Vec y, Vec gain) const { return y + own + greater(y - usual, Vec{}) * (gain - 1.0f); }
        SOFTDB_INLINE Vec square(const Lists& lists, Vec steps, int64_t slot) const {
            const Vec off = steps * slope;
            Vec v = off * off + rough;
            if (lists.offsets) {
                const Vec offset = load(lists.offsets + slot) * unit;
                v += offset * offset * kRounded;
            }
            return steps < float(kSetApart) ? v : everywhere(2 * kApart);
        }
    };

    Ear ear(const Query& query, int64_t list) const {
        const float factor = float(ask.factor), spread = ask.spreads[list], square = lists.offsets ? factor * spread * spread : 0;
        return {query.tables.step * factor, query.tables.base * factor, lists.unit * factor,
                float(query.raw[list] - query.base), query.slopes[list], query.rough, query.usual[list] - square};
    }

    // Calls take(b, σ², first slot, bits) for the allowed slots of some blocks of a list, where some y is above a bound.
    template <bool bounded, class Take>
    SOFTDB_INLINE void look(const Query& query, int64_t list, int64_t first, int64_t last, Take take) const {
        const Ear at = ear(query, list);
        const float bound = bounded ? query.bounds[list] : 0;
        // whole numbers of steps, where nothing but these tells
        const float steps = lists.offsets || !bounded ? -1 : floor((bound - at.base) / max(at.step, 1e-30f));
        const Eight edge = Eight{} + uint16_t(max(0.0f, min(steps, 65534.0f)));
        if (bounded && steps >= 65535) return;
        each_block(lists, ask.allowed, query.tables, first, last, [&](const Eight* sums, int64_t block) {
            if (bounded && steps >= 0 && none_above(sums, edge)) return;
            for (int lane = 0; lane < kBlock; lane += kLanes) {
                const int64_t slot = block * kBlock + lane;
                const Vec y = at.said(lists, sums, lane, slot);
                uint32_t bits = uint32_t(ask.allowed[block]) >> lane;
                if constexpr (kLanes < 16) bits &= (1u << kLanes) - 1;
                if (bounded) bits &= above(y, everywhere(bound));
                if (!bits) continue;
                const Vec b = at.logit(y, octets(ask.gains + slot) * kGain);
                take(b, at.square(lists, octets(ask.errors + slot), slot), uint32_t(slot), bits);
            }
        });
    }

    // b and σ² of one slot; false where y is not above the bound.
    bool one(const Query& query, int64_t list, int64_t slot, float& b, float& v) const {
        const Ear at = ear(query, list);
        const int64_t block = slot / kBlock, lane = slot % kBlock / kLanes * kLanes, place = slot % kBlock;
        const uint8_t* codes = lists.codes + block * lists.parts * 8;
        int64_t total = 0;
        for (int64_t part = 0; part < lists.parts; part++) {
            const uint8_t* row = codes + part / 2 * kBlock;
            const uint8_t pair = row[place < 8 ? 2 * place : 2 * (place - 8) + 1];
            total += part % 2 ? query.tables.high[part / 2 * kBlock + (pair >> 4)] : query.tables.low[part / 2 * kBlock + (pair & 15)];
        }
        Eight sums[2];
        for (int i = 0; i < 8; i++) sums[0][i] = sums[1][i] = uint16_t(total);
        const int64_t first = block * kBlock + lane;
        const Vec y = at.said(lists, sums, int(lane), first);
        b = at.logit(y, octets(ask.gains + first) * kGain)[place % kLanes];
        v = at.square(lists, octets(ask.errors + first), first)[place % kLanes];
        return y[place % kLanes] > query.bounds[list];
    }

    // Below these nothing is drawn but by the plain draws, and controls are 0.
    void set_bounds(Query& query) const {
        for (int64_t j = 0; j < lists.count; j++) {
            const Ear at = ear(query, j);
            const float off = at.slope * float(kSetApart - 1), v = off * off + at.rough, left = Design::cold(query.floor, v) - at.own;
            const float gain = max(ask.gained[j], 1.0f);
            query.bounds[j] = left <= at.usual ? left : (left + (gain - 1) * at.usual) / gain;
        }
    }

    // Exact logits of slots, in `exact` from a place on.
    template <class Number, class Slot>
    void score(int64_t i, const Slot* slots, int64_t count, int64_t from = 0) {
        const Reader reader(ask.keys);
        for (int64_t j = 0; j < count; j++) places[from + j] = ask.places[slots[j]];
        each_record(reader, places + from, count, [&](int64_t j, const char* at) {
            exact[from + j] =
                score_of<double>(ask.queries[i], (const Number*)at, ask.keys.width, ask.metric) * ask.factor;
        });
    }

    void set_slopes(Query& query) const {
        const double along = ask.factor / __builtin_sqrt(double(ask.queries.width));
        const double turn = query.spread * ask.factor * ask.error_step / __builtin_sqrt(double(ask.queries.width));
        for (int64_t j = 0; j < lists.count; j++) {
            const double square = lists.offsets ? max(-query.raw[j] / ask.factor, 0.0) * 4 : query.length;
            query.slopes[j] = float(turn * __builtin_sqrt(square));
            query.usual[j] = float(kUsual * along * __builtin_sqrt(square)) * ask.spreads[j];
        }
    }

    // Tables, B, κ and the first threshold.
    template <class Number>
    void begin(Query& query, int64_t i) {
        make_tables(lists, ask.turned[i], entries, query.tables);
        query.length = ask.squares[i], query.spread = query.beta = 1, query.base = -kInfinity;
        query.low = uint32_t(ask.seeds[i]), query.high = uint32_t(ask.seeds[i] >> 32);
        const double rounding = query.tables.step * ask.factor;
        query.rough = float(rounding * rounding * double(lists.parts) / 12);
        for (int64_t j = 0; j < lists.count; j++) query.raw[j] = ask.factor * double(ask.nearness[i][j]);
        if (lists.offsets)
            for (int64_t j = 0; j < lists.count; j++) query.raw[j] -= ask.factor * query.length;
        set_slopes(query);
        const double per_unit = 2 / double(ask.error_step);
        for (int64_t j = 0; j < lists.count; j++) query.base = max(query.base, query.raw[j]);
        for (int64_t j = 0; j < lists.count; j++) {
            const double wide = query.slopes[j] * per_unit * ask.spreads[j];
            order[j] = ask.sizes[j] > 0 ? float(query.raw[j] - query.base + wide) : -__builtin_inff();
        }
        if (counts()) query.base = ask.factor * ask.least;
        near<Number>(query, i);
        all(query);
    }

    // Looks at the best lists: some of their records are scored.
    template <class Number>
    void near(Query& query, int64_t i) {
        const double each = max(double(total) / double(max(lists.count, int64_t(1))), 1.0);
        const int64_t wanted = min(lists.count, int64_t(double(kNear) / each) + 1);
        const float edge = level(order, lists.count, wanted, wanted / 4);
        uint32_t* slots = some_slots;
        Kept some{some_logits, some_squares, some_others, slots, 0, 0, 0};
        int64_t count = 0, chosen = 0;
        int64_t picks[64];
        for (int64_t j = 0; j < lists.count && chosen < 64; j++)
            if (order[j] >= edge && ask.sizes[j] > 0) picks[chosen++] = j;
        for (int64_t c = 0; c < chosen && some.count < 2 * kNear; c++)
            look<false>(query, picks[c], lists.starts[picks[c]], min(lists.starts[picks[c] + 1], lists.starts[picks[c]] + 256),
                 [&](Vec b, Vec v, uint32_t slot, uint32_t bits) {
                     bits &= above(everywhere(kApart), v);
                     if (bits && some.count < 2 * kNear) append(some, b, v, b, slot, bits);
                 });
        count = some.count;
        if (!count) return;
        const float best = level(some_logits, count, min(kBest, count), kBest / 4);
        const int64_t every = max(int64_t(1), count / kBest);
        uint32_t looked[4 * kBest];
        float guesses[4 * kBest], squares[4 * kBest];
        int64_t many = 0, plain = 0;
        for (int64_t j = 0; j < count && many < 2 * kBest; j++)
            if (some_logits[j] >= best) {
                looked[many] = slots[j], guesses[many] = some_logits[j], squares[many++] = some_squares[j];
            }
        plain = many;
        for (int64_t j = 0; j < count && many < 4 * kBest; j += every) {
            looked[many] = slots[j], guesses[many] = some_logits[j], squares[many++] = some_squares[j];
        }
        score<Number>(i, looked, many);
        double off = kPrior, checked = kPrior, top = -kInfinity, sum = 0;
        for (int64_t j = 0; j < many; j++) {
            if (j < plain) top = max(top, exact[j]);
            if (j < plain || !(squares[j] > 0)) continue;
            const double apart = exact[j] - query.base - double(guesses[j]);
            off += min(apart * apart / double(squares[j]), 1e4), checked++;
        }
        query.spread = max(__builtin_sqrt(off / checked), counts() ? 1.0 : kLeastSpread);
        set_slopes(query);
        if (counts()) return;
        // what controls leave of the squared weights of these: no draw decides whether they correct
        double squares_of = 0, left = 0;
        for (int64_t j = 0; j < many; j++) {
            const double v = double(squares[j]) * query.spread * query.spread, w = exp(min(exact[j] - top, 300.0));
            const double h = v <= kTame ? exp(min(query.base + double(guesses[j]) + v / 2 - top, 300.0)) : 0;
            squares_of += w * w, left += (w - h) * (w - h);
        }
        query.beta = left < squares_of ? 1 : 0;
        for (int64_t j = 0; j < plain; j++) sum += exp(exact[j] - top);
        query.base = top + log(sum);
    }

    // Looks at some blocks of all lists: B is raised to what they amount to, and the threshold set that about so many pass.
    void all(Query& query) {
        Kept some{some_logits, some_squares, some_others, some_slots, 0, 0, 0};
        int64_t count = 0;
        for (int64_t j = 0; j < lists.count; j++)
            for (int64_t block = (lists.starts[j] + stride - 1) / stride * stride; block < lists.starts[j + 1]; block += stride)
                look<false>(query, j, block, block + 1, [&](Vec b, Vec v, uint32_t slot, uint32_t bits) {
                    bits &= above(everywhere(kApart), v);
                    if (bits) append(some, b, v, b, slot, bits);
                });
        count = some.count;
        for (int64_t j = count; j % kLanes; j++) some_logits[j] = -1e30f, some_squares[j] = 1;
        float shift = 0;
        if (!counts()) {
            double mass = 0;
            for (int64_t j = 0; j < count; j += kLanes) {
                const Vec b = load(some_logits + j), v = load(some_squares + j);
                const Vec x = smaller(b + (Vec)((IntVec)(v * 0.5f) & (v <= kTame)) - kShift, Vec{});
                mass += sum(exp_negative(x));
            }
            shift = float(max(0.0, log(mass * double(stride)) + double(kShift)));
            query.base += shift;
        }
        float bins[kBins] = {};
        for (int64_t j = 0; j < count; j += kLanes) {
            float shares[kLanes];
            store(shares, Design::shares(load(some_logits + j) - shift, load(some_squares + j)));
            for (int64_t k = j; k < min(count, j + kLanes); k++) {
                const float at = shares[k - j] * (-1 / kBin);
                bins[int64_t(min(max(at, 0.0f), float(kBins - 1)))]++;
            }
        }
        // the largest τ that about so many reach: Σ min(1, e^(l - τ)), from the top downwards
        const double plain = kPlain * double(ask.budget), wanted = kMore * double(ask.budget) + 16;
        double sure = 0, beyond = 0;  // number above τ; Σ e^(l - τ) below, by a first look at all
        for (int64_t bin = 0; bin < kBins; bin++) beyond += bins[bin] * exp(-double(bin) * kBin);
        float threshold = 4 - kBin;
        double scale = exp(-double(threshold));
        for (int64_t bin = 0; threshold > kLeastThreshold; threshold -= kBin) {
            if ((sure + beyond * scale) * double(stride) >= wanted) break;
            scale *= exp(double(kBin));
            if (threshold <= 0 && bin < kBins) {
                sure += bins[bin], beyond -= bins[bin] * exp(-double(bin) * kBin), bin++;
                beyond = max(beyond, 0.0);
            }
        }
        query.kept.threshold = query.other.threshold = threshold, query.kept.count = query.other.count = 0;
        query.rate = min(max(plain, 1.0) / double(max(total, int64_t(1))), 1.0);
        query.floor = threshold + float(log(query.rate));
        set_bounds(query);
        if (ask.budget < total) return;
        query.kept.threshold = query.other.threshold = query.floor = -1e30f, query.rate = 1;  // all are drawn
        fill(query.bounds, lists.count, -__builtin_inff());
    }

    template <bool controls>
    void scan(Query& query, Kept& kept, int64_t i, int64_t list, int64_t first, int64_t last) {
        const Vec floor = everywhere(query.floor);
        Vec mass = {};
        look<true>(query, list, first, last, [&](Vec b, Vec v, uint32_t slot, uint32_t bits) {
            const Vec share = greater(Design::shares(b, v), floor), key = share + chances(slot, query.low, query.high);
            const uint32_t hits = above(key, everywhere(kept.threshold)) & above(everywhere(kApart), v) & bits;
            if (hits) append(kept, key, share, b, slot, hits);
            if (controls) mass += where(bits, Design::controls(b, v));
            if (kept.count > kept.room) raise(kept, largest_but(kept.keys, kept.count, ask.budget + 1));
        });
        if (controls) ask.masses[i][list] += double(sum(mass));
    }

    // What a record that was drawn by chance tells of the others; sums over those drawn, each divided by p.
    struct Told {
        double squared = 0, seen = 0, model = 0;      // Σ (1 - p) h² / p², of w², and as that is expected
        double terms = 0, expected = 0;               // Σ w² / p², and as it is expected
        double hidden = 0, alone = 0, missed = 0;     // of errors that may not show Σ w² / p², Σ w² / p, Σ w / p
        double last = 0;                              // of the first of these the term of the last record
        double worst = 0;                             // deviations of the record that errs the most, and a margin
    };

    // One record: b, σ², a, p and h, weights relative to e^top.
    void learn(const Query& query, double b, double v, double a, double p, double h, double rise, double z, Told& told) const {
        const double cap = max(1.0, 1 / query.spread), wide = __builtin_sqrt(v) * cap, far = 1 - p, pp = p * p;
        const double rare = normal(-ask.visible);
        const double rounded = z < kCertain ? kCertain * cap * __builtin_sqrt(double(query.rough)) : 0;
        const double above = a - b - rounded - 1e-3 - 1e-6 * __builtin_fabs(a + query.base);
        if (above > z * wide) told.worst = max(told.worst, kMargin * above / wide);
        double w, mean_square;
        if (counts()) {
            const double inside = normal(b / __builtin_sqrt(v));
            w = a >= 0, mean_square = inside * (1 - inside) + (inside - h) * (inside - h);
            const double tail = min(rare, normal(-__builtin_fabs(b) / wide));
            told.terms += (w - h) * (w - h) / pp, told.expected += mean_square / pp;
            told.hidden += tail / pp, told.alone += tail / p, told.missed += tail / p, told.last = tail / pp;
        } else {
            const double share = double(Design::shares(everywhere(float(b)), everywhere(float(v)))[0]);
            w = exp(a + rise), mean_square = exp(2 * (share + rise));
            told.terms += w * w / pp, told.expected += mean_square / pp;
            const double tail = min(normal(2 * wide - ask.visible) * exp(2 * (b + wide * wide + rise)), rare);
            told.hidden += tail / pp, told.alone += tail / p, told.last = tail / pp;
            told.missed += min(normal(wide - ask.visible) * exp(b + wide * wide / 2 + rise), rare) / p;
            mean_square *= normal(ask.visible - 2 * __builtin_sqrt(v));  // of errors that show
        }
        told.squared += far * h * h / pp;
        told.seen += far * w * w / pp, told.model += far * mean_square / pp;
    }

    bool counts() const { return ask.least == ask.least; }

    int64_t list_of(int64_t slot) const {
        int64_t low = 0, high = lists.count;
        while (high - low > 1) {
            const int64_t middle = (low + high) / 2;
            if (lists.starts[middle] * kBlock <= slot) low = middle;
            else high = middle;
        }
        return low;
    }

    // Scores what was drawn, adds those set apart, and tells what was not drawn.
    template <class Number>
    void finish(Query& query, int64_t i) {
        Kept &kept = query.kept, &other = query.other;
        if (other.count) {
            raise(kept, max(kept.threshold, other.threshold)), raise(other, kept.threshold);
            std::memcpy(kept.keys + kept.count, other.keys, other.count * 4);
            std::memcpy(kept.shares + kept.count, other.shares, other.count * 4);
            std::memcpy(kept.logits + kept.count, other.logits, other.count * 4);
            std::memcpy(kept.slots + kept.count, other.slots, other.count * 4);
            kept.count += other.count;
        }
        if (kept.count > ask.budget) raise(kept, largest_but(kept.keys, kept.count, ask.budget + 1));
        const int64_t drawn = kept.count, room = ask.positions.width, d = ask.queries.width;
        const double threshold = double(kept.threshold);
        score<Number>(i, kept.slots, drawn);
        int64_t apart = 0;
        int64_t* sets = (int64_t*)some_logits;  // which is read no more
        for (int64_t k = 0; k < ask.aparts; k++)
            if (ask.allowed[ask.apart[k] / kBlock] >> (ask.apart[k] % kBlock) & 1) sets[apart++] = k;
        int64_t* slots = (int64_t*)some_squares;
        for (int64_t k = 0; k < apart; k++) slots[k] = ask.apart[sets[k]];
        score<Number>(i, slots, apart, drawn);
        double top = query.base;  // plain draws are below it, or else very wrong
        for (int64_t k = 0; k < drawn + apart && !counts(); k++) top = max(top, exact[k]);
        const double rise = query.base - top, z = min(kCertain, __builtin_sqrt(double(d)) / max(query.spread, 1.0));
        const double unit = counts() ? 1 : exp(double(kShift) + rise);  // of controls
        double *held = ask.controlled[i], *masses = ask.masses[i];
        auto put = [&](int64_t at, int64_t from, double p, double h, int64_t list) {
            ask.positions[i][at] = places[from], ask.scores[i][at] = exact[from] / ask.factor;
            ask.logs[i][at] = float(-log(p)), held[at] = h, ask.own[i][at] = int32_t(list), ask.doubts[i][at] = 0;
        };
        Told told;
        int64_t count = 0;
        for (; count < min(drawn, room); count++) {
            const int64_t slot = kept.slots[count], list = list_of(slot);
            const float off = float(ask.errors[slot]) * query.slopes[list];
            float square = off * off + query.rough;
            if (lists.offsets) {
                const float offset = widen(lists.offsets[slot]) * lists.unit * float(ask.factor);
                square += offset * offset * kRounded;
            }
            const float b = kept.logits[count];
            const double p = chance_of(threshold - double(kept.shares[count]));
            const double h = ask.controls ? double(Design::controls(everywhere(b), everywhere(square))[0]) * unit : 0;
            put(count, count, p, h, list);
            if (p >= 1) continue;
            learn(query, double(b), double(square), exact[count] - query.base, p, h, rise, z, told);
            ask.doubts[i][count] = told.last;
        }
        const double beta = query.beta;
        double shifted = 0;
        if (ask.controls) {
            for (int64_t j = 0; j < lists.count; j++) masses[j] *= unit * beta;
            double seen = 0;
            for (int64_t k = 0; k < count; k++) {
                const double p = chance_of(threshold - double(kept.shares[k])), a = exact[k] - query.base;
                held[k] *= beta, masses[ask.own[i][k]] -= held[k] / p;
                const double left = (counts() ? double(a >= 0) : exp(a + rise)) - held[k];
                if (p < 1) seen += (1 - p) * left * left / (p * p);
            }
            for (int64_t j = 0; j < lists.count; j++) shifted += masses[j];
            told.seen = seen;
            if (!counts()) told.model = max(told.model + (beta * beta - 2 * beta) * told.squared, 0.0);
        }
        // of what no scan looked at, some by chance
        const double skip = 1 / log1p(-min(query.rate, 1 - 1e-12));
        int64_t slot = -1;
        for (uint64_t turn = 0; count < room && drawn + apart + int64_t(turn) < scratch_room; turn++) {
            const double chance = (double(hashed(turn, ask.seeds[i])) + 0.5) / 4294967296.0;
            const double ahead = floor(log(chance) * skip) + 1;
            if (!(ahead < double(lists.starts[lists.count] * kBlock - slot))) break;
            slot += int64_t(ahead);
            if (!(ask.allowed[slot / kBlock] >> (slot % kBlock) & 1)) continue;
            const int64_t list = list_of(slot);
            float b, v;
            if (one(query, list, slot, b, v) || v >= kApart) continue;
            score<Number>(i, &slot, 1, drawn + apart + int64_t(turn));
            put(count, drawn + apart + int64_t(turn), query.rate, 0, list);
            const double a = exact[drawn + apart + int64_t(turn)] - query.base;
            if (query.rate < 1) learn(query, double(b), double(v), a, query.rate, 0, rise, z, told);
            ask.doubts[i][count++] = told.last;
        }
        double thinned = -kInfinity;
        for (int64_t k = 0; k < apart && count < room; k++) {
            const double share = exact[drawn + k] - query.base + (counts() ? 0 : log(double(ask.scales[sets[k]])));
            const double key = share + double(chances(uint32_t(slots[k]), query.low, query.high)[0]);
            const double p = counts() ? 1.0 : chance_of(threshold - share);
            if (p < 1) thinned = threshold + rise;
            if (!counts() && !(key > threshold)) continue;
            put(count++, drawn + k, p, 0, list_of(slots[k]));
        }
        double widest = 0;
        for (int64_t j = 0; j < lists.count; j++) widest = max(widest, double(query.slopes[j]));
        widest = widest * double(ask.largest) / double(ask.error_step) + __builtin_sqrt(double(query.rough)) * 4;
        widest *= max(1.0, 1 / query.spread);
        const double most = max(z, told.worst);
        // the largest b + z σ - log p: where l = b + σ², and where p is about to be 1
        const double deep = __builtin_sqrt(max(-threshold, 0.0));
        double over = threshold + (counts() || widest > most / 2 ? most * most / 4 : most * widest - widest * widest);
        if (counts()) over = min(over, -log(query.rate));
        else if (widest > deep) over = max(over, widest * (most - 2 * deep));
        const bool others = drawn + apart < total && query.rate < 1;
        const double ratio = told.expected > 0 ? max(1.0, told.terms / told.expected) : 1.0;
        ask.bounds[0][i] = top;
        const double wrong = told.worst > kAbsurd ? kInfinity : 0;
        ask.bounds[1][i] = !others ? -kInfinity : over + rise + wrong;
        ask.bounds[2][i] = !others ? 0 : told.hidden * ratio + wrong;
        ask.bounds[8][i] = !others ? 0 : told.missed * ratio + wrong;
        ask.bounds[9][i] = !others ? 0 : told.alone * ratio + wrong;
        ask.bounds[3][i] = told.seen > 0 ? max(1.0, told.model / told.seen) : 1;
        ask.bounds[4][i] = shifted;
        ask.bounds[5][i] = thinned;
        ask.bounds[6][i] = told.model;
        ask.bounds[7][i] = query.spread;
        for (int64_t k = count; k < room; k++) {
            ask.positions[i][k] = -1, ask.scores[i][k] = -kInfinity, ask.logs[i][k] = 0, ask.own[i][k] = 0;
            held[k] = 0, ask.doubts[i][k] = 0;
        }
    }

    // One of two halves of the lists for the only query.
    void scan_half(int64_t half) {
        const int64_t blocks = lists.starts[lists.count];
        Kept& kept = half ? queries[0].other : queries[0].kept;
        for (int64_t j = 0; j < lists.count; j++) {
            if ((lists.starts[j] >= blocks / 2) != half || !(ask.sizes[j] > 0)) continue;
            if (ask.controls) scan<true>(queries[0], kept, 0, j, lists.starts[j], lists.starts[j + 1]);
            else scan<false>(queries[0], kept, 0, j, lists.starts[j], lists.starts[j + 1]);
        }
    }

    template <class Number>
    void run() {
        const int64_t step = max(kCached / (lists.parts * 8) / 2 * 2, int64_t(2));  // blocks
        for (int64_t low = 0; low < ask.queries.rows; low += kTogether) {
            const int64_t count = min(kTogether, ask.queries.rows - low);
            for (int64_t i = 0; i < count; i++) begin<Number>(queries[i], low + i);
            for (int64_t j = 0; j < lists.count; j++) {
                if (!(ask.sizes[j] > 0)) continue;
                for (int64_t first = lists.starts[j], last = lists.starts[j + 1]; first < last; first += step)
                    for (int64_t i = 0; i < count; i++) {
                        const int64_t until = min(first + step, last);
                        if (ask.controls) scan<true>(queries[i], queries[i].kept, low + i, j, first, until);
                        else scan<false>(queries[i], queries[i].kept, low + i, j, first, until);
                    }
            }
            for (int64_t i = 0; i < count; i++) finish<Number>(queries[i], low + i);
        }
    }
};

}  // namespace

int64_t draw_scratch(const Draw& ask) {
    Memory memory{nullptr};
    Drawing<Weights> drawing(ask, memory, false);
    return memory.used + 64;
}

// The whole of it, or a step of it for one query: the start, a half of the scan, the end.
void draw(const Draw& ask, DrawStep step) {
    Memory memory{ask.scratch};
    const bool fresh = step == DrawStep::all || step == DrawStep::begin;
    auto drawn = [&](auto drawing, auto number) {
        using Number = decltype(number);
        if (step == DrawStep::all) drawing.template run<Number>();
        else if (step == DrawStep::begin) drawing.template begin<Number>(drawing.queries[0], 0);
        else if (step == DrawStep::end) drawing.template finish<Number>(drawing.queries[0], 0);
        else drawing.scan_half(step == DrawStep::second);
    };
    auto by_number = [&](auto drawing) {
        if (ask.keys.kind == Kind::half) drawn(drawing, Half());
        else drawn(drawing, float());
    };
    if (ask.least != ask.least) by_number(Drawing<Weights>(ask, memory, fresh));
    else by_number(Drawing<Chances>(ask, memory, fresh));
}

}  // namespace SOFTDB_LEVEL
}  // namespace softdb
