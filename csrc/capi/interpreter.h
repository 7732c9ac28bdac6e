// Finds the Python of this library.
#pragma once

#include <string>
#include <vector>

namespace fusion::capi {

struct Interpreter {
    std::string program;                 // its executable, from which Python finds a virtual environment
    std::string name;                    // "libpython3.11.so.1.0"
    std::vector<std::string> libraries;  // candidate files of that name, most likely first; empty: no shared library
};

// Returns the interpreter of FUSION_ATTENTION_PYTHON, or of the environment that contains this library, or of a source
// tree's .venv, or python3 of PATH. Throws a Refusal if none runs.
Interpreter find_interpreter();

}  // namespace fusion::capi
