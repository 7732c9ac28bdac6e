// The registry of the memory that programs allocate. Addresses outside all allocations are errors
// for device memory, and accepted for host memory.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "capi/errors.h"

namespace fusion::capi {

// The memory functions of a device. Without them (device "cpu"), host memory is device memory.
// Functions return 0, or another number on failure; then error() returns the text until this thread's next call.
struct DeviceFunctions {
    void *(*allocate)(std::size_t size);  // null if there is no memory
    int (*release)(void *address);
    int (*copy)(void *target, const void *source, std::size_t count, int kind);  // kind: aclrtMemcpyKind, 0 to 3
    int (*set)(void *address, int value, std::size_t count);
    int (*synchronize)();
    int (*total)(std::size_t *bytes);
    const char *(*error)();
};

// Exported by libopapi for libascendcl, which opens it from the same folder if the device is not "cpu", or if
// the configuration has "memory": "torch". Fills the table; returns false and a text if there is no such device.
using DeviceFunctionsOf = bool (*)(const char *device, DeviceFunctions *functions, char *text, std::size_t size);
inline constexpr const char *device_functions_of = "fusion_attention_device_functions";

// The last use of a range of an allocation, in the checked mode.
struct Trace {
    std::size_t begin, end;  // bytes
    int dtype;               // of a tensor with this address; -1: data of the host were copied there
    CallSite creation;
};

struct Allocation {
    Allocation(void *address, std::size_t requested, std::size_t granted, bool host) noexcept
        : address(static_cast<char *>(address)), requested(requested), granted(granted), host(host) {}
    ~Allocation();
    Allocation(const Allocation &) = delete;
    Allocation &operator=(const Allocation &) = delete;

    char *address;
    std::size_t requested;  // bytes requested by the program
    std::size_t granted;    // rounded up to pages, as on the chip
    bool host;
    std::atomic<bool> alive = true;  // false once freed; owners of this object may still read the memory
    const DeviceFunctions *functions = nullptr;

    CallSite creation, freed;
    std::mutex mutex;  // of traces
    // For each byte, the last tensor (true) and the last data of the host (false).
    std::map<std::pair<std::size_t, bool>, Trace> traces;

    void remember(const Trace &trace) { traces[{trace.begin, trace.dtype >= 0}] = trace; }
};

// Returns the live allocation that contains an address; null if none does.
FUSION_SHARED std::shared_ptr<Allocation> allocation_of(const void *address) noexcept;
// Describes "an allocation of 64 bytes (aclrtMalloc, call 3)"; for other addresses, which call freed them.
FUSION_SHARED std::string described(const void *address) noexcept;

}  // namespace fusion::capi
