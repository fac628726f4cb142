"""The C kernel of Gated DeltaNet equals its reference; steps and neighbors change no bits."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from batchinfer.engine.kv.state_layout import StateLayout, min_slot_bytes, state_layout
from batchinfer.kernels import gated_delta as reference
from batchinfer.kernels.cpu import gated_delta as native
from batchinfer.worker.recurrent.gated_delta_net import places_of
from tests.engine.kv.recurrent_configs import gated_delta_config

pytestmark = pytest.mark.skipif(
    not native.supports(torch.float32), reason="the C kernels cannot be compiled"
)


class Case:
    """A layer with random weights, a pool, and the inputs of some sequences."""

    def __init__(
        self,
        lengths: list[int],
        *,
        key_heads: int = 2,
        value_heads: int = 4,
        key_width: int = 8,
        value_width: int = 16,
        conv_width: int = 4,
        slot_bytes: int = 2048,
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
    ) -> None:
        text = gated_delta_config(
            num_layers=3,
            key_heads=key_heads,
            value_heads=value_heads,
            key_width=key_width,
            value_width=value_width,
            conv_width=conv_width,
        )
        slot_bytes = max(slot_bytes, min_slot_bytes(text))
        layout = state_layout(text, slot_bytes)
        assert layout is not None
        self.layout: StateLayout = layout
        self.lengths = lengths
        self.random = torch.Generator().manual_seed(seed)
        self.dtype = dtype
        channels, values = layout.shape.num_channels, layout.shape.num_values
        self.weights = reference.GatedDeltaWeights(
            conv=self.draw(conv_width, channels).float(),
            decay_rate=self.draw(value_heads).float().exp(),
            dt_bias=self.draw(value_heads).float(),
            norm=self.draw(value_width).float(),
            norm_eps=1e-6,
            max_beta=1.0,
            num_key_heads=key_heads,
            key_width=key_width,
        )
        total = sum(lengths)
        self.inputs = [
            self.draw(total, width) for width in (channels, values, value_heads, value_heads)
        ]
        num_slots = layout.num_slots * len(lengths)
        self.states = torch.full((num_slots, slot_bytes // 4), torch.nan)
        order = torch.randperm(num_slots, generator=self.random).int()
        self.tables = order.view(len(lengths), layout.num_slots)

    def draw(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.random).to(self.dtype)

    def run(self, kernel: Any, cuts: list[list[int]]) -> torch.Tensor:
        """Outputs of all tokens, with each sequence computed in steps that end at its ``cuts``."""
        starts = [sum(self.lengths[:at]) for at in range(len(self.lengths))]
        out = torch.empty_like(self.inputs[1])
        states = self.states.clone()
        for step in range(max(map(len, cuts)) - 1):
            spans = {
                at: (ends[step], ends[step + 1])
                for at, ends in enumerate(cuts)
                if step + 1 < len(ends)
            }
            rows = torch.cat(
                [torch.arange(starts[at] + a, starts[at] + b) for at, (a, b) in spans.items()]
            )
            counts = torch.tensor([0, *(b - a for a, b in spans.values())])
            step_out = torch.empty(len(rows), out.shape[1], dtype=self.dtype)
            kernel(
                *(part[rows] for part in self.inputs),
                weights=self.weights,
                states=states,
                places=places_of(self.layout, 1),
                state_tables=self.tables[list(spans)].contiguous(),
                query_starts=counts.cumsum(0).int(),
                context_lens=torch.tensor([b for _, b in spans.values()]).int(),
                out=step_out,
            )
            out[rows] = step_out
        return out


def at_once(lengths: list[int]) -> list[list[int]]:
    return [[0, length] for length in lengths]


@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    key_heads=st.sampled_from([1, 2, 3]),
    heads_per_key=st.sampled_from([1, 2, 3]),
    key_width=st.sampled_from([1, 4, 7, 16]),
    value_width=st.sampled_from([3, 8, 16, 48, 64]),
    conv_width=st.sampled_from([2, 3, 4, native.MAX_CONV_WIDTH]),
    slot_bytes=st.sampled_from([4096, 8192, 65536]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 99),
)
def test_equals_reference(
    lengths: list[int], key_heads: int, heads_per_key: int, dtype: torch.dtype, **sizes: int
) -> None:
    case = Case(
        lengths, key_heads=key_heads, value_heads=key_heads * heads_per_key, dtype=dtype, **sizes
    )
    cuts = at_once(lengths)
    expected = case.run(reference.gated_delta, cuts).float()
    torch.testing.assert_close(
        case.run(native.gated_delta, cuts).float(),
        expected,
        rtol=1e-4 if dtype == torch.float32 else 2e-2,
        atol=1e-4 if dtype == torch.float32 else 2e-2,
    )


@given(
    cuts=st.lists(
        st.sets(st.integers(1, 40), min_size=1, max_size=6).map(lambda ends: [0, *sorted(ends)]),
        min_size=1,
        max_size=4,
    ),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    value_width=st.sampled_from([16, 24, 128]),
)
def test_bits_do_not_depend_on_steps_and_neighbors(
    cuts: list[list[int]], dtype: torch.dtype, value_width: int
) -> None:
    lengths = [ends[-1] for ends in cuts]
    case = Case(lengths, value_width=value_width, slot_bytes=8192, dtype=dtype)
    whole = case.run(native.gated_delta, at_once(lengths))
    assert torch.equal(case.run(native.gated_delta, cuts), whole)
    starts = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    for at, (start, stop) in enumerate(pairwise(starts)):
        alone = Case(lengths, value_width=value_width, slot_bytes=8192, dtype=dtype)
        alone.inputs = [part[start:stop] for part in case.inputs]
        alone.lengths, alone.tables = [lengths[at]], case.tables[at : at + 1]
        assert torch.equal(alone.run(native.gated_delta, at_once([lengths[at]])), whole[start:stop])


def test_wide_convolutions_are_left_to_the_reference() -> None:
    assert native.supports(torch.float32, native.MAX_CONV_WIDTH)
    assert not native.supports(torch.float32, native.MAX_CONV_WIDTH + 1)
