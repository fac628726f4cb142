/* GEMMs with 8-bit and 4-bit weights (gemm_int8.c, gemm_groups.c), called by gemm.c. */

#ifndef BATCHINFER_GEMM_LOW_BIT_H
#define BATCHINFER_GEMM_LOW_BIT_H

#include <stddef.h>

#include "arguments.h"

/* The start of every packed weight. */
typedef struct {
    int32_t kernel, kind;
    int64_t group;       /* GROUPS, FLOAT8: columns that share a scale */
    int32_t bits;        /* GROUPS: bits per code, 4 or 8 */
    int32_t has_table;   /* GROUPS: 1 if 4-bit codes are indices into `table` */
    uint8_t table[16];   /* value of each code, plus OFFSET (int8_dot.h) */
    int32_t has_order;   /* GROUPS: 1 if the order of columns precedes the panels */
    int32_t has_factors; /* GROUPS: 1 if each output has a factor and float8 scales */
    int32_t halves;      /* FLOATS, FLOAT8: 1 if bfloat16 rows are multiplied as floats */
    int32_t padding[3];  /* fills a cache line, so that panels begin at a cache line */
} header;

/* Returns the column of x for each packed column; NULL: the columns are in order. */
static inline const int32_t *order_of(const header *packed) {
    return packed->has_order ? (const int32_t *)(packed + 1) : NULL;
}

/* `x` holds the rows as int8; outputs are bfloat16 or float. All threads of a team must call these
   functions, like gemm_team_f32. */
void gemm_int8(const gemm_args *, int is_bf16, const gemm_rows *x);
void gemm_groups(const gemm_args *, int is_bf16, const gemm_rows *x);

#endif
