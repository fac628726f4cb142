"""Chunked scans match the references; ending a step between chunks changes no bits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from batchinfer.kernels import gated_delta, mamba2, recurrence
from batchinfer.kernels.chunk_scan import CHUNK, plan_scan
from batchinfer.worker import memory
from tests.kernels.gpu_or_interpreter import on_both, on_both_devices
from tests.kernels.recurrent_cases import gated_delta_layer, mamba2_layer
from tests.kernels.recurrent_layer import RecurrentLayer

# Two chunks, one token alone, and three tokens that follow it.
LENGTHS, CUTS = [70, 3], [[0, 66, 67, 70], [0, 3]]
FLOAT32 = (torch.float32,)


def assert_equal(
    layer: RecurrentLayer, kernel: Any, reference: Any, device: str, cuts: Any = None
) -> None:
    """Compare a kernel with its reference.

    In float32, compare every number. In other dtypes, compare only the norm of the errors: factors
    are rounded, and the layer's norm enlarges the errors of small outputs.
    """
    if layer.dtype == torch.float32:
        layer.assert_equal(kernel, reference, device, cuts)
        return
    expected = layer.run(reference).double()
    error = layer.run(kernel, cuts, device).double() - expected
    assert error.norm() <= 4 * torch.finfo(layer.dtype).eps * expected.norm()


def small_gated_delta(lengths: list[int], dtype: torch.dtype, **shape: Any) -> RecurrentLayer:
    sizes = {"key_heads": 1, "value_heads": 1, "key_width": 7, "value_width": 24}
    layer = gated_delta_layer(lengths, dtype=dtype, **sizes | shape)
    layer.in_chunks = True
    return layer


def small_mamba2(lengths: list[int], dtype: torch.dtype, **shape: Any) -> RecurrentLayer:
    sizes = {"groups": 1, "heads": 1, "width": 24, "state_size": 7}
    layer = mamba2_layer(lengths, dtype=dtype, **sizes | shape)
    layer.in_chunks = True
    return layer


@on_both(interpreted=FLOAT32)
@pytest.mark.parametrize(("by_row", "rate"), [(False, 1.0), (True, 1.0), (True, 100.0)])
def test_gated_delta_equals_reference(
    by_row: bool, rate: float, dtype: torch.dtype, device: str
) -> None:
    layer = small_gated_delta(LENGTHS, dtype, by_row=by_row)
    layer.weights = replace(layer.weights, decay_rate=layer.weights.decay_rate * rate)
    assert_equal(layer, recurrence.gated_delta, gated_delta.gated_delta, device, CUTS)


@on_both()
@pytest.mark.long
@pytest.mark.parametrize(
    "shape",
    [
        {"value_heads": 2, "key_width": 16, "value_width": 300},
        {"value_heads": 2, "key_width": 136, "value_width": 16},
        {"by_row": True, "key_width": 72, "value_width": 144, "slot_bytes": 2**15},
    ],
    ids=["heads", "wide", "by_row"],
)
def test_gated_delta_of_other_shapes(
    shape: dict[str, Any], dtype: torch.dtype, device: str
) -> None:
    layer = small_gated_delta([129, 64, 1, 17], dtype, **shape)
    assert_equal(layer, recurrence.gated_delta, gated_delta.gated_delta, device)


@on_both(interpreted=FLOAT32)
@pytest.mark.parametrize("by_row", [False, True])
def test_gated_delta_writes_equal_keys(by_row: bool, dtype: torch.dtype, device: str) -> None:
    """If all keys are equal and all strengths are 2, every token depends on all earlier tokens."""
    layer = small_gated_delta([48], dtype, by_row=by_row, conv_width=2)
    channels, _, decay, _ = layer.inputs
    channels[:, :14] = channels[:1, :14]
    decay[:] = -8.0
    conv = layer.weights.conv.clone()
    conv[0] = 0.0
    layer.weights = replace(layer.weights, conv=conv, max_beta=2.0)
    assert_equal(layer, recurrence.gated_delta, gated_delta.gated_delta, device)


@on_both(interpreted=FLOAT32)
def test_mamba2_equals_reference(dtype: torch.dtype, device: str) -> None:
    layer = small_mamba2(LENGTHS, dtype, dt_limits=(0.1, 2.0))
    assert_equal(layer, recurrence.mamba2, mamba2.mamba2, device, CUTS)


@on_both()
@pytest.mark.long
@pytest.mark.parametrize(
    "shape",
    [
        {"groups": 2, "heads": 4, "width": 300, "state_size": 16},
        {"heads": 18, "width": 16, "state_size": 72, "slot_bytes": 2**15},
    ],
    ids=["groups", "heads"],
)
def test_mamba2_of_other_shapes(shape: dict[str, Any], dtype: torch.dtype, device: str) -> None:
    layer = small_mamba2([129, 64, 1, 17], dtype, **shape)
    assert_equal(layer, recurrence.mamba2, mamba2.mamba2, device)


@on_both(interpreted=FLOAT32)
@pytest.mark.parametrize("kind", ["gated_delta", pytest.param("mamba2", marks=pytest.mark.long)])
def test_steps_between_chunks_change_no_bits(kind: str, dtype: torch.dtype, device: str) -> None:
    make = {"gated_delta": small_gated_delta, "mamba2": small_mamba2}[kind]
    layer = make([130, 2], dtype)
    layer.assert_same_bits(getattr(recurrence, kind), [[0, 64, 130], [0, 2]], device)


def test_memory_is_planned_for_chunks_of_this_length() -> None:
    assert CHUNK == memory.SCAN_CHUNK


@on_both_devices
def test_plan_lists_sequences_with_several_tokens(device: str) -> None:
    # Two decodes, chunks of 130 and 2 tokens, and a padding sequence without tokens.
    starts = torch.tensor([0, 1, 2, 132, 134, 134], dtype=torch.int32, device=device)
    work = plan_scan(starts, num_tokens=200, max_chunks=4)
    assert listed(work.sequences) == {(2, 0), (3, 0)}
    assert listed(work.chunks) == {(2, 0), (2, 64), (2, 128), (3, 0)}
    assert len(work.sequences.items) == 4


def listed(work: Any) -> set[tuple[int, int]]:
    pairs = work.items[: int(work.num_items)].tolist()
    assert len(pairs) == len(set(map(tuple, pairs)))
    return {(sequence, first) for sequence, first in pairs}
