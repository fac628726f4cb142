/* Vectors of the processor at hand, and a small matrix product in which every element is summed in
   one order, however many rows and columns are computed at once. */

#ifndef BATCHINFER_VECTORS_H
#define BATCHINFER_VECTORS_H

#include "elements.h"

#if defined(__AVX512F__)
#include <immintrin.h>
#define LANES 16
#elif defined(__AVX2__) && defined(__FMA__)
#include <immintrin.h>
#define LANES 8
#else
#define LANES 4
#endif

#define INLINE static inline __attribute__((always_inline))

typedef float vec __attribute__((vector_size(4 * LANES)));
typedef float unaligned_vec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

INLINE vec load(const float *from) { return *(const unaligned_vec *)from; }
INLINE void store(float *to, vec x) { *(unaligned_vec *)to = x; }

INLINE vec fma_vec(vec a, vec b, vec c) {
#if defined(__AVX512F__)
    return (vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__) && defined(__FMA__)
    return (vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    for (int i = 0; i < LANES; i++) c[i] = FMA(a[i], b[i], c[i]);
    return c;
#endif
}

/* 16-bit pairs: c += a0 b0 + a1 b1, two fused multiply-adds. */
#if defined(__AVX512BF16__)
INLINE vec fma_pairs(vec a, vec b, vec c) {
    return (vec)_mm512_dpbf16_ps((__m512)c, (__m512bh)a, (__m512bh)b);
}
#endif

INLINE vec all_lanes(const float *from) { /* of any 32 bits */
#if defined(__AVX512F__)
    return (vec)_mm512_set1_ps(*from);
#else
    return *from - (vec){0};
#endif
}

INLINE vec fma_of(const int pairs, vec a, vec b, vec c) {
#if defined(__AVX512BF16__)
    if (pairs) return fma_pairs(a, b, c);
#endif
    return fma_vec(a, b, c);
}

#define BLOCK_ROWS 6
#define BLOCK_VECTORS 4

/* `rows` rows and `vectors` vectors of columns of c = a b, or c += a b; kept in registers. b[v] is
   where the columns of vector v begin. */
INLINE void multiply_block(
    const int pairs, const int rows, const int vectors, int depth, const float *a, int a_stride,
    const float *const *b, int b_stride, float *c, int c_stride, int adds) {
    vec sum[BLOCK_ROWS][BLOCK_VECTORS];
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vectors; v++)
            sum[r][v] = adds ? load(c + r * c_stride + v * LANES) : (vec){0};
    for (int k = 0; k < depth; k++) {
        vec column[BLOCK_VECTORS];
        for (int v = 0; v < vectors; v++) column[v] = load(b[v] + k * b_stride);
        for (int r = 0; r < rows; r++) {
            const vec left = all_lanes(a + r * a_stride + k);
            for (int v = 0; v < vectors; v++)
                sum[r][v] = fma_of(pairs, left, column[v], sum[r][v]);
        }
    }
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vectors; v++) store(c + r * c_stride + v * LANES, sum[r][v]);
}

/* The same for any number of rows. */
INLINE void multiply_columns(
    const int pairs, const int vectors, int rows, int depth, const float *a, int a_stride,
    const float *const *b, int b_stride, float *c, int c_stride, int adds) {
    int r = 0;
#define ROWS_AT_ONCE(count)                                                                \
    multiply_block(pairs, count, vectors, depth, a + r * a_stride, a_stride, b, b_stride,         \
                   c + r * c_stride, c_stride, adds)
    for (; r + BLOCK_ROWS <= rows; r += BLOCK_ROWS) ROWS_AT_ONCE(BLOCK_ROWS);
    switch (rows - r) {
        case 5: ROWS_AT_ONCE(5); break;
        case 4: ROWS_AT_ONCE(4); break;
        case 3: ROWS_AT_ONCE(3); break;
        case 2: ROWS_AT_ONCE(2); break;
        case 1: ROWS_AT_ONCE(1); break;
    }
#undef ROWS_AT_ONCE
}

/* The same, of columns that stand side by side. */
INLINE void multiply_beside(
    const int pairs, const int vectors, int rows, int depth, const float *a, int a_stride,
    const float *b, int b_stride, float *c, int c_stride, int adds) {
    const float *columns[BLOCK_VECTORS];
    for (int v = 0; v < vectors; v++) columns[v] = b + v * LANES;
    multiply_columns(pairs, vectors, rows, depth, a, a_stride, columns, b_stride, c, c_stride, adds);
}

/* c[rows, columns] = a[rows, depth] b[depth, columns], or c += a b. Every element is a chain of
   `depth` fused multiply-adds, first to last. */
static __attribute__((noinline)) void multiply(
    int rows, int columns, int depth, const float *a, int a_stride, const float *b, int b_stride,
    float *c, int c_stride, int adds) {
    int at = 0;
    for (; at + BLOCK_VECTORS * LANES <= columns; at += BLOCK_VECTORS * LANES)
        multiply_beside(0, BLOCK_VECTORS, rows, depth, a, a_stride, b + at, b_stride, c + at,
                        c_stride, adds);
    for (; at + LANES <= columns; at += LANES)
        multiply_beside(0, 1, rows, depth, a, a_stride, b + at, b_stride, c + at, c_stride, adds);
    for (; at < columns; at++)
        for (int r = 0; r < rows; r++) {
            float sum = adds ? c[r * c_stride + at] : 0.0f;
            for (int k = 0; k < depth; k++)
                sum = FMA(a[r * a_stride + k], b[k * b_stride + at], sum);
            c[r * c_stride + at] = sum;
        }
}

#if defined(__AVX512BF16__)
/* The same over pairs of 16 bits: `depth` of them, a[rows][depth], b[depth][columns]; whole vectors
   of columns. */
static __attribute__((noinline)) void multiply_pairs(
    int rows, int columns, int depth, const float *a, int a_stride, const float *b, int b_stride,
    float *c, int c_stride, int adds) {
    int at = 0;
    for (; at + BLOCK_VECTORS * LANES <= columns; at += BLOCK_VECTORS * LANES)
        multiply_beside(1, BLOCK_VECTORS, rows, depth, a, a_stride, b + at, b_stride, c + at,
                        c_stride, adds);
    for (; at < columns; at += LANES)
        multiply_beside(1, 1, rows, depth, a, a_stride, b + at, b_stride, c + at, c_stride, adds);
}
#endif

#endif
