// What the CPU has that this runs on, by the names of /proc/cpuinfo.

#pragma once

#include <string>
#include <vector>

namespace fusion {

// Of the features that a variant needs, or that anyone here asks about; none that the operating system does not save
// registers for. In a fixed order.
std::vector<std::string> find_features();

}  // namespace fusion
