#pragma once

#include "arguments.h"

namespace softdb {
namespace SOFTDB_LEVEL {

void exponentials(const float* x, int64_t n, float* out);  // e^x for x <= 0; n is a multiple of the lanes
int64_t attend_scratch(const Attend& args);
void attend_forward(const Attend& args);
void attend_backward(const Attend& args);

}  // namespace SOFTDB_LEVEL
}  // namespace softdb
