// Functions that system_linux.cpp and system_macos.cpp share.

#pragma once

#include <cstddef>
#include <vector>

#include <dlfcn.h>

namespace fusion::system {

// Sets each of `entries` to the library's function of that name; false if it lacks one.
inline bool functions_of(void *library, const std::vector<const char *> &names, std::vector<void *> &entries) {
    for (std::size_t i = 0; i < names.size(); ++i) {
        entries[i] = dlsym(library, names[i]);
        if (!entries[i]) return false;
    }
    return true;
}

}  // namespace fusion::system
