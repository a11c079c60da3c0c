// The module `softdb.kernels._native`. Each bind_*.cc binds the kernels of one subject.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "bind.h"

namespace nb = nanobind;

NB_MODULE(_native, module) {
    module.doc() = "softdb's kernels: pointers and sizes come in checked, the GIL is released while they run.";
    module.def("levels", [] {
        std::vector<std::string> result;
        for (const char* const* level = softdb::levels(); *level; level++) result.emplace_back(*level);
        return result;
    }, "Instruction sets that this processor has and that kernels were built for, the best first.");
    module.def("level", [] { return std::string(softdb::kernels().level); }, "The one in use.");
    module.def("use", [](const std::string& level) { return softdb::use_level(level.c_str()); },
               "Use another level from now on; False if there is none of this name.");
    module.attr("signatures") = SOFTDB_SIGNATURES;  // SHA-256 of _native.pyi
    nb::set_leak_warnings(false);  // some objects live as long as the process
    softdb::bind_attention(module);
    softdb::bind_records(module);
}
