// Draw records in a scan of codes.
#pragma once

#include "lists.h"

namespace softdb {
namespace SOFTDB_LEVEL {

int64_t draw_scratch(const Draw& args);  // bytes
void draw(const Draw& args);
void help_draw(const Draw& args);

}  // namespace SOFTDB_LEVEL
}  // namespace softdb
