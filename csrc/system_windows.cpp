// Compiled for the baseline instruction set.

#include "system.h"

#include <cstdint>
#include <malloc.h>

#define WIN32_LEAN_AND_MEAN
#include <windows.h>

namespace fusion::system {

void *allocate(std::size_t alignment, std::size_t bytes) { return _aligned_malloc(bytes, alignment); }

void release(void *memory) { _aligned_free(memory); }

std::chrono::nanoseconds thread_time() {
    FILETIME created, ended, kernel, user;
    if (!GetThreadTimes(GetCurrentThread(), &created, &ended, &kernel, &user)) return std::chrono::nanoseconds(0);
    const auto ticks = [](const FILETIME &time) {  // of 100 nanoseconds
        return static_cast<std::int64_t>(time.dwHighDateTime) << 32 | time.dwLowDateTime;
    };
    return std::chrono::nanoseconds(100 * (ticks(kernel) + ticks(user)));
}

std::size_t second_level_cache() {
    DWORD bytes = 0;
    GetLogicalProcessorInformation(nullptr, &bytes);
    std::vector<SYSTEM_LOGICAL_PROCESSOR_INFORMATION> rows(bytes / sizeof(SYSTEM_LOGICAL_PROCESSOR_INFORMATION));
    if (rows.empty() || !GetLogicalProcessorInformation(rows.data(), &bytes)) return 0;
    for (const SYSTEM_LOGICAL_PROCESSOR_INFORMATION &row : rows) {
        if (row.Relationship == RelationCache && row.Cache.Level == 2) return row.Cache.Size;
    }
    return 0;
}

std::vector<std::string> arm_features() { return {}; }  // only x86-64 is built

void after_fork(void (*)()) {}

// torch for Windows uses Microsoft's or Intel's runtime, neither of which has the entries of GNU's.
bool find_openmp(const std::vector<const char *> &, std::vector<void *> &) { return false; }

}  // namespace fusion::system
