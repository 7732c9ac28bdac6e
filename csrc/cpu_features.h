// Features of the CPU that the process runs on, by the names of /proc/cpuinfo.

#pragma once

#include <cstddef>
#include <string>
#include <vector>

namespace fusion {

// The features among those that variants or callers use, in a fixed order; features whose registers the operating
// system does not save are left out.
std::vector<std::string> find_features();

// True for Intel's processors: a vector product of bfloat16 pairs (VDPBF16PS) takes as long as four multiply-adds of
// float32 there (Emerald Rapids), as long as one on AMD's. Tile products are not affected.
bool has_slow_pairs();

// Bytes of a core's second-level cache as the system tells, between 512 KiB and 2 MiB: larger values were not measured:
// it would bring. 1 MiB where it does not tell.
std::size_t second_level_cache();

}  // namespace fusion
