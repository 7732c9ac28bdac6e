// The C functions for arguments of operators: tensors, lists, scalars, arrays (libnnopbase).
#include <algorithm>
#include <atomic>
#include <cstring>
#include <type_traits>

#include "aclnn/aclnn_base.h"
#include "capi/dtypes.h"
#include "capi/handles.h"

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
    if (count > most_dims) throw Refusal(nn_invalid, param, ": expected at most 25 dimensions, got ", count);
    if (count != 0) need_address(values, param, nn_null);
    std::vector<std::int64_t> numbers(values, values + count);
    for (const std::int64_t value : numbers) {
        if (value < 0) throw Refusal(nn_invalid, param, ": expected no negative number, got ", value);
    }
    return numbers;
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
    if (large || last == INT64_MAX)
        throw Refusal(nn_invalid, "viewDims: expected fewer elements than 64 bits can count");
    return empty ? 0 : last + 1;
}

std::int64_t bytes_of(std::int64_t elements, int bits) {
    std::int64_t all = 0;
    if (__builtin_mul_overflow(elements, std::int64_t{bits}, &all))
        throw Refusal(nn_invalid, "viewDims: expected fewer bytes than 64 bits can count");
    return all / 8 + (all % 8 != 0);
}

// Throws if a view exceeds its storage, if that is given, or what 64 bits can count.
Extent extent_of(const Tensor &tensor) {
    const int bits = dtype_of(tensor.dtype)->bits;
    const std::int64_t count = reach(tensor.dims, tensor.strides);
    std::int64_t stop = 0;
    if (__builtin_add_overflow(tensor.offset, count, &stop))
        throw Refusal(nn_invalid, "offset: expected fewer elements than 64 bits can count");
    if (count == 0) return {0, 0};
    if (!tensor.storage_dims.empty()) {
        std::int64_t capacity = 1;
        for (const std::int64_t size : tensor.storage_dims) {
            if (__builtin_mul_overflow(capacity, size, &capacity))
                throw Refusal(nn_invalid, "storageDims: expected fewer elements than 64 bits can count");
        }
        if (stop > capacity)
            throw Refusal(nn_invalid, "viewDims: the view ends at element ", stop, " of a storage of ", capacity);
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
            call.defect("dataType: a tensor of ", dtype_name(tensor.dtype), " has ", size,
                        " bytes where the program put ", copied, in_brackets(trace->second.creation),
                        ": the host's type is not the tensor's; ", described(memory.address));
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
    const Extent extent = tensor.extent = extent_of(tensor);
    if (data == nullptr) return;
    const auto memory = allocation_of(data);
    if (memory == nullptr || memory->host)
        throw Refusal(nn_invalid, "tensorData: expected memory of aclrtMalloc(), got ", described(data));
    const std::int64_t first = static_cast<char *>(data) - memory->address;
    const int bits = dtype_of(tensor.dtype)->bits;
    if (bits >= 8 && first % (bits / 8) != 0)
        throw Refusal(nn_invalid, "tensorData: expected memory aligned to ", bits / 8, " bytes, got ", described(data));
    const auto capacity = static_cast<std::int64_t>(memory->granted) - first;
    const auto available = static_cast<std::int64_t>(memory->requested) - first;
    const std::string text =
        "tensorData: the view ends at byte " + to_string(first + extent.end) + " of " + described(memory->address);
    if (extent.end > capacity) throw Refusal(nn_invalid, text);
    tensor.memory = memory;
    if (call.number == 0 || extent.end == 0) return;
    if (extent.end > available) call.defect(text, ", within the pages that the chip gives");
    compare_with_copies(tensor, *memory, first + extent.begin, first + extent.end, call);
}

std::shared_ptr<Tensor> tensor_of(const Request &from, const Call &call) {
    auto result = std::make_shared<Tensor>();
    result->dims = sizes(from.dims, from.dims_count, "viewDims");
    result->storage_dims = sizes(from.storage_dims, from.storage_dims_count, "storageDims");
    const Dtype *dtype = dtype_of(from.dtype);
    if (dtype == nullptr || dtype->bits == 0)
        throw Refusal(nn_invalid, "dataType: expected an aclDataType of numbers, got ", from.dtype);
    result->dtype = from.dtype;
    bool valid = false;
    for (const int format : formats) valid = valid || format == from.format;
    if (!valid) throw Refusal(nn_invalid, "format: expected an aclFormat, got ", from.format);
    result->format = from.format;
    if (from.offset < 0) throw Refusal(nn_invalid, "offset: expected no negative number, got ", from.offset);
    result->offset = from.offset;
    if (from.strides != nullptr) {
        result->strides = sizes(from.strides, from.dims_count, "stride");
    } else {
        result->strides.assign(result->dims.size(), 1);
        for (std::size_t axis = result->dims.size(); axis-- > 1;) {
            if (__builtin_mul_overflow(result->dims[axis], result->strides[axis], &result->strides[axis - 1]))
                throw Refusal(nn_invalid, "viewDims: expected fewer elements than 64 bits can count");
        }
    }
    place(*result, from.data, call);
    return result;
}

// A handle as any of the interface's pointers.
struct AnyPointer {
    Handle handle = nullptr;

    template <class T>
    operator T *() const {
        return static_cast<T *>(const_cast<void *>(handle));
    }
};

// Returns the handle of the object that make(call) returns; null if it fails.
template <class Make>
AnyPointer create(Make make, Caller caller = {}) noexcept {
    AnyPointer pointer;
    coded<nn_runtime>(
        [&](const Call &call) {
            const auto object = make(call);
            pointer.handle = add(std::remove_reference_t<decltype(*object)>::kind, object, call);
        },
        caller);
    return pointer;
}

template <class T>
AnyPointer made_array(const void *values, std::uint64_t size, Caller caller = {}) {
    return create(
        [&](const Call &) {
            if (size != 0) need_address(values, "value", nn_null);
            if (size > most_values) throw Refusal(nn_invalid, "size: expected fewer values, got ", size);
            auto array = std::make_shared<T>();
            array->values.resize(size);
            if (size != 0) std::memcpy(array->values.data(), values, size * sizeof array->values[0]);
            return array;
        },
        caller);
}

// Returns a list of live handles of another kind.
template <class List, class Member>
AnyPointer made_list(const void *values, std::uint64_t size, Caller caller = {}) {
    return create(
        [&](const Call &) {
            if (size != 0) need_address(values, "value", nn_null);
            if (size > most_values) throw Refusal(nn_invalid, "size: expected fewer handles, got ", size);
            const auto *const handles = static_cast<const Handle *>(values);
            auto list = std::make_shared<List>();
            for (std::uint64_t i = 0; i < size; ++i) {
                need<Member>(handles[i], ("value[" + to_string(i) + "]").c_str());
                list->values.push_back(handles[i]);
            }
            return list;
        },
        caller);
}

// Destroys a handle, with the members of a list; ignores null, as CANN does.
template <class T, class Member = void>
int destroy(Handle handle, const char *param, Caller caller = {}) {
    return coded(
        [&](const Call &call) {
            if (handle == nullptr) return;
            const auto object = need<T>(handle, param);
            remove(handle, T::kind);
            if constexpr (!std::is_void_v<Member>) {
                for (const Handle member : object->values) {
                    if (remove(member, Member::kind) == nullptr) {
                        call.defect(param, ": it owns its members, and one was destroyed before");
                    }
                }
            }
        },
        caller);
}

template <class T>
void write(T *place, const char *param, T value) {
    need_address(place, param, nn_null);
    *place = value;
}

// Writes a property of a tensor.
template <class T, class Of>
int write_of(const aclTensor *tensor, T *place, const char *param, Of of, Caller caller = {}) {
    return coded<nn_runtime>([&] { write(place, param, static_cast<T>(of(*need<Tensor>(tensor, "tensor")))); }, caller);
}

// Writes the number of values of an array or a list.
template <class T>
int write_size(Handle handle, const char *param, std::uint64_t *size, Caller caller = {}) {
    return coded<nn_runtime>([&] { write<std::uint64_t>(size, "size", need<T>(handle, param)->values.size()); },
                             caller);
}

// The address of a result and the name of its parameter.
template <class T>
struct Place {
    T *address;
    const char *param;
};

// Returns numbers in an array of new[], which the program deletes, as in CANN.
int hand_out(const aclTensor *tensor, Place<std::int64_t *> values, Place<std::uint64_t> count,
             std::vector<std::int64_t> Tensor::*member, Caller caller = {}) {
    return coded<nn_runtime>(
        [&] {
            const auto object = need<Tensor>(tensor, "tensor");
            const std::vector<std::int64_t> &from = (*object).*member;
            need_address(values.address, values.param, nn_null);
            write<std::uint64_t>(count.address, count.param, from.size());
            *values.address = new std::int64_t[from.size()];
            std::copy(from.begin(), from.end(), *values.address);
        },
        caller);
}

}  // namespace

void move(Handle tensor, void *data, const Call &call, const char *param) {
    auto moved = std::make_shared<Tensor>(*need<Tensor>(tensor, param));
    place(*moved, data, call);
    if (!replace(tensor, Kind::tensor, moved)) throw Refusal(nn_invalid, param, ": destroyed meanwhile");
}

FUSION_C aclTensor *aclCreateTensor(const std::int64_t *viewDims, std::uint64_t viewDimsNum, aclDataType dataType,
                                    const std::int64_t *stride, std::int64_t offset, aclFormat format,
                                    const std::int64_t *storageDims, std::uint64_t storageDimsNum, void *tensorData) {
    return create([&](const Call &call) {
        return tensor_of(
            {viewDims, viewDimsNum, dataType, stride, offset, format, storageDims, storageDimsNum, tensorData}, call);
    });
}

FUSION_C aclnnStatus aclInitTensor(aclTensor *tensor, const std::int64_t *viewDims, std::uint64_t viewDimsNum,
                                   aclDataType dataType, const std::int64_t *stride, std::int64_t offset,
                                   aclFormat format, const std::int64_t *storageDims, std::uint64_t storageDimsNum,
                                   void *tensorDataAddr) {
    return coded<nn_runtime>([&](const Call &call) {
        need<Tensor>(tensor, "tensor");
        replace(tensor, Kind::tensor,
                tensor_of({viewDims, viewDimsNum, dataType, stride, offset, format, storageDims, storageDimsNum,
                           tensorDataAddr},
                          call));
    });
}

FUSION_C aclScalar *aclCreateScalar(void *value, aclDataType dataType) {
    return create([&](const Call &) {
        need_address(value, "value", nn_null);
        const Dtype *dtype = dtype_of(dataType);
        if (dtype == nullptr || dtype->bits < 8)
            throw Refusal(nn_invalid, "dataType: expected an aclDataType of numbers, got ", dataType);
        auto scalar = std::make_shared<Scalar>();
        scalar->dtype = dataType;
        std::memcpy(scalar->bytes, value, static_cast<std::size_t>(dtype->bits / 8));
        return scalar;
    });
}

// The functions of an array or a list: its creation from values, its destruction, and the number of its values.
#define FUSION_VALUES(NAME, VALUE, CREATE, DESTROY, PARAM)                                                \
    FUSION_C acl##NAME *aclCreate##NAME(VALUE *value, std::uint64_t size) { return CREATE(value, size); } \
    FUSION_C aclnnStatus aclDestroy##NAME(const acl##NAME *array) { return DESTROY(array, "array"); }     \
    FUSION_C aclnnStatus aclGet##NAME##Size(const acl##NAME *array, std::uint64_t *size) {                \
        return write_size<NAME>(array, PARAM, size);                                                      \
    }
#define FUSION_ARRAY(NAME, VALUE) FUSION_VALUES(NAME, const VALUE, made_array<NAME>, destroy<NAME>, "array")
#define FUSION_LIST(NAME, MEMBER, PARAM) \
    FUSION_VALUES(NAME, const acl##MEMBER *const, (made_list<NAME, MEMBER>), (destroy<NAME, MEMBER>), PARAM)

FUSION_ARRAY(IntArray, std::int64_t)
FUSION_ARRAY(FloatArray, float)
FUSION_ARRAY(BoolArray, bool)
FUSION_LIST(TensorList, Tensor, "tensorList")
FUSION_LIST(ScalarList, Scalar, "scalarList")

FUSION_C aclnnStatus aclDestroyTensor(const aclTensor *tensor) { return destroy<Tensor>(tensor, "tensor"); }
FUSION_C aclnnStatus aclDestroyScalar(const aclScalar *scalar) { return destroy<Scalar>(scalar, "scalar"); }

FUSION_C aclnnStatus aclSetRawTensorAddr(aclTensor *tensor, void *addr) {
    return coded<nn_runtime>([&](const Call &call) { move(tensor, addr, call); });
}

FUSION_C aclnnStatus aclGetRawTensorAddr(const aclTensor *tensor, void **addr) {
    return write_of(tensor, addr, "addr", [](const Tensor &of) { return of.data; });
}

FUSION_C aclnnStatus aclGetViewShape(const aclTensor *tensor, std::int64_t **viewDims, std::uint64_t *viewDimsNum) {
    return hand_out(tensor, {viewDims, "viewDims"}, {viewDimsNum, "viewDimsNum"}, &Tensor::dims);
}

FUSION_C aclnnStatus aclGetStorageShape(const aclTensor *tensor, std::int64_t **storageDims,
                                        std::uint64_t *storageDimsNum) {
    return hand_out(tensor, {storageDims, "storageDims"}, {storageDimsNum, "storageDimsNum"}, &Tensor::storage_dims);
}

FUSION_C aclnnStatus aclGetViewStrides(const aclTensor *tensor, std::int64_t **stridesValue,
                                       std::uint64_t *stridesNum) {
    return hand_out(tensor, {stridesValue, "stridesValue"}, {stridesNum, "stridesNum"}, &Tensor::strides);
}

FUSION_C aclnnStatus aclGetViewOffset(const aclTensor *tensor, std::int64_t *offset) {
    return write_of(tensor, offset, "offset", [](const Tensor &of) { return of.offset; });
}

FUSION_C aclnnStatus aclGetFormat(const aclTensor *tensor, aclFormat *format) {
    return write_of(tensor, format, "format", [](const Tensor &of) { return of.format; });
}

FUSION_C aclnnStatus aclGetDataType(const aclTensor *tensor, aclDataType *dataType) {
    return write_of(tensor, dataType, "dataType", [](const Tensor &of) { return of.dtype; });
}

FUSION_C aclnnStatus aclnnInit(const char *configPath) { return begin_operators(configPath, {}); }
FUSION_C aclnnStatus aclnnFinalize() { return end_operators({}); }

}  // namespace fusion::capi
