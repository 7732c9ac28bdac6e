// The kernel of all operators on device npu: replaces tensors by aliases on the computing device, runs that device's
// kernel, and returns its results as tensors on npu. It does not read the operator's schema: a result that is an alias
// is returned as the alias's tensor, and a result over the memory of a given tensor is returned as a view of it.
#include "storage_aliases.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/stack.h>
#include <torch/library.h>

#include <string_view>
#include <unordered_set>

#include "generator.h"
#include "runtime.h"

namespace fusion_npu {
namespace {

using c10::IValue;

// Operators that accept tensors of several devices: copies.
const std::unordered_set<std::string_view> &copies() {
    static const std::unordered_set<std::string_view> names = {
        "aten::copy_",    "aten::_copy_from",     "aten::_copy_from_and_resize",
        "aten::_to_copy", "aten::_foreach_copy_", "aten::_foreach_copy",
        "aten::copy",     "aten::resize_as_",
    };
    return names;
}

// The tensors of one call and their aliases. enter() converts an argument, leave() a result.
class Frame {
public:
    void enter(IValue &value) {
        if (value.isTensor()) {
            at::Tensor found = alias(value.toTensor());
            if (found.defined()) value = std::move(found);
        } else if (value.isTensorList()) {
            c10::List<at::Tensor> list = value.toTensorList();
            c10::List<at::Tensor> aliases;
            aliases.reserve(list.size());
            for (const at::Tensor &t : list) {
                at::Tensor found = alias(t);
                aliases.push_back(found.defined() ? found : t);
            }
            value = std::move(aliases);
        } else if (value.isOptionalTensorList()) {
            auto list = value.to<c10::List<std::optional<at::Tensor>>>();
            c10::List<std::optional<at::Tensor>> aliases;
            const std::optional<Device> indexed = first_;  // device of the indexed tensor, which precedes the list
            for (const auto &one : list) {
                const std::optional<at::Tensor> t = one;
                at::Tensor found = !t.has_value() ? at::Tensor() : indexed ? alias_of_index(*t, *indexed) : alias(*t);
                aliases.push_back(found.defined() ? std::optional<at::Tensor>(found) : t);
            }
            value = std::move(aliases);
        } else if (value.isDevice()) {
            Device asked = value.toDevice();
            elsewhere_ = asked.type() != NPU;
            here_ = !elsewhere_;
            if (here_) {
                index_ = checked_device(asked).index();
                value = Device(base(), base() == DeviceType::CPU ? -1 : index_);
            }
        } else if (value.isGenerator()) {
            at::Generator generator = value.toGenerator();
            if (generator.defined()) generator_ = generator.device();
            value = behind(generator);
        } else if (value.isList()) {
            enter_lists(value);
        } else if (value.isStorage()) {
            c10::Storage storage = value.toStorage();
            TORCH_CHECK(!first_.has_value() || *first_ == storage.device(),
                        "Attempted to set the storage of a tensor on device \"", *first_,
                        "\" to a storage on different device \"", storage.device(), "\".");
            if (storage.device_type() == NPU) {
                storages_.push_back(storage);
                value = c10::Storage(
                    c10::intrusive_ptr<StorageImpl>::reclaim_copy(twin_of(storage.unsafeGetStorageImpl())));
            }
        }
    }

    void demand_one_device(const c10::OperatorHandle &op) {
        if (C10_UNLIKELY(generator_.has_value())) {
            const bool here = here_ || !npu_.empty();
            TORCH_CHECK(here == (generator_->type() == NPU), "Expected a '", here ? NPU : base(),
                        "' device type for generator but found '", generator_->type(), "'");
        }
        if (C10_LIKELY(!strange_.has_value() || npu_.empty())) return;
        if (copies().contains(op.schema().name())) {
            elsewhere_ = elsewhere_ || (!here_ && first_.has_value() &&
                                        first_->type() != NPU);  // results are on the first tensor's device
            return;
        }
        TORCH_CHECK(false, "Expected all tensors to be on the same device, but found at least two devices, ",
                    npu_.front().device(), " and ", *strange_, "!");
    }

    void follow_all() const {
        for (size_t i = 0; i < npu_.size(); ++i) {
            follow(npu_[i].unsafeGetTensorImpl(), aliases_[i].unsafeGetTensorImpl(), storages_);
        }
    }

    void leave(IValue &value) const {
        if (value.isTensor()) {
            if (value.toTensor().defined()) value = npu(value.toTensor());
        } else if (value.isTensorList()) {
            c10::List<at::Tensor> found;
            for (const at::Tensor &t : value.toTensorList()) found.push_back(t.defined() ? npu(t) : t);
            value = std::move(found);
        } else if (value.isList() && value.toList().elementType()->isSubtypeOf(*c10::ListType::ofTensors())) {
            c10::List<c10::List<at::Tensor>> found;
            for (const IValue &inner : value.toList()) {
                IValue one = inner;
                leave(one);
                found.push_back(one.toTensorList());
            }
            value = std::move(found);
        }
    }

private:
    // Collective operations take lists of lists of tensors.
    void enter_lists(IValue &value) {
        c10::List<IValue> list = value.toList();
        if (!list.elementType()->isSubtypeOf(*c10::ListType::ofTensors())) return;
        c10::List<c10::List<at::Tensor>> found;
        for (const IValue &inner : list) {
            IValue one = inner;
            enter(one);
            found.push_back(one.toTensorList());
        }
        value = std::move(found);
    }

    // An index of a tensor on npu may be a tensor on the host.
    at::Tensor alias_of_index(const at::Tensor &t, Device indexed) {
        if (t.defined() && t.device().type() == DeviceType::CPU && indexed.type() == NPU) return {};
        TORCH_CHECK_INDEX(!t.defined() || t.device() == indexed, "indices should be either on ", at::kCPU,
                          " or on the same device as the indexed tensor (", indexed, ")");
        return alias(t);
    }

    // Returns the alias of a tensor on npu, or an undefined tensor for a tensor on another device, which is not
    // replaced.
    at::Tensor alias(const at::Tensor &t) {
        if (!t.defined()) return {};
        if (!first_.has_value()) first_ = t.device();
        if (!on_npu(t)) {
            others_.push_back(t);
            if (t.dim() > 0 && !t.unsafeGetTensorImpl()->is_wrapped_number()) strange_ = t.device();
            return {};
        }
        for (size_t i = 0; i < npu_.size(); ++i) {
            if (npu_[i].is_same(t)) return aliases_[i];
        }
        if (!npu_.empty() && npu_.front().device() != t.device()) strange_ = t.device();
        npu_.push_back(t);
        storages_.push_back(t.unsafeGetTensorImpl()->unsafe_storage());
        aliases_.push_back(alias_of(t));
        return aliases_.back();
    }

    at::Tensor npu(const at::Tensor &made) const {
        for (size_t i = 0; i < aliases_.size(); ++i) {
            if (aliases_[i].is_same(made)) return npu_[i];
        }
        TORCH_CHECK_NOT_IMPLEMENTED(made.layout() == at::kStrided && !made.is_quantized() && !made.is_nested(),
                                    "fusion_attention: device npu: expected strided tensors, got one of layout ",
                                    made.layout(),
                                    made.is_quantized() ? ", quantized"
                                    : made.is_nested()  ? ", nested"
                                                        : "",
                                    " (compute it from tensors on the cpu)");
        if (elsewhere_ || made.device().type() != base()) return made;
        const c10::Storage &behind = made.unsafeGetTensorImpl()->unsafe_storage();
        for (const c10::Storage &storage : storages_) {
            if (twin_of(storage.unsafeGetStorageImpl()) == behind.unsafeGetStorageImpl())
                return npu_over(made, storage);
        }
        for (const at::Tensor &other : others_) {
            if (other.is_same(made) || (other.has_storage() && other.storage().is_alias_of(behind))) return made;
        }
        const DeviceIndex index =
            here_ || npu_.empty() ? checked_device(Device(NPU, index_)).index() : npu_[0].device().index();
        return npu_over(made, in_front_of(behind, index));
    }

    c10::SmallVector<at::Tensor, 4> npu_, aliases_, others_;
    std::vector<c10::Storage> storages_;
    std::optional<Device> first_;    // device of the first tensor
    std::optional<Device> strange_;  // device of a tensor that may not be combined with npu_
    std::optional<Device> generator_;
    bool elsewhere_ = false;  // true if the call has a device argument other than npu
    bool here_ = false;       // true if the call has the device argument npu
    DeviceIndex index_ = -1;  // the number in that argument
};

void fallback(const c10::OperatorHandle &op, DispatchKeySet /*keys*/, torch::jit::Stack *stack) {
    const c10::FunctionSchema &schema = op.schema();
    Frame frame;
    for (size_t i = stack->size() - schema.arguments().size(); i < stack->size(); ++i) frame.enter((*stack)[i]);
    frame.demand_one_device(op);
    {
        at::AutoDispatchBelowADInplaceOrView below;
        op.redispatchBoxed(DispatchKeySet(base_key()), stack);
    }
    frame.follow_all();
    for (size_t i = stack->size() - schema.returns().size(); i < stack->size(); ++i) frame.leave((*stack)[i]);
}

// Operators that the fallback does not compute: those about a tensor's memory, for which the computing device's answer
// would be wrong for npu, and one that puts some of its results into host memory on every device.
const std::unordered_set<std::string_view> &excluded() {
    static const std::unordered_set<std::string_view> names = {
        "aten::is_pinned",
        "aten::_pin_memory",
        "aten::_has_compatible_shallow_copy_type",
        "aten::_pack_padded_sequence",
    };
    return names;
}

// Collective operations choose the back end of a process group by their tensors' device. With aliases, they choose the
// computing device's.
void register_collectives(DispatchKey key) {
    struct Quiet final : c10::WarningHandler {
        void process(const c10::Warning &) override {}  // torch has kernels for PrivateUse1, which these replace
    } quiet;
    c10::WarningUtils::WarningHandlerGuard guard(&quiet);
    static auto *library =
        new torch::Library(torch::Library::IMPL, "c10d", DispatchKey::PrivateUse1, __FILE__, __LINE__);
    for (const c10::OperatorName &name : c10::Dispatcher::singleton().getAllOpNames()) {
        if (name.name.rfind("c10d::", 0) != 0) continue;
        auto op = c10::Dispatcher::singleton().findOp(name);
        if (!op.has_value() || !op->hasSchema() || !op->hasKernelForDispatchKey(key)) continue;
        library->impl(name.name.c_str(), torch::CppFunction::makeFromBoxedFunction<&fallback>());
    }
}

}  // namespace

// Registers the fallback for every operator for which the computing device, or every device, has a kernel. A composite
// operator would otherwise run on npu as several operators, each with the fallback's cost.
int64_t register_operators() {
    static auto *library =
        new torch::Library(torch::Library::IMPL, "aten", DispatchKey::PrivateUse1, __FILE__, __LINE__);
    const DispatchKey key = base_key();
    register_collectives(key);
    int64_t count = 0;
    for (const c10::OperatorName &name : c10::Dispatcher::singleton().getAllOpNames()) {
        if (name.name.rfind("aten::", 0) != 0 || excluded().contains(name.name)) continue;
        auto op = c10::Dispatcher::singleton().findOp(name);
        if (!op.has_value() || !op->hasSchema() || op->hasKernelForDispatchKey(DispatchKey::PrivateUse1)) continue;
        bool explicit_kernel = op->hasKernelForDispatchKey(DispatchKey::CompositeExplicitAutograd) ||
                               op->hasKernelForDispatchKey(DispatchKey::CompositeExplicitAutogradNonFunctional);
        if (!op->hasKernelForDispatchKey(key) && !explicit_kernel) continue;
        std::string full = name.overload_name.empty() ? name.name : name.name + "." + name.overload_name;
        library->impl(full.c_str(), torch::CppFunction::makeFromBoxedFunction<&fallback>());
        ++count;
    }
    return count;
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

}  // namespace fusion_npu
