#include "capi/handles.h"

#include <iterator>
#include <mutex>
#include <unordered_map>
#include <utility>

#include "capi/runtime.h"

namespace fusion::capi {
namespace {

// A handle is tag | kind | count << 8.
constexpr std::uintptr_t tag = handle_tag << 48;
constexpr int kind_at = 44, count_at = 8;
constexpr std::uintptr_t counts = (std::uintptr_t{1} << (kind_at - count_at)) - 1;

struct Registry {
    std::mutex mutex;
    std::uintptr_t last = 0;
    std::unordered_map<std::uintptr_t, std::shared_ptr<Object>> objects;
};

Registry &registry() {
    static Registry &instance = *new Registry;
    return instance;
}

std::uintptr_t number(Handle handle) { return reinterpret_cast<std::uintptr_t>(handle); }

bool is_tagged(std::uintptr_t handle) {
    const std::uintptr_t kind = handle >> kind_at & 15;
    return handle >> 48 == handle_tag && (handle & 255) == 0 && kind < std::size(names);
}

bool is_of(Handle handle, Kind kind) {
    return is_tagged(number(handle)) && (number(handle) >> kind_at & 15) == static_cast<std::uintptr_t>(kind);
}

// Returns use(registry, position) of a live handle of that kind, under the registry's lock; null for other handles.
template <class Use>
std::shared_ptr<Object> with_live(Handle handle, Kind kind, Use use) {
    if (!is_of(handle, kind)) return nullptr;
    Registry &all = registry();
    const std::lock_guard<std::mutex> lock(all.mutex);
    const auto entry = all.objects.find(number(handle));
    return entry == all.objects.end() ? nullptr : use(all, entry);
}

}  // namespace

Handle add(Kind kind, const std::shared_ptr<Object> &object, const Call &call) noexcept {
    object->creation = call.site();
    Registry &all = registry();
    const std::lock_guard<std::mutex> lock(all.mutex);
    std::uintptr_t handle = 0;
    do {
        all.last = all.last == counts ? 1 : all.last + 1;
        handle = tag | static_cast<std::uintptr_t>(kind) << kind_at | all.last << count_at;
    } while (!all.objects.emplace(handle, object).second);
    return reinterpret_cast<Handle>(handle);  // NOLINT(performance-no-int-to-ptr)
}

std::shared_ptr<Object> look_up(Handle handle, Kind kind) noexcept {
    return with_live(handle, kind, [](Registry &, auto entry) { return entry->second; });
}

bool replace(Handle handle, Kind kind, std::shared_ptr<Object> object) noexcept {
    const auto replaced = with_live(handle, kind, [&](Registry &, auto entry) {
        object->creation = entry->second->creation;
        return std::exchange(entry->second, object);
    });
    return replaced != nullptr;
}

std::shared_ptr<Object> remove(Handle handle, Kind kind) noexcept {
    return with_live(handle, kind, [](Registry &all, auto entry) {
        std::shared_ptr<Object> object = std::move(entry->second);
        all.objects.erase(entry);
        return object;
    });
}

bool ended(Handle handle, Kind kind) noexcept {
    if (!is_of(handle, kind) || look_up(handle, kind) != nullptr) return false;
    const std::uintptr_t count = number(handle) >> count_at & counts;
    Registry &all = registry();
    const std::lock_guard<std::mutex> lock(all.mutex);
    return count != 0 && count <= all.last;
}

std::string wrong(Handle handle) noexcept {
    if (handle == nullptr) return "null";
    if (is_tagged(number(handle))) {
        const auto kind = static_cast<Kind>(number(handle) >> kind_at & 15);
        std::string name = std::string("an ") + name_of(kind);
        if (look_up(handle, kind) != nullptr) return name;
        const char *how = kind == Kind::executor ? " that has run, or was destroyed" : " that was destroyed";
        if (ended(handle, kind)) return name + how;
    }
    return "an address that is no handle";
}

void add_handles(Leaks &leaks, std::uint64_t first) {
    Registry &all = registry();
    const std::lock_guard<std::mutex> lock(all.mutex);
    for (const auto &[handle, object] : all.objects) {
        const auto kind = handle >> kind_at & 15;
        const bool context = kind == static_cast<std::uintptr_t>(Kind::context);
        if (context && static_cast<const Context &>(*object).of_device) continue;
        if (object->creation.number > first) leaks.add(std::string("an ") + names[kind], object->creation);
    }
}

void close_streams() noexcept {
    Registry &all = registry();
    const std::lock_guard<std::mutex> lock(all.mutex);
    std::erase_if(all.objects, [](const auto &one) {
        const auto kind = static_cast<Kind>(one.first >> kind_at & 15);
        return kind == Kind::stream || kind == Kind::event;
    });
}

}  // namespace fusion::capi
