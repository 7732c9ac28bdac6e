// Python inside a C program: found, started once, or joined where the process runs it already. Nothing here is linked
// to libpython: its functions, all of the stable interface, are looked up when they are first needed.
#pragma once

#include <cstddef>
#include <string>

namespace fusion::capi {

// A Python object, by its address; Python's own header stays out.
struct PyObject;

// Python's functions by their own names.
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

// What libopapi calls: functions of fusion_attention.capi.entry.
struct Entry {
    PyObject *plan, *run, *memory;
};

// The running Python; starts or joins it, and imports the package, when first asked. Throws a Refusal that says what is
// missing.
const Python &python();
// Null where python() was never asked, or Python has ended since.
const Python *running_python() noexcept;
const Entry &entry() noexcept;

// This thread has Python's lock.
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

// A reference that is given back; only under the lock.
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

// The pending exception as text, cleared.
std::string exception_text(const Python &py);

}  // namespace fusion::capi
