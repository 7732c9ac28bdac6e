// Memory that torch allocates: a table of functions for libascendcl, each of which calls Python's DeviceMemory.
#include <cstdio>
#include <initializer_list>
#include <optional>
#include <string_view>
#include <vector>

#include "capi/allocations.h"
#include "capi/python.h"

namespace fusion::capi {
namespace {

// The object that the table's functions call; global, because the runtime has one device at a time. Never released.
PyObject *device_memory = nullptr;
thread_local std::string last_error;

// Calls a method with numbers as arguments and result; on failure returns nothing and sets last_error.
std::optional<unsigned long long> ask(const char *method, std::initializer_list<unsigned long long> numbers) noexcept {
    try {
        const Python &py = python();
        const Locked locked(py);
        const Reference function(py, py.PyObject_GetAttrString(device_memory, method));
        std::vector<PyObject *> arguments;
        for (const unsigned long long number : numbers) arguments.push_back(py.PyLong_FromUnsignedLongLong(number));
        const Reference result(py, called(py, function.get(), arguments));
        if (result.get()) return py.PyLong_AsUnsignedLongLong(result.get());
        last_error = exception_text(py);
    } catch (const std::exception &error) {
        last_error = error.what();
    }
    return std::nullopt;
}

unsigned long long number(const void *address) { return reinterpret_cast<std::uintptr_t>(address); }

void *allocate(std::size_t size) {
    return reinterpret_cast<void *>(ask("allocate", {size}).value_or(0));  // NOLINT(*-no-int-to-ptr)
}

int release(void *address) { return !ask("release", {number(address)}); }

int copy(void *target, const void *source, std::size_t count, int kind) {
    return !ask("copy", {number(target), number(source), count, static_cast<unsigned long long>(kind)});
}

int set(void *address, int value, std::size_t count) {
    return !ask("set", {number(address), static_cast<unsigned char>(value), count});
}

int synchronize() { return !ask("synchronize", {}); }

int total(std::size_t *bytes) {
    const auto result = ask("total", {});
    *bytes = result.value_or(0);
    return !result;
}

const char *error() { return last_error.c_str(); }

}  // namespace

FUSION_C bool fusion_attention_device_functions(const char *device, DeviceFunctions *functions, char *text,
                                                std::size_t size) {
    std::string why;
    try {
        const Python &py = python();
        const Locked locked(py);
        const auto size_of_name = static_cast<std::ptrdiff_t>(std::string_view(device).size());
        PyObject *const created =
            called(py, entry().memory, {py.PyUnicode_DecodeUTF8(device, size_of_name, "replace")});
        if (created) {
            device_memory = created;  // The previous one remains, because its memory may still be freed.
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
