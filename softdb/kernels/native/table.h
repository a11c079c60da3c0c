// The kernels of one level, behind pointers. A new kernel gets its arguments in a header, a pointer here, and a line in
// table.cc.
#pragma once

#include "arguments.h"

namespace softdb {

struct Kernels {
    const char* level;
    int lanes;  // float32 of a vector
    void (*exponentials)(const float* x, int64_t n, float* out);
    int64_t (*attend_scratch)(const Attend& ask);
    void (*attend_forward)(const Attend& ask);
    void (*attend_backward)(const Attend& ask);
};

const Kernels& kernels();             // those in use; there are none where `levels` is empty
bool use_level(const char* level);      // false: the processor has no such
const char* const* levels();           // that this processor has, the best first, then nullptr
int64_t cache_bytes(int level);        // of a core's first or second cache

}  // namespace softdb
