"""Host memory for swapped blocks of the KV pool, and copies to and from it."""

from __future__ import annotations

import time
from bisect import bisect_right
from itertools import accumulate

import numpy as np
import torch

from batchinfer.engine.step import Int32
from batchinfer.errors import DeviceError

_MEASURED_BYTES = 4 * 2**20


class HostBlocks:
    """Host memory for swapped blocks, each of which is contiguous.

    For a CUDA pool, the host memory is pinned and copied on a separate stream. For a CPU pool, it
    is ordinary memory, which takes no RAM before its first use.

    Args:
        blocks: blocks of the pool, [slot, layer, elements of a layer], strided.

    Raises:
        DeviceError: the host has too little memory.
    """

    def __init__(self, blocks: torch.Tensor, num_blocks: int) -> None:
        self._pool = blocks
        self._stream: torch.cuda.Stream | None = None
        if blocks.is_cuda and num_blocks > 0:
            self._stream = torch.cuda.Stream(blocks.device)  # type: ignore[no-untyped-call]
        self._num_blocks = num_blocks
        # Pieces [host slots, layer, elements], and the first slot of each piece
        self._pieces = _allocate_host_blocks(blocks, num_blocks)
        self._starts = [0, *accumulate(map(len, self._pieces))][:-1]

    def copy(self, outs: Int32, ins: Int32) -> None:
        """Swap blocks out to the host, then swap blocks in. Device work that is queued later runs
        after the copies.

        Args:
            outs: [O, 2] pairs of (slot, host slot).
            ins: [I, 2] pairs of (host slot, slot).
        """
        if len(outs) == 0 and len(ins) == 0:
            return
        if self._stream is None:
            self._copy_each(outs, ins)
            return
        computing = torch.cuda.current_stream(self._pool.device)
        self._stream.wait_stream(computing)
        with torch.cuda.stream(self._stream):
            self._copy_each(outs, ins)
        computing.wait_stream(self._stream)

    def measure(self) -> float:
        """Measure the time to copy a block in seconds, averaged over both directions."""
        max_pairs = min(self._num_blocks, len(self._pool) - 1)
        count = min(max_pairs, max(1, _MEASURED_BYTES // self._pool[0].nbytes))
        if count == 0:
            return 0.0
        pairs = np.repeat(np.arange(count, dtype=np.int32)[:, None], 2, axis=1)
        self._timed(pairs[:1], pairs[:1])
        return self._timed(pairs, pairs) / (2 * count)

    def _timed(self, outs: Int32, ins: Int32) -> float:
        began = time.perf_counter()
        self.copy(outs, ins)
        if self._stream is not None:
            self._stream.synchronize()
        return time.perf_counter() - began

    def _copy_each(self, outs: Int32, ins: Int32) -> None:
        for slot, host_slot in outs.tolist():
            self._block(host_slot).copy_(self._pool[slot], non_blocking=True)
        for host_slot, slot in ins.tolist():
            self._pool[slot].copy_(self._block(host_slot), non_blocking=True)

    def _block(self, host_slot: int) -> torch.Tensor:
        piece = bisect_right(self._starts, host_slot) - 1
        return self._pieces[piece][host_slot - self._starts[piece]]


def _allocate_host_blocks(blocks: torch.Tensor, num_blocks: int) -> list[torch.Tensor]:
    """Return uninitialized memory for blocks, in pieces [blocks, layer, elements of a layer]."""
    num_bytes = num_blocks * blocks[0].nbytes
    try:
        if blocks.is_cuda:
            counts = pinned_pieces(num_blocks, blocks[0].nbytes)
            shapes = [(count, *blocks.shape[1:]) for count in counts]
            return [torch.empty(shape, dtype=blocks.dtype, pin_memory=True) for shape in shapes]
        # NumPy requests huge pages from Linux; torch does not.
        raw = torch.from_numpy(np.empty(num_bytes, dtype=np.uint8))
        return [raw.view(blocks.dtype).view(num_blocks, *blocks.shape[1:])] if num_blocks else []
    except (MemoryError, RuntimeError) as error:
        raise DeviceError(
            f"the host has too little memory for a swap space of {num_blocks} blocks "
            f"({num_bytes / 2**30:.2f} GiB)",
            hint="lower engine.swap_space; 0 disables it",
        ) from error


def pinned_pieces(num_blocks: int, block_bytes: int) -> list[int]:
    """Divide blocks into pieces of pinned memory. torch rounds the size of each pinned allocation
    up to a power of two.

    Returns:
        The number of blocks in each piece. In each piece, rounding wastes less than a block.
    """
    pieces = []
    while num_blocks:
        rounded_down = 1 << ((num_blocks * block_bytes).bit_length() - 1)
        pieces.append(max(1, rounded_down // block_bytes))
        num_blocks -= pieces[-1]
    return pieces
