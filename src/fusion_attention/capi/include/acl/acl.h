/* The beginning and the end of a program, and what it was told last. */
#ifndef FUSION_ATTENTION_ACL_H
#define FUSION_ATTENTION_ACL_H

#include "acl/acl_base.h"
#include "acl/acl_rt.h"

#ifdef __cplusplus
extern "C" {
#endif

/* configPath: a JSON file, or null or ""; docs/c_api.md says what this library reads of it. */
ACL_FUNC_VISIBILITY aclError aclInit(const char *configPath);
ACL_FUNC_VISIBILITY aclError aclFinalize(void);
ACL_FUNC_VISIBILITY aclError aclrtGetVersion(int32_t *majorVersion, int32_t *minorVersion, int32_t *patchVersion);

/* Why this thread's last failed call failed, once; null where nothing did. Valid until the thread's next call. */
ACL_FUNC_VISIBILITY const char *aclGetRecentErrMsg(void);

#ifdef __cplusplus
}
#endif

#endif
