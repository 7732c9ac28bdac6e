// The C functions for devices, contexts, streams and events. Streams are synchronous: work is complete when
// the call returns.
#include <chrono>
#include <vector>

#include "acl/acl_rt.h"
#include "capi/runtime.h"

namespace fusion::capi {
namespace {

// The contexts of every device in use, default contexts first; threads refer to them too.
struct Devices {
    std::mutex mutex;
    std::vector<Handle> contexts[device_count];
};

Devices &devices() {
    static Devices &instance = *new Devices;
    return instance;
}

// A thread has one context at a time, as in CANN; a new thread has none.
thread_local Handle current = nullptr;

void need_device(int device) {
    if (device >= 0 && device < device_count) return;
    throw Refusal(rt_invalid_device, "deviceId: expected 0 to ", device_count - 1, ", got ", device);
}

template <class T>
T *need_place(T *place, const char *param) {
    need_address(place, param);
    return place;
}

template <class T>
std::shared_ptr<const T> need_open(Handle handle, const char *param) {
    return need<T>(handle, param, invalid_param, rt_invalid_handle);
}

Handle new_context(int device, bool of_device, const Call &call) {
    auto created = std::make_shared<Context>();
    created->device = device;
    created->of_device = of_device;
    return add(Kind::context, created, call);
}

// The contexts of a device, with a default one. Under the lock of devices().
std::vector<Handle> &in_use(int device, const Call &call) {
    std::vector<Handle> &contexts = devices().contexts[device];
    if (contexts.empty()) contexts.push_back(new_context(device, true, call));
    return contexts;
}

void close(std::vector<Handle> &contexts) noexcept {
    for (Handle handle : contexts) {
        if (const auto ended = remove(handle, Kind::context)) static_cast<const Context &>(*ended).open = false;
    }
    contexts.clear();
}

void synchronize() {
    const DeviceFunctions *functions = device_functions();
    if (functions != nullptr && functions->synchronize() != 0) throw Refusal(rt_internal, functions->error());
}

int create_stream(void **stream, Caller caller = {}) {
    return initialized(
        [&](const Call &call) {
            need_place(stream, "stream");
            auto created = std::make_shared<Stream>();
            created->context = need_context();
            *stream = const_cast<void *>(add(Kind::stream, created, call));
        },
        caller);
}

int destroy_stream(Handle stream, Caller caller = {}) {
    return initialized(
        [&] {
            need_open<Stream>(stream, "stream");
            remove(stream, Kind::stream);
        },
        caller);
}

int create_event(void **event, Caller caller = {}) {
    return initialized(
        [&](const Call &call) {
            need_place(event, "event");
            need_context();
            *event = const_cast<void *>(add(Kind::event, std::make_shared<Event>(), call));
        },
        caller);
}

std::shared_ptr<const Event> need_event(Handle event, const char *param = "event") {
    return need_open<Event>(event, param);
}

void wait_for(Handle stream) {
    need_stream(stream);
    synchronize();
}

void check_timeout(int timeout) {
    if (timeout < -1) throw Refusal(invalid_param, "timeout: expected -1 or milliseconds, got ", timeout);
}

}  // namespace

std::shared_ptr<const Context> need_context() {
    if (auto context = find<Context>(current)) return context;
    throw Refusal(rt_no_context, "no device: this thread calls aclrtSetDevice() first");
}

void need_stream(Handle stream) {
    std::string why;
    if (const int code = check_stream(stream, why)) throw Refusal(code, why);
}

int check_stream(Handle stream, std::string &why) noexcept {
    if (stream == nullptr) {
        if (find<Context>(current) != nullptr) return success;
        why = "stream: the default one has no device: this thread calls aclrtSetDevice() first";
        return rt_no_context;
    }
    const auto object = find<Stream>(stream);
    if (object != nullptr && object->context->open) return success;
    why = "stream: expected an aclrtStream, got " +
          (object != nullptr ? std::string("one of a device that was reset, or a context that was destroyed")
                             : wrong(stream));
    return rt_invalid_handle;
}

void close_contexts() noexcept {
    const std::lock_guard<std::mutex> lock(devices().mutex);
    for (std::vector<Handle> &contexts : devices().contexts) close(contexts);
}

// ------------------------------------------------------------------------------------------------------------ devices

FUSION_C int aclrtSetDevice(std::int32_t deviceId) {
    return initialized([&](const Call &call) {
        need_device(deviceId);
        const std::lock_guard<std::mutex> lock(devices().mutex);
        current = in_use(deviceId, call).front();
    });
}

static int reset(std::int32_t device, Caller caller = {}) {
    return initialized(
        [&] {
            need_device(device);
            synchronize();
            const std::lock_guard<std::mutex> lock(devices().mutex);
            std::vector<Handle> &contexts = devices().contexts[device];
            if (contexts.empty())
                throw Refusal(rt_no_context, "deviceId: ", device, " is not in use (no aclrtSetDevice() before)");
            close(contexts);
        },
        caller);
}

FUSION_C int aclrtResetDevice(std::int32_t deviceId) { return reset(deviceId); }
FUSION_C int aclrtResetDeviceForce(std::int32_t deviceId) { return reset(deviceId); }

FUSION_C int aclrtGetDevice(std::int32_t *deviceId) {
    return initialized([&] { *need_place(deviceId, "deviceId") = need_context()->device; });
}

FUSION_C int aclrtGetDeviceCount(std::uint32_t *count) {
    return initialized([&] { *need_place(count, "count") = device_count; });
}

FUSION_C int aclrtGetRunMode(aclrtRunMode *runMode) {
    return initialized([&] {
        *need_place(runMode, "runMode") = ACL_HOST;  // distinct in the interface, even on "cpu"
    });
}

FUSION_C int aclrtSynchronizeDevice() {
    return initialized([] {
        need_context();
        synchronize();
    });
}

FUSION_C int aclrtSynchronizeDeviceWithTimeout(std::int32_t timeout) {
    return initialized([&] {
        check_timeout(timeout);
        need_context();
        synchronize();
    });
}

// ----------------------------------------------------------------------------------------------------------- contexts

FUSION_C int aclrtCreateContext(void **context, std::int32_t deviceId) {
    return initialized([&](const Call &call) {
        need_device(deviceId);
        need_place(context, "context");
        const std::lock_guard<std::mutex> lock(devices().mutex);
        std::vector<Handle> &contexts = in_use(deviceId, call);
        contexts.push_back(new_context(deviceId, false, call));
        current = contexts.back();
        *context = const_cast<void *>(current);
    });
}

FUSION_C int aclrtDestroyContext(void *context) {
    return initialized([&] {
        const auto object = need_open<Context>(context, "context");
        if (object->of_device)
            throw Refusal(invalid_param, "context: a device's default one ends with aclrtResetDevice()");
        const std::lock_guard<std::mutex> lock(devices().mutex);
        std::vector<Handle> &contexts = devices().contexts[object->device];
        std::erase(contexts, context);
        object->open = false;
        remove(context, Kind::context);
    });
}

FUSION_C int aclrtSetCurrentContext(void *context) {
    return initialized([&] {
        need_open<Context>(context, "context");
        current = context;
    });
}

FUSION_C int aclrtGetCurrentContext(void **context) {
    return initialized([&] {
        need_place(context, "context");
        need_context();
        *context = const_cast<void *>(current);
    });
}

// ------------------------------------------------------------------------------------------------------------ streams

FUSION_C int aclrtCreateStream(void **stream) { return create_stream(stream); }
FUSION_C int aclrtCreateStreamWithConfig(void **stream, std::uint32_t /*priority*/, std::uint32_t /*flag*/) {
    return create_stream(stream);
}
FUSION_C int aclrtDestroyStream(void *stream) { return destroy_stream(stream); }
FUSION_C int aclrtDestroyStreamForce(void *stream) { return destroy_stream(stream); }

FUSION_C int aclrtSynchronizeStream(void *stream) {
    return initialized([&] { wait_for(stream); });
}

FUSION_C int aclrtSynchronizeStreamWithTimeout(void *stream, std::int32_t timeout) {
    return initialized([&] {
        check_timeout(timeout);
        wait_for(stream);
    });
}

FUSION_C int aclrtStreamQuery(void *stream, aclrtStreamStatus *status) {
    return initialized([&] {
        need_stream(stream);
        *need_place(status, "status") = ACL_STREAM_STATUS_COMPLETE;
    });
}

FUSION_C int aclrtStreamWaitEvent(void *stream, void *event) {
    return initialized([&] {
        need_event(event);
        need_stream(stream);
    });
}

// ------------------------------------------------------------------------------------------------------------- events

FUSION_C int aclrtCreateEvent(void **event) { return create_event(event); }
FUSION_C int aclrtCreateEventWithFlag(void **event, std::uint32_t /*flag*/) { return create_event(event); }
FUSION_C int aclrtCreateEventExWithFlag(void **event, std::uint32_t /*flag*/) { return create_event(event); }

FUSION_C int aclrtDestroyEvent(void *event) {
    return initialized([&] {
        need_event(event);
        remove(event, Kind::event);
    });
}

FUSION_C int aclrtRecordEvent(void *event, void *stream) {
    return initialized([&] {
        const auto object = need_event(event);
        wait_for(stream);
        const auto now = std::chrono::steady_clock::now().time_since_epoch();
        object->nanoseconds = std::chrono::duration_cast<std::chrono::nanoseconds>(now).count();
    });
}

FUSION_C int aclrtResetEvent(void *event, void *stream) {
    return initialized([&] {
        const auto object = need_event(event);
        need_stream(stream);
        object->nanoseconds = -1;
    });
}

template <class Status>
static int query(void *event, Status *status, Status done, Status not_yet, Caller caller = {}) {
    return initialized(
        [&] {
            const auto object = need_event(event);
            *need_place(status, "status") = object->nanoseconds >= 0 ? done : not_yet;
        },
        caller);
}

FUSION_C int aclrtQueryEvent(void *event, aclrtEventStatus *status) {
    return query(event, status, ACL_EVENT_STATUS_COMPLETE, ACL_EVENT_STATUS_NOT_READY);
}

FUSION_C int aclrtQueryEventStatus(void *event, aclrtEventRecordedStatus *status) {
    return query(event, status, ACL_EVENT_RECORDED_STATUS_COMPLETE, ACL_EVENT_RECORDED_STATUS_NOT_READY);
}

// Waiting returns immediately, because streams are synchronous.
FUSION_C int aclrtQueryEventWaitStatus(void *event, aclrtEventWaitStatus *status) {
    return query(event, status, ACL_EVENT_WAIT_STATUS_COMPLETE, ACL_EVENT_WAIT_STATUS_COMPLETE);
}

FUSION_C int aclrtSynchronizeEvent(void *event) {
    return initialized([&] { need_event(event); });
}

FUSION_C int aclrtSynchronizeEventWithTimeout(void *event, std::int32_t timeout) {
    return initialized([&] {
        need_event(event);
        check_timeout(timeout);
    });
}

FUSION_C int aclrtEventElapsedTime(float *ms, void *startEvent, void *endEvent) {
    return initialized([&] {
        const auto start = need_event(startEvent, "startEvent"), end = need_event(endEvent, "endEvent");
        need_place(ms, "ms");
        const std::int64_t from = start->nanoseconds, to = end->nanoseconds;
        if (from < 0 || to < 0)
            throw Refusal(rt_event_timestamp, from < 0 ? "startEvent" : "endEvent", ": never recorded");
        if (to < from) throw Refusal(rt_event_reversal, "endEvent: recorded before startEvent");
        *ms = static_cast<float>(static_cast<double>(to - from) * 1e-6);
    });
}

}  // namespace fusion::capi
