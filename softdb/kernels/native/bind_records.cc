// Bindings of the kernels over single records. Arrays are read in place: nothing is converted or copied.
#include <nanobind/nanobind.h>
#include <nanobind/stl/vector.h>

#include <memory>

#include "bind.h"
#include "records.h"

namespace softdb {

// A one-dimensional array.
template <class Number>
struct Line {
    Number* first = nullptr;
    int64_t length = 0;
};

// The format character of a number type in Python's buffer protocol.
template <class Number>
bool is_format(const char* format) {
    using Plain = std::remove_const_t<Number>;
    if (*format == '<' || *format == '=' || *format == '@') format++;
    if (format[0] == 0 || format[1] != 0) return false;
    if constexpr (std::is_same_v<Plain, bool>) return *format == '?';
    else if constexpr (std::is_floating_point_v<Plain>) return *format == (sizeof(Plain) == 4 ? 'f' : 'd');
    else if constexpr (sizeof(Plain) == 1) return *format == 'B';
    else if constexpr (std::is_signed_v<Plain>) return *format == 'l' || *format == 'q' || (sizeof(Plain) == 4 && *format == 'i');
    else if constexpr (sizeof(Plain) == 2) return *format == 'H';
    else return *format == 'L' || *format == 'Q' || (sizeof(Plain) == 4 && *format == 'I');
}

// The memory of an array. The buffer is released at once, as the caller keeps the array alive while a kernel runs.
template <class Number>
bool read(PyObject* from, int dimensions, Table<Number>& into) {
    const int flags = PyBUF_STRIDES | PyBUF_FORMAT | (std::is_const_v<Number> ? 0 : PyBUF_WRITABLE);
    Py_buffer buffer;
    if (PyObject_GetBuffer(from, &buffer, flags)) {
        PyErr_Clear();
        return false;
    }
    bool fits = buffer.ndim == dimensions && buffer.itemsize == sizeof(Number) && is_format<Number>(buffer.format);
    if (fits) {
        into.first = (Number*)buffer.buf;
        into.rows = dimensions == 1 ? 1 : buffer.shape[0];
        into.width = buffer.shape[dimensions - 1];
        into.pitch = dimensions == 1 || into.rows < 2 ? into.width : buffer.strides[0] / int64_t(sizeof(Number));
        fits = into.width < 2 || buffer.strides[dimensions - 1] == sizeof(Number);
    }
    PyBuffer_Release(&buffer);
    return fits;
}

}  // namespace softdb

namespace nanobind::detail {

template <class Number>
struct type_caster<softdb::Table<Number>> {
    NB_TYPE_CASTER(softdb::Table<Number>, const_name("numpy.ndarray"))
    bool from_python(handle source, uint8_t, cleanup_list*) noexcept { return softdb::read(source.ptr(), 2, value); }
};

template <class Number>
struct type_caster<softdb::Line<Number>> {
    NB_TYPE_CASTER(softdb::Line<Number>, const_name("numpy.ndarray"))
    bool from_python(handle source, uint8_t, cleanup_list*) noexcept {
        softdb::Table<Number> table;
        bool fits = softdb::read(source.ptr(), 1, table);
        value = {table.first, table.width};
        return fits;
    }
};

}  // namespace nanobind::detail

namespace softdb {

namespace {

template <class Number>
std::unique_ptr<Number[]> memory(int64_t count) {
    return std::unique_ptr<Number[]>(new Number[size_t(count)]);
}

// A stored column and the addresses of its segments.
struct StoredColumn {
    std::vector<int64_t> addresses, starts;
    Stored stored;

    StoredColumn(Line<const int64_t> at, Line<const int64_t> from, int64_t width, int kind)
        : addresses(at.first, at.first + at.length), starts(from.first, from.first + from.length) {
        stored.addresses = addresses.data(), stored.starts = starts.data();
        stored.segments = at.length, stored.width = width, stored.kind = Kind(kind);
    }

    // The column with `width` numbers, or classes, for each record; width 0: no column.
    Stored as_wide(int64_t width) const {
        Stored result = stored;
        result.width = width;
        if (!width) result.kind = Kind::none;
        return result;
    }
};

template <class Number>
void bind_sums(nb::module_& module) {
    const auto free = nb::call_guard<nb::gil_scoped_release>();
    module.def("sums", [](Table<const Number> weights, Table<const int64_t> positions, const StoredColumn& values,
                          Table<Number> output) {
        auto scratch = memory<double>(output.width);
        Sums<Number> args;
        args.weights = weights, args.positions = positions, args.values = values.stored;
        args.output = output, args.scratch = scratch.get();
        if constexpr (sizeof(Number) == 4) kernels().sums(args);
        else kernels().sums_wide(args);
    }, free);
}

void bind_scores(nb::module_& module) {
    const auto free = nb::call_guard<nb::gil_scoped_release>();
    module.def("rerank", [](Table<const float> queries, Table<const int64_t> positions, const StoredColumn& keys, int metric,
                            Table<int64_t> matches, Table<float> scores) {
        return kernels().rerank({queries, positions, keys.stored, Metric(metric), matches, scores});
    }, free, "Write the best of each query's candidates by exact score; True if there are k each and no score is NaN.");
    module.def("take_in", [](Table<const float> queries, Line<const int64_t> positions, Table<const float> keys,
                             Line<const double> lengths, Table<int64_t> matches, Table<float> scores) {
        return kernels().take_in({queries, positions.first, keys, lengths.first, matches, scores});
    }, free, "Merge the longest keys into the k best of each query; True if any match changed.");
    module.def("prepare", [](Table<const float> vectors, Table<float> out) { kernels().prepare(vectors, out); },
               "Scale vectors to length 1.");
    module.def("score", [](Table<const float> queries, Table<const int64_t> positions, const StoredColumn& keys, int metric,
                           Table<float> scores) {
        kernels().score({queries, positions, keys.stored, Metric(metric), scores});
    }, free);
    module.def("scan", [](Table<const float> queries, Table<const float> panels, const StoredColumn& keys, int metric,
                          Line<const bool> keep, int64_t low, int64_t high, Table<int64_t> matches, Table<float> scores) {
        return kernels().scan({queries, panels, keys.stored, Metric(metric), keep.first, low, high, matches, scores});
    }, free, "Write the best records by scores in float32; True if a score is NaN or infinite.");
    module.def("rescore", [](Table<const float> queries, Table<const int64_t> positions, Line<const double> floor,
                            const StoredColumn& keys, int metric, Table<int64_t> matches, Table<double> exact, int64_t k,
                            Line<bool> unsure) {
        kernels().rescore({queries, positions, floor.first, keys.stored, Metric(metric), matches, exact, k, unsure.first});
    }, free, "Sort candidates by scores in float64, and mark queries whose order is unsure.");
}

// Pointers to the arrays of an index, which the caller keeps alive.
struct BoundLists {
    Lists lists;

    BoundLists(int64_t d, Table<const uint8_t> rotation, Line<const float> turns, Table<const uint8_t> centroids,
               Line<const float> scales, Line<const float> lengths, Line<const float> inverse_spreads,
               Line<const int64_t> starts, Table<const uint8_t> codes, Table<const uint16_t> factors,
               Table<const uint16_t> offsets, double unit, Table<const float> words, int64_t parts,
               Line<const float> origin) {
        const int64_t width = (d + 3) / 4 * 4;
        lists.rotation = {rotation.first, turns.first, turns.length, width};
        lists.centroids = {centroids.first, scales.first, scales.length, width};
        lists.lengths = lengths.first, lists.inverse_spreads = inverse_spreads.first;
        lists.starts = starts.first, lists.count = starts.length - 1;
        lists.codes = codes.first, lists.factors = factors.first;
        lists.offsets = offsets.rows ? offsets.first : nullptr, lists.unit = float(unit);
        lists.words = words.first, lists.parts = parts, lists.word = words.rows / parts;
        lists.origin = origin.length ? origin.first : nullptr;
    }
};

constexpr int64_t kKept = 16 << 20;  // largest number of bytes that a thread keeps for its next draw

// A draw, its memory and the threads that share it. The caller keeps the arrays alive.
struct BoundDraw {
    Draw args;
    std::unique_ptr<char[]> scratch;
    Crew crew;
};

// Pointers to the arrays of coarse codes, which the caller keeps alive.
struct BoundSketch {
    Draw args;

    BoundSketch(Line<const int64_t> starts, Table<const uint8_t> codes, Table<const uint8_t> gains,
                Table<const uint8_t> errors, Table<const uint16_t> offsets, double unit, double error_step,
                Table<const float> words, int64_t parts, Line<const float> spreads,
                Line<const float> gained, Line<const float> radii, Line<const float> most_errors,
                Table<const float> rotation, Table<const float> centroids, Line<const float> lengths,
                Line<const float> origin, bool l2) {
        Lists& lists = args.lists;
        lists.starts = starts.first, lists.count = starts.length - 1, lists.codes = codes.first;
        lists.offsets = l2 ? offsets.first : nullptr, lists.unit = float(unit);
        lists.words = words.first, lists.parts = parts, lists.word = words.rows / parts;
        args.gains = gains.first, args.errors = errors.first, args.error_step = float(error_step);
        args.spreads = spreads.first, args.gained = gained.first, args.radii = radii.first;
        args.most_errors = most_errors.first, args.rotation = rotation, args.centroids = centroids;
        args.lengths = lengths.first, lists.origin = l2 ? origin.first : nullptr;
    }
};

void bind_lists(nb::module_& module) {
    const auto free = nb::call_guard<nb::gil_scoped_release>();
    module.def("spread", [](Table<const int64_t> positions, Table<const double> chances, Table<const double> weights,
                            Table<const double> controls, Table<const double> doubts, Table<const int32_t> own,
                            Table<const float> means, const StoredColumn& values, uint64_t salt,
                            Table<const double> output, Table<double> figures_table, Table<double> first, Table<float> sums,
                            Table<double> roots) {
        const int64_t v = output.width;
        auto scratch = memory<float>(4 * v);
        auto drift = memory<double>(v);
        for (int64_t i = 0; i < positions.rows; i++) {
            Terms terms{positions[i], chances[i], positions.width, values.as_wide(v), controls[i], doubts[i], own[i], means, salt};
            Errors errors;
            errors.first = first[i], errors.drift = drift.get(), errors.signed_sums = sums[i], errors.roots = roots[i];
            std::fill_n(drift.get(), v, 0.0);
            kernels().spread(terms, weights[i], output[i], v, errors, scratch.get());
            const double figures[] = {errors.noise, errors.noises, errors.variance, errors.variances, errors.doubt, errors.apart};
            for (int64_t k = 0; k < figures_table.rows; k++) figures_table[k][i] = figures[k];
        }
    }, free, "Sums over the terms of errors, added to arrays of zeros; for tests of the kernel alone.");
    module.def("f_quantile", [](double z, double above, double below) { return kernels().f_quantile(z, above, below); });
    module.def("bars", [](Table<double> figures, Table<const float> sums, double z, double doubt) {
        kernels().bars({figures, sums, z, doubt});
    }, free);
    nb::class_<BoundLists>(module, "Lists", "Inverted lists, read in place: the arrays must outlive this object.")
        .def(nb::init<int64_t, Table<const uint8_t>, Line<const float>, Table<const uint8_t>, Line<const float>,
                      Line<const float>, Line<const float>, Line<const int64_t>, Table<const uint8_t>,
                      Table<const uint16_t>, Table<const uint16_t>, double, Table<const float>, int64_t,
                      Line<const float>>());
    module.def("search_lists", [](const BoundLists& lists, Table<const float> queries, Line<const uint16_t> allowed,
                                  Line<const float> sizes, Line<const uint32_t> places, const StoredColumn* keys, int metric,
                                  double gap, double linear, double square, double least, double less, int64_t nearest, int64_t kept,
                                  Table<int64_t> matches, Table<float> scores) {
        int64_t scanned = 0;
        Stored none;
        none.kind = Kind::none;
        ListSearch args{lists.lists, queries, allowed.first, sizes.first, places.first, keys ? keys->stored : none, Metric(metric),
                       {float(gap), float(linear), float(square), float(least), float(less)}, nearest, kept, matches, scores, &scanned};
        auto scratch = memory<char>(kernels().list_scratch(args));
        bool whole = kernels().search_lists(args, scratch.get());
        return whole ? scanned : -1 - scanned;
    }, nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg().none(), nb::arg(), nb::arg(), nb::arg(),
       nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), free);
    module.def("nearest_lists", [](Table<const float> keys, Table<const uint8_t> numbers, Line<const float> scales,
                                   Line<const float> halves, Line<int64_t> nearest) {
        NearestLists args{keys, {numbers.first, scales.first, scales.length, numbers.width / 16}, halves.first, nearest.first};
        auto scratch = memory<char>(kernels().nearest_scratch(args));
        kernels().nearest_lists(args, scratch.get());
    }, free);
    module.def("encode", [](Table<const float> keys, Table<const float> centroids, Table<const float> turn,
                            Table<const float> turned, Line<const int64_t> own, Table<const float> words,
                            Table<const float> halves, double peak, Table<uint8_t> codes, Line<float> squares,
                            Line<float> factors, Line<float> central, Line<float> errors) {
        Encode args{keys, centroids, turn, turned, own.first, words.first, halves.first, halves.rows, words.rows / halves.rows,
                    float(peak), codes, squares.first, factors.first, central.first, errors.first};
        auto scratch = memory<char>(kernels().encode_scratch(args));
        kernels().encode(args, scratch.get());
    }, free);
    nb::class_<BoundSketch>(module, "Sketch", "Coarser codes, read in place: the arrays must outlive this object.")
        .def(nb::init<Line<const int64_t>, Table<const uint8_t>, Table<const uint8_t>, Table<const uint8_t>,
                      Table<const uint16_t>, double, double, Table<const float>, int64_t, Line<const float>,
                      Line<const float>, Line<const float>, Line<const float>, Table<const float>, Table<const float>,
                      Line<const float>, Line<const float>, bool>());
    nb::class_<BoundDraw>(module, "Draw", "A draw for some queries; several threads may help with one query.")
        .def("__init__", [](BoundDraw* made, const BoundSketch& sketch, double largest, Table<const float> queries,
                            Line<const uint16_t> allowed, Line<const float> sizes, Line<const uint32_t> places,
                            Line<const int64_t> apart, Line<const float> scales, const StoredColumn& keys, int metric,
                            Line<const double> factors, double least, int64_t budget, double visible, bool controls,
                            Line<const uint64_t> seeds, Table<int64_t> positions, Table<double> scores,
                            Table<double> chances, Table<double> controlled, Table<double> bounds, double points, int64_t first,
                            int64_t threads) {
            new (made) BoundDraw{sketch.args, nullptr, {}};
            Draw& args = made->args;
            args.largest = float(largest), args.queries = queries, args.allowed = allowed.first, args.sizes = sizes.first;
            args.places = places.first, args.apart = apart.first, args.scales = scales.first, args.aparts = apart.length;
            args.keys = keys.stored, args.metric = Metric(metric), args.factors = factors.first, args.least = least;
            args.budget = budget, args.visible = visible, args.controls = controls, args.seeds = seeds.first;
            args.positions = positions, args.scores = scores, args.chances = chances, args.controlled = controlled;
            args.bounds = bounds, args.points = points, args.first_query = first, args.threads = threads < kMostThreads ? threads : kMostThreads, args.crew = &made->crew;
            args.values.kind = Kind::none;
        })
        .def("answers", [](BoundDraw& draw, const StoredColumn& values, Table<const float> means, Line<const double> centre,
                           double value_radius, uint64_t salt, double z, double doubt, int64_t fewest, double slight, int64_t shown, Table<double> output,
                           Table<double> moved, Table<double> first, Table<float> sums, Table<double> roots,
                           Table<double> weights) {
            Draw& args = draw.args;
            args.values = values.as_wide(output.width), args.means = means, args.centre = centre.first;
            args.value_radius = value_radius, args.salt = salt, args.z = z, args.doubt = doubt, args.fewest = fewest, args.slight = slight, args.shown = shown;
            args.output = output, args.moved = moved, args.first = first, args.sums = sums, args.roots = roots;
            args.weights = weights;
        }, "Set the arrays that answers are written to.")
        .def("run", [](BoundDraw& draw) {
            const int64_t bytes = kernels().draw_scratch(draw.args);
            static thread_local std::vector<char> kept;  // reused, as new pages cost more than the work on them
            if (bytes <= kKept && int64_t(kept.size()) < bytes) kept.resize(size_t(bytes));
            if (bytes > kKept) draw.scratch = memory<char>(bytes);
            draw.args.scratch = bytes > kKept ? draw.scratch.get() : kept.data();
            kernels().draw(draw.args);
        }, free)
        .def("help", [](const BoundDraw& draw) { kernels().help_draw(draw.args); }, free);
}

}  // namespace

void bind_records(nb::module_& module) {
    nb::class_<StoredColumn>(module, "Column", "A stored column, read in place: its arrays must outlive this object.")
        .def(nb::init<Line<const int64_t>, Line<const int64_t>, int64_t, int>());
    module.attr("SIGNS") = kSigns;
    module.attr("FIGURES") = int64_t(Figure::count);
    module.attr("SKEWED") = kSkewed;
    bind_scores(module);
    bind_sums<float>(module);
    bind_sums<double>(module);
    bind_lists(module);
}

}  // namespace softdb
