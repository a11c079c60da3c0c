// What lies beyond the records that were scored, and how wrong codes are.
#pragma once

#include "records.h"

namespace softdb {
namespace SOFTDB_LEVEL {

void to_search(const ToSearch& ask);
void peaks(const Peaks& ask);
void caps(const Caps& ask);
void extents(const Table<const float>& keys, const float* mean, const bool* skip, float* out);
void distances(const Table<const float>& keys, const double* centre, double* out);

}  // namespace SOFTDB_LEVEL
}  // namespace softdb
