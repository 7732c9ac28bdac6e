/* Lists of keys for sparse attention, and the formula of its probabilities in double. */
#ifndef SELECTED_H
#define SELECTED_H

#include "program.h"

/* The sizes that CANN requires: a latent of 512 elements that is both key and value, 64 elements of rotary embedding,
 * lists of 2048 keys. */
enum { ROWS = 12, KEYS = 40, HEADS = 8, LATENT = 512, ROPE = 64, LIST = 2048 };

static inline int seen(int row) { return row + 1 + KEYS - ROWS; } /* mode 3: the last row attends to the last key */

/* Returns lists of about two thirds of the visible keys of each row, in order, followed by -1. */
static inline int32_t *chosen(void) {
    int32_t *lists = allocated(sizeof(int32_t) * ROWS * LIST);
    for (int i = 0; i < ROWS; i++) {
        int32_t *list = lists + (size_t)i * LIST;
        int count = 0;
        for (int j = 0; j < seen(i); j++)
            if ((i + 2 * j) % 3) list[count++] = j;
        while (count < LIST) list[count++] = -1;
    }
    return lists;
}

typedef struct {
    const float *q, *q_rope, *k, *k_rope;
    const int32_t *lists;
    double scale;
} Selected;

/* Computes one row's and head's probabilities, and the maximum and the sum of exponentials; returns the number of keys.
 */
static inline int probabilities(const Selected *in, int row, int head, double *p, double *max, double *sum) {
    const float *q = in->q + (row * HEADS + head) * LATENT, *q_rope = in->q_rope + (row * HEADS + head) * ROPE;
    const int32_t *list = in->lists + (size_t)row * LIST;
    int count = 0;
    *max = -INFINITY, *sum = 0;
    for (; count < LIST && list[count] >= 0; count++) {
        double s = 0;
        for (int d = 0; d < LATENT; d++) s += q[d] * (double)in->k[list[count] * LATENT + d];
        for (int d = 0; d < ROPE; d++) s += q_rope[d] * (double)in->k_rope[list[count] * ROPE + d];
        p[count] = s * in->scale;
        *max = fmax(*max, p[count]);
    }
    for (int j = 0; j < count; j++) *sum += p[j] = exp(p[j] - *max);
    for (int j = 0; j < count; j++) p[j] /= *sum;
    return count;
}

#endif
