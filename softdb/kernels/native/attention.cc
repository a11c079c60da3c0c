// Exact attention, forward and backward, block by block: scores, weights and products of a block are computed while the
// block is in the cache (Dao et al. 2022, algorithms 1 and 4; the outer loop reads keys, the inner loop queries).
//
// Queries are grouped in panels of one or two vectors. The scores of a block and a panel form a table (records, lanes).
// S = K Q', best = max S, W = exp((S - top) / T), total += sum of W, O += W' V.
#include "level.h"

#include "block.h"
#include "table.h"
#include "tile.h"

namespace softdb {
namespace SOFTDB_LEVEL {
namespace {

constexpr int kPanel = 2 * kLanes;  // largest number of queries in a panel
constexpr float kDead = -__builtin_inff();

struct Panel {
    int64_t first;  // number of the first query
    int size;       // number of queries
    int lanes;      // lanes used, a multiple of kLanes
};

// The division into blocks and panels, and the memory for both: all float32, in the second cache except for the queries.
struct Plan {
    const Attend& args;
    bool few, whole;  // whole: all panels of a block have tables side by side, each of kPanel lanes
    int64_t d, v, lanes, block;
    float *keys, *values, *scores, *along, *inverse, *tops, *queries, *grads, *query_rows, *grad_rows;
    float *offsets, *inverse_totals, *signs, *below;
    int64_t size = 0;

    explicit Plan(const Attend& given) : args(given), few(given.q <= kFew), whole(given.key_grad && !few) {
        d = padded(args.keys.width);
        v = args.labels ? 0 : padded(args.values.width);
        lanes = padded(max<int64_t>(args.q, 1), whole ? kPanel : kLanes);
        block = block_rows();
        int64_t panel = min<int64_t>(lanes, kPanel);
        keys = take(block * d);
        values = take(block * v);
        scores = take(block * (whole ? lanes : panel));
        along = take(args.backward ? block * panel : 0);
        inverse = take(block + kLanes);
        tops = take(lanes);
        queries = take(lanes * d);
        grads = take(args.backward ? lanes * v : 0);
        offsets = take(args.backward ? lanes : 0);
        inverse_totals = take(args.backward ? lanes : 0);
        signs = take(lanes);
        below = take(args.along_scores ? block * panel : 0);
        query_rows = take(args.key_grad ? lanes * d : 0);
        grad_rows = take(args.value_grad ? lanes * v : 0);
    }

    // Number of records in a block. For many queries a block fills half of the second cache, which makes the work done
    // once for each block small. For few queries memory is the limit: blocks are short, so that prefetching keeps up.
    int64_t block_rows() const {
        bool single_panel = args.q <= kPanel;
        int64_t bytes = few ? cache_bytes(1) / 2 : cache_bytes(2) / (single_panel ? 5 : 2);
        int64_t tables = whole ? lanes : kPanel;
        int64_t fit = bytes / (4 * (d + v + tables)), least = few ? 12 : single_panel ? 48 : 96;
        return min<int64_t>(max(fit, least), 480) / 12 * 12;
    }

    float* take(int64_t count) {
        float* result = args.scratch ? args.scratch + size : nullptr;
        size += padded(count, 16);
        return result;
    }

    // Table of a block's scores for a panel.
    float* table(const Panel& panel, int64_t count) const { return scores + (whole ? panel.first * count : 0); }

    Panel panel(int64_t first) const {
        int64_t size = min<int64_t>(args.q - first, kPanel);
        return {first, int(size), whole ? kPanel : int(padded(size))};
    }

    // Transpose (q, width) to (width, lanes) for each panel, or copy it for few queries, padded with zeros.
    void pack(const float* rows, int64_t width, float* to) const {
        if (few) return copy_rows(rows, width, to);
        for (int64_t first = 0; first < args.q; first += kPanel) {
            Panel here = panel(first);
            float* out = to + first * width;
            for (int64_t t = 0; t < width; t++)
                for (int j = 0; j < here.lanes; j++)
                    out[t * here.lanes + j] = j < here.size ? rows[(first + j) * width + t] : 0;
        }
    }

    void copy_rows(const float* rows, int64_t width, float* to) const {
        for (int64_t j = 0; j < args.q; j++) copy_row(rows + j * width, width, nullptr, to + j * padded(width));
    }

    void pad(const float* row, float rest, float* to) const {
        for (int64_t j = 0; j < lanes; j++) to[j] = j < args.q ? row[j] : rest;
    }
};

// Prefetch of a column's records from i on.
Ahead ahead_of(const Column& column, const Part& part, int64_t i, int64_t count) {
    Ahead result;
    count = min(count, part.high - i);
    if (count <= 0 || !column.width) return result;
    result.data = static_cast<const char*>(column.data);
    result.bytes = column.width * (column.half ? 2 : 4);
    if (side_by_side(part, i, count)) {
        result.at = result.data + row_of(part, i) * result.bytes;
        result.end = result.at + count * result.bytes;
    } else {
        result.rows = part.rows + i;
        result.left = count;
    }
    return result;
}

// -- scores ----------------------------------------------------------------------------------------------------------

template <bool difference, bool lengths, class A>
void compare_few(
    const Plan& plan, const A* block, int64_t pitch, int64_t count, const float* rows, float* out, Ahead ahead
) {
    float* squares = lengths ? plan.inverse : nullptr;
    auto compared = [&](auto inner) { inner(count, block, pitch, rows, pitch, pitch, out, kLanes, squares, ahead); };
    switch (plan.args.q) {
        case 1: return compared(inner_all<1, difference, lengths, A>);
        case 2: return compared(inner_all<2, difference, lengths, A>);
        case 3: return compared(inner_all<3, difference, lengths, A>);
        default: return compared(inner_all<4, difference, lengths, A>);
    }
}

// out[i, j] = the product, or the squared distance, of row i of a block and row j of a panel that `pack` made. With
// `lengths`, used for few queries, the squared lengths of the block's rows are written to `plan.inverse`.
template <bool difference, bool lengths = false>
void compare(
    const Plan& plan, const Block& block, int64_t width, int64_t count, const float* packed, const Panel& panel,
    float* out, Ahead ahead
) {
    if (!plan.few) {
        Operands<float> given{block.wide, block.pitch, 1, packed + panel.first * width, panel.lanes, width};
        multiply<difference>(count, panel.lanes, given, Store{out, panel.lanes}, ahead);
    } else if (block.half) {
        compare_few<difference, lengths>(plan, block.half, block.pitch, count, packed, out, ahead);
    } else {
        compare_few<difference, lengths>(plan, block.wide, block.pitch, count, packed, out, ahead);
    }
}

// 1 / |k| of a key, given the sum of its squares in float32; 0 for a zero vector.
template <class A>
SOFTDB_INLINE float inverse_length(float square, const A* key, int64_t width) {
    if (square > 1e-30f && square < 1e30f) return 1 / __builtin_sqrtf(square);
    double total = 0;  // float64 holds the square of every float32
    for (int64_t t = 0; t < width; t++) total += double(widen(key[t])) * double(widen(key[t]));
    return total > 1e-76 ? float(1 / __builtin_sqrt(total)) : 0;
}

template <class A>
void inverse_lengths(const A* block, int64_t pitch, int64_t width, int64_t count, bool known, float* out) {
    for (int64_t i = 0; i < count; i++) {
        const A* key = block + i * pitch;
        Vec squares{};
        for (int64_t t = 0; t < pitch && !known; t += kLanes) {
            Vec part = load(key + t);
            squares += part * part;
        }
        out[i] = inverse_length(known ? out[i] : sum(squares), key, width);
    }
}

// 1 / |k| of a block's keys; if `known`, from the squares in `plan.inverse`.
void invert_lengths(const Plan& plan, const Block& keys, int64_t count, bool known) {
    int64_t width = plan.args.keys.width;
    if (keys.half) inverse_lengths(keys.half, keys.pitch, width, count, known, plan.inverse);
    else inverse_lengths(keys.wide, keys.pitch, width, count, known, plan.inverse);
}

// The keys of a block, and 1 / |k| if the score is a cosine (for few queries `score` computes it).
Block load_keys(const Plan& plan, int64_t i, int64_t count) {
    const Attend& args = plan.args;
    bool cosine = args.metric == Metric::cosine;
    Block keys = load_block(
        args.keys, args.part, i, count, args.centre, plan.keys, plan.few || cosine || args.backward, plan.few
    );
    if (cosine && !plan.few) invert_lengths(plan, keys, count, false);
    return keys;
}

// The block of records from i on. Its values are loaded when a panel first needs them.
struct Loaded {
    const Plan& plan;
    int64_t i, count;
    Block keys;
    Ahead next_keys, next_values;  // prefetch of the next block

    Loaded(const Plan& plan, int64_t i) : plan(plan), i(i), count(min(plan.block, plan.args.part.high - i)) {
        const Attend& args = plan.args;
        keys = load_keys(plan, i, count);
        next_keys = ahead_of(args.keys, args.part, i + count, plan.block);
        next_values = ahead_of(args.values, args.part, i + count, plan.block);
    }

    const Block& values() {
        const Attend& args = plan.args;
        if (!has_values)
            result = load_block(
                args.values, args.part, i, count, nullptr, plan.values, plan.few || !args.backward, plan.few
            );
        has_values = true;
        return result;
    }

  private:
    Block result;
    bool has_values = false;
};

// Set the scores of masked records to -inf.
void mask_out(const Attend& args, const Panel& panel, int64_t i, int64_t count, float* scores) {
    for (int j = 0; j < panel.size; j++) {
        const bool* allowed = args.part.mask + (panel.first + j) * args.part.mask_width;
        const int64_t* places = args.part.places + i;
        for (int64_t r = 0; r < count; r++)
            if (!allowed[places[r]]) scores[r * panel.lanes + j] = kDead;
    }
}

// The factor by which each query's products become scores: its scale, negative for squared distances.
void sign(const Plan& plan) {
    const Attend& args = plan.args;
    for (int64_t j = 0; j < plan.lanes; j++)
        plan.signs[j] = (args.metric == Metric::l2 ? -1 : 1) * (args.scales && j < args.q ? args.scales[j] : 1);
}

struct Best {
    Vec best[2], doubt[2];  // the largest score of each query; 0, or NaN if a score is not finite
};

// Apply signs, scales, lengths and the mask to the scores. V vectors for each row.
template <int V>
Best finish(const Plan& plan, const Panel& panel, int64_t i, int64_t count, float* scores) {
    const Attend& args = plan.args;
    Best result;
    Vec signs[V];
    for (int v = 0; v < V; v++) {
        result.best[v] = everywhere(kDead), result.doubt[v] = Vec{}, signs[v] = load(plan.signs + panel.first + v * kLanes);
    }
    for (int64_t r = 0; r < count; r++) {
        float factor = args.metric == Metric::cosine ? plan.inverse[r] : 1.0f;
        for (int v = 0; v < V; v++) {
            float* at = scores + r * panel.lanes + v * kLanes;
            Vec score = load(at) * factor * signs[v];
            store(at, score);
            result.best[v] = greater(score, result.best[v]);
            result.doubt[v] += score * 0.0f;
        }
    }
    if (!args.part.mask) return result;
    mask_out(args, panel, i, count, scores);
    for (int v = 0; v < V; v++) result.best[v] = everywhere(kDead);
    for (int64_t r = 0; r < count; r++)
        for (int v = 0; v < V; v++)
            result.best[v] = greater(load(scores + r * panel.lanes + v * kLanes), result.best[v]);
    return result;
}

// Compute the scores of a block for a panel, and the largest of each query. Return true if any weight is not negligible.
bool score(
    const Plan& plan, const Block& keys, const Panel& panel, int64_t i, int64_t count, float* best, Ahead ahead
) {
    const Attend& args = plan.args;
    int64_t width = plan.few ? plan.d : args.keys.width;
    float* scores = plan.table(panel, count);
    if (args.metric == Metric::l2) {
        compare<true>(plan, keys, width, count, plan.queries, panel, scores, ahead);
    } else if (args.metric == Metric::cosine && plan.few) {
        compare<false, true>(plan, keys, width, count, plan.queries, panel, scores, ahead);
        invert_lengths(plan, keys, count, true);
    } else {
        compare<false>(plan, keys, width, count, plan.queries, panel, scores, ahead);
    }
    Best result = panel.lanes > kLanes ? finish<2>(plan, panel, i, count, scores)
                                      : finish<1>(plan, panel, i, count, scores);
    float* tops = plan.tops + panel.first;
    bool matters = false;
    for (int j = 0; j < panel.size; j++) {
        float doubt = result.doubt[j / kLanes][j % kLanes];
        if (doubt != 0) tops[j] = doubt;
        best[j] = result.best[j / kLanes][j % kLanes];
        matters |= (best[j] - tops[j]) * args.inverse_temperature > args.negligible;
    }
    return matters;
}

// -- weights ---------------------------------------------------------------------------------------------------------

// Turn scores into weights exp((s - top) / T) in place, and sum the weights.
template <int V>
void weigh(const Panel& panel, int64_t count, const float* tops, float inverse_temperature, float* scores, float* totals) {
    Vec top[V], total[V];
    for (int v = 0; v < V; v++) top[v] = load(tops + v * kLanes), total[v] = Vec{};
    for (int64_t r = 0; r < count; r++)
        for (int v = 0; v < V; v++) {
            float* at = scores + r * panel.lanes + v * kLanes;
            // at most 0, but a score computed twice may differ in its last digit
            Vec weight = exp_negative(smaller(load(at) - top[v], Vec{}) * inverse_temperature);
            store(at, weight);
            total[v] += weight;
        }
    for (int v = 0; v < V; v++) store(totals + v * kLanes, total[v]);
}

void weigh(const Plan& plan, const Panel& panel, int64_t count, float* scores, float* totals) {
    const float* tops = plan.tops + panel.first;
    if (panel.lanes > kLanes) weigh<2>(panel, count, tops, plan.args.inverse_temperature, scores, totals);
    else weigh<1>(panel, count, tops, plan.args.inverse_temperature, scores, totals);
}

// Rescale the sums so far to a new largest score.
void raise_top(const Plan& plan, const Panel& panel, const float* best) {
    const Attend& args = plan.args;
    for (int j = 0; j < panel.size; j++) {
        int64_t query = panel.first + j;
        float* top = plan.tops + query;
        if (!(best[j] > *top)) continue;
        double decay = __builtin_exp(double(*top - best[j]) * args.inverse_temperature);
        *top = best[j];
        args.total[query] *= decay;
        if (args.labels)
            for (int64_t c = 0; c < args.num_classes; c++) args.output[c * args.q + query] *= decay;
        else
            for (int64_t x = 0; x < args.values.width; x++) args.output[query * args.values.width + x] *= decay;
    }
}

// -- pooling ---------------------------------------------------------------------------------------------------------

// out[j, x] += sum over i of weights[i, j] block[i, x], in float64 from block to block.
void pool(
    const Panel& panel, const float* weights, const Block& block, int64_t width, int64_t count, double* out, Ahead ahead
) {
    Add add{out + panel.first * width, width};
    if (block.half)
        multiply(panel.size, padded(width), Operands<Half>{weights, 1, panel.lanes, block.half, block.pitch, count}, add, ahead);
    else
        multiply(panel.size, padded(width), Operands<float>{weights, 1, panel.lanes, block.wide, block.pitch, count}, add, ahead);
}

// Add the weights of each record to its class. Skip a label that disk errors have changed since it was checked.
void add_labels(const Attend& args, const Panel& panel, int64_t i, int64_t count, const float* weights) {
    for (int64_t r = 0; r < count; r++) {
        int64_t label = args.labels[row_of(args.part, i + r)];
        if (label < 0 || label >= args.num_classes) continue;
        double* to = args.output + label * args.q + panel.first;
        for (int j = 0; j < panel.size; j++) to[j] += double(weights[r * panel.lanes + j]);
    }
}

}  // namespace

void exponentials(const float* x, int64_t n, float* out) {
    for (int64_t i = 0; i + kLanes <= n; i += kLanes) store(out + i, exp_negative(load(x + i)));
}

int64_t attend_scratch(const Attend& args) { return Plan(args).size; }

void attend_forward(const Attend& args) {
    Plan plan(args);
    plan.pack(args.queries, args.keys.width, plan.queries);
    plan.pad(args.top, -kDead, plan.tops);  // so that padding has weights of 0
    sign(plan);
    float best[kPanel], totals[kPanel];
    for (int64_t i = args.part.low; i < args.part.high; i += plan.block) {
        Loaded block(plan, i);
        int64_t count = block.count;
        for (int64_t first = 0; first < args.q; first += kPanel) {
            Panel panel = plan.panel(first);
            if (!score(plan, block.keys, panel, i, count, best, first ? Ahead{} : block.next_keys)) continue;
            raise_top(plan, panel, best);
            weigh(plan, panel, count, plan.scores, totals);
            for (int j = 0; j < panel.size; j++) args.total[first + j] += double(totals[j]);
            if (args.labels) {
                add_labels(args, panel, i, count, plan.scores);
            } else if (plan.v) {
                Ahead ahead = first ? Ahead{} : block.next_values;
                pool(panel, plan.scores, block.values(), args.values.width, count, args.output, ahead);
            }
        }
    }
    for (int64_t j = 0; j < args.q; j++) args.top[j] = plan.tops[j];
}

// -- backward --------------------------------------------------------------------------------------------------------

namespace {

// Replace weights by ds = w (g.v + offset) / T, replace `along` (g.v) by the weights, and sum ds.
void pulls(const Plan& plan, const Panel& panel, int64_t count, float* weights, float* along, float* totals) {
    for (int v = 0; v < panel.lanes; v += kLanes) {
        Vec inverse = load(plan.inverse_totals + panel.first + v), offset = load(plan.offsets + panel.first + v);
        Vec total{};
        for (int64_t r = 0; r < count; r++) {
            int64_t at = r * panel.lanes + v;
            Vec weight = load(weights + at) * inverse;
            Vec result = weight * (load(along + at) + offset) * plan.args.inverse_temperature;
            store(weights + at, result);
            store(along + at, weight);
            total += result;
        }
        store(totals + v, total);
    }
}

constexpr float kFar = -1000;  // logits so far below the largest have a weight of 0

// Write s - top to `below`; kFar for lower ones, as 0 times infinity is not a number.
void copy_below(const Plan& plan, const Panel& panel, int64_t count) {
    const float* scores = plan.table(panel, count);
    for (int v = 0; v < panel.lanes; v += kLanes) {
        Vec top = load(plan.tops + panel.first + v);
        for (int64_t r = 0; r < count; r++) {
            int64_t at = r * panel.lanes + v;
            store(plan.below + at, greater(load(scores + at) - top, everywhere(kFar)));
        }
    }
}

// along_scores += sum of ds (s - top).
void add_along_scores(const Plan& plan, const Panel& panel, int64_t count) {
    const float* scores = plan.table(panel, count);
    for (int v = 0; v < panel.lanes; v += kLanes) {
        Vec total{};
        for (int64_t r = 0; r < count; r++) {
            int64_t at = r * panel.lanes + v;
            total += load(scores + at) * load(plan.below + at);
        }
        for (int j = 0; j < kLanes && v + j < panel.size; j++) plan.args.along_scores[panel.first + v + j] += double(total[j]);
    }
}

// g.v for a label is the gradient of its class.
void along_labels(const Attend& args, const Panel& panel, int64_t i, int64_t count, float* along) {
    for (int64_t r = 0; r < count; r++) {
        int64_t label = args.labels[row_of(args.part, i + r)];
        bool sound = label >= 0 && label < args.num_classes;
        const float* from = args.output_grad + label * args.q + panel.first;
        for (int j = 0; j < panel.lanes; j++) along[r * panel.lanes + j] = sound && j < panel.size ? from[j] : 0;
    }
}

// Add vectors to the gradient rows of the records from i on.
struct AddRows {
    float* to;
    int64_t width;
    const Part& part;
    int64_t i;
    SOFTDB_INLINE void operator()(int64_t r, int64_t x, Vec result) const {
        float* at = to + row_of(part, i + r) * width + x;
        if (x + kLanes <= width) store(at, load(at) + result);
        else
            for (int lane = 0; x + lane < width; lane++) at[lane] += result[lane];
    }
};

// grad[i, x] += sum over j of table[i, j] rows[j, x]: gradients that the queries of a panel send to records.
void send(
    const Attend& args, const Panel& panel, const float* table, const float* rows, int64_t width, int64_t i,
    int64_t count, float* grad
) {
    int64_t pitch = padded(width);
    Operands<float> given{table, panel.lanes, 1, rows + panel.first * pitch, pitch, panel.size};
    multiply(count, pitch, given, AddRows{grad, width, args.part, i});
}

void scale_rows(const Panel& panel, int64_t count, const float* factors, float* table) {
    for (int64_t r = 0; r < count; r++)
        for (int v = 0; v < panel.lanes; v += kLanes)
            store(table + r * panel.lanes + v, load(table + r * panel.lanes + v) * factors[r]);
}

}  // namespace

void attend_backward(const Attend& args) {
    Plan plan(args);
    plan.pack(args.queries, args.keys.width, plan.queries);
    plan.pad(args.top, -kDead, plan.tops);
    sign(plan);
    plan.pad(args.offset, 0, plan.offsets);
    plan.pad(args.inverse_total, 0, plan.inverse_totals);
    if (plan.v) plan.pack(args.output_grad, args.values.width, plan.grads);
    if (args.key_grad) plan.copy_rows(args.queries, args.keys.width, plan.query_rows);
    if (args.value_grad) plan.copy_rows(args.output_grad, args.values.width, plan.grad_rows);
    int64_t v_width = plan.few ? plan.v : args.values.width;
    float best[kPanel], totals[kPanel];
    for (int64_t i = args.part.low; i < args.part.high; i += plan.block) {
        Loaded block(plan, i);
        int64_t count = block.count;
        for (int64_t first = 0; first < args.q; first += kPanel) {
            Panel panel = plan.panel(first);
            float* scores = plan.table(panel, count);
            if (!score(plan, block.keys, panel, i, count, best, first ? Ahead{} : block.next_keys)) {
                if (plan.whole) std::memset(scores, 0, 4 * count * panel.lanes);
                continue;
            }
            if (args.labels) {
                along_labels(args, panel, i, count, plan.along);
            } else {
                compare<false>(plan, block.values(), v_width, count, plan.grads, panel, plan.along, {});
            }
            if (args.along_scores) copy_below(plan, panel, count);
            weigh(plan, panel, count, scores, totals);
            pulls(plan, panel, count, scores, plan.along, totals);
            if (args.along_scores) add_along_scores(plan, panel, count);
            for (int j = 0; j < panel.size; j++) args.mass[first + j] += double(totals[j]);
            if (args.value_grad)
                send(args, panel, plan.along, plan.grad_rows, args.values.width, i, count, args.value_grad);
            if (args.key_grad && !plan.whole)
                send(args, panel, scores, plan.query_rows, args.keys.width, i, count, args.key_grad);
            if (args.metric == Metric::cosine) scale_rows(panel, count, plan.inverse, scores);
            Ahead ahead = first ? Ahead{} : block.next_values;
            pool(panel, scores, block.keys, args.keys.width, count, args.query_grad, ahead);
        }
        if (args.key_grad && plan.whole) {  // all panels at once, so that each row of the gradient is read only once
            Operands<float> given{plan.scores, kPanel, 1, plan.query_rows, plan.d, args.q};
            given.run = kPanel, given.jump = (count - 1) * kPanel;
            multiply(count, plan.d, given, AddRows{args.key_grad, args.keys.width, args.part, i});
        }
    }
}

}  // namespace SOFTDB_LEVEL
}  // namespace softdb
