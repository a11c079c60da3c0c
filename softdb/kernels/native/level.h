// The kernels of one level, which table.cc lists.
#pragma once

#include "lists.h"

namespace softdb {
namespace SOFTDB_LEVEL {

void exponentials(const float* x, int64_t n, float* out);  // e^x for x <= 0; n is a multiple of the lanes
int64_t attend_scratch(const Attend& args);
void attend_forward(const Attend& args);
void attend_backward(const Attend& args);

bool rerank(const Rerank& args);    // true if every query has k records and no score is NaN
bool take_in(const TakeIn& args);   // true if a match changed
void prepare(const Table<const float>& vectors, const Table<float>& out);
void score(const Score& args);
bool scan(const Scan& args);  // true if a score is NaN or infinite
void rescore(const Rescore& args);

void add_weighed(const Terms& args, const double* weights, double* total);
template <class Number>
void weighted_sums(const Sums<Number>& args);
void spread(const Terms& args, const double* weights, const double* output, int64_t v, Errors& into, float* scratch);
double f_quantile(double z, double above, double below);
void bars(const Bars& args);

int64_t list_scratch(const ListSearch& args);  // bytes
bool search_lists(const ListSearch& args, char* scratch);
int64_t nearest_scratch(const NearestLists& args);  // bytes
void nearest_lists(const NearestLists& args, char* scratch);
int64_t encode_scratch(const Encode& args);  // bytes
void encode(const Encode& args, char* scratch);
int64_t draw_scratch(const Draw& args);  // bytes
void draw(const Draw& args);
void help_draw(const Draw& args);

}  // namespace SOFTDB_LEVEL
}  // namespace softdb
