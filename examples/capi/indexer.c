/* The indexer: LightningIndexer scores keys by a weighted sum of ReLU over heads, and returns the 16 best keys of every
 * row, in float16. The program checks by the formula's scores that no better key is missing; it does not compare the
 * order, since in float16 two nearly equal scores may have either order. */
#include "aclnnop/aclnn_lightning_indexer.h"
#include "program.h"

enum { ROWS = 24, KEYS = 96, HEADS = 8, DIM = 128, BEST = 16 };

int main(void) {
    const aclrtStream stream = begin();
    float *q = drawn(ROWS * HEADS * DIM, 1), *k = drawn(KEYS * DIM, 2), *w = drawn(ROWS * HEADS, 3);
    for (int i = 0; i < ROWS * HEADS; i++) w[i] = (w[i] + 1) / 2;
    const Buffer Q = rounded(q, ACL_FLOAT16, SIZES(1, ROWS, HEADS, DIM));
    const Buffer K = rounded(k, ACL_FLOAT16, SIZES(1, KEYS, 1, DIM));
    const Buffer W = rounded(w, ACL_FLOAT16, SIZES(1, ROWS, HEADS));
    const Buffer INDICES = buffer(NULL, ACL_INT32, SIZES(1, ROWS, 1, BEST));
    const Buffer VALUES = buffer(NULL, ACL_FLOAT16, SIZES(1, ROWS, 1, BEST));

    char layout[] = "BSND";
    uint64_t size = 0;
    aclOpExecutor *executor = NULL;
    CHECK(aclnnLightningIndexerGetWorkspaceSize(Q.tensor, K.tensor, W.tensor, NULL, NULL, NULL, layout, layout, BEST, 3,
                                                INT64_MAX, INT64_MAX, true, INDICES.tensor, VALUES.tensor, &size,
                                                &executor));
    run(aclnnLightningIndexer, size, executor, stream);

    int32_t found[ROWS * BEST];
    CHECK(aclrtMemcpy(found, sizeof found, INDICES.address, sizeof found, ACL_MEMCPY_DEVICE_TO_HOST));
    double *wanted = doubles(ROWS * BEST);
    int wrong = 0;
    for (int i = 0; i < ROWS; i++) {
        const int seen = i + 1 + KEYS - ROWS; /* mode 3: the last row attends to the last key */
        double scores[KEYS], worst = INFINITY, missed = -INFINITY;
        int times[KEYS] = {0};
        for (int j = 0; j < seen; j++) {
            scores[j] = 0;
            for (int h = 0; h < HEADS; h++) {
                double product = 0;
                for (int d = 0; d < DIM; d++) product += q[(i * HEADS + h) * DIM + d] * (double)k[j * DIM + d];
                scores[j] += w[i * HEADS + h] * fmax(0, product);
            }
        }
        for (int j = 0; j < BEST; j++) {
            const int32_t key = found[i * BEST + j];
            if (key < 0 || key >= seen || times[key]++) {
                printf("row %d, entry %d: key %d, expected one of %d, once\n", i, j, (int)key, seen);
                return 1;
            }
            wanted[i * BEST + j] = scores[key];
            worst = fmin(worst, scores[key]);
        }
        for (int j = 0; j < seen; j++)
            if (!times[j]) missed = fmax(missed, scores[j]);
        wrong += missed > worst * (1 + FLT_EPSILON * DIM);
    }
    printf("%-14s %d of %d rows missed a better key\n", "indices", wrong, ROWS);
    wrong += differs("values", VALUES, wanted);
    end(stream);
    return wrong != 0;
}
