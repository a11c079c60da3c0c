// Pool candidates' values in place, and sum the terms of the answer's error.
#pragma once

#include "lists.h"

namespace softdb {
namespace SOFTDB_LEVEL {

void add_weighed(const Terms& args, const double* weights, double* total);
template <class Number>
void weighted_sums(const Sums<Number>& args);
void spread(const Terms& args, const double* weights, const double* output, int64_t v, Errors& into, float* scratch);
double f_quantile(double z, double above, double below);
void bars(const Bars& args);

}  // namespace SOFTDB_LEVEL
}  // namespace softdb
