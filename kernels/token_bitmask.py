"""Sets the logits of tokens that a grammar's bitmask forbids to -inf.

The kernel reads one bit per token, and neither reads nor writes the logits of allowed tokens.
"""

import torch
import triton
import triton.language as tl

from batchinfer.kernels.launch import OPTIONS, check_launchable

_BLOCK = 4096


def apply_token_bitmask(
    logits: torch.Tensor,  # [R, V], last dimension contiguous; changed in place
    rows: torch.Tensor,  # [M] int32, distinct rows of logits
    masks: torch.Tensor,  # [M, words] int32, bit i % 32 of word i // 32: token i is allowed
) -> None:
    """Set the logits of forbidden tokens to -inf; tokens beyond the last word are forbidden."""
    check_launchable("apply_token_bitmask", logits, rows, masks)
    vocab = logits.shape[1]
    if len(rows) == 0:
        return
    _token_bitmask_kernel[(len(rows), triton.cdiv(vocab, _BLOCK))](
        logits, rows, masks, logits.stride(0), masks.shape[1],
        VOCAB=vocab, BLOCK=_BLOCK, num_warps=8, **OPTIONS,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_words"])
def _token_bitmask_kernel(
    logits_ptr,  # [R, V]
    rows_ptr,  # [M] int32
    masks_ptr,  # [M, num_words] int32
    row_stride,
    num_words,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
):
    masked = tl.program_id(0).to(tl.int64)
    logits_ptr += tl.load(rows_ptr + masked).to(tl.int64) * row_stride
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    words = columns // 32
    in_range = (columns < VOCAB) & (words < num_words)
    mask = tl.load(masks_ptr + masked * num_words + words, mask=in_range, other=0)
    forbidden = ((mask >> (columns % 32)) & 1) == 0
    nothing = tl.full([BLOCK], float("-inf"), tl.float32).to(logits_ptr.dtype.element_ty)
    tl.store(logits_ptr + columns, nothing, mask=(columns < VOCAB) & forbidden)
