// Candidates pooled where their values lie, and how far that answer may be from the one over all records.
#include "pooling.h"

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

// Adds a value, so many times, to a sum of float64.
SOFTDB_INLINE void add(double factor, const char* value, const Stored& values, double* out) {
    if (values.kind == Kind::label) {
        int32_t label = *(const int32_t*)value;
        if (0 <= label && label < values.width) out[label] += factor;  // rot may have made another since it was checked
    } else if (values.kind == Kind::half) {
        add_numbers(factor, (const Half*)value, values.width, out);
    } else {
        add_numbers(factor, (const float*)value, values.width, out);
    }
}

// Adds sum_j signs[.][j] parts[j] over the first so many to sums (kSigns, v).
void add_signed(const float* signs, const float* parts, int64_t pitch, int64_t filled, float* sums, int64_t v) {
    constexpr int rows = kSigns / 2;
    for (int r = 0; r < kSigns; r += rows)
        for (int64_t x = 0; x < v; x += kLanes) {
            Vec some[rows] = {};
            for (int64_t j = 0; j < filled; j++) {
                Vec part = load(parts + j * pitch + x);
                for (int u = 0; u < rows; u++) some[u] += signs[(r + u) * kChunk + j] * part;
            }
            for (int u = 0; u < rows; u++)
                for (int64_t t = x; t < min(x + kLanes, v); t++) sums[(r + u) * v + t] += some[u][t - x];
        }
}

}  // namespace

// o = sum softmax(a)_j v_j and lse = log sum e^a_j. Bytes moved: q k v numbers; operations: 2 q k v.
template <class Number>
void pool(const Pool<Number>& ask) {
    const int64_t k = ask.logits.width, v = ask.output.width;
    const Reader reader(ask.values);
    double* total = ask.scratch;
    for (int64_t i = 0; i < ask.logits.rows; i++) {
        const Number* logits = ask.logits[i];
        const int64_t* positions = ask.positions[i];
        Number top = logits[0];
        for (int64_t j = 0; j < k; j++) top = max(top, logits[j]);
        fill(total, v, 0.0);
        double mass = 0;
        if (top > -kInfinity) {
            for (int64_t j = 0; j < k; j++) mass += exp(double(Number(logits[j] - top)));
            if (ask.values.kind != Kind::none)
                each_record(reader, positions, k, [&](int64_t j, const char* at) {
                    if (logits[j] > -kInfinity) add(exp(double(Number(logits[j] - top))) / mass, at, ask.values, total);
                });
        }
        for (int64_t t = 0; t < v; t++) ask.output[i][t] = Number(total[t]);
        ask.lse[i] = Number(double(top) + log(mass));
    }
}

template void pool(const Pool<float>&);
template void pool(const Pool<double>&);

// sum w v over each query's candidates. Bytes moved: q k v numbers; operations: 2 q k v.
template <class Number>
void weighted_sums(const Sums<Number>& ask) {
    const int64_t v = ask.output.width;
    const Reader reader(ask.values);
    double* total = ask.scratch;
    for (int64_t i = 0; i < ask.weights.rows; i++) {
        const Number* weights = ask.weights[i];
        fill(total, v, 0.0);
        each_record(reader, ask.positions[i], ask.weights.width, [&](int64_t j, const char* at) {
            if (weights[j] != 0) add(double(weights[j]), at, ask.values, total);
        });
        for (int64_t t = 0; t < v; t++) ask.output[i][t] = Number(total[t]);
    }
}

template void weighted_sums(const Sums<float>&);
template void weighted_sums(const Sums<double>&);

// Cost q k v kSigns operations; values come from cache.
template <class Number>
void spread(const Spread<Number>& ask) {
    const int64_t k = ask.logits.width, v = ask.output.width, pitch = (v + kLanes - 1) / kLanes * kLanes;
    const Reader reader(ask.values);
    double *centred = ask.centred, *drift = ask.centred + v;
    float *signs = ask.parts, *parts = ask.parts + kSigns * kChunk;
    if (v) fill(parts, kChunk * pitch, 0.0f);
    for (int64_t i = 0; i < ask.logits.rows; i++) {
        double variance = 0, variances = 0, noise = 0, noises = 0, plain = 0, plains = 0, *first = ask.first[i], *roots = ask.roots[i];
        float* sums = ask.sums[i];
        int64_t filled = 0;
        fill(sums, kSigns * v, 0.0f);
        fill(first, v, 0.0);
        fill(drift, v, 0.0);
        fill(roots, kSigns, 0.0);
        for (int64_t j = 0; j < k; j++) {
            bool part = ask.logits[i][j] > -kInfinity;
            double weight = part ? exp(double(Number(ask.logits[i][j] - ask.lse[i]))) : 0.0;
            ask.weights[i][j] = Number(weight);
            const double control = ask.controls.width ? ask.controls[i][j] : 0.0, left = weight - control;
            const double chance = -expm1(-double(ask.logs[i][j])), root = __builtin_sqrt(chance);
            if (!(chance > 0) || !part) continue;
            double square = chance * left * left;
            noise += square;
            noises += square * square;
            if (ask.values.kind == Kind::none) continue;
            double far = 0;
            float* line = parts + filled * pitch;
            for (int64_t t = 0; t < v; t++) centred[t] = -ask.output[i][t];
            add(1.0, reader.at(ask.positions[i][j]), ask.values, centred);
            const double doubt = ask.doubts[i][j];
            plain += doubt;
            double apart = 0;
#pragma omp simd reduction(+ : apart)
            for (int64_t t = 0; t < v; t++) apart += centred[t] * centred[t];
            plains += doubt * apart;
            if (doubt > 0)
                for (int64_t t = 0; t < v; t++) drift[t] += doubt * centred[t];
            for (int64_t t = 0; t < v; t++) centred[t] *= weight;
            if (control) {
                for (int64_t t = 0; t < v; t++) centred[t] += control * ask.output[i][t];
                add_numbers(-control, ask.means[ask.own[i][j]], v, centred);
            }
#pragma omp simd reduction(+ : far)
            for (int64_t t = 0; t < v; t++) {
                far += centred[t] * centred[t];
                line[t] = float(root * centred[t]);
                first[t] += chance * left * centred[t];
            }
            variance += chance * far;
            variances += chance * far * chance * far;
            uint32_t bits = hashed(uint64_t(ask.positions[i][j]), ask.salt);
            for (int sign = 0; sign < kSigns; sign++) {
                float one = (bits >> sign) & 1 ? 1.0f : -1.0f;
                signs[sign * kChunk + filled] = one;
                roots[sign] += one * root * left;
            }
            if (++filled == kChunk) {
                add_signed(signs, parts, pitch, filled, sums, v);
                filled = 0;
            }
        }
        if (filled) add_signed(signs, parts, pitch, filled, sums, v);
        ask.found[0][i] = noise, ask.found[1][i] = noises, ask.found[2][i] = variance;
        double moved = 0;
        for (int64_t t = 0; t < v; t++) moved += drift[t] * drift[t];
        ask.found[3][i] = variances, ask.found[4][i] = plain > 0 ? __builtin_sqrt(plains / plain) : 0;
        ask.found[5][i] = plain > 0 ? __builtin_sqrt(moved) / plain : 0;
    }
}

template void spread(const Spread<float>&);
template void spread(const Spread<double>&);

// tr(C)² / tr(C²), from the mean of (y·y')² over y = sum ±√c (v - o) (Hutchinson 1989). Cost q v kSigns².
void directions(const Directions& ask) {
    const int64_t v = ask.sums.width / kSigns;
    auto product = [](auto a, auto b) { return a * b; };
    for (int64_t i = 0; i < ask.sums.rows; i++) {
        double square = 0;
        for (int a = 0; a < kSigns; a++)
            for (int b = 0; b < a; b++) {
                double found = summed_wide(ask.sums[i] + a * v, ask.sums[i] + b * v, v, product);
                square += found * found;
            }
        square /= kSigns * (kSigns - 1) / 2;
        ask.out[i] = square > 0 ? max(ask.variance[i] * ask.variance[i] / square, 1.0) : 1.0;
    }
}

}  // namespace SOFTDB_LEVEL
}  // namespace softdb
