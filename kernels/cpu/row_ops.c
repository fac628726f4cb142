/* Row-wise operations of a layer, and the KV write.

   A row's bits depend only on that row: its width determines the order of sums, and no loop runs
   across rows. Results are computed in float32, and rounded once at the end. */

#include "arguments.h"
#include "kv_block_layout.h"
#include "gemm_rows.h"

#define MAX_HEAD_WIDTH 1024 /* equals row_ops.MAX_HEAD_WIDTH */
#define LANES 32            /* number of partial sums of one row */
#define WORTH_A_THREAD 16384 /* with fewer elements, waking a thread costs more than it saves */

#define ELEMENT float
#define NAME(function) function##_f32
#define LOAD(x) (x)
#define STORE(x) (x)
#include "row_ops.inc"
#undef ELEMENT
#undef NAME
#undef LOAD
#undef STORE

#define ELEMENT uint16_t
#define NAME(function) function##_bf16
#define LOAD(x) from_bf16(x)
#define STORE(x) to_bf16(x)
#include "row_ops.inc"
