/* Rows of x as int8, for products with weights of 8 and 4 bits: each has a scale, max|x| / 127. */

#ifndef BATCHINFER_ROWS_INT8_H
#define BATCHINFER_ROWS_INT8_H

#include <stdint.h>

#include "arguments.h"

#define ROWS_DEPTH 64 /* rows are filled up with zeros to a multiple of it: a row of a tile */

struct int8_rows {
    int8_t *codes;  /* [rows][stride] from -127 to 127 */
    float *scales;  /* [rows]; NaN where a number of the row is not finite */
    int32_t *sums;  /* [rows][groups] of the codes of a group of k */
    int64_t stride; /* an odd number of cache lines: rows do not crowd each other in the cache */
    int64_t in, group, groups;
    const int32_t *order; /* the k at each place of a row; NULL: in order */
};

static inline int64_t whole(int64_t count, int64_t of) { return (count + of - 1) / of * of; }

#endif
