/* GEMMs of int8. A weight has a scale for each output. Each row of x has a scale, which is computed
   when the row is converted. out = (float)sum * (row scale * output scale) + bias + previous
   output, in float.

   Packed: scales [outputs] and panels [panel][k / 4][output][4]. k is padded with zeros to whole
   tiles. Panels for tiles have TILED_PANEL outputs; in panels for vectors, OFFSET is added to codes
   (int8_dot.h). */

#include "no_reassociation.h"

#include "no_fma_contract.h"

#include "gemm_low_bit.h"

#include "panel_prefetch.h"
#include "epilogue.h"
#include "int8_dot.h"
#include "gemm_rows.h"
#include "amx_tiles.h"

#define MOST_ROWS 32 /* largest number of rows of x that tiles multiply at once */
#define TILED_PANEL 32
#define CHUNK 8 /* quads of k between prefetches */

/* Returns the name of the instruction set that a kernel uses, such as "AMX"; NULL if the kernel does
   not work on this processor. */
const char *gemm_instructions_int8(int kernel) {
    if (kernel == TILES) return tiles_work() ? "AMX" : NULL;
    return QUADS_NAME;
}

static int width_of(int kernel) { return kernel == TILES ? TILED_PANEL : PANEL; }

int64_t packed_bytes_int8(const pack_args *a) {
    return sizeof(header)
           + whole(a->out_features, TILED_PANEL) * (4 + whole(a->in_features, ROWS_DEPTH));
}

void pack_int8(const pack_args *a) {
    const int64_t in = a->in_features, depth = whole(in, ROWS_DEPTH), width = width_of(a->kernel);
    const int64_t outputs = whole(a->out_features, TILED_PANEL);
    const int more = a->kernel == VECTORS ? OFFSET : 0;
    const int8_t *codes = a->weight;
    *(header *)a->packed = (header){.kernel = a->kernel, .kind = INT8};
    float *scales = (float *)((header *)a->packed + 1);
    int8_t *panels = (int8_t *)(scales + outputs);
#pragma omp parallel for num_threads(a->num_threads)
    for (int64_t n = 0; n < outputs; n++) {
        const int64_t known = n < a->out_features ? in : 0;
        int8_t *to = panels + n / width * width * depth + n % width * 4;
        scales[n] = known ? ((const float *)a->scales)[n] : 0.0f;
        for (int64_t k = 0; k < depth; k++)
            to[k / 4 * 4 * width + k % 4] = (int8_t)((k < known ? codes[n * in + k] : 0) + more);
    }
}

/* results[rows][PANEL] = rows times one panel, whose outputs have `scales`. */
INLINE void tile(
    const int rows, const gemm_rows *x, int64_t first, int64_t depth, const int8_t *w,
    const float *scales, float *results, ahead *next) {
    const int8_t *codes = x->codes + first * x->stride;
    const int64_t stride = x->stride;
    ints sum[TILE_ROWS][PANEL_VECTORS];
#pragma GCC unroll 14
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < PANEL_VECTORS; v++) sum[r][v] = -OFFSET * x->sums[first + r] - (ints){0};
    for (int64_t from = 0; from < depth; from += 4 * CHUNK) {
        prefetch_share(next);
        for (int64_t k = from; k < from + 4 * CHUNK; k += 4) {
            ints weights[PANEL_VECTORS];
#pragma GCC unroll 4
            for (int v = 0; v < PANEL_VECTORS; v++)
                weights[v] = load_ints(w + k * PANEL + v * 4 * LANES);
#pragma GCC unroll 14
            for (int r = 0; r < rows; r++) {
                const ints quads = all_quads(codes + r * stride + k);
#pragma GCC unroll 4
                for (int v = 0; v < PANEL_VECTORS; v++)
                    sum[r][v] = add_int8_quads(sum[r][v], weights[v], quads);
            }
        }
    }
#pragma GCC unroll 14
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < PANEL_VECTORS; v++)
            store(results + r * PANEL + v * LANES,
                  __builtin_convertvector(sum[r][v], vec)
                      * (x->scales[first + r] * load(scales + v * LANES)));
}

static void any_tile(
    int rows, const gemm_rows *x, int64_t first, int64_t depth, const int8_t *w,
    const float *scales, float *results, ahead *next) {
#define CASE(count) \
    case count: tile(count, x, first, depth, w, scales, results, next); break;
    switch (rows) { EACH_COUNT_OF_ROWS(CASE) }
#undef CASE
}

#if HAS_TILES
/* sums[rows][TILED_PANEL] = rows times one panel. Tiles 0 to 3 hold sums, tiles 4 and 5 hold rows,
   tiles 6 and 7 hold weights. */
static void tiled(
    int rows, const int8_t *x, int64_t x_stride, int64_t depth, const int8_t *w, int32_t *sums) {
    const int two = rows > MAX_TILE_ROWS;
    const int64_t stride = TILED_PANEL * sizeof(int32_t);
    tile_zero(0);
    tile_zero(1);
    tile_zero(2);
    tile_zero(3);
    for (int64_t k = 0; k < depth; k += ROWS_DEPTH, w += ROWS_DEPTH * TILED_PANEL) {
        tile_load(4, x + k, x_stride);
        tile_load(6, w, 4 * TILED_PANEL);
        tile_load(7, w + 2 * TILED_PANEL, 4 * TILED_PANEL);
        tile_dot_int8(0, 4, 6);
        tile_dot_int8(1, 4, 7);
        if (!two) continue;
        tile_load(5, x + MAX_TILE_ROWS * x_stride + k, x_stride);
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

/* Multiplies all rows by one panel. */
INLINE void one_panel(
    const gemm_args *a, const int is_bf16, const gemm_rows *x, const float *scales,
    const int8_t *panels, int64_t panel, int is_last) {
    const int64_t depth = whole(a->in_features, ROWS_DEPTH), bytes = PANEL * depth;
    const int64_t tiles = (a->num_rows + TILE_ROWS - 1) / TILE_ROWS;
    const int8_t *w = panels + panel * bytes;
    ahead next = ahead_of(w, bytes, is_last, tiles * (depth / (4 * CHUNK)));
    float results[TILE_ROWS * PANEL] __attribute__((aligned(64)));
    for (int64_t t = 0; t < tiles; t++) { /* tiles of nearly equal height */
        const int64_t first = t * a->num_rows / tiles;
        const int rows = (int)((t + 1) * a->num_rows / tiles - first);
        any_tile(rows, x, first, depth, w, scales + panel * PANEL, results, &next);
        if (is_bf16) epilogue_bf16(a, first, rows, panel * PANEL, PANEL, results);
        else epilogue_f32(a, first, rows, panel * PANEL, PANEL, results);
    }
}

#if HAS_TILES
static void one_tiled_panel(
    const gemm_args *a, int is_bf16, const gemm_rows *x, const float *scales, const int8_t *panels,
    int64_t panel, int *shaped) {
    const int64_t depth = whole(a->in_features, ROWS_DEPTH), column = panel * TILED_PANEL;
    const int8_t *w = panels + column * depth;
    int32_t sums[MOST_ROWS * TILED_PANEL] __attribute__((aligned(64)));
    float results[MOST_ROWS * TILED_PANEL] __attribute__((aligned(64)));
    for (int64_t first = 0; first < a->num_rows; first += MOST_ROWS) {
        const int rows = a->num_rows - first < MOST_ROWS ? (int)(a->num_rows - first) : MOST_ROWS;
        if (rows != *shaped) tile_configure_pairs(*shaped = rows);
        tiled(rows, x->codes + first * x->stride, x->stride, depth, w, sums);
        for (int r = 0; r < rows; r++)
            for (int n = 0; n < TILED_PANEL; n++)
                results[r * TILED_PANEL + n] =
                    (float)sums[r * TILED_PANEL + n] * (x->scales[first + r] * scales[column + n]);
        if (is_bf16) epilogue_bf16(a, first, rows, column, TILED_PANEL, results);
        else epilogue_f32(a, first, rows, column, TILED_PANEL, results);
    }
}
#endif

void gemm_int8(const gemm_args *a, int is_bf16, const gemm_rows *x) {
    const header *from = a->packed;
    const int64_t width = width_of(from->kernel);
    const int64_t panels = (a->out_features + width - 1) / width;
    const float *scales = (const float *)(from + 1);
    const int8_t *weights = (const int8_t *)(scales + whole(a->out_features, TILED_PANEL));
#if HAS_TILES
    if (from->kernel == TILES) {
        int shaped = 0; /* number of rows that the thread's tiles are configured for */
#pragma omp for schedule(guided) nowait
        for (int64_t panel = 0; panel < panels; panel++)
            one_tiled_panel(a, is_bf16, x, scales, weights, panel, &shaped);
        tile_release();
        return;
    }
#endif
#pragma omp for schedule(guided) nowait
    for (int64_t panel = 0; panel < panels; panel++) {
        if (is_bf16) one_panel(a, 1, x, scales, weights, panel, panel + 1 == panels);
        else one_panel(a, 0, x, scales, weights, panel, panel + 1 == panels);
    }
}
