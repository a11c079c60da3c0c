// Exact scores s(q, k) = q·k, q·k / |k| or -|q - k|² of candidates (q, c) for queries (q, d), from stored keys that are
// read in place. `rerank` keeps the k best of each query, `score` returns all. It reads q c d numbers; operations 2 q c d.
#include "rerank.h"

#include "heap.h"
#include "stored.h"

namespace softdb {
namespace SOFTDB_LEVEL {

namespace {

template <class Number>
bool reranked(const Rerank& args) {
    const int64_t k = args.matches.width, kept = min(k, args.positions.width);
    const Reader reader(args.keys);
    bool whole = kept == k;
    for (int64_t i = 0; i < args.queries.rows; i++) {
        const int64_t* positions = args.positions[i];
        int64_t* heap = args.matches[i];  // entries, until they are sorted
        fill(heap, kept, kLast);
        each_record(reader, positions, kept ? args.positions.width : 0, [&](int64_t j, const char* at) {
            float score = score_of<float>(args.queries[i], (const Number*)at, args.keys.width, args.metric);
            whole &= score == score;
            int64_t entry = entry_of(score, positions[j]);
            if (entry < heap[0]) sink(heap, kept, entry);
        });
        whole &= !kept || heap[0] != kLast;
        sort(heap, kept, kept);
        unpack(heap, kept, args.scores[i]);
        fill(heap + kept, k - kept, int64_t(-1));
        fill(args.scores[i] + kept, k - kept, -__builtin_inff());
    }
    return whole;
}

template <class Number, class Sum>
void scored(const Score& args, const Table<Sum>& scores) {
    const Reader reader(args.keys);
    for (int64_t i = 0; i < args.queries.rows; i++) {
        fill(scores[i], args.positions.width, -(Sum)kInfinity);
        each_record(reader, args.positions[i], args.positions.width, [&](int64_t j, const char* at) {
            scores[i][j] = score_of<Sum>(args.queries[i], (const Number*)at, args.keys.width, args.metric);
        });
    }
}

}  // namespace

// The k best of each query's candidates. Returns false if there are fewer than k, or a score is NaN.
bool rerank(const Rerank& args) {
    return args.keys.kind == Kind::half ? reranked<Half>(args) : reranked<float>(args);
}

// Prepare queries as an index compares them: for the cosine of length 1, computed in float64, which holds the square of any
// float32. Returns false if a query is not finite.
bool prepare(const Prepare& args) {
    const int64_t d = args.queries.width;
    bool finite = true;
    for (int64_t i = 0; i < args.queries.rows; i++) {
        const float* query = args.queries[i];
        double square = summed_wide(query, query, d, [](auto a, auto b) { return a * b; });
        finite &= square - square == 0;
        if (!args.cosine) continue;
        double length = square > 0 ? __builtin_sqrt(square) : 1;
        for (int64_t j = 0; j < d; j++) args.out[i][j] = float(query[j] / length);
    }
    return finite;
}

// Exact scores of candidates, in the candidates' order; in float64 if the last digits matter, as at a low temperature.
void score(const Score& args) {
    bool half = args.keys.kind == Kind::half, wide = args.precisely.first;
    if (half && wide) scored<Half, double>(args, args.precisely);
    else if (half) scored<Half, float>(args, args.scores);
    else if (wide) scored<float, double>(args, args.precisely);
    else scored<float, float>(args, args.scores);
}

}  // namespace SOFTDB_LEVEL
}  // namespace softdb
