"""The KV pool: one tensor on the device.

In block-major order, a block's data for all layers is contiguous, which suits copies and swaps. In
layer-major order, all blocks of a layer are contiguous, so a layer's attention reads fewer memory
pages.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from batchinfer.engine.kv.kv_shapes import KVShape
from batchinfer.engine.kv.layout import KVLayout
from batchinfer.errors import DeviceError
from batchinfer.kernels import reference
from batchinfer.kernels.cpu import paged_attention as cpu_attention
from batchinfer.kernels.rotary_pairs import PER_ELEMENT, RotaryPairs
from batchinfer.worker.host_blocks import HostBlocks
from batchinfer.worker.ops import HeadNorms, rotary_write

LAYER_MAJOR = False
"""True if pools are layer-major by default."""
_ALIGNMENT = 64  # size of a cache line, in bytes
_RESIDENT_BYTES = 256 * 2**20
"""Bytes at the start of a CPU pool whose pages are touched immediately. The first blocks are used
first, and page faults would slow the first steps (by 7 % of a short run on a virtual machine)."""


class KVCache:
    """Keys and values of every block: ``[slot, layer, key or value, kv_head]``, or in layer-major
    order ``[layer, slot, key or value, kv_head]``.

    For each KV head, a block is ``[token, width]``. The C kernels for a CPU use another order
    (``kernels/cpu/kv_block_layout.h``). On a CUDA device, a float8 pool stores values as ``[width,
    token]``. Stored float8 values must not be NaN (``kernels/fp8_decode_attention.py``), so a
    float8 pool is zeroed first.

    A slot holds the layers of one layer group. Slots are flat rows of elements, because keys and
    values may differ in width. The pool has one additional slot, ``null_slot``, which holds zeros
    and is never written. Padding is read from the null slot.
    """

    def __init__(
        self,
        layout: KVLayout,
        num_blocks: int,
        device: torch.device,
        dtype: torch.dtype,
        num_host_blocks: int = 0,
        *,
        layer_major: bool = LAYER_MAJOR,
    ) -> None:
        """Make an uninitialized pool.

        Args:
            num_blocks: number of slots, not counting the null slot.
            dtype: dtype of the model, and of the pool unless the layout has float8.
            layer_major: True for the order [layer, slot] instead of [slot, layer].

        Raises:
            DeviceError: the device has too little memory for the pool, or the host for the host
                blocks.
        """
        self.layout = layout
        self.dtype = dtype
        """Dtype of the model and its queries."""
        self.num_blocks = num_blocks
        self.null_slot = num_blocks
        self._shapes = {layer: layout.shape(layer) for layer in layout.attention_layers}
        widths = {width for of in self._shapes.values() for width in (of.key_width, of.value_width)}
        self.unit = math.gcd(*widths)
        """Greatest common divisor of all widths of keys and values."""
        pool_dtype = torch.float8_e4m3fn if layout.fp8 else dtype
        num_slots, num_parts = num_blocks + 1, layout.parts_per_slot
        outer, inner = (num_parts, num_slots) if layer_major else (num_slots, num_parts)
        self._part_elements = layout.elements_per_block // num_parts
        shape = (outer, inner * self._part_elements)
        self.pool = _allocate(num_slots, shape, device, pool_dtype)
        """The pool's memory: [slot, elements of a block], or [layer, elements of all slots]."""
        parts = self.pool.view(outer, inner, self._part_elements)
        self.blocks = parts.transpose(0, 1) if layer_major else parts
        """The pool's memory as [slot, layer, elements of a layer], strided, for either order; or
        as [slot, 1, elements of a block] if layers differ in shape."""
        self._transposes_values = _transposes_values(layout, device)
        (self.pool if self._transposes_values else self.blocks[self.null_slot]).zero_()
        self.host = HostBlocks(self.blocks, num_host_blocks)
        self._places = {layer: layout.place(layer) for layer in layout.attention_layers}

    @property
    def is_native(self) -> bool:
        """True if the C kernels write and read the pool, which they cannot do for float8
        latents."""
        if self.pool.is_cuda or (self.layout.latent and self.layout.fp8):
            return False
        return cpu_attention.reads(self.pool.dtype, self.dtype)

    @property
    def nbytes(self) -> int:
        return self.pool.nbytes

    @property
    def states(self) -> torch.Tensor:
        """The pool's slots as float32 [slot, elements], for recurrent states."""
        return self.pool.view(torch.float32)

    def group(self, layer: int) -> int:
        """Return the number of a layer's group. Each group has its own block tables and slots."""
        return self._places[layer][0]

    def shape(self, layer: int) -> KVShape:
        return self._shapes[layer]

    def key(self, layer: int) -> torch.Tensor:
        """Return the keys of a layer, [slot, kv_head, block_size, key_width], strided. On a CPU,
        the elements of a block may be in another order; ``read`` reorders them."""
        shape = self.shape(layer)
        keys = self._view(self._offset(layer), shape.num_kv_heads, shape.key_width)
        if not (self.layout.fp8 and self.is_native):
            return keys
        *outer, _, _ = keys.stride()
        return keys.as_strided(keys.shape, (*outer, 1, self.layout.block_size))

    def value(self, layer: int) -> torch.Tensor:
        """Return the values of a layer, [slot, kv_head, block_size, value_width]; see ``key``."""
        shape = self.shape(layer)
        if shape.values_in_keys:
            return self.key(layer)[..., : shape.value_width]
        offset = self._value_offset(layer)
        values = self._view(offset, shape.num_kv_heads, shape.value_width)
        if not self._transposes_values:
            return values
        *outer, _, _ = values.stride()
        return values.as_strided(values.shape, (*outer, 1, self.layout.block_size))

    def read(self, layer: int, slots: int | torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return copies of the keys and values of one block, [kv_head, block_size, width], or of
        several blocks."""
        key, value = self.key(layer)[slots], self.value(layer)[slots]
        if self.is_native and not self.layout.fp8:
            key = cpu_attention.read_keys(key)
            if self.shape(layer).values_in_keys:
                return key, key[..., : value.shape[-1]].clone()
            return key, cpu_attention.read_values(value)
        return key.clone(), value.clone()

    def write(
        self,
        layer: int,
        key: torch.Tensor,  # [T, kv_head, key_width]
        value: torch.Tensor,  # [T, kv_head, value_width]
        slot_mapping: torch.Tensor,  # [T] int64, slot * block_size + offset
    ) -> None:
        """Store the keys and values of T tokens.

        Raises:
            ValueError: the shapes of keys or values differ from the layout.
        """
        shape = self.shape(layer)
        shapes = [tuple(key.shape[1:]), tuple(value.shape[1:])]
        expected = [(shape.num_kv_heads, width) for width in (shape.key_width, shape.value_width)]
        if shapes != expected:
            raise ValueError(
                f"layer {layer} has keys and values of the shapes {shapes}, but "
                f"its config says {expected}"
            )
        key_cache, value_cache = self.key(layer), self.value(layer)
        if self.pool.is_cuda:
            from batchinfer.kernels.kv_write import kv_write

            kv_write(key, value, key_cache, value_cache, slot_mapping)
        elif self.is_native and not self.layout.fp8:
            if shape.values_in_keys:
                # Values are stored as part of the keys.
                value, value_cache = value[..., :0], value_cache[..., :0]
            key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (key, value))
            cpu_attention.kv_write(key, value, key_cache, value_cache, slot_mapping)
        else:
            reference.kv_write(key, value, key_cache, value_cache, slot_mapping)

    def rotary_write(
        self,
        layer: int,
        qkv: torch.Tensor,  # [T, Hq * S + 2 * kv_head * width]
        cos: torch.Tensor,  # [T, rotary_width]
        sin: torch.Tensor,  # [T, rotary_width]
        slot_mapping: torch.Tensor,  # [T] int64
        norms: HeadNorms | None,
        query_head_stride: int = 0,
        pairs: RotaryPairs = PER_ELEMENT,
    ) -> None:
        """Rotate the queries in place, and store the rotated keys and the values.

        Args:
            query_head_stride: distance S between query heads in elements; 0: ``width``.
            pairs: which elements are rotated together, and where their angles are.
        """
        keys, values = self.key(layer), self.value(layer)
        rotary_write(qkv, cos, sin, keys, values, slot_mapping, norms, query_head_stride, pairs)

    def copy_blocks(self, pairs: torch.Tensor) -> None:
        """Copy whole blocks. ``pairs`` [C, 2] holds (source slot, destination slot). All
        destinations must be distinct, and must not be sources."""
        if self.pool.is_cuda:
            from batchinfer.kernels.block_copy import block_copy

            block_copy(self.blocks, pairs)
            return
        source, destination = pairs.long().unbind(dim=1)
        self.blocks[destination] = self.blocks[source]

    def units(self, layer: int, *, values: bool) -> torch.Tensor:
        """Return a view of the pool as rows of ``block_size * unit`` elements, starting with the
        layer's keys or values in the first slot. Head h of slot s begins at row
        ``s * rows_per_slot + h * (width / unit)``."""
        row = self.layout.block_size * self.unit
        offset = self._value_offset(layer) if values else self._offset(layer)
        flat = self.pool.view(-1)[offset:]
        return flat[: len(flat) // row * row].view(-1, row)

    @property
    def rows_per_slot(self) -> int:
        return self.blocks.stride(0) // (self.layout.block_size * self.unit)

    def _offset(self, layer: int) -> int:
        """Return the element offset of a layer's keys in the first slot."""
        part, within = divmod(self._places[layer][1], self._part_elements)
        return part * self.blocks.stride(1) + within

    def _value_offset(self, layer: int) -> int:
        shape = self.shape(layer)
        key_elements = shape.num_kv_heads * self.layout.block_size * shape.key_width
        return self._offset(layer) + key_elements

    def _view(self, offset: int, num_kv_heads: int, width: int) -> torch.Tensor:
        block_size = self.layout.block_size
        shape = (len(self.blocks), num_kv_heads, block_size, width)
        strides = (self.blocks.stride(0), block_size * width, width, 1)
        return self.pool.as_strided(shape, strides, offset)


def _transposes_values(layout: KVLayout, device: torch.device) -> bool:
    return layout.fp8 and device.type == "cuda" and not layout.latent


def _allocate(
    num_slots: int, shape: tuple[int, int], device: torch.device, dtype: torch.dtype
) -> torch.Tensor:
    num_bytes = math.prod(shape) * dtype.itemsize
    try:
        if device.type != "cpu":
            return torch.empty(shape, device=device, dtype=dtype)
        # NumPy requests huge pages from Linux; torch does not. Blocks are far apart, so with small
        # pages a kernel would miss the TLB for every head that it gathers.
        raw = np.empty(num_bytes + _ALIGNMENT, dtype=np.uint8)
        start = -raw.ctypes.data % _ALIGNMENT
        aligned = torch.from_numpy(raw[start : start + num_bytes])
        aligned[:_RESIDENT_BYTES].zero_()
        return aligned.view(dtype).view(shape)
    except (MemoryError, RuntimeError) as error:
        raise DeviceError(
            f"the device has too little memory for a KV pool of {num_slots} blocks "
            f"({num_bytes / 2**30:.2f} GiB)",
            hint="lower engine.num_kv_blocks, engine.kv_cache_memory or "
            "engine.gpu_memory_utilization",
        ) from error
