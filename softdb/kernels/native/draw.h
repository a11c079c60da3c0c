// Records drawn by a scan of all codes.
#pragma once

#include "lists.h"

namespace softdb {
namespace SOFTDB_LEVEL {

int64_t draw_scratch(const Draw& ask);  // bytes
void draw(const Draw& ask);
void help_draw(const Draw& ask);

}  // namespace SOFTDB_LEVEL
}  // namespace softdb
