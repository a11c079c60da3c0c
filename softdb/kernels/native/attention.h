#pragma once

#include "arguments.h"

namespace softdb {
namespace SOFTDB_LEVEL {

void exponentials(const float* x, int64_t n, float* out);  // of numbers <= 0; n whole vectors
int64_t attend_scratch(const Attend& ask);
void attend_forward(const Attend& ask);
void attend_backward(const Attend& ask);

}  // namespace SOFTDB_LEVEL
}  // namespace softdb
