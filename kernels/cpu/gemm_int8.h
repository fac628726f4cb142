/* Products of int8 (gemm_int8.c), behind gemm.c. */

#ifndef BATCHINFER_GEMM_INT8_H
#define BATCHINFER_GEMM_INT8_H

#include "arguments.h"

int64_t int8_packed_bytes(const pack_args *); /* without a header */

/* Weights, rows and outputs are bfloat16, or float. */
void int8_pack(const pack_args *, int is_bf16, void *packed);
int int8_gemm(const gemm_args *, int is_bf16, int kernel, const void *packed); /* 1: no memory */

#endif
