// The longest keys among the k best.
#pragma once

#include "records.h"

namespace softdb {
namespace SOFTDB_LEVEL {

bool take_in(const TakeIn& args);  // whether that changed anything

}  // namespace SOFTDB_LEVEL
}  // namespace softdb
