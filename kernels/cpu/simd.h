/* Vector types and operations of the target processor. */

#ifndef BATCHINFER_SIMD_H
#define BATCHINFER_SIMD_H

#include "element_types.h"

/* How a packed GEMM (gemm.inc) uses registers: for TILE_ROWS x PANEL_VECTORS sums, for the weights
   of one step, and for x.

                  registers  lanes  sums    outputs of a panel
   AVX-512            32      16    14 x 2       32
   AVX2               16       8     6 x 2       16
   NEON               32       4     6 x 4       16
   any other          16       4     6 x 2        8   (as many registers as in SSE2) */
#if defined(__AVX512F__)
#include <immintrin.h>
#define LANES 16
#define TILE_ROWS 14
#define PANEL_VECTORS 2
#define VECTORS_NAME "AVX-512"
#elif defined(__AVX2__) && defined(__FMA__)
#include <immintrin.h>
#define LANES 8
#define TILE_ROWS 6
#define PANEL_VECTORS 2
#define VECTORS_NAME "AVX2"
#elif defined(__ARM_NEON) && defined(__aarch64__)
#include <arm_neon.h>
#define LANES 4
#define TILE_ROWS 6
#define PANEL_VECTORS 4
#define VECTORS_NAME "NEON"
#else
#define LANES 4
#define TILE_ROWS 6
#define PANEL_VECTORS 2
#if defined(HAS_FMA)
#define VECTORS_NAME "plain C with FMA"
#else
#define VECTORS_NAME "plain C"
#endif
#endif
#define PANEL (PANEL_VECTORS * LANES)

/* Expands to CASE(1) to CASE(TILE_ROWS). */
#if TILE_ROWS == 14
#define EACH_COUNT_OF_ROWS(CASE)                                                        \
    CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8) CASE(9) CASE(10) \
    CASE(11) CASE(12) CASE(13) CASE(14)
#else
#define EACH_COUNT_OF_ROWS(CASE) CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6)
#endif

#if !HAS_PAIRS
#define PAIRS_NAME VECTORS_NAME
#elif defined(__AVX512BF16__)
#define PAIRS_NAME "AVX-512 BF16"
#else
#define PAIRS_NAME "NEON BF16"
#endif

#define INLINE static inline __attribute__((always_inline))

typedef float vec __attribute__((vector_size(4 * LANES)));
typedef float unaligned_vec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint32_t words __attribute__((vector_size(4 * LANES)));

INLINE vec load(const float *from) { return *(const unaligned_vec *)from; }
INLINE void store(float *to, vec x) { *(unaligned_vec *)to = x; }

/* Returns a b + c, rounded once if the processor has an instruction for this. Compilers do not
   reassociate a chain of such instructions. */
INLINE vec fma_vec(vec a, vec b, vec c) {
#if defined(__AVX512F__)
    return (vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif LANES == 8
    return (vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__) && defined(__ARM_NEON)
    return (vec)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#elif defined(HAS_FMA)
    for (int i = 0; i < LANES; i++) c[i] = FMA(a[i], b[i], c[i]);
    return c;
#else
    return a * b + c;
#endif
}

/* Returns c + a0 b0 + a1 b1 for pairs of bfloat16, rounded as the processor's instruction does. */
#if HAS_PAIRS
INLINE vec fma_pairs(vec a, vec b, vec c) {
#if defined(__AVX512BF16__)
    return (vec)_mm512_dpbf16_ps((__m512)c, (__m512bh)a, (__m512bh)b);
#else
    return (vec)vbfdotq_f32((float32x4_t)c, (bfloat16x8_t)a, (bfloat16x8_t)b);
#endif
}
#endif

/* Stores LANES numbers as bfloat16. `to` may overlap the memory from which x was loaded. */
INLINE void store_rounded(uint16_t *to, vec x) {
#if defined(__AVX512BF16__)
    _mm256_storeu_si256((__m256i *)to, (__m256i)_mm512_cvtneps_pbh((__m512)x));
#elif HAS_PAIRS
    const bfloat16x4_t rounded = vcvt_bf16_f32((float32x4_t)x);
    memcpy(to, &rounded, sizeof(rounded));
#else
    uint16_t rounded[LANES];
    for (int i = 0; i < LANES; i++) rounded[i] = to_bf16(x[i]);
    memcpy(to, rounded, sizeof(rounded));
#endif
}

INLINE vec all_lanes(const float *from) { /* `from` points to any 32 bits */
#if defined(__AVX512F__)
    return (vec)_mm512_set1_ps(*from);
#else
    return *from - (vec){0};
#endif
}

INLINE vec all_lanes_of_four(const void *from) { /* four unaligned bytes go to each lane */
    uint32_t four;
    memcpy(&four, from, 4);
#if defined(__AVX512F__)
    return (vec)_mm512_set1_epi32((int32_t)four);
#else
    return (vec)(four - (words){0});
#endif
}

/* Returns the first (or, if `second`, the second) element of each pair of bfloat16 as a float. */
INLINE vec widened(const int second, vec pairs) {
    return (vec)(second ? (words)pairs & 0xffff0000u : (words)pairs << 16);
}

/* Converts float8 e4m3fn to floats, exactly. Format: sign, 4 bits of exponent with a bias of 7, 3
   bits of mantissa; no infinity, one NaN. Below 2^-6, the numbers are 2^-9 apart. */
INLINE void widen_e4m3(const uint8_t *from, float *to, int count) {
    for (int at = 0; at < count; at += LANES) {
        const int here = count - at < LANES ? count - at : LANES;
        uint8_t bytes[LANES] = {0};
        words x;
        if (here == LANES) memcpy(bytes, from + at, LANES);
        else memcpy(bytes, from + at, here);
#if defined(__AVX512F__)
        x = (words)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)bytes));
#else
        for (int i = 0; i < LANES; i++) x[i] = bytes[i];
#endif
        const words code = x & 0x7fu;
        const vec small = __builtin_convertvector(code, vec) * 0x1p-9f;
        const words is_small = (words)(code < 8u), is_nan = (words)(code == 0x7fu);
        const words normal = (code << 20) + (120u << 23);
        const words size = (is_small & (words)small) | (~is_small & normal);
        const words wide = size | (is_nan & 0x7fc00000u) | (x & 0x80u) << 24;
        if (here == LANES) store(to + at, (vec)wide);
        else memcpy(to + at, &wide, here * sizeof(float));
    }
}

/* Returns LANES float8 e4m3fn numbers, which must not be NaN, as floats divided by E4M3_UNIT. On
   processors that can convert float16, the bits are moved to the fields of a float16, whose
   exponent has another bias. */
#if defined(__AVX512F__)
#define E4M3_UNIT 0x1p8f
INLINE vec e4m3_lanes(const uint8_t *from) { /* 0xbfff clears the second copy of the sign */
    const __m256i halves = _mm256_slli_epi16(
        _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)from)), 7);
    return (vec)_mm512_cvtph_ps(_mm256_and_si256(halves, _mm256_set1_epi16((short)0xbfff)));
}
#elif LANES == 8 && defined(__F16C__)
#define E4M3_UNIT 0x1p8f
INLINE vec e4m3_lanes(const uint8_t *from) {
    const __m128i halves
        = _mm_slli_epi16(_mm_cvtepi8_epi16(_mm_loadl_epi64((const __m128i *)from)), 7);
    return (vec)_mm256_cvtph_ps(_mm_and_si128(halves, _mm_set1_epi16((short)0xbfff)));
}
#else
#define E4M3_UNIT 1.0f
INLINE vec e4m3_lanes(const uint8_t *from) {
    float wide[LANES];
    widen_e4m3(from, wide, LANES);
    return load(wide);
}
#endif

INLINE vec fma_of(const int pairs, vec a, vec b, vec c) {
#if HAS_PAIRS
    if (pairs) return fma_pairs(a, b, c);
#endif
    (void)pairs;
    return fma_vec(a, b, c);
}

#endif
