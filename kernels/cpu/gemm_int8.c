/* Products of int8: a weight has a scale for each output, max|w| / 127, a row of x one of its own,
   taken when it is multiplied. out = sum * row scale * output scale (+ bias) (+ what is there).

   Packed: scales [outputs], 128 times the sums of weights [outputs] (for instructions that multiply
   bytes without a sign), and panels [panel][k / 4][output][4], k filled up with zeros to whole
   tiles. By tiles a panel has two of them side by side. */

#include "in_order.h"

#include "gemm_int8.h"

#include <float.h>
#include <stdlib.h>

#include "elements.h"
#include "put_sums.h"
#include "tiles.h"
#include "vectors.h"

#define QUADS 16 /* of k, in a row of a tile */
#define DEPTH (4 * QUADS)
#define MOST_ROWS 32 /* of x, at once */
#define TILED_PANEL 32

typedef int32_t ints __attribute__((vector_size(4 * LANES)));
typedef int32_t unaligned_ints __attribute__((vector_size(4 * LANES), aligned(1), may_alias));

/* What is added to int8 for the instruction below: some multiply bytes without a sign. */
#if defined(__AVX512VNNI__) || (defined(__AVXVNNI__) && LANES == 8)
#define OFFSET 128
#else
#define OFFSET 0
#endif

/* sum += the four products of each lane. */
INLINE ints add_quads(ints sum, ints x, ints w) {
#if LANES == 16 && defined(__AVX512VNNI__)
    return (ints)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)x, (__m512i)w);
#elif LANES == 8 && defined(__AVXVNNI__)
    return (ints)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)x, (__m256i)w);
#elif LANES == 16 && defined(__AVX512BW__) /* 2 * 127 * 127 fits into 16 bits */
    const __mmask64 negative = _mm512_movepi8_mask((__m512i)x);
    const __m512i turned =
        _mm512_mask_sub_epi8((__m512i)w, negative, (__m512i)(ints){0}, (__m512i)w);
    const __m512i pairs = _mm512_maddubs_epi16(_mm512_abs_epi8((__m512i)x), turned);
    return sum + (ints)_mm512_madd_epi16(pairs, _mm512_set1_epi16(1));
#elif LANES == 8 /* the same */
    const __m256i pairs = _mm256_maddubs_epi16(
        _mm256_abs_epi8((__m256i)x), _mm256_sign_epi8((__m256i)w, (__m256i)x));
    return sum + (ints)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
#elif defined(__aarch64__) && defined(__ARM_FEATURE_DOTPROD)
    return (ints)vdotq_s32((int32x4_t)sum, (int8x16_t)x, (int8x16_t)w);
#else
    for (int shift = 24; shift >= 0; shift -= 8) sum += ((x << shift) >> 24) * ((w << shift) >> 24);
    return sum;
#endif
}

/* By what a kernel computes products of int8; a name for people. NULL: it does not work here. */
const char *gemm_instructions_int8(int kernel) {
    if (kernel == TILES) return tiles_work() ? "AMX" : NULL;
#if defined(__AVX512VNNI__)
    return "AVX-512 VNNI";
#elif OFFSET
    return "AVX-VNNI";
#elif defined(__aarch64__) && defined(__ARM_FEATURE_DOTPROD)
    return "NEON dot product";
#else
    return VECTORS_NAME;
#endif
}

static int width_of(int kernel) { return kernel == TILES ? TILED_PANEL : PANEL; }
static int64_t whole(int64_t count, int64_t of) { return (count + of - 1) / of * of; }

int64_t int8_packed_bytes(const pack_args *a) {
    return whole(a->out_features, TILED_PANEL) * (8 + whole(a->in_features, DEPTH));
}

INLINE float value(const void *from, const int is_bf16, int64_t at) {
    return is_bf16 ? from_bf16(((const uint16_t *)from)[at]) : ((const float *)from)[at];
}

/* max|x| / 127 of `count` elements, and its inverse; NaN and 0 where some element is not finite. */
INLINE float scale_of(
    const void *from, const int is_bf16, int64_t at, int64_t count, float *inverse) {
    float most[16] = {0}; /* side by side, for vectors */
    int32_t wrong[16] = {0};
    int64_t i = 0;
    for (; i + 16 <= count; i += 16)
        for (int j = 0; j < 16; j++) {
            const float size = fabsf(value(from, is_bf16, at + i + j));
            most[j] = size > most[j] ? size : most[j];
            wrong[j] |= !(size <= FLT_MAX);
        }
    for (; i < count; i++) {
        const float size = fabsf(value(from, is_bf16, at + i));
        most[0] = size > most[0] ? size : most[0];
        wrong[0] |= !(size <= FLT_MAX);
    }
    for (int j = 1; j < 16; j++) {
        most[0] = most[j] > most[0] ? most[j] : most[0];
        wrong[0] |= wrong[j];
    }
    const int usable = !wrong[0] && most[0] > 127.0f * FLT_MIN; /* smaller ones have no inverse */
    *inverse = usable ? 127.0f / most[0] : 0.0f;
    return wrong[0] ? NAN : most[0] / 127.0f;
}

static int8_t rounded(float x, float inverse) {
    return (int8_t)(inverse != 0.0f ? rintf(x * inverse) : 0.0f);
}

void int8_pack(const pack_args *a, int is_bf16, void *packed) {
    const int64_t in = a->in_features, depth = whole(in, DEPTH), width = width_of(a->kernel);
    const int64_t outputs = whole(a->out_features, TILED_PANEL);
    float *scales = packed;
    int32_t *sums = (int32_t *)(scales + outputs);
    int8_t *panels = (int8_t *)(sums + outputs);
#pragma omp parallel for num_threads(a->num_threads)
    for (int64_t n = 0; n < outputs; n++) {
        const int64_t known = n < a->out_features ? in : 0;
        int8_t *to = panels + n / width * width * depth + n % width * 4;
        float inverse;
        scales[n] = scale_of(a->weight, is_bf16, n * in, known, &inverse);
        sums[n] = 0;
        for (int64_t k = 0; k < depth; k++) {
            const int8_t w = k < known ? rounded(value(a->weight, is_bf16, n * in + k), inverse) : 0;
            to[k / 4 * 4 * width + k % 4] = w;
            sums[n] += OFFSET * w;
        }
    }
}

/* A row as int8, of those the instruction multiplies; returns its scale. */
INLINE float row_as_int8(
    const void *from, const int is_bf16, int64_t at, int64_t count, int offset, int8_t *to) {
    float inverse;
    const float scale = scale_of(from, is_bf16, at, count, &inverse);
    if (inverse == 0.0f) memset(to, offset, count);
    else
        for (int64_t k = 0; k < count; k++)
            to[k] = (int8_t)((int32_t)rintf(value(from, is_bf16, at + k) * inverse) + offset);
    return scale;
}

static void quantise(const gemm_args *a, int is_bf16, int offset, int8_t *rows, float *scales) {
    const int64_t in = a->in_features, depth = whole(in, DEPTH);
#pragma omp parallel for num_threads(a->num_threads) if (a->num_rows * in > 16384)
    for (int64_t r = 0; r < a->num_rows; r++) {
        int8_t *to = rows + r * depth;
        const int64_t at = r * a->row_stride;
        scales[r] = is_bf16 ? row_as_int8(a->x, 1, at, in, offset, to)
                            : row_as_int8(a->x, 0, at, in, offset, to);
        memset(to + in, offset, depth - in);
    }
}

/* sums[rows][PANEL] = rows times one panel. */
INLINE void tile(const int rows, const int8_t *x, int64_t depth, const int8_t *w, int32_t *sums) {
    ints sum[TILE_ROWS][PANEL_VECTORS];
#pragma GCC unroll 14
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < PANEL_VECTORS; v++) sum[r][v] = (ints){0};
    for (int64_t k = 0; k < depth; k += 4) {
        ints weights[PANEL_VECTORS];
#pragma GCC unroll 4
        for (int v = 0; v < PANEL_VECTORS; v++)
            weights[v] = *(const unaligned_ints *)(w + k * PANEL + v * 4 * LANES);
#pragma GCC unroll 14
        for (int r = 0; r < rows; r++) {
            const ints quad = (ints)all_lanes_of_four(x + r * depth + k);
#pragma GCC unroll 4
            for (int v = 0; v < PANEL_VECTORS; v++) sum[r][v] = add_quads(sum[r][v], quad, weights[v]);
        }
    }
#pragma GCC unroll 14
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < PANEL_VECTORS; v++)
            *(unaligned_ints *)(sums + r * PANEL + v * LANES) = sum[r][v];
}

static void any_tile(int rows, const int8_t *x, int64_t depth, const int8_t *w, int32_t *sums) {
#define CASE(count) \
    case count: tile(count, x, depth, w, sums); break;
    switch (rows) {
        CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6)
#if TILE_ROWS == 14
        CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12) CASE(13) CASE(14)
#endif
    }
#undef CASE
}

#if HAS_TILES
/* sums[rows][TILED_PANEL]: tiles 0 to 3 hold sums, 4 and 5 rows, 6 and 7 weights. */
static void tiled(int rows, const int8_t *x, int64_t depth, const int8_t *w, int32_t *sums) {
    const int two = rows > MAX_TILE_ROWS;
    const int64_t stride = TILED_PANEL * sizeof(int32_t);
    tile_zero(0);
    tile_zero(1);
    tile_zero(2);
    tile_zero(3);
    for (int64_t k = 0; k < depth; k += DEPTH, w += DEPTH * TILED_PANEL) {
        tile_load(4, x + k, depth);
        tile_load(6, w, 4 * TILED_PANEL);
        tile_load(7, w + 2 * TILED_PANEL, 4 * TILED_PANEL);
        tile_dot_int8(0, 4, 6);
        tile_dot_int8(1, 4, 7);
        if (!two) continue;
        tile_load(5, x + MAX_TILE_ROWS * depth + k, depth);
        tile_dot_int8(2, 5, 6);
        tile_dot_int8(3, 5, 7);
    }
    tile_store(0, sums, stride);
    tile_store(1, sums + TILED_PANEL / 2, stride);
    if (!two) return;
    tile_store(2, sums + MAX_TILE_ROWS * TILED_PANEL, stride);
    tile_store(3, sums + MAX_TILE_ROWS * TILED_PANEL + TILED_PANEL / 2, stride);
}
#endif

/* All rows times one panel of `width` outputs. */
static void one_panel(
    const gemm_args *a, int is_bf16, int kernel, const int8_t *x, const float *row_scales,
    const float *scales, const int32_t *corrections, const int8_t *w, int64_t column, int *shaped) {
    const int64_t depth = whole(a->in_features, DEPTH);
    (void)shaped; /* where there are no tiles */
    const int width = width_of(kernel), most = kernel == TILES ? MOST_ROWS : TILE_ROWS;
    int32_t sums[MOST_ROWS * TILED_PANEL] __attribute__((aligned(64)));
    float results[MOST_ROWS * TILED_PANEL];
    for (int64_t first = 0; first < a->num_rows; first += most) {
        const int rows = a->num_rows - first < most ? (int)(a->num_rows - first) : most;
        if (kernel == VECTORS) any_tile(rows, x + first * depth, depth, w, sums);
#if HAS_TILES
        if (kernel == TILES) {
            if (rows != *shaped) tile_configure_pairs(*shaped = rows);
            tiled(rows, x + first * depth, depth, w, sums);
        }
#endif
        const int correct = kernel == VECTORS && OFFSET;
        for (int r = 0; r < rows; r++)
            for (int n = 0; n < width; n++) {
                const int32_t sum = sums[r * width + n] - (correct ? corrections[column + n] : 0);
                results[r * width + n] = (float)sum * (row_scales[first + r] * scales[column + n]);
            }
        if (is_bf16) put_bf16(a, first, rows, column, width, results);
        else put_f32(a, first, rows, column, width, results);
    }
}

int int8_gemm(const gemm_args *a, int is_bf16, int kernel, const void *packed) {
    const int64_t depth = whole(a->in_features, DEPTH), width = width_of(kernel);
    const int64_t outputs = whole(a->out_features, TILED_PANEL);
    const int64_t panels = (a->out_features + width - 1) / width;
    const int64_t share = panels / (4 * a->num_threads) > 1 ? panels / (4 * a->num_threads) : 1;
    const float *scales = packed;
    const int32_t *corrections = (const int32_t *)(scales + outputs);
    const int8_t *weights = (const int8_t *)(corrections + outputs);
    if (!a->num_rows) return 0;
    int8_t *x = aligned_alloc(64, whole(a->num_rows * (depth + (int64_t)sizeof(float)), 64));
    if (!x) return 1;
    float *row_scales = (float *)(x + a->num_rows * depth);
    quantise(a, is_bf16, kernel == VECTORS ? OFFSET : 0, x, row_scales);
#pragma omp parallel num_threads(a->num_threads)
    {
        int shaped = 0; /* the thread's tiles, for so many rows */
#pragma omp for schedule(dynamic, share)
        for (int64_t panel = 0; panel < panels; panel++)
            one_panel(a, is_bf16, kernel, x, row_scales, scales, corrections,
                      weights + panel * width * depth, panel * width, &shaped);
#if HAS_TILES
        if (kernel == TILES) tile_release();
#endif
    }
    free(x);
    return 0;
}
