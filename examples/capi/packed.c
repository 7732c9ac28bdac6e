/* Packed sequences: FlashAttentionVarLenScoreV2 and FlashAttentionUnpaddingScoreGradV2 for three sequences in bfloat16.
 * Their lengths are given as cumulative ends. Each sequence is causal. */
#include "aclnnop/aclnn_flash_attention_score.h"
#include "aclnnop/aclnn_flash_attention_score_grad.h"
#include "attention_reference.h"

enum { SEQUENCES = 3, ROWS = 64, HEADS = 4, DIM = 64 };
static const int64_t ENDS[SEQUENCES] = {5, 45, ROWS};

int main(void) {
    const aclrtStream stream = begin();
    const double scale = 1 / sqrt(DIM);
    const size_t count = ROWS * HEADS * DIM;
    float *q = drawn(count, 1), *k = drawn(count, 2), *v = drawn(count, 3), *dy = drawn(count, 4);
    const Buffer Q = rounded(q, ACL_BF16, SIZES(ROWS, HEADS, DIM)), K = rounded(k, ACL_BF16, SIZES(ROWS, HEADS, DIM));
    const Buffer V = rounded(v, ACL_BF16, SIZES(ROWS, HEADS, DIM)), DY = rounded(dy, ACL_BF16, SIZES(ROWS, HEADS, DIM));
    const Buffer MASK = causal_mask();
    const Buffer OUT = buffer(NULL, ACL_BF16, SIZES(ROWS, HEADS, DIM));
    const Buffer MAX = buffer(NULL, ACL_FLOAT, SIZES(ROWS, HEADS, 8));
    const Buffer SUM = buffer(NULL, ACL_FLOAT, SIZES(ROWS, HEADS, 8));
    const Buffer DQ = buffer(NULL, ACL_BF16, SIZES(ROWS, HEADS, DIM));
    const Buffer DK = buffer(NULL, ACL_BF16, SIZES(ROWS, HEADS, DIM));
    const Buffer DV = buffer(NULL, ACL_BF16, SIZES(ROWS, HEADS, DIM));
    aclIntArray *ends = aclCreateIntArray(ENDS, SEQUENCES);

    char layout[] = "TND";
    uint64_t size = 0;
    aclOpExecutor *executor = NULL;
    CHECK(aclnnFlashAttentionVarLenScoreV2GetWorkspaceSize(
        Q.tensor, K.tensor, V.tensor, NULL, NULL, NULL, MASK.tensor, NULL, ends, ends, NULL, NULL, scale, 1.0, NO_LIMIT,
        NO_LIMIT, HEADS, layout, 0, 3, 1, MAX.tensor, SUM.tensor, NULL, OUT.tensor, &size, &executor));
    run(aclnnFlashAttentionVarLenScoreV2, size, executor, stream);
    CHECK(aclnnFlashAttentionUnpaddingScoreGradV2GetWorkspaceSize(
        Q.tensor, K.tensor, V.tensor, DY.tensor, NULL, NULL, NULL, MASK.tensor, MAX.tensor, SUM.tensor, NULL,
        OUT.tensor, NULL, ends, ends, NULL, NULL, scale, 1.0, NO_LIMIT, NO_LIMIT, HEADS, layout, 0, 3, 1, DQ.tensor,
        DK.tensor, DV.tensor, NULL, &size, &executor));
    run(aclnnFlashAttentionUnpaddingScoreGradV2, size, executor, stream);

    double *out = doubles(count), *dq = doubles(count), *dk = doubles(count), *dv = doubles(count);
    double max[ROWS], sum[ROWS];
    for (int s = 0; s < SEQUENCES; s++) {
        const int first = s ? (int)ENDS[s - 1] : 0, rows = (int)ENDS[s] - first;
        const Head head = {rows, rows, DIM, HEADS * DIM, HEADS * DIM, 1, scale};
        for (int n = 0; n < HEADS; n++) {
            const int at = (first * HEADS + n) * DIM;
            forward(&head, q + at, k + at, v + at, out + at, max, sum);
            backward(&head, q + at, k + at, v + at, dy + at, out + at, max, sum, dq + at, dk + at, dv + at);
        }
    }
    const int wrong = differs("out", OUT, out) + differs("dq", DQ, dq) + differs("dk", DK, dk) + differs("dv", DV, dv);

    CHECK(aclDestroyIntArray(ends));
    end(stream);
    return wrong != 0;
}
