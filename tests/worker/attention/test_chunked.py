"""Chunked attention: steps are cut at the ends of chunks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from batchinfer.engine.kv.layout import KVLayout
from batchinfer.engine.step import SharedPrefixes
from batchinfer.worker.attention.attention import make_backend
from batchinfer.worker.attention.chunked import crosses_chunks, cut_at_chunks
from batchinfer.worker.attention.temperature import QueryTemperature
from batchinfer.worker.attention.variant import AttentionVariant
from batchinfer.worker.forward import device_arrays
from batchinfer.worker.kv_cache import KVCache
from batchinfer.worker.transfer import to_device
from tests.models import tiny_config
from tests.worker.step_maker import HandSequence, StepMaker

CHUNK, BLOCK = 12, 4
LAYOUT = KVLayout(
    num_layers=2,
    num_kv_heads=2,
    key_width=16,
    value_width=16,
    block_size=BLOCK,
    element_bytes=4,
    chunks=(CHUNK, 0),
)

sequences = st.lists(st.tuples(st.integers(0, 40), st.integers(1, 40)), min_size=1, max_size=4)


@given(sequences)
def test_each_token_sees_its_chunk_up_to_itself(parts: list[tuple[int, int]]) -> None:
    maker = StepMaker(128, BLOCK)
    made = [HandSequence([1] * (done + new), [], 0) for done, new in parts]
    maker.step([(one, done) for one, (done, _) in zip(made, parts, strict=True)])
    step = maker.step([(one, new) for one, (_, new) in zip(made, parts, strict=True)])
    cut = cut_at_chunks(step, CHUNK, BLOCK)

    seen = []
    for row, (start, end) in enumerate(zip(cut.query_starts, cut.query_starts[1:], strict=False)):
        context = cut.context_lens[row]
        slots = cut.block_tables[row][np.arange(context) // BLOCK] * BLOCK + (
            np.arange(context) % BLOCK
        )
        seen += [slots[: context - (end - 1 - token)].tolist() for token in range(start, end)]
    expected = []
    for one, (done, new) in zip(made, parts, strict=True):
        places = [one.block_table[p // BLOCK] * BLOCK + p % BLOCK for p in range(done + new)]
        expected += [places[p // CHUNK * CHUNK : p + 1] for p in range(done, done + new)]
    assert seen == expected
    assert crosses_chunks(step, CHUNK) == (cut.num_sequences > step.num_sequences)


def test_shared_prefixes_are_cut_at_the_start_of_a_chunk() -> None:
    """Two sequences share 20 tokens, 8 in the second chunk; the third is in another chunk."""
    maker = StepMaker(32, BLOCK)
    first = maker.sequence([1] * 24)
    maker.step([(first, 20)])
    second = HandSequence([1] * 24, first.block_table[:5], 20)
    third = HandSequence([1] * 24, first.block_table[:2], 8)
    step = maker.step([(first, 1), (second, 1), (third, 1)])
    shared = SharedPrefixes(np.array([2, 0, 1], np.int32), np.array([0, 8, 20], np.int32))
    cut = cut_at_chunks(replace(step, shared_prefixes=shared), CHUNK, BLOCK)
    assert cut.shared_prefixes.shared_lens.tolist() == [0, 0, 8]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["in C", "by torch"])
def test_equals_softmax_over_the_chunk(dtype: torch.dtype) -> None:
    maker = StepMaker(32, BLOCK)
    done, new = 5, 30
    sequence = maker.sequence([1] * (done + new))
    maker.step([(sequence, done)])
    before, step = list(sequence.block_table), maker.step([(sequence, new)])
    assert sequence.block_table[: len(before)] == before
    cache = KVCache(LAYOUT, 32, torch.device("cpu"), dtype)
    torch.manual_seed(0)
    key, value = torch.randn(2, done + new, 2, 16, dtype=dtype)
    places = [sequence.block_table[p // BLOCK] * BLOCK + p % BLOCK for p in range(done + new)]
    query = torch.randn(new, 4, 16, dtype=dtype)
    backend = make_backend(cache)
    backend.begin_step(step, to_device(device_arrays(step), torch.device("cpu")))
    for layer, chunk in enumerate((CHUNK, 10**6)):
        cache.write(layer, key, value, torch.tensor(places))
        got = backend.attend(layer, query, AttentionVariant(0.25, 0, 0.0, None))
        for at in range(new):
            position = done + at
            begin = position // chunk * chunk
            keys, values = (
                kept[begin : position + 1].repeat_interleave(2, dim=1) for kept in (key, value)
            )
            weights = torch.einsum("hd,chd->hc", query[at], keys).mul(0.25).softmax(1)
            expected = torch.einsum("hc,chd->hd", weights, values)
            torch.testing.assert_close(got[at], expected, atol=1e-5, rtol=1e-5)


def test_a_layout_keeps_chunks_where_sequences_leave_them() -> None:
    config = tiny_config("llama4_text").to_dict()

    def layout(max_model_len: int, block_size: int = 16) -> KVLayout:
        return KVLayout.from_config(
            config, block_size=block_size, dtype="float32", max_model_len=max_model_len
        )

    assert layout(32).chunks == ()
    assert layout(33).chunks == (32, 0, 32)
    assert layout(33).windows == (0, 32, 32)
    with pytest.raises(ValueError, match=r"chunks of 32 tokens .* block size 48"):
        layout(64, block_size=48)


def test_queries_grow_with_the_position_in_their_own_sequence() -> None:
    query = torch.ones(1, 1, 4, 2)
    positions = torch.tensor([0, 18, 19, 39])
    got = QueryTemperature(20, 0.1).of(query, positions)[0, 0, :, 0]
    expected = 1 + 0.1 * torch.log1p(torch.tensor([0.0, 0.0, 1.0, 2.0]))
    torch.testing.assert_close(got, expected)
