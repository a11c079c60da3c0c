// Draws of records by their permanent random numbers.
#pragma once

#include "records.h"

namespace softdb {
namespace SOFTDB_LEVEL {

void propose(const Propose& ask);
void draw(const Draw& ask);
void subsample(const Subsample& ask);
void log_sums(const LogSums& ask);
void hashes(const int64_t* numbers, int64_t count, uint64_t seed, uint32_t* out);

}  // namespace SOFTDB_LEVEL
}  // namespace softdb
