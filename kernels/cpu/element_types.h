/* Element types, and an exp that compilers vectorize, for all kernels in this folder. */

#ifndef BATCHINFER_ELEMENT_TYPES_H
#define BATCHINFER_ELEMENT_TYPES_H

#include <math.h>
#include <stdint.h>
#include <string.h>

/* Returns exp(x) for x <= 0, with an error of at most 2 ulp; NaN stays NaN. Computes a polynomial
   instead of calling expf, so that every compiler can vectorize loops over this function. */
static inline float exp_negative(float x) {
    x = x < -87.0f ? -87.0f : x;
    float n = rintf(x * 1.44269504f);
    float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    float p = 1.9875691e-4f;
    p = p * r + 1.3981999e-3f;
    p = p * r + 8.3334519e-3f;
    p = p * r + 4.1665796e-2f;
    p = p * r + 1.6666665e-1f;
    p = p * r + 5.0000001e-1f;
    p = p * r * r + r + 1.0f;
    uint32_t bits = ((uint32_t)(int32_t)n + 127u) << 23; /* undefined for NaN, but then p is NaN */
    float scale;
    memcpy(&scale, &bits, 4);
    return p * scale;
}

static inline float sigmoid(float x) {
    const float e = exp_negative(x < 0.0f ? x : -x);
    return (x < 0.0f ? e : 1.0f) / (1.0f + e);
}

static inline float from_bf16(uint16_t x) {
    uint32_t bits = (uint32_t)x << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

static inline uint16_t to_bf16(float x) { /* rounds to nearest, ties to even; NaN stays NaN */
    uint32_t bits;
    memcpy(&bits, &x, 4);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return (uint16_t)((bits >> 16) | 0x40);
    return (uint16_t)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

#if defined(__FMA__) || defined(__aarch64__) || defined(__FP_FAST_FMAF)
#define HAS_FMA
#define FMA(a, b, c) __builtin_fmaf(a, b, c) /* a chain of these is never reassociated */
#else
#define FMA(a, b, c) ((a) * (b) + (c))
#endif

/* 1 if the target has an instruction that multiplies pairs of bfloat16 and adds both products. */
#if defined(__AVX512BF16__)
#define HAS_PAIRS 1
#elif defined(__aarch64__) && defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#define HAS_PAIRS 1
#else
#define HAS_PAIRS 0
#endif

#endif
