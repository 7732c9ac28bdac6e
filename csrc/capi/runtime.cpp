#include "capi/runtime.h"

#include <dlfcn.h>

#include <algorithm>
#include <cstring>

#include "acl/acl.h"

namespace fusion::capi {
namespace {

struct Process {
    std::mutex mutex;  // held for all of aclInit() and aclFinalize()
    // Locked only briefly: operators read the settings, some under Python's lock, for which aclInit() may wait.
    std::mutex settings_mutex;
    std::shared_ptr<const Settings> settings;
    bool finalized = false;
    bool by_operators = false;  // begun by aclnnInit() alone, so that aclnnFinalize() ends it

    std::atomic<bool> running = false, checked = false, abort = false;
    std::atomic<std::uint64_t> calls = 0;
    std::uint64_t first = 0;  // calls before this aclInit()
    DeviceFunctions table{};
    std::atomic<const DeviceFunctions *> functions = nullptr;
};

Process &process() {
    static Process &instance = *new Process;
    return instance;
}

// libopapi is in this library's folder and provides Python and torch.
void fill(DeviceFunctions &table, const std::string &device) {
    Dl_info info;
    const std::string path = dladdr(reinterpret_cast<void *>(&process), &info) != 0 ? info.dli_fname : "";
    const std::string other = path.substr(0, path.rfind('/') + 1) + "libopapi.so";
    void *library = dlopen(other.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) throw Refusal(rt_no_device, "device: ", device, ": ", dlerror());
    const auto ask = reinterpret_cast<DeviceFunctionsOf>(dlsym(library, device_functions_of));
    char text[512] = "libopapi has no memory functions";
    if (ask == nullptr || !ask(device.c_str(), &table, text, sizeof text))
        throw Refusal(rt_no_device, "device: ", device, ": ", text);
}

}  // namespace

bool checked() noexcept { return process().checked.load(std::memory_order_relaxed); }
bool aborts() noexcept { return process().abort.load(std::memory_order_relaxed); }
std::uint64_t next_call() noexcept { return process().calls.fetch_add(1) + 1; }
const DeviceFunctions *device_functions() noexcept { return process().functions.load(); }

std::shared_ptr<const Settings> settings() noexcept {
    Process &state = process();
    const std::lock_guard<std::mutex> lock(state.settings_mutex);
    return state.settings;
}

void Leaks::add(const std::string &what, const CallSite &creation) {
    for (Leak &leak : leaks_) {
        if (leak.first.caller == creation.caller && leak.what == what) {
            if (creation.number < leak.first.number) leak.first = creation;
            ++leak.count;
            return;
        }
    }
    leaks_.push_back({what, creation, 1});
}

void Leaks::report(const Call &call) const {
    std::vector<Leak> sorted = leaks_;
    std::sort(sorted.begin(), sorted.end(),
              [](const Leak &a, const Leak &b) { return a.first.number < b.first.number; });
    for (const Leak &leak : sorted) {
        const std::string times = leak.count == 1 ? "" : ", " + std::to_string(leak.count) + " times, the first";
        call.defect("leak: ", leak.what, " is still there", times, in_brackets(leak.first));
    }
}

void need_init() {
    if (!process().running) throw Refusal(uninitialized, "called before aclInit() or after aclFinalize()");
}

namespace {

void set_settings(Process &state, std::shared_ptr<const Settings> settings) {
    const std::lock_guard<std::mutex> lock(state.settings_mutex);
    state.settings.swap(settings);
}

// Starts the runtime; the caller holds the lock of the process, whose runtime does not run.
void begin(Process &state, const char *path) {
    Configuration configuration = configuration_of(path);
    state.functions = nullptr;
    if (configuration.functions || configuration.settings.device != "cpu") {
        fill(state.table, configuration.settings.device);
        state.functions = &state.table;
    }
    set_settings(state, std::make_shared<const Settings>(configuration.settings));
    state.first = state.calls;
    state.checked = configuration.settings.checked;
    state.abort = configuration.abort;
    state.running = true;
}

// Ends the runtime; the caller holds the lock of the process. Returns its memory, which the caller frees after it
// releases the lock: freeing may need Python's lock, whose holder may wait for this one.
Allocations end(Process &state, const Call &call) {
    if (state.checked) {
        Leaks leaks;
        add_handles(leaks, state.first);
        add_allocations(leaks);
        leaks.report(call);
    }
    state.running = false;
    state.finalized = true;
    state.checked = false;
    set_settings(state, nullptr);
    close_streams();
    close_contexts();
    return take_all();
}

}  // namespace

// The runtime starts once, by the first call. After aclnnInit() the first aclInit() takes it over.
FUSION_C int aclInit(const char *configPath) {
    return coded([&] {
        Process &state = process();
        const std::lock_guard<std::mutex> lock(state.mutex);
        if (state.running && !state.by_operators)
            throw Refusal(repeat_initialize, "called before; aclFinalize() ends the running one");
        if (!state.running) begin(state, configPath);
        state.by_operators = false;
    });
}

FUSION_C int aclFinalize() {
    return coded([&](const Call &call) {
        Process &state = process();
        Allocations ended;  // freed last, after the lock is released
        const std::lock_guard<std::mutex> lock(state.mutex);
        if (!state.running)
            throw Refusal(state.finalized ? repeat_finalize : uninitialized, "called twice, or before aclInit()");
        ended = end(state, call);
    });
}

int begin_operators(const char *path, Caller caller) noexcept {
    return coded(
        [&] {
            Process &state = process();
            const std::lock_guard<std::mutex> lock(state.mutex);
            if (state.running) return;
            begin(state, path);
            state.by_operators = true;
        },
        caller);
}

int end_operators(Caller caller) noexcept {
    return coded(
        [&](const Call &call) {
            Process &state = process();
            Allocations ended;  // freed last, after the lock is released
            const std::lock_guard<std::mutex> lock(state.mutex);
            if (state.running && state.by_operators) ended = end(state, call);
        },
        caller);
}

}  // namespace fusion::capi
