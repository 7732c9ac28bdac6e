#include "capi/python.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <limits.h>
#include <spawn.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "capi/errors.h"

namespace fusion::capi {
namespace {

constexpr const char *variable = "FUSION_ATTENTION_PYTHON";

// Queries an interpreter for its paths, in isolated mode so that the program's folder cannot hide modules.
constexpr const char *question = R"(
import os, sys, sysconfig
var = sysconfig.get_config_var
name = f"libpython{var('LDVERSION') or var('VERSION')}.so.1.0"
print(sys.executable, name, sep="\n")
for folder in dict.fromkeys((var("LIBDIR"), os.path.join(sys.base_prefix, "lib"), os.path.join(sys.base_prefix, "lib64"))):
    path = os.path.join(folder or "", name)
    if os.path.exists(path):
        print(path)
)";

bool is_there(const std::string &path, int mode = F_OK) { return access(path.c_str(), mode) == 0; }

std::string parent(const std::string &path) {
    const auto slash = path.rfind('/');
    return slash == std::string::npos ? "" : path.substr(0, slash);
}

// Returns the environment that contains a path: .../lib/python3.11/site-packages/... (for packages of a user, the
// python3.11 of PATH), or a parent folder with an environment in .venv.
std::string environment_of(const std::string &path) {
    std::string version;  // "python3.11", once passed on the way up
    for (std::string at = parent(path); !at.empty(); at = parent(at)) {
        const std::string name = at.substr(at.rfind('/') + 1);
        if (name.rfind("python3", 0) == 0) version = name;
        std::string beside = std::string(at).append("/bin/").append(version);
        if (!version.empty() && is_there(beside, X_OK)) return beside;
        if (is_there(at + "/pyvenv.cfg") && is_there(at + "/bin/python3", X_OK)) return at + "/bin/python3";
        if (is_there(at + "/.venv/pyvenv.cfg")) return at + "/.venv/bin/python3";
    }
    return version;
}

std::string program() {
    if (const char *const setting = getenv(variable); setting && *setting) return setting;
    Dl_info here;
    if (dladdr(reinterpret_cast<const void *>(&program), &here) && here.dli_fname) {
        // The unresolved path comes first: an environment may contain links to another tree.
        if (std::string environment = environment_of(here.dli_fname); !environment.empty()) return environment;
        char real[PATH_MAX];
        if (realpath(here.dli_fname, real)) {
            if (std::string environment = environment_of(real); !environment.empty()) return environment;
        }
    }
    return "python3";
}

// Returns a program's output; "" if it does not run.
std::string output_of(const std::string &program, const char *text) {
    int ends[2];
    if (pipe2(ends, O_CLOEXEC) != 0) return "";
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_addopen(&actions, 0, "/dev/null", O_RDONLY, 0);
    posix_spawn_file_actions_adddup2(&actions, ends[1], 1);
    posix_spawn_file_actions_addopen(&actions, 2, "/dev/null", O_WRONLY, 0);
    const char *const arguments[] = {program.c_str(), "-I", "-c", text, nullptr};
    pid_t child = 0;
    const int failed = posix_spawnp(&child, program.c_str(), &actions, nullptr, const_cast<char **>(arguments),
                                    environ);  // NOLINT(*-const-cast): C's signature
    posix_spawn_file_actions_destroy(&actions);
    close(ends[1]);
    std::string output;
    char buffer[512];
    for (ssize_t got = 0; !failed;) {
        got = read(ends[0], buffer, sizeof buffer);
        if (got > 0) output.append(buffer, static_cast<std::size_t>(got));
        if (got == 0 || (got < 0 && errno != EINTR)) break;
    }
    close(ends[0]);
    // The program may already have waited for its child processes, so the output counts, not the exit status.
    while (!failed && waitpid(child, nullptr, 0) < 0 && errno == EINTR) {
    }
    return output;
}

}  // namespace

Interpreter find_interpreter() {
    const std::string interpreter = program();
    const std::string output = output_of(interpreter, question);
    std::vector<std::string> lines;
    for (std::size_t at = 0, end; (end = output.find('\n', at)) != std::string::npos; at = end + 1)
        lines.push_back(output.substr(at, end - at));
    if (lines.size() < 2)
        throw Refusal(nn_runtime, "Python: expected an interpreter that runs, got ", interpreter, " (set ", variable,
                      " to the one that fusion-attention is installed in)");
    return {lines[0], lines[1], {lines.begin() + 2, lines.end()}};
}

}  // namespace fusion::capi
