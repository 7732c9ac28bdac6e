// The process's runtime, within libascendcl: the settings of aclInit() and the state until aclFinalize().
// It must be global: CANN's C interface names no runtime. It is never destroyed: programs' threads may outlive main().
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "capi/handles.h"
#include "capi/allocations.h"

namespace fusion::capi {

inline constexpr int device_count = 8;

// Returns the number of this call, from 1.
std::uint64_t next_call() noexcept;
// True if a defect ends the process ("checked": "abort").
bool aborts() noexcept;
void report(const Call &call, const std::string &text) noexcept;

struct Configuration {
    Settings settings;
    bool abort = false;      // "checked": "abort"
    bool functions = false;  // "memory": "torch": Python allocates the device's memory even on "cpu"
};

// Reads a configuration file (null or "": none), then the environment, which has priority. Throws Refusal.
Configuration configuration_of(const char *path);

// Throws before aclInit() and after aclFinalize().
void need_init();
// Does the same as coded() between aclInit() and aclFinalize(), and fails otherwise.
template <class Body>
int initialized(Body body, Caller caller = {}) noexcept {
    return coded(
        [&](const Call &call) {
            need_init();
            if constexpr (std::is_invocable_v<Body, const Call &>) body(call);
            else body();
        },
        caller);
}
// Throws if a stream accepts no work.
void need_stream(Handle stream);
// Returns the table of a device's memory functions; null: host memory.
const DeviceFunctions *device_functions() noexcept;

// A context, a stream, an event. Contexts and streams close with their device, streams with their context.
struct Context : Object {
    static constexpr Kind kind = Kind::context;
    int device = 0;
    bool of_device = false;  // the default context, which aclrtDestroyContext() rejects
    mutable std::atomic<bool> open = true;
};

struct Stream : Object {
    static constexpr Kind kind = Kind::stream;
    std::shared_ptr<const Context> context;
};

struct Event : Object {
    static constexpr Kind kind = Kind::event;
    mutable std::atomic<std::int64_t> nanoseconds = -1;  // when it was recorded; -1: not yet
};

// Throws if the thread has no context.
std::shared_ptr<const Context> need_context();
// Closes all contexts, for aclFinalize().
void close_contexts() noexcept;

// In the checked mode, lists at aclFinalize() the objects created since call `first` and not destroyed, by kind and
// place in the program.
class Leaks {
public:
    void add(const std::string &what, const CallSite &creation);
    void report(const Call &call) const;

private:
    struct Leak {
        std::string what;
        CallSite first;
        std::size_t count;
    };
    std::vector<Leak> leaks_;
};
void add_handles(Leaks &leaks, std::uint64_t first);
void add_allocations(Leaks &leaks);
// Destroys the handles of streams and events; close_contexts() destroys contexts.
void close_streams() noexcept;
// Allocates memory of the device or the host, rounded up to its granularity; throws if there is none.
inline constexpr std::size_t small_page = 4096, huge_page = std::size_t{2} << 20;
std::shared_ptr<Allocation> allocate(std::size_t requested, std::size_t grain, bool host, const Call &call);
// Frees the allocation that begins there; throws if `maker` allocated none there.
void release(const void *address, bool host, const char *maker, const Call &call);
// Return the device's allocated bytes and total bytes.
std::size_t held_bytes() noexcept;
std::size_t total_bytes();
// Removes all allocations; destroying the result frees the memory.
using Allocations = std::vector<std::shared_ptr<Allocation>>;
Allocations take_all();

}  // namespace fusion::capi
