/* GEMMs of 4-bit or 8-bit codes and int8 rows. Each output has a scale and a zero point for each
   group of columns k. Each row of x has a scale, which is computed when the row is converted. out =
   (sum over groups of scale * (float)(sum of (code - zero) * x)) * row scale + bias + previous
   output, in float. Groups are added in order, by fused multiply-adds; sums within a group are
   exact. 4-bit codes may be indices into an int8 table instead, which approximates NF4 or holds
   FP4. NVFP4 has float8 scales and a factor for each output, which multiplies the sum over groups;
   it has no zero points. The columns of a group need not be adjacent in x: converting a row sorts
   its columns by group.

   Packed: the order of columns, if they are sorted, padded to a cache line; then panels of PANEL
   outputs. Each panel has scales [group][output] (float) and zero points [group][output] (uint8),
   or factors [output] (float) and scales [group][output] (float8), together padded to a cache line,
   and codes. 8-bit codes are [k / 4][vector][lane][4]; 128 is
   subtracted from them and OFFSET is added, because add_int8_quads multiplies signed int8. 4-bit
   codes are [k / 8][vector][lane][4]: the lower half of a byte belongs to the first four of eight
   k, the upper half to the other four. Tiles (gemm_groups_amx.inc) multiply the same panels. */

#include "no_reassociation.h"

#include "no_fma_contract.h"

#include "gemm_low_bit.h"

#include "panel_prefetch.h"
#include "epilogue.h"
#include "int8_dot.h"
#include "gemm_rows.h"
#include "amx_tiles.h"

#define STEP 8     /* number of columns k that are multiplied at a time: two quads */
#define MIDDLE 128 /* middle of the range of 8-bit codes */
#define PAIRS_DEPTH (4 * ADDED_PAIRS) /* number of columns k whose products are summed in 16 bits */
#define MOST_TILED (4 * TILE_ROW_BYTES) /* largest group that tiles multiply */
#define PANELS_FIT_TILES (HAS_TILES && PANEL % MAX_TILE_ROWS == 0)

/* LUT4: 4-bit indices into a table; NVFP4: the same with float8 scales */
enum { INT4_CODES, LUT4_CODES, NVFP4_CODES, INT8_CODES };

/* Returns the name of a kernel's instruction set; NULL if the kernel does not work on this
   processor. */
const char *gemm_instructions_groups(int kernel) {
    if (kernel == TILES) return PANELS_FIT_TILES && tiles_work() ? "AMX" : NULL;
    return QUADS_NAME;
}

typedef struct {
    int64_t group, groups, depth, head_bytes, bytes; /* head: all but a panel's codes */
} shape;

static shape shape_of(int64_t in_features, int64_t group, int bits, int has_factors) {
    shape s = {.group = group, .groups = (in_features + group - 1) / group};
    s.depth = whole(in_features, STEP);
    s.head_bytes = whole(PANEL * (has_factors ? 4 + s.groups : 5 * s.groups), LINE);
    s.bytes = whole(s.head_bytes + s.depth * PANEL * bits / 8, LINE);
    return s;
}

static int64_t order_bytes(int has_order, int64_t in_features) {
    return has_order ? whole(in_features * 4, LINE) : 0;
}

int64_t packed_bytes_groups(const pack_args *a) {
    const int64_t panels = whole(a->out_features, PANEL) / PANEL;
    return sizeof(header) + order_bytes(!!a->order, a->in_features)
           + panels * shape_of(a->in_features, a->group, a->bits, !!a->factors).bytes;
}

static void pack_scales(const pack_args *a, const shape *s, int64_t n, uint8_t *panel, int64_t at) {
    float *floats = (float *)panel;
    uint8_t *zeros = panel + s->groups * PANEL * 4, *float8 = panel + PANEL * 4;
    const int is_output = n < a->out_features;
    if (a->factors) floats[at] = is_output ? a->factors[n] : 0.0f;
    for (int64_t g = 0, from = n * s->groups; g < s->groups; g++, from++) {
        const int64_t to = g * PANEL + at;
        if (a->factors) {
            float8[to] = is_output ? ((const uint8_t *)a->scales)[from] : 0;
            continue;
        }
        floats[to] = is_output ? ((const float *)a->scales)[from] : 0.0f;
        zeros[to] = is_output ? a->zeros[from] : 0;
    }
}

static void pack_output(const pack_args *a, const shape *s, int64_t n, uint8_t *panel, int64_t at) {
    const int64_t in = a->in_features;
    uint8_t *to = panel + s->head_bytes + at * 4;
    const uint8_t *codes = (const uint8_t *)a->weight + n * in;
    pack_scales(a, s, n, panel, at);
    for (int64_t k = 0; k < s->depth; k++) {
        const uint8_t code = n < a->out_features && k < in ? codes[k] : 0;
        if (a->bits == 8) {
            to[k / 4 * 4 * PANEL + k % 4] = (uint8_t)(code - MIDDLE + OFFSET);
            continue;
        }
        uint8_t *byte = to + k / STEP * 4 * PANEL + k % 4;
        *byte = k % STEP < 4 ? code & 15 : *byte | code << 4;
    }
}

/* Returns 1 if tiles can multiply a weight: if whole groups fill tiles or whole tiles fill groups,
   and all numbers that codes stand for, minus the zero points, are int8. */
static int fits_tiles(const pack_args *a) {
    const int64_t group = a->group, groups = (a->in_features + group - 1) / group;
    if (a->bits != 4 || group & (group - 1) || group > MOST_TILED) return 0;
    int least = a->table ? 127 : 0, most = 0;
    for (int at = 0; a->table && at < 16; at++) least = a->table[at] < least ? a->table[at] : least;
    for (int64_t at = 0; !a->factors && at < a->out_features * groups; at++)
        most = a->zeros[at] > most ? a->zeros[at] : most;
    return least - most >= -128;
}

void pack_groups(const pack_args *a) {
    const shape s = shape_of(a->in_features, a->group, a->bits, !!a->factors);
    header *to = a->packed;
    *to = (header){.kernel = fits_tiles(a) ? a->kernel : VECTORS, .kind = GROUPS,
                   .group = a->group, .bits = a->bits, .has_table = !!a->table,
                   .has_order = !!a->order, .has_factors = !!a->factors};
    for (int at = 0; a->table && at < 16; at++) to->table[at] = (uint8_t)(a->table[at] + OFFSET);
    if (a->order) memcpy(to + 1, a->order, a->in_features * 4);
    uint8_t *panels = (uint8_t *)(to + 1) + order_bytes(to->has_order, a->in_features);
#pragma omp parallel for num_threads(a->num_threads)
    for (int64_t panel = 0; panel < (a->out_features + PANEL - 1) / PANEL; panel++)
        for (int64_t at = 0; at < PANEL; at++)
            pack_output(a, &s, panel * PANEL + at, panels + panel * s.bytes, at);
}

/* Returns the difference between a code of this form and the number that is multiplied instead of
   the code. */
INLINE int middle_of(const int form) {
    return form == INT8_CODES ? MIDDLE - OFFSET : form == INT4_CODES ? 0 : -OFFSET;
}

INLINE int has_table(const int form) { return form == LUT4_CODES || form == NVFP4_CODES; }

/* Returns 4-bit codes of one vector of outputs: the lower or the upper halves of the bytes for
   columns [k, k + STEP). */
INLINE ints half_of(const uint8_t *codes, int64_t k, int v, int half) {
    const words both = (words)load_ints(codes + k * PANEL / 2 + v * 4 * LANES);
    return (ints)(both >> 4 * half & 0x0f0f0f0fu);
}

/* Loads the codes of one vector of outputs for columns [k, k + STEP): the first four into `low`,
   the last four into `high`. */
INLINE void load_codes(
    const int form, const uint8_t *codes, int64_t k, int v, ints entries, ints *low, ints *high) {
    if (form == INT8_CODES) {
        *low = load_ints(codes + k * PANEL + v * 4 * LANES);
        *high = load_ints(codes + (k + 4) * PANEL + v * 4 * LANES);
        return;
    }
    *low = half_of(codes, k, v, 0);
    *high = half_of(codes, k, v, 1);
    if (has_table(form)) *low = look_up(entries, *low);
    if (has_table(form)) *high = look_up(entries, *high);
}

INLINE ints add_codes(const int form, ints sum, ints codes, ints quads) {
    return form == INT4_CODES ? add_quads(sum, codes, quads) : add_int8_quads(sum, codes, quads);
}

/* Adds the products of columns k in [begin, end). Each lane adds four products at a time. */
INLINE void add_by_quads(
    const int rows, const int form, ints entries, const int8_t *x, int64_t stride,
    const uint8_t *codes, int64_t begin, int64_t end, ints (*sum)[PANEL_VECTORS]) {
    for (int64_t k = begin; k < end; k += STEP) {
        ints low[PANEL_VECTORS], high[PANEL_VECTORS];
#pragma GCC unroll 4
        for (int v = 0; v < PANEL_VECTORS; v++)
            load_codes(form, codes, k, v, entries, &low[v], &high[v]);
#pragma GCC unroll 14
        for (int r = 0; r < rows; r++) {
            const ints quads = all_quads(x + r * stride + k);
            const ints others = all_quads(x + r * stride + k + 4);
#pragma GCC unroll 4
            for (int v = 0; v < PANEL_VECTORS; v++) {
                const ints half = add_codes(form, sum[r][v], low[v], quads);
                sum[r][v] = add_codes(form, half, high[v], others);
            }
        }
    }
}

/* Like add_by_quads, for INT4_CODES. Keeps sums of pairs of products in 16 bits as long as they
   fit. */
INLINE void add_by_pairs(
    const int rows, const int8_t *x, int64_t stride, const uint8_t *codes, int64_t begin,
    int64_t end, ints (*sum)[PANEL_VECTORS]) {
    for (int64_t from = begin; from < end; from += PAIRS_DEPTH) {
        const int64_t to = end - from < PAIRS_DEPTH ? end : from + PAIRS_DEPTH;
        ints pairs[TILE_ROWS][PANEL_VECTORS];
#pragma GCC unroll 14
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
            for (int v = 0; v < PANEL_VECTORS; v++) pairs[r][v] = (ints){0};
        for (int64_t k = from; k < to; k += STEP)
#pragma GCC unroll 2
            for (int half = 0; half < 2; half++) { /* one half at a time, to save registers */
                ints weights[PANEL_VECTORS];
#pragma GCC unroll 4
                for (int v = 0; v < PANEL_VECTORS; v++) weights[v] = half_of(codes, k, v, half);
#pragma GCC unroll 14
                for (int r = 0; r < rows; r++) {
                    const ints quads = all_quads(x + r * stride + k + 4 * half);
#pragma GCC unroll 4
                    for (int v = 0; v < PANEL_VECTORS; v++)
                        pairs[r][v] = add_pairs(pairs[r][v], weights[v], quads);
                }
            }
#pragma GCC unroll 14
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
            for (int v = 0; v < PANEL_VECTORS; v++) sum[r][v] += sum_of_pairs(pairs[r][v]);
    }
}

/* Returns the initial value of the sum of a row's group for one vector of outputs: the part of the
   sum that does not depend on the codes. */
INLINE ints first_sum(const int form, const shape *s, const uint8_t *panel, int64_t g, int v,
                      int32_t sum_of_x) {
    if (form == NVFP4_CODES) return middle_of(form) * ((ints){0} + sum_of_x);
    const uint8_t *zeros = panel + s->groups * PANEL * 4;
    return (middle_of(form) - widened_bytes(zeros + g * PANEL + v * LANES)) * sum_of_x;
}

/* Returns a group's scales for one vector of outputs. */
INLINE vec scales_of(const int form, const uint8_t *panel, int64_t g, int v) {
    const int64_t at = g * PANEL + v * LANES;
    if (form == NVFP4_CODES) return e4m3_lanes(panel + PANEL * 4 + at) * E4M3_UNIT;
    return load((const float *)panel + at);
}

/* Returns a b + c, rounded once on every processor. */
INLINE vec fma_once(vec a, vec b, vec c) {
#if defined(HAS_FMA)
    return fma_vec(a, b, c);
#else
    for (int i = 0; i < LANES; i++) c[i] = fmaf(a[i], b[i], c[i]);
    return c;
#endif
}

/* sums[rows][PANEL] = rows times one panel, not yet multiplied by the scales of the rows. */
INLINE void tile(
    const int rows, const int form, const gemm_rows *x, int64_t first, const shape *s,
    const uint8_t *table, const uint8_t *panel, float *sums, ahead *next) {
    const uint8_t *codes = panel + s->head_bytes;
    const int8_t *rows_at = x->codes + first * x->stride;
    const int32_t *sums_of_x = x->sums + first * x->groups;
    const int64_t stride = x->stride;
    const ints entries = has_table(form) ? all_tables(table) : (ints){0};
    for (int64_t g = 0; g < s->groups; g++) {
        const int64_t begin = g * s->group, left = s->depth - begin;
        const int64_t end = begin + (left < s->group ? left : s->group);
        ints sum[TILE_ROWS][PANEL_VECTORS];
#pragma GCC unroll 14
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
            for (int v = 0; v < PANEL_VECTORS; v++)
                sum[r][v] = first_sum(form, s, panel, g, v, sums_of_x[r * x->groups + g]);
        prefetch_share(next);
        if (PAIRS_DEPTH && form == INT4_CODES)
            add_by_pairs(rows, rows_at, stride, codes, begin, end, sum);
        else add_by_quads(rows, form, entries, rows_at, stride, codes, begin, end, sum);
        vec scales[PANEL_VECTORS];
#pragma GCC unroll 4
        for (int v = 0; v < PANEL_VECTORS; v++) scales[v] = scales_of(form, panel, g, v);
#pragma GCC unroll 14
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
            for (int v = 0; v < PANEL_VECTORS; v++) {
                const vec in_float = __builtin_convertvector(sum[r][v], vec);
                float *to = sums + r * PANEL + v * LANES;
                store(to, fma_once(scales[v], in_float, g ? load(to) : (vec){0}));
            }
    }
    for (int at = 0; form == NVFP4_CODES && at < rows * PANEL; at += LANES)
        store(sums + at, load(sums + at) * load((const float *)panel + at % PANEL));
}

static void any_tile(
    int rows, int form, const gemm_rows *x, int64_t first, const shape *s,
    const uint8_t *table, const uint8_t *panel, float *sums, ahead *next) {
#define CASE(count)                                                          \
    case count:                                                              \
        if (form == INT8_CODES)                                              \
            tile(count, INT8_CODES, x, first, s, table, panel, sums, next);  \
        else if (form == LUT4_CODES)                                         \
            tile(count, LUT4_CODES, x, first, s, table, panel, sums, next);  \
        else if (form == NVFP4_CODES)                                        \
            tile(count, NVFP4_CODES, x, first, s, table, panel, sums, next); \
        else                                                                 \
            tile(count, INT4_CODES, x, first, s, table, panel, sums, next);  \
        break;
    switch (rows) { EACH_COUNT_OF_ROWS(CASE) }
#undef CASE
}

/* Returns the largest number of rows per tile. Tiles have fewer rows if pairs are summed, because
   the sums of pairs need registers in addition to the group's sums. */
static int64_t tile_rows(int form) {
    return PAIRS_DEPTH && form == INT4_CODES && LANES == 8 ? 4 : TILE_ROWS;
}

/* Multiplies all rows by one panel. */
INLINE void one_panel(
    const gemm_args *a, const int is_bf16, const gemm_rows *x, const shape *s, int form,
    const uint8_t *table, const uint8_t *panels, int64_t panel, int is_last) {
    const int64_t most = tile_rows(form), tiles = (a->num_rows + most - 1) / most;
    const uint8_t *w = panels + panel * s->bytes;
    ahead next = ahead_of(w, s->bytes, is_last, tiles * s->groups);
    float sums[TILE_ROWS * PANEL] __attribute__((aligned(64)));
    for (int64_t t = 0; t < tiles; t++) { /* tiles of nearly equal height */
        const int64_t first = t * a->num_rows / tiles;
        const int rows = (int)((t + 1) * a->num_rows / tiles - first);
        any_tile(rows, form, x, first, s, table, w, sums, &next);
        for (int r = 0; r < rows; r++)
            for (int n = 0; n < PANEL; n++) sums[r * PANEL + n] *= x->scales[first + r];
        if (is_bf16) epilogue_bf16(a, first, rows, panel * PANEL, PANEL, sums);
        else epilogue_f32(a, first, rows, panel * PANEL, PANEL, sums);
    }
}

#if PANELS_FIT_TILES
#include "gemm_groups_amx.inc"
#endif

void gemm_groups(const gemm_args *a, int is_bf16, const gemm_rows *x) {
    const header *from = a->packed;
    const shape s = shape_of(a->in_features, from->group, from->bits, from->has_factors);
    const int64_t panels = (a->out_features + PANEL - 1) / PANEL;
    const uint8_t *weights
        = (const uint8_t *)(from + 1) + order_bytes(from->has_order, a->in_features);
    const int form = from->bits == 8       ? INT8_CODES
                     : from->has_factors ? NVFP4_CODES
                     : from->has_table   ? LUT4_CODES
                                         : INT4_CODES;
#if PANELS_FIT_TILES
    if (from->kernel == TILES && a->num_rows >= FEWEST_ROWS) {
        gemm_tiles(a, is_bf16, x, &s, form, from->table, weights);
        return;
    }
#endif
#pragma omp for schedule(guided) nowait
    for (int64_t panel = 0; panel < panels; panel++) {
        const int is_last = panel + 1 == panels;
        if (is_bf16) one_panel(a, 1, x, &s, form, from->table, weights, panel, is_last);
        else one_panel(a, 0, x, &s, form, from->table, weights, panel, is_last);
    }
}
