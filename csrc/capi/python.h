// Python inside a C program: starts an interpreter once, or uses the one that the process runs. Nothing here is linked
// to libpython: its functions, all of the stable ABI, are looked up at first use.
#pragma once

#include <cstddef>
#include <initializer_list>
#include <span>
#include <string>
#include <vector>

namespace fusion::capi {

// A pointer to a Python object; Python's header is not included.
struct PyObject;

// Python's functions that are used: X(result, name, parameters).
#define FUSION_PYTHON(X)                                                                             \
    X(int, Py_IsInitialized, ())                                                                     \
    X(void, Py_InitializeEx, (int signals))                                                          \
    X(void, Py_SetProgramName, (const wchar_t *name))                                                \
    X(wchar_t *, Py_DecodeLocale, (const char *text, std::size_t *size))                             \
    X(int, PyGILState_Ensure, ())                                                                    \
    X(void, PyGILState_Release, (int state))                                                         \
    X(void *, PyEval_SaveThread, ())                                                                 \
    X(void, PyEval_RestoreThread, (void *state))                                                     \
    X(int, PyGILState_Check, ())                                                                     \
    X(void, Py_DecRef, (PyObject * object))                                                          \
    X(void, Py_IncRef, (PyObject * object))                                                          \
    X(PyObject *, PyImport_ImportModule, (const char *name))                                         \
    X(PyObject *, PyObject_GetAttrString, (PyObject * object, const char *name))                     \
    X(PyObject *, PyObject_CallObject, (PyObject * function, PyObject * arguments))                  \
    X(PyObject *, PyObject_Str, (PyObject * object))                                                 \
    X(PyObject *, PyTuple_New, (std::ptrdiff_t size))                                                \
    X(int, PyTuple_SetItem, (PyObject * tuple, std::ptrdiff_t at, PyObject *item))                   \
    X(PyObject *, PyTuple_GetItem, (PyObject * tuple, std::ptrdiff_t at))                            \
    X(PyObject *, PyList_New, (std::ptrdiff_t size))                                                 \
    X(int, PyList_SetItem, (PyObject * list, std::ptrdiff_t at, PyObject *item))                     \
    X(PyObject *, PyLong_FromLongLong, (long long value))                                            \
    X(PyObject *, PyLong_FromUnsignedLongLong, (unsigned long long value))                           \
    X(PyObject *, PyBool_FromLong, (long value))                                                     \
    X(PyObject *, PyFloat_FromDouble, (double value))                                                \
    X(PyObject *, PyBytes_FromStringAndSize, (const char *bytes, std::ptrdiff_t size))               \
    X(PyObject *, PyUnicode_DecodeUTF8, (const char *text, std::ptrdiff_t size, const char *errors)) \
    X(const char *, PyUnicode_AsUTF8AndSize, (PyObject * text, std::ptrdiff_t *size))                \
    X(unsigned long long, PyLong_AsUnsignedLongLong, (PyObject * value))                             \
    X(PyObject *, PyCapsule_New, (void *pointer, const char *name, void (*destructor)(PyObject *)))  \
    X(void *, PyCapsule_GetPointer, (PyObject * capsule, const char *name))                          \
    X(int, PyCapsule_IsValid, (PyObject * capsule, const char *name))                                \
    X(void, PyErr_Fetch, (PyObject * *type, PyObject * *value, PyObject * *traceback))               \
    X(void, PyErr_Clear, ())

// Python's functions by their names.
struct Python {
#define FUSION_MEMBER(result, name, parameters) result(*name) parameters;
    FUSION_PYTHON(FUSION_MEMBER)
#undef FUSION_MEMBER
    PyObject *none;
};

// The Python of this library (find_interpreter.cpp).
struct Interpreter {
    std::string program;                 // its executable, from which Python finds a virtual environment
    std::string name;                    // "libpython3.11.so.1.0"
    std::vector<std::string> libraries;  // candidate files of that name, most likely first; empty: no shared library
};

// Returns the interpreter of FUSION_ATTENTION_PYTHON, or of the environment that contains this library, or of a source
// tree's .venv, or python3 of PATH. Throws a Refusal if none runs.
Interpreter find_interpreter();

// The functions of fusion_attention.capi.entry that libopapi calls.
struct Entry {
    PyObject *plan, *run, *memory;
};

// Returns the running Python; the first call starts it if necessary and imports the package. Throws a Refusal if one is
// missing.
const Python &python();
// Returns null if python() was never called, or Python has ended.
const Python *running_python() noexcept;
const Entry &entry() noexcept;

// Acquires Python's lock for this thread.
class Locked {
public:
    explicit Locked(const Python &py) : py_(py), state_(py.PyGILState_Ensure()) {}
    ~Locked() { py_.PyGILState_Release(state_); }
    Locked(const Locked &) = delete;
    Locked &operator=(const Locked &) = delete;

private:
    const Python &py_;
    int state_;
};

// Owns a reference; only under Python's lock.
class Reference {
public:
    Reference(const Python &py, PyObject *object) : py_(py), object_(object) {}
    ~Reference() {
        if (object_) py_.Py_DecRef(object_);
    }
    Reference(const Reference &) = delete;
    Reference &operator=(const Reference &) = delete;

    PyObject *get() const { return object_; }

private:
    const Python &py_;
    PyObject *object_;
};

// Returns a new tuple, which takes over the references of its items.
PyObject *tuple_of(const Python &py, std::span<PyObject *const> items);
inline PyObject *tuple_of(const Python &py, std::initializer_list<PyObject *> items) {
    return tuple_of(py, std::span(items.begin(), items.size()));
}
// Returns the result of a call with these arguments, whose references it takes over; null for an exception.
PyObject *called(const Python &py, PyObject *function, std::span<PyObject *const> arguments);
inline PyObject *called(const Python &py, PyObject *function, std::initializer_list<PyObject *> arguments) {
    return called(py, function, std::span(arguments.begin(), arguments.size()));
}
// Returns the pending exception as text and clears it.
std::string exception_text(const Python &py);

}  // namespace fusion::capi
