// Conversion of Python's views (integers and int64 arrays) to the structs of data/. Included only by the bindings.
//
// Addresses and lengths come from views that this library's Python built from tensors, so only cheap properties are
// checked here: presence, sizes of arrays, row lengths, strides of keys.

#pragma once

#include "dispatch.h"
#include "plan/threads.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <cstring>
#include <string>
#include <string_view>
#include <vector>

namespace nb = nanobind;
using namespace nb::literals;

namespace {

using fusion::Dtype;

[[noreturn]] inline void refuse(const std::string &why) {
    throw nb::value_error(("fusion_attention: native core: " + why).c_str());
}

// A reference to an int64 array of `size` elements; a copy if its elements are not contiguous.
class Longs {
public:
    Longs() = default;
    Longs(nb::handle array, const char *name, std::size_t size) { hold(array, name, size); }
    ~Longs() {
        if (held_) PyBuffer_Release(&buffer_);
    }
    Longs(const Longs &) = delete;
    Longs &operator=(const Longs &) = delete;

    void hold(nb::handle array, const char *name, std::size_t size) {
        if (PyObject_GetBuffer(array.ptr(), &buffer_, PyBUF_STRIDES | PyBUF_FORMAT) != 0) {
            PyErr_Clear();
            refuse(std::string(name) + " is no array of int64");
        }
        held_ = true;
        const char kind = buffer_.format && buffer_.format[0] ? buffer_.format[0] : '?';
        if (buffer_.ndim != 1 || buffer_.itemsize != 8 || (kind != 'l' && kind != 'q')) {
            refuse(std::string(name) + " is no one-dimensional array of int64");
        }
        if (static_cast<std::size_t>(buffer_.shape[0]) != size) {
            refuse(std::string(name) + " has " + std::to_string(buffer_.shape[0]) + " elements, expected " +
                   std::to_string(size));
        }
        data_ = static_cast<const std::int64_t *>(buffer_.buf);
        const Py_ssize_t stride = buffer_.strides ? buffer_.strides[0] : 8;
        if (stride == 8 || size < 2) return;
        copy_.resize(size);
        for (std::size_t i = 0; i < size; ++i) {
            std::memcpy(&copy_[i], static_cast<const char *>(buffer_.buf) + static_cast<Py_ssize_t>(i) * stride, 8);
        }
        data_ = copy_.data();
    }

    const std::int64_t *data() const { return data_; }

private:
    Py_buffer buffer_{};
    bool held_ = false;
    const std::int64_t *data_ = nullptr;
    std::vector<std::int64_t> copy_;
};

inline std::size_t length_of(nb::handle array) {
    const Py_ssize_t n = PyObject_Size(array.ptr());
    if (n < 0) throw nb::python_error();
    return static_cast<std::size_t>(n);
}

template <class T> T item(const nb::tuple &t, std::size_t i) { return nb::cast<T>(t[i]); }

inline void *pointer(const nb::tuple &t) { return reinterpret_cast<void *>(item<std::uintptr_t>(t, 0)); }

// (pointer, address, stride_head, stride_token, dim), or None if the problem has no such operand.
struct RowsArgument {
    Longs address, stride_head;
    fusion::Rows rows;

    RowsArgument(const nb::object &from, const char *name, std::int64_t dim, std::size_t sequences) {
        if (from.is_none() != (dim == 0)) refuse(std::string(name) + (dim ? " is missing" : " belongs to no operand"));
        if (from.is_none()) return;
        const auto t = nb::cast<nb::tuple>(from);
        if (t.size() != 5) refuse(std::string(name) + " is no view");
        if (item<std::int64_t>(t, 4) != dim) refuse(std::string(name) + " has rows of another length than the problem");
        address.hold(t[1], name, sequences);
        stride_head.hold(t[2], name, sequences);
        rows = {pointer(t), address.data(), stride_head.data(), item<std::int64_t>(t, 3)};
    }
};

// (pointer, address, stride_head, stride_row, stride_key, dtype), or None; a seventh value is the first key with a bit.
struct MatrixArgument {
    Longs address, stride_head, stride_row, first;
    fusion::Matrix matrix;

    MatrixArgument(const nb::object &from, const char *name, bool expected, std::size_t sequences) {
        if (from.is_none() == expected)
            refuse(std::string(name) + (expected ? " is missing" : " belongs to no operand"));
        if (from.is_none()) return;
        const auto t = nb::cast<nb::tuple>(from);
        if (t.size() != 6 && t.size() != 7) refuse(std::string(name) + " is no view");
        address.hold(t[1], name, sequences);
        stride_head.hold(t[2], name, sequences);
        stride_row.hold(t[3], name, sequences);
        if (t.size() == 7) first.hold(t[6], name, sequences);
        const auto stride_key = item<std::int64_t>(t, 4);
        const int dtype = item<int>(t, 5);
        if (stride_key != 0 && stride_key != 1) refuse(std::string(name) + " has keys that are not neighbours");
        if (dtype < 0 || dtype > 2) refuse(std::string(name) + " has an unknown dtype");
        matrix = {pointer(t),        address.data(), stride_head.data(),
                  stride_row.data(), stride_key,     static_cast<Dtype>(dtype),
                  first.data()};
    }
};

inline const fusion::Variant &variant_named(const nb::object &name) {
    if (name.is_none()) return fusion::chosen_variant();
    const auto wanted = nb::cast<std::string>(name);
    for (const fusion::Built &built : fusion::built_variants()) {
        if (built.variant && wanted == built.name) return *built.variant;
    }
    refuse("variant \"" + wanted + "\" does not run here");
}

// The chosen or named variant with all its parts.
inline const fusion::Built &built_variant(const nb::object &name) {
    const fusion::Variant &wanted = variant_named(name);
    for (const fusion::Built &built : fusion::built_variants()) {
        if (built.variant == &wanted) return built;
    }
    refuse("the variant does not run here");
}

inline int choice(nb::handle value, const char *name, int count) {
    const int number = nb::cast<int>(value);
    if (number < 0 || number >= count) refuse(std::string(name) + " is unknown");
    return number;
}

// Converts the fields of the Python Problem in order: dtype, bias and dropout as numbers, the threshold of generated
// dropout, the softcap, has_blocked_tiles and wide_results.
inline fusion::Problem problem_of(const nb::tuple &t) {
    if (t.size() != 17) refuse("a problem has 17 fields");
    fusion::Problem p{};
    p.heads_q = item<std::int64_t>(t, 0);
    p.heads_kv = item<std::int64_t>(t, 1);
    p.dim_qk = item<std::int64_t>(t, 2);
    p.dim_v = item<std::int64_t>(t, 3);
    p.dim_rope = item<std::int64_t>(t, 4);
    p.dtype = static_cast<Dtype>(choice(t[5], "dtype", 3));
    p.scale = item<double>(t, 6);
    p.bias = static_cast<fusion::Bias>(choice(t[7], "bias", 5));
    p.bias_scaled = item<bool>(t, 8);
    p.has_blocked = item<bool>(t, 9);
    p.has_sink = item<bool>(t, 10);
    p.dropout = static_cast<fusion::Dropout>(choice(t[11], "dropout", 3));
    p.keep_prob = item<double>(t, 12);
    p.keep_below = item<std::int64_t>(t, 13);
    p.softcap = item<double>(t, 14);
    p.has_blocked_tiles = item<bool>(t, 15);
    p.wide_results = item<bool>(t, 16);
    return p;
}

// Converts the arrays of sequences; chunks of longer sequences have three more arrays. heads: number of query heads, by
// which dropout numbers its random streams.
inline std::vector<fusion::Sequence> sequences_of(const nb::tuple &extents, std::int64_t heads = 0) {
    if (extents.size() != 6 && extents.size() != 8 && extents.size() != 9)
        refuse("extents are six arrays, eight with those of a second key source, or nine with a part's");
    const std::size_t count = length_of(extents[0]);
    const Longs q_len(extents[0], "q_len", count), kv_len(extents[1], "kv_len", count), lo(extents[2], "lo", count),
        hi(extents[3], "hi", count), prefix(extents[4], "prefix", count), shift(extents[5], "shift", count);
    std::vector<fusion::Sequence> sequences(count);
    for (std::size_t b = 0; b < count; ++b) {
        sequences[b] = {q_len.data()[b], kv_len.data()[b], lo.data()[b],
                        hi.data()[b],    prefix.data()[b], shift.data()[b]};
        sequences[b].stream = static_cast<std::int64_t>(b) * heads;
    }
    if (extents.size() == 6) return sequences;
    if (extents.size() == 8) {
        const Longs len(extents[6], "compressed_len", count), end(extents[7], "compressed_hi", count);
        for (std::size_t b = 0; b < count; ++b) {
            sequences[b].compressed_len = len.data()[b], sequences[b].compressed_hi = end.data()[b];
        }
        return sequences;
    }
    const Longs first_row(extents[6], "first_row", count), first_key(extents[7], "first_key", count),
        stream(extents[8], "stream", count);
    for (std::size_t b = 0; b < count; ++b) {
        fusion::Sequence &seq = sequences[b];
        seq.first_row = first_row.data()[b], seq.first_key = first_key.data()[b], seq.stream = stream.data()[b];
        if (seq.first_key % 8)
            refuse("first_key: a draw of dropout serves eight keys, and this is no multiple of them");
    }
    return sequences;
}

// Operands of forward and backward, in the order of the Python tuple; keeps references to the arrays of the views.
struct OperandsArgument {
    RowsArgument q, k, v, out, max, sum, q_rope, k_rope;
    MatrixArgument bias, blocked, drop_bits, blocked_tiles;
    fusion::Operands operands;

    OperandsArgument(const nb::tuple &t, const fusion::Problem &p, std::size_t n)
        : q(at(t, 0), "q", p.dim_qk, n), k(at(t, 1), "k", p.dim_qk, n), v(at(t, 2), "v", p.dim_v, n),
          out(at(t, 3), "out", p.dim_v, n), max(at(t, 4), "max", 1, n), sum(at(t, 5), "sum", 1, n),
          q_rope(at(t, 6), "q_rope", p.dim_rope, n), k_rope(at(t, 7), "k_rope", p.dim_rope, n),
          bias(at(t, 8), "bias", p.bias == fusion::Bias::matrix || p.bias == fusion::Bias::table, n),
          blocked(at(t, 10), "blocked", p.has_blocked, n),
          drop_bits(at(t, 11), "drop_bits", p.dropout == fusion::Dropout::bits, n),
          blocked_tiles(at(t, 15), "blocked_tiles", p.has_blocked_tiles, n) {
        const auto slopes = item<std::uintptr_t>(t, 9), sink = item<std::uintptr_t>(t, 14);
        const bool sloped = p.bias == fusion::Bias::slopes || p.bias == fusion::Bias::slopes_sqrt;
        if (sloped != (slopes != 0)) refuse(sloped ? "slopes are missing" : "slopes belong to no operand");
        if (p.has_sink != (sink != 0)) refuse(p.has_sink ? "sink is missing" : "sink belongs to no operand");
        operands = {q.rows,
                    k.rows,
                    v.rows,
                    out.rows,
                    max.rows,
                    sum.rows,
                    q_rope.rows,
                    k_rope.rows,
                    bias.matrix,
                    blocked.matrix,
                    drop_bits.matrix,
                    reinterpret_cast<const float *>(slopes),
                    reinterpret_cast<const float *>(sink),
                    item<std::uint64_t>(t, 12),
                    item<std::uint32_t>(t, 13)};
        operands.blocked_tiles = blocked_tiles.matrix;
        operands.blocked_bits = reinterpret_cast<const std::uint8_t *>(item<std::uintptr_t>(t, 16));
        operands.blocked_count = item<std::int64_t>(t, 17);
    }

private:
    static nb::object at(const nb::tuple &t, std::size_t i) {
        if (t.size() != 18) refuse("operands are 18 values");
        return nb::borrow(t[i]);
    }
};

// A new reference, or null with Python's error set. The stable ABI has no PyObject_CallMethodNoArgs.
inline PyObject *called(PyObject *of, PyObject *method) { return PyObject_VectorcallMethod(method, &of, 1, nullptr); }

// The address of a tensor's first element; null for None.
inline void *place_of(nb::handle tensor) {
    if (tensor.is_none()) return nullptr;
    static PyObject *const data_ptr = PyUnicode_InternFromString("data_ptr");
    const nb::object place = nb::steal(called(tensor.ptr(), data_ptr));
    if (!place.is_valid()) throw nb::python_error();
    void *const found = PyLong_AsVoidPtr(place.ptr());
    if (!found && PyErr_Occurred()) throw nb::python_error();
    return found;
}

// The assignment of tensors to operands in a prepared call. `each(operands, visit)` calls visit(name, pointer) for
// every pointer to memory, possibly several times for a name. Every operand must have a name; otherwise it would be
// read at its address when the call was prepared.
class Places {
public:
    template <class Operands, class Each> Places(Operands operands, const nb::tuple &names, Each each) {
        std::vector<std::string> left;
        for (nb::handle name : names) left.push_back(nb::cast<std::string>(name));
        count_ = left.size();
        each(operands, [&](const char *name, auto *&begin) {
            int found = -1;
            for (std::size_t i = 0; i < count_; ++i) {
                if (left[i] == name) found = static_cast<int>(i);
            }
            if (found < 0 && begin) refuse(std::string(name) + " is read, and no tensor of the call is named so");
            of_.push_back(begin ? found : -1);
        });
    }

    template <class Operands, class Each> void set(Operands &operands, const nb::args &tensors, Each each) const {
        if (tensors.size() != count_) refuse("a prepared call takes " + std::to_string(count_) + " tensors");
        void *begins[max_tensors];
        if (count_ > max_tensors) refuse("too many tensors");
        for (std::size_t i = 0; i < count_; ++i) begins[i] = place_of(tensors[i]);
        std::size_t at = 0;
        each(operands, [&](const char *name, auto *&begin) {
            const int from = of_[at++];
            if (from < 0) return;
            const std::string_view shown = name;
            if (!begins[from] && shown != "max" && shown != "sum") refuse(std::string(shown) + " has no memory");
            begin = static_cast<std::remove_reference_t<decltype(begin)>>(begins[from]);
        });
    }

private:
    static constexpr std::size_t max_tensors = 32;
    std::vector<int> of_;  // tensor of each operand, in the order of `each`
    std::size_t count_ = 0;
};

inline constexpr auto each_place = [](auto &o, auto visit) {
    visit("q", o.q.base), visit("out", o.out.base), visit("max", o.max.base), visit("sum", o.sum.base);
    visit("q_rope", o.q_rope.base), visit("bias", o.bias.base), visit("slopes", o.slopes), visit("sink", o.sink);
    visit("blocked", o.blocked.base), visit("drop_bits", o.drop_bits.base), visit("row_scale", o.row_scale.base);
    visit("blocked_tiles", o.blocked_tiles.base), visit("blocked_bits", o.blocked_bits);
};

inline void require_threads(int threads) {
    if (threads < 1) refuse("threads: expected at least 1, got " + std::to_string(threads));
    if (threads == 1 || fusion::told_of_fork || !fusion::is_forked()) return;
    fusion::told_of_fork = true;
    const char *const text =
        "fusion_attention: this process is a child of fork(), which has none of its parent's threads: attention is "
        "computed on one thread. Start processes by \"spawn\" where that is too slow.";
    if (PyErr_WarnEx(PyExc_RuntimeWarning, text, 1) < 0) throw nb::python_error();
}

}  // namespace
