// Compiled for the baseline instruction set.

#include "system.h"
#include "system_posix.h"

#include <cstdlib>

#include <dlfcn.h>
#include <pthread.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#if defined(__aarch64__)
#include <sys/auxv.h>
#endif

namespace fusion::system {

void *allocate(std::size_t alignment, std::size_t bytes) {
    constexpr std::size_t huge = std::size_t{2} << 20;
    void *const memory = std::aligned_alloc(alignment, bytes);
    if (memory && alignment == huge) madvise(memory, bytes, MADV_HUGEPAGE);  // advice: failure is harmless
    return memory;
}

void release(void *memory) { std::free(memory); }

std::chrono::nanoseconds thread_time() {
    timespec time;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
    return std::chrono::seconds(time.tv_sec) + std::chrono::nanoseconds(time.tv_nsec);
}

std::size_t second_level_cache() {
#if defined(_SC_LEVEL2_CACHE_SIZE)  // glibc's
    const long bytes = sysconf(_SC_LEVEL2_CACHE_SIZE);
    if (bytes > 0) return static_cast<std::size_t>(bytes);
#endif
    return 0;
}

std::vector<std::string> arm_features() {
    std::vector<std::string> out;
#if defined(__aarch64__)
    struct Bit {  // numbers, since older systems' headers lack the newer names
        const char *name;
        unsigned long vector;
        int position;
    };
    constexpr Bit bits[] = {
        {"asimd", AT_HWCAP, 1},     {"crc32", AT_HWCAP, 7},    {"atomics", AT_HWCAP, 8}, {"asimdhp", AT_HWCAP, 10},
        {"asimdrdm", AT_HWCAP, 12}, {"asimddp", AT_HWCAP, 20}, {"sve", AT_HWCAP, 22},    {"sve2", AT_HWCAP2, 1},
        {"i8mm", AT_HWCAP2, 13},    {"bf16", AT_HWCAP2, 14},
    };
    for (const Bit &bit : bits) {
        if (getauxval(bit.vector) >> bit.position & 1) out.emplace_back(bit.name);
    }
#endif
    return out;
}

void after_fork(void (*child)()) { pthread_atfork(nullptr, nullptr, child); }

// Global symbols of the process come first, as for torch; then torch's own library, whatever its runtime is called; the
// last one is for programs without torch.
bool find_openmp(const std::vector<const char *> &names, std::vector<void *> &entries) {
    const auto in = [&](void *library) { return functions_of(library, names, entries); };
    if (in(RTLD_DEFAULT)) return true;
    void *const torch = dlopen("libtorch_cpu.so", RTLD_LAZY | RTLD_NOLOAD);
    if (torch && in(torch)) return true;
    void *const alone = dlopen("libgomp.so.1", RTLD_LAZY);
    return alone && in(alone);
}

}  // namespace fusion::system
