/* Small GEMMs. The order in which an element's products are added does not depend on the numbers of
   rows and columns. */

#ifndef BATCHINFER_SMALL_GEMM_H
#define BATCHINFER_SMALL_GEMM_H

#include "simd.h"

#define BLOCK_ROWS 6
#define BLOCK_VECTORS 4
#if LANES == 16 || defined(__aarch64__) /* these processors have 32 registers instead of 16 */
#define MOST_SUMS (BLOCK_ROWS * BLOCK_VECTORS)
#else
/* With fewer sums, blocks of 3 rows would have too few independent sums; with more, some sums would
   not fit into registers. */
#define MOST_SUMS 16
#endif

/* c = a b, or c += a b, for `rows` rows and `vectors` vectors of columns, with sums in registers.
   The columns of vector v begin at b[v]. */
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

/* Like multiply_block, in two parts if the sums would not fit into registers. */
INLINE void multiply_rows(
    const int pairs, const int rows, const int vectors, int depth, const float *a, int a_stride,
    const float *const *b, int b_stride, float *c, int c_stride, int adds) {
    const int at_once = rows * vectors > MOST_SUMS ? vectors / 2 : vectors;
    for (int v = 0; v < vectors; v += at_once)
        multiply_block(pairs, rows, at_once, depth, a, a_stride, b + v, b_stride, c + v * LANES,
                       c_stride, adds);
}

/* Like multiply_rows, for any number of rows. */
INLINE void multiply_columns(
    const int pairs, const int vectors, int rows, int depth, const float *a, int a_stride,
    const float *const *b, int b_stride, float *c, int c_stride, int adds) {
    int r = 0;
#define ROWS_AT_ONCE(count)                                                                \
    multiply_rows(pairs, count, vectors, depth, a + r * a_stride, a_stride, b, b_stride,          \
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

/* Like multiply_columns, for adjacent columns. */
INLINE void multiply_adjacent(
    const int pairs, const int vectors, int rows, int depth, const float *a, int a_stride,
    const float *b, int b_stride, float *c, int c_stride, int adds) {
    const float *columns[BLOCK_VECTORS];
    for (int v = 0; v < vectors; v++) columns[v] = b + v * LANES;
    multiply_columns(pairs, vectors, rows, depth, a, a_stride, columns, b_stride, c, c_stride, adds);
}

/* c[rows, columns] = a[rows, depth] b[depth, columns], or c += a b if `adds`. Every element is one
   chain of `depth` fused multiply-adds, from the first to the last. */
static __attribute__((noinline)) void multiply(
    int rows, int columns, int depth, const float *a, int a_stride, const float *b, int b_stride,
    float *c, int c_stride, int adds) {
    int at = 0;
    for (; at + BLOCK_VECTORS * LANES <= columns; at += BLOCK_VECTORS * LANES)
        multiply_adjacent(0, BLOCK_VECTORS, rows, depth, a, a_stride, b + at, b_stride, c + at,
                        c_stride, adds);
    for (; at + LANES <= columns; at += LANES)
        multiply_adjacent(0, 1, rows, depth, a, a_stride, b + at, b_stride, c + at, c_stride, adds);
    for (; at < columns; at++)
        for (int r = 0; r < rows; r++) {
            float sum = adds ? c[r * c_stride + at] : 0.0f;
            for (int k = 0; k < depth; k++)
                sum = FMA(a[r * a_stride + k], b[k * b_stride + at], sum);
            c[r * c_stride + at] = sum;
        }
}

#if HAS_PAIRS
/* Like multiply, for `depth` pairs of 16-bit elements, a[rows][depth] and b[depth][columns].
   `columns` must be a multiple of LANES. */
static __attribute__((noinline)) void multiply_pairs(
    int rows, int columns, int depth, const float *a, int a_stride, const float *b, int b_stride,
    float *c, int c_stride, int adds) {
    int at = 0;
    for (; at + BLOCK_VECTORS * LANES <= columns; at += BLOCK_VECTORS * LANES)
        multiply_adjacent(1, BLOCK_VECTORS, rows, depth, a, a_stride, b + at, b_stride, c + at,
                        c_stride, adds);
    for (; at < columns; at += LANES)
        multiply_adjacent(1, 1, rows, depth, a, a_stride, b + at, b_stride, c + at, c_stride, adds);
}
#endif

#endif
