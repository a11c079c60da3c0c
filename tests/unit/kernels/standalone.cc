// The kernels of one level against loops in float64, without Python: so that those of a processor that this one is not can
// be run by an emulator. Exits with 0 and says how many answers it has compared, or with 1 and says which is wrong.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "level.h"
#include "list_scan.h"
#include "table.h"

namespace softdb {
int64_t cache_bytes(int level) { return level == 1 ? 32 << 10 : 512 << 10; }
}  // namespace softdb

namespace level = softdb::SOFTDB_LEVEL;
using softdb::Attend;
using softdb::Kind;
using softdb::ListSearch;
using softdb::Metric;

namespace {

uint64_t state = 1;
float uniform() {  // of -1 ... 1
    state = state * 6364136223846793005u + 1442695040888963407u;
    return float(int64_t(state >> 40)) / float(1 << 23) - 1;
}
std::vector<float> uniforms(int64_t count) {
    std::vector<float> numbers(count);
    for (float& x : numbers) x = uniform();
    return numbers;
}

// A float16's bits, of a number that it holds exactly.
uint16_t half_of(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    if (!(bits & 0x7fffffff)) return uint16_t(bits >> 16);
    return uint16_t((bits >> 16 & 0x8000) | (((bits >> 23 & 0xff) - 112) << 10) | (bits >> 13 & 0x3ff));
}

int compared = 0;
void expect(bool right, const char* what, int64_t q, int64_t d, int metric, double actual, double expected) {
    compared++;
    if (right) return;
    std::printf("%s is wrong: q = %d, d = %d, metric %d: %.9g, not %.9g\n", what, int(q), int(d), metric, actual, expected);
    std::exit(1);
}
void near(double actual, double expected, double bound, const char* what, const Attend& args) {
    expect(std::fabs(actual - expected) <= bound, what, args.q, args.keys.width, int(args.metric), actual, expected);
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

    void check(Metric metric, bool half, bool labelled, bool scaled) const;
    void check_candidates(Metric metric, bool half) const;
};

void World::check(Metric metric, bool half, bool labelled, bool scaled) const {
    const double temperature = 0.5;
    Attend args;
    std::vector<float> scales(q);
    for (int64_t j = 0; j < q; j++) scales[j] = scaled ? 0.5f + 0.25f * float(j % 3) : 1;
    if (scaled) args.scales = scales.data();
    args.queries = queries.data();
    args.q = q;
    args.keys = {half ? (const void*)half_keys.data() : keys.data(), d, half};
    std::vector<int32_t> labels;
    for (int64_t i = 0; i < n; i++) labels.push_back(int32_t(i * 5 % v));
    if (labelled) args.labels = labels.data();
    else args.values = {half ? (const void*)half_values.data() : values.data(), v, half};
    args.num_classes = v;
    args.metric = metric;
    args.inverse_temperature = float(1 / temperature);
    args.negligible = -40;
    args.part.rows = rows.data();
    args.part.high = int64_t(rows.size());
    std::vector<float> top(q, -1e38f);
    std::vector<double> output(q * v), total(q);
    args.top = top.data();
    args.output = output.data();
    args.total = total.data();
    auto value = [&](int64_t i, int64_t x) { return labelled ? double(labels[i] == x) : double(values[i * v + x]); };
    auto at = [&](int64_t j, int64_t x) { return labelled ? x * q + j : j * v + x; };
    auto run = [&](void (*kernel)(const Attend&)) {
        std::vector<float> memory(level::attend_scratch(args) + 16);
        auto address = reinterpret_cast<uintptr_t>(memory.data());
        args.scratch = memory.data() + (64 - address % 64) % 64 / 4;
        kernel(args);
        args.scratch = nullptr;
    };
    run(level::attend_forward);

    std::vector<double> weights(q * n), mean(q * v);
    std::vector<float> offset(q), inverse_total(q);
    for (int64_t j = 0; j < q; j++) {
        double sum = 0, along = 0;
        for (int64_t i : rows) sum += weights[j * n + i] = std::exp(scales[j] * score(j, i, metric) / temperature);
        for (int64_t i : rows) {
            weights[j * n + i] /= sum;
            for (int64_t x = 0; x < v; x++) mean[j * v + x] += weights[j * n + i] * value(i, x);
        }
        for (int64_t x = 0; x < v; x++) {
            near(output[at(j, x)] / total[j], mean[j * v + x], 1e-5, "the output", args);
            along += output_grad[j * v + x] * mean[j * v + x];
        }
        near(std::log(total[j]) + top[j] / temperature, std::log(sum), 2e-5, "the log-sum", args);
        offset[j] = float(lse_grad[j] - along);
        inverse_total[j] = float(1 / total[j]);
    }
    if (metric == Metric::cosine) return;  // whose gradient the same loops make, of keys of length 1

    std::vector<float> grads(output_grad.size()), key_grad(n * d), value_grad(n * v);
    for (int64_t j = 0; j < q; j++)
        for (int64_t x = 0; x < v; x++) grads[at(j, x)] = output_grad[j * v + x];
    std::vector<double> query_grad(q * d), mass(q), along_scores(q);
    bool trained = metric == Metric::dot && !labelled && !scaled;
    args.backward = true;
    args.output_grad = grads.data();
    args.offset = offset.data();
    args.inverse_total = inverse_total.data();
    args.query_grad = query_grad.data();
    args.mass = mass.data();
    args.along_scores = scaled ? along_scores.data() : nullptr;
    args.key_grad = trained ? key_grad.data() : nullptr;
    args.value_grad = trained ? value_grad.data() : nullptr;
    run(level::attend_backward);
    std::vector<double> right_keys(n * d), right_values(n * v);
    for (int64_t j = 0; j < q; j++) {
        std::vector<double> pulled(d);
        double sum = 0;
        for (int64_t i : rows) {
            double along = offset[j], weight = weights[j * n + i];
            for (int64_t x = 0; x < v; x++) along += output_grad[j * v + x] * value(i, x);
            sum += weight * along / temperature * (scales[j] * score(j, i, metric) - top[j]);
            for (int64_t x = 0; x < d; x++) {
                pulled[x] += weight * along / temperature * keys[i * d + x];
                right_keys[i * d + x] += weight * along / temperature * queries[j * d + x];
            }
            for (int64_t x = 0; x < v; x++) right_values[i * v + x] += weight * output_grad[j * v + x];
        }
        for (int64_t x = 0; x < d; x++) near(query_grad[j * d + x], pulled[x], 1e-4, "the queries' gradient", args);
        if (scaled) near(along_scores[j], sum, 1e-4 * (1 + d), "the scales' gradient", args);
    }
    for (int64_t x = 0; trained && x < n * d; x++) near(key_grad[x], right_keys[x], 1e-4, "the keys' gradient", args);
    for (int64_t x = 0; trained && x < n * v; x++) near(value_grad[x], right_values[x], 1e-4, "the values' gradient", args);
}

// Candidates scored, the best of them, the best of all, and what is pooled of them.
void World::check_candidates(Metric metric, bool half) const {
    const int64_t c = 90, k = 7;
    std::vector<float> asked = queries, scores(q * c), best_scores(q * k), scan_scores(q * k), output(q * v);
    std::vector<int64_t> positions(q * c), best(q * k), scanned(q * k);
    for (int64_t x = 0; x < q * c; x++) positions[x] = x % c == 3 ? -1 : x % c * 7 % n;
    int64_t key_address = int64_t(half ? (const void*)half_keys.data() : keys.data());
    int64_t value_address = int64_t(half ? (const void*)half_values.data() : values.data());
    const int64_t starts[] = {0, n};
    const softdb::Kind kind = half ? softdb::Kind::half : softdb::Kind::wide;
    const softdb::Stored key_column{&key_address, starts, 1, d, kind}, value_column{&value_address, starts, 1, v, kind};
    const softdb::Table<const float> seen{asked.data(), q, d, d};
    const softdb::Table<const int64_t> places{positions.data(), q, c, c};
    std::vector<double> scratch(v);
    level::score({seen, places, key_column, metric, {scores.data(), q, c, c}});
    auto close = [&](double actual, double expected, double bound, const char* what) {
        bool right = std::isinf(expected) ? actual == expected : std::fabs(actual - expected) <= bound;
        expect(right, what, q, d, int(metric), actual, expected);
    };
    bool whole = level::rerank({seen, places, key_column, metric, {best.data(), q, k, k}, {best_scores.data(), q, k, k}});
    close(whole, 1, 0, "what rerank says");
    std::vector<char> keep(n, 1);
    level::scan({seen, key_column, metric, (const bool*)keep.data(), 0, n, {scanned.data(), q, k, k},
                 {scan_scores.data(), q, k, k}});
    std::vector<float> weights(q * c);
    for (int64_t x = 0; x < q * c; x++) weights[x] = std::exp(scores[x]);
    level::weighted_sums(softdb::Sums<float>{{weights.data(), q, c, c}, places, value_column, {output.data(), q, v, v}, scratch.data()});
    for (int64_t j = 0; j < q; j++) {
        double sum = 0;
        std::vector<double> mean(v), right(c), all(n);
        for (int64_t x = 0; x < c; x++) {
            int64_t i = positions[j * c + x];
            right[x] = i < 0 ? -HUGE_VAL : score(j, i, metric);
            close(scores[j * c + x], right[x], 2e-5, "a score");
            sum += std::exp(right[x]);
            for (int64_t y = 0; i >= 0 && y < v; y++) mean[y] += std::exp(right[x]) * values[i * v + y];
        }
        for (int64_t i = 0; i < n; i++) all[i] = score(j, i, metric);
        std::sort(right.rbegin(), right.rend());
        std::sort(all.rbegin(), all.rend());
        for (int64_t x = 0; x < k; x++) {
            close(best_scores[j * k + x], right[x], 2e-5, "one of the best");
            close(score(j, best[j * k + x], metric), right[x], 2e-5, "the score of one of the best");
            close(scan_scores[j * k + x], all[x], 2e-5, "one of the best of all");
            close(score(j, scanned[j * k + x], metric), all[x], 2e-5, "the score of one of the best of all");
        }
        for (int64_t y = 0; y < v; y++) close(output[j * v + y] / sum, mean[y] / sum, 2e-5, "what is pooled");
    }
}

// Sums over those drawn, divided by their probabilities, are right on the average of many draws: how many records there
// are, and their weights. Keys are what codes say, and some noise.
void check_draws(bool controls, int64_t threads) {
    const int64_t lists = 8, d = 8, blocks = 16, slots = lists * blocks * 16, turns = 300, budget = 200, room = 400;
    const float noise = 0.1f, step = 0.01f;
    std::vector<uint8_t> codes(slots * d / 2), gains(slots, 64), errors(slots);
    std::vector<float> words(d * 16), centroids(lists * d), keys(slots * d), query(d), sizes(16);
    std::vector<float> spreads(lists, 1.6f), gained(lists, 1.01f), radii(lists, 8.0f), most_errors(lists, 254.0f);
    std::vector<float> rotation(d * d), means(lists * d), sums_of(softdb::kSigns * d);
    std::vector<int64_t> starts(lists + 1), positions(room);
    std::vector<uint16_t> allowed(lists * blocks);
    std::vector<uint32_t> places(slots);
    std::vector<double> scores(room), chances(room), weights(room), logits(slots), centre(d);
    std::vector<double> bounds(int64_t(softdb::Figure::count)), output(d), moved(d), first(d), roots(softdb::kSigns);
    for (auto* numbers : {&words, &centroids, &query})
        for (float& x : *numbers) x = uniform();
    for (uint8_t& x : codes) x = uint8_t(int(uniform() * 127 + 128));
    for (int64_t j = 0; j <= lists; j++) starts[j] = j * blocks;
    double count = 0, total = 0;
    std::vector<double> numerator(d);
    for (int64_t x = 0; x < d; x++) rotation[x * d + x] = 1;
    for (int64_t slot = 0; slot < slots; slot++) {
        const int64_t list = slot / (blocks * 16), block = slot / 16, record = slot % 16;
        double apart = 0;
        for (int64_t x = 0; x < d; x++) {
            const uint8_t pair = codes[(block * d / 2 + x / 2) * 16 + (record < 8 ? 2 * record : 2 * record - 15)];
            const float off = noise * uniform();
            keys[slot * d + x] = centroids[list * d + x] + words[x * 16 + (x % 2 ? pair >> 4 : pair & 15)] + off;
            logits[slot] += 2.0 * query[x] * keys[slot * d + x], apart += double(off) * off;
        }
        errors[slot] = uint8_t(std::ceil(std::sqrt(apart) / step)), places[slot] = uint32_t(slot);
        if (slot % 3 == 0) continue;
        allowed[block] |= uint16_t(1 << record), sizes[list]++, count++, total += std::exp(logits[slot]);
        for (int64_t x = 0; x < d; x++) numerator[x] += std::exp(logits[slot]) * keys[slot * d + x], means[list * d + x] += keys[slot * d + x] / 171;
    }
    const int64_t address = int64_t(keys.data()), none = 0;
    const double factor = 2;
    std::vector<uint64_t> seeds(d);
    softdb::Crew crew;
    softdb::Draw args;
    args.lists.starts = starts.data(), args.lists.count = lists, args.lists.codes = codes.data();
    args.lists.factors = (decltype(args.lists.factors))gains.data(), args.lists.words = words.data();
    args.lists.parts = d, args.lists.word = 1;
    args.gains = gains.data(), args.errors = errors.data(), args.gained = gained.data(), args.spreads = spreads.data();
    args.error_step = step, args.largest = noise * std::sqrt(float(d));
    args.queries = {query.data(), 1, d, d}, args.rotation = {rotation.data(), d, d, d};
    args.centroids = {centroids.data(), lists, d, d}, args.radii = radii.data(), args.most_errors = most_errors.data();
    args.allowed = allowed.data(), args.sizes = sizes.data(), args.places = places.data();
    args.keys = args.values = {&address, &none, 1, d, Kind::wide}, args.factors = &factor, args.least = NAN, args.budget = budget, args.visible = 2;
    args.controls = controls, args.seeds = seeds.data(), args.positions = {positions.data(), 1, room, room};
    args.scores = {scores.data(), 1, room, room}, args.chances = {chances.data(), 1, room, room};
    args.bounds = {bounds.data(), int64_t(softdb::Figure::count), 1, 1}, args.means = {means.data(), lists, d, d};
    args.centre = centre.data(), args.value_radius = 100, args.z = 1.96, args.doubt = 3;
    args.output = {output.data(), 1, d, d}, args.moved = {moved.data(), 1, d, d}, args.first = {first.data(), 1, d, d};
    args.sums = {sums_of.data(), 1, softdb::kSigns * d, softdb::kSigns * d}, args.roots = {roots.data(), 1, softdb::kSigns, softdb::kSigns};
    args.weights = {weights.data(), 1, room, room}, args.threads = threads, args.crew = &crew;
    std::vector<char> scratch(level::draw_scratch(args) + 64);
    args.scratch = scratch.data();
    double sums[2] = {}, squares[2] = {}, outside = 0;
    const double right[] = {count, total};
    for (int64_t turn = 0; turn < turns; turn++) {
        for (int64_t x = 0; x < d; x++) seeds[x] = uint64_t(turn * d + x) * 0x9E3779B97F4A7C15u | 1;
        crew = {};
        level::draw(args);
        int64_t drawn = 0;
        auto figure = [&](softdb::Figure which) { return bounds[int64_t(which)]; };
        double estimates[] = {0, std::exp(figure(softdb::Figure::base)) * figure(softdb::Figure::correction)};
        for (int64_t i = 0; i < room && positions[i] >= 0; i++, drawn++) {
            const int64_t slot = positions[i];
            expect(slot % 3 != 0, "a record that may be drawn", 1, d, 0, double(slot), 0);
            const bool precise = std::fabs(scores[i] - logits[slot] / 2) < 1e-6;
            expect(precise, "the score of a record that is drawn", 1, d, 0, scores[i], logits[slot] / 2);
            estimates[0] += 1 / chances[i], estimates[1] += std::exp(logits[slot]) / chances[i];
        }
        expect(std::fabs(std::log(estimates[1]) - figure(softdb::Figure::lse)) < 1e-9, "log Z", 1, d, 0, figure(softdb::Figure::lse), std::log(estimates[1]));
        double apart = 0;
        for (int64_t x = 0; x < d; x++) apart += std::pow(output[x] - numerator[x] / total, 2);
        outside += std::sqrt(apart) > figure(softdb::Figure::bar);
        expect(drawn >= budget && drawn < 1.3 * budget, "the number drawn", 1, d, 0, double(drawn), double(budget));
        for (int which : {0, 1}) sums[which] += estimates[which], squares[which] += estimates[which] * estimates[which];
    }
    expect(outside <= 0.09 * turns, "the share of answers beyond their bar", 1, d, 0, outside / turns, 0.05);
    for (int which : {0, 1}) {
        const double mean = sums[which] / turns, spread = std::sqrt((squares[which] / turns - mean * mean) / turns);
        const bool fits = std::fabs(mean - right[which]) < 5 * spread + 1e-4 * right[which];
        expect(fits && spread < 0.05 * right[which], "a sum over what is drawn", 1, d, which, mean, right[which]);
    }
}

// Whole numbers, whose products are exact: the k best of those found and of the longest are those of all.
void check_longest(int64_t q, int64_t m) {
    const int64_t d = 32, k = 5;
    std::vector<float> keys(m * d), queries(q * d), scores(q * k, -1e30f);
    std::vector<double> lengths(m);
    std::vector<int64_t> positions(m), matches(q * k, 1 << 20);
    for (float& x : queries) x = std::round(uniform() * 3);
    for (int64_t i = 0; i < m; i++) {
        double square = 0;
        for (int64_t x = 0; x < d; x++) keys[i * d + x] = std::round(uniform() * 2) * float(m - i);
        for (int64_t x = 0; x < d; x++) square += double(keys[i * d + x]) * keys[i * d + x];
        lengths[i] = std::sqrt(square) + double(m - i) * 100;  // descending, and no shorter than they are
        positions[i] = i;
    }
    for (int64_t j = 0; j < q; j++)
        for (int64_t x = 0; x < k; x++) matches[j * k + x] = (1 << 20) + x;
    level::take_in({{queries.data(), q, d, d}, positions.data(), {keys.data(), m, d, d}, lengths.data(),
                    {matches.data(), q, k, k}, {scores.data(), q, k, k}});
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
            expect(matches[j * k + x] == best, "one of the longest", q, d, 0, double(matches[j * k + x]), double(best));
        }
    }
}

// Lists of random codes: every record that is allowed, with its estimate.
void check_lists(int64_t q, bool l2) {
    const int64_t d = 20, parts = 8, word = 3, lists = 5, rows = 16, turns = 32, blocks = 6, slots = 16 * blocks;
    const int64_t starts[] = {0, 2, 3, 5, 6, 6};
    std::vector<uint8_t> rotation(turns * d), centroids(rows * d), codes(blocks * parts * 8);
    std::vector<float> turn_scales(turns), scales(rows), lengths(rows), inverse(rows, 1), words(parts * word * 16);
    std::vector<float> origin(d), queries(q * d), scores(q * slots);
    std::vector<uint16_t> factors(slots), offsets(slots), allowed(blocks);
    std::vector<uint32_t> places(slots);
    std::vector<int64_t> matches(q * slots);
    for (auto* bytes : {&rotation, &centroids, &codes})
        for (uint8_t& x : *bytes) x = uint8_t(uniform() * 127 + 128);
    for (auto* numbers : {&turn_scales, &scales, &lengths, &words, &origin, &queries})
        for (float& x : *numbers) x = uniform();
    for (auto* numbers : {&turn_scales, &scales})
        for (float& x : *numbers) x *= 0.01f;
    for (int64_t i = 0; i < slots; i++) {
        factors[i] = uint16_t(0x3800 + i), offsets[i] = uint16_t(0x3c00 + 7 * i), places[i] = uint32_t(1000 - i);
        if (i % 3) allowed[i / 16] |= uint16_t(1 << i % 16);
    }
    std::vector<float> sizes(rows);
    for (int64_t j = 0; j < lists; j++)
        for (int64_t i = 16 * starts[j]; i < 16 * starts[j + 1]; i++) sizes[j] += i % 3 != 0;
    ListSearch args;
    args.lists.rotation = {rotation.data(), turn_scales.data(), turns, d};
    args.lists.centroids = {centroids.data(), scales.data(), rows, d};
    args.lists.lengths = lengths.data(), args.lists.inverse_spreads = inverse.data(), args.lists.starts = starts;
    args.lists.count = lists, args.lists.codes = codes.data(), args.lists.factors = factors.data();
    if (l2) args.lists.offsets = offsets.data(), args.lists.unit = 0.5f, args.lists.origin = origin.data();
    args.lists.words = words.data(), args.lists.parts = parts, args.lists.word = word;
    args.queries = {queries.data(), q, d, d}, args.allowed = allowed.data(), args.sizes = sizes.data();
    args.places = places.data();
    args.keys.kind = Kind::none, args.nearest = slots, args.kept = slots;
    int64_t scanned = 0;
    args.matches = {matches.data(), q, slots, slots}, args.scores = {scores.data(), q, slots, slots}, args.scanned = &scanned;
    std::vector<char> scratch(level::list_scratch(args));
    level::search_lists(args, scratch.data());
    expect(scanned == q * slots, "slots that were looked at", q, d, 0, double(scanned), double(q * slots));
    for (int64_t i = 0; i < q; i++) {
        std::vector<double> seen(d), turned(parts * word), table(parts * 16);
        double top = 0, low = 0, high = 0;
        for (int64_t j = 0; j < d; j++) seen[j] = queries[i * d + j] - (l2 ? origin[j] : 0), top = std::max(top, std::fabs(seen[j]));
        for (double& x : seen) x = std::round(x / top * 63) * top / 63;
        auto product = [&](const std::vector<uint8_t>& matrix, float scale, int64_t row) {
            double total = 0;
            for (int64_t j = 0; j < d; j++)
                total += (double(matrix[row / 16 * 16 * d + (j / 4 * 16 + row % 16) * 4 + j % 4]) - 128) * seen[j];
            return total * scale;
        };
        for (int64_t r = 0; r < parts * word; r++) turned[r] = product(rotation, turn_scales[r], r);
        for (int64_t m = 0; m < parts; m++)
            for (int64_t c = 0; c < 16; c++) {
                for (int64_t t = 0; t < word; t++)
                    table[m * 16 + c] += (l2 ? 2 : 1) * turned[m * word + t] * words[(m * word + t) * 16 + c];
                low = std::min(low, table[m * 16 + c]), high = std::max(high, table[m * 16 + c]);
            }
        for (int64_t k = 0; k < slots && matches[i * slots + k] >= 0; k++) {
            const int64_t slot = 1000 - matches[i * slots + k], block = slot / 16, record = slot % 16;
            expect(slot % 3 != 0, "a record that is allowed", q, d, 0, double(slot), 0);
            double sum = 0, step = (high - low) / 127;
            for (int64_t m = 0; m < parts; m++) {
                const uint8_t pair = codes[(block * parts / 2 + m / 2) * 16 + (record < 8 ? 2 * record : 2 * record - 15)];
                sum += std::floor((table[m * 16 + (m % 2 ? pair >> 4 : pair & 15)] - low) / step + 0.5) * step + low;
            }
            int64_t list = 0;
            while (starts[list + 1] <= block) list++;
            auto half = [](uint16_t bits) { return std::ldexp(1.0 + (bits & 0x3ff) / 1024.0, (bits >> 10) - 15); };
            double right = product(centroids, scales[list], list) - lengths[list] + half(factors[slot]) * sum;
            if (l2) right -= half(offsets[slot]) * 0.5;
            expect(std::fabs(scores[i * slots + k] - right) < 1e-3, "an estimate", q, d, 0, scores[i * slots + k], right);
        }
        expect(matches[i * slots + slots - 1] == -1, "the end", q, d, 0, double(matches[i * slots + slots - 1]), -1);
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
                here.check(metric, q % 2, false, false);
                here.check(metric, !(q % 2), d == 17, false);
                here.check(metric, q % 2, d == 17, true);
                if (q == 1 || q == 5) here.check_candidates(metric, false), here.check_candidates(metric, true);
            }
    for (bool controls : {false, true}) check_draws(controls, 1), check_draws(controls, 2);
    for (int64_t q : {1, 3, 4, 9}) check_longest(q, 45);
    for (int64_t q : {1, 5}) check_lists(q, false), check_lists(q, true);
    std::printf("%d answers are right\n", compared);
    return 0;
}
