"""Code that the chunked scans of recurrent layers share: lists of chunks, and pointers to states.

A chunk has up to 64 tokens of one sequence. The first chunk of a sequence starts at its first token
in the step. A scan computes a sequence's chunks one after the other, with matrix multiplications
within a chunk. Each program keeps some columns of a head's matrix in registers between chunks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from batchinfer.kernels.chunk_attention import ChunkWork, plan_chunks

CHUNK = 64
_WHOLE = 1 << 30  # more tokens than any sequence has
_MAX_ELEMENTS = 4096  # elements of a matrix that a program keeps in registers


@dataclass(frozen=True)
class ScanWork:
    """The sequences of a step that compute more than one token, and their chunks. All recurrent
    layers share these lists."""

    sequences: ChunkWork
    chunks: ChunkWork


def plan_scan(
    query_starts: torch.Tensor,  # [S + 1] int32
    *,
    num_tokens: int,
    max_chunks: int,
) -> ScanWork:
    """List the chunks of a step, on the device.

    Args:
        num_tokens: upper bound on the tokens of sequences that compute more than one token.
        max_chunks: upper bound on the number of these sequences.
    """
    return ScanWork(
        sequences=plan_chunks(query_starts, tokens=_WHOLE, num_tokens=0, max_chunks=max_chunks),
        chunks=plan_chunks(
            query_starts, tokens=CHUNK, num_tokens=num_tokens, max_chunks=max_chunks
        ),
    )


def column_block(num_rows: int, num_columns: int) -> int:
    rows = max(16, triton.next_power_of_2(num_rows))
    return int(max(16, min(triton.next_power_of_2(num_columns), _MAX_ELEMENTS // rows)))


@triton.jit
def state_pointers(
    slots_ptr,
    tables_ptr,
    sequence,
    columns,  # [BLOCK_COLUMNS] indices into the columns of all heads
    rows,  # [BLOCK_ROWS]
    slot_stride,
    table_stride,
    first,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PER_SLOT: tl.constexpr,
):
    """Return pointers [BLOCK_ROWS, BLOCK_COLUMNS] to columns. The columns may be in several pieces
    of the state."""
    piece = first + columns // COLUMNS
    slots = tl.load(tables_ptr + sequence * table_stride + piece // PER_SLOT).to(tl.int64)
    starts = slots * slot_stride + piece % PER_SLOT * (ROWS * COLUMNS) + columns % COLUMNS
    return slots_ptr + starts[None, :] + rows[:, None] * COLUMNS


@triton.jit
def softplus(x):
    """Return log(1 + e^x), or x above 20, as in torch."""
    e = tl.exp(tl.minimum(x, 20.0))
    logarithm = tl.where(e < 1e-3, e - 0.5 * e * e, tl.log(1.0 + e))
    return tl.where(x > 20.0, x, logarithm)
