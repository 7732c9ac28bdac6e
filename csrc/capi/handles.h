// What stands behind CANN's opaque handles. A handle is a number, never an address of ours: it is looked up, so one
// that was destroyed, of another kind or never made is an answer and no crash. Numbers are not used again; their low
// byte is 0, as programs of the operators' pages need it (one overwrites that byte of its stream).
//
// Objects do not change: a tensor that gets another address is another object behind the same handle, so who has looked
// one up may use it while other threads move or destroy it.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "capi/calls.h"
#include "capi/memory.h"

namespace fusion::capi {

enum class Kind : std::uint8_t {
    tensor,
    tensor_list,
    scalar,
    scalar_list,
    int_array,
    float_array,
    bool_array,
    executor,
    context,
    stream,
    event,
};

struct Object {
    virtual ~Object() = default;
    CallSite made;
};

using Handle = const void *;
// The upper bits of every handle. They make it no address on any processor here.
inline constexpr std::uintptr_t handle_tag = 0xac;

// Refuses null, and a handle, where a program shall give an address of its own: aclrtCreateStream(stream) for
// (&stream).
inline void need_address(const void *place, const char *param, int null_code = invalid_param) {
    const bool handle = reinterpret_cast<std::uintptr_t>(place) >> 48 == handle_tag;
    if (place != nullptr && !handle) return;
    const int code = handle && null_code == nn_null ? int{nn_invalid} : null_code;
    throw Refusal(code, std::string(param) + ": expected an address, got " + (handle ? "a handle" : "null"));
}

// A new handle of an object; made_by says who asked for it.
FUSION_SHARED Handle add(Kind kind, const std::shared_ptr<Object> &object, const Call &call) noexcept;
// The object of a live handle of that kind; null otherwise.
FUSION_SHARED std::shared_ptr<Object> look_up(Handle handle, Kind kind) noexcept;
// Puts another object behind a live handle; false where it is none any more.
FUSION_SHARED bool replace(Handle handle, Kind kind, std::shared_ptr<Object> object) noexcept;
// Ends a handle; its object, or null where it was none of that kind.
FUSION_SHARED std::shared_ptr<Object> remove(Handle handle, Kind kind) noexcept;
// What is wrong with a handle that look_up() did not find: "null", "an aclTensor destroyed before", "an aclIntArray"
// ...
FUSION_SHARED std::string wrong(Handle handle) noexcept;

// Whether a handle was one of that kind, and is no more.
FUSION_SHARED bool ended(Handle handle, Kind kind) noexcept;

template <class T>
std::shared_ptr<const T> find(Handle handle) noexcept {
    return std::static_pointer_cast<const T>(look_up(handle, T::kind));
}

// find(), or a refusal that names the parameter: null_code for null, invalid_code otherwise.
template <class T>
std::shared_ptr<const T> need(Handle handle, const char *param, int null_code = nn_null,
                              int invalid_code = nn_invalid) {
    if (auto object = find<T>(handle)) return object;
    throw Refusal(handle == nullptr ? null_code : invalid_code,
                  std::string(param) + ": expected an " + T::name + ", got " + wrong(handle));
}

// aclTensor: a strided window. data may be null: programs give the address before phase 2 (aclSetInputTensorAddr ...).
struct Tensor : Object {
    static constexpr Kind kind = Kind::tensor;
    static constexpr const char *name = "aclTensor";

    std::vector<std::int64_t> dims, strides, storage_dims;
    std::int64_t offset = 0;  // elements from data to the first one
    int dtype = -1, format = -1;
    void *data = nullptr;
    std::weak_ptr<Allocation> memory;  // that holds data
    std::uint64_t version = 0;         // never the same of two objects

    // Its allocation while that is not freed; null otherwise, and where data is null.
    std::shared_ptr<Allocation> held() const {
        auto found = memory.lock();
        return found && found->alive ? found : nullptr;
    }
};

struct TensorList : Object {
    static constexpr Kind kind = Kind::tensor_list;
    static constexpr const char *name = "aclTensorList";
    std::vector<Handle> tensors;  // it owns them, but a program may have destroyed one
};

struct Scalar : Object {
    static constexpr Kind kind = Kind::scalar;
    static constexpr const char *name = "aclScalar";
    int dtype = -1;
    unsigned char bytes[16] = {};
};

struct ScalarList : Object {
    static constexpr Kind kind = Kind::scalar_list;
    static constexpr const char *name = "aclScalarList";
    std::vector<Handle> scalars;
};

template <class T, Kind K>
struct Array : Object {
    static constexpr Kind kind = K;
    static constexpr const char *name = K == Kind::int_array     ? "aclIntArray"
                                        : K == Kind::float_array ? "aclFloatArray"
                                                                 : "aclBoolArray";
    std::vector<T> values;
};
using IntArray = Array<std::int64_t, Kind::int_array>;
using FloatArray = Array<float, Kind::float_array>;
using BoolArray = Array<unsigned char, Kind::bool_array>;

// aclOpExecutor: what phase 1 leaves for phase 2. libopapi makes it, and has what it runs in a struct that derives from
// this one; what may be asked of it in which order is decided here. One run, unless made repeatable.
struct Executor : Object {
    static constexpr Kind kind = Kind::executor;
    static constexpr const char *name = "aclOpExecutor";

    std::string operation;                // aclnnXxx
    std::uint64_t workspace = 0;          // bytes
    std::vector<Handle> inputs, outputs;  // aclTensor, aclTensorList or null, by the order of the operator's tensors
    mutable std::atomic<bool> repeatable = false, used = false;

    // Whether a run may begin: each time if repeatable, else once. A run that ends an executor also takes it out of the
    // registry (remove()).
    bool begin() const { return !used.exchange(true) || repeatable; }
};

// What aclInit() decided; null before, and after aclFinalize().
struct Settings {
    std::string device = "cpu", backend = "auto";
    bool checked = false;
};
FUSION_SHARED std::shared_ptr<const Settings> settings() noexcept;
// aclnnInit() and aclnnFinalize(), which begin and end what aclInit() did not.
FUSION_SHARED int begin_operators(const char *path, const void *caller) noexcept;
FUSION_SHARED int end_operators(const void *caller) noexcept;
// Whether work can be given to a stream (null: the default one); its code, and the text in `why`, otherwise.
FUSION_SHARED int check_stream(Handle stream, std::string &why) noexcept;

}  // namespace fusion::capi
