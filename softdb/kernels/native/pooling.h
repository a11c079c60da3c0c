// Candidates pooled where their values lie, and sums over the terms of the answer's error.
#pragma once

#include "records.h"

namespace softdb {
namespace SOFTDB_LEVEL {

void add_weighed(const Terms& ask, const double* weights, double* total);
template <class Number>
void weighted_sums(const Sums<Number>& ask);
void spread(const Terms& ask, const double* weights, const double* output, int64_t v, Errors& into, float* line);
void directions(const Directions& ask);

}  // namespace SOFTDB_LEVEL
}  // namespace softdb
