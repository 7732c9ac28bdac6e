/* Training of the indexer: SparseLightningIndexerGradKLLoss, the divergence of the indexer's distribution over the
 * listed keys from the attention's, and the gradients of its queries, keys and weights, in bfloat16. */
#include "aclnnop/aclnn_sparse_lightning_indexer_grad_kl_loss.h"
#include "selected_reference.h"

enum { INDEX_HEADS = 8, INDEX_DIM = 128 };

typedef struct {
    double loss, terms, *dq, *dk, *dw;
} Wanted;

/* Adds one row's loss and gradients. The target p is the mean distribution of the attention's heads, y is the indexer's
 * distribution; the gradient of the indexer's scores is y - p. */
static void row_formula(int row, const int32_t *list, int count, const double *target, const float *qi, const float *ki,
                        const float *w, Wanted *to) {
    double index[KEYS] = {0}, scores[INDEX_HEADS][KEYS], most = -INFINITY, total = 0;
    for (int j = 0; j < count; j++) {
        for (int h = 0; h < INDEX_HEADS; h++) {
            scores[h][j] = 0;
            for (int d = 0; d < INDEX_DIM; d++)
                scores[h][j] += qi[(row * INDEX_HEADS + h) * INDEX_DIM + d] * (double)ki[list[j] * INDEX_DIM + d];
            index[j] += w[row * INDEX_HEADS + h] * fmax(0, scores[h][j]);
        }
        most = fmax(most, index[j]);
    }
    for (int j = 0; j < count; j++) total += exp(index[j] - most);
    for (int j = 0; j < count; j++) {
        const double y = exp(index[j] - most) / total, change = y - target[j];
        const double own = log(fmax(target[j], 1e-8)), learned = log(fmax(y, 1e-8));
        to->loss += target[j] * (own - learned);
        to->terms += target[j] * (fabs(own) + fabs(learned));
        for (int h = 0; h < INDEX_HEADS; h++) {
            const int at = row * INDEX_HEADS + h;
            if (scores[h][j] <= 0) continue;
            to->dw[at] += change * scores[h][j];
            for (int d = 0; d < INDEX_DIM; d++) {
                to->dq[at * INDEX_DIM + d] += change * w[at] * ki[list[j] * INDEX_DIM + d];
                to->dk[list[j] * INDEX_DIM + d] += change * w[at] * qi[at * INDEX_DIM + d];
            }
        }
    }
}

int main(void) {
    const aclrtStream stream = begin();
    const size_t rows = ROWS * HEADS, index_rows = ROWS * INDEX_HEADS;
    float *q = drawn(rows * LATENT, 1), *k = drawn(KEYS * LATENT, 2);
    float *q_rope = drawn(rows * ROPE, 3), *k_rope = drawn(KEYS * ROPE, 4);
    float *qi = drawn(index_rows * INDEX_DIM, 5), *ki = drawn(KEYS * INDEX_DIM, 6), *w = drawn(index_rows, 7);
    for (size_t i = 0; i < index_rows; i++) w[i] = (w[i] + 1) / (float)INDEX_DIM;
    int32_t *lists = chosen();
    const Buffer Q = rounded(q, ACL_BF16, SIZES(1, ROWS, HEADS, LATENT));
    const Buffer K = rounded(k, ACL_BF16, SIZES(1, KEYS, 1, LATENT));
    const Buffer QR = rounded(q_rope, ACL_BF16, SIZES(1, ROWS, HEADS, ROPE));
    const Buffer KR = rounded(k_rope, ACL_BF16, SIZES(1, KEYS, 1, ROPE));
    const Buffer QI = rounded(qi, ACL_BF16, SIZES(1, ROWS, INDEX_HEADS, INDEX_DIM));
    const Buffer KI = rounded(ki, ACL_BF16, SIZES(1, KEYS, 1, INDEX_DIM));
    const Buffer W = rounded(w, ACL_BF16, SIZES(1, ROWS, INDEX_HEADS));
    const Buffer LISTS = buffer(lists, ACL_INT32, SIZES(1, ROWS, 1, LIST));

    /* The statistics that SparseFlashAttention returns for these queries and keys, here from the formula. */
    const Selected in = {q, q_rope, k, k_rope, lists, 1 / sqrt(LATENT + ROPE)};
    double *target = doubles((size_t)ROWS * KEYS), p[KEYS], most, total;
    float *max = floats(rows), *sum = floats(rows);
    int counts[ROWS];
    for (int i = 0; i < ROWS; i++) {
        for (int h = 0; h < HEADS; h++) {
            counts[i] = probabilities(&in, i, h, p, &most, &total);
            max[i * HEADS + h] = (float)most, sum[i * HEADS + h] = (float)total;
            for (int j = 0; j < counts[i]; j++) target[i * KEYS + j] += p[j] / HEADS;
        }
    }
    const Buffer MAX = buffer(max, ACL_FLOAT, SIZES(1, 1, ROWS, HEADS));
    const Buffer SUM = buffer(sum, ACL_FLOAT, SIZES(1, 1, ROWS, HEADS));
    const Buffer DQ = buffer(NULL, ACL_BF16, SIZES(1, ROWS, INDEX_HEADS, INDEX_DIM));
    const Buffer DK = buffer(NULL, ACL_BF16, SIZES(1, KEYS, 1, INDEX_DIM));
    const Buffer DW = buffer(NULL, ACL_BF16, SIZES(1, ROWS, INDEX_HEADS));
    const Buffer LOSS = buffer(NULL, ACL_FLOAT, SIZES(1));

    char layout[] = "BSND";
    uint64_t size = 0;
    aclOpExecutor *executor = NULL;
    CHECK(aclnnSparseLightningIndexerGradKLLossGetWorkspaceSize(
        Q.tensor, K.tensor, QI.tensor, KI.tensor, W.tensor, LISTS.tensor, MAX.tensor, SUM.tensor, QR.tensor, KR.tensor,
        NULL, NULL, in.scale, layout, 3, INT64_MAX, INT64_MAX, false, DQ.tensor, DK.tensor, DW.tensor, LOSS.tensor,
        &size, &executor));
    run(aclnnSparseLightningIndexerGradKLLoss, size, executor, stream);

    Wanted to = {0, 0, doubles(index_rows * INDEX_DIM), doubles(KEYS * INDEX_DIM), doubles(index_rows)};
    for (int i = 0; i < ROWS; i++)
        row_formula(i, lists + (size_t)i * LIST, counts[i], target + i * KEYS, qi, ki, w, &to);
    const int wrong = differs_by("loss", LOSS, &to.loss, to.terms) + differs("dq index", DQ, to.dq) +
                      differs("dk index", DK, to.dk) + differs("dweights", DW, to.dw);
    end(stream);
    return wrong != 0;
}
