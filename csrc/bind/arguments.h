// Conversion of Python's views (integers and int64 arrays) to the structs of data/. Included only by the bindings.
//
// Addresses and lengths come from views that this library's Python built from tensors, so only cheap properties are
// checked here: presence, sizes of arrays, row lengths, strides of keys.

#pragma once

#include "dispatch.h"
#include "plan/thread_pool.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>

#include <algorithm>
#include <cstring>
#include <deque>
#include <initializer_list>
#include <memory>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
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
    Longs(nb::handle array, const char *name, std::size_t size) : Longs() {  // the destructor runs if this throws
        if (PyObject_GetBuffer(array.ptr(), &buffer_, PyBUF_STRIDES | PyBUF_FORMAT) != 0) {
            PyErr_Clear();
            refuse(std::string(name) + " is no array of int64");
        }
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
    ~Longs() { PyBuffer_Release(&buffer_); }  // nothing for a buffer without an object
    Longs(const Longs &) = delete;
    Longs &operator=(const Longs &) = delete;

    const std::int64_t *data() const { return data_; }

private:
    Longs() = default;

    Py_buffer buffer_{};
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

// Values of a tuple from Python, among them views, which are converted to the structs of data/. Keeps references to the
// arrays of the views.
class Views {
public:
    Views(nb::tuple values, std::size_t count, const char *otherwise, std::size_t sequences)
        : values_(std::move(values)), sequences_(sequences) {
        if (values_.size() != count) refuse(otherwise);
    }
    Views(Views &&) = default;

    bool lacks(std::size_t i) const { return values_[i].is_none(); }
    template <class T> T get(std::size_t i) const { return item<T>(values_, i); }

    // The address of memory; 0 if the problem has no such operand.
    template <class T> T *address(std::size_t i, const char *name, bool expected) const {
        auto *const address = reinterpret_cast<T *>(get<std::uintptr_t>(i));
        require(expected, address != nullptr, name);
        return address;
    }

    // The values of a view, whose number is one of `sizes`; none for None, if the problem has no such operand.
    nb::tuple view(std::size_t i, const char *name, bool expected, std::initializer_list<std::size_t> sizes) const {
        require(expected, !lacks(i), name);
        if (!expected) return nb::tuple();
        auto items = nb::cast<nb::tuple>(values_[i]);
        if (std::find(sizes.begin(), sizes.end(), items.size()) == sizes.end())
            refuse(std::string(name) + " is no view");
        return items;
    }

    const std::int64_t *longs(nb::handle array, const char *name, std::size_t size) {
        return lists_.emplace_back(array, name, size).data();
    }
    const std::int64_t *longs(nb::handle array, const char *name) { return longs(array, name, sequences_); }

    // The first five values of a view: (pointer, address, stride_head, stride_token, dim).
    fusion::Rows rows_of(const nb::tuple &t, const char *name, std::int64_t dim) {
        if (item<std::int64_t>(t, 4) != dim) refuse(std::string(name) + " has rows of another length than the problem");
        return {pointer(t), longs(t[1], name), longs(t[2], name), item<std::int64_t>(t, 3)};
    }
    fusion::Rows rows(std::size_t i, const char *name, std::int64_t dim) {  // dim 0: the problem has no such operand
        const nb::tuple t = view(i, name, dim != 0, {5});
        return t.empty() ? fusion::Rows{} : rows_of(t, name, dim);
    }

    // (pointer, address, stride_head, stride_row, stride_key, dtype); a seventh value is the first key with a bit.
    fusion::Matrix matrix(std::size_t i, const char *name, bool expected) {
        const nb::tuple t = view(i, name, expected, {6, 7});
        if (t.empty()) return {};
        fusion::Matrix matrix = {pointer(t), longs(t[1], name), longs(t[2], name), longs(t[3], name)};
        if (t.size() == 7) matrix.first = longs(t[6], name);
        matrix.stride_key = item<std::int64_t>(t, 4);
        const int dtype = item<int>(t, 5);
        if (matrix.stride_key != 0 && matrix.stride_key != 1) {
            refuse(std::string(name) + " has keys that are not neighbours");
        }
        if (dtype < 0 || dtype > 2) refuse(std::string(name) + " has an unknown dtype");
        matrix.dtype = static_cast<Dtype>(dtype);
        return matrix;
    }

private:
    static void require(bool expected, bool given, const char *name) {
        if (expected != given) refuse(std::string(name) + (expected ? " is missing" : " belongs to no operand"));
    }

    nb::tuple values_;
    std::size_t sequences_;
    std::deque<Longs> lists_;
};

template <class Operands> struct Arguments {
    Views views;  // with the arrays to which operands point
    Operands operands;
};

inline const fusion::Variant &variant_named(const nb::object &name) {
    if (name.is_none()) return fusion::chosen_variant();
    const auto wanted = nb::cast<std::string>(name);
    for (const fusion::Built &built : fusion::built_variants()) {
        if (built.variant && wanted == built.name) return *built.variant;
    }
    refuse("variant \"" + wanted + "\" does not run here");
}

// The number of values of an enum, which Python passes as their numbers, and its name in errors.
struct Choices {
    int count;
    const char *name;
};
constexpr Choices choices_of(fusion::Dtype) { return {3, "dtype"}; }
constexpr Choices choices_of(fusion::Bias) { return {5, "bias"}; }
constexpr Choices choices_of(fusion::Dropout) { return {3, "dropout"}; }
constexpr Choices choices_of(fusion::Storage) { return {5, "storage"}; }
constexpr Choices choices_of(fusion::Dequant) { return {3, "dequant"}; }
constexpr Choices choices_of(fusion::Rounding) { return {3, "rounding"}; }

template <class T> void read(nb::handle value, T &field) {
    if constexpr (std::is_enum_v<T>) {
        const int number = nb::cast<int>(value);
        if (number < 0 || number >= choices_of(T{}).count) refuse(std::string(choices_of(T{}).name) + " is unknown");
        field = static_cast<T>(number);
    } else {
        field = nb::cast<T>(value);
    }
}

// Converts the values of a tuple, in order, to the fields.
template <class... Fields> void read_fields(const nb::tuple &from, const char *otherwise, Fields &...fields) {
    if (from.size() != sizeof...(fields)) refuse(otherwise);
    std::size_t at = 0;
    (read(from[at++], fields), ...);
}

inline void read_problem(const nb::tuple &from, fusion::Problem &p) {
    read_fields(from, "a problem has 17 fields", p.heads_q, p.heads_kv, p.dim_qk, p.dim_v, p.dim_rope, p.dtype, p.scale,
                p.bias, p.bias_scaled, p.has_blocked, p.has_sink, p.dropout, p.keep_prob, p.keep_below, p.softcap,
                p.has_blocked_tiles, p.wide_results);
}

inline fusion::Problem problem_of(const nb::tuple &from) {
    fusion::Problem p{};
    read_problem(from, p);
    return p;
}

// Sets fields of all elements, each from the next array of the tuple, from array `first` on.
template <class T>
void read_arrays(const nb::tuple &arrays, std::size_t first, std::vector<T> &to,
                 std::initializer_list<std::pair<const char *, std::int64_t T::*>> fields) {
    for (const auto &[name, field] : fields) {
        const Longs values(arrays[first++], name, to.size());
        for (std::size_t i = 0; i < to.size(); ++i) to[i].*field = values.data()[i];
    }
}

// Converts the arrays of sequences; chunks of longer sequences have three more arrays. heads: number of query heads, by
// which dropout numbers its random streams.
inline std::vector<fusion::Sequence> sequences_of(const nb::tuple &extents, std::int64_t heads = 0) {
    using fusion::Sequence;
    if (extents.size() != 6 && extents.size() != 8 && extents.size() != 9)
        refuse("extents are six arrays, eight with those of a second key source, or nine with a part's");
    std::vector<Sequence> sequences(length_of(extents[0]));
    read_arrays(extents, 0, sequences,
                {{"q_len", &Sequence::q_len},
                 {"kv_len", &Sequence::kv_len},
                 {"lo", &Sequence::lo},
                 {"hi", &Sequence::hi},
                 {"prefix", &Sequence::prefix},
                 {"shift", &Sequence::shift}});
    for (std::size_t b = 0; b < sequences.size(); ++b) sequences[b].stream = static_cast<std::int64_t>(b) * heads;
    if (extents.size() == 8) {
        read_arrays(extents, 6, sequences,
                    {{"compressed_len", &Sequence::compressed_len}, {"compressed_hi", &Sequence::compressed_hi}});
    } else if (extents.size() == 9) {
        read_arrays(
            extents, 6, sequences,
            {{"first_row", &Sequence::first_row}, {"first_key", &Sequence::first_key}, {"stream", &Sequence::stream}});
    }
    for (const Sequence &seq : sequences) {
        if (seq.first_key % 8)
            refuse("first_key: a draw of dropout serves eight keys, and this is no multiple of them");
    }
    return sequences;
}

inline bool has_matrix(const fusion::Problem &p) {  // of the bias
    return p.bias == fusion::Bias::matrix || p.bias == fusion::Bias::table;
}
inline bool has_slopes(const fusion::Problem &p) { return p.bias > fusion::Bias::table; }

// Operands of forward and backward.
inline Arguments<fusion::Operands> operands_of(const nb::tuple &values, const fusion::Problem &p, std::size_t n) {
    Views from(values, 18, "operands are 18 values", n);
    fusion::Operands o;
    o.q = from.rows(0, "q", p.dim_qk), o.k = from.rows(1, "k", p.dim_qk), o.v = from.rows(2, "v", p.dim_v);
    o.out = from.rows(3, "out", p.dim_v), o.max = from.rows(4, "max", 1), o.sum = from.rows(5, "sum", 1);
    o.q_rope = from.rows(6, "q_rope", p.dim_rope), o.k_rope = from.rows(7, "k_rope", p.dim_rope);
    o.bias = from.matrix(8, "bias", has_matrix(p));
    o.slopes = from.address<const float>(9, "slopes", has_slopes(p));
    o.blocked = from.matrix(10, "blocked", p.has_blocked);
    o.drop_bits = from.matrix(11, "drop_bits", p.dropout == fusion::Dropout::bits);
    o.seed = from.get<std::uint64_t>(12), o.offset = from.get<std::uint32_t>(13);
    o.sink = from.address<const float>(14, "sink", p.has_sink);
    o.blocked_tiles = from.matrix(15, "blocked_tiles", p.has_blocked_tiles);
    o.blocked_bits = reinterpret_cast<const std::uint8_t *>(from.get<std::uintptr_t>(16));
    o.blocked_count = from.get<std::int64_t>(17);
    return {std::move(from), o};
}

// A new reference, or null with Python's error set. The stable ABI has no PyObject_CallMethodNoArgs.
inline PyObject *called(PyObject *of, PyObject *method) { return PyObject_VectorcallMethod(method, &of, 1, nullptr); }

// The address of a tensor's first element; null for None.
inline void *place_of(nb::handle tensor) {
    if (tensor.is_none()) return nullptr;
    static PyObject *const data_ptr = PyUnicode_InternFromString("data_ptr");
    const nb::object place = nb::steal(called(tensor.ptr(), data_ptr));
    if (!place.is_valid()) throw nb::python_error();
    void *const address = PyLong_AsVoidPtr(place.ptr());
    if (!address && PyErr_Occurred()) throw nb::python_error();
    return address;
}

// The assignment of tensors to operands in a prepared call. `each(operands, visit)` calls visit(name, pointer) for
// every pointer to memory, possibly several times for a name. Every operand must have a name; otherwise it would be
// read at its address when the call was prepared.
class Positions {
public:
    template <class Operands, class Each> Positions(Operands operands, const nb::tuple &names, Each each) {
        std::vector<std::string> left;
        for (nb::handle name : names) left.push_back(nb::cast<std::string>(name));
        count_ = left.size();
        each(operands, [&](const char *name, auto *&begin) {
            int index = -1;
            for (std::size_t i = 0; i < count_; ++i) {
                if (left[i] == name) index = static_cast<int>(i);
            }
            if (index < 0 && begin) refuse(std::string(name) + " is read, and no tensor of the call is named so");
            of_.push_back(begin ? index : -1);
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

// A plan with the memory layout of its operands; a call passes only their addresses. Form has the types Plan and
// Operands and three functions: arguments(plan, tuple); each(operands, visit), for Places; and compute(plan, operands,
// threads), which releases the GIL and returns the number of empty rows.
template <class Form> class Prepared {
public:
    Prepared(nb::object plan, const nb::tuple &operands, const nb::tuple &names)
        : plan_(std::move(plan)), given_(Form::arguments(planned(), operands)),
          positions_(given_.operands, names, each) {}

    // Runs the call on tensors in the order of the names; None for statistics that are not read.
    std::int64_t run(int threads, const nb::args &tensors) const {
        require_threads(threads);
        typename Form::Operands operands = given_.operands;
        positions_.set(operands, tensors, each);
        return Form::compute(planned(), operands, threads);
    }

    static std::unique_ptr<Prepared> prepare(nb::object plan, const nb::tuple &operands, const nb::tuple &names) {
        return std::make_unique<Prepared>(std::move(plan), operands, names);
    }

    static void bind(nb::module_ &m, const char *name) {
        nb::class_<Prepared>(m, name, "A plan with the views of its operands.")
            .def("run", &Prepared::run, "threads"_a, "tensors"_a);
    }

private:
    static constexpr auto each = [](typename Form::Operands &o, auto visit) { Form::each(o, visit); };

    const typename Form::Plan &planned() const { return nb::cast<const typename Form::Plan &>(plan_); }

    nb::object plan_;
    Arguments<typename Form::Operands> given_;
    Positions positions_;
};

// Runs a plan once, on operands that are given as a tuple of views.
template <class Form>
std::int64_t run_once(const typename Form::Plan &plan, int threads, const nb::tuple &operands) {
    require_threads(threads);
    return Form::compute(plan, Form::arguments(plan, operands).operands, threads);
}

}  // namespace
