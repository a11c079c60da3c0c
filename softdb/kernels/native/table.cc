// The table of one level.
#include "table.h"

#include "attention.h"
#include "vec.h"

#define SOFTDB_NAME_OF(level) #level
#define SOFTDB_NAME(level) SOFTDB_NAME_OF(level)

namespace softdb {
namespace SOFTDB_LEVEL {

extern const Kernels kTable;
const Kernels kTable = {
    SOFTDB_NAME(SOFTDB_LEVEL), kLanes, exponentials, attend_scratch, attend_forward, attend_backward,
};

}  // namespace SOFTDB_LEVEL
}  // namespace softdb
