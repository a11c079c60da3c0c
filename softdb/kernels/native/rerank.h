// Records by exact score: stored keys are read where they lie.
#pragma once

#include "records.h"

namespace softdb {
namespace SOFTDB_LEVEL {

bool rerank(const Rerank& args);    // whether k were found for every query, and no score is NaN
bool prepare(const Prepare& args);  // whether all numbers are finite
void score(const Score& args);
bool scan(const Scan& args);  // whether some score is NaN or infinite
void rescore(const Rescore& args);

}  // namespace SOFTDB_LEVEL
}  // namespace softdb
