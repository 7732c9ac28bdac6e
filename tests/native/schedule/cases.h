// The calls whose schedules are looked at.

#pragma once

#include <functional>
#include <string>
#include <vector>

namespace schedule {

using Run = std::function<void(int threads)>;

struct Case {
    std::string family, name;
    std::function<Run()> plan;  // makes a plan; what it returns runs it
};

std::vector<Case> cases();

}  // namespace schedule
