// The kernels of one level against loops in float64, without Python: so that those of a processor that this one is not can
// be run by an emulator. Exits with 0 and says how many answers it has compared, or with 1 and says which is wrong.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "attention.h"
#include "longest.h"
#include "rerank.h"
#include "table.h"

namespace softdb {
int64_t cache_bytes(int level) { return level == 1 ? 32 << 10 : 512 << 10; }
}  // namespace softdb

namespace level = softdb::SOFTDB_LEVEL;
using softdb::Attend;
using softdb::Metric;

namespace {

uint64_t state = 1;
float uniform() {  // of -1 ... 1
    state = state * 6364136223846793005u + 1442695040888963407u;
    return float(int64_t(state >> 40)) / float(1 << 23) - 1;
}
std::vector<float> uniforms(int64_t count) {
    std::vector<float> found(count);
    for (float& x : found) x = uniform();
    return found;
}

// A float16's bits, of a number that it holds exactly.
uint16_t half_of(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    if (!(bits & 0x7fffffff)) return uint16_t(bits >> 16);
    return uint16_t((bits >> 16 & 0x8000) | (((bits >> 23 & 0xff) - 112) << 10) | (bits >> 13 & 0x3ff));
}

int compared = 0;
void expect(bool right, const char* what, int64_t q, int64_t d, int metric, double found, double expected) {
    compared++;
    if (right) return;
    std::printf("%s is wrong: q = %d, d = %d, metric %d: %.9g, not %.9g\n", what, int(q), int(d), metric, found, expected);
    std::exit(1);
}
void near(double found, double expected, double bound, const char* what, const Attend& ask) {
    expect(std::fabs(found - expected) <= bound, what, ask.q, ask.keys.width, int(ask.metric), found, expected);
}

struct World {
    int64_t n, q, d, v;
    std::vector<float> keys, values, queries, output_grad, lse_grad;
    std::vector<int64_t> rows;  // those that take part
    std::vector<uint16_t> half_keys, half_values;

    World(int64_t n, int64_t q, int64_t d, int64_t v)
        : n(n), q(q), d(d), v(v), keys(uniforms(n * d)), values(uniforms(n * v)), queries(uniforms(q * d)),
          output_grad(uniforms(q * v)), lse_grad(uniforms(q)) {
        for (auto* column : {&keys, &values})
            for (float& x : *column) x = std::round(x * 256) / 256;  // which float16 holds
        for (int64_t x = 0; x < d; x++) keys[n / 2 * d + x] = 0;
        for (int64_t i = 0; i < n; i++)
            if (i % 7) rows.push_back(i);
        for (float x : keys) half_keys.push_back(half_of(x));
        for (float x : values) half_values.push_back(half_of(x));
    }

    double score(int64_t j, int64_t i, Metric metric) const {
        double product = 0, square = 0, apart = 0;
        for (int64_t x = 0; x < d; x++) {
            double a = queries[j * d + x], b = keys[i * d + x];
            product += a * b;
            square += b * b;
            apart += (a - b) * (a - b);
        }
        if (metric == Metric::l2) return -apart;
        if (metric == Metric::cosine) return square > 0 ? product / std::sqrt(square) : 0;
        return product;
    }

    void check(Metric metric, bool half, bool labelled) const;
};

void World::check(Metric metric, bool half, bool labelled) const {
    const double temperature = 0.5;
    Attend ask;
    ask.queries = queries.data();
    ask.q = q;
    ask.keys = {half ? (const void*)half_keys.data() : keys.data(), d, half};
    std::vector<int32_t> labels;
    for (int64_t i = 0; i < n; i++) labels.push_back(int32_t(i * 5 % v));
    if (labelled) ask.labels = labels.data();
    else ask.values = {half ? (const void*)half_values.data() : values.data(), v, half};
    ask.num_classes = v;
    ask.metric = metric;
    ask.inverse_temperature = float(1 / temperature);
    ask.negligible = -40;
    ask.part.rows = rows.data();
    ask.part.high = int64_t(rows.size());
    std::vector<float> top(q, -1e38f);
    std::vector<double> output(q * v), total(q);
    ask.top = top.data();
    ask.output = output.data();
    ask.total = total.data();
    auto value = [&](int64_t i, int64_t x) { return labelled ? double(labels[i] == x) : double(values[i * v + x]); };
    auto at = [&](int64_t j, int64_t x) { return labelled ? x * q + j : j * v + x; };
    auto run = [&](void (*kernel)(const Attend&)) {
        std::vector<float> memory(level::attend_scratch(ask) + 16);
        auto address = reinterpret_cast<uintptr_t>(memory.data());
        ask.scratch = memory.data() + (64 - address % 64) % 64 / 4;
        kernel(ask);
        ask.scratch = nullptr;
    };
    run(level::attend_forward);

    std::vector<double> weights(q * n), mean(q * v);
    std::vector<float> offset(q), inverse_total(q);
    for (int64_t j = 0; j < q; j++) {
        double sum = 0, along = 0;
        for (int64_t i : rows) sum += weights[j * n + i] = std::exp(score(j, i, metric) / temperature);
        for (int64_t i : rows) {
            weights[j * n + i] /= sum;
            for (int64_t x = 0; x < v; x++) mean[j * v + x] += weights[j * n + i] * value(i, x);
        }
        for (int64_t x = 0; x < v; x++) {
            near(output[at(j, x)] / total[j], mean[j * v + x], 1e-5, "the output", ask);
            along += output_grad[j * v + x] * mean[j * v + x];
        }
        near(std::log(total[j]) + top[j] / temperature, std::log(sum), 2e-5, "the log-sum", ask);
        offset[j] = float(lse_grad[j] - along);
        inverse_total[j] = float(1 / total[j]);
    }
    if (metric == Metric::cosine) return;  // whose gradient the same loops make, of keys of length 1

    std::vector<float> grads(output_grad.size()), key_grad(n * d), value_grad(n * v);
    for (int64_t j = 0; j < q; j++)
        for (int64_t x = 0; x < v; x++) grads[at(j, x)] = output_grad[j * v + x];
    std::vector<double> query_grad(q * d), mass(q);
    bool trained = metric == Metric::dot && !labelled;
    ask.backward = true;
    ask.output_grad = grads.data();
    ask.offset = offset.data();
    ask.inverse_total = inverse_total.data();
    ask.query_grad = query_grad.data();
    ask.mass = mass.data();
    ask.key_grad = trained ? key_grad.data() : nullptr;
    ask.value_grad = trained ? value_grad.data() : nullptr;
    run(level::attend_backward);
    std::vector<double> right_keys(n * d), right_values(n * v);
    for (int64_t j = 0; j < q; j++) {
        std::vector<double> pulled(d);
        for (int64_t i : rows) {
            double along = offset[j], weight = weights[j * n + i];
            for (int64_t x = 0; x < v; x++) along += output_grad[j * v + x] * value(i, x);
            for (int64_t x = 0; x < d; x++) {
                pulled[x] += weight * along / temperature * keys[i * d + x];
                right_keys[i * d + x] += weight * along / temperature * queries[j * d + x];
            }
            for (int64_t x = 0; x < v; x++) right_values[i * v + x] += weight * output_grad[j * v + x];
        }
        for (int64_t x = 0; x < d; x++) near(query_grad[j * d + x], pulled[x], 1e-4, "the queries' gradient", ask);
    }
    for (int64_t x = 0; trained && x < n * d; x++) near(key_grad[x], right_keys[x], 1e-4, "the keys' gradient", ask);
    for (int64_t x = 0; trained && x < n * v; x++) near(value_grad[x], right_values[x], 1e-4, "the values' gradient", ask);
}

// Whole numbers, whose products are exact: the k best of those found and of the longest are those of all.
void check_longest(int64_t q, int64_t m) {
    const int64_t d = 32, k = 5;
    std::vector<float> keys(m * d), queries(q * d), scores(q * k, -1e30f);
    std::vector<double> lengths(m);
    std::vector<int64_t> positions(m), found(q * k, 1 << 20);
    for (float& x : queries) x = std::round(uniform() * 3);
    for (int64_t i = 0; i < m; i++) {
        double square = 0;
        for (int64_t x = 0; x < d; x++) keys[i * d + x] = std::round(uniform() * 2) * float(m - i);
        for (int64_t x = 0; x < d; x++) square += double(keys[i * d + x]) * keys[i * d + x];
        lengths[i] = std::sqrt(square) + double(m - i) * 100;  // descending, and no shorter than they are
        positions[i] = i;
    }
    for (int64_t j = 0; j < q; j++)
        for (int64_t x = 0; x < k; x++) found[j * k + x] = (1 << 20) + x;
    level::take_in({{queries.data(), q, d, d}, positions.data(), {keys.data(), m, d, d}, lengths.data(),
                    {found.data(), q, k, k}, {scores.data(), q, k, k}});
    for (int64_t j = 0; j < q; j++) {
        std::vector<bool> taken(m);
        for (int64_t x = 0; x < k; x++) {
            int64_t best = -1;
            double most = -1e29;
            for (int64_t i = 0; i < m; i++) {
                double product = 0;
                for (int64_t y = 0; y < d; y++) product += double(queries[j * d + y]) * keys[i * d + y];
                if (!taken[i] && product > most) best = i, most = product;
            }
            taken[best] = true;
            expect(found[j * k + x] == best, "one of the longest", q, d, 0, double(found[j * k + x]), double(best));
        }
    }
}

}  // namespace

int main() {
    std::vector<float> x(4096), out(4096);
    for (int64_t i = 0; i < 4096; i++) x[i] = -float(i) * 87 / 4096;
    level::exponentials(x.data(), 4096, out.data());
    for (int64_t i = 0; i < 4096; i++) {
        double right = std::exp(double(x[i]));
        expect(std::fabs(out[i] / right - 1) < 3e-7, "an exponential", 0, 0, 0, out[i], right);
    }
    for (int64_t q : {1, 2, 3, 4, 5, 8, 17, 40})
        for (int64_t d : {1, 17, 48})
            for (Metric metric : {Metric::dot, Metric::cosine, Metric::l2}) {
                World here(700, q, d, d == 17 ? 48 : 5);
                here.check(metric, q % 2, false);
                here.check(metric, !(q % 2), d == 17);
            }
    for (int64_t q : {1, 3, 4, 9}) check_longest(q, 45);
    std::printf("%d answers are right\n", compared);
    return 0;
}
