// Draws of records by their permanent random numbers: which of them stand for the others, and with what chance.
//
// Poisson sampling: every record enters by itself with a probability of its own, so a sum over all records is estimated
// without bias by the sum over those drawn, each divided by its probability (Horvitz and Thompson 1952).
#include "draw.h"

#include "hashing.h"
#include "stored.h"

namespace softdb {
namespace SOFTDB_LEVEL {

namespace {

constexpr int kSteps = 16;             // of the bisection for how many are drawn: to a few thousandths of them
constexpr int64_t kListsAhead = 8;     // lists whose random numbers are on their way while one is drawn from
constexpr double kWhole = 4294967296;  // 2^32: random numbers are its fractions

// λ so that sum sizes min(1, λ shares) is the budget. Cost count kSteps.
double factor_for(const double* shares, const double* sizes, int64_t count, double budget) {
    double whole = 0, least = kInfinity;
    for (int64_t i = 0; i < count; i++) {
        whole += sizes[i];
        if (sizes[i] > 0) least = min(least, shares[i]);
    }
    if (budget >= whole || !(least > 0)) return kInfinity;
    double low = log(budget), high = -log(least);
    for (int step = 0; step < kSteps; step++) {
        double middle = 0.5 * (low + high), factor = exp(middle), expected = 0;
#pragma omp simd reduction(+ : expected)
        for (int64_t i = 0; i < count; i++) {
            double chance = factor * shares[i];
            expected += sizes[i] * (chance < 1 ? chance : 1);
        }
        (expected > budget ? high : low) = middle;
    }
    return exp(high);
}

// Rows in an open-addressed table, whose length is a power of two.
struct Taken {
    int64_t* table;
    int64_t length;

    int64_t& place_of(int64_t row) const {
        int64_t place = hashed(uint64_t(row), 0) & (length - 1);
        while (table[place] != -1 && table[place] != row) place = (place + 1) & (length - 1);
        return table[place];
    }
};

// About where the random numbers of a list reach so much: they are about equally far apart.
SOFTDB_INLINE int64_t guess(const Frame& frame, int64_t list, uint32_t least) {
    int64_t start = frame.starts[list], stop = frame.starts[list + 1];
    return start + int64_t(double(least) / kWhole * double(stop - start));
}

// Draws from one list: those whose random number, seen from the shift, lies below the chance. Returns the count.
int64_t draw_from(const Draw& ask, int64_t i, int64_t list, double chance, uint32_t shift, int64_t count) {
    const int64_t start = ask.frame.starts[list], stop = ask.frame.starts[list + 1];
    const uint32_t* chances = ask.frame.chances;
    const Taken taken{ask.table, ask.table_length};
    const double limit = chance * kWhole;
    int64_t place = guess(ask.frame, list, shift);
    while (place > start && chances[place - 1] >= shift) place--;
    while (place < stop && chances[place] < shift) place++;
    for (int64_t seen = start; seen < stop; seen++, place++) {
        if (place == stop) place = start;
        if (double(uint32_t(chances[place] - shift)) >= limit) break;
        int64_t row = ask.frame.rows[place];
        if (taken.place_of(row) == row) continue;
        if (count < ask.rows.width) {
            ask.rows[i][count] = row;
            ask.logs[i][count] = float(-log(chance));
        }
        count++;
    }
    return count;
}

// What a record of each list is worth of the draws: some by what it is thought to weigh, some by what it may.
void share_out(const Draw& ask, int64_t i) {
    const int64_t lists = ask.logits.width;
    const double *logits = ask.logits[i], *hiding = ask.hiding[i], *left = ask.left[i];
    double top = -kInfinity, most = -kInfinity, total = 0, whole = 0, largest = 0;
    for (int64_t j = 0; j < lists; j++)
        if (left[j] > 0) top = max(top, logits[j]), most = max(most, hiding[j]);
    for (int64_t j = 0; j < lists; j++) {
        total += top > -kInfinity ? left[j] * exp(logits[j] - top) : 0;
        largest += most > -kInfinity ? left[j] * exp(hiding[j] - most) : 0;
        whole += left[j];
    }
    for (int64_t j = 0; j < lists; j++) {
        ask.shares[j] = ask.plain / max(whole, 1e-300);
        if (total > 0) ask.shares[j] += (1 - ask.plain - ask.capped) * exp(logits[j] - top) / total;
        if (largest > 0) ask.shares[j] += ask.capped * exp(hiding[j] - most) / largest;
    }
}

// What records that are not drawn may add, for one query. Cost lists.
void bound(const Draw& ask, int64_t i, double factor) {
    const int64_t lists = ask.logits.width, *starts = ask.frame.starts;
    const double *logits = ask.logits[i], *caps = ask.caps[i], *hiding = ask.hiding[i], *left = ask.left[i];
    const bool weighs = ask.least != ask.least;
    double most = -kInfinity, hidden_top = -kInfinity, hidden = 0, top = -kInfinity, whole = 0;
    for (int64_t j = 0; j < lists; j++)
        if (starts[j] < starts[j + 1]) hidden_top = max(hidden_top, hiding[j]), top = max(top, logits[j]);
    for (int64_t j = 0; j < lists; j++) {
        double chance = min(1.0, factor * ask.shares[j]);
        if (!(chance < 1 && (weighs || caps[j] >= ask.least) && starts[j] < starts[j + 1])) continue;
        most = max(most, (weighs ? caps[j] : 0) - log(chance));
        if (hidden_top > -kInfinity) hidden += left[j] / chance * exp(2 * (hiding[j] - hidden_top));
        if (top > -kInfinity) whole += left[j] / chance * exp(2 * (logits[j] - top));
    }
    ask.bounds[0][i] = most, ask.bounds[1][i] = 2 * hidden_top + log(hidden), ask.bounds[2][i] = 2 * top + log(whole);
}

}  // namespace

// What is thought of the lists. Cost q lists.
void propose(const Propose& ask) {
    const int64_t lists = ask.means.width;
    const bool counts = ask.least == ask.least;
    const double least = ask.least, visible = ask.visible;
    double* above = ask.above;
    for (int64_t i = 0; i < ask.means.rows; i++) {
        const double last = ask.near[0][i], cap = ask.near[1][i], noise = ask.near[2][i];
        const double share = ask.near[3][i], edge = ask.near[4][i];
        double total = 0;
        for (int64_t j = 0; j < lists; j++) {
            const double mean = ask.means[i][j], deviation = ask.deviations[i][j], size = double(ask.sizes[j]);
            const double variance = deviation * deviation, wide = deviation * ask.excess[i][j];
            const bool searched = ask.searched[i][j];
            double log_mean = mean + variance, hidden = mean + wide * wide + 0.5 * log_normal(2 * wide - visible);
            double chance = 0.5 * erfc((least - mean) / deviation * M_SQRT1_2), away = (least - mean) / wide;
            above[j] = 0;
            if (searched && last > -kInfinity) {
                const double coded = __builtin_sqrt(max(variance - noise * noise, 0.25 * variance));
                const double below = (last - mean) / coded, inside = log_normal(below);
                // the codes of those left lie below the last; what they weigh differs from that by the noise
                const double cut = 0.5 * min(log_normal(below - 2 * coded) - max(inside, -1e6), 0.0);
                log_mean = min(mean + coded * coded + cut, last) + noise * noise;
                chance = max(chance + expm1(inside), 0.0) / max(exp(inside), 1e-300);
                hidden = min(log_mean, edge + noise * noise) + share;
                away = (least - edge) / max(noise, 1e-300);
                above[j] = size * -expm1(inside);  // thought to be near
            } else if (searched) {
                above[j] = size, hidden = -kInfinity, away = kInfinity;
            } else {  // of so many, the largest lies about here, and their mean square no higher
                log_mean = min(log_mean, mean + deviation * __builtin_sqrt(2 * log(size + 2)));
            }
            double& most = ask.caps[i][j];
            if (searched) most = min(most, cap);
            ask.logits[i][j] = counts ? 0.5 * log(max(chance, 1e-12)) : min(log_mean, most);
            ask.hiding[i][j] = counts ? 0.5 * log_normal(-max(away, visible)) : min(hidden, most);
            total += above[j];
        }
        const double found = min(1.0, double(ask.found[i]) / max(total, 1.0));
        for (int64_t j = 0; j < lists; j++) ask.left[i][j] = double(ask.sizes[j]) - above[j] * found;
    }
}

// Rows drawn from the lists for each query. Every record has a positive probability. Cost q lists kSteps, the draws.
//
// The term of a record is its weight over its probability; where only those count that reach `least`, 1 over it. The
// sum is over the records that may hide, y² the mean square of what they may weigh, p their probability.
void draw(const Draw& ask) {
    const int64_t lists = ask.logits.width;
    const Taken taken{ask.table, ask.table_length};
    for (int64_t i = 0; i < ask.near.rows; i++) {
        fill(ask.table, ask.table_length, int64_t(-1));
        for (int64_t j = 0; j < ask.near.width; j++)
            if (ask.near[i][j] >= 0) taken.place_of(ask.near[i][j]) = ask.near[i][j];
        share_out(ask, i);
        const double factor = factor_for(ask.shares, ask.left[i], lists, ask.budget);
        bound(ask, i, factor);
        int64_t count = 0;
        for (int64_t j = 0; j < lists; j++) {
            const int64_t later = j + kListsAhead;
            if (later < lists)
                __builtin_prefetch(ask.frame.chances + guess(ask.frame, later, hashed(later, ask.seeds[i])), 0, 3);
            if (ask.frame.starts[j] == ask.frame.starts[j + 1]) continue;
            double chance = min(1.0, factor * ask.shares[j]);
            count = draw_from(ask, i, j, chance, hashed(j, ask.seeds[i]), count);
        }
        ask.counts[i] = count;
    }
}

// Keeps some of the rows drawn, each in proportion to its true weight. Cost q w kSteps.
void subsample(const Subsample& ask) {
    const int64_t w = ask.rows.width;
    double *shares = ask.shares, *sizes = ask.shares + w;
    for (int64_t i = 0; i < ask.rows.rows; i++) {
        const double* logits = ask.logits[i];
        double top = -kInfinity, total = 0;
        for (int64_t j = 0; j < w; j++) top = max(top, logits[j]);
        for (int64_t j = 0; j < w; j++) {
            shares[j] = logits[j] > -kInfinity ? exp(logits[j] - top) * ask.scales[j] : 0;
            total += shares[j];
        }
        for (int64_t j = 0; j < w; j++) {
            shares[j] /= max(total, 1e-300);
            sizes[j] = shares[j] > 0;  // else lost beside the others, to the last digit
        }
        const double factor = factor_for(shares, sizes, w, ask.budget);
        int64_t count = 0;
        ask.largest[i] = -kInfinity;
        for (int64_t j = 0; j < w; j++) {
            if (!(sizes[j] > 0)) continue;
            const double chance = min(1.0, factor * shares[j]);
            if (chance < 1) ask.largest[i] = top + log(total / factor);
            if (!(double(hashed(uint64_t(ask.rows[i][j]), ask.seeds[i])) < chance * kWhole)) continue;
            if (count < ask.kept.width) {
                ask.kept[i][count] = j;
                ask.kept_logs[i][count] = float(double(ask.logs[i][j]) - log(chance));
            }
            count++;
        }
        ask.counts[i] = count;
    }
}

// What was drawn adds up to. Cost q w.
void log_sums(const LogSums& ask) {
    const int64_t w = ask.logits.width;
    for (int64_t i = 0; i < ask.logits.rows; i++) {
        const double* logits = ask.logits[i];
        const float* weights = ask.log_weights[i];
        double top = -kInfinity, largest = -kInfinity, total = 0, squares = 0;
        for (int64_t j = 0; j < w; j++) {
            top = max(top, logits[j]);
            if (weights[j] > 0) largest = max(largest, logits[j]);
        }
        for (int64_t j = 0; j < w && top > -kInfinity; j++) {
            total += exp(logits[j] - top);
            if (weights[j] > 0 && logits[j] > -kInfinity) squares += exp(2 * (logits[j] - largest));
        }
        ask.found[0][i] = top + log(total), ask.found[1][i] = 2 * largest + log(squares), ask.found[2][i] = largest;
    }
}

void hashes(const int64_t* numbers, int64_t count, uint64_t seed, uint32_t* out) {
    for (int64_t i = 0; i < count; i++) out[i] = hashed(uint64_t(numbers[i]), seed);
}

}  // namespace SOFTDB_LEVEL
}  // namespace softdb
