// The m longest keys (m, d), sorted by length, compared with every query (q, d) and merged into its k best by dot product.
// As q·k <= |q| |k| (Cauchy and Schwarz), the pass ends at the first key shorter than every query's k-th score over |q|.
// Cost 2 q m d operations at most.
#include "level.h"
#include "stored.h"
#include "tile.h"

namespace softdb {
namespace SOFTDB_LEVEL {
namespace {

constexpr int kKeys = 8;  // number of keys compared at once
constexpr double kRounding = 0x1p-23;  // rounding of float32 for each product in a score

// Inserts a record among the k best of query i unless it is one of them. Returns true if it was inserted.
bool put(const TakeIn& args, int64_t i, int64_t position, float score) {
    int64_t *matches = args.matches[i], k = args.matches.width;
    float* scores = args.scores[i];
    for (int64_t place = 0; place < k; place++)
        if (matches[place] == position) return false;
    int64_t place = k;
    while (place &&
           (scores[place - 1] < score || (scores[place - 1] == score && matches[place - 1] > position)))
        place--;
    for (int64_t other = k - 1; other > place; other--) {
        matches[other] = matches[other - 1];
        scores[other] = scores[other - 1];
    }
    if (place < k) {
        matches[place] = position;
        scores[place] = score;
    }
    return place < k;
}

// The length below which no key scores as much as the worst of the k best.
double least_length(const TakeIn& args, int64_t i) {
    float worst = args.scores[i][args.scores.width - 1];
    if (!(worst > 0)) return -1;
    const float* query = args.queries[i];
    const double total = summed<double>(query, query, args.queries.width, product);
    return worst / (__builtin_sqrt(total) * (1 + double(args.queries.width) * kRounding));
}

// Compare J queries with the keys, starting at the query `first`.
template <int J>
bool compare(const TakeIn& args, int64_t first) {
    double least = __builtin_inf();
    for (int64_t i = first; i < first + J; i++) least = min(least, least_length(args, i));
    float products[kKeys * kLanes];
    const Table<const float>&queries = args.queries, &keys = args.keys;
    int64_t last = args.matches.width - 1;
    bool changed = false;
    for (int64_t j = 0; j < keys.rows && !(args.lengths[j] < least); j += kKeys) {
        int64_t count = min<int64_t>(kKeys, keys.rows - j);
        inner_all<J, false, false>(
            count, keys[j], keys.pitch, queries[first], queries.pitch, keys.width, products, kLanes, nullptr, {}
        );
        for (int64_t x = 0; x < count * J; x++) {
            int64_t position = args.positions[j + x / J], i = first + x % J;
            float score = products[x / J * kLanes + x % J];
            if (score >= args.scores[i][last] && position >= 0 && args.matches[i][last] >= 0)
                changed |= put(args, i, position, score);
        }
    }
    return changed;
}

}  // namespace

bool take_in(const TakeIn& args) {
    int64_t first = 0;
    bool changed = false;
    for (; first + kFew <= args.queries.rows; first += kFew) changed |= compare<kFew>(args, first);
    for (; first < args.queries.rows; first++) changed |= compare<1>(args, first);
    return changed;
}

}  // namespace SOFTDB_LEVEL
}  // namespace softdb
