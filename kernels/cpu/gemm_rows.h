/* Rows of x, converted to the type that a GEMM multiplies.

   For 8-bit and 4-bit weights, rows become int8 with one scale per row, max|x| / 127. On processors
   that cannot multiply pairs of bfloat16, bfloat16 rows become floats. If the GEMM converted the
   rows itself, it would convert each number once per panel, which takes as long as multiplying. */

#ifndef BATCHINFER_GEMM_ROWS_H
#define BATCHINFER_GEMM_ROWS_H

#include <stdint.h>

#include "arguments.h"

#define ROWS_DEPTH 64 /* rows are padded with zeros to a multiple of this: a tile row's width */

struct gemm_rows {
    float *floats;  /* [rows][stride] from bfloat16, or NULL */
    int8_t *codes;  /* [rows][stride] from -127 to 127, or NULL */
    float *scales;  /* [rows]; NaN if a number of the row is not finite */
    int32_t *sums;  /* [rows][groups] sum of each group's codes */
    int64_t stride; /* an odd number of cache lines, so that rows use all cache sets */
    int64_t in, group, groups;
    const int32_t *order; /* column of x for each packed column; NULL: in order */
};

/* Returns 1 if rows must be converted, else 0. */
static inline int need_conversion(const gemm_rows *rows) { return rows->floats || rows->codes; }

static inline int64_t whole(int64_t count, int64_t of) { return (count + of - 1) / of * of; }

#endif
