// aclDataType: names, and sizes in bits.
#pragma once

#include <cstddef>

namespace fusion::capi {

struct Dtype {
    int number;
    const char *name;
    int bits;  // of an element; 0: of no fixed size
};

inline constexpr Dtype dtypes[] = {
    {0, "ACL_FLOAT", 32},       {1, "ACL_FLOAT16", 16},       {2, "ACL_INT8", 8},          {3, "ACL_INT32", 32},
    {4, "ACL_UINT8", 8},        {6, "ACL_INT16", 16},         {7, "ACL_UINT16", 16},       {8, "ACL_UINT32", 32},
    {9, "ACL_INT64", 64},       {10, "ACL_UINT64", 64},       {11, "ACL_DOUBLE", 64},      {12, "ACL_BOOL", 8},
    {13, "ACL_STRING", 0},      {16, "ACL_COMPLEX64", 64},    {17, "ACL_COMPLEX128", 128}, {27, "ACL_BF16", 16},
    {29, "ACL_INT4", 4},        {30, "ACL_UINT1", 1},         {33, "ACL_COMPLEX32", 32},   {34, "ACL_HIFLOAT8", 8},
    {35, "ACL_FLOAT8_E5M2", 8}, {36, "ACL_FLOAT8_E4M3FN", 8}, {37, "ACL_FLOAT8_E8M0", 8},  {38, "ACL_FLOAT6_E3M2", 6},
    {39, "ACL_FLOAT6_E2M3", 6}, {40, "ACL_FLOAT4_E2M1", 4},   {41, "ACL_FLOAT4_E1M2", 4},
};

// Returns null for a number that CANN does not define.
constexpr const Dtype *dtype_of(int number) {
    for (const Dtype &one : dtypes) {
        if (one.number == number) return &one;
    }
    return nullptr;
}

constexpr const char *dtype_name(int number) {
    const Dtype *dtype = dtype_of(number);
    return dtype == nullptr ? "an unknown type" : dtype->name;
}

}  // namespace fusion::capi
