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

/* `rows` rows and `vectors` vectors of columns of c = a b, or c += a b; kept in registers. */
INLINE void multiply_block(
    const int pairs, const int rows, const int vectors, int depth, const float *a, int a_stride,
    const float *b, int b_stride, float *c, int c_stride, int adds) {
    vec sum[BLOCK_ROWS][BLOCK_VECTORS];
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vectors; v++)
            sum[r][v] = adds ? load(c + r * c_stride + v * LANES) : (vec){0};
    for (int k = 0; k < depth; k++) {
        vec column[BLOCK_VECTORS];
        for (int v = 0; v < vectors; v++) column[v] = load(b + k * b_stride + v * LANES);
        for (int r = 0; r < rows; r++) {
            const vec left = all_lanes(a + r * a_stride + k);
            for (int v = 0; v < vectors; v++)
                sum[r][v] = fma_of(pairs, left, column[v], sum[r][v]);
        }
    }
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vectors; v++) store(c + r * c_stride + v * LANES, sum[r][v]);
}

INLINE void multiply_columns(
    const int pairs, const int vectors, int rows, int depth, const float *a, int a_stride,
    const float *b, int b_stride, float *c, int c_stride, int adds) {
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

/* c[rows, columns] = a[rows, depth] b[depth, columns], or c += a b. Every element is a chain of
   `depth` fused multiply-adds, first to last. */
static __attribute__((noinline)) void multiply(
    int rows, int columns, int depth, const float *a, int a_stride, const float *b, int b_stride,
    float *c, int c_stride, int adds) {
    int at = 0;
    for (; at + BLOCK_VECTORS * LANES <= columns; at += BLOCK_VECTORS * LANES)
        multiply_columns(0, BLOCK_VECTORS, rows, depth, a, a_stride, b + at, b_stride, c + at,
                         c_stride, adds);
    for (; at + LANES <= columns; at += LANES)
        multiply_columns(0, 1, rows, depth, a, a_stride, b + at, b_stride, c + at, c_stride, adds);
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
        multiply_columns(1, BLOCK_VECTORS, rows, depth, a, a_stride, b + at, b_stride, c + at,
                         c_stride, adds);
    for (; at < columns; at += LANES)
        multiply_columns(1, 1, rows, depth, a, a_stride, b + at, b_stride, c + at, c_stride, adds);
}
#endif

#if defined(__AVX512F__)
INLINE __m512 wide_f32(const float *from) { return _mm512_loadu_ps(from); }
INLINE __m512 wide_bf16(const uint16_t *from) {
    const __m512i low = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)from));
    return _mm512_castsi512_ps(_mm512_slli_epi32(low, 16));
}

/* to[j][i] = rows[i][j]; `to` has rows `stride` apart. */
INLINE void transpose_16(const __m512 *rows, float *to, int64_t stride) {
    __m512 t[16], u[16];
    for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_ps(rows[i], rows[i + 1]);
        t[i + 1] = _mm512_unpackhi_ps(rows[i], rows[i + 1]);
    }
    for (int i = 0; i < 16; i += 4)
        for (int j = 0; j < 2; j++) {
            const __m512d x = _mm512_castps_pd(t[i + j]), y = _mm512_castps_pd(t[i + j + 2]);
            u[i + 2 * j] = _mm512_castpd_ps(_mm512_unpacklo_pd(x, y));
            u[i + 2 * j + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(x, y));
        }
    /* u[4i + j] holds, in its 128-bit part p, rows 4i .. 4i + 3 of column 4p + j. */
    for (int j = 0; j < 4; j++) {
        const __m512 a = _mm512_shuffle_f32x4(u[j], u[4 + j], 0x88);
        const __m512 b = _mm512_shuffle_f32x4(u[8 + j], u[12 + j], 0x88);
        const __m512 c = _mm512_shuffle_f32x4(u[j], u[4 + j], 0xdd);
        const __m512 d = _mm512_shuffle_f32x4(u[8 + j], u[12 + j], 0xdd);
        _mm512_storeu_ps(to + j * stride, _mm512_shuffle_f32x4(a, b, 0x88));
        _mm512_storeu_ps(to + (4 + j) * stride, _mm512_shuffle_f32x4(c, d, 0x88));
        _mm512_storeu_ps(to + (8 + j) * stride, _mm512_shuffle_f32x4(a, b, 0xdd));
        _mm512_storeu_ps(to + (12 + j) * stride, _mm512_shuffle_f32x4(c, d, 0xdd));
    }
}
#endif

#endif
