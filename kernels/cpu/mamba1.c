/* The scan of Mamba-1 over recurrent states in pool slots (Gu and Dao 2023,
   https://arxiv.org/abs/2312.00752). The layer's convolution is in causal_conv.c, because two
   matrix multiplications run between the convolution and the scan.

   Each channel has its own state, with a decay for each element of the state. A task is a block of
   channels of one sequence. Vectors hold adjacent channels, and the task's state stays in the L1
   cache. The scan runs token by token, so that a sequence's bits depend neither on how its tokens
   are divided into steps nor on other sequences. */

#include "recurrent_state.h"

typedef struct {
    paged_states states;
    const void *values, *dt, *write, *read, *gate; /* [T, channels]; write and read: [T, N] */
    void *out;                                     /* [T, channels], contiguous */
    const float *decay_rate, *skip;                /* [N, channels], [channels] */
    int64_t values_stride, dt_stride, write_stride, read_stride, gate_stride; /* in elements */
    int64_t num_tokens, num_channels, state_size;
    int32_t num_threads;
} mamba1_args;

#define ELEMENT float
#define NAME(function) function##_f32
#define LOAD(x) (x)
#define STORE(x) (x)
#include "mamba1.inc"
#undef ELEMENT
#undef NAME
#undef LOAD
#undef STORE

#define ELEMENT uint16_t
#define NAME(function) function##_bf16
#define LOAD(x) from_bf16(x)
#define STORE(x) to_bf16(x)
#include "mamba1.inc"
