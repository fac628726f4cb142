/* Rows of x as a product multiplies them, where that is not as they are.

   With weights of 8 and 4 bits they are int8, and each has a scale, max|x| / 127. bfloat16 beside a
   processor without products of pairs is floats: widened where it is multiplied, a number is once for
   each panel, which takes as long as to multiply it. */

#ifndef BATCHINFER_PRODUCT_ROWS_H
#define BATCHINFER_PRODUCT_ROWS_H

#include <stdint.h>

#include "arguments.h"

#define ROWS_DEPTH 64 /* rows are filled up with zeros to a multiple of it: a row of a tile */

struct product_rows {
    float *floats;  /* [rows][stride] of bfloat16; or NULL */
    int8_t *codes;  /* [rows][stride] from -127 to 127; or NULL */
    float *scales;  /* [rows]; NaN where a number of the row is not finite */
    int32_t *sums;  /* [rows][groups] of the codes of a group of k */
    int64_t stride; /* an odd number of cache lines: rows do not crowd each other in the cache */
    int64_t in, group, groups;
    const int32_t *order; /* the k at each place of a row; NULL: in order */
};

/* Whether a product takes other rows than x holds. */
static inline int are_made(const product_rows *rows) { return rows->floats || rows->codes; }

static inline int64_t whole(int64_t count, int64_t of) { return (count + of - 1) / of * of; }

#endif
