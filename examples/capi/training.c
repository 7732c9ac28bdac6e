/* Training: FlashAttentionScoreV2, causal, with two query heads per key head; then FlashAttentionScoreGradV2. */
#include "aclnnop/aclnn_flash_attention_score.h"
#include "aclnnop/aclnn_flash_attention_score_grad.h"
#include "attention_reference.h"

enum { ROWS = 96, HEADS = 4, KEY_HEADS = 2, DIM = 32 };

int main(void) {
    const aclrtStream stream = begin();
    const Head head = {ROWS, ROWS, DIM, HEADS * DIM, KEY_HEADS * DIM, 1, 1 / sqrt(DIM)};
    const size_t queries = ROWS * HEADS * DIM, keys = ROWS * KEY_HEADS * DIM, rows = HEADS * ROWS;
    float *q = drawn(queries, 1), *k = drawn(keys, 2), *v = drawn(keys, 3), *dy = drawn(queries, 4);
    const Buffer Q = buffer(q, ACL_FLOAT, SIZES(1, ROWS, HEADS, DIM));
    const Buffer K = buffer(k, ACL_FLOAT, SIZES(1, ROWS, KEY_HEADS, DIM));
    const Buffer V = buffer(v, ACL_FLOAT, SIZES(1, ROWS, KEY_HEADS, DIM));
    const Buffer DY = buffer(dy, ACL_FLOAT, SIZES(1, ROWS, HEADS, DIM));
    const Buffer MASK = causal_mask();
    const Buffer OUT = buffer(NULL, ACL_FLOAT, SIZES(1, ROWS, HEADS, DIM));
    const Buffer MAX = buffer(NULL, ACL_FLOAT, SIZES(1, HEADS, ROWS, 8));
    const Buffer SUM = buffer(NULL, ACL_FLOAT, SIZES(1, HEADS, ROWS, 8));
    const Buffer DQ = buffer(NULL, ACL_FLOAT, SIZES(1, ROWS, HEADS, DIM));
    const Buffer DK = buffer(NULL, ACL_FLOAT, SIZES(1, ROWS, KEY_HEADS, DIM));
    const Buffer DV = buffer(NULL, ACL_FLOAT, SIZES(1, ROWS, KEY_HEADS, DIM));

    char layout[] = "BSND";
    uint64_t size = 0;
    aclOpExecutor *executor = NULL;
    CHECK(aclnnFlashAttentionScoreV2GetWorkspaceSize(Q.tensor, K.tensor, V.tensor, NULL, NULL, NULL, MASK.tensor, NULL,
                                                     NULL, NULL, head.scale, 1.0, NO_LIMIT, NO_LIMIT, HEADS, layout, 0,
                                                     2, 1, MAX.tensor, SUM.tensor, NULL, OUT.tensor, &size, &executor));
    run(aclnnFlashAttentionScoreV2, size, executor, stream);
    CHECK(aclnnFlashAttentionScoreGradV2GetWorkspaceSize(
        Q.tensor, K.tensor, V.tensor, DY.tensor, NULL, NULL, NULL, MASK.tensor, MAX.tensor, SUM.tensor, NULL,
        OUT.tensor, NULL, NULL, NULL, head.scale, 1.0, NO_LIMIT, NO_LIMIT, HEADS, layout, 0, 2, 1, DQ.tensor, DK.tensor,
        DV.tensor, NULL, &size, &executor));
    run(aclnnFlashAttentionScoreGradV2, size, executor, stream);

    double *out = doubles(queries), *dq = doubles(queries), *dk = doubles(keys), *dv = doubles(keys);
    double *max = doubles(rows), *sum = doubles(rows), *max8 = doubles(rows * 8), *sum8 = doubles(rows * 8);
    for (int n = 0; n < HEADS; n++) {
        const int at = n * DIM, key = n / (HEADS / KEY_HEADS) * DIM;
        double *own_max = max + n * ROWS, *own_sum = sum + n * ROWS;
        forward(&head, q + at, k + key, v + key, out + at, own_max, own_sum);
        backward(&head, q + at, k + key, v + key, dy + at, out + at, own_max, own_sum, dq + at, dk + key, dv + key);
    }
    for (size_t i = 0; i < rows * 8; i++) max8[i] = max[i / 8], sum8[i] = sum[i / 8]; /* eight equal lanes */
    const int wrong = differs("out", OUT, out) + differs("softmax max", MAX, max8) + differs("softmax sum", SUM, sum8) +
                      differs("dq", DQ, dq) + differs("dk", DK, dk) + differs("dv", DV, dv);
    end(stream);
    return wrong != 0;
}
