"""Attention on random shapes and random trees of prefixes matches its reference.

These tests have their own file because the other tests must run without Hypothesis on GPU machines.
"""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.cases import AttentionCase, build_attention, check_attention
from tests.kernels.shared_cases import SharedCase, build_shared


@st.composite
def attention_cases(draw: st.DrawFn) -> AttentionCase:
    query_lens = draw(st.lists(st.sampled_from([0, 1, 1, 1, 2, 7, 33]), min_size=1, max_size=4))
    before = [draw(st.integers(min_value=0, max_value=140)) for _ in query_lens]
    kv_heads, group = draw(st.sampled_from([(1, 1), (1, 3), (2, 1), (2, 2), (1, 5)]))
    return AttentionCase(
        name="random",
        lens=tuple((query, query + old) for query, old in zip(query_lens, before, strict=True)),
        num_heads=kv_heads * group,
        num_kv_heads=kv_heads,
        key_width=draw(st.integers(min_value=1, max_value=40)),
        value_width=draw(st.integers(min_value=1, max_value=40)),
        block_size=draw(st.sampled_from([1, 3, 16, 32])),
        sliding_window=draw(st.sampled_from([0, 0, 1, 2, 30, 64, 100])),
        softcap=draw(st.sampled_from([0.0, 0.0, 1.5])),
        sinks=draw(st.booleans()),
        num_splits=draw(st.sampled_from([None, 1, 2, 3, 7])),
        seed=draw(st.integers(min_value=0, max_value=2**16)),
    )


@pytest.mark.usefixtures("short_pieces", "interpreter")
def test_paged_attention_equals_reference_on_random_shapes() -> None:
    @settings(max_examples=25, derandomize=True)
    @given(attention_cases())
    def compare(case: AttentionCase) -> None:
        check_attention(build_attention(case, "cpu", torch.float32))

    compare()


@st.composite
def trees(draw: st.DrawFn) -> SharedCase:
    block_size = draw(st.sampled_from([1, 3, 16, 32]))
    query_lens = draw(st.lists(st.sampled_from([1, 1, 1, 1, 1, 0, 5]), min_size=2, max_size=9))
    before = [draw(st.integers(min_value=0, max_value=300)) for _ in query_lens]
    order = draw(st.permutations(range(len(query_lens))))
    lens = [0]
    for left, right in pairwise(order):
        most = min(before[left], before[right]) // block_size
        blocks = draw(st.one_of(st.just(most), st.integers(min_value=0, max_value=most)))
        lens.append(blocks * block_size)
    kv_heads, group = draw(st.sampled_from([(1, 1), (1, 3), (2, 1), (2, 2), (1, 20)]))
    attention = AttentionCase(
        name="random",
        lens=tuple((query, query + old) for query, old in zip(query_lens, before, strict=True)),
        num_heads=kv_heads * group,
        num_kv_heads=kv_heads,
        key_width=draw(st.integers(min_value=1, max_value=20)),
        block_size=block_size,
        softcap=draw(st.sampled_from([0.0, 0.0, 1.5])),
        sinks=draw(st.booleans()),
        num_splits=draw(st.sampled_from([None, None, 1, 3])),
        seed=draw(st.integers(min_value=0, max_value=2**16)),
    )
    return SharedCase(attention, tuple(order), tuple(lens))


@pytest.mark.long
@pytest.mark.usefixtures("short_pieces", "interpreter")
def test_shared_prefixes_equal_reference_on_random_trees() -> None:
    @settings(max_examples=25, derandomize=True)
    @given(trees())
    def compare(case: SharedCase) -> None:
        check_attention(build_shared(case, "cpu", torch.float32))

    compare()
