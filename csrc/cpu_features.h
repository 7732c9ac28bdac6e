// What the CPU has that this runs on, by the names of /proc/cpuinfo.

#pragma once

#include <cstddef>
#include <string>
#include <vector>

namespace fusion {

// Of the features that a variant needs, or that anyone here asks about; none that the operating system does not save
// registers for. In a fixed order.
std::vector<std::string> find_features();

// Bytes of a core's second-level cache as the system tells, between 512 KiB and 2 MiB: larger values were not measured:
// it would bring. 1 MiB where it does not tell.
std::size_t second_level_cache();

}  // namespace fusion
