// Bindings of exact attention (equations in attention.cc). They check arrays and release the GIL.
#include <algorithm>
#include <optional>

#include "bind.h"

namespace softdb {
namespace {

using Rows = nb::ndarray<nb::ro, nb::ndim<2>, nb::c_contig, nb::device::cpu>;  // float32 or float16

Column column_of(const Rows& array) {
    Column result;
    result.half = array.dtype() == nb::dlpack::dtype{uint8_t(nb::dlpack::dtype_code::Float), 16, 1};
    if (!result.half && array.dtype() != nb::dtype<float>()) throw nb::type_error("a column is float32 or float16");
    result.data = array.data();
    result.width = int64_t(array.shape(1));
    return result;
}

// A piece of the records: columns, and the rows to read.
struct Piece {
    Rows keys;
    std::optional<Rows> values;
    std::optional<Read<int32_t, 1>> labels;
    std::optional<Read<int64_t, 1>> rows, places;
    std::optional<Read<bool, 2>> mask;
    int64_t low, high;
    Column key_column = column_of(keys), value_column = values ? column_of(*values) : Column{};
};

// The arguments that are the same for all pieces.
struct Attention {
    Read<float, 2> queries;
    std::optional<Read<float, 1>> centre, scales;
    Attend args;

    Attention(
        Read<float, 2> queries_, const std::string& metric, float inverse_temperature, float negligible,
        int64_t num_classes, std::optional<Read<float, 1>> centre_, std::optional<Read<float, 1>> scales_
    ) : queries(queries_), centre(centre_), scales(scales_) {
        args.queries = queries.data();
        args.q = int64_t(queries.shape(0));
        if (metric == "cosine") args.metric = Metric::cosine;
        else if (metric == "l2") args.metric = Metric::l2;
        else if (metric != "dot") throw nb::value_error("a metric is dot, cosine or l2");
        args.inverse_temperature = inverse_temperature;
        args.negligible = negligible;
        args.num_classes = num_classes;
        if (centre) args.centre = centre->data();
        if (scales) args.scales = scales->data();
    }

    Attend of(const Piece& piece) const {
        Attend result = args;
        result.keys = piece.key_column;
        result.values = piece.value_column;
        if (piece.labels) result.labels = piece.labels->data();
        if (piece.rows) result.part.rows = piece.rows->data();
        if (piece.places) result.part.places = piece.places->data();
        if (piece.mask) {
            result.part.mask = piece.mask->data();
            result.part.mask_width = int64_t(piece.mask->shape(1));
        }
        result.part.low = piece.low;
        result.part.high = piece.high;
        return result;
    }

    // Number of float32 of scratch memory for a thread; enough for forward and for backward with every gradient.
    int64_t scratch(int64_t value_width) const {
        Attend wanted = args;
        float any = 0;
        double sums = 0;
        wanted.keys.width = int64_t(queries.shape(1));
        wanted.values.width = value_width;
        wanted.backward = true;
        wanted.value_grad = &any;
        wanted.along_scores = &sums;
        int64_t plain = kernels().attend_scratch(wanted);
        wanted.key_grad = &any;
        return std::max(plain, kernels().attend_scratch(wanted));
    }

    void forward(
        const Piece& piece, Write<double, 2> output, Write<float, 1> top, Write<double, 1> total,
        Write<float, 1> scratch
    ) const {
        Attend call = of(piece);
        call.output = output.data();
        call.top = top.data();
        call.total = total.data();
        call.scratch = scratch.data();
        kernels().attend_forward(call);
    }

    void backward(
        const Piece& piece, Read<float, 2> output_grad, Read<float, 1> offset, Read<float, 1> inverse_total,
        Read<float, 1> top, Write<double, 2> query_grad, Write<double, 1> mass,
        std::optional<Write<double, 1>> along_scores, std::optional<Write<float, 2>> key_grad, std::optional<Write<float, 2>> value_grad, Write<float, 1> scratch
    ) const {
        Attend call = of(piece);
        call.backward = true;
        call.output_grad = output_grad.data();
        call.offset = offset.data();
        call.inverse_total = inverse_total.data();
        call.top = const_cast<float*>(top.data());  // backward does not write to it
        call.query_grad = query_grad.data();
        call.mass = mass.data();
        if (along_scores) call.along_scores = along_scores->data();
        if (key_grad) call.key_grad = key_grad->data();
        if (value_grad) call.value_grad = value_grad->data();
        call.scratch = scratch.data();
        kernels().attend_backward(call);
    }
};

}  // namespace

void bind_attention(nb::module_& module) {
    using namespace nb::literals;
    using Unlocked = nb::call_guard<nb::gil_scoped_release>;
    module.def("exponentials", [](Read<float, 1> x, Write<float, 1> out) {
        nb::gil_scoped_release unlocked;
        kernels().exponentials(x.data(), int64_t(x.shape(0)), out.data());
    }, "x"_a.noconvert(), "out"_a.noconvert(), "e^x of numbers that are not positive, as attention computes them.");
    nb::class_<Piece>(module, "Piece", "A range of records: columns, and the rows that take part.")
        .def(nb::init<Rows, std::optional<Rows>, std::optional<Read<int32_t, 1>>, std::optional<Read<int64_t, 1>>,
                      std::optional<Read<int64_t, 1>>, std::optional<Read<bool, 2>>, int64_t, int64_t>(),
             "keys"_a.noconvert(), "values"_a.none().noconvert(), "labels"_a.none().noconvert(),
             "rows"_a.none().noconvert(), "places"_a.none().noconvert(), "mask"_a.none().noconvert(), "low"_a, "high"_a);
    nb::class_<Attention>(module, "Attention", "Queries of exact attention, and the parameters that all pieces share.")
        .def(nb::init<Read<float, 2>, const std::string&, float, float, int64_t, std::optional<Read<float, 1>>,
                      std::optional<Read<float, 1>>>(),
             "queries"_a.noconvert(), "metric"_a, "inverse_temperature"_a, "negligible"_a, "num_classes"_a = 0,
             "centre"_a.none().noconvert() = nb::none(), "scales"_a.none().noconvert() = nb::none())
        .def("scratch", &Attention::scratch, "value_width"_a, "float32 of memory that a thread needs.")
        .def("forward", &Attention::forward, Unlocked(), "piece"_a, "output"_a.noconvert(), "top"_a.noconvert(),
             "total"_a.noconvert(), "scratch"_a.noconvert())
        .def("backward", &Attention::backward, Unlocked(), "piece"_a, "output_grad"_a.noconvert(),
             "offset"_a.noconvert(), "inverse_total"_a.noconvert(), "top"_a.noconvert(), "query_grad"_a.noconvert(),
             "mass"_a.noconvert(), "along_scores"_a.none().noconvert(), "key_grad"_a.none().noconvert(), "value_grad"_a.none().noconvert(),
             "scratch"_a.noconvert());
}

}  // namespace softdb
