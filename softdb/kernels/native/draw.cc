// Draw records in one scan of all codes. Logits are a = φ s, weights e^a, Z their sum.
//
// A code gives an estimate â of a record's logit and its standard error σ = κ φ u ε / √d, with ε = |k - k̂| of the record
// and u = |q|, or 2 |q - c| for l2; κ is fitted to the errors of some records that are scored exactly for this query. With
// b = â - B, B about log Z, the root mean square of a weight, given that none exceeds Z, is about e^(B + l),
//
//     l = b + σ²  where b <= -2 σ²;      -b² / 4 σ²  where b < 0;      0 else
//
// Each record has a permanent random number u, a hash of its slot and the query's seed. It is drawn if l - log u >= τ, τ
// the (m + 1)-th largest of these sums; so its probability is p = min(1, e^(l - τ)), given τ, and sums over the records
// drawn, divided by p, are unbiased and their terms uncorrelated (Duffield, Lund and Thorup 2007, priority sampling). A
// share kPlain of the draws is uniform. log u is interpolated between powers of two, and p accordingly.
//
// Controls: if estimates are good, h = e^(b + σ²/2) is summed over all records of a list, S_j = Σ h, and the sum over
// the records drawn is corrected by β (S_j - Σ h / p), whose mean is zero (Särndal, Swensson and Wretman 1992, chapter
// 6). β is 1 if this lowers the squared errors of the pilot's records, which do not depend on draws; else 0.
//
// Counts: B is the radius. Doubtful records are drawn most, l = -(b / σ)² / 4, and h, the probability to be inside, is about
// Φ(b / σ).
//
// Samples (`points` = λ > 0): a record is a candidate if U - log u >= -log λ, U >= a - B a certain bound by its code's
// error and its list's longest residual, so with a probability p >= 1 - e^-w, w = λ e^(a - B). The caller accepts it with
// probability (1 - e^-w) / p, as a Poisson process of rate w has a point in (0, 1): points are independent records.
//
// Undrawn records have two bounds, relative to e^B, which docs/error-bars.md derives: `unseen`, the largest w / p, from
// a <= â + z σ, z = 5, or the certain a <= â + √d σ; and `hidden`, Σ w² / p over errors beyond x deviations, Φ(2 σ - x)
// of the mean square, estimated from the records drawn.
//
// Cost of a query over n slots: n (parts / 2 + 4) bytes of codes, read once for kAtOnce queries of a batch where the
// processor permutes bytes, and 2 m d operations for exact scores of m draws.
#include "draw.h"

#include <sched.h>

#include "draw_parts.h"
#include "pooling.h"

namespace softdb {
namespace SOFTDB_LEVEL {

namespace {

constexpr int64_t kTogether = 64;      // queries that scan the codes of a list together
constexpr int64_t kCached = 24 << 10;  // bytes of codes that stay in the L1 cache
constexpr int64_t kNear = 2048;        // number of slots of the best lists in the pilot, the first look at some records
constexpr int64_t kBest = 48;          // number of pilot slots scored as best by code; as many others are scored
constexpr int64_t kSome = 512;         // number of blocks of all lists in the pilot
constexpr int64_t kBins = 256;
constexpr float kBin = 0.125f;         // width of a bin, in logits of weights
constexpr double kPlain = 0.05;        // share of the draws that are uniform
constexpr double kMore = 1.3;          // records that pass the first threshold, over those wanted
constexpr float kLeastThreshold = -14; // least threshold that is tried
constexpr double kUsual = 1.5;         // deviations that an estimate along a residual reaches by chance
constexpr double kAbsurd = 20;         // an error of more deviations makes all bounds by codes infinite
constexpr double kMargin = 1.3;        // safety factor on the deviations of an error beyond kCertain
constexpr double kCertain = 5;         // deviations that no error is expected to exceed
constexpr double kLeastSpread = 0.7;  // least κ
constexpr double kPrior = 8;           // weight of the prior κ = 1, in records
constexpr float kRounded = 1.0f / (1 << 24);  // bound on the mean square of the rounding of an offset
constexpr float kLongestWait = 22.2f;    // -log of the least u
constexpr float kHalfRounded = 5e-4f;    // relative rounding of a float16
constexpr double kLost = 0.5;            // largest share of the drawn weights that a correction may remove
constexpr int64_t kShares = 4;           // number of parts of a scan for each thread, as threads may begin late
constexpr int64_t kPatience = 20000;     // number of idle loops after which a thread yields
constexpr auto product = [](auto a, auto b) { return a * b; };

// Scored records: first those drawn by code, then uniform draws, then records set apart.
struct Sample {
    int64_t *slots, *positions;
    int32_t* lists;
    float *logits, *squares, *shares;  // b, σ², l
    float *above, *chances, *controls, *doubts;  // a - B, p, h, and terms of `hidden`
    double* exact;                     // a
    int64_t drawn, plain, count;       // end of the first, the second and the third group
};

struct Query {
    ListState tables;
    Kept kept[kMostThreads];  // one for each part of the scan
    Sample sample;
    double* raw;     // (lists,) logits of the centroids
    double* masses;  // (lists,) sums of the controls of their records, then corrections
    float *seen, *turned;  // (d,) query minus the origin; (parts · word,) rotated query
    float* sides;    // (lists,) |q|, for l2 2 |q - c|
    float* slopes;   // (lists,) σ of a record whose error is one step
    float* bounds;   // (lists,) least y that matters; infinite if no code in the list reaches it
    float* usual;    // (lists,) the largest estimate along a residual that chance explains
    double base;     // B
    double spread;   // κ
    double beta;     // 1 if controls correct the answer, else 0
    double rate;     // rate of uniform draws
    float floor;     // the l with the same probability
    float rough;     // mean square of the rounding of tables
    double factor;   // logit / score
    double length;   // |q|² of the query minus the origin
    double raised;   // expected variance over that of the draws, at least 1
    double mass;     // Ẑ / e^top
    double candidates;  // expected number of candidates, for samples
    uint64_t seed;
    uint32_t low, high;  // the two halves of the seed
};

// The draw for some queries.
template <class Design>
struct Drawing {
    const Draw& args;
    const Lists& lists;
    Query* queries;
    float *entries, *order, *some_logits, *some_squares, *some_others;
    uint32_t* some_slots;
    int64_t stride, total = 0, *cuts, *ranks;
    double *weights, *chances, *doubts, *controls;  // (w,) for the query in progress
    Query** scanners;  // queries that scan a list
    BlockSums* ready;  // sums of a few blocks for kAtOnce queries
    const bool at_once = adds_at_once();
    const int64_t scans;  // number of parts of the scan
    double* heads;        // (scans,) sums of the controls of a list whose first records are in an earlier part
    double* totals[kMostThreads];                   // (v,) for each part of its records
    float* lines[kMostThreads];                     // (4 v,)
    Errors* errors;                                 // of each part

    // `fresh`: the memory is not initialised.
    Drawing(const Draw& args, Memory& memory, bool fresh)
        : args(args), lists(args.lists), scans(args.threads > 1 ? min(args.threads * kShares, kMostThreads) : 1) {
        const int64_t together = min(kTogether, max(args.queries.rows, int64_t(1))), blocks = lists.starts[lists.count];
        stride = max(int64_t(1), blocks / kSome);
        queries = memory.take<Query>(together), scanners = memory.take<Query*>(together);
        ready = memory.take<BlockSums>(kAtOnce * (blocks_together() / kGroup + 1));
        entries = memory.take<float>(lists.parts * kBlock);
        order = memory.take<float>(lists.count + kLanes);
        cuts = memory.take<int64_t>(kMostThreads + 1), heads = memory.take<double>(kMostThreads);
        const int64_t some = max((blocks / stride + 1) * kBlock, 3 * kNear) + 2 * kBlock;
        some_logits = memory.take<float>(some);
        some_squares = memory.take<float>(some), some_others = memory.take<float>(some);
        some_slots = memory.take<uint32_t>(some);
        const int64_t room = min(3 * args.budget + 64, (blocks / scans + 2) * kBlock), width = max(args.positions.width, 4 * kBest) + 2 * kBlock;
        const int64_t v = args.output.width;
        weights = memory.take<double>(width), chances = memory.take<double>(width);
        doubts = memory.take<double>(width), controls = memory.take<double>(width);
        ranks = memory.take<int64_t>(width), errors = memory.take<Errors>(kMostThreads);
        for (int64_t part = 0; part < args.threads; part++) {
            totals[part] = memory.take<double>(v), lines[part] = memory.take<float>(4 * v);
            Errors sums;
            sums.first = memory.take<double>(v), sums.drift = memory.take<double>(v);
            sums.signed_sums = memory.take<float>(kSigns * v), sums.roots = memory.take<double>(kSigns);
            if (memory.at && fresh) errors[part] = sums;
        }
        for (int64_t i = 0; i < together; i++) {
            Query query;
            query.tables.low = memory.take<uint8_t>(lists.parts * 8);
            query.tables.high = memory.take<uint8_t>(lists.parts * 8);
            query.seen = memory.take<float>(args.queries.width), query.turned = memory.take<float>(args.rotation.rows);
            query.raw = memory.take<double>(lists.count), query.masses = memory.take<double>(lists.count);
            query.sides = memory.take<float>(lists.count);
            query.slopes = memory.take<float>(lists.count), query.usual = memory.take<float>(lists.count);
            query.bounds = memory.take<float>(lists.count);
            for (int64_t part = 0; part < scans; part++)
                query.kept[part] = kept_in(memory, room, part ? room : scans * room);
            Sample& sample = query.sample;
            sample.slots = memory.take<int64_t>(width), sample.positions = memory.take<int64_t>(width);
            sample.lists = memory.take<int32_t>(width), sample.exact = memory.take<double>(width);
            float** const columns[] = {&sample.logits, &sample.squares, &sample.shares, &sample.above,
                                       &sample.chances, &sample.controls, &sample.doubts};
            for (float** column : columns) *column = memory.take<float>(width);
            if (memory.at && fresh) queries[i] = query;
        }
        for (int64_t j = 0; memory.at && j < lists.count; j++) total += int64_t(args.sizes[j]);
    }

    // Number of blocks whose codes stay in the L1 cache while all queries scan them.
    int64_t blocks_together() const { return max(kCached / (lists.parts * 8) / kGroup * kGroup, int64_t(kGroup)); }

    static Kept kept_in(Memory& memory, int64_t room, int64_t places) {
        Kept kept{};
        kept.room = room, places += 2 * kBlock;
        kept.keys = memory.take<float>(places), kept.shares = memory.take<float>(places);
        kept.logits = memory.take<float>(places), kept.squares = memory.take<float>(places);
        kept.slots = memory.take<uint32_t>(places);
        return kept;
    }

    // Estimates of the records of one list, as one query sees it. y is what the code says, b = own + y, and more where y
    // is larger than chance has it: then the record lies along the query.
    struct CodeView {
        float step, base, unit, own, slope, rough, usual, most, certain, pad;

        SOFTDB_INLINE Vec from_code(const Lists& lists, Vec sums, int64_t slot) const {
            const Vec y = sums * step + base;
            return lists.offsets ? y - load(lists.offsets + slot) * unit : y;
        }
        SOFTDB_INLINE Vec logit(Vec y, Vec gain) const {
            return smaller(y + greater(y - usual, Vec{}) * (gain - 1.0f), everywhere(most)) + own;
        }
        // A certain upper bound of the logit.
        SOFTDB_INLINE Vec cap(const Lists& lists, Vec y, Vec steps, int64_t slot) const {
            Vec room = steps * certain + pad;
            if (lists.offsets) {
                const Vec offset = load(lists.offsets + slot) * unit;
                room += (offset < 0.0f ? -offset : offset) * kHalfRounded;
            }
            return (steps < float(kSetApart) ? smaller(y + room, everywhere(most + pad)) : everywhere(most + pad)) + own;
        }
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

    CodeView view(const Query& query, int64_t list) const {
        const float factor = float(query.factor), spread = args.spreads[list], square = lists.offsets ? factor * spread * spread : 0;
        return {query.tables.step * factor, query.tables.base * factor, lists.unit * factor,
                float(query.raw[list] - query.base), query.slopes[list], query.rough, query.usual[list] - square,
                factor * query.sides[list] * args.radii[list], factor * query.sides[list] * args.error_step,
                0.5f * query.tables.step * factor * float(lists.parts) + 1e-3f + 1e-6f * float(__builtin_fabs(query.raw[list]))};
    }

    // Calls take(b, σ², first slot, bits) for the allowed slots of some blocks of a list, where some y is above a bound;
    // with caps in the place of b.
    template <bool bounded, bool caps = false, class Take>
    SOFTDB_INLINE void look(const Query& query, int64_t list, int64_t first, int64_t last, Take take,
                            const BlockSums* ready = nullptr) const {
        const CodeView at = view(query, list);
        const float bound = bounded ? query.bounds[list] : 0;
        // whole numbers of steps, where nothing but these tells
        const float steps = lists.offsets || !bounded ? -1 : floor((bound - at.base) / max(at.step, 1e-30f));
        const Eight edge = Eight{} + uint16_t(max(0.0f, min(steps, 65534.0f)));
        const bool whole = bounded && steps >= 0;
        auto pass = [&](const BlockSums& sums) { return whole && none_above(sums, edge); };
        auto ahead = [&](int64_t block) { fetch_all(block + kBlocksAhead, kGroup); };
        each_block(lists, args.allowed, query.tables, first, last, ready, ahead, pass, [&](const BlockSums& sums, int64_t block, int u) {
            if (whole && none_above(sums, u, edge)) return;
            for (int lane = 0; lane < kBlock; lane += kLanes) {
                const int64_t slot = block * kBlock + lane;
                const Vec y = at.from_code(lists, widened(sums, u, lane), slot);
                uint32_t bits = uint32_t(args.allowed[block]) >> lane;
                if constexpr (kLanes < 16) bits &= (1u << kLanes) - 1;
                if (bounded) bits &= above(y, everywhere(bound));
                if (!bits) continue;
                if (caps) {
                    take(at.cap(lists, y, octets(args.errors + slot), slot), Vec{}, uint32_t(slot), bits);
                    continue;
                }
                const Vec b = at.logit(y, octets(args.gains + slot) * kGain);
                take(b, at.square(lists, octets(args.errors + slot), slot), uint32_t(slot), bits);
            }
        });
    }

    // Prefetch some blocks into the L2 cache.
    void fetch_all(int64_t block, int64_t count) const {
        const char* codes = (const char*)lists.codes + block * lists.parts * 8;
        for (int64_t line = 0; line < count * lists.parts * 8; line += kLine) __builtin_prefetch(codes + line, 0, 2);
        __builtin_prefetch(args.gains + block * kBlock, 0, 2);
        __builtin_prefetch(args.errors + block * kBlock, 0, 2);
        if (lists.offsets) __builtin_prefetch(lists.offsets + block * kBlock, 0, 2);
    }

    // b and σ² of one slot; false if no scan reads the slot.
    bool in_scan(const Query& query, int64_t list, int64_t slot, float& b, float& v) const {
        const CodeView at = view(query, list);
        const int64_t block = slot / kBlock, lane = slot % kBlock / kLanes * kLanes, place = slot % kBlock;
        const uint8_t* codes = lists.codes + block * lists.parts * 8;
        int64_t total = 0;
        for (int64_t part = 0; part < lists.parts; part++) {
            const uint8_t* row = codes + part / 2 * kBlock;
            const uint8_t pair = row[place < 8 ? 2 * place : 2 * (place - 8) + 1];
            total += part % 2 ? query.tables.high[part / 2 * kBlock + (pair >> 4)] : query.tables.low[part / 2 * kBlock + (pair & 15)];
        }
        const int64_t first = block * kBlock + lane;
        const Vec y = at.from_code(lists, everywhere(float(total)), first);
        b = at.logit(y, octets(args.gains + first) * kGain)[place % kLanes];
        v = at.square(lists, octets(args.errors + first), first)[place % kLanes];
        return y[place % kLanes] > query.bounds[list];
    }

    // Below these nothing is drawn but by the plain draws, and controls are 0; infinite where no residual of a list can
    // be above, and that list is not looked at.
    void set_bounds(Query& query) const {
        for (int64_t j = 0; j < lists.count; j++) {
            const CodeView at = view(query, j);
            const float off = at.slope * args.most_errors[j], v = off * off + at.rough, gain = max(args.gained[j], 1.0f);
            const float left = Design::cold(query.floor, v) - at.own;
            query.bounds[j] = left <= at.usual ? left : (left + (gain - 1) * at.usual) / gain;
            if (!(args.sizes[j] > 0) || at.most <= left) query.bounds[j] = __builtin_inff();
        }
    }

    // Threshold and bounds of candidates for samples; none where these would be more than the budget.
    void set_caps(Query& query) {
        const float threshold = float(-log(args.points)), least = threshold - kLongestWait;
        double expected = 0;
        for (int64_t block = 0, j = 0; block < lists.starts[lists.count]; block += stride) {
            while (lists.starts[j + 1] <= block) j++;
            look<false, true>(query, j, block, block + 1, [&](Vec cap, Vec, uint32_t, uint32_t bits) {
                expected += double(sum(where(bits, exp_at_most(cap - threshold))));
            });
        }
        query.candidates = expected * double(stride);
        const bool many = query.candidates > double(args.budget);
        for (int64_t j = 0; j < lists.count; j++) {
            const CodeView at = view(query, j);
            const bool none = many || !(args.sizes[j] > 0) || at.most + at.pad + at.own <= least;
            query.bounds[j] = none ? __builtin_inff() : least - at.own - at.pad - at.certain * kSetApart;
        }
        for (int64_t k = 0; k < args.aparts && !many; k++) query.bounds[list_of(args.apart[k])] = -__builtin_inff();
        for (int64_t part = 0; part < scans; part++) query.kept[part].threshold = threshold, query.kept[part].count = 0;
    }

    // Write the candidates to the caller's arrays.
    template <class Number>
    void propose(Query& query, int64_t i) {
        Sample& sample = query.sample;
        int64_t count = 0;
        const float threshold = float(-log(args.points));
        for (int64_t part = 0; part < scans; part++) {
            const Kept& kept = query.kept[part];
            const bool whole = kept.threshold == threshold && count + kept.count <= args.positions.width;
            if (!whole) query.candidates = kInfinity;
            for (int64_t k = 0; k < kept.count && whole; k++, count++) {
                sample.slots[count] = kept.slots[k];
                chances[count] = 1 - chance_of(double(threshold) - double(kept.shares[k])), controls[count] = 0;
            }
        }
        sample.count = count;
        share<Number>(scoring, query, i);
        set(i, Figure::base, query.base), set(i, Figure::expected, query.candidates);
        write(query, i, false);
    }

    // Compute exact logits for some slots of a sample.
    template <class Number>
    void score(int64_t i, Sample& sample, int64_t first, int64_t last) {
        const Reader reader(args.keys);
        for (int64_t j = first; j < last; j++) sample.positions[j] = args.places[sample.slots[j]];
        each_record(reader, sample.positions + first, last - first, [&](int64_t j, const char* at) {
            sample.exact[first + j] =
                score_of<double>(args.queries[i], (const Number*)at, args.keys.width, args.metric) * args.factors[i];
        });
    }

    void set_slopes(Query& query) const {
        const double along = query.factor / __builtin_sqrt(double(args.queries.width));
        const double turn = query.spread * query.factor * args.error_step / __builtin_sqrt(double(args.queries.width));
        for (int64_t j = 0; j < lists.count; j++) {
            const double square = lists.offsets ? max(-query.raw[j] / query.factor, 0.0) * 4 : query.length;
            query.sides[j] = float(__builtin_sqrt(square));
            query.slopes[j] = float(turn) * query.sides[j];
            query.usual[j] = float(kUsual * along) * query.sides[j] * args.spreads[j];
        }
    }

    // Seed some queries, compute the scores of all centroids, and rotate the queries.
    void prepare(int64_t low, int64_t count) {
        seed(low, count);
        rotate(count, 0, 1);
    }

    void seed(int64_t low, int64_t count) {
        const int64_t d = args.queries.width;
        for (int64_t i = 0; i < count; i++) {
            Query& query = queries[i];
            uint64_t seed = args.seeds[0] + (args.points > 0 ? uint64_t(args.first_query + low + i + 1) * 0x9E3779B97F4A7C15u : 0);
            const float* given = args.queries[low + i];
            for (int64_t t = 0; t < d; t++) {
                uint32_t bits;
                std::memcpy(&bits, given + t, sizeof bits);
                seed += bits * args.seeds[t];
                query.seen[t] = lists.origin ? given[t] - lists.origin[t] : given[t];
            }
            query.seed = seed, query.low = uint32_t(seed), query.high = uint32_t(seed >> 32);
            query.factor = args.factors[low + i];
            query.length = double(summed(query.seen, query.seen, d, product));
        }
    }

    // One of some parts of the rotated queries and of the scores of centroids.
    void rotate(int64_t count, int64_t part, int64_t parts) {
        const int64_t d = args.queries.width, rows = args.rotation.rows;
        for (int64_t i = 0; i < count; i++)
            for (int64_t t = rows * part / parts; t < rows * (part + 1) / parts; t++)
                queries[i].turned[t] = summed(queries[i].seen, args.rotation[t], d, product);
        for (int64_t j = lists.count * part / parts; j < lists.count * (part + 1) / parts; j++)
            for (int64_t i = 0; i < count; i++) {
                const double near = double(summed(queries[i].seen, args.centroids[j], d, product));
                queries[i].raw[j] = queries[i].factor * (lists.origin ? 2 * near - double(args.lengths[j]) - queries[i].length : near);
            }
    }

    // Compute tables, B, κ and the first threshold.
    template <class Number>
    void begin(Query& query, int64_t i) {
        make_tables(lists, query.turned, entries, query.tables);
        query.spread = query.beta = 1, query.base = -kInfinity;
        fill(query.masses, lists.count, 0.0);
        const double rounding = query.tables.step * query.factor;
        query.rough = float(rounding * rounding * double(lists.parts) / 12);
        set_slopes(query);
        const double per_unit = 2 / double(args.error_step);
        for (int64_t j = 0; j < lists.count; j++) query.base = max(query.base, query.raw[j]);
        for (int64_t j = 0; j < lists.count; j++) {
            const double wide = query.slopes[j] * per_unit * args.spreads[j];
            order[j] = args.sizes[j] > 0 ? float(query.raw[j] - query.base + wide) : -__builtin_inff();
        }
        if (counts()) query.base = query.factor * args.least;
        near<Number>(query, i);
        all(query);
    }

    // First part of the pilot: score some records of the best lists.
    template <class Number>
    void near(Query& query, int64_t i) {
        const double each = max(double(total) / double(max(lists.count, int64_t(1))), 1.0);
        const int64_t wanted = min(lists.count, int64_t(double(kNear) / each) + 1);
        const float edge = level(order, lists.count, wanted, wanted / 4);
        uint32_t* slots = some_slots;
        Kept some{some_logits, some_others, some_others, some_squares, slots, 0, 0, 0};
        int64_t count = 0, chosen = 0;
        int64_t picks[64];
        for (int64_t j = 0; j < lists.count && chosen < 64; j++)
            if (order[j] >= edge && args.sizes[j] > 0) picks[chosen++] = j;
        for (int64_t c = 0; c < chosen && some.count < 2 * kNear; c++)
            look<false>(query, picks[c], lists.starts[picks[c]], min(lists.starts[picks[c] + 1], lists.starts[picks[c]] + 256),
                 [&](Vec b, Vec v, uint32_t slot, uint32_t bits) {
                     bits &= above(everywhere(kApart), v);
                     if (bits && some.count < 2 * kNear) append(some, b, b, b, v, slot, bits);
                 });
        count = some.count;
        if (!count) return;
        const float best = level(some_logits, count, min(kBest, count), kBest / 4);
        const int64_t every = max(int64_t(1), count / kBest);
        int64_t* looked = query.sample.slots;
        const double* exact = query.sample.exact;
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
        score<Number>(i, query.sample, 0, many);
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
        Kept some{some_logits, some_others, some_others, some_squares, some_slots, 0, 0, 0};
        int64_t count = 0;
        for (int64_t block = 0, j = 0; block < lists.starts[lists.count]; block += stride) {
            while (lists.starts[j + 1] <= block) j++;
            if (block + 8 * stride < lists.starts[lists.count]) fetch_all(block + 8 * stride, 1);
            look<false>(query, j, block, block + 1, [&](Vec b, Vec v, uint32_t slot, uint32_t bits) {
                bits &= above(everywhere(kApart), v);
                if (bits) append(some, b, b, b, v, slot, bits);
            });
        }
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
        if (args.points > 0) return set_caps(query);
        float bins[kBins] = {};
        for (int64_t j = 0; j < count; j += kLanes) {
            float shares[kLanes];
            store(shares, Design::shares(load(some_logits + j) - shift, load(some_squares + j)));
            for (int64_t k = j; k < min(count, j + kLanes); k++) {
                const float at = shares[k - j] * (-1 / kBin);
                bins[int64_t(min(max(at, 0.0f), float(kBins - 1)))]++;
            }
        }
        // the largest τ for which Σ min(1, e^(l - τ)) is about the wanted number, searched from the top
        const double plain = kPlain * double(args.budget), wanted = kMore * double(args.budget) + 16;
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
        for (int64_t part = 0; part < scans; part++) query.kept[part].threshold = threshold, query.kept[part].count = 0;
        query.rate = min(max(plain, 1.0) / double(max(total, int64_t(1))), 1.0);
        query.floor = threshold + float(log(query.rate));
        set_bounds(query);
        if (args.budget < total) return;
        query.floor = -1e30f, query.rate = 1;  // all records are drawn
        for (int64_t part = 0; part < scans; part++) query.kept[part].threshold = query.floor;
        fill(query.bounds, lists.count, -__builtin_inff());
    }

    // Returns the sum of the controls. `ready`: the sums of the blocks, or null.
    double scan(Query& query, Kept& kept, int64_t list, int64_t first, int64_t last, const BlockSums* ready = nullptr) {
        if (query.bounds[list] == __builtin_inff()) return 0;
        if (args.points > 0) return scan_caps(query, kept, list, first, last, ready);
        if (args.controls && query.beta > 0) return scan_with<true>(query, kept, list, first, last, ready);
        return scan_with<false>(query, kept, list, first, last, ready);
    }

    double scan_caps(Query& query, Kept& kept, int64_t list, int64_t first, int64_t last, const BlockSums* ready) {
        look<true, true>(query, list, first, last, [&](Vec cap, Vec v, uint32_t slot, uint32_t bits) {
            const Vec key = cap + random_waits(slot, query.low, query.high);
            const uint32_t hits = above(key, everywhere(kept.threshold)) & bits;
            if (__builtin_expect(!hits, 1)) return;
            append(kept, key, cap, cap, v, slot, hits);
            if (kept.count > kept.room) raise(kept, largest_but(kept.keys, kept.count, args.budget + 1));
        }, ready);
        return 0;
    }

    template <bool controls>
    double scan_with(Query& query, Kept& kept, int64_t list, int64_t first, int64_t last, const BlockSums* ready) {
        const Vec floor = everywhere(query.floor);
        Vec mass = {};
        look<true>(query, list, first, last, [&](Vec b, Vec v, uint32_t slot, uint32_t bits) {
            const Vec share = greater(Design::shares(b, v), floor), key = share + random_waits(slot, query.low, query.high);
            const uint32_t hits = above(key, everywhere(kept.threshold)) & above(everywhere(kApart), v) & bits;
            if (controls) mass += where(bits, Design::controls(b, v));
            if (__builtin_expect(!hits, 1)) return;
            append(kept, key, share, b, v, slot, hits);
            if (kept.count > kept.room) raise(kept, largest_but(kept.keys, kept.count, args.budget + 1));
        }, ready);
        return double(sum(mass));
    }

    // Scan the same blocks for some queries.
    void scan_by(Query* const* scanners, int64_t count, int64_t list, int64_t first, int64_t last) {
        const int64_t groups = (last - first + kGroup - 1) / kGroup;
        int64_t i = 0;
        for (; at_once && i + kAtOnce <= count; i += kAtOnce) {
            const ListState* states[kAtOnce];
            for (int u = 0; u < kAtOnce; u++) states[u] = &scanners[i + u]->tables;
            add_up_at_once(lists.codes + first * lists.parts * 8, lists.parts * 8, args.allowed + first, last - first, states, ready);
            for (int u = 0; u < kAtOnce; u++) {
                Query& query = *scanners[i + u];
                query.masses[list] += scan(query, query.kept[0], list, first, last, ready + u * groups);
            }
        }
        for (; i < count; i++) scanners[i]->masses[list] += scan(*scanners[i], scanners[i]->kept[0], list, first, last);
    }

    bool counts() const { return args.least == args.least; }

    int64_t list_of(int64_t slot) const {
        int64_t low = 0, high = lists.count;
        while (high - low > 1) {
            const int64_t middle = (low + high) / 2;
            if (lists.starts[middle] * kBlock <= slot) low = middle;
            else high = middle;
        }
        return low;
    }

    bool takes_part(int64_t slot) const { return args.allowed[slot / kBlock] >> (slot % kBlock) & 1; }

    // The records kept, cut to the budget; a uniform draw from those that no scan looked at; and those set apart.
    void choose(Query& query) {
        Kept& kept = query.kept[0];
        for (int64_t part = 1; part < scans; part++) kept.threshold = max(kept.threshold, query.kept[part].threshold);
        raise(kept, kept.threshold);
        for (int64_t part = 1; part < scans; part++) {
            Kept& other = query.kept[part];
            raise(other, kept.threshold);
            std::memcpy(kept.keys + kept.count, other.keys, size_t(other.count) * 4);
            std::memcpy(kept.shares + kept.count, other.shares, size_t(other.count) * 4);
            std::memcpy(kept.logits + kept.count, other.logits, size_t(other.count) * 4);
            std::memcpy(kept.squares + kept.count, other.squares, size_t(other.count) * 4);
            std::memcpy(kept.slots + kept.count, other.slots, size_t(other.count) * 4);
            kept.count += other.count;
        }
        if (kept.count > args.budget) raise(kept, largest_but(kept.keys, kept.count, args.budget + 1));
        Sample& sample = query.sample;
        const int64_t room = args.positions.width - args.aparts;
        sample.drawn = min(kept.count, room);
        for (int64_t k = 0, list = 0; k < sample.drawn; k++) {  // sorted within each part
            const int64_t slot = kept.slots[k];
            if (slot < lists.starts[list] * kBlock) list = 0;
            while (lists.starts[list + 1] * kBlock <= slot) list++;
            sample.slots[k] = slot, sample.lists[k] = int32_t(list), sample.squares[k] = kept.squares[k];
            sample.logits[k] = kept.logits[k], sample.shares[k] = kept.shares[k];
            sample.chances[k] = float(chance_of(double(kept.threshold) - double(kept.shares[k])));
        }
        // uniform draws from the slots that no scan read
        const double skip = 1 / log1p(-min(query.rate, 1 - 1e-12));
        int64_t count = sample.drawn, slot = -1;
        for (uint64_t turn = 0; count < room; turn++) {
            const double ahead = floor(log(uniform(turn, query.seed)) * skip) + 1;
            if (!(ahead < double(lists.starts[lists.count] * kBlock - slot))) break;
            slot += int64_t(ahead);
            if (!takes_part(slot)) continue;
            const int64_t list = list_of(slot);
            float b, v;
            if (in_scan(query, list, slot, b, v) || v >= kApart) continue;
            sample.slots[count] = slot, sample.lists[count] = int32_t(list), sample.logits[count] = b;
            sample.squares[count] = v, sample.shares[count] = -1e30f, sample.chances[count++] = float(query.rate);
        }
        sample.plain = count;
        for (int64_t k = 0; k < args.aparts; k++) {
            if (!takes_part(args.apart[k])) continue;
            sample.slots[count] = args.apart[k], sample.lists[count] = int32_t(list_of(args.apart[k]));
            sample.shares[count++] = args.scales[k];
        }
        sample.count = count;
    }

    // Sums over the records drawn by chance, each divided by p, that estimate sums over all. Weights are relative to e^top.
    struct Evidence {
        Vec squared = {}, seen = {}, model = {};     // Σ (1 - p) h² / p², of (w - h)², and of w² as that is expected
        Vec terms = {}, expected = {};               // Σ w² / p², and as it is expected
        Vec hidden = {}, alone = {}, missed = {};    // of errors that may not show Σ w² / p², Σ w² / p, Σ w / p
        Vec worst = {};                              // deviations of the record that errs the most, and a margin
    };

    Evidence evidence(const Query& query, double rise) const {
        const Sample& sample = query.sample;
        const float cap = float(max(1.0, 1 / query.spread)), x = float(args.visible), up = float(rise);
        const float z = float(certain(query));
        const Vec rare = normal(everywhere(-x));
        const float rounded = z < kCertain ? float(kCertain) * cap * __builtin_sqrtf(query.rough) : 0;
        Evidence sums;
        for (int64_t j = 0; j < sample.plain; j += kLanes) {
            const Vec b = load(sample.logits + j), v = load(sample.squares + j), a = load(sample.above + j);
            const Vec p = load(sample.chances + j), h = load(sample.controls + j), inverse = 1.0f / p;
            const Vec deviation = root(v), wide = deviation * cap, far = 1.0f - p, base = everywhere(float(query.base));
            const IntVec by_chance = p < 1.0f;
            auto only = [&](Vec term) { return (Vec)((IntVec)term & by_chance); };
            const Vec size = a + base, beyond = a - b - rounded - 1e-3f - 1e-6f * (size < 0.0f ? -size : size);
            const Vec over = beyond > wide * z ? beyond * float(kMargin) / wide : Vec{};
            sums.worst = greater(only(over), sums.worst);
            Vec w, mean_square, hidden, missed, shown;
            if (counts()) {
                const Vec inside = normal(b / deviation), unit = everywhere(1.0f);
                w = a >= 0.0f ? unit : Vec{};
                mean_square = inside * (1.0f - inside) + (inside - h) * (inside - h), shown = mean_square;
                hidden = missed = smaller(rare, normal((b < 0.0f ? b : -b) / wide));
                w -= h;
            } else {
                w = exp_at_most(a + up);
                mean_square = exp_at_most((Design::shares(b, v) + up) * 2.0f);
                hidden = smaller(normal(wide * 2.0f - x) * exp_at_most((b + wide * wide + up) * 2.0f), rare);
                missed = smaller(normal(wide - x) * exp_at_most(b + wide * wide * 0.5f + up), rare);
                shown = mean_square * normal(x - deviation * 2.0f);  // for errors that draws show
            }
            const Vec left = counts() ? w : w - h, square = inverse * inverse;
            sums.terms += only(w * w * square), sums.expected += only(mean_square * square);
            sums.hidden += only(hidden * square), sums.alone += only(hidden * inverse), sums.missed += only(missed * inverse);
            sums.squared += only(far * h * h * square), sums.seen += only(far * left * left * square);
            sums.model += only(far * shown * square);
            store(sample.doubts + j, only(hidden * square));
        }
        return sums;
    }

    // The deviations that no error is expected to exceed.
    double certain(const Query& query) const {
        return min(kCertain, __builtin_sqrt(double(args.queries.width)) / max(query.spread, 1.0));
    }

    // Probabilities and weights of the records that were scored, the corrections, and bounds of those not drawn. Weights
    // are relative to e^top.
    void weigh(Query& query, int64_t i) {
        Sample& sample = query.sample;
        double top = counts() ? 0 : query.base;
        for (int64_t k = 0; k < sample.count && !counts(); k++) top = max(top, sample.exact[k]);
        const double rise = counts() ? 0 : query.base - top;
        set(i, Figure::base, top), set(i, Figure::thinned, thin(query, rise));
        double sum_of_weights = 0;
        for (int64_t k = 0; k < sample.count; k++) {
            const double p = k < sample.plain ? chance_at(query, k) : weights[k];
            const double w = counts() ? double(sample.exact[k] >= query.base) : exp(sample.exact[k] - top);
            weights[k] = w / p, chances[k] = 1 - p, sum_of_weights += weights[k];
            controls[k] = 0, doubts[k] = 0;
        }
        const double correction = correct(query, rise, sum_of_weights);
        set(i, Figure::correction, correction), query.mass = sum_of_weights + correction;
        bound(query, i, rise);
    }

    // Thins the records set apart by their exact weights, with probabilities in `weights`. Returns the largest term of one
    // that was left to chance; 0 if none was.
    double thin(Query& query, double rise) {
        Sample& sample = query.sample;
        const double threshold = double(query.kept[0].threshold);
        const float* scales = sample.shares + sample.plain;
        double thinned = 0;
        int64_t count = sample.plain;
        for (int64_t k = sample.plain; k < sample.count; k++) {
            const double share = sample.exact[k] - query.base + (counts() ? 0 : log(double(scales[k - sample.plain])));
            const double key = share + double(random_waits(uint32_t(sample.slots[k]), query.low, query.high)[0]);
            const double p = counts() ? 1.0 : chance_of(threshold - share);
            if (p < 1) thinned = exp(threshold + rise);
            if (!counts() && !(key > threshold)) continue;
            sample.slots[count] = sample.slots[k], sample.positions[count] = sample.positions[k];
            sample.lists[count] = sample.lists[k], sample.exact[count] = sample.exact[k];
            weights[count++] = p;
        }
        sample.count = count;
        return thinned;
    }

    // Turns the sums of controls of each list into corrections S_j - Σ h / p. Returns their sum; 0, and controls of 0, if
    // there are none or they would take more than kLost of the weights.
    double correct(Query& query, double rise, double sum_of_weights) {
        Sample& sample = query.sample;
        const bool controlled = args.controls && query.beta > 0;
        const double unit = counts() ? 1 : exp(double(kShift) + rise);  // unit of the sums of controls
        for (int64_t k = 0; k < sample.plain; k += kLanes) {
            const Vec h = Design::controls(load(sample.logits + k), load(sample.squares + k)) * float(unit);
            store(sample.controls + k, controlled ? h : Vec{});
        }
        for (int64_t k = sample.drawn; k < sample.plain; k++) sample.controls[k] = 0;
        if (!controlled) return 0;
        double *masses = query.masses, correction = 0;
        for (int64_t j = 0; j < lists.count; j++) masses[j] *= unit;
        for (int64_t k = 0; k < sample.drawn; k++) {
            controls[k] = double(sample.controls[k]) / chance_at(query, k);
            masses[sample.lists[k]] -= controls[k];
        }
        for (int64_t j = 0; j < lists.count; j++) correction += masses[j];
        if (counts() || (correction >= -kLost * sum_of_weights && correction < 1e300)) return correction;
        fill(controls, sample.drawn, 0.0);
        fill(sample.controls, sample.drawn, 0.0f);
        return 0;
    }

    // Compute bounds on undrawn records, and the factor by which draws understate the variance.
    void bound(Query& query, int64_t i, double rise) {
        Sample& sample = query.sample;
        for (int64_t k = 0; k < sample.plain; k++) sample.above[k] = float(sample.exact[k] - query.base);
        pad(sample);
        const Evidence sums = evidence(query, rise);
        for (int64_t k = 0; k < sample.plain; k++) doubts[k] = double(sample.doubts[k]);
        const double threshold = double(query.kept[0].threshold);
        const double worst = double(-least_of(-sums.worst)), most = max(certain(query), worst);
        double widest = 0;  // the largest σ
        for (int64_t j = 0; j < lists.count; j++) widest = max(widest, double(query.slopes[j]));
        widest = widest * double(args.largest) / double(args.error_step) + __builtin_sqrt(double(query.rough)) * 4;
        widest *= max(1.0, 1 / query.spread);
        // the largest b + z σ - log p: where l = b + σ², and where p is about to be 1
        const double deep = __builtin_sqrt(max(-threshold, 0.0));
        double over = threshold + (counts() || widest > most / 2 ? most * most / 4 : most * widest - widest * widest);
        if (counts()) over = min(over, -log(query.rate));
        else if (widest > deep) over = max(over, widest * (most - 2 * deep));
        const bool others = sample.drawn + sample.count - sample.plain < total && query.rate < 1;
        const double terms = double(sum(sums.terms)), expected = double(sum(sums.expected)), seen = double(sum(sums.seen));
        const double ratio = expected > 0 ? max(1.0, terms / expected) : 1.0, wrong = worst > kAbsurd ? kInfinity : 0;
        auto undrawn = [&](Figure figure, double number) { set(i, figure, others ? number + wrong : 0); };
        undrawn(Figure::unseen, exp(over + rise)), undrawn(Figure::hidden, double(sum(sums.hidden)) * ratio);
        undrawn(Figure::missed, double(sum(sums.missed)) * ratio), undrawn(Figure::alone, double(sum(sums.alone)) * ratio);
        // variance that corrections explain; `squared` is 0 without corrections
        const double model = counts() ? double(sum(sums.model)) : max(double(sum(sums.model) - sum(sums.squared)), 0.0);
        set(i, Figure::expected, model);
        query.raised = seen > 0 ? max(1.0, model / seen) : 1;
    }

    // Fill the last vector of a sample with neutral records.
    static void pad(Sample& sample) {
        for (int64_t k = sample.plain; k % kLanes; k++) {
            sample.logits[k] = sample.above[k] = sample.controls[k] = 0;
            sample.squares[k] = sample.chances[k] = 1;
        }
    }

    double chance_at(const Query& query, int64_t k) const {
        const Sample& sample = query.sample;
        if (k >= sample.drawn) return query.rate;
        return chance_of(double(query.kept[0].threshold) - double(sample.shares[k]));
    }

    void set(int64_t i, Figure what, double number) { args.bounds[int64_t(what)][i] = number; }
    double figure(int64_t i, Figure what) const { return args.bounds[int64_t(what)][i]; }

    // Write the sample to the caller's arrays, the `shown` heaviest records first if there is an answer.
    void write(const Query& query, int64_t i, bool by_weight) {
        const Sample& sample = query.sample;
        const int64_t width = args.positions.width, count = sample.count;
        if (by_weight) {
            for (int64_t k = 0; k < count; k++) ranks[k] = -entry_of(float(weights[k]), k);
            for (int64_t k = count / 2 - 1; k >= 0; k--) sink(ranks, count, ranks[k], k);
            sort(ranks, count, args.shown);
        }
        for (int64_t place = 0; place < count; place++) {
            const int64_t k = by_weight ? -ranks[count - 1 - place] & 0xFFFFFFFF : place;
            args.positions[i][place] = sample.positions[k], args.scores[i][place] = sample.exact[k] / args.factors[i];
            args.chances[i][place] = 1 - chances[k];
            if (args.controlled.width) args.controlled[i][place] = controls[k] * (1 - chances[k]);
            if (by_weight) args.weights[i][place] = weights[k];
        }
        set(i, Figure::drawn, double(count));
        for (int64_t k = count; k < width && !(args.points > 0); k++) {
            args.positions[i][k] = -1, args.scores[i][k] = -kInfinity, args.chances[i][k] = 1;
            if (args.controlled.width) args.controlled[i][k] = 0;
            if (by_weight) args.weights[i][k] = 0;
        }
    }

    Terms terms_of(const Query& query, int64_t first, int64_t last) const {
        const Sample& sample = query.sample;
        Terms terms;
        terms.positions = sample.positions + first, terms.chances = chances + first, terms.count = last - first;
        terms.values = args.values, terms.controls = controls + first, terms.doubts = doubts + first;
        terms.own = sample.lists + first, terms.means = args.means, terms.salt = args.salt;
        return terms;
    }

    // Adds Σ M_j v̄_j of some lists to a sum, M_j the corrections; of four lists at once, so that the sum is read less often.
    void add_corrections(const Query& query, int64_t first, int64_t last, double* total) const {
        const int64_t v = args.output.width;
        const float* means[4];
        double masses[4];
        int many = 0;
        for (int64_t j = first; j <= last; j++) {
            if (j < last && query.masses[j] == 0) continue;
            if (j < last) means[many] = args.means[j], masses[many++] = query.masses[j];
            if (many < 4 && (j < last || !many)) continue;
            for (; many < 4; many++) means[many] = means[0], masses[many] = 0;
            int64_t t = 0;
            for (; t + kPairs <= v; t += kPairs) {
                Doubles sum;
                std::memcpy(&sum, total + t, sizeof sum);
                for (int u = 0; u < 4; u++) sum += masses[u] * load_wide(means[u] + t);
                std::memcpy(total + t, &sum, sizeof sum);
            }
            for (; t < v; t++)
                for (int u = 0; u < 4; u++) total[t] += masses[u] * double(means[u][t]);
            many = 0;
        }
    }

    // The answer of what was pooled: o = (Σ w v / p + Σ_j M_j v̄_j) / Z, M_j the corrections.
    void answer(Query& query, int64_t i) {
        const int64_t v = args.output.width;
        const double z = query.mass;
        double *output = args.output[i], *moved = args.moved[i];
        for (int64_t t = 0; t < v; t++) {
            double numerator = moved[t] = 0;
            for (int64_t part = 0; part < args.threads; part++)
                numerator += totals[part][t], moved[t] += errors[part].first[t];
            output[t] = z > 0 ? (numerator + moved[t]) / z : 0;
        }
        set(i, Figure::lse, z > 0 ? figure(i, Figure::base) + log(z) : -kInfinity), set(i, Figure::reach, reach(output));
        const double inverse = z > 0 ? 1 / z : 0, lse = figure(i, Figure::lse);
        double entropy = 0, all = 0;
        for (int64_t k = 0; k < query.sample.count; k++) {
            weights[k] *= inverse, controls[k] *= inverse, all += weights[k];
            if (weights[k] > 0) entropy += weights[k] * (lse - query.sample.exact[k]);
        }
        set(i, Figure::entropy, all > 0 ? entropy / all : 0);
    }

    // The largest distance of a value from the answer.
    double reach(const double* output) const {
        const int64_t v = args.output.width;
        double corner = 0, lowest = 0;
        if (args.values.kind == Kind::label) {  // from the farthest corner
            for (int64_t t = 0; t < v; t++) corner += output[t] * output[t], lowest = min(lowest, output[t]);
            return __builtin_sqrt(corner + 1 - 2 * lowest);
        }
        for (int64_t t = 0; t < v; t++) corner += (output[t] - args.centre[t]) * (output[t] - args.centre[t]);
        return v ? args.value_radius + __builtin_sqrt(corner) : 1;
    }

    // Sum the terms of the error, and write the bounds relative to Z.
    void judge(Query& query, int64_t i) {
        const int64_t v = args.output.width;
        Errors whole;
        whole.first = args.first[i], whole.signed_sums = args.sums[i], whole.roots = args.roots[i], whole.drift = errors[0].drift;
        fill(whole.first, v, 0.0), fill(whole.signed_sums, kSigns * v, 0.0f), fill(whole.roots, kSigns, 0.0);
        const double raised = query.raised, root_of = __builtin_sqrt(raised);
        for (int64_t part = 0; part < args.threads; part++) {
            const Errors& some = errors[part];
            whole.noise += some.noise, whole.noises += some.noises, whole.variance += some.variance;
            whole.variances += some.variances, whole.doubt += some.doubt, whole.apart += some.apart;
            for (int64_t t = 0; t < v; t++) whole.first[t] += raised * some.first[t];
            for (int64_t t = 0; t < v && part; t++) whole.drift[t] += some.drift[t];
            for (int64_t t = 0; t < kSigns * v; t++) whole.signed_sums[t] += float(root_of) * some.signed_sums[t];
            for (int64_t t = 0; t < kSigns; t++) whole.roots[t] += root_of * some.roots[t];
        }
        double drift = 0;
        for (int64_t t = 0; t < v; t++) drift += whole.drift[t] * whole.drift[t];
        const double z = query.mass, inverse = z > 0 ? 1 / z : kInfinity;
        const bool few = query.sample.count < args.fewest && figure(i, Figure::unseen) * inverse > args.slight;
        auto relative = [&](Figure what, double by, bool bound) {
            const double number = figure(i, what);
            set(i, what, number == 0 && !few ? 0 : bound && (few || !(number * by < kInfinity)) ? kInfinity : number * by);
        };
        relative(Figure::hidden, inverse * inverse, true), relative(Figure::alone, inverse * inverse, true);
        relative(Figure::missed, inverse, true), relative(Figure::unseen, inverse, true), relative(Figure::thinned, inverse, false);
        set(i, Figure::noise, raised * whole.noise), set(i, Figure::noises, raised * raised * whole.noises);
        set(i, Figure::variance, raised * whole.variance), set(i, Figure::variances, raised * raised * whole.variances);
        set(i, Figure::usual, whole.doubt > 0 ? __builtin_sqrt(whole.apart / whole.doubt) : 0);
        set(i, Figure::drift, whole.doubt > 0 ? __builtin_sqrt(drift) / whole.doubt : 0);
        Table<double> own = args.bounds;
        own.first += i;
        bars({own, {args.sums[i], 1, args.sums.width, args.sums.width}, args.z, args.doubt});
        write(query, i, true);
    }

    enum Step : int64_t { rotating = 1, scanning, scoring, pooling, judging };

    // One part of a step of a query's draw. Its work depends only on the number of parts.
    template <class Number>
    void work(Step step, int64_t part, Query& query, int64_t i) {
        if (step == rotating) return rotate(1, part, args.threads);
        const int64_t count = query.sample.count, first = count * part / args.threads, last = count * (part + 1) / args.threads;
        const int64_t v = args.output.width;
        if (step == scanning) {
            heads[part] = 0;
            for (int64_t j = 0; j < lists.count; j++) {
                const int64_t low = max(lists.starts[j], cuts[part]), high = min(lists.starts[j + 1], cuts[part + 1]);
                if (low >= high) continue;
                const double mass = scan(query, query.kept[part], j, low, high);
                if (low > lists.starts[j]) heads[part] = mass;
                else query.masses[j] = mass;
            }
        } else if (step == scoring) {
            score<Number>(i, query.sample, first, last);
        } else if (step == pooling) {
            fill(totals[part], v, 0.0), fill(errors[part].first, v, 0.0);
            if (v) add_weighed(terms_of(query, first, last), weights + first, totals[part]);
            if (v && figure(i, Figure::correction) != 0)
                add_corrections(query, lists.count * part / args.threads, lists.count * (part + 1) / args.threads, errors[part].first);
        } else {
            Errors& sums = errors[part];
            sums.noise = sums.noises = sums.variance = sums.variances = sums.doubt = sums.apart = 0;
            fill(sums.first, v, 0.0), fill(sums.drift, v, 0.0), fill(sums.roots, kSigns, 0.0);
            fill(sums.signed_sums, kSigns * v, 0.0f);
            Terms terms = terms_of(query, first, last);
            terms.unit = unit_of(figure(i, Figure::reach));
            spread(terms, weights + first, args.output[i], v, sums, lines[part]);
        }
    }

    // Run a step. Its parts are taken one by one by any thread that is free.
    template <class Number>
    void share(Step step, Query& query, int64_t i) {
        if (args.threads == 1) return work<Number>(step, 0, query, i);
        const int64_t parts = step == scanning ? scans : args.threads;
        Crew& crew = *args.crew;
        __atomic_store_n(&crew.done, 0, __ATOMIC_RELAXED);
        __atomic_store_n(&crew.ticket, int64_t(step) << 16 | parts, __ATOMIC_RELEASE);
        for (int64_t part; (part = take(crew, __atomic_load_n(&crew.ticket, __ATOMIC_ACQUIRE))) >= 0;)
            finish_part<Number>(step, part);
        while (__atomic_load_n(&crew.done, __ATOMIC_ACQUIRE) < parts) pause();
    }

    template <class Number>
    void finish_part(int64_t step, int64_t part) {
        work<Number>(Step(step), part, queries[0], 0);
        __atomic_fetch_add(&args.crew->done, 1, __ATOMIC_RELEASE);
    }

    template <class Number>
    void finish(Query& query, int64_t i) {
        if (args.points > 0) return propose<Number>(query, i);
        choose(query);
        share<Number>(scoring, query, i);
        weigh(query, i);
        if (!args.roots.first) return write(query, i, false);  // no values are pooled
        share<Number>(pooling, query, i);
        answer(query, i);
        share<Number>(judging, query, i);
        judge(query, i);
    }

    // Divide the scan into parts: equal numbers of blocks of the lists to scan.
    void cut(const Query& query) {
        auto blocks = [&](int64_t j) { return query.bounds[j] < __builtin_inff() ? lists.starts[j + 1] - lists.starts[j] : 0; };
        int64_t all = 0, seen = 0, part = 1;
        for (int64_t j = 0; j < lists.count; j++) all += blocks(j);
        cuts[0] = 0;
        for (int64_t j = 0; j < lists.count; j++) {
            const int64_t here = blocks(j);
            for (; part < scans && here && seen + here >= all * part / scans; part++)
                cuts[part] = lists.starts[j] + (all * part / scans - seen);
            seen += here;
        }
        for (; part <= scans; part++) cuts[part] = lists.starts[lists.count];
    }

    template <class Number>
    void run() {
        if (args.threads > 1) {
            seed(0, 1);
            share<Number>(rotating, queries[0], 0);
            begin<Number>(queries[0], 0);
            cut(queries[0]);
            share<Number>(scanning, queries[0], 0);
            for (int64_t part = 1; part < scans; part++)
                if (heads[part] != 0) queries[0].masses[list_of(cuts[part] * kBlock)] += heads[part];
            finish<Number>(queries[0], 0);
            __atomic_store_n(&args.crew->ticket, -1, __ATOMIC_RELEASE);
            return;
        }
        const int64_t step = blocks_together();
        for (int64_t low = 0; low < args.queries.rows; low += kTogether) {
            const int64_t count = min(kTogether, args.queries.rows - low);
            prepare(low, count);
            for (int64_t i = 0; i < count; i++) begin<Number>(queries[i], low + i);
            for (int64_t j = 0; j < lists.count; j++) {
                int64_t scanning = 0;
                for (int64_t i = 0; i < count; i++)
                    if (queries[i].bounds[j] < __builtin_inff()) scanners[scanning++] = queries + i;
                for (int64_t first = lists.starts[j], last = lists.starts[j + 1]; first < last; first += step)
                    scan_by(scanners, scanning, j, first, min(first + step, last));
            }
            for (int64_t i = 0; i < count; i++) finish<Number>(queries[i], low + i);
        }
    }
};

}  // namespace

namespace {

// Call take(drawing, a value of the keys' number type).
template <class Take>
void by_kind(const Draw& args, bool fresh, Take take) {
    Memory memory{args.scratch};
    auto by_number = [&](auto drawing) {
        if (args.keys.kind == Kind::half) take(drawing, Half());
        else take(drawing, float());
    };
    if (args.least != args.least) by_number(Drawing<WeightDesign>(args, memory, fresh));
    else by_number(Drawing<CountDesign>(args, memory, fresh));
}

}  // namespace

int64_t draw_scratch(const Draw& args) {
    Memory memory{nullptr};
    Drawing<WeightDesign> drawing(args, memory, false);
    return memory.used + 64;
}

void draw(const Draw& args) {
    by_kind(args, true, [](auto& drawing, auto number) { drawing.template run<decltype(number)>(); });
}

// Take parts of the steps of another thread's query until the query is answered. Its data are read only after a part is
// taken, as the other thread waits for that part. Before, the query may have ended and its arrays be freed.
void help_draw(const Draw& args) {
    Crew& crew = *args.crew;
    int64_t ticket, idle = 0;
    while ((ticket = __atomic_load_n(&crew.ticket, __ATOMIC_ACQUIRE)) >= 0) {
        const int64_t part = take(crew, ticket);
        if (part >= 0) {
            by_kind(args, false, [&](auto& drawing, auto number) {
                drawing.template finish_part<decltype(number)>(ticket >> 16, part);
            });
            idle = 0;
        } else if (idle++ < kPatience) {
            pause();
        } else {
            sched_yield();
        }
    }
}

}  // namespace SOFTDB_LEVEL
}  // namespace softdb
