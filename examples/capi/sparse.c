/* Sparse attention: SparseFlashAttention, whose rows attend to listed keys, and its gradient operator, in bfloat16. */
#include "aclnnop/aclnn_sparse_flash_attention.h"
#include "aclnnop/aclnn_sparse_flash_attention_grad.h"
#include "selected_reference.h"

typedef struct {
    double *out, *max, *sum, *dq, *dk, *dv, *dq_rope, *dk_rope;
} Wanted;

/* out[i] = sum of p k; with ds = p (dy k - dy out): dq = scale ds k, dk = scale ds q, dv = p dy. */
static void formula(const Selected *in, const float *dy, Wanted *to) {
    double p[KEYS];
    for (int row = 0; row < ROWS; row++) {
        for (int head = 0; head < HEADS; head++) {
            const int at = row * HEADS + head;
            const int32_t *list = in->lists + (size_t)row * LIST;
            double *out = to->out + at * LATENT, mean = 0;
            const int count = probabilities(in, row, head, p, to->max + at, to->sum + at);
            for (int j = 0; j < count; j++)
                for (int d = 0; d < LATENT; d++) out[d] += p[j] * in->k[list[j] * LATENT + d];
            for (int d = 0; d < LATENT; d++) mean += dy[at * LATENT + d] * out[d];
            for (int j = 0; j < count; j++) {
                double ds = -mean;
                for (int d = 0; d < LATENT; d++) ds += dy[at * LATENT + d] * (double)in->k[list[j] * LATENT + d];
                ds *= p[j] * in->scale;
                for (int d = 0; d < LATENT; d++) {
                    to->dq[at * LATENT + d] += ds * in->k[list[j] * LATENT + d];
                    to->dk[list[j] * LATENT + d] += ds * in->q[at * LATENT + d];
                    to->dv[list[j] * LATENT + d] += p[j] * dy[at * LATENT + d];
                }
                for (int d = 0; d < ROPE; d++) {
                    to->dq_rope[at * ROPE + d] += ds * in->k_rope[list[j] * ROPE + d];
                    to->dk_rope[list[j] * ROPE + d] += ds * in->q_rope[at * ROPE + d];
                }
            }
        }
    }
}

int main(void) {
    const aclrtStream stream = begin();
    const double scale = 1 / sqrt(LATENT + ROPE);
    const size_t queries = ROWS * HEADS * LATENT, keys = KEYS * LATENT, rows = ROWS * HEADS;
    float *q = drawn(queries, 1), *k = drawn(keys, 2), *dy = drawn(queries, 3);
    float *q_rope = drawn(rows * ROPE, 4), *k_rope = drawn(KEYS * ROPE, 5);
    int32_t *lists = chosen();
    const Buffer Q = rounded(q, ACL_BF16, SIZES(1, ROWS, HEADS, LATENT));
    const Buffer K = rounded(k, ACL_BF16, SIZES(1, KEYS, 1, LATENT));
    const Buffer QR = rounded(q_rope, ACL_BF16, SIZES(1, ROWS, HEADS, ROPE));
    const Buffer KR = rounded(k_rope, ACL_BF16, SIZES(1, KEYS, 1, ROPE));
    const Buffer DY = rounded(dy, ACL_BF16, SIZES(1, ROWS, HEADS, LATENT));
    const Buffer LISTS = buffer(lists, ACL_INT32, SIZES(1, ROWS, 1, LIST));
    const Buffer OUT = buffer(NULL, ACL_BF16, SIZES(1, ROWS, HEADS, LATENT));
    const Buffer MAX = buffer(NULL, ACL_FLOAT, SIZES(1, 1, ROWS, HEADS));
    const Buffer SUM = buffer(NULL, ACL_FLOAT, SIZES(1, 1, ROWS, HEADS));
    const Buffer DQ = buffer(NULL, ACL_BF16, SIZES(1, ROWS, HEADS, LATENT));
    const Buffer DK = buffer(NULL, ACL_BF16, SIZES(1, KEYS, 1, LATENT));
    const Buffer DV = buffer(NULL, ACL_BF16, SIZES(1, KEYS, 1, LATENT));
    const Buffer DQR = buffer(NULL, ACL_BF16, SIZES(1, ROWS, HEADS, ROPE));
    const Buffer DKR = buffer(NULL, ACL_BF16, SIZES(1, KEYS, 1, ROPE));

    char layout[] = "BSND";
    uint64_t size = 0;
    aclOpExecutor *executor = NULL;
    CHECK(aclnnSparseFlashAttentionGetWorkspaceSize(
        Q.tensor, K.tensor, K.tensor, LISTS.tensor, NULL, NULL, NULL, QR.tensor, KR.tensor, scale, 1, layout, layout, 3,
        INT64_MAX, INT64_MAX, 2, true, OUT.tensor, MAX.tensor, SUM.tensor, &size, &executor));
    run(aclnnSparseFlashAttention, size, executor, stream);
    CHECK(aclnnSparseFlashAttentionGradGetWorkspaceSize(
        Q.tensor, K.tensor, K.tensor, LISTS.tensor, DY.tensor, OUT.tensor, MAX.tensor, SUM.tensor, NULL, NULL,
        QR.tensor, KR.tensor, scale, 1, layout, 3, INT64_MAX, INT64_MAX, false, DQ.tensor, DK.tensor, DV.tensor,
        DQR.tensor, DKR.tensor, &size, &executor));
    run(aclnnSparseFlashAttentionGrad, size, executor, stream);

    Wanted to = {doubles(queries), doubles(rows), doubles(rows),        doubles(queries),
                 doubles(keys),    doubles(keys), doubles(rows * ROPE), doubles(KEYS * ROPE)};
    const Selected in = {q, q_rope, k, k_rope, lists, scale};
    formula(&in, dy, &to);
    const int wrong = differs("out", OUT, to.out) + differs("softmax max", MAX, to.max) +
                      differs("softmax sum", SUM, to.sum) + differs("dq", DQ, to.dq) + differs("dk", DK, to.dk) +
                      differs("dv", DV, to.dv) + differs("dq rope", DQR, to.dq_rope) +
                      differs("dk rope", DKR, to.dk_rope);
    end(stream);
    return wrong != 0;
}
