// Exact scores s(q, k) = q·k, q·k / |k| or -|q - k|² of candidates (q, c) for queries (q, d), from stored keys that are
// read in place. `rerank` keeps the k best of each query, `score` returns all. It reads q c d numbers; operations 2 q c d.
#include "level.h"

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

template <class Number>
void scored(const Score& args) {
    const Reader reader(args.keys);
    for (int64_t i = 0; i < args.queries.rows; i++) {
        fill(args.scores[i], args.positions.width, -__builtin_inff());
        each_record(reader, args.positions[i], args.positions.width, [&](int64_t j, const char* at) {
            args.scores[i][j] = score_of<float>(args.queries[i], (const Number*)at, args.keys.width, args.metric);
        });
    }
}

}  // namespace

// The k best of each query's candidates. Returns false if there are fewer than k, or a score is NaN.
bool rerank(const Rerank& args) {
    return args.keys.kind == Kind::half ? reranked<Half>(args) : reranked<float>(args);
}

// Scale vectors to length 1, computed in float64, which holds the square of any float32; zero vectors stay.
void prepare(const Table<const float>& vectors, const Table<float>& out) {
    const int64_t d = vectors.width;
    for (int64_t i = 0; i < vectors.rows; i++) {
        const double square = summed<double>(vectors[i], vectors[i], d, product);
        const double length = square > 0 ? __builtin_sqrt(square) : 1;
        for (int64_t j = 0; j < d; j++) out[i][j] = float(vectors[i][j] / length);
    }
}

// Exact scores of candidates, in the candidates' order.
void score(const Score& args) {
    if (args.keys.kind == Kind::half) scored<Half>(args);
    else scored<float>(args);
}

}  // namespace SOFTDB_LEVEL
}  // namespace softdb
