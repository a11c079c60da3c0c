// Arguments of exact attention: pointers and sizes, which the caller checks. Kernels know nothing of Python.
#pragma once

#include <cstdint>

namespace softdb {

enum class Metric { dot, cosine, l2 };

// Rows of float32, or of float16, side by side.
struct Column {
    const void* data = nullptr;
    int64_t width = 0;
    bool half = false;
};

// The records of the columns that are visited.
struct Part {
    const int64_t* rows = nullptr;    // (high,) row of each record; null: its number
    const int64_t* places = nullptr;  // (high,) the mask's column of each; null: no mask
    const bool* mask = nullptr;       // (q, mask_width), true = takes part
    int64_t mask_width = 0;
    int64_t low = 0, high = 0;
};

// Exact attention: softmax(s / T) over the records of a part, with s = q.k, q.k / |k| or -|q - k|^2.
struct Attend {
    const float* queries = nullptr;  // (q, d)
    int64_t q = 0;
    Column keys, values;              // values of width 0: nothing is pooled
    const int32_t* labels = nullptr;  // in place of values
    int64_t num_classes = 0;
    Part part;
    Metric metric = Metric::dot;
    const float* centre = nullptr;  // (d,) that keys are seen from, as the queries are already; null: the origin
    float inverse_temperature = 1;
    float negligible = 0;      // logits so far below the top add nothing
    float* top = nullptr;      // (q,) the largest score so far; backward: of all
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
    float* key_grad = nullptr;     // (n, d) sum of ds q, or null
    float* value_grad = nullptr;   // (n, v) sum of w g, or null
};

}  // namespace softdb
