// Error handling of the C functions: a code or a handle for the caller, a text for aclGetRecentErrMsg(), and in
// the checked mode a line on stderr. No exception leaves a library, because each links a separate C++ runtime.
#pragma once

#include <cstdint>
#include <exception>
#include <new>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>

// Marks functions that the three libraries export for each other.
#define FUSION_SHARED __attribute__((visibility("default")))
// Marks functions that programs call.
#define FUSION_C extern "C" __attribute__((visibility("default")))

namespace fusion::capi {

enum Code : int {
    success = 0,
    invalid_param = 100000,
    uninitialized = 100001,
    repeat_initialize = 100002,
    invalid_file = 100003,
    invalid_file_size = 100005,
    parse_file = 100006,
    invalid_file_attribute = 100008,
    repeat_finalize = 100037,
    rt_invalid_param = 107000,
    rt_invalid_device = 107001,
    rt_no_context = 107002,
    rt_stream_context = 107003,
    rt_event_timestamp = 107006,
    rt_event_reversal = 107007,
    rt_invalid_handle = 107017,
    nn_null = 161001,
    nn_invalid = 161002,
    rt_memory_allocation = 207001,
    rt_memory_free = 207002,
    rt_no_device = 207004,
    nn_runtime = 361001,
    rt_internal = 507000,
    nn_inner = 561000,
    nn_inner_null = 561103,
};

// The parts of a text, one after another: texts and integers.
template <class... Parts>
std::string joined(const Parts &...parts) {
    std::string text;
    const auto add = [&](const auto &item) {
        using Item = std::decay_t<decltype(item)>;
        if constexpr (std::is_enum_v<Item>) text += std::to_string(static_cast<long long>(item));
        else if constexpr (std::is_integral_v<Item>) text += std::to_string(item);
        else text += item;
    };
    (add(parts), ...);
    return text;
}

// A call that fails: its code and its text. Thrown and caught within one function of the interface.
class Refusal : public std::runtime_error {
public:
    template <class... Parts>
    explicit Refusal(int code, const Parts &...parts) : std::runtime_error(joined(parts...)), code(code) {}
    int code;
};

// The place of a program's call, which only the checked mode records; number is 0 otherwise.
struct CallSite {
    std::string name;
    std::uint64_t number = 0;
    const void *caller = nullptr;
};

// " (aclrtMalloc, call 3, program+0x1a2b in main)"; "" where calls were not counted.
FUSION_SHARED std::string in_brackets(const CallSite &site);

// The C function that a program calls, and the place of this call. As a default argument, of the function in which it
// is compiled.
struct Caller {
    const char *name;
    const void *address;

    Caller(const char *name = __builtin_FUNCTION(), const void *address = __builtin_return_address(0))
        : name(name), address(address) {}
};

// One call by a program: name, number and place. Only the checked mode counts calls, from 1.
struct FUSION_SHARED Call {
    explicit Call(const Caller &caller) noexcept;

    const char *name;
    const void *caller;
    std::uint64_t number;

    // Returns a copy that remains valid after the call.
    CallSite site() const { return number == 0 ? CallSite{} : CallSite{name, number, caller}; }
    // Reports a failure: "name: text" becomes this thread's recent message; the checked mode also prints it to stderr.
    int fail(int code, const std::string &text) const noexcept;
    // Reports an error of the program that the chip would not detect: as fail(), but only in the checked mode.
    template <class... Parts>
    void defect(const Parts &...parts) const noexcept {
        if (number != 0) report(joined(parts...));
    }

private:
    void report(const std::string &text) const noexcept;
};

// True in the checked mode; expensive checks test it first.
FUSION_SHARED bool checked() noexcept;
// Stores a text as this thread's recent message.
FUSION_SHARED void note(const std::string &text) noexcept;

// Runs the body of a C function, body(call) or body(), and converts exceptions to codes.
template <int no_memory = rt_memory_allocation, class Body>
int coded(Body body, Caller caller = {}) noexcept {
    const Call call(caller);
    try {
        if constexpr (std::is_invocable_v<Body, const Call &>) body(call);
        else body();
        return success;
    } catch (const Refusal &refusal) {
        return call.fail(refusal.code, refusal.what());
    } catch (const std::bad_alloc &) {
        return call.fail(no_memory, "no memory");
    } catch (const std::exception &error) {
        return call.fail(no_memory == rt_memory_allocation ? int{rt_internal} : int{nn_inner}, error.what());
    }
}

}  // namespace fusion::capi
