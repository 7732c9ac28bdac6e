// torch's interfaces of an accelerator: number of devices, current device, streams, events, pinned memory, profiler.
// With CUDA as the computing device they call CUDA's; on a host they are implemented here.
#include <ATen/Context.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/_fused_sdp_choice_ops.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/profiler/stubs/base.h>
#include <torch/csrc/utils/device_lazy_init.h>

#include <array>
#include <atomic>
#include <chrono>
#include <limits>
#include <utility>

#include "generator.h"
#include "storage_aliases.h"
#include "runtime.h"

namespace fusion_npu {
namespace {

std::atomic<bool> present{false};
std::atomic<int> count{0};  // number of devices at the last activation; their tensors outlive a deactivation

// On a host a device is only a number: this thread's current device, its current stream on each device, and the number
// of streams made.
thread_local DeviceIndex current = 0;
thread_local std::array<c10::StreamId, std::numeric_limits<DeviceIndex>::max() + 1> current_streams{};
std::atomic<c10::StreamId> streams{0};

bool on_host() { return base() == DeviceType::CPU; }
int64_t now() { return std::chrono::steady_clock::now().time_since_epoch() / std::chrono::nanoseconds(1); }

c10::Stream stream_of(Device d, c10::StreamId id) { return c10::Stream(c10::Stream::UNSAFE, d, id); }

// Maps npu:i to device i of the computing device, and back.
struct Guard final : c10::impl::DeviceGuardImplInterface {
    static c10::impl::VirtualGuardImpl inner() { return c10::impl::VirtualGuardImpl(base()); }
    static Device out(Device d) { return {NPU, d.index()}; }
    static Device in(Device d) { return {base(), d.index()}; }
    static c10::Stream out(c10::Stream s) { return stream_of(out(s.device()), s.id()); }
    static c10::Stream in(c10::Stream s) { return stream_of(in(s.device()), s.id()); }

    DeviceType type() const override { return NPU; }
    Device exchangeDevice(Device d) const override {
        if (!on_host()) return out(inner().exchangeDevice(in(d)));
        const Device before = getDevice();
        setDevice(d);
        return before;
    }
    Device getDevice() const override { return on_host() ? Device(NPU, current) : out(inner().getDevice()); }
    void setDevice(Device d) const override { uncheckedSetDevice(checked_device(d)); }
    void uncheckedSetDevice(Device d) const noexcept override {
        if (!on_host()) return inner().uncheckedSetDevice(in(d));
        if (d.has_index()) current = d.index();
    }
    c10::Stream getStream(Device d) const override {
        if (!on_host()) return out(inner().getStream(in(d)));
        const Device there = checked_device(d);
        return stream_of(there, current_streams[there.index()]);
    }
    c10::Stream getDefaultStream(Device d) const override {
        return on_host() ? stream_of(checked_device(d), 0) : out(inner().getDefaultStream(in(d)));
    }
    c10::Stream getNewStream(Device d, int priority) const override {
        return on_host() ? stream_of(checked_device(d), ++streams) : out(inner().getNewStream(in(d), priority));
    }
    c10::Stream getStreamFromGlobalPool(Device d, bool high) const override {
        return on_host() ? getNewStream(d, 0) : out(inner().getStreamFromGlobalPool(in(d), high));
    }
    c10::Stream exchangeStream(c10::Stream s) const override {
        if (!on_host()) return out(inner().exchangeStream(in(s)));
        return stream_of(s.device(), std::exchange(current_streams[checked_device(s.device()).index()], s.id()));
    }
    DeviceIndex deviceCount() const noexcept override { return static_cast<DeviceIndex>(count.load()); }

    // On a host the work of a stream is complete when a call returns, so events are complete when they are recorded. An
    // event is a time.
    void record(void **event, const c10::Stream &stream, const DeviceIndex index,
                const c10::EventFlag flag) const override {
        if (!on_host()) return inner().record(event, in(stream), index, flag);
        if (*event == nullptr) *event = new int64_t;
        *static_cast<int64_t *>(*event) = now();
    }
    double elapsedTime(void *start, void *end, const DeviceIndex index) const override {
        if (!on_host()) return inner().elapsedTime(start, end, index);
        return 1e-6 * static_cast<double>(*static_cast<int64_t *>(end) - *static_cast<int64_t *>(start));
    }
    void block(void *event, const c10::Stream &stream) const override {
        if (!on_host()) inner().block(event, in(stream));
    }
    bool queryEvent(void *event) const override { return on_host() || inner().queryEvent(event); }
    void destroyEvent(void *event, const DeviceIndex index) const noexcept override {
        if (!on_host()) return inner().destroyEvent(event, index);
        delete static_cast<int64_t *>(event);
    }
    bool queryStream(const c10::Stream &stream) const override { return on_host() || inner().queryStream(in(stream)); }
    void synchronizeStream(const c10::Stream &stream) const override {
        if (!on_host()) inner().synchronizeStream(in(stream));
    }
    void synchronizeEvent(void *event) const override {
        if (!on_host()) inner().synchronizeEvent(event);
    }
    void synchronizeDevice(const DeviceIndex index) const override {
        if (!on_host()) inner().synchronizeDevice(index);
    }
    void recordDataPtrOnStream(const c10::DataPtr &data, const c10::Stream &stream) const override {
        if (!on_host()) {
            inner().recordDataPtrOnStream(static_cast<StorageImpl *>(data.get_context())->data_ptr(), in(stream));
        }
    }
};

Guard guard;
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

struct Hooks final : at::PrivateUse1HooksInterface {
    bool isBuilt() const override { return true; }
    bool isAvailable() const override { return present; }
    bool hasPrimaryContext(DeviceIndex) const override { return true; }
    DeviceIndex deviceCount() const override { return present ? guard.deviceCount() : DeviceIndex(0); }
    DeviceIndex getCurrentDevice() const override { return guard.getDevice().index(); }
    void setCurrentDevice(DeviceIndex index) const override { guard.setDevice(Device(NPU, index)); }
    DeviceIndex exchangeDevice(DeviceIndex index) const override {
        return guard.exchangeDevice(Device(NPU, index)).index();
    }
    DeviceIndex maybeExchangeDevice(DeviceIndex index) const override {
        return index < 0 ? getCurrentDevice() : exchangeDevice(index);
    }
    const at::Generator &getDefaultGenerator(DeviceIndex index) const override { return default_generator(index); }
    at::Generator getNewGenerator(DeviceIndex index) const override { return new_generator(index); }
    bool isPinnedPtr(const void *data) const override {
        if (on_host()) return is_pinned(data);
        return at::globalContext().getAcceleratorHooksInterface(base()).isPinnedPtr(data);
    }
    c10::Allocator *getPinnedMemoryAllocator() const override {
        if (on_host()) return pinned_memory();
        return at::globalContext().getAcceleratorHooksInterface(base()).getPinnedMemoryAllocator();
    }
    void resizePrivateUse1Bytes(const c10::Storage &storage, size_t bytes) const override {
        StorageImpl *twin = twin_of(storage.unsafeGetStorageImpl());
        TORCH_CHECK(twin->resizable() && twin->allocator() != nullptr,
                    "Trying to resize storage that is not resizable");
        at::DataPtr fresh = twin->allocator()->allocate(bytes);
        const size_t kept = std::min(bytes, twin->nbytes());
        if (kept > 0) twin->allocator()->copy_data(fresh.get(), twin->data(), kept);
        twin->set_data_ptr_noswap(std::move(fresh));
        twin->set_nbytes(bytes);
        follow_twin(storage.unsafeGetStorageImpl());
    }
};

// The times of events for torch.autograd.profiler.
struct Clock final : torch::profiler::impl::ProfilerStubs {
    using Event = torch::profiler::impl::ProfilerVoidEventStub;
    static const ProfilerStubs *cuda() { return torch::profiler::impl::cudaStubs(); }

    void record(DeviceIndex *device, Event *event, int64_t *cpu_ns) const override {
        if (!on_host()) return cuda()->record(device, event, cpu_ns);
        const int64_t moment = now();
        if (device != nullptr) *device = current;
        if (cpu_ns != nullptr) *cpu_ns = moment;
        *event = std::make_shared<int64_t>(moment);
    }
    float elapsed(const Event *start, const Event *end) const override {  // microseconds
        if (!on_host()) return cuda()->elapsed(start, end);
        return 1e-3F * static_cast<float>(*static_cast<int64_t *>(end->get()) - *static_cast<int64_t *>(start->get()));
    }
    void mark(const char *name) const override {
        if (!on_host()) cuda()->mark(name);
    }
    void rangePush(const char *name) const override {
        if (!on_host()) cuda()->rangePush(name);
    }
    void rangePop() const override {
        if (!on_host()) cuda()->rangePop();
    }
    bool enabled() const override { return on_host() || cuda()->enabled(); }
    void onEachDevice(std::function<void(int)> op) const override {
        on_host() ? op(current) : cuda()->onEachDevice(op);
    }
    void synchronize() const override {
        if (!on_host()) cuda()->synchronize();
    }
};

// Returns the kernel for scaled_dot_product_attention that the computing device would choose, from shapes alone,
// because tensors of transformations and traces have no memory.
int64_t attention_kernel(const at::Tensor &q, const at::Tensor &k, const at::Tensor &v,
                         const std::optional<at::Tensor> &mask, double dropout, bool causal,
                         std::optional<double> scale, bool grouped) {
    std::optional<at::Tensor> given;
    if (mask.has_value() && mask->defined()) given = mask;
    for (const at::Tensor *t : {&q, &k, &v, given ? &*given : &q}) {
        if (t->unsafeGetTensorImpl()->has_symbolic_sizes_strides()) return static_cast<int64_t>(at::SDPBackend::math);
    }
    if (given) given = shape_of(*given);
    return at::_ops::_fused_sdp_choice::redispatch(c10::DispatchKeySet(base_key()), shape_of(q), shape_of(k),
                                                   shape_of(v), given, dropout, causal, scale, grouped);
}

}  // namespace

Device checked_device(Device device) {
    if (!device.has_index()) return guard.getDevice();
    TORCH_CHECK(device.index() < count, "torch.npu: device: expected npu:0 to npu:", count - 1, ", got '", device, "'");
    return device;
}

void register_profiler() { torch::profiler::impl::registerPrivateUse1Methods(new Clock); }  // torch keeps it

void set_count(int64_t devices) {
    static auto *hooks = [] {
        auto *made = new Hooks;  // torch keeps it
        at::RegisterPrivateUse1HooksInterface(made);
        return made;
    }();
    (void)hooks;
    present = devices > 0;
    if (present) count = static_cast<int>(std::min<int64_t>(devices, std::numeric_limits<DeviceIndex>::max()));
    // At its next use torch imports torch.npu, whose error says that uninstall() was called.
    if (!present) torch::utils::set_requires_device_init(NPU, true);
}

}  // namespace fusion_npu

namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &fusion_npu::attention_kernel)
}
