// Pool candidates' stored values (n, v), read in place, o = Σ w v; and sum the terms
//
//     y = √(1 - p) (w (v - o) - h (m - o)),   r = √(1 - p) (w - h)
//
// of the error of an answer from draws. `bars` computes error bars from these sums (see softdb/attend/error.py). Cost of k
// candidates: k v numbers read; 2 k v operations to pool, 8 k v for the error.
#include "level.h"

#include "hashing.h"
#include "stored.h"

namespace softdb {
namespace SOFTDB_LEVEL {

namespace {

template <class Number>
SOFTDB_INLINE void add_numbers(double factor, const Number* value, int64_t v, double* out) {
    int64_t t = 0;
    for (; t + kPairs <= v; t += kPairs) {
        Doubles sum;
        std::memcpy(&sum, out + t, sizeof sum);
        sum += factor * load_wide(value + t);
        std::memcpy(out + t, &sum, sizeof sum);
    }
    for (; t < v; t++) out[t] += factor * double(widen(value[t]));
}

// Adds a value times a factor to a sum in float64.
SOFTDB_INLINE void add(double factor, const char* value, const Stored& values, double* out) {
    if (values.kind == Kind::label) {
        int32_t label = *(const int32_t*)value;
        if (0 <= label && label < values.width) out[label] += factor;  // a disk error may have changed it since the check
    } else if (values.kind == Kind::half) {
        add_numbers(factor, (const Half*)value, values.width, out);
    } else {
        add_numbers(factor, (const float*)value, values.width, out);
    }
}

}  // namespace

// Adds Σ w v to `total`. Bytes moved: k v numbers; operations: 2 k v.
void add_weighed(const Terms& args, const double* weights, double* total) {
    const Reader reader(args.values);
    each_record(reader, args.positions, args.count, [&](int64_t j, const char* at) {
        if (weights[j] > 0) add(weights[j], at, args.values, total);
    });
}

// sum w v over each query's candidates. Bytes moved: q k v numbers; operations: 2 q k v.
template <class Number>
void weighted_sums(const Sums<Number>& args) {
    const int64_t v = args.output.width;
    const Reader reader(args.values);
    double* total = args.scratch;
    for (int64_t i = 0; i < args.weights.rows; i++) {
        const Number* weights = args.weights[i];
        fill(total, v, 0.0);
        each_record(reader, args.positions[i], args.weights.width, [&](int64_t j, const char* at) {
            if (weights[j] != 0) add(double(weights[j]), at, args.values, total);
        });
        for (int64_t t = 0; t < v; t++) args.output[i][t] = Number(total[t]);
    }
}

template void weighted_sums(const Sums<float>&);
template void weighted_sums(const Sums<double>&);

namespace {

constexpr int64_t kFlushed = 1024;  // number of terms after which sums in float32 are added to sums in float64

// Lines of v float32 numbers, in units of `Terms::unit`.
struct Lines {
    float *output, *first, *drift, *label;
};

// Adds the term u = w (v - o) - h (m - o) to the sums; returns ‖u‖² in `far` and ‖v - o‖² in `apart`.
template <class Number>
SOFTDB_INLINE void add_term(const Number* value, const float* mean, int64_t v, float unit, float weight, float control,
                            float pull, float signed_root, float doubt, const Lines& lines, float* signed_sums,
                            float& far, float& apart) {
    Vec fars = {}, aparts = {};
    int64_t t = 0;
    for (; t + kLanes <= v; t += kLanes) {
        const Vec o = load(lines.output + t), centred = load(value + t) * unit - o;
        Vec u = centred * weight;
        if (mean) u -= (load(mean + t) * unit - o) * control;
        fars += u * u, aparts += centred * centred;
        store(lines.first + t, load(lines.first + t) + u * pull);
        store(lines.drift + t, load(lines.drift + t) + centred * doubt);
        store(signed_sums + t, load(signed_sums + t) + u * signed_root);
    }
    far = sum(fars), apart = sum(aparts);
    for (; t < v; t++) {
        const float o = lines.output[t], centred = widen(value[t]) * unit - o;
        const float u = weight * centred - (mean ? control * (mean[t] * unit - o) : 0);
        far += u * u, apart += centred * centred;
        lines.first[t] += pull * u, lines.drift[t] += doubt * centred, signed_sums[t] += signed_root * u;
    }
}

}  // namespace

// Add the terms of an answer's error to its sums. `scratch`: (4 v,) memory. Cost 8 k v operations on cached values.
void spread(const Terms& args, const double* weights, const double* output, int64_t v, Errors& into, float* scratch) {
    const Lines lines{scratch, scratch + v, scratch + 2 * v, scratch + 3 * v};
    const float unit = args.unit;
    const double inverse = 1 / double(unit), area = inverse * inverse;
    for (int64_t t = 0; t < v; t++) lines.output[t] = float(output[t] * double(unit));
    fill(lines.first, 3 * v, 0.0f);
    int64_t terms = 0;
    auto flush = [&]() {
        for (int64_t t = 0; t < v; t++) {
            into.first[t] += inverse * double(lines.first[t]), into.drift[t] += inverse * double(lines.drift[t]);
            lines.first[t] = lines.drift[t] = 0;
        }
    };
    auto add = [&](int64_t j, const char* at) {
        const double weight = weights[j], control = args.controls ? args.controls[j] : 0.0;
        const double chance = args.chances[j], root = __builtin_sqrt(chance), left = weight - control;
        if (!(chance > 0)) return;
        const double square = chance * left * left;
        into.noise += square, into.noises += square * square;
        if (!at) return;
        const uint32_t bits = hashed(uint64_t(args.positions[j]), args.salt);
        const int64_t group = bits % kSigns;
        const double sign = bits / kSigns % 2 ? 1 : -1;
        const float* mean = control ? args.means[args.own[j]] : nullptr;
        float far, apart;
        auto add_value = [&](auto value) {
            add_term(value, mean, v, unit, float(weight), float(control), float(chance * left), float(sign * root * inverse),
                     float(args.doubts[j]), lines, into.signed_sums + group * v, far, apart);
        };
        if (args.values.kind == Kind::label) {
            const int32_t label = *(const int32_t*)at;
            const bool known = 0 <= label && label < v;  // a disk error may have changed it since the check
            if (known) lines.label[label] = 1;
            add_value((const float*)lines.label);
            if (known) lines.label[label] = 0;
        } else if (args.values.kind == Kind::half) {
            add_value((const Half*)at);
        } else {
            add_value((const float*)at);
        }
        const double size = chance * area * double(far);
        into.variance += size, into.variances += size * size;
        into.doubt += args.doubts[j], into.apart += args.doubts[j] * area * double(apart);
        into.roots[group] += sign * root * left;
        if (++terms % kFlushed == 0) flush();
    };
    if (args.values.kind == Kind::none) {
        for (int64_t j = 0; j < args.count; j++)
            if (args.positions[j] >= 0) add(j, nullptr);
        return;
    }
    each_record(Reader(args.values), args.positions, args.count, add);
    flush();
}

// The quantile of F with `above` and `below` degrees of freedom, z the normal quantile: cube roots of χ² are about normal
// (Paulson 1942): ((1 - b) x - (1 - a))² = z² (b x² + a), x = F^(1/3).
double f_quantile(double z, double above, double below) {
    const double a = 2 / (9 * above), b = 2 / (9 * below);
    const double square = max((1 - b) * (1 - b) - z * z * b, 1e-3), middle = (1 - a) * (1 - b);
    const double root = __builtin_sqrt(max(middle * middle - square * ((1 - a) * (1 - a) - z * z * a), 0.0));
    const double x = max((z >= 0 ? middle + root : middle - root) / square, 0.0);
    return x * x * x;
}

namespace {

// Effective number of draws behind a sum of squared terms, at least 2.
double draws_of(double sum, double squares) {
    return squares > 0 && squares < kInfinity ? max(kSkewed * sum * sum / squares, 2.0) : 2;
}

// tr(C)² / tr(C²), C = Σ y yᵀ: tr(C²) is Σ ‖y‖⁴ plus Σ (y·y')² over pairs. Pairs in different groups are estimated by the
// squares of x·x', which have this mean, x = Σ ±y of a group. Cost v kSigns².
double directions(const float* sums, int64_t v, double variance, double fourths) {
    double square = 0;
    for (int a = 0; a < kSigns; a++)
        for (int b = 0; b < a; b++) {
            const double x = double(summed<float>(sums + a * v, sums + b * v, v, product));
            square += x * x;
        }
    square = fourths + 2 * square * kSigns / (kSigns - 1);
    return square > 0 ? max(variance * variance / square, 1.0) : 1.0;
}

double finite_or(double x, double other) { return x == x ? x : other; }

}  // namespace

// docs/error-bars.md derives the bar √(F V + B²) + R (L / 3) t, B the least of usual √(2 L H), drift M + usual √(2 L A) and
// R L b; and the bar of Z, with 1 instead of `usual`, `drift` and R.
void bars(const Bars& args) {
    auto at = [&](Figure what, int64_t i) -> double& { return args.figures[int64_t(what)][i]; };
    const int64_t v = args.sums.width / kSigns;
    for (int64_t i = 0; i < args.sums.rows; i++) {
        const double noise = at(Figure::noise, i), variance = at(Figure::variance, i), doubt = args.doubt;
        const double draws = draws_of(noise, at(Figure::noises, i)), pooled = draws_of(variance, at(Figure::variances, i));
        const double many = min(directions(args.sums[i], v, variance, at(Figure::variances, i)), double(max(v, int64_t(1))));
        const double reach = at(Figure::reach, i), usual = at(Figure::usual, i), missed = at(Figure::missed, i);
        const double none_drawn = __builtin_sqrt(2 * doubt * at(Figure::hidden, i));
        const double by_chance = __builtin_sqrt(2 * doubt * at(Figure::alone, i)), at_most = doubt * at(Figure::unseen, i);
        const double blind = min(min(none_drawn, missed + by_chance), at_most);
        const double expected = finite_or(missed * at(Figure::drift, i), kInfinity) + finite_or(by_chance * usual, kInfinity);
        const double farthest = finite_or(at_most * reach, kInfinity);
        const double of_output = min(min(finite_or(none_drawn * usual, kInfinity), expected), farthest);
        const double known = doubt / 3 * at(Figure::thinned, i);
        at(Figure::bar, i) = __builtin_sqrt(variance * f_quantile(args.z, many, pooled) + of_output * of_output) + reach * known;
        at(Figure::lse_bar, i) = __builtin_sqrt(noise * f_quantile(args.z, 1, draws) + blind * blind) + known;
        at(Figure::error, i) = __builtin_sqrt(variance), at(Figure::lse_error, i) = __builtin_sqrt(noise);
    }
}

}  // namespace SOFTDB_LEVEL
}  // namespace softdb
