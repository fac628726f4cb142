/* Converts rows for GEMMs (gemm_rows.h). int8 rows have the same bits on every processor. */

#include "no_reassociation.h"

#include "no_fma_contract.h"

#include "gemm_rows.h"

#include "epilogue.h"
#include "gemm_low_bit.h"

#define INFINITY_BITS 0x7f800000

/* Returns the row stride in elements: `in` rounded up to an odd number of cache lines of `each`
   elements. */
static int64_t stride_of(int64_t in, int64_t each) { return (whole(in, each) / each | 1) * each; }

static gemm_rows shape_of(const gemm_args *a) {
    const header *from = a->packed;
    const int64_t in = a->in_features;
    if (from->halves) return (gemm_rows){.stride = stride_of(in, 16), .in = in};
    if (from->kind == FLOATS || from->kind == FLOAT8) return (gemm_rows){0};
    const int64_t group = from->kind == GROUPS ? from->group : in;
    return (gemm_rows){.stride = stride_of(in, ROWS_DEPTH), .in = in, .group = group,
                          .groups = (in + group - 1) / group};
}

int64_t gemm_rows_bytes(const gemm_args *a) {
    const gemm_rows rows = shape_of(a);
    const int64_t each = rows.group ? rows.stride + 4 * (1 + rows.groups) : 4 * rows.stride;
    return whole(a->num_rows * each, 64);
}

gemm_rows gemm_rows_in(void *memory, const gemm_args *a) {
    gemm_rows rows = shape_of(a);
    if (!rows.group) {
        rows.floats = rows.stride ? memory : NULL;
        return rows;
    }
    rows.codes = memory;
    rows.order = order_of(a->packed);
    rows.scales = (float *)(rows.codes + a->num_rows * rows.stride);
    rows.sums = (int32_t *)(rows.scales + a->num_rows);
    return rows;
}

INLINE float element_of(const void *x, const int is_bf16, int64_t at) {
    return is_bf16 ? from_bf16(((const uint16_t *)x)[at]) : ((const float *)x)[at];
}

/* Returns the bits of the largest |x[k]|. The bits of numbers without sign are ordered like the
   numbers. */
INLINE int32_t most_of(const void *x, const int is_bf16, int64_t count) {
    uint16_t half = 0;
    for (int64_t k = 0; is_bf16 && k < count; k++) {
        const uint16_t bits = ((const uint16_t *)x)[k] & 0x7fff;
        half = bits > half ? bits : half;
    }
    int32_t most = (int32_t)half << 16;
    for (int64_t k = 0; !is_bf16 && k < count; k++) {
        int32_t bits;
        memcpy(&bits, (const float *)x + k, 4);
        bits &= 0x7fffffff;
        most = bits > most ? bits : most;
    }
    return most;
}

/* Rounds the numbers of a group, and returns the sum of their codes. */
INLINE int32_t round_group(
    int8_t *codes, const int is_bf16, const void *x, const int32_t *order, int64_t begin,
    int64_t count, float inverse) {
    int32_t sum = 0;
    int64_t k = begin;
#if LANES == 16 /* compilers need twice as many instructions */
    __m512i total = _mm512_setzero_si512();
    const int64_t stop = order ? begin : begin + count / LANES * LANES;
    for (; k < stop; k += LANES) {
        const vec value = is_bf16 ? load_bf16((const uint16_t *)x + k) : load((const float *)x + k);
        const __m512i code = _mm512_cvtps_epi32((__m512)(value * inverse));
        _mm_storeu_si128((__m128i *)(codes + k), _mm512_cvtepi32_epi8(code));
        total = _mm512_add_epi32(total, code);
    }
    sum = _mm512_reduce_add_epi32(total);
#endif
    for (; k < begin + count; k++) {
        const float value = element_of(x, is_bf16, order ? order[k] : k);
        const int32_t code = (int32_t)rintf(value * inverse);
        codes[k] = (int8_t)code;
        sum += code;
    }
    return sum;
}

INLINE void round_row(const gemm_rows *to, const int is_bf16, const void *x, int64_t row) {
    const int64_t in = to->in;
    const int32_t most_bits = most_of(x, is_bf16, in);
    float most;
    memcpy(&most, &most_bits, 4);
    const int is_finite = most_bits < INFINITY_BITS;
    to->scales[row] = is_finite ? most * (1.0f / 127.0f) : NAN;
    int8_t *codes = to->codes + row * to->stride;
    int32_t *sums = to->sums + row * to->groups;
    if (!is_finite || most <= 127.0f * 0x1p-126f) { /* 127 / most could overflow */
        memset(codes, 0, to->stride);
        memset(sums, 0, to->groups * sizeof(*sums));
        return;
    }
    const float inverse = 127.0f / most;
    for (int64_t g = 0; g < to->groups; g++) {
        const int64_t begin = g * to->group, left = in - begin;
        const int64_t count = left < to->group ? left : to->group;
        if (to->order) sums[g] = round_group(codes, is_bf16, x, to->order, begin, count, inverse);
        else sums[g] = round_group(codes, is_bf16, x, NULL, begin, count, inverse);
    }
    memset(codes + in, 0, to->stride - in);
}

void convert_row_f32(const gemm_rows *to, const float *x, int64_t row) { round_row(to, 0, x, row); }

void convert_row_bf16(const gemm_rows *to, const uint16_t *x, int64_t row) {
    if (!to->floats) {
        round_row(to, 1, x, row);
        return;
    }
    float *floats = to->floats + row * to->stride;
    for (int64_t k = 0; k < to->in; k++) floats[k] = from_bf16(x[k]);
}
