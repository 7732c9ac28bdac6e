/* Decoding: IncreFlashAttentionV4, one new token for each of two sequences, whose keys and values are stored in pages
 * of 16 tokens, in float16. Each of three steps makes the sequences one token longer, and repeats phase 1, which reads
 * the lengths. */
#include "aclnnop/aclnn_incre_flash_attention_v4.h"
#include "attention_reference.h"

enum { ITEMS = 2, HEADS = 8, KEY_HEADS = 2, DIM = 64, PAGE = 16, PAGES = 5, STEPS = 3 };
static const int32_t TABLE[ITEMS][3] = {{4, 0, 2}, {1, 3, 0}};
static const int64_t FILLED[ITEMS] = {36, 20};

/* Copies the rows of one sequence from its pages, in the order of its tokens. */
static void gather(const float *pages, int item, int64_t length, float *rows) {
    for (int64_t t = 0; t < length; t++) {
        const float *slot = pages + (TABLE[item][t / PAGE] * PAGE + t % PAGE) * KEY_HEADS * DIM;
        memcpy(rows + t * KEY_HEADS * DIM, slot, sizeof(float) * KEY_HEADS * DIM);
    }
}

int main(void) {
    const aclrtStream stream = begin();
    const double scale = 1 / sqrt(DIM);
    const size_t cached = (size_t)PAGES * PAGE * KEY_HEADS * DIM, width = (size_t)HEADS * DIM;
    float *k = drawn(cached, 2), *v = drawn(cached, 3);
    const Buffer K = rounded(k, ACL_FLOAT16, SIZES(PAGES, PAGE, KEY_HEADS * DIM));
    const Buffer V = rounded(v, ACL_FLOAT16, SIZES(PAGES, PAGE, KEY_HEADS * DIM));
    const Buffer BLOCKS = buffer(TABLE, ACL_INT32, SIZES(ITEMS, 3));
    const Buffer OUT = buffer(NULL, ACL_FLOAT16, SIZES(ITEMS, 1, HEADS * DIM));
    aclTensorList *keys = list_of(K), *values = list_of(V);
    float *key_rows = floats(3 * PAGE * KEY_HEADS * DIM), *value_rows = floats(3 * PAGE * KEY_HEADS * DIM);
    double *out = doubles(ITEMS * width);

    int wrong = 0;
    for (int step = 0; step < STEPS; step++) {
        int64_t lengths[ITEMS];
        for (int b = 0; b < ITEMS; b++) lengths[b] = FILLED[b] + step + 1;
        float *q = drawn(ITEMS * width, 10 + (uint64_t)step);
        const Buffer Q = rounded(q, ACL_FLOAT16, SIZES(ITEMS, 1, HEADS * DIM));
        aclIntArray *tokens = aclCreateIntArray(lengths, ITEMS);

        char layout[] = "BSH";
        uint64_t size = 0;
        aclOpExecutor *executor = NULL;
        CHECK(aclnnIncreFlashAttentionV4GetWorkspaceSize(Q.tensor, keys, values, NULL, NULL, tokens, NULL, NULL, NULL,
                                                         NULL, NULL, NULL, NULL, BLOCKS.tensor, NULL, HEADS, scale,
                                                         layout, KEY_HEADS, PAGE, 1, OUT.tensor, &size, &executor));
        run(aclnnIncreFlashAttentionV4, size, executor, stream);

        for (int b = 0; b < ITEMS; b++) {
            const Head head = {1, (int)lengths[b], DIM, HEADS * DIM, KEY_HEADS * DIM, 0, scale};
            gather(k, b, lengths[b], key_rows);
            gather(v, b, lengths[b], value_rows);
            for (int n = 0; n < HEADS; n++) {
                const size_t at = b * width + (size_t)n * DIM;
                const int key = n / (HEADS / KEY_HEADS) * DIM;
                forward(&head, q + at, key_rows + key, value_rows + key, out + at, NULL, NULL);
            }
        }
        wrong += differs("out", OUT, out);
        CHECK(aclDestroyIntArray(tokens));
    }
    end(stream);
    return wrong != 0;
}
