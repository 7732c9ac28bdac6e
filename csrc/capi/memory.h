// Memory that programs ask for: every allocation known by its address. Addresses that no allocation holds are refused
// where the device's are asked for, and believed where the host's are.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "capi/calls.h"

namespace fusion::capi {

// How a device has its memory. Without one (device "cpu") the host's own is the device's.
// Functions return 0, or another number where they fail; then error() is the text, until this thread calls again.
struct DeviceFunctions {
    void *(*allocate)(std::size_t size);  // null where there is none left
    int (*release)(void *address);
    int (*copy)(void *target, const void *source, std::size_t count, int kind);  // kind: aclrtMemcpyKind, 0 to 3
    int (*set)(void *address, int value, std::size_t count);
    int (*synchronize)();
    int (*total)(std::size_t *bytes);
    const char *(*error)();
};

// What libopapi exports for libascendcl, which opens it (from its own folder) where the device is not "cpu", or where
// the configuration says "memory": "torch". Fills the table; false, and a text, where there is no such device.
using DeviceFunctionsOf = bool (*)(const char *device, DeviceFunctions *functions, char *text, std::size_t size);
inline constexpr const char *device_functions_of = "fusion_attention_device_functions";

// What the checked mode remembers of a place inside an allocation.
struct Trace {
    std::size_t begin, end;  // bytes
    int dtype;               // of a tensor that was laid there; -1: the host's data were copied there
    CallSite made;
};

struct Allocation {
    Allocation(void *address, std::size_t asked, std::size_t granted, bool host) noexcept
        : address(static_cast<char *>(address)), asked(asked), granted(granted), host(host) {}
    ~Allocation();
    Allocation(const Allocation &) = delete;
    Allocation &operator=(const Allocation &) = delete;

    char *address;
    std::size_t asked;    // by the program
    std::size_t granted;  // as the chip would: whole pages
    bool host;
    std::atomic<bool> alive = true;  // not freed; holders of this may still read the memory
    const DeviceFunctions *functions = nullptr;

    CallSite made, freed;
    std::mutex mutex;  // of traces
    // The last of a tensor (true) and of the host's data (false) at each byte.
    std::map<std::pair<std::size_t, bool>, Trace> traces;

    void remember(const Trace &trace) { traces[{trace.begin, trace.dtype >= 0}] = trace; }
};

// The live allocation that holds an address; null: none does.
FUSION_SHARED std::shared_ptr<Allocation> allocation_of(const void *address) noexcept;
// "an allocation of 64 bytes (aclrtMalloc, call 3)"; of an address in none: whether it was freed, and by whom.
FUSION_SHARED std::string described(const void *address) noexcept;

}  // namespace fusion::capi
