// The pooling part of an instruction-set variant; compiled like variant_dense.cpp, with the same restrictions.

#include "dtype_dispatch.h"
#include "sparse/pool.h"

namespace fusion {
namespace {

#if defined(FUSION_BRAIN_PRODUCTS)
constexpr PoolVariant variant = {{{}, {}, pool_kernels<Brain>}};
#else
constexpr PoolVariant variant = {{pool_kernels<float>, pool_kernels<Half>, pool_kernels<Brain>}};
#endif

}  // namespace
}  // namespace fusion

extern "C" const fusion::PoolVariant *FUSION_ENTRY(_pool)() { return &fusion::variant; }
