// The longest keys among the k best.
#pragma once

#include "records.h"

namespace softdb {
namespace SOFTDB_LEVEL {

void take_in(const TakeIn& ask);

}  // namespace SOFTDB_LEVEL
}  // namespace softdb
