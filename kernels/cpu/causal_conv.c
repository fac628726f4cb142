/* A causal depthwise convolution as a separate layer: the short convolution of LFM2, and the
   convolution of Mamba-1. The last inputs of a sequence are kept in pool slots.

   A channel's sum runs over the tokens in order, whether a token is in this step or in the state. A
   sequence's bits therefore depend neither on how its tokens are divided into steps nor on other
   sequences. */

#include "recurrent_state.h"

typedef struct {
    paged_states states;
    convolution conv;
    gating factors;
    int64_t num_tokens;
    int32_t num_threads, with_silu;
} causal_conv_args;

#define ELEMENT float
#define NAME(function) function##_f32
#define LOAD(x) (x)
#define STORE(x) (x)
#include "causal_conv.inc"
#include "causal_conv_layer.inc"
#undef ELEMENT
#undef NAME
#undef LOAD
#undef STORE

#define ELEMENT uint16_t
#define NAME(function) function##_bf16
#define LOAD(x) from_bf16(x)
#define STORE(x) to_bf16(x)
#include "causal_conv.inc"
#include "causal_conv_layer.inc"
