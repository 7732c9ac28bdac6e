// Memory that torch allocates: a table of functions for libascendcl, each of which calls Python's DeviceMemory.
#include <cstdio>
#include <initializer_list>

#include "capi/memory.h"
#include "capi/python.h"

namespace fusion::capi {
namespace {

// The object that the table's functions call; global, because the runtime has one device at a time. Never released.
PyObject *device_memory = nullptr;
thread_local std::string last_error;

// Calls a method with numbers as arguments and result; on failure returns false and sets last_error.
bool ask(const char *method, std::initializer_list<unsigned long long> numbers, unsigned long long &answer) noexcept {
    try {
        const Python &py = python();
        const Locked locked(py);
        const Reference function(py, py.PyObject_GetAttrString(device_memory, method));
        const Reference arguments(py, py.PyTuple_New(static_cast<std::ptrdiff_t>(numbers.size())));
        std::ptrdiff_t at = 0;
        for (const unsigned long long number : numbers)
            py.PyTuple_SetItem(arguments.get(), at++, py.PyLong_FromUnsignedLongLong(number));
        const Reference found(py, py.PyObject_CallObject(function.get(), arguments.get()));
        if (found.get()) {
            answer = py.PyLong_AsUnsignedLongLong(found.get());
            return true;
        }
        last_error = exception_text(py);
    } catch (const std::exception &error) {
        last_error = error.what();
    }
    return false;
}

unsigned long long number(const void *address) { return reinterpret_cast<std::uintptr_t>(address); }

void *allocate(std::size_t size) {
    unsigned long long address = 0;
    return ask("allocate", {size}, address) ? reinterpret_cast<void *>(address) : nullptr;  // NOLINT(*-no-int-to-ptr)
}

int release(void *address) {
    unsigned long long done = 0;
    return !ask("release", {number(address)}, done);
}

int copy(void *target, const void *source, std::size_t count, int kind) {
    unsigned long long done = 0;
    return !ask("copy", {number(target), number(source), count, static_cast<unsigned long long>(kind)}, done);
}

int set(void *address, int value, std::size_t count) {
    unsigned long long done = 0;
    return !ask("set", {number(address), static_cast<unsigned char>(value), count}, done);
}

int synchronize() {
    unsigned long long done = 0;
    return !ask("synchronize", {}, done);
}

int total(std::size_t *bytes) {
    unsigned long long found = 0;
    const bool answered = ask("total", {}, found);
    *bytes = found;
    return !answered;
}

const char *error() { return last_error.c_str(); }

}  // namespace

FUSION_C bool fusion_attention_device_functions(const char *device, DeviceFunctions *functions, char *text,
                                                std::size_t size) {
    std::string why;
    try {
        const Python &py = python();
        const Locked locked(py);
        const Reference arguments(py, py.PyTuple_New(1));
        py.PyTuple_SetItem(
            arguments.get(), 0,
            py.PyUnicode_DecodeUTF8(device, static_cast<std::ptrdiff_t>(std::string(device).size()), "replace"));
        PyObject *const made = py.PyObject_CallObject(entry().memory, arguments.get());
        if (made) {
            device_memory = made;  // The previous one remains, because its memory may still be freed.
            *functions = {allocate, release, copy, set, synchronize, total, error};
            return true;
        }
        why = exception_text(py);
    } catch (const std::exception &failure) {
        why = failure.what();
    }
    std::snprintf(text, size, "%s", why.c_str());
    return false;
}

}  // namespace fusion::capi
