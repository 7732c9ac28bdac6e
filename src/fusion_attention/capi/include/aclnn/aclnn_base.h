/* What the headers of operators include. */
#ifndef FUSION_ATTENTION_ACLNN_BASE_H
#define FUSION_ATTENTION_ACLNN_BASE_H

#include "aclnn/acl_meta.h"

#ifdef __cplusplus
#define ACLNN_FUNCTION extern "C" ACL_FUNC_VISIBILITY
#else
#define ACLNN_FUNCTION ACL_FUNC_VISIBILITY
#endif

/* Codes of operators. */
static const aclnnStatus ACLNN_SUCCESS = 0;
static const aclnnStatus ACLNN_ERR_PARAM_NULLPTR = 161001;
static const aclnnStatus ACLNN_ERR_PARAM_INVALID = 161002;
static const aclnnStatus ACLNN_ERR_RUNTIME_ERROR = 361001;
static const aclnnStatus ACLNN_ERR_INNER = 561000;
static const aclnnStatus ACLNN_ERR_INNER_TILING_ERROR = 561002;
static const aclnnStatus ACLNN_ERR_INNER_FIND_KERNEL_ERROR = 561003;
static const aclnnStatus ACLNN_ERR_INNER_NULLPTR = 561103;

/* Programs begin with aclInit(), with aclnnInit() or with both; aclnnFinalize() ends what aclnnInit() alone began. */
ACLNN_FUNCTION aclnnStatus aclnnInit(const char *configPath);
ACLNN_FUNCTION aclnnStatus aclnnFinalize(void);

#endif
