// Compiled for the baseline instruction set.

#include "system.h"
#include "system_posix.h"

#include <cstdint>
#include <cstdlib>

#include <dlfcn.h>
#include <pthread.h>
#include <sys/sysctl.h>
#include <time.h>

namespace fusion::system {
namespace {

std::uint64_t number(const char *name) {  // 0 if the system lacks it; small numbers fill the low bytes
    std::uint64_t value = 0;
    std::size_t bytes = sizeof value;
    return sysctlbyname(name, &value, &bytes, nullptr, 0) == 0 ? value : 0;
}

}  // namespace

void *allocate(std::size_t alignment, std::size_t bytes) { return std::aligned_alloc(alignment, bytes); }

void release(void *memory) { std::free(memory); }

std::chrono::nanoseconds thread_time() {
    timespec time;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
    return std::chrono::seconds(time.tv_sec) + std::chrono::nanoseconds(time.tv_nsec);
}

// The cache of a cluster of fast cores, which share it.
std::size_t second_level_cache() { return static_cast<std::size_t>(number("hw.perflevel0.l2cachesize")); }

std::vector<std::string> arm_features() {
    struct Feature {
        const char *name, *key;
    };
    constexpr Feature features[] = {
        {"asimd", "hw.optional.AdvSIMD"},         {"crc32", "hw.optional.armv8_crc32"},
        {"atomics", "hw.optional.arm.FEAT_LSE"},  {"asimdhp", "hw.optional.arm.FEAT_FP16"},
        {"asimdrdm", "hw.optional.arm.FEAT_RDM"}, {"asimddp", "hw.optional.arm.FEAT_DotProd"},
        {"i8mm", "hw.optional.arm.FEAT_I8MM"},    {"bf16", "hw.optional.arm.FEAT_BF16"},
    };
    std::vector<std::string> out;
    for (const Feature &feature : features) {
        if (number(feature.key)) out.emplace_back(feature.name);
    }
    return out;
}

void after_fork(void (*child)()) { pthread_atfork(nullptr, nullptr, child); }

// torch's packages for macOS bring LLVM's runtime, which has these entries of GNU's too.
bool find_openmp(const std::vector<const char *> &names, std::vector<void *> &entries) {
    const auto in = [&](void *library) { return functions_of(library, names, entries); };
    if (in(RTLD_DEFAULT)) return true;
    for (const char *name : {"@rpath/libtorch_cpu.dylib", "libtorch_cpu.dylib", "libomp.dylib"}) {
        void *const library = dlopen(name, RTLD_LAZY | RTLD_NOLOAD);
        if (library && in(library)) return true;
    }
    return false;
}

}  // namespace fusion::system
