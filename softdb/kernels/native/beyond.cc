// What lies beyond the records that were scored: which lists to search, and what may be in them.
#include "beyond.h"

#include "hashing.h"
#include "stored.h"

namespace softdb {
namespace SOFTDB_LEVEL {

namespace {

// The most that the error of a single part of a code may add to a product with the query.
double peak_of(const Caps& ask, const float* turned) {
    double most = 0;
    const int64_t word = ask.parts ? ask.turned.width / ask.parts : 0;
    for (int64_t m = 0; m < ask.parts; m++) {
        double square = 0;
        for (int64_t j = m * word; j < (m + 1) * word; j++) square += double(turned[j]) * double(turned[j]);
        most = max(most, __builtin_sqrt(square) * ask.part_errors[m]);
    }
    return most;
}

// The largest |side_j| extent_j, side = 2 (q - m) or q.
SOFTDB_INLINE float farthest(const float* query, const float* mean, const float* extent, int64_t d, bool l2) {
    auto reach = [&](auto q, auto m, auto e) {
        auto side = l2 ? 2 * (q - m) : q;
        return (side < 0 ? -side : side) * e;
    };
    Vec most = {};
    int64_t j = 0;
    for (; j + kLanes <= d; j += kLanes) most = greater(reach(load(query + j), load(mean + j), load(extent + j)), most);
    float found = 0;
    for (int i = 0; i < kLanes; i++) found = max(found, most[i]);
    for (; j < d; j++) found = max(found, reach(query[j], mean[j], extent[j]));
    return found;
}

}  // namespace

// Lists whose records may be heavy. Cost q lists.
void to_search(const ToSearch& ask) {
    const int64_t lists = ask.means.width;
    for (int64_t i = 0; i < ask.means.rows; i++) {
        const int64_t* order = ask.order[i];
        const double* caps = ask.caps[i];
        const double top = ask.factor * caps[order[0]];
        double whole = 0, beyond = 0;
        for (int64_t j = 0; j < lists; j++) {
            double wide = ask.factor * ask.deviations[i][j];
            double logit = min(ask.factor * ask.means[i][j] + 0.5 * (wide * wide), ask.factor * caps[j]);
            whole += double(ask.sizes[j]) * exp(logit - top);
        }
        int64_t count = lists;
        for (; count > ask.enough; count--) {
            beyond += double(ask.sizes[order[count - 1]]) * exp(ask.factor * caps[order[count - 1]] - top);
            if (beyond > ask.small * whole) break;
        }
        ask.counts[i] = count;
    }
}

// The most that a single coordinate may move the score of a record from that of the mean. Cost q lists d.
void peaks(const Peaks& ask) {
    for (int64_t i = 0; i < ask.queries.rows; i++)
        for (int64_t j = 0; j < ask.means.rows; j++)
            ask.out[i][j] = farthest(ask.queries[i], ask.means[j], ask.extents[j], ask.queries.width, ask.l2);
}

// What records may score whose codes are not among the near. Cost q (c + d + levels).
void caps(const Caps& ask) {
    const int64_t d = ask.queries.width;
    const double largest = ask.errors[ask.levels - 1], usual = ask.usual, root = __builtin_sqrt(double(d));
    for (int64_t i = 0; i < ask.queries.rows; i++) {
        const float* query = ask.queries[i];
        double count = 0, total = 0, square = 0, apart = 0, last = kInfinity;
        for (int64_t j = 0; j < ask.codes.width; j++) {
            const double code = ask.codes[i][j], score = ask.scores[i][j];
            last = min(last, code);
            if (!(code > -kInfinity && score > -kInfinity)) continue;
            const double error = score - code;
            count += 1, total += error, square += error * error, apart -= 4 * code;
        }
        double edge = last + ask.rounding[i], sure, wide;
        if (ask.l2) {
            const double length = 2 * __builtin_sqrt(max(-edge, 0.0));
            const double slope = apart > 0 ? __builtin_sqrt(square / apart) : 0;
            const double beyond = max(0.5 * length - largest, 0.0);
            sure = -(beyond * beyond);
            wide = max(slope / usual, 1 / root) * length;
        } else {
            double length = 0;
            for (int64_t t = 0; t < d; t++) length += double(query[t]) * double(query[t]);
            length = __builtin_sqrt(length);
            const double mean = total / max(count, 1.0);
            const double deviation = __builtin_sqrt(max(square / max(count, 1.0) - mean * mean, 0.0));
            sure = edge + length * largest;
            edge += max(mean, 0.0);
            wide = max(deviation / usual, length / root);
        }
        if (last == -kInfinity) wide = 0;
        const double noise = wide * usual;
        // what codes leave unresolved in a few records may lie all in one part of them
        const double peak = peak_of(ask, ask.turned[i]) * (ask.l2 ? 2 : 1);
        if (largest > 0 && last > -kInfinity) wide = max(wide, (peak + kMore * noise) / (ask.certain * largest));
        auto shown = [&](int64_t level) {
            double spread = ask.factor * wide * ask.errors[level];
            return 2 * spread * spread + log_normal(2 * spread - ask.visible) + ask.log_shares[level];
        };
        double top = -kInfinity, hidden = 0;
        for (int64_t level = 0; level < ask.levels; level++) top = max(top, shown(level));
        for (int64_t level = 0; level < ask.levels; level++) hidden += exp(shown(level) - top);
        const double scaled = ask.factor * noise;
        ask.found[0][i] = last, ask.found[2][i] = noise, ask.found[4][i] = edge;
        ask.found[1][i] = last > -kInfinity ? min(sure, edge + ask.certain * wide * largest) : -kInfinity;
        ask.found[3][i] = 0.5 * (top + log(hidden)) - scaled * scaled;
    }
}

}  // namespace SOFTDB_LEVEL
}  // namespace softdb
