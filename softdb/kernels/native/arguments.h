// Arguments of exact attention: pointers and sizes, which the caller has checked. Kernels do not use Python.
#pragma once

#include <cstdint>

namespace softdb {

enum class Metric { dot, cosine, l2 };

// A column of float32 or float16 numbers, stored row by row.
struct Column {
    const void* data = nullptr;
    int64_t width = 0;
    bool half = false;
};

// The records of the columns that a kernel call reads.
struct Part {
    const int64_t* rows = nullptr;    // (high,) row of each record; null: record i is row i
    const int64_t* places = nullptr;  // (high,) column of the mask for each record; null: no mask
    const bool* mask = nullptr;       // (q, mask_width), true = takes part
    int64_t mask_width = 0;
    int64_t low = 0, high = 0;
};

// Exact attention: softmax(s / T) over the records of a part, with s = q.k, q.k / |k| or -|q - k|^2, times a scale c of
// the query if `scales` is given.
struct Attend {
    const float* queries = nullptr;  // (q, d)
    int64_t q = 0;
    Column keys, values;              // values of width 0: no values are pooled
    const int32_t* labels = nullptr;  // instead of values
    int64_t num_classes = 0;
    Part part;
    Metric metric = Metric::dot;
    const float* centre = nullptr;  // (d,) subtracted from keys; the caller has subtracted it from queries; null: 0
    const float* scales = nullptr;  // (q,) c; null: 1
    float inverse_temperature = 1;
    float negligible = 0;      // logits below the largest by more than -negligible are ignored
    float* top = nullptr;      // (q,) the largest score so far; in backward the largest of all
    float* scratch = nullptr;  // attend_scratch numbers, aligned to 64 bytes

    // forward adds to these
    double* output = nullptr;  // (q, v), or (num_classes, q)
    double* total = nullptr;   // (q,) sum of e^((s - top) / T)

    // backward reads these
    bool backward = false;
    const float* output_grad = nullptr;    // (q, v), or (num_classes, q)
    const float* offset = nullptr;         // (q,) g_lse - g.output
    const float* inverse_total = nullptr;  // (q,)

    // and adds to these
    double* query_grad = nullptr;  // (q, d) sum of ds k
    double* mass = nullptr;        // (q,) sum of ds
    double* along_scores = nullptr;  // (q,) sum of ds (s - top), or null
    float* key_grad = nullptr;     // (n, d) sum of ds q, or null
    float* value_grad = nullptr;   // (n, v) sum of w g, or null
};

}  // namespace softdb
