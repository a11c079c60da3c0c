// The table of kernels of one level.
#include "table.h"

#include "level.h"
#include "vec.h"

#define SOFTDB_NAME_OF(level) #level
#define SOFTDB_NAME(level) SOFTDB_NAME_OF(level)

namespace softdb {
namespace SOFTDB_LEVEL {

extern const Kernels kTable;
const Kernels kTable = {
    SOFTDB_NAME(SOFTDB_LEVEL), kLanes, exponentials, attend_scratch, attend_forward, attend_backward,
    rerank, take_in, prepare, score, scan, rescore,
    weighted_sums<float>, weighted_sums<double>, spread, f_quantile, bars,
    list_scratch, search_lists, nearest_scratch, nearest_lists, encode_scratch, encode, draw_scratch, draw, help_draw,
};

}  // namespace SOFTDB_LEVEL
}  // namespace softdb
