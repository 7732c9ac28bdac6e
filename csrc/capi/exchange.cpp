#include "capi/exchange.h"

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <new>

namespace fusion::capi {
namespace {

// DLPack's structures, as its specification has them (version 0.x, which every torch reads).
struct DLManagedTensor {
    void *data;
    std::int32_t device_type, device_id;
    std::int32_t ndim;
    std::uint8_t code, bits;
    std::uint16_t lanes;
    std::int64_t *shape, *strides;
    std::uint64_t byte_offset;
    void *owner;
    void (*deleter)(DLManagedTensor *self);
};
constexpr const char *capsule_name = "dltensor";
enum : std::uint8_t { dl_int, dl_uint, dl_float, dl_bfloat = 4, dl_complex, dl_bool };
enum : std::int32_t { dl_cpu = 1, dl_cuda = 2 };

// The DLPack type of each aclDataType; bits 0: torch has no such type. Recent types of 8 bits are passed as plain
// bytes, and entry.py restores their type.
struct Type {
    int number;
    std::uint8_t code, bits;
    bool exact = true;
};
constexpr Type types[] = {
    {0, dl_float, 32},       {1, dl_float, 16},       {2, dl_int, 8},       {3, dl_int, 32},       {4, dl_uint, 8},
    {6, dl_int, 16},         {7, dl_uint, 16},        {8, dl_uint, 32},     {9, dl_int, 64},       {10, dl_uint, 64},
    {11, dl_float, 64},      {12, dl_bool, 8},        {16, dl_complex, 64}, {17, dl_complex, 128}, {27, dl_bfloat, 16},
    {35, dl_uint, 8, false}, {36, dl_uint, 8, false},
};
constexpr int format_nd = 2;

Type type_of(int number) {
    const auto *const entry =
        std::find_if(std::begin(types), std::end(types), [number](const Type &type) { return type.number == number; });
    return entry == std::end(types) ? Type{number, 0, 0, false} : *entry;
}

void delete_tensor(DLManagedTensor *tensor) { std::free(tensor); }

// Deletes a tensor whose capsule was not read; readers rename the capsules that they consume.
void delete_capsule(PyObject *capsule) {
    const Python *const py = running_python();
    if (py && py->PyCapsule_IsValid(capsule, capsule_name))
        delete_tensor(static_cast<DLManagedTensor *>(py->PyCapsule_GetPointer(capsule, capsule_name)));
}

PyObject *capsule_of(const Python &py, const Tensor &tensor, const Type &type, void *data, const std::string &device) {
    const std::size_t rank = tensor.dims.size();
    void *const memory = std::malloc(sizeof(DLManagedTensor) + 2 * rank * sizeof(std::int64_t));
    if (!memory) throw std::bad_alloc();
    auto *const exported = new (memory) DLManagedTensor{};
    exported->shape = reinterpret_cast<std::int64_t *>(exported + 1);
    exported->strides = exported->shape + rank;
    std::copy(tensor.dims.begin(), tensor.dims.end(), exported->shape);
    std::copy(tensor.strides.begin(), tensor.strides.end(), exported->strides);
    const auto colon = device.find(':');
    exported->data = data;
    exported->device_type = device == "cpu" ? dl_cpu : dl_cuda;
    exported->device_id = colon == std::string::npos
                              ? 0
                              : static_cast<std::int32_t>(std::strtol(device.c_str() + colon + 1, nullptr, 10));
    exported->ndim = static_cast<std::int32_t>(rank);
    exported->code = type.code, exported->bits = type.bits, exported->lanes = 1;
    exported->deleter = delete_tensor;
    PyObject *const capsule = py.PyCapsule_New(exported, capsule_name, delete_capsule);
    if (!capsule) delete_tensor(exported);
    return capsule;
}

}  // namespace

bool is_exchanged(int dtype) { return type_of(dtype).bits != 0; }

PyObject *exchanged(const Python &py, const Tensor &tensor, void *data, const std::string &device) {
    const Type type = type_of(tensor.dtype);
    PyObject *const capsule = type.bits ? capsule_of(py, tensor, type, data, device) : nullptr;
    if (type.bits && !capsule) throw std::bad_alloc();
    if (type.exact && tensor.format == format_nd) return capsule;
    if (!capsule) py.Py_IncRef(py.none);
    return tuple_of(
        py, {capsule ? capsule : py.none, py.PyLong_FromLongLong(tensor.dtype), py.PyLong_FromLongLong(tensor.format)});
}

}  // namespace fusion::capi
