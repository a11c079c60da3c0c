// Score records exactly. Stored keys are read in place.
#pragma once

#include "records.h"

namespace softdb {
namespace SOFTDB_LEVEL {

bool rerank(const Rerank& args);    // true if every query has k records and no score is NaN
bool prepare(const Prepare& args);  // true if all numbers are finite
void score(const Score& args);
bool scan(const Scan& args);  // true if a score is NaN or infinite
void rescore(const Rescore& args);

}  // namespace SOFTDB_LEVEL
}  // namespace softdb
