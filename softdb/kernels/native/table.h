// The kernels of one level, behind pointers. A new kernel gets its arguments in a header, a pointer here, and a line in
// table.cc.
#pragma once

#include "arguments.h"
#include "lists.h"
#include "records.h"

namespace softdb {

struct Kernels {
    const char* level;
    int lanes;  // float32 of a vector
    void (*exponentials)(const float* x, int64_t n, float* out);
    int64_t (*attend_scratch)(const Attend& ask);
    void (*attend_forward)(const Attend& ask);
    void (*attend_backward)(const Attend& ask);
    bool (*rerank)(const Rerank& ask);
    bool (*take_in)(const TakeIn& ask);
    bool (*prepare)(const Prepare& ask);
    void (*score)(const Score& ask);
    bool (*scan)(const Scan& ask);
    void (*settle)(const Settle& ask);
    void (*sums)(const Sums<float>& ask);
    void (*sums_wide)(const Sums<double>& ask);
    void (*spread)(const Terms& ask, const double* weights, const double* output, int64_t v, Errors& into, float* line);
    double (*f_quantile)(double z, double above, double below);
    void (*bars)(const Bars& ask);
    int64_t (*list_scratch)(const ListSearch& ask);
    bool (*search_lists)(const ListSearch& ask, char* scratch);
    void (*encode)(const Encode& ask);
    int64_t (*draw_scratch)(const Draw& ask);
    void (*draw)(const Draw& ask);
    void (*help_draw)(const Draw& ask);
};

const Kernels& kernels();             // those in use; there are none where `levels` is empty
bool use_level(const char* level);      // false: the processor has no such
const char* const* levels();           // that this processor has, the best first, then nullptr
int64_t cache_bytes(int level);        // of a core's first or second cache

}  // namespace softdb
