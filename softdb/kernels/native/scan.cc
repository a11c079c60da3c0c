// Exact search for few queries, in two steps. `scan`: scores s(q, k) = q·k, q·k / |k| or -|q - k|² of queries (q, d) and
// all records (n, d) in float32, the best c of each query kept; cost 2 q n d operations, n d numbers read once. `rescore`:
// scores these c again in float64 and sorts them. A query is unsure if another record may be among its k best, that is if
// s_k <= floor + slack, slack a bound on the rounding of float32; cost 2 q c d.
#include "heap.h"
#include "level.h"
#include "stored.h"

namespace softdb {
namespace SOFTDB_LEVEL {

namespace {

template <class Number>
SOFTDB_INLINE float length_of(const Number* key, int64_t d) {
    const float square = sizeof(Number) == 4 ? summed<float>(key, key, d, product) : float(summed<double>(key, key, d, product));
    if (square > 1e-30f && square < 1e30f) return __builtin_sqrtf(square);
    return (float)__builtin_sqrt(summed<double>(key, key, d, product));
}

constexpr int kBlock = 64;  // number of keys compared with all queries while the keys are in a cache
constexpr int kPanel = 16;  // number of queries in a panel, which lie in the lanes of vectors
constexpr int kStep = 64;   // numbers of a key that are copied at once
constexpr int64_t kPage = 4096;  // rows that lie a multiple of this apart would displace each other from the L1 cache
constexpr int64_t kAhead = 16 << 10;  // bytes between a key and what is prefetched: processors stop at the end of a page

// A block of keys.
template <class Number>
struct Keys {
    const Number* at[kBlock];
    int64_t positions[kBlock];
    float inverse[kBlock];  // 1 / |k| for the cosine; else 1
    int count = 0;
};

// Scores of a few queries and keys: as many of both as there are registers for the sums.
template <int queries, int keys, bool l2, class Number>
SOFTDB_INLINE void score_tile(const Table<const float>& table, int64_t first, const Number* const* at, int64_t d,
                              float (*scores)[keys]) {
    Vec sums[queries][keys] = {};
    const float* query[queries];
    for (int i = 0; i < queries; i++) query[i] = table[first + i];
    int64_t j = 0;
    for (; j + kLanes <= d; j += kLanes) {
        Vec key[keys];
        for (int k = 0; k < keys; k++) key[k] = load(at[k] + j);
        for (int i = 0; i < queries; i++) {
            Vec number = load(query[i] + j);
            for (int k = 0; k < keys; k++) {
                Vec apart = l2 ? number - key[k] : key[k];
                sums[i][k] += (l2 ? apart : number) * apart;
            }
        }
    }
    for (int i = 0; i < queries; i++)
        for (int k = 0; k < keys; k++) {
            float total = sum(sums[i][k]);
            for (int64_t t = j; t < d; t++) {
                float key = widen(at[k][t]), apart = l2 ? query[i][t] - key : key;
                total += (l2 ? apart : query[i][t]) * apart;
            }
            scores[i][k] = l2 ? -total : total;
        }
}

// Compare some queries with a block of keys. Return true if a score is NaN or infinite.
template <int queries, int keys, bool l2, class Number>
bool compare(const Scan& args, int64_t first, const Keys<Number>& block) {
    bool lost = false;
    for (int begin = 0; begin < block.count; begin += keys) {
        const int last = block.count - keys;  // the last tile overlaps the one before, so that all have one size
        const int start = begin <= last ? begin : max(last, 0);
        const Number* at[keys];
        for (int k = 0; k < keys; k++) at[k] = block.at[min(start + k, block.count - 1)];
        float scores[queries][keys];
        score_tile<queries, keys, l2>(args.queries, first, at, args.keys.width, scores);
        for (int i = 0; i < queries; i++) {
            int64_t* heap = args.matches[first + i];
            for (int k = begin - start; k < keys && start + k < block.count; k++) {
                const float score = scores[i][k] * block.inverse[start + k];
                lost |= !(score - score == 0);
                const int64_t entry = entry_of(score, block.positions[start + k]);
                if (entry < heap[0]) sink(heap, args.matches.width, entry);
            }
        }
    }
    return lost;
}

// Compare a panel of queries with a block of keys. Return true if a score is NaN or infinite.
template <bool l2, class Number>
bool compare_panel(const Scan& args, int64_t panel, const Keys<Number>& block) {
    constexpr int kVectors = kPanel / kLanes, keys = kRegisters / 2 / kVectors;
    const int64_t first = panel * kPanel, d = args.keys.width;
    const int size = int(min(args.queries.rows - first, int64_t(kPanel)));
    alignas(64) float worst[kPanel];
    for (int i = 0; i < kPanel; i++) worst[i] = i < size ? score_in(args.matches[first + i][0]) : __builtin_inff();
    Vec doubt = {};
    for (int begin = 0; begin < block.count; begin += keys) {
        Vec sums[keys][kVectors] = {};
        float copies[keys][kStep];
        for (int64_t low = 0; low < d; low += kStep) {
            const float* numbers[keys];
            const int64_t count = min(d - low, int64_t(kStep));
            for (int k = 0; k < keys; k++) {
                const Number* key = block.at[min(begin + k, block.count - 1)] + low;
                if (sizeof(Number) == 4 && d * 4 % kPage) {
                    numbers[k] = (const float*)key;
                } else {
                    int64_t t = 0;
                    for (; t + kLanes <= count; t += kLanes) store(copies[k] + t, load(key + t));
                    for (; t < count; t++) copies[k][t] = widen(key[t]);
                    numbers[k] = copies[k];
                }
            }
            const float* queries = args.panels[panel] + low * kPanel;
            for (int64_t t = 0; t < count; t++, queries += kPanel)
                for (int k = 0; k < keys; k++)
                    for (int v = 0; v < kVectors; v++) {
                        const Vec query = load(queries + v * kLanes), number = everywhere(numbers[k][t]);
                        const Vec apart = l2 ? query - number : number;
                        sums[k][v] += (l2 ? apart : query) * apart;
                    }
        }
        for (int k = 0; k < keys && begin + k < block.count; k++)
            for (int v = 0; v < kVectors; v++) {
                const Vec score = (l2 ? -sums[k][v] : sums[k][v]) * block.inverse[begin + k];
                doubt += score * 0.0f;
                uint32_t hits = ~above(load(worst + v * kLanes), score) & ((1u << kLanes) - 1);
                for (; hits; hits &= hits - 1) {
                    const int lane = __builtin_ctz(hits), i = v * kLanes + lane;
                    if (i >= size) break;
                    int64_t* heap = args.matches[first + i];
                    const int64_t entry = entry_of(score[lane], block.positions[begin + k]);
                    if (entry < heap[0]) sink(heap, args.matches.width, entry), worst[i] = score_in(heap[0]);
                }
            }
    }
    return sum(doubt) != 0;
}

template <bool l2, class Number>
bool compare_all(const Scan& args, const Keys<Number>& block) {
    bool lost = false;
    for (int64_t panel = 0; panel < args.panels.rows; panel++) lost |= compare_panel<l2>(args, panel, block);
    int64_t i = args.panels.rows * kPanel;
    for (; i + 4 <= args.queries.rows; i += 4) lost |= compare<4, 2, l2>(args, i, block);
    for (; i < args.queries.rows; i++) lost |= compare<1, 4, l2>(args, i, block);
    return lost;
}

template <class Number>
bool scanned(const Scan& args) {
    const int64_t kept = args.matches.width, d = args.keys.width, bytes = d * int64_t(sizeof(Number));
    const bool cosine = args.metric == Metric::cosine, l2 = args.metric == Metric::l2;
    bool lost = false;
    Keys<Number> block;
    auto flush = [&] {
        lost |= l2 ? compare_all<true>(args, block) : compare_all<false>(args, block);
        block.count = 0;
    };
    for (int64_t i = 0; i < args.queries.rows; i++) fill(args.matches[i], kept, kLast);
    for (int64_t s = 0; s < args.keys.segments && kept; s++) {
        const int64_t begin = args.keys.starts[s], end = min(args.keys.starts[s + 1], args.high);
        for (int64_t p = max(begin, args.low); p < end; p++) {
            if (!args.keep[p]) continue;
            const Number* key = (const Number*)((const char*)args.keys.addresses[s] + (p - begin) * bytes);
            for (int64_t line = 0; line < bytes; line += kLine) __builtin_prefetch((const char*)key + kAhead + line, 0, 2);
            const float length = cosine ? length_of(key, d) : 1;
            block.at[block.count] = key, block.positions[block.count] = p;
            block.inverse[block.count++] = length > 0 ? 1 / length : 0;
            if (block.count == kBlock) flush();
        }
    }
    if (block.count) flush();
    for (int64_t i = 0; i < args.queries.rows; i++) {
        sort(args.matches[i], kept, kept);
        unpack(args.matches[i], kept, args.scores[i]);
    }
    return lost;
}

// True if a record comes after another, sorted by score, then by position.
SOFTDB_INLINE bool after(double score, int64_t position, double other, int64_t others) {
    return score < other || (score == other && position > others);
}

// Sift a record down from an index, in a heap whose worst record is first.
SOFTDB_INLINE void sink_pair(double* scores, int64_t* positions, int64_t size, int64_t place, double score,
                             int64_t position) {
    for (int64_t below; (below = 2 * place + 1) < size; place = below) {
        if (below + 1 < size && after(scores[below + 1], positions[below + 1], scores[below], positions[below])) below++;
        if (!after(scores[below], positions[below], score, position)) break;
        scores[place] = scores[below], positions[place] = positions[below];
    }
    scores[place] = score, positions[place] = position;
}

// Sort a heap: best first, ties by position.
void sort_pairs(double* scores, int64_t* positions, int64_t size) {
    for (int64_t place = size / 2 - 1; place >= 0; place--)
        sink_pair(scores, positions, size, place, scores[place], positions[place]);
    for (int64_t last = size - 1; last > 0; last--) {
        double score = scores[last];
        int64_t position = positions[last];
        scores[last] = scores[0], positions[last] = positions[0];
        sink_pair(scores, positions, last, 0, score, position);
    }
}

// Largest error of a score in float32: |error| <= d u sum |a_i b_i| for a product of d terms at unit
// rounding u (Higham 2002, section 3.1); for a sum of squared differences, relative to the sum itself.
template <class Number>
double slack_of(const Rescore& args, const Reader& reader, int64_t i) {
    const int64_t d = args.keys.width;
    const double terms = 0x1p-24 * double(2 * d + 16), worst = args.exact[i][args.k - 1];
    if (args.metric != Metric::dot) return terms * (args.metric == Metric::l2 ? -worst : 1.0);
    double longest = 0;
    for (int64_t j = 0; j < args.k; j++) {
        const Number* key = (const Number*)reader.at(args.matches[i][j]);
        longest = max(longest, summed<double>(key, key, d, product));
    }
    return terms * __builtin_sqrt(longest * summed<double>(args.queries[i], args.queries[i], d, product));
}

template <class Number>
void rescored(const Rescore& args) {
    const int64_t c = args.positions.width;
    const Reader reader(args.keys);
    for (int64_t i = 0; i < args.queries.rows; i++) {
        int64_t* matches = args.matches[i];
        double* exact = args.exact[i];
        int64_t count = 0;
        double square = args.metric == Metric::cosine ? summed<double>(args.queries[i], args.queries[i], args.keys.width, product) : 1;
        const double inverse = square > 0 ? 1 / __builtin_sqrt(square) : 0;
        each_record(reader, args.positions[i], c, [&](int64_t j, const char* at) {
            matches[count] = args.positions[i][j];
            exact[count++] = inverse * score_of<double>(args.queries[i], (const Number*)at, args.keys.width, args.metric);
        });
        sort_pairs(exact, matches, count);
        fill(matches + count, c - count, int64_t(-1));
        fill(exact + count, c - count, -kInfinity);
        args.unsure[i] = args.floor[i] > -kInfinity &&
                        !(exact[args.k - 1] > args.floor[i] + slack_of<Number>(args, reader, i));
    }
}

}  // namespace

// The best records of each query by scores in float32. Returns true if a score is NaN or infinite.
bool scan(const Scan& args) {
    return args.keys.kind == Kind::half ? scanned<Half>(args) : scanned<float>(args);
}

// Sort candidates by scores in float64. `unsure`: another record may be among the k best.
void rescore(const Rescore& args) {
    if (args.keys.kind == Kind::half) rescored<Half>(args);
    else rescored<float>(args);
}

}  // namespace SOFTDB_LEVEL
}  // namespace softdb
