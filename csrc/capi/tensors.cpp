// The C functions for arguments of operators: tensors, lists, scalars, arrays (libnnopbase).
#include <algorithm>
#include <atomic>
#include <cstring>

#include "aclnn/aclnn_base.h"
#include "capi/dtypes.h"
#include "capi/executors.h"

namespace fusion::capi {
namespace {

using std::to_string;

constexpr std::uint64_t most_dims = 25;                        // CANN's own limit
constexpr std::uint64_t most_values = std::uint64_t{1} << 40;  // of an array; beyond any memory
constexpr int formats[] = {-1, 0, 1, 2, 3, 4, 12, 16, 27, 29, 30, 32, 33, 35, 47, 50, 51};

// The arguments of aclCreateTensor() and aclInitTensor().
struct Request {
    const std::int64_t *dims;
    std::uint64_t dims_count;
    int dtype;
    const std::int64_t *strides;
    std::int64_t offset;
    int format;
    const std::int64_t *storage_dims;
    std::uint64_t storage_dims_count;
    void *data;
};

std::vector<std::int64_t> sizes(const std::int64_t *values, std::uint64_t count, const char *param) {
    if (count > most_dims) {
        throw Refusal(nn_invalid, std::string(param) + ": expected at most 25 dimensions, got " + to_string(count));
    }
    if (count != 0) need_address(values, param, nn_null);
    std::vector<std::int64_t> found(values, values + count);
    for (const std::int64_t value : found) {
        if (value < 0) {
            throw Refusal(nn_invalid, std::string(param) + ": expected no negative number, got " + to_string(value));
        }
    }
    return found;
}

// Returns the elements from the first of a view to the end of its last; 0 for an empty view.
std::int64_t reach(const std::vector<std::int64_t> &dims, const std::vector<std::int64_t> &strides) {
    std::int64_t last = 0, all = 1;
    bool empty = false, large = false;
    for (std::size_t axis = 0; axis < dims.size(); ++axis) {
        std::int64_t step = 0;
        empty = empty || dims[axis] == 0;
        large = large || __builtin_mul_overflow(all, dims[axis] == 0 ? 1 : dims[axis], &all);
        large = large || __builtin_mul_overflow(dims[axis] == 0 ? 0 : dims[axis] - 1, strides[axis], &step);
        large = large || __builtin_add_overflow(last, step, &last);
    }
    if (large || last == INT64_MAX) {
        throw Refusal(nn_invalid, "viewDims: expected fewer elements than 64 bits can count");
    }
    return empty ? 0 : last + 1;
}

std::int64_t bytes_of(std::int64_t elements, int bits) {
    std::int64_t all = 0;
    if (__builtin_mul_overflow(elements, std::int64_t{bits}, &all)) {
        throw Refusal(nn_invalid, "viewDims: expected fewer bytes than 64 bits can count");
    }
    return all / 8 + (all % 8 != 0);
}

// Returns the bytes of a tensor from its data's address: those of its storage, if given.
struct Extent {
    std::int64_t begin, end;
};

Extent extent_of(const Tensor &tensor) {
    const int bits = dtype_of(tensor.dtype)->bits;
    const std::int64_t count = reach(tensor.dims, tensor.strides);
    std::int64_t stop = 0;
    if (__builtin_add_overflow(tensor.offset, count, &stop)) {
        throw Refusal(nn_invalid, "offset: expected fewer elements than 64 bits can count");
    }
    if (count == 0) return {0, 0};
    if (!tensor.storage_dims.empty()) {
        std::int64_t capacity = 1;
        for (const std::int64_t size : tensor.storage_dims) {
            if (__builtin_mul_overflow(capacity, size, &capacity)) {
                throw Refusal(nn_invalid, "storageDims: expected fewer elements than 64 bits can count");
            }
        }
        if (stop > capacity) {
            throw Refusal(nn_invalid, "viewDims: the view ends at element " + to_string(stop) + " of a storage of " +
                                          to_string(capacity));
        }
    }
    return {bytes_of(tensor.offset, bits), bytes_of(stop, bits)};
}

// In the checked mode, checks that the data copied to the tensor's address have as many bytes as the tensor.
void compare_with_copies(const Tensor &tensor, Allocation &memory, std::int64_t begin, std::int64_t end,
                         const Call &call) {
    const auto first = static_cast<std::size_t>(begin), stop = static_cast<std::size_t>(end);
    const std::lock_guard<std::mutex> lock(memory.mutex);
    const auto trace = memory.traces.find({first, false});
    if (trace != memory.traces.end()) {
        const std::size_t copied = trace->second.end - first, size = stop - first;
        if (copied != size && copied != 0 && (copied % size == 0 || size % copied == 0)) {
            call.defect("dataType: a tensor of " + std::string(dtype_name(tensor.dtype)) + " has " + to_string(size) +
                        " bytes where the program put " + to_string(copied) + in_brackets(trace->second.made) +
                        ": the host's type is not the tensor's; " + described(memory.address));
        }
    }
    memory.remember({first, stop, tensor.dtype, call.site()});
}

// Sets a tensor's memory; throws if no allocation contains it.
void place(Tensor &tensor, void *data, const Call &call) {
    static std::atomic<std::uint64_t> versions = 0;
    tensor.version = ++versions;
    tensor.data = data;
    tensor.memory.reset();
    const Extent extent = extent_of(tensor);
    if (data == nullptr) return;
    const auto memory = allocation_of(data);
    if (memory == nullptr || memory->host) {
        throw Refusal(nn_invalid, "tensorData: expected memory of aclrtMalloc(), got " + described(data));
    }
    const std::int64_t first = static_cast<char *>(data) - memory->address;
    const int bits = dtype_of(tensor.dtype)->bits;
    if (bits >= 8 && first % (bits / 8) != 0) {
        throw Refusal(nn_invalid, "tensorData: expected memory aligned to " + to_string(bits / 8) + " bytes, got " +
                                      described(data));
    }
    const auto capacity = static_cast<std::int64_t>(memory->granted) - first;
    const auto asked = static_cast<std::int64_t>(memory->asked) - first;
    const std::string text =
        "tensorData: the view ends at byte " + to_string(first + extent.end) + " of " + described(memory->address);
    if (extent.end > capacity) throw Refusal(nn_invalid, text);
    tensor.memory = memory;
    if (call.number == 0 || extent.end == 0) return;
    if (extent.end > asked) call.defect(text + ", within the pages that the chip gives");
    compare_with_copies(tensor, *memory, first + extent.begin, first + extent.end, call);
}

std::shared_ptr<Tensor> tensor_of(const Request &from, const Call &call) {
    auto made = std::make_shared<Tensor>();
    made->dims = sizes(from.dims, from.dims_count, "viewDims");
    made->storage_dims = sizes(from.storage_dims, from.storage_dims_count, "storageDims");
    const Dtype *dtype = dtype_of(from.dtype);
    if (dtype == nullptr || dtype->bits == 0) {
        throw Refusal(nn_invalid, "dataType: expected an aclDataType of numbers, got " + to_string(from.dtype));
    }
    made->dtype = from.dtype;
    bool known = false;
    for (const int format : formats) known = known || format == from.format;
    if (!known) throw Refusal(nn_invalid, "format: expected an aclFormat, got " + to_string(from.format));
    made->format = from.format;
    if (from.offset < 0)
        throw Refusal(nn_invalid, "offset: expected no negative number, got " + to_string(from.offset));
    made->offset = from.offset;
    if (from.strides != nullptr) {
        made->strides = sizes(from.strides, from.dims_count, "stride");
    } else {
        made->strides.assign(made->dims.size(), 1);
        for (std::size_t axis = made->dims.size(); axis-- > 1;) {
            if (__builtin_mul_overflow(made->dims[axis], made->strides[axis], &made->strides[axis - 1])) {
                throw Refusal(nn_invalid, "viewDims: expected fewer elements than 64 bits can count");
            }
        }
    }
    place(*made, from.data, call);
    return made;
}

template <class T>
T *handle_of(Handle handle) {
    return static_cast<T *>(const_cast<void *>(handle));
}

template <class T>
void *made_array(const char *name, const void *caller, const void *values, std::uint64_t size) {
    return made(name, caller, [&](const Call &call) {
        if (size != 0) need_address(values, "value", nn_null);
        if (size > most_values) throw Refusal(nn_invalid, "size: expected fewer values, got " + to_string(size));
        auto array = std::make_shared<T>();
        array->values.resize(size);
        if (size != 0) std::memcpy(array->values.data(), values, size * sizeof array->values[0]);
        return handle_of<void>(add(T::kind, array, call));
    });
}

// Returns a list of live handles of another kind.
template <class List, class Member>
void *made_list(const char *name, const void *caller, const void *const *values, std::uint64_t size,
                std::vector<Handle> List::*members) {
    return made(name, caller, [&](const Call &call) {
        if (size != 0) need_address(values, "value", nn_null);
        if (size > most_values) throw Refusal(nn_invalid, "size: expected fewer handles, got " + to_string(size));
        auto list = std::make_shared<List>();
        for (std::uint64_t i = 0; i < size; ++i) {
            need<Member>(values[i], ("value[" + to_string(i) + "]").c_str());
            ((*list).*members).push_back(values[i]);
        }
        return handle_of<void>(add(List::kind, list, call));
    });
}

// Destroys a handle; ignores null, as CANN does.
template <class T>
int destroy(const char *name, const void *caller, Handle handle, const char *param) {
    return coded(name, caller, [&](const Call &) {
        if (handle == nullptr) return;
        need<T>(handle, param);
        remove(handle, T::kind);
    });
}

template <class List>
int destroy_list(const char *name, const void *caller, Handle handle, const char *param, Kind members_kind,
                 std::vector<Handle> List::*members) {
    return coded(name, caller, [&](const Call &call) {
        if (handle == nullptr) return;
        const auto list = need<List>(handle, param);
        remove(handle, List::kind);
        for (const Handle member : (*list).*members) {
            if (remove(member, members_kind) == nullptr) {
                call.defect(std::string(param) + ": it owns its members, and one was destroyed before");
            }
        }
    });
}

template <class T>
void write(T *place, const char *param, T value) {
    need_address(place, param, nn_null);
    *place = value;
}

// The address of a result and the name of its parameter.
template <class T>
struct Place {
    T *address;
    const char *param;
};

// Returns numbers in an array of new[], which the program deletes, as in CANN.
int hand_out(const char *name, const void *caller, const aclTensor *tensor, Place<std::int64_t *> values,
             Place<std::uint64_t> count, std::vector<std::int64_t> Tensor::*member) {
    return coded(
        name, caller,
        [&](const Call &) {
            const auto found = need<Tensor>(tensor, "tensor");
            const std::vector<std::int64_t> &from = (*found).*member;
            need_address(values.address, values.param, nn_null);
            write<std::uint64_t>(count.address, count.param, from.size());
            *values.address = new std::int64_t[from.size()];
            std::copy(from.begin(), from.end(), *values.address);
        },
        nn_runtime);
}

template <class T, class Of>
int count(const char *name, const void *caller, Handle handle, const char *param, std::uint64_t *size, Of of) {
    return coded(
        name, caller,
        [&](const Call &) {
            const auto found = need<T>(handle, param);
            write<std::uint64_t>(size, "size", of(*found));
        },
        nn_runtime);
}

}  // namespace

void move(Handle tensor, void *data, const Call &call, const char *param) {
    auto moved = std::make_shared<Tensor>(*need<Tensor>(tensor, param));
    place(*moved, data, call);
    if (!replace(tensor, Kind::tensor, moved)) throw Refusal(nn_invalid, std::string(param) + ": destroyed meanwhile");
}

FUSION_C aclTensor *aclCreateTensor(const std::int64_t *viewDims, std::uint64_t viewDimsNum, aclDataType dataType,
                                    const std::int64_t *stride, std::int64_t offset, aclFormat format,
                                    const std::int64_t *storageDims, std::uint64_t storageDimsNum, void *tensorData) {
    const Request request = {viewDims, viewDimsNum, dataType,       stride,    offset,
                             format,   storageDims, storageDimsNum, tensorData};
    return handle_of<aclTensor>(made("aclCreateTensor", FUSION_CALLER, [&](const Call &call) {
        return handle_of<void>(add(Kind::tensor, tensor_of(request, call), call));
    }));
}

FUSION_C aclnnStatus aclInitTensor(aclTensor *tensor, const std::int64_t *viewDims, std::uint64_t viewDimsNum,
                                   aclDataType dataType, const std::int64_t *stride, std::int64_t offset,
                                   aclFormat format, const std::int64_t *storageDims, std::uint64_t storageDimsNum,
                                   void *tensorDataAddr) {
    const Request request = {viewDims, viewDimsNum, dataType,       stride,        offset,
                             format,   storageDims, storageDimsNum, tensorDataAddr};
    return coded(
        "aclInitTensor", FUSION_CALLER,
        [&](const Call &call) {
            need<Tensor>(tensor, "tensor");
            replace(tensor, Kind::tensor, tensor_of(request, call));
        },
        nn_runtime);
}

FUSION_C aclScalar *aclCreateScalar(void *value, aclDataType dataType) {
    return handle_of<aclScalar>(made("aclCreateScalar", FUSION_CALLER, [&](const Call &call) {
        need_address(value, "value", nn_null);
        const Dtype *dtype = dtype_of(dataType);
        if (dtype == nullptr || dtype->bits < 8) {
            throw Refusal(nn_invalid, "dataType: expected an aclDataType of numbers, got " + to_string(dataType));
        }
        auto scalar = std::make_shared<Scalar>();
        scalar->dtype = dataType;
        std::memcpy(scalar->bytes, value, static_cast<std::size_t>(dtype->bits / 8));
        return handle_of<void>(add(Kind::scalar, scalar, call));
    }));
}

FUSION_C aclIntArray *aclCreateIntArray(const std::int64_t *value, std::uint64_t size) {
    return handle_of<aclIntArray>(made_array<IntArray>("aclCreateIntArray", FUSION_CALLER, value, size));
}

FUSION_C aclFloatArray *aclCreateFloatArray(const float *value, std::uint64_t size) {
    return handle_of<aclFloatArray>(made_array<FloatArray>("aclCreateFloatArray", FUSION_CALLER, value, size));
}

FUSION_C aclBoolArray *aclCreateBoolArray(const bool *value, std::uint64_t size) {
    return handle_of<aclBoolArray>(made_array<BoolArray>("aclCreateBoolArray", FUSION_CALLER, value, size));
}

FUSION_C aclTensorList *aclCreateTensorList(const aclTensor *const *value, std::uint64_t size) {
    const auto *values = reinterpret_cast<const void *const *>(value);
    return handle_of<aclTensorList>(
        made_list<TensorList, Tensor>("aclCreateTensorList", FUSION_CALLER, values, size, &TensorList::tensors));
}

FUSION_C aclScalarList *aclCreateScalarList(const aclScalar *const *value, std::uint64_t size) {
    const auto *values = reinterpret_cast<const void *const *>(value);
    return handle_of<aclScalarList>(
        made_list<ScalarList, Scalar>("aclCreateScalarList", FUSION_CALLER, values, size, &ScalarList::scalars));
}

FUSION_C aclnnStatus aclDestroyTensor(const aclTensor *tensor) {
    return destroy<Tensor>("aclDestroyTensor", FUSION_CALLER, tensor, "tensor");
}

FUSION_C aclnnStatus aclDestroyScalar(const aclScalar *scalar) {
    return destroy<Scalar>("aclDestroyScalar", FUSION_CALLER, scalar, "scalar");
}

FUSION_C aclnnStatus aclDestroyIntArray(const aclIntArray *array) {
    return destroy<IntArray>("aclDestroyIntArray", FUSION_CALLER, array, "array");
}

FUSION_C aclnnStatus aclDestroyFloatArray(const aclFloatArray *array) {
    return destroy<FloatArray>("aclDestroyFloatArray", FUSION_CALLER, array, "array");
}

FUSION_C aclnnStatus aclDestroyBoolArray(const aclBoolArray *array) {
    return destroy<BoolArray>("aclDestroyBoolArray", FUSION_CALLER, array, "array");
}

FUSION_C aclnnStatus aclDestroyTensorList(const aclTensorList *array) {
    return destroy_list<TensorList>("aclDestroyTensorList", FUSION_CALLER, array, "array", Kind::tensor,
                                    &TensorList::tensors);
}

FUSION_C aclnnStatus aclDestroyScalarList(const aclScalarList *array) {
    return destroy_list<ScalarList>("aclDestroyScalarList", FUSION_CALLER, array, "array", Kind::scalar,
                                    &ScalarList::scalars);
}

FUSION_C aclnnStatus aclSetRawTensorAddr(aclTensor *tensor, void *addr) {
    return coded("aclSetRawTensorAddr", FUSION_CALLER, [&](const Call &call) { move(tensor, addr, call); }, nn_runtime);
}

FUSION_C aclnnStatus aclGetRawTensorAddr(const aclTensor *tensor, void **addr) {
    return coded(
        "aclGetRawTensorAddr", FUSION_CALLER,
        [&](const Call &) { write<void *>(addr, "addr", need<Tensor>(tensor, "tensor")->data); }, nn_runtime);
}

FUSION_C aclnnStatus aclGetViewShape(const aclTensor *tensor, std::int64_t **viewDims, std::uint64_t *viewDimsNum) {
    return hand_out("aclGetViewShape", FUSION_CALLER, tensor, {viewDims, "viewDims"}, {viewDimsNum, "viewDimsNum"},
                    &Tensor::dims);
}

FUSION_C aclnnStatus aclGetStorageShape(const aclTensor *tensor, std::int64_t **storageDims,
                                        std::uint64_t *storageDimsNum) {
    return hand_out("aclGetStorageShape", FUSION_CALLER, tensor, {storageDims, "storageDims"},
                    {storageDimsNum, "storageDimsNum"}, &Tensor::storage_dims);
}

FUSION_C aclnnStatus aclGetViewStrides(const aclTensor *tensor, std::int64_t **stridesValue,
                                       std::uint64_t *stridesNum) {
    return hand_out("aclGetViewStrides", FUSION_CALLER, tensor, {stridesValue, "stridesValue"},
                    {stridesNum, "stridesNum"}, &Tensor::strides);
}

FUSION_C aclnnStatus aclGetViewOffset(const aclTensor *tensor, std::int64_t *offset) {
    return coded(
        "aclGetViewOffset", FUSION_CALLER,
        [&](const Call &) { write(offset, "offset", need<Tensor>(tensor, "tensor")->offset); }, nn_runtime);
}

FUSION_C aclnnStatus aclGetFormat(const aclTensor *tensor, aclFormat *format) {
    return coded(
        "aclGetFormat", FUSION_CALLER,
        [&](const Call &) { write(format, "format", static_cast<aclFormat>(need<Tensor>(tensor, "tensor")->format)); },
        nn_runtime);
}

FUSION_C aclnnStatus aclGetDataType(const aclTensor *tensor, aclDataType *dataType) {
    return coded(
        "aclGetDataType", FUSION_CALLER,
        [&](const Call &) {
            write(dataType, "dataType", static_cast<aclDataType>(need<Tensor>(tensor, "tensor")->dtype));
        },
        nn_runtime);
}

FUSION_C aclnnStatus aclGetIntArraySize(const aclIntArray *array, std::uint64_t *size) {
    return count<IntArray>("aclGetIntArraySize", FUSION_CALLER, array, "array", size,
                           [](const auto &of) { return of.values.size(); });
}

FUSION_C aclnnStatus aclGetFloatArraySize(const aclFloatArray *array, std::uint64_t *size) {
    return count<FloatArray>("aclGetFloatArraySize", FUSION_CALLER, array, "array", size,
                             [](const auto &of) { return of.values.size(); });
}

FUSION_C aclnnStatus aclGetBoolArraySize(const aclBoolArray *array, std::uint64_t *size) {
    return count<BoolArray>("aclGetBoolArraySize", FUSION_CALLER, array, "array", size,
                            [](const auto &of) { return of.values.size(); });
}

FUSION_C aclnnStatus aclGetTensorListSize(const aclTensorList *tensorList, std::uint64_t *size) {
    return count<TensorList>("aclGetTensorListSize", FUSION_CALLER, tensorList, "tensorList", size,
                             [](const auto &of) { return of.tensors.size(); });
}

FUSION_C aclnnStatus aclGetScalarListSize(const aclScalarList *scalarList, std::uint64_t *size) {
    return count<ScalarList>("aclGetScalarListSize", FUSION_CALLER, scalarList, "scalarList", size,
                             [](const auto &of) { return of.scalars.size(); });
}

FUSION_C aclnnStatus aclnnInit(const char *configPath) { return begin_operators(configPath, FUSION_CALLER); }
FUSION_C aclnnStatus aclnnFinalize() { return end_operators(FUSION_CALLER); }

}  // namespace fusion::capi
