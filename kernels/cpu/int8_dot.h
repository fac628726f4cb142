/* Dot products of quads (four bytes), summed in the 32-bit lanes of a vector. */

#ifndef BATCHINFER_INT8_DOT_H
#define BATCHINFER_INT8_DOT_H

#include "simd.h"

typedef int32_t ints __attribute__((vector_size(4 * LANES)));
typedef int32_t unaligned_ints __attribute__((vector_size(4 * LANES), aligned(1), may_alias));
typedef uint8_t lane_bytes __attribute__((vector_size(LANES), aligned(1), may_alias));

/* Number that is added to the left operand's int8 numbers on processors whose instruction
   multiplies unsigned bytes by int8; 0 on other processors. */
#if defined(__AVX512VNNI__) || (defined(__AVXVNNI__) && LANES == 8)
#define OFFSET 128
#else
#define OFFSET 0
#endif

#if defined(__AVX512VNNI__)
#define QUADS_NAME "AVX-512 VNNI"
#elif OFFSET
#define QUADS_NAME "AVX-VNNI"
#elif defined(__aarch64__) && defined(__ARM_FEATURE_DOTPROD)
#define QUADS_NAME "NEON dot product"
#else
#define QUADS_NAME VECTORS_NAME
#endif

INLINE ints load_ints(const void *from) { return *(const unaligned_ints *)from; }

INLINE ints widened_bytes(const uint8_t *from) {
#if LANES == 16
    return (ints)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)from));
#elif LANES == 8
    return (ints)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)from));
#else
    return __builtin_convertvector(*(const lane_bytes *)from, ints);
#endif
}

INLINE ints all_quads(const int8_t *from) { return (ints)all_lanes_of_four(from); }

/* Repeats a table of 16 bytes in each 16 bytes of a vector. */
INLINE ints all_tables(const uint8_t *table) {
    uint8_t bytes[4 * LANES];
    for (int at = 0; at < 4 * LANES; at += 16) memcpy(bytes + at, table, 16);
    return load_ints(bytes);
}

/* Replaces each byte of `codes`, from 0 to 15, with the table entry at this index. */
INLINE ints look_up(ints table, ints codes) {
#if LANES == 16 && defined(__AVX512BW__)
    return (ints)_mm512_shuffle_epi8((__m512i)table, (__m512i)codes);
#elif LANES == 8
    return (ints)_mm256_shuffle_epi8((__m256i)table, (__m256i)codes);
#elif LANES == 4 && defined(__aarch64__) && defined(__ARM_NEON)
    return (ints)vqtbl1q_u8((uint8x16_t)table, (uint8x16_t)codes);
#else
    uint8_t entries[4 * LANES], bytes[4 * LANES];
    memcpy(entries, &table, sizeof(entries));
    memcpy(bytes, &codes, sizeof(bytes));
    for (int at = 0; at < 4 * LANES; at++) bytes[at] = entries[bytes[at] & 15];
    return load_ints(bytes);
#endif
}

/* Adds each lane's dot product to `sum`. `left` has bytes from 0 to 127, or to 255 if OFFSET is
   128; `right` has int8. */
INLINE ints add_quads(ints sum, ints left, ints right) {
#if LANES == 16 && defined(__AVX512VNNI__)
    return (ints)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)left, (__m512i)right);
#elif LANES == 8 && defined(__AVXVNNI__)
    return (ints)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)left, (__m256i)right);
#elif LANES == 16 && defined(__AVX512BW__) /* 2 * 127 * 128 fits into 16 bits */
    const __m512i pairs = _mm512_maddubs_epi16((__m512i)left, (__m512i)right);
    return sum + (ints)_mm512_madd_epi16(pairs, _mm512_set1_epi16(1));
#elif LANES == 8
    const __m256i pairs = _mm256_maddubs_epi16((__m256i)left, (__m256i)right);
    return sum + (ints)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
#elif defined(__aarch64__) && defined(__ARM_FEATURE_DOTPROD)
    return (ints)vdotq_s32((int32x4_t)sum, (int8x16_t)left, (int8x16_t)right);
#else
    for (int shift = 24; shift >= 0; shift -= 8)
        sum += ((left << shift) >> 24) * ((right << shift) >> 24);
    return sum;
#endif
}

/* For processors whose instructions add only pairs of products: the number of pairs whose sum fits
   into 16 bits, if bytes from 0 to 15 are multiplied by int8. A single widening addition is then
   enough for all these pairs. 0 for other processors. */
#if !OFFSET && (LANES == 8 || (LANES == 16 && defined(__AVX512BW__)))
#define ADDED_PAIRS 8 /* 8 * 2 * 15 * 128 fits into 16 bits */
INLINE ints add_pairs(ints pairs, ints left, ints right) {
#if LANES == 8
    pairs = (ints)_mm256_add_epi16((__m256i)pairs,
                                   _mm256_maddubs_epi16((__m256i)left, (__m256i)right));
#else
    pairs = (ints)_mm512_add_epi16((__m512i)pairs,
                                   _mm512_maddubs_epi16((__m512i)left, (__m512i)right));
#endif
    __asm__("" : "+v"(pairs)); /* otherwise, GCC adds all products first, and spills the sums */
    return pairs;
}
INLINE ints sum_of_pairs(ints pairs) {
#if LANES == 8
    return (ints)_mm256_madd_epi16((__m256i)pairs, _mm256_set1_epi16(1));
#else
    return (ints)_mm512_madd_epi16((__m512i)pairs, _mm512_set1_epi16(1));
#endif
}
#else
#define ADDED_PAIRS 0
INLINE ints add_pairs(ints pairs, ints left, ints right) { return add_quads(pairs, left, right); }
INLINE ints sum_of_pairs(ints pairs) { return pairs; }
#endif

/* Like add_quads, but `left` has int8 plus OFFSET, and `right` has int8 from -127 to 127. */
INLINE ints add_int8_quads(ints sum, ints left, ints right) {
#if !OFFSET && LANES == 16 && defined(__AVX512BW__)
    const __mmask64 negative = _mm512_movepi8_mask((__m512i)left);
    const __m512i turned =
        _mm512_mask_sub_epi8((__m512i)right, negative, (__m512i)(ints){0}, (__m512i)right);
    return add_quads(sum, (ints)_mm512_abs_epi8((__m512i)left), (ints)turned);
#elif !OFFSET && LANES == 8 /* |-128| is an unsigned 128; 2 * 128 * 127 still fits into 16 bits */
    return add_quads(sum, (ints)_mm256_abs_epi8((__m256i)left),
                     (ints)_mm256_sign_epi8((__m256i)right, (__m256i)left));
#else
    return add_quads(sum, left, right);
#endif
}

#endif
