/* The codes of operators under the name of the header that programs for the chip take them from. */
#ifndef FUSION_ATTENTION_OPDEV_OP_ERRNO_H
#define FUSION_ATTENTION_OPDEV_OP_ERRNO_H

#include "aclnn/aclnn_base.h"

#endif
