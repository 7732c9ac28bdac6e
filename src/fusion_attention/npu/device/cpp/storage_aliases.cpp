#include "storage_aliases.h"

#include <ATen/Context.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/core/impl/alloc_cpu.h>
#include <torch/version.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <map>
#include <mutex>

#include "runtime.h"

namespace fusion_npu {
namespace {

std::atomic<DeviceType> computes{DeviceType::CPU};

void release(void *twin) { c10::raw::intrusive_ptr::decref(static_cast<StorageImpl *>(twin)); }

// Returns a pointer on npu to the memory of a twin; it keeps the twin alive.
at::DataPtr pointer(StorageImpl *twin, DeviceIndex index) {
    c10::raw::intrusive_ptr::incref(twin);
    return {twin->mutable_data_ptr().mutable_get(), twin, &release,
            Device(NPU, base() == DeviceType::CPU ? index : twin->device().index())};
}

// From 2.9 on torch reads memory statistics from the accelerator's allocator.
#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 9
using Base = c10::DeviceAllocator;
#else
using Base = c10::Allocator;
#endif

struct Allocator final : Base {
#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 9
    // CUDA's allocator if CUDA is the computing device. On a host memory is neither counted nor cached.
    static c10::DeviceAllocator *cuda() {
        return base() == DeviceType::CPU ? nullptr : c10::getDeviceAllocator(base());
    }
    bool initialized() override { return cuda() == nullptr || cuda()->initialized(); }
    void emptyCache(c10::MempoolId_t pool) override {
        if (cuda() != nullptr) cuda()->emptyCache(pool);
    }
    void recordStream(const at::DataPtr &data, c10::Stream stream) override {
        c10::impl::VirtualGuardImpl(NPU).recordDataPtrOnStream(data, stream);
    }
    c10::CachingDeviceAllocator::DeviceStats getDeviceStats(DeviceIndex index) override {
        checked_device(Device(NPU, index));
        return cuda() == nullptr ? c10::CachingDeviceAllocator::DeviceStats() : cuda()->getDeviceStats(index);
    }
    void resetAccumulatedStats(DeviceIndex index) override {
        checked_device(Device(NPU, index));
        if (cuda() != nullptr) cuda()->resetAccumulatedStats(index);
    }
    void resetPeakStats(DeviceIndex index) override {
        checked_device(Device(NPU, index));
        if (cuda() != nullptr) cuda()->resetPeakStats(index);
    }
    // NOLINTNEXTLINE(modernize-use-override): one since torch 2.10
    std::pair<size_t, size_t> getMemoryInfo(DeviceIndex index) {
        checked_device(Device(NPU, index));
        if (cuda() != nullptr) return memory_of(cuda(), index);
        const size_t page = sysconf(_SC_PAGE_SIZE), total = sysconf(_SC_PHYS_PAGES), free = sysconf(_SC_AVPHYS_PAGES);
        return {page * std::min(free, total), page * total};
    }
    template <typename Source>
    static std::pair<size_t, size_t> memory_of(Source *source, DeviceIndex index) {
        if constexpr (requires { source->getMemoryInfo(index); }) return source->getMemoryInfo(index);
        return {0, 0};
    }
#endif
    at::DataPtr allocate(size_t bytes) override {
        c10::Allocator *source = c10::GetAllocator(base());
        auto twin = c10::make_intrusive<StorageImpl>(StorageImpl::use_byte_size_t(), bytes, source, true);
        return pointer(twin.get(), checked_device(Device(NPU)).index());
    }
    c10::DeleterFnPtr raw_deleter() const override { return nullptr; }  // the context is not the pointer
    void copy_data(void *to, const void *from, std::size_t bytes) const override {
        c10::GetAllocator(base())->copy_data(to, from, bytes);
    }
};

Allocator allocator;
REGISTER_ALLOCATOR(c10::DeviceType::PrivateUse1, &allocator)

// Keys of tensors whose values are read negated, conjugated, or as zeros.
const DispatchKeySet LAZY({DispatchKey::Conjugate, DispatchKey::Negative, DispatchKey::ZeroTensor});

// Makes a tensor with the shape of another. It has autograd's keys if the other has them, also in inference mode, as
// views by torch's kernels do.
at::Tensor tensor(c10::Storage storage, DispatchKey key, const TensorImpl *like) {
    const c10::BackendComponent backend = c10::toBackendComponent(key);
    DispatchKeySet keys =
        DispatchKeySet(key) | (like->key_set() & LAZY) | c10::getAutocastRelatedKeySetFromBackend(backend);
    if (C10_LIKELY(like->key_set().has_any(c10::autograd_dispatch_keyset_with_ADInplaceOrView)))
        keys = keys | c10::getAutogradRelatedKeySetFromBackend(backend);
    auto made = c10::make_intrusive<TensorImpl>(TensorImpl::VIEW, std::move(storage), keys, like->dtype());
    made->set_sizes_and_strides(like->sizes(), like->strides(), like->storage_offset());
    if (C10_UNLIKELY(like->is_wrapped_number())) made->set_wrapped_number(true);
    return at::Tensor(std::move(made));
}

// Makes the twin of a storage whose memory another object owns; the twin takes over that ownership.
StorageImpl *adopted(StorageImpl *storage) {
    static std::mutex lock;
    std::lock_guard<std::mutex> held(lock);
    if (storage->data_ptr().get_deleter() == &release)
        return static_cast<StorageImpl *>(storage->data_ptr().get_context());
    const DeviceIndex index = storage->device().index();
    auto *kept = new at::DataPtr(storage->set_data_ptr(at::DataPtr()));
    at::DataPtr data(
        kept->get(), kept, [](void *p) { delete static_cast<at::DataPtr *>(p); },
        Device(base(), base() == DeviceType::CPU ? -1 : kept->device().index()));
    auto twin = c10::make_intrusive<StorageImpl>(StorageImpl::use_byte_size_t(), storage->nbytes(), std::move(data),
                                                 nullptr, false);
    storage->set_data_ptr_noswap(pointer(twin.get(), index));
    return twin.get();
}

struct Pinned final : c10::Allocator {
    std::mutex lock;
    std::map<const char *, size_t> blocks;  // address -> bytes
    at::DataPtr allocate(size_t bytes) override;
    c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
    void copy_data(void *to, const void *from, std::size_t bytes) const override { default_copy_data(to, from, bytes); }
};

Pinned &pinned() {
    static auto *only = new Pinned;  // never destroyed: tensors may outlive the statics
    return *only;
}

void unpin(void *block) {
    {
        std::lock_guard<std::mutex> held(pinned().lock);
        pinned().blocks.erase(static_cast<const char *>(block));
    }
    c10::free_cpu(block);
}

at::DataPtr Pinned::allocate(size_t bytes) {
    void *block = c10::alloc_cpu(bytes);
    if (block != nullptr) {
        std::lock_guard<std::mutex> held(lock);
        blocks[static_cast<const char *>(block)] = bytes;
    }
    return {block, block, &unpin, Device(DeviceType::CPU)};
}

}  // namespace

DeviceType base() { return computes.load(std::memory_order_relaxed); }
void set_base(DeviceType type) { computes.store(type); }

StorageImpl *twin_of(StorageImpl *storage) {
    const at::DataPtr &data = storage->data_ptr();
    if (C10_LIKELY(data.get_deleter() == &release)) return static_cast<StorageImpl *>(data.get_context());
    return adopted(storage);
}

c10::Storage in_front_of(const c10::Storage &twin, DeviceIndex index) {
    StorageImpl *impl = twin.unsafeGetStorageImpl();
    return c10::Storage(c10::make_intrusive<StorageImpl>(StorageImpl::use_byte_size_t(), impl->nbytes(),
                                                         pointer(impl, index), &allocator, impl->resizable()));
}

at::Tensor alias_of(const at::Tensor &npu) {
    const TensorImpl *impl = npu.unsafeGetTensorImpl();
    TORCH_CHECK_NOT_IMPLEMENTED(impl->unsafe_storage(), "fusion_attention: device npu: expected a strided tensor, got ",
                                "one of layout ", npu.layout(), " or of a transformation such as vmap");
    auto twin = c10::intrusive_ptr<StorageImpl>::reclaim_copy(twin_of(impl->unsafe_storage().unsafeGetStorageImpl()));
    return tensor(c10::Storage(std::move(twin)), base_key(), impl);
}

at::Tensor shape_of(const at::Tensor &t) {
    const Device device(base(), base() == DeviceType::CPU ? DeviceIndex(-1) : t.device().index());
    auto none = c10::make_intrusive<StorageImpl>(StorageImpl::use_byte_size_t(), 0, at::DataPtr(nullptr, device),
                                                 nullptr, false);
    auto made = c10::make_intrusive<TensorImpl>(c10::Storage(std::move(none)), DispatchKeySet(base_key()), t.dtype());
    made->set_sizes_and_strides(t.sizes(), t.strides());
    return at::Tensor(std::move(made)).requires_grad_(t.requires_grad());
}

at::Tensor npu_over(const at::Tensor &made, c10::Storage storage) {
    const TensorImpl *impl = made.unsafeGetTensorImpl();
    return tensor(std::move(storage), DispatchKey::PrivateUse1, impl);
}

void follow_twin(StorageImpl *storage) {
    StorageImpl *twin = twin_of(storage);
    at::DataPtr moved = pointer(twin, storage->device().index());
    if (storage->data_ptr().get() != moved.get()) storage->set_data_ptr_noswap(std::move(moved));
    storage->set_nbytes(twin->nbytes());
}

void follow(TensorImpl *npu, const TensorImpl *alias, const std::vector<c10::Storage> &storages) {
    StorageImpl *storage = npu->unsafe_storage().unsafeGetStorageImpl();
    StorageImpl *behind = alias->unsafe_storage().unsafeGetStorageImpl();
    if (C10_UNLIKELY(twin_of(storage) != behind)) {  // set_()
        c10::Storage other;
        for (const c10::Storage &one : storages) {
            if (twin_of(one.unsafeGetStorageImpl()) == behind) other = one;
        }
        npu->set_storage_keep_dtype(other ? std::move(other)
                                          : in_front_of(alias->unsafe_storage(), npu->device().index()));
    } else if (C10_UNLIKELY(storage->nbytes() != behind->nbytes() ||
                            storage->data_ptr().get() != behind->data_ptr().get())) {
        follow_twin(storage);
    }
    if (C10_UNLIKELY(npu->storage_offset() != alias->storage_offset() || npu->sizes() != alias->sizes() ||
                     npu->strides() != alias->strides())) {
        npu->set_sizes_and_strides(alias->sizes(), alias->strides(), alias->storage_offset());
    }
}

c10::Allocator *pinned_memory() { return &pinned(); }

bool is_pinned(const void *pointer) {
    std::lock_guard<std::mutex> held(pinned().lock);
    auto after = pinned().blocks.upper_bound(static_cast<const char *>(pointer));
    if (after == pinned().blocks.begin()) return false;
    --after;
    return static_cast<const char *>(pointer) < after->first + after->second;
}

}  // namespace fusion_npu
