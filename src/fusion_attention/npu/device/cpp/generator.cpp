#include "generator.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>

#include <limits>

#include "runtime.h"

namespace fusion_npu {
namespace {

class NpuGenerator final : public c10::GeneratorImpl {
public:
    NpuGenerator(DeviceIndex index, at::Generator inner)
        : GeneratorImpl(Device(NPU, index), DispatchKeySet(DispatchKey::PrivateUse1)), inner_(std::move(inner)) {}

    void set_current_seed(uint64_t seed) override { inner_.set_current_seed(seed); }
    // torch reads the offset when it copies or pickles the generator of another device than the CPU; the CPU's
    // generator has no offset.
    void set_offset(uint64_t offset) override {
        if (base() != DeviceType::CPU || offset != 0) inner_.set_offset(offset);
    }
    uint64_t get_offset() const override { return base() == DeviceType::CPU ? 0 : inner_.get_offset(); }
    uint64_t current_seed() const override { return inner_.current_seed(); }
    uint64_t seed() override { return inner_.seed(); }
    void set_state(const TensorImpl &state) override { inner_.unsafeGetGeneratorImpl()->set_state(state); }
    c10::intrusive_ptr<TensorImpl> get_state() const override { return inner_.unsafeGetGeneratorImpl()->get_state(); }
    NpuGenerator *clone_impl() const override { return new NpuGenerator(device().index(), inner_.clone()); }

    const at::Generator &inner() const { return inner_; }

private:
    at::Generator inner_;
};

DeviceIndex numbered(DeviceIndex index) { return checked_device(Device(NPU, index)).index(); }

}  // namespace

at::Generator behind(const at::Generator &generator) {
    if (!generator.defined() || generator.device().type() != NPU) return generator;
    return static_cast<NpuGenerator *>(generator.unsafeGetGeneratorImpl())->inner();
}

const at::Generator &default_generator(DeviceIndex index) {
    static const auto *made = [] {
        auto *all = new std::vector<at::Generator>;
        const int count = base() == DeviceType::CUDA ? at::getNumGPUs() : std::numeric_limits<DeviceIndex>::max();
        for (int i = 0; i < count; ++i) {
            Device device(base(), base() == DeviceType::CUDA ? DeviceIndex(i) : DeviceIndex(-1));
            all->push_back(at::make_generator<NpuGenerator>(i, at::globalContext().defaultGenerator(device)));
        }
        return all;
    }();
    return made->at(numbered(index));
}

at::Generator new_generator(DeviceIndex index) {
    at::Generator inner =
        base() == DeviceType::CUDA
            ? at::globalContext().getAcceleratorHooksInterface(base()).getNewGenerator(numbered(index))
            : at::detail::createCPUGenerator();
    return at::make_generator<NpuGenerator>(numbered(index), std::move(inner));
}

}  // namespace fusion_npu
