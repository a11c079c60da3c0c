// Draw records in one scan of the codes. Logits are a = φ s, weights e^a, Z their sum.
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
// Windows: lists are in random order. As no l of a list is above l⁺ (its longest residual along the query), and a lower bound
// τ₀ of τ is known before the scan, no p of the list is above f = e^(l⁺ - τ₀). The scan reads a share of at least f of the
// list's blocks, from a random block on. There f u takes the place of u, so p = f P(u <= e^(l - τ) / f).
//
// Controls: each record of a list has the same h = β e^(φ q·c - B - s²/2), s² the variance of a logit in the list for a random
// direction, if s² <= 1. The sum over the records drawn is corrected by S_j - Σ h / p, S_j = Σ h over the list, whose mean is zero
// (Särndal, Swensson and Wretman 1992, chapter 6). β minimises the variance that codes of the pilot's records predict.
//
// Counts: B is the radius. Doubtful records are drawn most, l = -(b / σ)² / 4, h is the probability to be inside, about
// Φ(b / σ), and all codes are read to sum it.
//
// Samples (`points` = λ > 0): a record is a candidate if U - log u >= -log λ, U >= a - B a certain bound by its code's
// error and its list's longest residual, so with a probability p >= 1 - e^-w, w = λ e^(a - B). The caller accepts it with
// probability (1 - e^-w) / p, as a Poisson process of rate w has a point in (0, 1): points are independent records. In a
// list where no p is above f < kRare, a geometric variable of mean 1 / f leads from one record to the next; the records
// that it reaches are candidates with probability p / f. Only their codes are read.
//
// Undrawn records have two bounds, relative to e^B, which docs/error-bars.md derives: `unseen`, the largest w / p, from
// a <= â + z σ, z = 5, or the certain a <= â + √d σ; and `hidden`, Σ w² / p over errors beyond x deviations, Φ(2 σ - x)
// of the mean square, estimated from the records drawn.
//
// Cost of a query: (parts / 2 + 4) bytes of codes for each slot of its windows, read once for kAtOnce queries of a batch
// where the processor permutes bytes and the window is the list; and 2 m d operations for exact scores of m draws.
#include "level.h"

#include <sched.h>

#include "draw_parts.h"

namespace softdb {
namespace SOFTDB_LEVEL {

namespace {

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
constexpr float kSteady = 1;             // largest variance of the logits of a list whose records have controls
constexpr float kDeep = 1.5f;            // least l of such records, below the log of their control
constexpr double kLeastFactor = 0.2;     // least β
constexpr float kSlight = 1e-3f;         // largest share of Z of all lists that are too light to have controls
constexpr float kRare = 1.0f / 16;       // in lists with fewer candidates than this share, records are drawn before their codes are read
constexpr float kWhole = 0.5f;           // a window of more than this share is the list
constexpr int64_t kPilotAhead = 8;       // number of blocks that the pilot prefetches ahead
constexpr int64_t kMany = 16;            // number of queries whose windows cover most of a list
constexpr double kLost = 0.5;            // largest share of the drawn weights that a correction may remove
constexpr int64_t kShares = 4;           // number of parts of a scan for each thread, as threads may begin late
constexpr int64_t kPatience = 20000;     // number of idle loops after which a thread yields

// Scored records: first those drawn by code, then uniform draws, then records set apart.
struct Sample {
    int64_t *slots, *positions;
    int32_t* lists;
    float *logits, *squares, *shares;  // b, σ², l
    float *above, *chances, *controls, *doubts;  // a - B, p, h, and terms of `hidden`
    double* exact;                     // a
    int64_t drawn, plain, count;       // end of the first, the second and the third group
};

// Estimates of the records of one list, as one query sees it. y is what the code says, b = own + y, and more where y is
// larger than chance has it: then the record lies along the query. The second line is about the scan of the list: the
// least l of a record, the least y that is looked at, -log of the share that is scanned, bounds of σ² and of the gain, the
// least sum of table entries that is looked at (-1: any), and the window: `count` blocks from `first` on, where the first block
// of the list follows on its last. `chance`: the largest p in a list that `leap` draws from, else 0.
struct ListView {
    float step, base, unit, own, slope, rough, usual, most;
    float floor, bound, lift, widest, gain, chance;
    int32_t edge, first, count;

    SOFTDB_INLINE Vec from_code(const Lists& lists, Vec sums, int64_t slot) const {
        const Vec y = sums * step + base;
        return lists.offsets ? y - load(lists.offsets + slot) * unit : y;
    }
    SOFTDB_INLINE Vec logit(Vec y, Vec gain) const {
        return smaller(y + greater(y - usual, Vec{}) * (gain - 1.0f), everywhere(most)) + own;
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
    // A bound of the l of records with these y, whatever their factors and errors: l <= b + σ².
    SOFTDB_INLINE Vec most_share(Vec y) const {
        return greater(y + greater(y - usual, Vec{}) * (gain - 1.0f) + (own + widest), everywhere(floor));
    }
};

// A certain upper bound of logits: how far they may be above what a code says, for each step of its error, and rounding.
struct Cap {
    float certain, pad;

    SOFTDB_INLINE Vec operator()(const ListView& at, const Lists& lists, Vec y, Vec steps, int64_t slot) const {
        Vec room = steps * certain + pad;
        if (lists.offsets) {
            const Vec offset = load(lists.offsets + slot) * at.unit;
            room += (offset < 0.0f ? -offset : offset) * kHalfRounded;
        }
        const Vec most = everywhere(at.most + pad);
        return (steps < float(kSetApart) ? smaller(y + room, most) : most) + at.own;
    }
};

struct Query {
    ListState tables;
    Kept kept[kMostThreads];  // one for each part of the scan
    Sample sample;
    double* raw;     // (lists,) logits of the centroids
    double* masses;  // (lists,) sums of the controls of their records, then corrections
    float* controls;  // (lists,) h of every record of a list, relative to e^B; not for counts
    ListView* views;  // (lists,) of the scan
    float *seen, *turned;  // (d,) query minus the origin; (parts · word,) rotated query
    double base;     // B
    double spread;   // κ
    double beta;     // factor on controls; 0 if they do not correct the answer
    int64_t scanned;  // number of blocks in the windows
    double rate;     // rate of uniform draws
    float floor;     // the l with the same probability
    float rough;     // mean square of the rounding of tables
    double factor;   // logit / score
    double length;   // |q|² of the query minus the origin
    float side;      // its root
    float along;     // φ / √d
    float slope;     // σ for each step of a record's error and each unit of `side_of`
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
    float *entries, *order, *tops, *squares, *floors, *some_logits, *some_squares, *some_others;
    uint32_t* some_slots;
    int64_t stride, total = 0, *ranks;
    double *weights, *chances, *doubts, *controls;  // (w,) for the query in progress
    Query** scanners;  // queries that scan a list
    BlockSums* ready;  // sums of a few blocks for kAtOnce queries
    const bool at_once = adds_at_once();
    const int64_t scans;  // number of parts of the scan
    double* heads;        // (scans,) sums of the controls of a list whose first records are in an earlier part
    int64_t* head_lists;  // (scans,) that list
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
        float** const of_lists[] = {&order, &tops, &squares, &floors};
        for (float** column : of_lists) *column = memory.take<float>(lists.count + kLanes);
        heads = memory.take<double>(kMostThreads), head_lists = memory.take<int64_t>(kMostThreads);
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
            query.controls = memory.take<float>(lists.count + kLanes), query.views = memory.take<ListView>(lists.count);
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

    // |q|, or 2 |q - c| for l2.
    float side_of(const Query& query, int64_t list) const {
        return lists.offsets ? 2 * __builtin_sqrtf(max(float(-query.raw[list] / query.factor), 0.0f)) : query.side;
    }

    ListView view(const Query& query, int64_t list) const {
        const float factor = float(query.factor), spread = args.spreads[list], side = side_of(query, list);
        const float square = lists.offsets ? factor * spread * spread : 0;
        ListView at{};
        at.step = query.tables.step * factor, at.base = query.tables.base * factor, at.unit = lists.unit * factor;
        at.own = float(query.raw[list] - query.base), at.slope = query.slope * side, at.rough = query.rough;
        at.usual = float(kUsual) * query.along * side * spread - square, at.most = factor * side * args.radii[list];
        return at;
    }

    Cap cap_of(const Query& query, int64_t list) const {
        const float factor = float(query.factor), raw = float(__builtin_fabs(query.raw[list]));
        const float rounding = 0.5f * query.tables.step * factor * float(lists.parts) + 1e-3f + 1e-6f * raw;
        return {factor * side_of(query, list) * args.error_step, rounding};
    }

    // Call take(at, y, first slot, bits) for the allowed slots of some blocks of a list, where some y is above a bound.
    template <bool bounded, class Take>
    SOFTDB_INLINE void look(const Query& query, const ListView& at, int64_t first, int64_t last, Take take,
                            const BlockSums* ready = nullptr) const {
        const Eight edge = Eight{} + uint16_t(max(at.edge, 0));
        const bool whole = bounded && at.edge >= 0;
        auto pass = [&](const BlockSums& sums) { return whole && none_above(sums, edge); };
        auto fetch = [](int64_t) {};  // the processor does it as well
        each_block(lists, args.allowed, query.tables, first, last, ready, fetch, pass, [&](const BlockSums& sums, int64_t block, int u) {
            if (whole && none_above(sums, u, edge)) return;
            for (int lane = 0; lane < kBlock; lane += kLanes) {
                const int64_t slot = block * kBlock + lane;
                const Vec y = at.from_code(lists, widened(sums, u, lane), slot);
                uint32_t bits = uint32_t(args.allowed[block]) >> lane;
                if constexpr (kLanes < 16) bits &= (1u << kLanes) - 1;
                if (bounded) bits &= above(y, everywhere(at.bound));
                if (bits) take(at, y, uint32_t(slot), bits);
            }
        });
    }

    Vec logit(const ListView& at, Vec y, int64_t slot) const { return at.logit(y, octets(args.gains + slot) * kGain); }
    Vec square(const ListView& at, int64_t slot) const { return at.square(lists, octets(args.errors + slot), slot); }

    // Prefetch some blocks into the L2 cache.
    void fetch_all(int64_t block, int64_t count) const {
        const char* codes = (const char*)lists.codes + block * lists.parts * 8;
        for (int64_t line = 0; line < count * lists.parts * 8; line += kLine) __builtin_prefetch(codes + line, 0, 2);
        __builtin_prefetch(args.gains + block * kBlock, 0, 2);
        __builtin_prefetch(args.errors + block * kBlock, 0, 2);
        if (lists.offsets) __builtin_prefetch(lists.offsets + block * kBlock, 0, 2);
    }

    // The sum of the table entries of one slot.
    Vec sum_of(const Query& query, int64_t slot) const {
        const int64_t place = slot % kBlock;
        const uint8_t* codes = lists.codes + slot / kBlock * lists.parts * 8;
        int64_t total = 0;
        for (int64_t part = 0; part < lists.parts; part++) {
            const uint8_t* row = codes + part / 2 * kBlock;
            const uint8_t pair = row[place < 8 ? 2 * place : 2 * (place - 8) + 1];
            total += part % 2 ? query.tables.high[part / 2 * kBlock + (pair >> 4)] : query.tables.low[part / 2 * kBlock + (pair & 15)];
        }
        return everywhere(float(total));
    }

    // b and σ² of one slot; false if no scan reads the slot.
    bool in_scan(const Query& query, int64_t list, int64_t slot, float& b, float& v) const {
        const ListView& at = query.views[list];
        const int64_t first = slot / kLanes * kLanes, lane = slot % kLanes;
        const Vec y = at.from_code(lists, sum_of(query, slot), first);
        b = logit(at, y, first)[lane], v = square(at, first)[lane];
        return y[lane] > at.bound;
    }

    int64_t blocks_of(int64_t list) const { return lists.starts[list + 1] - lists.starts[list]; }

    // log of the control h of a list's records, relative to e^B: what weights e^x, x normal, have as their harmonic mean.
    // Where weights differ more than by kSteady it does not help.
    float control_of(const Query& query, int64_t list) const {
        const float spread = args.spreads[list], off = query.along * side_of(query, list) * spread;
        if (off * off > kSteady) return -1e30f;
        return float(query.raw[list] - query.base) - (lists.offsets ? float(query.factor) * spread * spread : 0) - off * off / 2;
    }

    // Controls, and views of all lists for the scan. Below the bounds nothing is drawn but by the plain draws; a list is not
    // looked at if none of its records can be above. A window holds the share of a list that its largest p may need.
    void set_views(Query& query, int64_t part) {
        const int64_t groups = (lists.count + kLanes - 1) / kLanes;
        const int64_t begin = groups * part / args.threads * kLanes, end = min(groups * (part + 1) / args.threads * kLanes, lists.count);
        const float control = Design::windowed && query.beta > 0 ? float(log(query.beta)) : -1e30f;
        for (int64_t j = begin; j < end; j++) {
            ListView at = view(query, j);
            const float off = at.slope * args.most_errors[j];
            at.widest = off * off + at.rough, at.gain = max(args.gained[j], 1.0f);
            const float left = Design::cold(query.floor, at.widest) - at.own;
            at.bound = left <= at.usual ? left : (left + (at.gain - 1) * at.usual) / at.gain;
            query.controls[j] = control > -1e29f ? control_of(query, j) + control : -1e30f;
            at.floor = max(query.floor, query.controls[j] - kDeep);
            if (at.floor > query.floor) at.bound = -__builtin_inff();
            else if (at.most <= left) at.bound = __builtin_inff();
            tops[j] = at.own + at.most, squares[j] = at.widest, floors[j] = at.floor;
            query.views[j] = at;
        }
        for (int64_t j = begin; j < end; j += kLanes) {
            store(query.controls + j, exp_at_most(load(query.controls + j)));
            const Vec most = greater(Design::shares(load(tops + j), load(squares + j)), load(floors + j));
            store(tops + j, exp_at_most(most - query.kept[0].threshold));
        }
        int64_t scanned = 0;
        for (int64_t j = begin; j < end; j++) {
            if (query.controls[j] * args.sizes[j] * float(lists.count) < kSlight) query.controls[j] = 0;
            scanned += open(query, j, Design::windowed ? tops[j] : 1);
        }
        __atomic_fetch_add(&query.scanned, scanned, __ATOMIC_RELAXED);
    }

    double share_scanned(const Query& query) const {
        return double(query.scanned) / double(max(lists.starts[lists.count], int64_t(1)));
    }

    // Set the window of a list to at least a share of it. Return the number of its blocks.
    int64_t open(Query& query, int64_t list, float share) {
        ListView& at = query.views[list];
        if (!(args.sizes[list] > 0)) at.bound = __builtin_inff();
        const int64_t blocks = blocks_of(list);
        int64_t count = at.bound < __builtin_inff() ? min(blocks, int64_t(share * float(blocks)) + 1) : 0;
        if (count > kGroup / 2) count = (count + kGroup - 1) / kGroup * kGroup;
        if (float(count) > kWhole * float(blocks)) count = blocks;
        at.first = int32_t(count < blocks ? int64_t(hashed(uint64_t(list), query.seed)) * blocks >> 32 : 0);
        at.count = int32_t(count), at.lift = -about_log(float(count) / float(max(blocks, int64_t(1))));
        // sums are whole numbers of steps, where nothing but the tables tells
        at.edge = lists.offsets ? -1 : int32_t(max(-1.0f, min(float(floor((at.bound - at.base) / max(at.step, 1e-30f))), 65534.0f)));
        return count;
    }

    // The share of a list that is in its window.
    double share_of(const Query& query, int64_t list) const {
        return double(query.views[list].count) / double(blocks_of(list));
    }

    // Threshold and bounds of candidates for samples; none where these would be more than the budget.
    void set_caps(Query& query) {
        const float threshold = float(-log(args.points)), least = threshold - kLongestWait;
        double expected = 0;
        for (int64_t block = 0, j = 0; block < lists.starts[lists.count]; block += stride) {
            while (lists.starts[j + 1] <= block) j++;
            const Cap cap = cap_of(query, j);
            look<false>(query, view(query, j), block, block + 1, [&](const ListView& at, Vec y, uint32_t slot, uint32_t bits) {
                const Vec bound = cap(at, lists, y, octets(args.errors + slot), slot);
                expected += double(sum(where(bits, exp_at_most(bound - threshold))));
            });
        }
        query.candidates = expected * double(stride);
        const bool many = query.candidates > double(args.budget);
        for (int64_t j = 0; j < lists.count; j++) {
            ListView& at = query.views[j] = view(query, j);
            const Cap cap = cap_of(query, j);
            const float most = at.most + cap.pad + at.own;
            at.bound = many || most <= least ? __builtin_inff() : least - at.own - cap.pad - cap.certain * kSetApart;
            if (!many && chance_of(double(threshold) - double(most)) < double(kRare))
                at.chance = float(chance_of(double(threshold) - double(most))), at.bound = __builtin_inff();
        }
        for (int64_t k = 0; k < args.aparts && !many; k++) {
            ListView& at = query.views[list_of(args.apart[k])];
            if (!(at.chance > 0)) at.bound = -__builtin_inff();
        }
        for (int64_t j = 0; j < lists.count; j++) query.scanned += open(query, j, 1);
        for (int64_t part = 0; part < scans; part++) query.kept[part].threshold = threshold, query.kept[part].count = 0;
    }

    // Draw candidates from some of the lists with few.
    void leap(Query& query, Kept& kept, int64_t begin, int64_t end) {
        for (int64_t j = begin; j < end && args.points > 0; j++) {
            const ListView& at = query.views[j];
            if (!(at.chance > 0)) continue;
            const Cap cap = cap_of(query, j);
            const double skip = 1 / log1p(-double(at.chance)), least = -log(args.points);
            const int64_t last = lists.starts[j + 1] * kBlock;
            int64_t slot = lists.starts[j] * kBlock - 1;
            for (uint64_t turn = uint64_t(j) << 32;; turn += 2) {
                const double ahead = floor(log(uniform(turn, query.seed)) * skip) + 1;
                if (!(ahead < double(last - slot))) break;
                slot += int64_t(ahead);
                const int64_t first = slot / kLanes * kLanes, lane = slot % kLanes;
                const Vec y = at.from_code(lists, sum_of(query, slot), first), bound = cap(at, lists, y, octets(args.errors + first), first);
                const double chance = chance_of(least - double(bound[lane]));
                if (takes_part(slot) && uniform(turn + 1, query.seed) * double(at.chance) < chance)
                    append(kept, bound, bound, bound, Vec{}, uint32_t(first), 1u << lane);
                if (kept.count > kept.room) raise(kept, largest_but(kept.keys, kept.count, args.budget + 1));
            }
        }
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
        set(i, Figure::scanned, share_scanned(query));
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

    void set_slope(Query& query) const {
        query.slope = float(query.spread * double(query.along) * double(args.error_step));
    }

    // Seed some queries.
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
            query.length = double(summed<float>(query.seen, query.seen, d, product));
            query.side = float(__builtin_sqrt(query.length));
        }
    }

    // One of some parts of the rotated queries and of the scores of centroids.
    void rotate(int64_t count, int64_t part, int64_t parts) {
        const int64_t d = args.queries.width, rows = args.rotation.rows;
        for (int64_t i = 0; i < count; i++)
            for (int64_t t = rows * part / parts; t < rows * (part + 1) / parts; t++)
                queries[i].turned[t] = summed<float>(queries[i].seen, args.rotation[t], d, product);
        for (int64_t j = lists.count * part / parts; j < lists.count * (part + 1) / parts; j++)
            for (int64_t i = 0; i < count; i++) {
                const double near = double(summed<float>(queries[i].seen, args.centroids[j], d, product));
                queries[i].raw[j] = queries[i].factor * (lists.origin ? 2 * near - double(args.lengths[j]) - queries[i].length : near);
            }
    }

    // Compute tables, B, κ and the first threshold.
    template <class Number>
    void begin(Query& query, int64_t i) {
        make_tables(lists, query.turned, entries, query.tables);
        query.spread = query.beta = 1, query.base = -kInfinity, query.scanned = 0;
        fill(query.masses, lists.count, 0.0);
        const double rounding = query.tables.step * query.factor;
        query.rough = float(rounding * rounding * double(lists.parts) / 12);
        query.along = float(query.factor / __builtin_sqrt(double(args.queries.width)));
        set_slope(query);
        const double per_unit = 2 / double(args.error_step);
        for (int64_t j = 0; j < lists.count; j++) query.base = max(query.base, query.raw[j]);
        for (int64_t j = 0; j < lists.count; j++) {
            const double wide = double(query.slope * side_of(query, j)) * per_unit * args.spreads[j];
            order[j] = args.sizes[j] > 0 ? float(query.raw[j] - query.base + wide) : -__builtin_inff();
        }
        if (counts()) query.base = query.factor * args.least;
        near<Number>(query, i);
        share<Number>(looking, query, i);
        set_threshold(query);
        if (!(args.points > 0)) share<Number>(viewing, query, i);
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
            look<false>(query, view(query, picks[c]), lists.starts[picks[c]], min(lists.starts[picks[c] + 1], lists.starts[picks[c]] + 256),
                 [&](const ListView& at, Vec y, uint32_t slot, uint32_t bits) {
                     const Vec b = logit(at, y, slot), v = square(at, slot);
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
        set_slope(query);
        if (counts()) return;
        for (int64_t j = 0; j < plain; j++) sum += exp(exact[j] - top);
        query.base = top + log(sum);
    }

    int64_t looked() const { return (lists.starts[lists.count] + stride - 1) / stride; }

    // Look at one of some parts of the blocks of the pilot, which are from all lists. Other slots are far below all.
    void look_around(const Query& query, int64_t part) {
        const int64_t first = looked() * part / args.threads, last = looked() * (part + 1) / args.threads;
        for (int64_t k = first, j = list_of(first * stride * kBlock); k < last; k++) {
            const int64_t block = k * stride;
            while (lists.starts[j + 1] <= block) j++;
            if (k + kPilotAhead < last) fetch_all(block + kPilotAhead * stride, 1);
            const Vec control = everywhere(control_of(query, j)), none = everywhere(-1e30f);
            for (int lane = 0; lane < kBlock; lane += kLanes) store(some_logits + k * kBlock + lane, none);
            look<false>(query, view(query, j), block, block + 1, [&](const ListView& at, Vec y, uint32_t slot, uint32_t bits) {
                const int64_t place = k * kBlock + slot % kBlock;
                const Vec v = square(at, slot), b = v < kApart ? logit(at, y, slot) : none;
                store(some_logits + place, where(bits, b) + where(~bits, none));
                store(some_squares + place, v), store(some_others + place, control);
            });
        }
    }

    // Raise B to what the pilot's records amount to, and set the first threshold, which about the wanted number will pass.
    void set_threshold(Query& query) {
        const int64_t count = looked() * kBlock;
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
        if (args.budget >= total) {  // all records are drawn
            query.floor = -1e30f, query.rate = 1, query.beta = 0;
            for (int64_t part = 0; part < scans; part++) query.kept[part].threshold = query.floor;
        } else if (!counts()) {
            query.beta = args.controls ? factor_of_controls(query, count, shift) : 0;
        }
    }

    // β, which minimises the variance of Ẑ that the codes of the pilot's records predict; no draw decides it.
    double factor_of_controls(const Query& query, int64_t count, float shift) const {
        const float threshold = query.kept[0].threshold;
        Vec explained = {}, squared = {};
        for (int64_t j = 0; j < count; j += kLanes) {
            const Vec b = load(some_logits + j) - shift, v = load(some_squares + j), control = load(some_others + j) - shift;
            const Vec share = greater(greater(Design::shares(b, v), everywhere(query.floor)), control - kDeep);
            const Vec h = exp_at_most(control), odds = 1.0f / exp_at_most(share - threshold) - 1.0f;
            explained += odds * h * exp_at_most(b + v * 0.5f), squared += odds * h * h;
        }
        const double most = double(sum(squared)), beta = most > 0 ? min(double(sum(explained)) / most, 1.0) : 0;
        return beta > kLeastFactor ? beta : 0;
    }

    // Scan some blocks of a list. Return the sum of their controls, for counts. `ready`: the sums of the blocks, or null.
    double scan(Query& query, Kept& kept, int64_t list, int64_t first, int64_t last, const BlockSums* ready = nullptr) {
        if (args.points > 0) return scan_caps(query, kept, list, first, last, ready);
        if constexpr (!Design::windowed)
            if (args.controls) return scan_with<true>(query, kept, list, first, last, ready);
        return scan_with<false>(query, kept, list, first, last, ready);
    }

    // Scan the blocks from `low` to `high` of the window of a list.
    double scan_window(Query& query, Kept& kept, int64_t list, int64_t low, int64_t high) {
        const int64_t start = lists.starts[list], blocks = blocks_of(list), first = query.views[list].first + low;
        const int64_t last = first - low + high;
        double mass = 0;
        if (first < blocks) mass += scan(query, kept, list, start + first, start + min(last, blocks));
        if (last > blocks) mass += scan(query, kept, list, start + max(first - blocks, int64_t(0)), start + last - blocks);
        return mass;
    }

    // Prefetch the first blocks of the window of a list.
    void fetch_window(const Query& query, int64_t list) const {
        const ListView& at = query.views[list];
        if (at.count) fetch_all(lists.starts[list] + at.first, min(int64_t(at.count), kBlocksAhead));
    }

    double scan_caps(Query& query, Kept& kept, int64_t list, int64_t first, int64_t last, const BlockSums* ready) {
        const Cap cap = cap_of(query, list);
        look<true>(query, query.views[list], first, last, [&](const ListView& at, Vec y, uint32_t slot, uint32_t bits) {
            const Vec bound = cap(at, lists, y, octets(args.errors + slot), slot);
            const Vec key = bound + random_waits(slot, query.low, query.high);
            const uint32_t hits = above(key, everywhere(kept.threshold)) & bits;
            if (__builtin_expect(!hits, 1)) return;
            append(kept, key, bound, bound, Vec{}, slot, hits);
            if (kept.count > kept.room) raise(kept, largest_but(kept.keys, kept.count, args.budget + 1));
        }, ready);
        return 0;
    }

    template <bool controls>
    double scan_with(Query& query, Kept& kept, int64_t list, int64_t first, int64_t last, const BlockSums* ready) {
        Vec mass = {};
        look<true>(query, query.views[list], first, last, [&](const ListView& at, Vec y, uint32_t slot, uint32_t bits) {
            const Vec waits = random_waits(slot, query.low, query.high) + at.lift;  // of records that are in the window
            if (!controls && !(above(at.most_share(y) + waits, everywhere(kept.threshold)) & bits)) return;
            const Vec b = logit(at, y, slot), v = square(at, slot), share = greater(Design::shares(b, v), everywhere(at.floor));
            const Vec key = share + waits;
            const uint32_t hits = above(key, everywhere(kept.threshold)) & above(everywhere(kApart), v) & bits;
            if constexpr (controls) mass += where(bits, Design::controls(b, v));
            if (__builtin_expect(!hits, 1)) return;
            append(kept, key, share + at.lift, b, v, slot, hits);
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
            sample.chances[k] = float(chance_at(query, k));
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
            const int64_t list = list_of(args.apart[k]);
            sample.slots[count] = args.apart[k], sample.lists[count] = int32_t(list), sample.shares[count++] = args.scales[k];
            if (Design::windowed) query.masses[list] -= double(query.controls[list]);  // these have no controls
        }
        sample.count = count;
    }

    // Sums over the records drawn by chance, each divided by p, that estimate sums over all. Weights are relative to e^top.
    struct Evidence {
        Vec seen = {};                               // Σ (1 - p) (w - h)² / p²
        Vec model = {}, checked = {};                // with the mean by code for h: as it is expected, and as it is
        Vec terms = {}, expected = {};               // Σ w² / p², and as it is expected
        Vec hidden = {}, alone = {}, missed = {};    // of errors that may not show Σ w² / p², Σ w² / p, Σ w / p
        Vec worst = {};                              // deviations of the record that errs the most, and a margin
    };

    Evidence evidence(const Query& query, double rise) const {
        const Sample& sample = query.sample;
        const float cap = float(max(1.0, 1 / query.spread)), x = float(args.visible), up = float(rise);
        const float z = float(certain(query));
        const Vec rare = normal(everywhere(-x));
        const bool controlled = query.beta > 0;
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
            Vec w, mean_square, hidden, missed, shown, mean = {};
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
                if (controlled) mean = exp_at_most(smaller(b + v * 0.5f, Design::shares(b, v)) + up);
                shown = greater(mean_square * normal(x - deviation * 2.0f) - mean * mean, Vec{});  // errors that draws show
            }
            const Vec left = counts() ? w : w - h, square = inverse * inverse;
            sums.terms += only(w * w * square), sums.expected += only(mean_square * square);
            sums.hidden += only(hidden * square), sums.alone += only(hidden * inverse), sums.missed += only(missed * inverse);
            sums.seen += only(far * left * left * square), sums.model += only(far * shown * square);
            const Vec off = counts() ? w : w - mean;
            sums.checked += only(far * off * off * square);
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
        set(i, Figure::scanned, share_scanned(query));
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
        fill(sample.controls, sample.plain, 0.0f);
        if (!args.controls || query.beta == 0) return 0;
        double *masses = query.masses, correction = 0;
        if constexpr (Design::windowed) {
            const double unit = exp(rise);
            for (int64_t j = 0; j < lists.count; j++)
                masses[j] = (masses[j] + double(args.sizes[j]) * double(query.controls[j])) * unit;
            for (int64_t k = 0; k < sample.plain; k++) sample.controls[k] = query.controls[sample.lists[k]] * float(unit);
        } else {
            for (int64_t k = 0; k < sample.drawn; k += kLanes)
                store(sample.controls + k, Design::controls(load(sample.logits + k), load(sample.squares + k)));
            fill(sample.controls + sample.drawn, sample.plain - sample.drawn, 0.0f);
        }
        for (int64_t k = 0; k < sample.plain; k++) {
            controls[k] = double(sample.controls[k]) / chance_at(query, k);
            masses[sample.lists[k]] -= controls[k];
        }
        for (int64_t j = 0; j < lists.count; j++) correction += masses[j];
        if (counts() || (correction >= -kLost * sum_of_weights && correction < 1e300)) return correction;
        query.beta = 0, fill(controls, sample.plain, 0.0);
        fill(sample.controls, sample.plain, 0.0f);
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
        for (int64_t j = 0; j < (lists.offsets ? lists.count : 1); j++) widest = max(widest, double(query.slope * side_of(query, j)));
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
        const double model = double(sum(sums.model));
        set(i, Figure::expected, model);
        query.raised = seen > 0 ? 1 + max(model - double(sum(sums.checked)), 0.0) / seen : 1;
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
        return share_of(query, sample.lists[k]) * chance_of(double(query.kept[0].threshold) - double(sample.shares[k]));
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
        double *output = args.output[i], *moved = args.moved[i], length = 0;
        for (int64_t t = 0; t < v; t++) {
            double numerator = moved[t] = 0;
            for (int64_t part = 0; part < args.threads; part++)
                numerator += totals[part][t], moved[t] += errors[part].first[t];
            output[t] = z > 0 ? (numerator + moved[t]) / z : 0;
            length += output[t] * output[t];
        }
        set(i, Figure::lse, z > 0 ? figure(i, Figure::base) + log(z) : -kInfinity), set(i, Figure::reach, reach(output));
        const double inverse = z > 0 ? 1 / z : 0, lse = figure(i, Figure::lse);
        double entropy = 0, all = 0;
        for (int64_t k = 0; k < query.sample.count; k++) {
            weights[k] *= inverse, controls[k] *= inverse, all += weights[k];
            if (weights[k] > 0) entropy += weights[k] * (lse - query.sample.exact[k]);
        }
        set(i, Figure::entropy, all > 0 ? entropy / all : 0), set(i, Figure::length, __builtin_sqrt(length));
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

    enum Step : int64_t { rotating = 1, looking, viewing, scanning, scoring, pooling, judging };

    // One part of a step of a query's draw. Its work depends only on the number of parts.
    template <class Number>
    void work(Step step, int64_t part, Query& query, int64_t i) {
        if (step == rotating) return rotate(1, part, args.threads);
        if (step == looking) return look_around(query, part);
        if (step == viewing) return set_views(query, part);
        const int64_t count = query.sample.count, first = count * part / args.threads, last = count * (part + 1) / args.threads;
        const int64_t v = args.output.width;
        if (step == scanning) {
            scan_part(query, part);
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

    // Scan one of some parts of all windows, with equal numbers of blocks.
    void scan_part(Query& query, int64_t part) {
        const int64_t first = query.scanned * part / scans, last = query.scanned * (part + 1) / scans;
        heads[part] = 0;
        leap(query, query.kept[part], lists.count * part / scans, lists.count * (part + 1) / scans);
        for (int64_t j = 0, seen = 0; j < lists.count && seen < last; j++) {
            const int64_t count = query.views[j].count, low = max(first - seen, int64_t(0)), high = min(last - seen, count);
            seen += count;
            if (low >= high) continue;
            const double mass = scan_window(query, query.kept[part], j, low, high);
            if (low > 0) heads[part] = mass, head_lists[part] = j;
            else if (!Design::windowed) query.masses[j] = mass;
        }
    }

    template <class Number>
    void run() {
        if (args.threads > 1) {
            seed(0, 1);
            share<Number>(rotating, queries[0], 0);
            begin<Number>(queries[0], 0);
            share<Number>(scanning, queries[0], 0);
            for (int64_t part = 1; part < scans; part++)
                if (heads[part] != 0) queries[0].masses[head_lists[part]] += heads[part];
            finish<Number>(queries[0], 0);
            __atomic_store_n(&args.crew->ticket, -1, __ATOMIC_RELEASE);
            return;
        }
        const int64_t step = blocks_together();
        for (int64_t low = 0; low < args.queries.rows; low += kTogether) {
            const int64_t count = min(kTogether, args.queries.rows - low);
            seed(low, count), rotate(count, 0, 1);
            for (int64_t i = 0; i < count; i++) begin<Number>(queries[i], low + i);
            for (int64_t j = 0; j < lists.count; j++) {
                int64_t scanning = 0;
                const int64_t next = min(j + 1, lists.count - 1), ahead = min(step, blocks_of(next)), start = lists.starts[next];
                for (int64_t i = 0; i < count; i++) {  // many queries prefetch the next list, each a part; few their windows
                    __builtin_prefetch(queries[i].views + next, 0, 3);
                    if (count < kMany) fetch_window(queries[i], next);
                    else fetch_all(start + ahead * i / count, ahead * (i + 1) / count - ahead * i / count);
                    const int64_t blocks = queries[i].views[j].count;
                    if (blocks == blocks_of(j)) scanners[scanning++] = queries + i;
                    else if (blocks) scan_window(queries[i], queries[i].kept[0], j, 0, blocks);
                }
                for (int64_t first = lists.starts[j], last = lists.starts[j + 1]; first < last && scanning; first += step)
                    scan_by(scanners, scanning, j, first, min(first + step, last));
            }
            for (int64_t i = 0; i < count; i++) leap(queries[i], queries[i].kept[0], 0, lists.count), finish<Number>(queries[i], low + i);
        }
    }
};

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
