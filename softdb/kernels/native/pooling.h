// Candidates pooled where their values lie.
#pragma once

#include "records.h"

namespace softdb {
namespace SOFTDB_LEVEL {

template <class Number>
void pool(const Pool<Number>& ask);
template <class Number>
void weighted_sums(const Sums<Number>& ask);
template <class Number>
void spread(const Spread<Number>& ask);
void directions(const Directions& ask);

}  // namespace SOFTDB_LEVEL
}  // namespace softdb
