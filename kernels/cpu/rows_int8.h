/* Rows of x as int8, for products with weights of 8 and 4 bits: each has a scale, max|x| / 127. */

#ifndef BATCHINFER_ROWS_INT8_H
#define BATCHINFER_ROWS_INT8_H

#include <stdlib.h>

#include "arguments.h"
#include "elements.h"
#include "vectors.h"

#define ROWS_DEPTH 64 /* rows are filled up with zeros to a multiple of it: a row of a tile */

typedef struct {
    int8_t *codes;  /* [rows][stride] from -127 to 127 */
    float *scales;  /* [rows]; NaN where a number of the row is not finite */
    int32_t *sums;  /* [rows][groups] of the codes of a group of k */
    int64_t stride; /* an odd number of cache lines: rows do not crowd each other in the cache */
    int64_t group, groups;
} int8_rows;

INLINE int64_t whole(int64_t count, int64_t of) { return (count + of - 1) / of * of; }

/* Room for the rows; no codes: there is no memory. To be freed at `codes`. */
static int8_rows int8_rows_of(const gemm_args *a, int64_t group) {
    int8_rows rows = {.group = group, .groups = (a->in_features + group - 1) / group};
    rows.stride = whole(a->in_features, ROWS_DEPTH) | ROWS_DEPTH;
    const int64_t each = rows.stride + 4 * (1 + rows.groups);
    rows.codes = aligned_alloc(64, whole(a->num_rows * each, 64));
    rows.scales = (float *)(rows.codes + a->num_rows * rows.stride);
    rows.sums = (int32_t *)(rows.scales + a->num_rows);
    return rows;
}

INLINE float element_of(const void *x, const int is_bf16, int64_t at) {
    return is_bf16 ? from_bf16(((const uint16_t *)x)[at]) : ((const float *)x)[at];
}

INLINE int32_t size_bits(const void *x, const int is_bf16, int64_t at) { /* in the order of |x| */
    const float value = element_of(x, is_bf16, at);
    int32_t bits;
    memcpy(&bits, &value, 4);
    return bits & 0x7fffffff;
}

#define INFINITY_BITS 0x7f800000

INLINE void row_as_int8(const int8_rows *to, const int is_bf16, const void *x, int64_t at, int64_t in, int64_t row) {
    int32_t most_bits = 0;
    for (int64_t k = 0; k < in; k++) {
        const int32_t bits = size_bits(x, is_bf16, at + k);
        most_bits = bits > most_bits ? bits : most_bits;
    }
    float most;
    memcpy(&most, &most_bits, 4);
    const int is_finite = most_bits < INFINITY_BITS;
    to->scales[row] = is_finite ? most * (1.0f / 127.0f) : NAN;
    int8_t *codes = to->codes + row * to->stride;
    int32_t *sums = to->sums + row * to->groups;
    if (!is_finite || most <= 127.0f * 0x1p-126f) { /* smaller ones have no inverse */
        memset(codes, 0, to->stride);
        memset(sums, 0, to->groups * sizeof(*sums));
        return;
    }
    const float inverse = 127.0f / most;
    for (int64_t g = 0; g < to->groups; g++) {
        const int64_t begin = g * to->group, left = in - begin;
        const int64_t count = left < to->group ? left : to->group;
        int32_t sum = 0;
        for (int64_t k = begin; k < begin + count; k++) {
            const int32_t code = (int32_t)rintf(element_of(x, is_bf16, at + k) * inverse);
            codes[k] = (int8_t)code;
            sum += code;
        }
        sums[g] = sum;
    }
    memset(codes + in, 0, to->stride - in);
}

/* Whether one thread rounds the rows before the others begin: to wait for each other takes longer. */
INLINE int rows_are_few(const gemm_args *a) { return a->num_rows * a->in_features <= 1 << 14; }

/* To be called by all threads of a parallel region, which wait for each other, or outside of any. */
INLINE void rows_as_int8(const int8_rows *to, const gemm_args *a, const int is_bf16) {
#pragma omp for schedule(static)
    for (int64_t row = 0; row < a->num_rows; row++) {
        const int64_t at = row * a->row_stride;
        if (is_bf16) row_as_int8(to, 1, a->x, at, a->in_features, row);
        else row_as_int8(to, 0, a->x, at, a->in_features, row);
    }
}

#endif
