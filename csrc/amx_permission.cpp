// Compiled for the baseline instruction set. Tile instructions, which run only after the system has granted tile
// registers, are written as bytes, since older assemblers do not support them.

#include "amx_permission.h"

#include <atomic>
#include <cerrno>
#include <cstring>

#if defined(__x86_64__) && defined(__linux__)
#define FUSION_ASKS_FOR_TILES
#include <sys/auxv.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace fusion {
namespace {

[[maybe_unused]] std::atomic<bool> granted = false;

std::string ask() {
#if defined(FUSION_ASKS_FOR_TILES)
    constexpr long request = 0x1023, tile_data = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILE_DATA
    if (syscall(SYS_arch_prctl, request, tile_data) != 0) return tile_refusal_of(errno);
    granted = true;
    return "";
#else
    return "this system has no tiles";
#endif
}

}  // namespace

std::string tile_refusal_of(int error) {
    const std::string refused = "the system refuses memory for tiles";
    if (error != ENOSPC) return refused + " (" + std::strerror(error) + ")";
    std::string room;
#if defined(FUSION_ASKS_FOR_TILES)
    constexpr unsigned long least_stack = 51;  // AT_MINSIGSTKSZ, which older headers lack
    if (const unsigned long bytes = getauxval(least_stack)) room = ", which takes " + std::to_string(bytes) + " bytes";
#endif
    return refused + ": the signal stack (sigaltstack) of a thread is too small for their state" + room;
}

const std::string &tile_refusal() {
    static const std::string reason = ask();
    return reason;
}

KeptTiles::KeptTiles() {
#if defined(FUSION_ASKS_FOR_TILES)
    if (granted) __asm__ volatile(".byte 0xc4, 0xe2, 0x79, 0x49, 0x07" ::"D"(config_) : "memory");  // sttilecfg (%rdi)
#endif
}

KeptTiles::~KeptTiles() {
#if defined(FUSION_ASKS_FOR_TILES)
    if (!config_[0]) return;                                                           // tiles were not configured
    __asm__ volatile(".byte 0xc4, 0xe2, 0x78, 0x49, 0x07" ::"D"(config_) : "memory");  // ldtilecfg (%rdi)
#endif
}

}  // namespace fusion
