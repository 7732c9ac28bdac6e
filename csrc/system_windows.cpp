// Compiled for the baseline instruction set.

#include "system.h"

#include <malloc.h>

#define WIN32_LEAN_AND_MEAN
#include <windows.h>

namespace fusion::system {

void *allocate(std::size_t alignment, std::size_t bytes) { return _aligned_malloc(bytes, alignment); }

void release(void *memory) { _aligned_free(memory); }

// Windows counts CPU time in ticks of 16 ms, which is longer than the calls that are judged by it.
std::chrono::nanoseconds thread_time() { return std::chrono::steady_clock::now().time_since_epoch(); }

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
