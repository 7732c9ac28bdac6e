// Which Python this library belongs to.
#pragma once

#include <string>
#include <vector>

namespace fusion::capi {

struct Interpreter {
    std::string program;                 // its own file: a virtual environment is found from there
    std::string name;                    // "libpython3.11.so.1.0"
    std::vector<std::string> libraries;  // files of that name, the likeliest first; none: it has no shared library
};

// FUSION_ATTENTION_PYTHON, or the environment that this library lies in, or a source tree's .venv, or python3 of PATH.
// Throws a Refusal where none runs.
Interpreter find_interpreter();

}  // namespace fusion::capi
