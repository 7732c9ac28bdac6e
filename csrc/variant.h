// What one instruction-set variant of the CPU core offers to the baseline code.
//
// variant.cpp is compiled once per instruction set. Each copy keeps everything in an anonymous namespace and shows one
// C entry point, so no function compiled for a newer CPU can be linked into code that an older one runs.

#pragma once

#include <cstddef>
#include <cstdint>

namespace fusion {

struct Variant {
    const char *name;
    int lanes;  // floats per vector register, as compiled
    float (*dot)(const float *x, const float *y, std::size_t n);
    float (*dot_bf16)(const std::uint16_t *x, const std::uint16_t *y, std::size_t n);
};

}  // namespace fusion

extern "C" {
const fusion::Variant *fusion_variant_base();
const fusion::Variant *fusion_variant_v3();
const fusion::Variant *fusion_variant_v4();
const fusion::Variant *fusion_variant_v4_avx512bf16();
}
