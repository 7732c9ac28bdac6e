// What torch asks an accelerator: how many devices, which is current, streams, pinned memory. All of it is answered by
// the device that computes, under the name npu.
#include <ATen/Context.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/_fused_sdp_choice_ops.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/utils/device_lazy_init.h>

#include <atomic>

#include "generator.h"
#include "memory.h"
#include "runtime.h"

namespace fusion_npu {
namespace {

std::atomic<bool> present{false};

// npu:i of the device i that computes, and back.
struct Guard final : c10::impl::DeviceGuardImplInterface {
    static c10::impl::VirtualGuardImpl inner() { return c10::impl::VirtualGuardImpl(base()); }
    static Device out(Device d) { return {NPU, std::max<DeviceIndex>(d.index(), 0)}; }
    static Device in(Device d) { return {base(), base() == DeviceType::CPU ? DeviceIndex(-1) : d.index()}; }
    static c10::Stream out(c10::Stream s) { return c10::Stream(c10::Stream::UNSAFE, out(s.device()), s.id()); }
    static c10::Stream in(c10::Stream s) { return c10::Stream(c10::Stream::UNSAFE, in(s.device()), s.id()); }

    DeviceType type() const override { return NPU; }
    Device exchangeDevice(Device d) const override { return out(inner().exchangeDevice(in(d))); }
    Device getDevice() const override { return out(inner().getDevice()); }
    void setDevice(Device d) const override { inner().setDevice(in(known(d))); }
    void uncheckedSetDevice(Device d) const noexcept override { inner().uncheckedSetDevice(in(d)); }
    c10::Stream getStream(Device d) const override { return out(inner().getStream(in(d))); }
    c10::Stream getDefaultStream(Device d) const override {
        return base() == DeviceType::CPU ? getStream(d) : out(inner().getDefaultStream(in(d)));
    }
    c10::Stream getNewStream(Device d, int priority) const override {
        return base() == DeviceType::CPU ? getStream(d) : out(inner().getNewStream(in(d), priority));
    }
    c10::Stream getStreamFromGlobalPool(Device d, bool high) const override {
        return base() == DeviceType::CPU ? getStream(d) : out(inner().getStreamFromGlobalPool(in(d), high));
    }
    c10::Stream exchangeStream(c10::Stream s) const override { return out(inner().exchangeStream(in(s))); }
    DeviceIndex deviceCount() const noexcept override { return base() == DeviceType::CPU ? 1 : inner().deviceCount(); }

    // On a host what a stream was given has run when the call returns: events have happened, streams are empty.
    void record(void **event, const c10::Stream &stream, const DeviceIndex index,
                const c10::EventFlag flag) const override {
        if (base() != DeviceType::CPU) inner().record(event, in(stream), index, flag);
    }
    void block(void *event, const c10::Stream &stream) const override {
        if (base() != DeviceType::CPU) inner().block(event, in(stream));
    }
    bool queryEvent(void *event) const override { return base() == DeviceType::CPU || inner().queryEvent(event); }
    void destroyEvent(void *event, const DeviceIndex index) const noexcept override {
        if (base() != DeviceType::CPU) inner().destroyEvent(event, index);
    }
    bool queryStream(const c10::Stream &stream) const override {
        return base() == DeviceType::CPU || inner().queryStream(in(stream));
    }
    void synchronizeStream(const c10::Stream &stream) const override {
        if (base() != DeviceType::CPU) inner().synchronizeStream(in(stream));
    }
    void synchronizeEvent(void *event) const override {
        if (base() != DeviceType::CPU) inner().synchronizeEvent(event);
    }
    void synchronizeDevice(const DeviceIndex index) const override {
        if (base() != DeviceType::CPU) inner().synchronizeDevice(index);
    }
    void recordDataPtrOnStream(const c10::DataPtr &data, const c10::Stream &stream) const override {
        if (base() != DeviceType::CPU) {
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
        if (base() == DeviceType::CPU) return is_pinned(data);
        return at::globalContext().getAcceleratorHooksInterface(base()).isPinnedPtr(data);
    }
    c10::Allocator *getPinnedMemoryAllocator() const override {
        if (base() == DeviceType::CPU) return pinned_memory();
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

// Which kernel scaled_dot_product_attention takes: the one of the device that computes, which is asked by shapes alone:
// what a transformation or a trace makes of a tensor has no memory.
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

Device known(Device asked) {
    TORCH_CHECK(asked.index() < guard.deviceCount(),
                "torch.npu: device: expected npu:0 to npu:", guard.deviceCount() - 1, ", got '", asked, "'");
    return asked;
}

void set_present(bool there) {
    static auto *hooks = [] {
        auto *made = new Hooks;  // torch keeps it
        at::RegisterPrivateUse1HooksInterface(made);
        return made;
    }();
    (void)hooks;
    present = there;
    // Whoever names the device next imports torch.npu first, and is told there that install() was taken back.
    if (!there) torch::utils::set_requires_device_init(NPU, true);
}

}  // namespace fusion_npu

namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &fusion_npu::attention_kernel)
}
