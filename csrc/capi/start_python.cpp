#include "capi/python.h"

#include <dlfcn.h>
#include <signal.h>

#include <atomic>
#include <clocale>
#include <mutex>

#include "capi/errors.h"

namespace fusion::capi {
namespace {

// The process's Python and the functions called in it. Never unloaded, because threads may execute in it
// until the process ends.
Python functions;
Entry entries;
std::atomic<bool> started = false;

template <class Function>
void take(void *library, const char *name, Function &function) {
    function = reinterpret_cast<Function>(dlsym(library, name));
    if (!function) throw Refusal(nn_runtime, "Python: expected CPython 3.10 or later, got one without ", name);
}

Python functions_of(void *library) {
    Python py = {};
#define FUSION_TAKE(result, name, parameters) take(library, #name, py.name);
    FUSION_PYTHON(FUSION_TAKE)
#undef FUSION_TAKE
    take(library, "_Py_NoneStruct", py.none);
    return py;
}

// Opens the library of this library's interpreter; its symbols are global, as extension modules require.
void *opened(const Interpreter &interpreter) {
    std::string why;
    for (const std::string &path : interpreter.libraries) {
        if (void *const library = dlopen(path.c_str(), RTLD_NOW | RTLD_GLOBAL)) return library;
        why = std::string(": ") + dlerror();
    }
    const std::string package = interpreter.name.substr(0, interpreter.name.find(".so"));
    throw Refusal(nn_runtime, "Python: expected an interpreter with a shared library, got ", interpreter.program,
                  " without ", interpreter.name, why, " (install ", package,
                  ", as Debian and Ubuntu call the package, or an interpreter that has one)");
}

// Starts Python as its executable would, without changing the calling program's signals, locale, and the
// variables of its environment, which may be meant for another Python.
void start(const Python &py, void *library, const std::string &program) {
    if (int *const ignores = static_cast<int *>(dlsym(library, "Py_IgnoreEnvironmentFlag"))) *ignores = 1;
    wchar_t *const name = py.Py_DecodeLocale(program.c_str(), nullptr);  // never freed: Python uses it until it ends
    if (!name) throw Refusal(nn_runtime, "Python: its path cannot be decoded: ", program);
    const char *const before = std::setlocale(LC_CTYPE, nullptr);
    const std::string locale = before ? before : "C";
    struct sigaction interrupt = {};
    sigaction(SIGINT, nullptr, &interrupt);
    py.Py_SetProgramName(name);
    py.Py_InitializeEx(0);
    // The first import of this module gives SIGINT to Python, which was configured not to take it.
    const Reference signals(py, py.PyImport_ImportModule("signal"));
    sigaction(SIGINT, &interrupt, nullptr);
    std::setlocale(LC_CTYPE, locale.c_str());
}

// Returns Python's functions: of a running interpreter, else of one that it starts.
Python run_python() {
    static std::mutex starting;  // No thread holds Python's lock here: there is no Python yet.
    const std::lock_guard<std::mutex> lock(starting);
    void *const process = dlopen(nullptr, RTLD_NOW);
    if (dlsym(process, "Py_IsInitialized")) {
        const Python py = functions_of(process);
        if (py.Py_IsInitialized()) return py;
    }
    const Interpreter interpreter = find_interpreter();
    void *const library = opened(interpreter);
    const Python py = functions_of(library);
    if (!py.Py_IsInitialized()) {
        start(py, library, interpreter.program);
        py.PyEval_SaveThread();
    }
    return py;
}

// Returns sys.executable.
std::string executable(const Python &py) {
    const Reference sys(py, py.PyImport_ImportModule("sys"));
    const Reference path(py, sys.get() ? py.PyObject_GetAttrString(sys.get(), "executable") : nullptr);
    const char *const text = path.get() ? py.PyUnicode_AsUTF8AndSize(path.get(), nullptr) : nullptr;
    const std::string program = text ? text : "this Python";
    py.PyErr_Clear();
    return program;
}

// Under the lock. Python's own lock of imports lets one thread do this, others wait for it.
Entry import_entry(const Python &py) {
    const Reference module(py, py.PyImport_ImportModule("fusion_attention.capi.entry"));
    if (!module.get()) {
        const std::string why = exception_text(py);
        throw Refusal(nn_runtime, "Python: fusion_attention cannot be imported by ", executable(py), ": ", why,
                      " (install it there, or set FUSION_ATTENTION_PYTHON to the interpreter that has it)");
    }
    return {py.PyObject_GetAttrString(module.get(), "plan"), py.PyObject_GetAttrString(module.get(), "run"),
            py.PyObject_GetAttrString(module.get(), "DeviceMemory")};
}

}  // namespace

PyObject *tuple_of(const Python &py, std::span<PyObject *const> items) {
    PyObject *const tuple = py.PyTuple_New(static_cast<std::ptrdiff_t>(items.size()));
    for (std::size_t i = 0; i < items.size(); ++i) py.PyTuple_SetItem(tuple, static_cast<std::ptrdiff_t>(i), items[i]);
    return tuple;
}

PyObject *called(const Python &py, PyObject *function, std::span<PyObject *const> arguments) {
    const Reference tuple(py, tuple_of(py, arguments));
    return py.PyObject_CallObject(function, tuple.get());
}

std::string exception_text(const Python &py) {
    PyObject *type = nullptr, *value = nullptr, *traceback = nullptr;
    py.PyErr_Fetch(&type, &value, &traceback);
    const Reference held_type(py, type), held_value(py, value), held_traceback(py, traceback);
    const Reference text(py, value ? py.PyObject_Str(value) : nullptr);
    const char *const message = text.get() ? py.PyUnicode_AsUTF8AndSize(text.get(), nullptr) : nullptr;
    std::string result = message ? message : "an error without a text";
    py.PyErr_Clear();
    return result;
}

const Python &python() {
    if (!started.load(std::memory_order_acquire)) {
        const Python py = run_python();
        const Locked locked(py);
        const Entry imported = import_entry(py);  // may let other threads run
        if (!started.load(std::memory_order_relaxed)) {
            functions = py;
            entries = imported;
            started.store(true, std::memory_order_release);
        }
    }
    return functions;
}

const Python *running_python() noexcept {
    return started.load(std::memory_order_acquire) && functions.Py_IsInitialized() ? &functions : nullptr;
}

const Entry &entry() noexcept { return entries; }

}  // namespace fusion::capi
