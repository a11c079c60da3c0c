// Declarations that all bindings share.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include "table.h"

namespace softdb {

namespace nb = nanobind;

// NumPy arrays on the CPU in C order, read or written by kernels.
template <class T, int dimensions>
using Read = nb::ndarray<const T, nb::ndim<dimensions>, nb::c_contig, nb::device::cpu>;
template <class T, int dimensions>
using Write = nb::ndarray<T, nb::ndim<dimensions>, nb::c_contig, nb::device::cpu>;

void bind_attention(nb::module_& module);
void bind_records(nb::module_& module);

}  // namespace softdb
