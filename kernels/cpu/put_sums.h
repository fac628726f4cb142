/* A product's sums[rows][width] to where they belong, from output `column` on: with the bias, onto
   what is there where it says so, rounded once. */

#ifndef BATCHINFER_PUT_SUMS_H
#define BATCHINFER_PUT_SUMS_H

#include "arguments.h"
#include "elements.h"
#include "vectors.h"

#define PUT(type, ELEMENT, LOAD, STORE)                                                           \
    INLINE void put_##type(                                                                       \
        const gemm_args *a, int64_t first, int rows, int64_t column, const int width,             \
        float *sums) {                                                                            \
        const int64_t out = a->out_features, left = out - column;                                 \
        const int64_t columns = left < width ? left : width;                                      \
        const ELEMENT *bias = a->bias;                                                            \
        for (int r = 0; r < rows; r++) {                                                          \
            ELEMENT *to = (ELEMENT *)a->out + (first + r) * out + column;                         \
            float *sum = sums + r * width;                                                        \
            for (int64_t n = 0; bias && n < columns; n++) sum[n] += LOAD(bias[column + n]);       \
            for (int64_t n = 0; a->adds && n < columns; n++) sum[n] += LOAD(to[n]);               \
            for (int64_t n = 0; n < columns; n++) to[n] = STORE(sum[n]);                          \
        }                                                                                         \
    }

#define AS_IT_IS(x) (x)
PUT(f32, float, AS_IT_IS, AS_IT_IS)
PUT(bf16, uint16_t, from_bf16, to_bf16)

#endif
