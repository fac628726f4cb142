/* Epilogue of a GEMM: adds the bias to sums[rows][width], and also the previous output if a->adds.
   Rounds the result once, and stores it in outputs [column, column + width). */

#ifndef BATCHINFER_EPILOGUE_H
#define BATCHINFER_EPILOGUE_H

#include "arguments.h"
#include "element_types.h"
#include "simd.h"

typedef uint16_t halves __attribute__((vector_size(2 * LANES), aligned(2), may_alias));

INLINE vec load_bf16(const uint16_t *from) {
#if defined(__AVX512F__)
    return (vec)((words)_mm512_cvtepu16_epi32((__m256i)*(const halves *)from) << 16);
#elif LANES == 8 /* compilers need three instructions for the generic form */
    return (vec)((words)_mm256_cvtepu16_epi32((__m128i)*(const halves *)from) << 16);
#else
    return (vec)(__builtin_convertvector(*(const halves *)from, words) << 16);
#endif
}

INLINE void store_bf16(uint16_t *to, vec x) { /* rounds like to_bf16 */
#if defined(__AVX512BF16__) && defined(__AVX512DQ__)
    /* 0x20: denormal numbers, which the instruction that rounds would take as 0. */
    if (__builtin_expect(!_mm512_fpclass_ps_mask((__m512)x, 0x20), 1)) {
        store_rounded(to, x);
        return;
    }
#endif
    const words bits = (words)x, is_nan = (words)((bits & 0x7fffffffu) > 0x7f800000u);
    const words rounded = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
    const words whole = (is_nan & (bits >> 16 | 0x40u)) | (~is_nan & rounded);
    *(halves *)to = __builtin_convertvector(whole, halves);
}

#define EPILOGUE(type, ELEMENT, LOAD, STORE, LOAD_LANES, STORE_LANES)                             \
    INLINE void epilogue_lanes_##type(                                                            \
        const int adds, ELEMENT *to, const ELEMENT *bias, const float *sum, const int width) {    \
        for (int n = 0; n < width; n += LANES) {                                                  \
            vec x = load(sum + n);                                                                \
            if (bias) x += LOAD_LANES(bias + n);                                                  \
            if (adds) x += LOAD_LANES(to + n);                                                    \
            STORE_LANES(to + n, x);                                                               \
        }                                                                                         \
    }                                                                                             \
    INLINE void epilogue_##type(                                                                  \
        const gemm_args *a, int64_t first, int rows, int64_t column, const int width,             \
        const float *sums) {                                                                      \
        const int64_t out = a->out_features, left = out - column;                                 \
        const ELEMENT *bias = a->bias ? (const ELEMENT *)a->bias + column : NULL;                 \
        for (int r = 0; r < rows; r++) {                                                          \
            ELEMENT *to = (ELEMENT *)a->out + (first + r) * out + column;                         \
            const float *sum = sums + r * width;                                                  \
            if (left >= width) epilogue_lanes_##type(a->adds, to, bias, sum, width);              \
            for (int64_t n = 0; left < width && n < left; n++) {                                  \
                float x = sum[n];                                                                 \
                if (bias) x += LOAD(bias[n]);                                                     \
                if (a->adds) x += LOAD(to[n]);                                                    \
                to[n] = STORE(x);                                                                 \
            }                                                                                     \
        }                                                                                         \
    }

#define AS_IT_IS(x) (x)
EPILOGUE(f32, float, AS_IT_IS, AS_IT_IS, load, store)
EPILOGUE(bf16, uint16_t, from_bf16, to_bf16, load_bf16, store_bf16)

#endif
