/* softmax(scale q k') v of one head in double, and its gradients: the references of the programs. */
#ifndef ATTENTION_H
#define ATTENTION_H

#include "program.h"

typedef struct {
    int rows, keys, dim;
    int row_step, key_step; /* floats from a row to the next one */
    int causal;             /* 1: causal, and the last row attends to the last key; 0: no mask */
    double scale;
} Head;

static inline int visible(const Head *head, int row) {
    return head->causal ? row + 1 + head->keys - head->rows : head->keys;
}

/* Computes out, and each row's maximum and sum of exponentials, unless their pointers are null. */
static inline void forward(const Head *head, const float *q, const float *k, const float *v, double *out, double *max,
                           double *sum) {
    double *p = doubles((size_t)head->keys);
    for (int i = 0; i < head->rows; i++) {
        double most = -INFINITY, total = 0;
        for (int j = 0; j < visible(head, i); j++) {
            p[j] = 0;
            for (int d = 0; d < head->dim; d++)
                p[j] += head->scale * q[i * head->row_step + d] * k[j * head->key_step + d];
            most = fmax(most, p[j]);
        }
        for (int j = 0; j < visible(head, i); j++) total += p[j] = exp(p[j] - most);
        for (int d = 0; d < head->dim; d++) {
            double found = 0;
            for (int j = 0; j < visible(head, i); j++) found += p[j] / total * v[j * head->key_step + d];
            out[i * head->row_step + d] = found;
        }
        if (max) max[i] = most;
        if (sum) sum[i] = total;
    }
}

/* Adds the gradients of one head to dq, dk and dv: several query heads may share a key head. */
static inline void backward(const Head *head, const float *q, const float *k, const float *v, const float *dy,
                            const double *out, const double *max, const double *sum, double *dq, double *dk,
                            double *dv) {
    for (int i = 0; i < head->rows; i++) {
        const float *qi = q + i * head->row_step, *dyi = dy + i * head->row_step;
        double mean = 0;
        for (int d = 0; d < head->dim; d++) mean += dyi[d] * out[i * head->row_step + d];
        for (int j = 0; j < visible(head, i); j++) {
            double s = 0, ds = 0;
            for (int d = 0; d < head->dim; d++) s += head->scale * qi[d] * k[j * head->key_step + d];
            for (int d = 0; d < head->dim; d++) ds += dyi[d] * (double)v[j * head->key_step + d];
            const double p = exp(s - max[i]) / sum[i];
            ds = p * (ds - mean) * head->scale;
            for (int d = 0; d < head->dim; d++) {
                dq[i * head->row_step + d] += ds * k[j * head->key_step + d];
                dk[j * head->key_step + d] += ds * qi[d];
                dv[j * head->key_step + d] += p * dyi[d];
            }
        }
    }
}

/* CANN's mask of the compressed causal modes: 2048 x 2048 for any lengths, with ones above the diagonal. */
static inline Buffer causal_mask(void) {
    enum { SIDE = 2048 };
    unsigned char *mask = allocated((size_t)SIDE * SIDE);
    for (int i = 0; i < SIDE; i++) memset(mask + (size_t)i * SIDE + i + 1, 1, (size_t)(SIDE - i - 1));
    return buffer(mask, ACL_UINT8, SIZES(SIDE, SIDE));
}

#endif
