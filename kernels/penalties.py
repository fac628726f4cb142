"""Applies logit biases, allowed token ids, and repetition, frequency and presence penalties.

For the logit x of a token, in this order, each operation rounded to float32:

    x + bias                             for each of the token's biases; -inf bans the token
    -inf                                 if there is a list of allowed tokens that lacks this token
    x / repetition, or x * repetition    (if x <= 0), if the token is in the prompt or output
    x - frequency * count - presence     if the token occurs `count` times in the output

Repetition penalty: Keskar et al. 2019, arXiv:1909.05858. The other parameters are defined as in the
OpenAI API, and the order is the same as in vLLM (v1/sample/sampler.py). The model's logits are not
changed. The kernel writes float32 values only for edited tokens, and a bit for each token that is 1
if the token is edited. Kernels that read an edited row therefore load only an eighth of a byte more
per logit.

One program computes one distribution. A token may be listed several times, so all new values are
computed before the first is written. Occurrences are counted before new values are computed, in the
memory that later holds these values.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from batchinfer.kernels.launch import check_launchable

_BLOCK = 512


class EditedLogits(NamedTuple):
    """Edited logits of D distributions, which kernels take as one argument."""

    logits: torch.Tensor  # [D, V] float32, undefined for tokens that are not edited
    present: torch.Tensor  # [D, ceil(V / 32)] int32, bit i % 32 of word i // 32: token i is edited
    restricted: torch.Tensor  # [D] int32; if not 0, logits of tokens that are not edited are -inf


def apply_penalties(
    logits: torch.Tensor,  # [R, V], last dimension contiguous
    *,
    rows: torch.Tensor,  # [D] int32, index of each distribution's row of logits
    bias_starts: torch.Tensor,  # [D + 1] int32, index of each distribution's first bias
    bias_ids: torch.Tensor,  # [B] int32
    bias_values: torch.Tensor,  # [B] float32
    allowed_starts: torch.Tensor,  # [D + 1] int32; a distribution without ids allows all tokens
    allowed_ids: torch.Tensor,  # [A] int32
    prompt_starts: torch.Tensor,  # [D + 1] int32
    prompt_ids: torch.Tensor,  # [P] int32, prompt tokens to penalize
    output_starts: torch.Tensor,  # [D + 1] int32
    output_ids: torch.Tensor,  # [O] int32
    repetition: torch.Tensor,  # [D] float32
    presence: torch.Tensor,  # [D] float32
    frequency: torch.Tensor,  # [D] float32
) -> EditedLogits:
    """Return the edited logits of D distributions. All ids must be below V."""
    check_launchable("apply_penalties", logits, rows, bias_ids, allowed_ids, prompt_ids, output_ids)
    num_distributions, vocab = len(rows), logits.shape[1]
    num_words = triton.cdiv(vocab, 32)
    edits = EditedLogits(
        logits=logits.new_empty(num_distributions, vocab, dtype=torch.float32),
        present=logits.new_empty(num_distributions, num_words, dtype=torch.int32),
        restricted=logits.new_empty(num_distributions, dtype=torch.int32),
    )
    if num_distributions == 0:
        return edits
    _penalties_kernel[(num_distributions,)](
        logits, rows, bias_starts, bias_ids, bias_values, allowed_starts, allowed_ids,
        prompt_starts, prompt_ids, output_starts, output_ids, repetition, presence, frequency,
        edits.logits, edits.present, edits.restricted,
        logits.new_empty(len(prompt_ids), dtype=torch.float32),
        logits.new_empty(len(output_ids), dtype=torch.float32),
        logits.new_empty(len(output_ids), dtype=torch.int32),
        logits.stride(0),
        VOCAB=vocab, NUM_WORDS=num_words, BLOCK=_BLOCK,
        # Round products before sums, as on a CPU.
        num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    return edits


@triton.jit
def _penalties_kernel(
    logits_ptr,  # [R, V]
    rows_ptr,  # [D] int32
    bias_starts_ptr,  # [D + 1] int32
    bias_ids_ptr,  # [B] int32
    bias_values_ptr,  # [B] float32
    allowed_starts_ptr,  # [D + 1] int32
    allowed_ids_ptr,  # [A] int32
    prompt_starts_ptr,  # [D + 1] int32
    prompt_ids_ptr,  # [P] int32
    output_starts_ptr,  # [D + 1] int32
    output_ids_ptr,  # [O] int32
    repetition_ptr,  # [D] float32
    presence_ptr,  # [D] float32
    frequency_ptr,  # [D] float32
    values_ptr,  # [D, V] float32
    present_ptr,  # [D, NUM_WORDS] int32
    restricted_ptr,  # [D] int32
    prompt_values_ptr,  # [P] float32
    output_values_ptr,  # [O] float32
    counts_ptr,  # [O] int32
    row_stride,
    VOCAB: tl.constexpr,
    NUM_WORDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    d = tl.program_id(0).to(tl.int64)
    logits_ptr += tl.load(rows_ptr + d).to(tl.int64) * row_stride
    values_ptr += d * VOCAB
    present_ptr += d * NUM_WORDS
    lanes = tl.arange(0, BLOCK)
    bias, bias_end = tl.load(bias_starts_ptr + d), tl.load(bias_starts_ptr + d + 1)
    allowed, allowed_end = tl.load(allowed_starts_ptr + d), tl.load(allowed_starts_ptr + d + 1)
    prompt, prompt_end = tl.load(prompt_starts_ptr + d), tl.load(prompt_starts_ptr + d + 1)
    output, output_end = tl.load(output_starts_ptr + d), tl.load(output_starts_ptr + d + 1)
    restricted = allowed_end > allowed
    tl.store(restricted_ptr + d, restricted.to(tl.int32))
    for start in range(0, NUM_WORDS, BLOCK):
        tl.store(present_ptr + start + lanes, lanes * 0, mask=start + lanes < NUM_WORDS)

    _count(output_ids_ptr, counts_ptr, values_ptr, output, output_end, BLOCK)
    _put(logits_ptr, values_ptr, present_ptr, bias_ids_ptr, bias, bias_end, restricted, BLOCK)
    _put(logits_ptr, values_ptr, present_ptr, prompt_ids_ptr, prompt, prompt_end, restricted, BLOCK)
    _put(logits_ptr, values_ptr, present_ptr, output_ids_ptr, output, output_end, restricted, BLOCK)
    tl.debug_barrier()  # threads now read values that other threads have written
    _put(logits_ptr, values_ptr, present_ptr, allowed_ids_ptr, allowed, allowed_end, False, BLOCK)
    tl.debug_barrier()
    for start in range(bias, bias_end, BLOCK):
        in_range = start + lanes < bias_end
        ids = tl.load(bias_ids_ptr + start + lanes, mask=in_range, other=0)
        value = tl.load(bias_values_ptr + start + lanes, mask=in_range, other=0.0)
        tl.atomic_add(values_ptr + ids, value, mask=in_range)
    tl.debug_barrier()
    repetition = tl.load(repetition_ptr + d)
    for start in range(prompt, prompt_end, BLOCK):
        in_range = start + lanes < prompt_end
        ids = tl.load(prompt_ids_ptr + start + lanes, mask=in_range, other=0)
        x = _repeated(values_ptr, ids, in_range, repetition)
        tl.store(prompt_values_ptr + start + lanes, x, mask=in_range)
    presence, frequency = tl.load(presence_ptr + d), tl.load(frequency_ptr + d)
    for start in range(output, output_end, BLOCK):
        in_range = start + lanes < output_end
        ids = tl.load(output_ids_ptr + start + lanes, mask=in_range, other=0)
        count = tl.load(counts_ptr + start + lanes, mask=in_range, other=0).to(tl.float32)
        x = _repeated(values_ptr, ids, in_range, repetition) - frequency * count - presence
        tl.store(output_values_ptr + start + lanes, x, mask=in_range)
    tl.debug_barrier()
    _scatter(prompt_values_ptr, values_ptr, prompt_ids_ptr, prompt, prompt_end, BLOCK)
    tl.debug_barrier()
    _scatter(output_values_ptr, values_ptr, output_ids_ptr, output, output_end, BLOCK)


@triton.jit
def _count(ids_ptr, counts_ptr, values_ptr, first, end, BLOCK: tl.constexpr):
    """Write how often each id occurs. The counters are in the memory of the values."""
    lanes = tl.arange(0, BLOCK)
    places = values_ptr.to(tl.pointer_type(tl.int32), bitcast=True)
    for start in range(first, end, BLOCK):
        in_range = start + lanes < end
        ids = tl.load(ids_ptr + start + lanes, mask=in_range, other=0)
        tl.store(places + ids, lanes * 0, mask=in_range)
    tl.debug_barrier()
    for start in range(first, end, BLOCK):
        in_range = start + lanes < end
        ids = tl.load(ids_ptr + start + lanes, mask=in_range, other=0)
        tl.atomic_add(places + ids, lanes * 0 + 1, mask=in_range)
    tl.debug_barrier()
    for start in range(first, end, BLOCK):
        in_range = start + lanes < end
        ids = tl.load(ids_ptr + start + lanes, mask=in_range, other=0)
        count = tl.load(places + ids, mask=in_range, other=0, cache_modifier=".cg")
        tl.store(counts_ptr + start + lanes, count, mask=in_range)
    tl.debug_barrier()


@triton.jit
def _put(logits_ptr, values_ptr, present_ptr, ids_ptr, first, end, hidden, BLOCK: tl.constexpr):
    """Mark tokens as edited. Set the values of edited tokens to the model's logits, or to -inf if
    `hidden`."""
    lanes = tl.arange(0, BLOCK)
    for start in range(first, end, BLOCK):
        in_range = start + lanes < end
        ids = tl.load(ids_ptr + start + lanes, mask=in_range, other=0)
        x = tl.load(logits_ptr + ids, mask=in_range, other=0.0).to(tl.float32)
        tl.store(values_ptr + ids, tl.where(hidden, float("-inf"), x), mask=in_range)
        tl.atomic_or(present_ptr + ids // 32, (lanes * 0 + 1) << (ids % 32), mask=in_range)


@triton.jit
def _repeated(values_ptr, ids, in_range, repetition):
    x = tl.load(values_ptr + ids, mask=in_range, other=0.0, cache_modifier=".cg")
    each = tl.full(x.shape, 1.0, tl.float32) * repetition
    return tl.where(x > 0, tl.div_rn(x, each), x * each)


@triton.jit
def _scatter(from_ptr, values_ptr, ids_ptr, first, end, BLOCK: tl.constexpr):
    lanes = tl.arange(0, BLOCK)
    for start in range(first, end, BLOCK):
        in_range = start + lanes < end
        ids = tl.load(ids_ptr + start + lanes, mask=in_range, other=0)
        tl.store(values_ptr + ids, tl.load(from_ptr + start + lanes, mask=in_range), mask=in_range)
