// Small matrix products in registers, of which all products of attention and of its gradient are composed
// (Goto and van de Geijn 2008, figure 5; Van Zee and van de Geijn 2015).
#pragma once

#include "vec.h"

namespace softdb {
namespace SOFTDB_LEVEL {

constexpr int kRows = kRegisters == 32 ? 8 : 6;  // rows of a tile of two vectors, so that the sums fit into registers
constexpr int kSums = 2 * kRows;                 // vectors of sums in a tile
constexpr int kFew = 4;                          // largest number of queries that `inner` compares

// Number of rows in a tile of V vectors. Wide tiles are for few rows, and leave registers for the vectors themselves.
constexpr int tile_height(int vectors) {
    return vectors <= 2 ? kSums / vectors : vectors == 4 ? kRegisters / 8 : 1;
}

constexpr int64_t kChunk = 8;  // memory is prefetched after each kChunk steps of a tile

// Memory to prefetch into the second cache during a computation. Prefetches are spread evenly, as a processor has only
// about twenty of them in flight. Adjacent rows form one run, other rows one run each.
struct Ahead {
    const char *at = nullptr, *end = nullptr;  // the run
    int64_t step = 0;                          // bytes of one prefetch
    const int64_t* rows = nullptr;             // rows to prefetch after the run
    int64_t left = 0, bytes = 0;               // number of these rows; bytes of a row
    const char* data = nullptr;                // address of row 0

    SOFTDB_INLINE void in(int64_t times) { step = times > 0 ? (end - at + left * bytes) / times + 1 : 0; }

    SOFTDB_INLINE void go() {
        for (int64_t budget = step; budget > 0;) {
            const char* until = min(at + budget, end);
            for (const char* line = round_up(at); line < until; line += 64) __builtin_prefetch(line, 0, 2);
            budget -= until - at;
            at = until;
            if (at < end || !left) return;
            const char* row = data + *rows++ * bytes;
            at = row - reinterpret_cast<uintptr_t>(row) % 64;
            end = row + bytes;
            left--;
        }
    }

    SOFTDB_INLINE static const char* round_up(const char* at) {
        return reinterpret_cast<const char*>((reinterpret_cast<uintptr_t>(at) + 63) & ~uintptr_t(63));
    }
};

template <class B>
struct Operands {
    const float* a;
    int64_t row, step;  // a[r, t] = a[r row + t step]
    const B* b;
    int64_t pitch;  // b[t, x] = b[t pitch + x], float32 or float16
    int64_t steps;
    int64_t run = INT64_MAX, jump = 0;  // a lies in runs of `run` steps; `jump` numbers more to the next run
};

// out[r, x] = sum over t of a[r, t] b[t, x], or of the squares of their differences, for R rows and V vectors of x.
template <int R, int V, bool difference, class B>
__attribute__((noinline)) void tile(const Operands<B>& given, int64_t r, int64_t x, float* out, Ahead& ahead) {
    Vec sums[R][V];
    for (int i = 0; i < R; i++)
        for (int v = 0; v < V; v++) sums[i][v] = Vec{};
    const float* a = given.a + r * given.row;
    const B* b = given.b + x;
    const int64_t row = given.row, step = given.step, pitch = given.pitch;
    int64_t left = given.run;
    for (int64_t chunk = 0; chunk < given.steps; chunk += kChunk, ahead.go()) {
        int64_t count = min(kChunk, given.steps - chunk);
#pragma GCC unroll 1
        for (int64_t t = 0; t < count; t++, a += step, b += pitch) {
            Vec columns[V];
#pragma GCC unroll 8
            for (int v = 0; v < V; v++) columns[v] = load(b + v * kLanes);
#pragma GCC unroll 16
            for (int i = 0; i < R; i++) {
                Vec scalar = everywhere(a[i * row]);
#pragma GCC unroll 8
                for (int v = 0; v < V; v++) {
                    if constexpr (difference) {
                        Vec apart = scalar - columns[v];
                        sums[i][v] += apart * apart;
                    } else {
                        sums[i][v] += scalar * columns[v];
                    }
                }
            }
        }
        if ((left -= kChunk) == 0) a += given.jump, left = given.run;
    }
    for (int i = 0; i < R; i++)
        for (int v = 0; v < V; v++) store(out + (i * V + v) * kLanes, sums[i][v]);
}

// The same for a number of rows that is known only at run time, at most R.
template <int R, int V, bool difference, class B>
void tile_of(int64_t rows, const Operands<B>& given, int64_t r, int64_t x, float* out, Ahead& ahead) {
    if constexpr (R > 1) {
        if (rows < R) return tile_of<R - 1, V, difference>(rows, given, r, x, out, ahead);
    }
    tile<R, V, difference>(given, r, x, out, ahead);
}

template <int V, bool difference, class B, class Out>
void tiles_of(int64_t rows, const Operands<B>& given, int64_t& x, int64_t width, Out& out, Ahead& ahead) {
    constexpr int fits = tile_height(V), height = sizeof(B) == 4 ? fits : fits < kFew ? fits : kFew;
    alignas(64) float sums[height * V * kLanes];
    int64_t count = (rows + height - 1) / height;  // number of tiles, of nearly equal height
    for (; x + V * kLanes <= width; x += V * kLanes)
        for (int64_t i = 0; i < count; i++) {
            int64_t first = rows * i / count, end = rows * (i + 1) / count;
            tile_of<height, V, difference>(end - first, given, first, x, sums, ahead);
            for (int64_t r = first; r < end; r++)
                for (int v = 0; v < V; v++)
                    out(r, x + v * kLanes, load(sums + ((r - first) * V + v) * kLanes));
        }
}

// out(r, x, vector) for all r < rows and all vectors below x < width, a multiple of the lanes. Few rows read more of a
// row of b at once. The whole of `ahead` is fetched meanwhile.
template <bool difference = false, class B, class Out>
void multiply(int64_t rows, int64_t width, const Operands<B>& given, Out out, Ahead ahead = {}) {
    int64_t x = 0;
    int vectors = difference || rows > tile_height(4) ? 2 : rows > tile_height(8) ? 4 : 8;
    while (vectors > 1 && vectors * kLanes > width) vectors /= 2;
    int64_t height = tile_height(vectors), tiles = (rows + height - 1) / height * (width / kLanes / vectors);
    ahead.in(tiles * ((given.steps + kChunk - 1) / kChunk));
    if constexpr (!difference) {
        if (rows <= tile_height(8)) tiles_of<8, difference>(rows, given, x, width, out, ahead);
        if (rows <= tile_height(4)) tiles_of<4, difference>(rows, given, x, width, out, ahead);
    }
    tiles_of<2, difference>(rows, given, x, width, out, ahead);
    tiles_of<1, difference>(rows, given, x, width, out, ahead);
}

struct Store {
    float* to;
    int64_t pitch;
    SOFTDB_INLINE void operator()(int64_t r, int64_t x, Vec result) const { store(to + r * pitch + x, result); }
};

// Add rows of vectors to rows of `width` float64 numbers.
struct Add {
    double* to;
    int64_t width;
    SOFTDB_INLINE void operator()(int64_t r, int64_t x, Vec result) const {
        double* at = to + r * width + x;
        if (x + kLanes <= width) {
            Wide sum;
            std::memcpy(&sum, at, sizeof sum);
            sum += __builtin_convertvector(result, Wide);
            std::memcpy(at, &sum, sizeof sum);
        } else {
            for (int i = 0; x + i < width; i++) at[i] += result[i];
        }
    }
};

// sum over t of a[r pitch + t] b[j b_pitch + t] for R keys and J queries, or of squared differences: keys are read as
// whole vectors, where `tile` reads them number by number. For few queries memory is what counts. Where they are asked
// for, the squares of the keys' lengths too.
template <int R, int J, bool difference, bool lengths, class A>
SOFTDB_INLINE void inner(
    const A* a, int64_t pitch, const float* b, int64_t b_pitch, int64_t steps, float* out, int64_t out_pitch,
    float* squares
) {
    Vec sums[R][J], own[R];
    for (int r = 0; r < R; r++) {
        own[r] = Vec{};
        for (int j = 0; j < J; j++) sums[r][j] = Vec{};
    }
    for (int64_t t = 0; t < steps; t += kLanes) {
        Vec query[J];
#pragma GCC unroll 4
        for (int j = 0; j < J; j++) query[j] = load(b + j * b_pitch + t);
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
            Vec key = load(a + r * pitch + t);
            if constexpr (lengths) own[r] += key * key;
#pragma GCC unroll 4
            for (int j = 0; j < J; j++) {
                if constexpr (difference) {
                    Vec apart = key - query[j];
                    sums[r][j] += apart * apart;
                } else {
                    sums[r][j] += key * query[j];
                }
            }
        }
    }
    for (int r = 0; r < R; r++) {
        Vec result{};
        for (int j = 0; j < J; j++) result[j] = sum(sums[r][j]);
        store(out + r * out_pitch, result);
        if constexpr (lengths) squares[r] = sum(own[r]);
    }
}

// The same for any number of keys; each row of `out` gets a whole vector, zeros beyond J.
template <int J, bool difference, bool lengths, class A>
void inner_all(
    int64_t count, const A* a, int64_t pitch, const float* b, int64_t b_pitch, int64_t steps, float* out,
    int64_t out_pitch, float* squares, Ahead ahead
) {
    constexpr int rows = J == 1 ? 4 : J == 2 ? 4 : 2;
    ahead.in((count + rows - 1) / rows);
    int64_t i = 0;
    for (; i + rows <= count; i += rows) {
        inner<rows, J, difference, lengths>(
            a + i * pitch, pitch, b, b_pitch, steps, out + i * out_pitch, out_pitch, squares + i
        );
        ahead.go();
    }
    for (; i < count; i++)
        inner<1, J, difference, lengths>(
            a + i * pitch, pitch, b, b_pitch, steps, out + i * out_pitch, out_pitch, squares + i
        );
}

}  // namespace SOFTDB_LEVEL
}  // namespace softdb
