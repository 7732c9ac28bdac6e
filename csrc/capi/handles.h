// The objects of CANN's opaque handles. A handle is a number that is looked up, never an address of an object, so one
// that was destroyed, of another kind or invalid is an error and no crash. Numbers are not reused; their low
// byte is 0, because a program of the operators' pages overwrites that byte of its stream.
//
// Objects are immutable: a new address makes another object for the same handle, so a thread that has looked
// one up may use it while other threads replace or destroy it.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "capi/errors.h"
#include "capi/allocations.h"

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

// CANN's names of the kinds.
inline constexpr const char *names[] = {"aclTensor",    "aclTensorList", "aclScalar",    "aclScalarList",
                                        "aclIntArray",  "aclFloatArray", "aclBoolArray", "aclOpExecutor",
                                        "aclrtContext", "aclrtStream",   "aclrtEvent"};
constexpr const char *name_of(Kind kind) { return names[static_cast<std::size_t>(kind)]; }

struct Object {
    virtual ~Object() = default;
    CallSite creation;
};

using Handle = const void *;
// The upper bits of every handle, which are no valid address on the supported processors.
inline constexpr std::uintptr_t handle_tag = 0xac;

// Throws for null, or for a handle in place of an address of the program: aclrtCreateStream(stream) for
// (&stream).
inline void need_address(const void *place, const char *param, int null_code = invalid_param) {
    const bool handle = reinterpret_cast<std::uintptr_t>(place) >> 48 == handle_tag;
    if (place != nullptr && !handle) return;
    const int code = handle && null_code == nn_null ? int{nn_invalid} : null_code;
    throw Refusal(code, param, ": expected an address, got ", (handle ? "a handle" : "null"));
}

// Returns a new handle of an object; made_by: the call that requested it.
FUSION_SHARED Handle add(Kind kind, const std::shared_ptr<Object> &object, const Call &call) noexcept;
// Returns the object of a live handle of that kind; null otherwise.
FUSION_SHARED std::shared_ptr<Object> look_up(Handle handle, Kind kind) noexcept;
// Replaces the object of a live handle; returns false if the handle was destroyed.
FUSION_SHARED bool replace(Handle handle, Kind kind, std::shared_ptr<Object> object) noexcept;
// Destroys a handle and returns its object, or null for a handle of another kind.
FUSION_SHARED std::shared_ptr<Object> remove(Handle handle, Kind kind) noexcept;
// Describes a handle that look_up() did not find: "null", "an aclTensor destroyed before", "an aclIntArray"
// ...
FUSION_SHARED std::string wrong(Handle handle) noexcept;

// True if a handle of that kind was destroyed.
FUSION_SHARED bool ended(Handle handle, Kind kind) noexcept;

template <class T>
std::shared_ptr<const T> find(Handle handle) noexcept {
    return std::static_pointer_cast<const T>(look_up(handle, T::kind));
}

// Returns find(), or throws with the parameter's name: null_code for null, invalid_code otherwise.
template <class T>
std::shared_ptr<const T> need(Handle handle, const char *param, int null_code = nn_null,
                              int invalid_code = nn_invalid) {
    if (auto object = find<T>(handle)) return object;
    throw Refusal(handle == nullptr ? null_code : invalid_code, param, ": expected an ", name_of(T::kind), ", got ",
                  wrong(handle));
}

// Bytes from a tensor's address to its first element, and to behind its last one; 0 for an empty tensor.
struct Extent {
    std::int64_t begin = 0, end = 0;
};

// aclTensor: a strided view. data may be null: programs set the address before phase 2 (aclSetInputTensorAddr ...).
struct Tensor : Object {
    static constexpr Kind kind = Kind::tensor;

    std::vector<std::int64_t> dims, strides, storage_dims;
    std::int64_t offset = 0;  // elements from data to the first one
    int dtype = -1, format = -1;
    void *data = nullptr;
    Extent extent;
    std::weak_ptr<Allocation> memory;  // that contains data
    std::uint64_t version = 0;         // unique for each object

    // Returns its allocation until it is freed; null otherwise, and for null data.
    std::shared_ptr<Allocation> live_memory() const {
        auto allocation = memory.lock();
        return allocation && allocation->alive ? allocation : nullptr;
    }
};

struct Scalar : Object {
    static constexpr Kind kind = Kind::scalar;
    int dtype = -1;
    unsigned char bytes[16] = {};
};

// An array, or a list of handles, whose members are destroyed with it; a program may have destroyed one before.
template <class T, Kind K>
struct Array : Object {
    static constexpr Kind kind = K;
    std::vector<T> values;
};
using IntArray = Array<std::int64_t, Kind::int_array>;
using FloatArray = Array<float, Kind::float_array>;
using BoolArray = Array<unsigned char, Kind::bool_array>;
using TensorList = Array<Handle, Kind::tensor_list>;
using ScalarList = Array<Handle, Kind::scalar_list>;

// Sets a tensor's address; throws and changes nothing if the memory there is too small. In libnnopbase.
void move(Handle tensor, void *data, const Call &call, const char *param = "tensor");

// aclOpExecutor: the plan of phase 1 for phase 2. libopapi creates it as a derived struct with the job to run;
// this struct checks the order of calls. It runs once, unless made repeatable.
struct Executor : Object {
    static constexpr Kind kind = Kind::executor;

    std::string operation;                // aclnnXxx
    std::uint64_t workspace = 0;          // bytes
    std::vector<Handle> inputs, outputs;  // aclTensor, aclTensorList or null, by the order of the operator's tensors
    mutable std::atomic<bool> repeatable = false, used = false;

    // True if a run may begin: each time if repeatable, else once. The last run also removes the executor from the
    // registry (remove()).
    bool begin() const { return !used.exchange(true) || repeatable; }
};

// Returns the settings of aclInit(); null before it, and after aclFinalize().
struct Settings {
    std::string device = "cpu", backend = "auto";
    bool checked = false;
};
FUSION_SHARED std::shared_ptr<const Settings> settings() noexcept;
// Implement aclnnInit() and aclnnFinalize(), which start and end the runtime if aclInit() did not.
FUSION_SHARED int begin_operators(const char *path, Caller caller) noexcept;
FUSION_SHARED int end_operators(Caller caller) noexcept;
// Returns 0 if a stream accepts work (null: the default stream), else an error code with its text in `why`.
FUSION_SHARED int check_stream(Handle stream, std::string &why) noexcept;

}  // namespace fusion::capi
