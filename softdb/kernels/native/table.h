// The kernels of one level, behind pointers. A new kernel gets its arguments in a header, a pointer here, and a line in
// table.cc.
#pragma once

#include "arguments.h"
#include "lists.h"
#include "records.h"

namespace softdb {

struct Kernels {
    const char* level;
    int lanes;  // number of float32 in a vector
    void (*exponentials)(const float* x, int64_t n, float* out);
    int64_t (*attend_scratch)(const Attend& args);
    void (*attend_forward)(const Attend& args);
    void (*attend_backward)(const Attend& args);
    bool (*rerank)(const Rerank& args);
    bool (*take_in)(const TakeIn& args);
    void (*prepare)(const Table<const float>& vectors, const Table<float>& out);
    void (*score)(const Score& args);
    bool (*scan)(const Scan& args);
    void (*rescore)(const Rescore& args);
    void (*sums)(const Sums<float>& args);
    void (*sums_wide)(const Sums<double>& args);
    void (*spread)(const Terms& args, const double* weights, const double* output, int64_t v, Errors& into, float* line);
    double (*f_quantile)(double z, double above, double below);
    void (*bars)(const Bars& args);
    int64_t (*list_scratch)(const ListSearch& args);
    bool (*search_lists)(const ListSearch& args, char* scratch);
    int64_t (*nearest_scratch)(const NearestLists& args);
    void (*nearest_lists)(const NearestLists& args, char* scratch);
    int64_t (*encode_scratch)(const Encode& args);
    void (*encode)(const Encode& args, char* scratch);
    int64_t (*draw_scratch)(const Draw& args);
    void (*draw)(const Draw& args);
    void (*help_draw)(const Draw& args);
};

const Kernels& kernels();             // the kernels in use; undefined if `levels` is empty
bool use_level(const char* level);      // false: the processor lacks the level
const char* const* levels();           // levels that this processor has, the best first, then nullptr
int64_t cache_bytes(int level);        // size of a core's L1 or L2 cache

}  // namespace softdb
