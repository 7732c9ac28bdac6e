/* Inference: FusedInferAttentionScoreV4, a causal prompt, with the log-sum-exp of each row, in float16. Phase 1 runs
 * once: its executor is made repeatable, and runs again after the query's tensor got the address of another query. */
#include "aclnnop/aclnn_fused_infer_attention_score_v4.h"
#include "attention_reference.h"

enum { ROWS = 48, KEYS = 80, HEADS = 4, KEY_HEADS = 2, DIM = 64, RUNS = 2 };

int main(void) {
    const aclrtStream stream = begin();
    const Head head = {ROWS, KEYS, DIM, DIM, DIM, 1, 1 / sqrt(DIM)};
    const size_t queries = HEADS * ROWS * DIM, keys = KEY_HEADS * KEYS * DIM, rows = HEADS * ROWS;
    float *q[RUNS] = {drawn(queries, 1), drawn(queries, 4)}, *k = drawn(keys, 2), *v = drawn(keys, 3);
    const Buffer K = rounded(k, ACL_FLOAT16, SIZES(1, KEY_HEADS, KEYS, DIM));
    const Buffer V = rounded(v, ACL_FLOAT16, SIZES(1, KEY_HEADS, KEYS, DIM));
    const Buffer Q[RUNS] = {rounded(q[0], ACL_FLOAT16, SIZES(1, HEADS, ROWS, DIM)),
                            rounded(q[1], ACL_FLOAT16, SIZES(1, HEADS, ROWS, DIM))};
    const Buffer MASK = causal_mask();
    const Buffer OUT = buffer(NULL, ACL_FLOAT16, SIZES(1, HEADS, ROWS, DIM));
    const Buffer LSE = buffer(NULL, ACL_FLOAT, SIZES(1, HEADS, ROWS, 1));
    aclTensorList *key_tensors = list_of(K), *values = list_of(V);

    char layout[] = "BNSD";
    uint64_t size = 0;
    aclOpExecutor *executor = NULL;
    CHECK(aclnnFusedInferAttentionScoreV4GetWorkspaceSize(
        Q[0].tensor, key_tensors, values, NULL, MASK.tensor, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL,
        NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, HEADS, head.scale, NO_LIMIT,
        NO_LIMIT, layout, KEY_HEADS, 3, 0, 0, 0, true, 0, 0, 0, OUT.tensor, LSE.tensor, &size, &executor));
    CHECK(aclSetAclOpExecutorRepeatable(executor));

    int wrong = 0;
    double *out = doubles(queries), *lse = doubles(rows), *max = doubles(rows), *sum = doubles(rows);
    for (int turn = 0; turn < RUNS; turn++) {
        CHECK(aclSetInputTensorAddr(executor, 0, Q[0].tensor, Q[turn].address));
        run(aclnnFusedInferAttentionScoreV4, size, executor, stream);
        for (int n = 0; n < HEADS; n++) {
            const int at = n * ROWS * DIM, key = n / (HEADS / KEY_HEADS) * KEYS * DIM;
            forward(&head, q[turn] + at, k + key, v + key, out + at, max + n * ROWS, sum + n * ROWS);
        }
        for (size_t i = 0; i < rows; i++) lse[i] = max[i] + log(sum[i]);
        wrong += differs("out", OUT, out) + differs("log of sums", LSE, lse);
    }
    CHECK(aclDestroyAclOpExecutor(executor));
    end(stream);
    return wrong != 0;
}
