/* The half-precision number in which C++ programs keep host data. */
#ifndef FUSION_ATTENTION_OPDEV_FP16_T_H
#define FUSION_ATTENTION_OPDEV_FP16_T_H

#include "acl/acl_base.h"

#ifdef __cplusplus
#include <type_traits>

namespace op {

struct fp16_t {
    uint16_t val;

    fp16_t() : val(0) {}
    template <class Number, class = typename std::enable_if<std::is_arithmetic<Number>::value>::type>
    fp16_t(Number value) : val(aclFloatToFloat16(static_cast<float>(value))) {}

    operator float() const { return aclFloat16ToFloat(val); }
    float toFloat() const { return aclFloat16ToFloat(val); }
};

}  // namespace op
#endif

#endif
