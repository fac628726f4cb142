/* Products of weights of 8 and 4 bits (gemm_int8.c, gemm_groups.c), behind gemm.c. */

#ifndef BATCHINFER_GEMM_LOW_BIT_H
#define BATCHINFER_GEMM_LOW_BIT_H

#include <stddef.h>

#include "arguments.h"

/* Begins a packed weight; the rest follows. */
typedef struct {
    int32_t kernel, kind;
    int64_t group;       /* of k, that have a scale in common; GROUPS, FLOAT8 */
    int32_t bits;        /* GROUPS: of a code, 4 or 8 */
    int32_t has_table;   /* GROUPS: codes of 4 bits stand for what it has at their place */
    uint8_t table[16];   /* OFFSET more than the numbers: quads.h */
    int32_t has_order;   /* GROUPS: an order of k follows, before what is packed */
    int32_t halves;      /* FLOATS, FLOAT8: rows are bfloat16 that is multiplied as floats */
    int32_t padding[4];  /* a cache line: panels begin at one */
} header;

/* The k of x at each place of a row; NULL: in order. */
static inline const int32_t *order_of(const header *packed) {
    return packed->has_order ? (const int32_t *)(packed + 1) : NULL;
}

/* Rows and outputs are bfloat16, or float; x holds the rows as int8. For a team, as gemm_team_f32. */
void gemm_int8(const gemm_args *, int is_bf16, const product_rows *x);
void gemm_groups(const gemm_args *, int is_bf16, const product_rows *x);

#endif
