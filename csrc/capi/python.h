// Python inside a C program: starts an interpreter once, or uses the one that the process runs. Nothing here is linked
// to libpython: its functions, all of the stable ABI, are looked up at first use.
#pragma once

#include <cstddef>
#include <string>

namespace fusion::capi {

// A pointer to a Python object; Python's header is not included.
struct PyObject;

// Python's functions by their names.
struct Python {
    int (*Py_IsInitialized)();
    void (*Py_InitializeEx)(int signals);
    void (*Py_SetProgramName)(const wchar_t *name);
    wchar_t *(*Py_DecodeLocale)(const char *text, std::size_t *size);
    int (*PyGILState_Ensure)();
    void (*PyGILState_Release)(int state);
    void *(*PyEval_SaveThread)();
    void (*PyEval_RestoreThread)(void *state);
    int (*PyGILState_Check)();
    void (*Py_DecRef)(PyObject *object);
    void (*Py_IncRef)(PyObject *object);
    PyObject *(*PyImport_ImportModule)(const char *name);
    PyObject *(*PyObject_GetAttrString)(PyObject *object, const char *name);
    PyObject *(*PyObject_CallObject)(PyObject *function, PyObject *arguments);
    PyObject *(*PyObject_Str)(PyObject *object);
    PyObject *(*PyTuple_New)(std::ptrdiff_t size);
    int (*PyTuple_SetItem)(PyObject *tuple, std::ptrdiff_t at, PyObject *item);
    PyObject *(*PyTuple_GetItem)(PyObject *tuple, std::ptrdiff_t at);
    PyObject *(*PyList_New)(std::ptrdiff_t size);
    int (*PyList_SetItem)(PyObject *list, std::ptrdiff_t at, PyObject *item);
    PyObject *(*PyLong_FromLongLong)(long long value);
    PyObject *(*PyLong_FromUnsignedLongLong)(unsigned long long value);
    PyObject *(*PyBool_FromLong)(long value);
    PyObject *(*PyFloat_FromDouble)(double value);
    PyObject *(*PyBytes_FromStringAndSize)(const char *bytes, std::ptrdiff_t size);
    PyObject *(*PyUnicode_DecodeUTF8)(const char *text, std::ptrdiff_t size, const char *errors);
    const char *(*PyUnicode_AsUTF8AndSize)(PyObject *text, std::ptrdiff_t *size);
    unsigned long long (*PyLong_AsUnsignedLongLong)(PyObject *value);
    PyObject *(*PyCapsule_New)(void *pointer, const char *name, void (*destructor)(PyObject *));
    void *(*PyCapsule_GetPointer)(PyObject *capsule, const char *name);
    int (*PyCapsule_IsValid)(PyObject *capsule, const char *name);
    void (*PyErr_Fetch)(PyObject **type, PyObject **value, PyObject **traceback);
    void (*PyErr_Clear)();
    PyObject *none;
};

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
    PyObject *release() {
        PyObject *const object = object_;
        object_ = nullptr;
        return object;
    }

private:
    const Python &py_;
    PyObject *object_;
};

// Returns the pending exception as text and clears it.
std::string exception_text(const Python &py);

}  // namespace fusion::capi
