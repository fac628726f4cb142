"""KV blocks in host memory, and their way there and back."""

from __future__ import annotations

import time

import numpy as np
import torch

from batchinfer.engine.step import Int32
from batchinfer.errors import DeviceError

_MEASURED_BYTES = 4 * 2**20
"""Touched of the host's memory before a block is swapped."""


class HostBlocks:
    """Host memory of the pool's layout: a block is one contiguous copy.

    Beside a CUDA pool it is pinned, and copied on a stream of its own. Beside a CPU's it is plain
    memory, of which no more is touched than has been used.

    Args:
        pool: [slot, elements of a block]
        num_blocks: host slots.

    Raises:
        DeviceError: when there is no room.
    """

    def __init__(self, pool: torch.Tensor, num_blocks: int) -> None:
        self._pool = pool
        self._stream: torch.cuda.Stream | None = None
        if pool.is_cuda and num_blocks > 0:
            self._stream = torch.cuda.Stream(pool.device)  # type: ignore[no-untyped-call]
        self._blocks = _allocate(pool, num_blocks)  # [host slot, elements of a block]

    def copy(self, outs: Int32, ins: Int32) -> None:
        """Copy blocks out, then in. What is queued on the device after it finds them there.

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
        """Seconds that a block takes one way: the mean of both, the way out to untouched memory."""
        most = min(len(self._blocks), len(self._pool) - 1)
        count = min(most, max(1, _MEASURED_BYTES // self._pool[0].nbytes))
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
            self._blocks[host_slot].copy_(self._pool[slot], non_blocking=True)
        for host_slot, slot in ins.tolist():
            self._pool[slot].copy_(self._blocks[host_slot], non_blocking=True)


def _allocate(pool: torch.Tensor, num_blocks: int) -> torch.Tensor:
    """Uninitialised ``[num_blocks, elements of a block]``."""
    num_bytes = num_blocks * pool[0].nbytes
    try:
        if pool.is_cuda or num_blocks == 0:
            pinned = num_blocks > 0
            return torch.empty(num_blocks, pool.shape[1], dtype=pool.dtype, pin_memory=pinned)
        # NumPy asks Linux for huge pages where torch does not.
        raw = torch.from_numpy(np.empty(num_bytes, dtype=np.uint8))
        return raw.view(pool.dtype).view(num_blocks, pool.shape[1])
    except (MemoryError, RuntimeError) as error:
        raise DeviceError(
            f"no room for a swap space of {num_blocks} blocks ({num_bytes / 2**30:.2f} GiB)",
            hint="lower engine.swap_space; 0 does without",
        ) from error
