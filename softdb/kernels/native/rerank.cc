// Exact scores s(q, k) = q·k, q·k / |k| or -|q - k|² of candidates (q, c) of queries (q, d), from stored keys that are
// read in place: `rerank` keeps the k best of each query, `score` gives all. Bytes moved: q c d numbers; operations 2 q c d.
#include "rerank.h"

#include "heap.h"
#include "stored.h"

namespace softdb {
namespace SOFTDB_LEVEL {

namespace {

template <class Number>
bool reranked(const Rerank& ask) {
    const int64_t k = ask.found.width, kept = min(k, ask.positions.width);
    const Reader reader(ask.keys);
    bool whole = kept == k;
    for (int64_t i = 0; i < ask.queries.rows; i++) {
        const int64_t* positions = ask.positions[i];
        int64_t* heap = ask.found[i];  // entries, until they are sorted
        fill(heap, kept, kLast);
        each_record(reader, positions, kept ? ask.positions.width : 0, [&](int64_t j, const char* at) {
            float score = score_of<float>(ask.queries[i], (const Number*)at, ask.keys.width, ask.metric);
            whole &= score == score;
            int64_t entry = entry_of(score, positions[j]);
            if (entry < heap[0]) sink(heap, kept, entry);
        });
        whole &= !kept || heap[0] != kLast;
        sort(heap, kept);
        unpack(heap, kept, ask.scores[i]);
        fill(heap + kept, k - kept, int64_t(-1));
        fill(ask.scores[i] + kept, k - kept, -__builtin_inff());
    }
    return whole;
}

template <class Number, class Sum>
void scored(const Score& ask, const Table<Sum>& scores) {
    const Reader reader(ask.keys);
    for (int64_t i = 0; i < ask.queries.rows; i++) {
        fill(scores[i], ask.positions.width, -(Sum)kInfinity);
        each_record(reader, ask.positions[i], ask.positions.width, [&](int64_t j, const char* at) {
            scores[i][j] = score_of<Sum>(ask.queries[i], (const Number*)at, ask.keys.width, ask.metric);
        });
    }
}

}  // namespace

// The k best of each query's candidates. Returns false if there are fewer than k, or a score is NaN.
bool rerank(const Rerank& ask) {
    return ask.keys.kind == Kind::half ? reranked<Half>(ask) : reranked<float>(ask);
}

// Queries as an index compares them: for the cosine of length 1, computed in float64, which holds the square of every
// float32. Returns false if a query is not finite.
bool prepare(const Prepare& ask) {
    const int64_t d = ask.queries.width;
    bool finite = true;
    for (int64_t i = 0; i < ask.queries.rows; i++) {
        const float* query = ask.queries[i];
        double square = summed_wide(query, query, d, [](auto a, auto b) { return a * b; });
        finite &= square - square == 0;
        if (!ask.cosine) continue;
        double length = square > 0 ? __builtin_sqrt(square) : 1;
        for (int64_t j = 0; j < d; j++) ask.out[i][j] = float(query[j] / length);
    }
    return finite;
}

// Exact scores of candidates, in their order; in float64 where the last digits decide, as at a low temperature.
void score(const Score& ask) {
    bool half = ask.keys.kind == Kind::half, wide = ask.precisely.first;
    if (half && wide) scored<Half, double>(ask, ask.precisely);
    else if (half) scored<Half, float>(ask, ask.scores);
    else if (wide) scored<float, double>(ask, ask.precisely);
    else scored<float, float>(ask, ask.scores);
}

}  // namespace SOFTDB_LEVEL
}  // namespace softdb
