// Records by exact score: stored keys are read where they lie.
#pragma once

#include "records.h"

namespace softdb {
namespace SOFTDB_LEVEL {

bool rerank(const Rerank& ask);    // whether k were found for every query, and no score is NaN
bool prepare(const Prepare& ask);  // whether all numbers are finite
void score(const Score& ask);
bool scan(const Scan& ask);  // whether some score is NaN or infinite
void settle(const Settle& ask);

}  // namespace SOFTDB_LEVEL
}  // namespace softdb
