// The signature of a call: bytes from its arguments that are the key of the cache of prepared calls. Calls with equal
// signatures can use the same prepared call.
//
// Every eager call computes its signature first, so tensors are read through Python's C interface without a Python
// frame. This file does not depend on operators.

#include "bind/arguments.h"

namespace {

enum class Kind : char { attribute = 'a', tensor = 't', tensors = 's', integers = 'i' };

// Owns a new reference, or throws Python's error for null.
nb::object owned(PyObject *object) {
    if (!object) throw nb::python_error();
    return nb::steal(object);
}

PyObject *word(const char *text) { return PyUnicode_InternFromString(text); }

// Names of the properties of torch's tensors as Python strings; created once and never released, like the module.
struct Words {
    PyObject *shape = word("shape"), *stride = word("stride"), *dtype = word("dtype"), *device = word("device"),
             *is_cpu = word("is_cpu"), *is_neg = word("is_neg"), *is_zero = word("_is_zerotensor"),
             *itemsize = word("itemsize"), *offset = word("storage_offset"), *storage = word("untyped_storage"),
             *nbytes = word("nbytes"), *requires_grad = word("requires_grad"), *data_ptr = word("data_ptr");

    static const Words &all() {
        static const Words *const words = new Words;
        return *words;
    }
};

nb::object attribute(PyObject *of, PyObject *property) { return owned(PyObject_GetAttr(of, property)); }
nb::object answer(PyObject *of, PyObject *method) { return owned(called(of, method)); }

bool is_true(const nb::object &value) { return value.ptr() == Py_True; }

// True if a tensor's elements are not those of its memory.
bool is_changed(PyObject *tensor) {
    const bool negated = is_true(answer(tensor, Words::all().is_neg));
    return is_true(answer(tensor, Words::all().is_zero)) || negated;
}

// Size and items (borrowed) of a list or tuple. The stable ABI has only functions, which take 0.2 us more per call.
#if defined(Py_LIMITED_API)
Py_ssize_t count_of(PyObject *list) { return PyList_Check(list) ? PyList_Size(list) : PyTuple_Size(list); }
PyObject *one_of(PyObject *list, Py_ssize_t i) {
    PyObject *const one = PyList_Check(list) ? PyList_GetItem(list, i) : PyTuple_GetItem(list, i);
    if (!one) throw nb::python_error();
    return one;
}
#else
Py_ssize_t count_of(PyObject *list) { return PySequence_Fast_GET_SIZE(list); }
PyObject *one_of(PyObject *list, Py_ssize_t i) { return PySequence_Fast_GET_ITEM(list, i); }
#endif

// The value of a Python integer. Symbolic integers of a trace are rejected, because reading their values would
// specialise the trace.
std::int64_t integer_of(PyObject *number) {
    if (!PyLong_CheckExact(number)) PyErr_SetString(PyExc_TypeError, "no plain number");
    const long long value = PyLong_CheckExact(number) ? PyLong_AsLongLong(number) : -1;
    if (value == -1 && PyErr_Occurred()) throw nb::python_error();
    return value;
}

// A signature under construction: bytes, and values without bytes, which Python compares.
struct Key {
    std::string bytes;
    nb::list others;

    void add(char mark) { bytes.push_back(mark); }
    template <class T> void add(char mark, T value) {
        bytes.push_back(mark);
        bytes.append(reinterpret_cast<const char *>(&value), sizeof(T));
    }
    void other(nb::handle value) {
        if (PyObject_Hash(value.ptr()) == -1) throw nb::python_error();
        others.append(value);
    }
};

class Signature {
public:
    // types: torch's Tensor and Parameter; integers: its dtypes of 64 and of 32 bits.
    Signature(nb::tuple names, const std::string &kinds, const nb::tuple &watched, nb::tuple types, nb::tuple integers)
        : names_(std::move(names)), types_(std::move(types)), integers_(std::move(integers)) {
        if (names_.size() != kinds.size() || watched.size() != kinds.size()) {
            refuse("a signature has a kind for each name");
        }
        if (types_.size() != 2 || integers_.size() != 2) refuse("a signature knows two types and two dtypes");
        for (const char kind : kinds) kinds_.push_back(static_cast<Kind>(kind));
        for (const auto one : watched) watched_.push_back(nb::cast<bool>(one));
    }

    // Returns (key, content, within_storage): the signature; the bytes of each list of integers, or None if Python must
    // read it; true if all tensors are within their storages. (None, None, True) if a value is in no signature.
    nb::tuple read(const nb::dict &args, bool strict, bool grad) const {
        try {
            Reading r{Key{}, nb::list(), true, true};
            r.key.bytes.reserve(1024);
            r.key.add(static_cast<char>((strict ? 1 : 0) | (grad ? 2 : 0)));
            for (std::size_t i = 0; i < kinds_.size(); ++i) {
                PyObject *const value =
                    PyDict_GetItemWithError(args.ptr(), one_of(names_.ptr(), static_cast<Py_ssize_t>(i)));
                if (!value && PyErr_Occurred()) throw nb::python_error();
                if (!value || value == Py_None) r.key.add('N');
                else add(value, kinds_[i], grad && watched_[i], r);
            }
            nb::object key = nb::steal(PyBytes_FromStringAndSize(r.key.bytes.data(), length(r.key.bytes)));
            if (!r.key.others.empty()) {
                r.key.others.append(key);
                key = nb::tuple(r.key.others);
            }
            nb::object content = nb::none();
            if (r.readable) content = nb::tuple(r.content);
            return nb::make_tuple(key, content, r.within_storage);
        } catch (nb::python_error &) {  // not a tensor, no strides (sparse, nested) or no hash: later checks report it
            return nb::make_tuple(nb::none(), nb::none(), true);
        }
    }

private:
    struct Reading {
        Key key;
        nb::list content;
        bool readable, within_storage;
    };
    nb::tuple names_, types_, integers_;
    std::vector<Kind> kinds_;
    std::vector<bool> watched_;

    static Py_ssize_t length(const std::string &bytes) { return static_cast<Py_ssize_t>(bytes.size()); }

    void add(PyObject *value, Kind kind, bool watched, Reading &r) const {
        switch (kind) {
            case Kind::attribute: return add_attribute(value, r.key);
            case Kind::tensor: return add_tensor(value, watched, r);
            case Kind::integers: return add_integers(value, r);
            case Kind::tensors: break;
        }
        if (!PyList_Check(value) && !PyTuple_Check(value)) {  // one tensor is a list of one
            r.key.add('s', Py_ssize_t{1});
            return add_tensor(value, watched, r);
        }
        const Py_ssize_t count = count_of(value);
        r.key.add('s', count);
        for (Py_ssize_t i = 0; i < count && i < count_of(value); ++i) {
            // A reference, because torch may release the GIL and another thread may change the caller's list.
            const nb::object one = nb::borrow(one_of(value, i));
            add_tensor(one.ptr(), watched, r);
        }
    }

    // Each type has a prefix, because True == 1 == 1.0 although they are not equally valid.
    static void add_attribute(PyObject *value, Key &key) {
        if (value == Py_True || value == Py_False) return key.add(value == Py_True ? 'T' : 'F');
        if (PyFloat_CheckExact(value)) return key.add('f', PyFloat_AsDouble(value));
        if (PyUnicode_CheckExact(value)) {
            Py_ssize_t size = 0;
            const char *const text = PyUnicode_AsUTF8AndSize(value, &size);
            if (!text) throw nb::python_error();
            key.add('u', size);
            key.bytes.append(text, static_cast<std::size_t>(size));
            return;
        }
        if (PyLong_CheckExact(value)) {
            int overflow = 0;
            const long long number = PyLong_AsLongLongAndOverflow(value, &overflow);
            if (!overflow) return key.add('i', number);
        }
        key.add('o');
        key.other(reinterpret_cast<PyObject *>(Py_TYPE(value)));
        key.other(value);
    }

    void add_tensor(PyObject *tensor, bool watched, Reading &r) const {
        const Words &w = Words::all();
        auto *const type = reinterpret_cast<PyObject *>(Py_TYPE(tensor));
        Key &key = r.key;
        key.add('t');
        if (type == one_of(types_.ptr(), 1)) {
            key.add('p');
        } else if (type != one_of(types_.ptr(), 0)) {
            key.add('y');
            key.other(type);
        }
        key.add('d', attribute(tensor, w.dtype).ptr());  // torch has one permanent object per dtype
        const bool on_cpu = is_true(attribute(tensor, w.is_cpu));
        if (is_changed(tensor)) key.add('z');
        if (!on_cpu) {
            key.add('x');
            key.other(attribute(tensor, w.device));
        }
        if (watched && is_true(attribute(tensor, w.requires_grad))) key.add('g');
        const std::int64_t reach = add_shape(tensor, key);
        r.within_storage = r.within_storage && (reach == 0 || holds(tensor, reach));
    }

    // Writes sizes and strides; returns the number of elements from the first to the end of the last.
    static std::int64_t add_shape(PyObject *tensor, Key &key) {
        const nb::object shape = attribute(tensor, Words::all().shape), stride = answer(tensor, Words::all().stride);
        if (PyTuple_Size(stride.ptr()) != PyTuple_Size(shape.ptr())) throw nb::python_error();
        const Py_ssize_t count = PyTuple_Size(shape.ptr());
        if (count < 0) throw nb::python_error();
        key.add('n', count);
        std::int64_t reach = 1;
        for (Py_ssize_t i = 0; i < count; ++i) {
            const std::int64_t size = integer_of(one_of(shape.ptr(), i)), step = integer_of(one_of(stride.ptr(), i));
            key.add('n', size);
            key.add('n', step);
            reach = size == 0 || reach == 0 ? 0 : reach + (size - 1) * step;
        }
        return reach;
    }

    // True if the storage of a tensor, which may have been resized, has `reach` elements.
    static bool holds(PyObject *tensor, std::int64_t reach) {
        const Words &w = Words::all();
        const std::int64_t item = integer_of(attribute(tensor, w.itemsize).ptr()),
                           offset = integer_of(answer(tensor, w.offset).ptr());
        return integer_of(answer(answer(tensor, w.storage).ptr(), w.nbytes).ptr()) >= (offset + reach) * item;
    }

    // Adds a list or tensor of integers as bytes; other forms are left to Python, which also reports errors in them.
    void add_integers(PyObject *value, Reading &r) const {
        r.key.add('A');
        std::string bytes;
        const bool read = PyList_CheckExact(value) || PyTuple_CheckExact(value) ? numbers(value, bytes)
                          : reinterpret_cast<PyObject *>(Py_TYPE(value)) == one_of(types_.ptr(), 0)
                              ? elements(value, bytes)
                              : false;
        if (!read) r.readable = false;
        else r.content.append(nb::steal(PyBytes_FromStringAndSize(bytes.data(), length(bytes))));
    }

    static bool numbers(PyObject *list, std::string &bytes) {
        for (Py_ssize_t i = 0; i < count_of(list); ++i) {
            PyObject *const one = one_of(list, i);
            int overflow = 0;
            const long long number = PyLong_CheckExact(one) ? PyLong_AsLongLongAndOverflow(one, &overflow) : -1;
            if (!PyLong_CheckExact(one) || overflow) return false;
            bytes.append(reinterpret_cast<const char *>(&number), sizeof number);
        }
        return true;
    }

    // Appends the elements of a vector in host memory to bytes; false for other tensors.
    bool elements(PyObject *tensor, std::string &bytes) const {
        const Words &w = Words::all();
        const nb::object dtype = attribute(tensor, w.dtype), shape = attribute(tensor, w.shape),
                         stride = answer(tensor, w.stride);
        const bool is_int64 = dtype.ptr() == one_of(integers_.ptr(), 0);
        if ((!is_int64 && dtype.ptr() != one_of(integers_.ptr(), 1)) || !is_true(attribute(tensor, w.is_cpu)) ||
            is_changed(tensor) || PyTuple_Size(shape.ptr()) != 1) {
            return false;
        }
        const std::int64_t count = integer_of(one_of(shape.ptr(), 0)),
                           step = integer_of(PyTuple_GetItem(stride.ptr(), 0));
        if (count < 1 || !holds(tensor, (count - 1) * step + 1)) return false;
        const auto *const first = static_cast<const char *>(PyLong_AsVoidPtr(answer(tensor, w.data_ptr).ptr()));
        if (!first) return false;
        for (std::int64_t i = 0; i < count; ++i) {
            const std::int64_t number =
                is_int64 ? at<std::int64_t>(first, i * step) : at<std::int32_t>(first, i * step);
            bytes.append(reinterpret_cast<const char *>(&number), sizeof number);
        }
        return true;
    }

    template <class T> static T at(const char *first, std::int64_t index) {
        T value;
        std::memcpy(&value, first + index * static_cast<std::int64_t>(sizeof value), sizeof value);
        return value;
    }
};

template <class T> bool all_within(const T *values, std::int64_t count, std::int64_t low, std::int64_t high) {
    bool outside = false;
    for (std::int64_t i = 0; i < count; ++i) outside |= values[i] < low || values[i] > high;
    return !outside;
}

// True if `count` integers of `size` bytes in contiguous memory are in [low, high].
bool within(std::uintptr_t first, std::int64_t count, int size, std::int64_t low, std::int64_t high) {
    if (size == 4) return all_within(reinterpret_cast<const std::int32_t *>(first), count, low, high);
    if (size != 8) refuse("size: expected 4 or 8, got " + std::to_string(size));
    return all_within(reinterpret_cast<const std::int64_t *>(first), count, low, high);
}

}  // namespace

void bind_signature(nb::module_ &m) {
    m.def("within", &within, "first"_a, "count"_a, "size"_a, "low"_a, "high"_a,
          "True if all integers of an array of 4 or 8 bytes per element are in [low, high].");
    nb::class_<Signature>(m, "Signature", "What the arguments of an operator's calls are compared by.")
        .def(nb::init<nb::tuple, const std::string &, const nb::tuple &, nb::tuple, nb::tuple>(), "names"_a, "kinds"_a,
             "watched"_a, "types"_a, "integers"_a)
        .def("read", &Signature::read);
}
