"""Paged attention in Triton matches its reference, and lists each piece of work once."""

import pytest
import torch

from batchinfer.kernels import attention_loop, decode_plan
from batchinfer.kernels.attention_loop import Heads, tile_tokens
from batchinfer.kernels.chunk_attention import ChunkWork, chunk_config, plan_chunks
from batchinfer.kernels.decode_attention import decode_config
from batchinfer.kernels.decode_plan import DECODE_PIECE, plan_decode
from batchinfer.kernels.shared_attention import shared_config
from tests.kernels.cases import (
    ATTENTION_CASES,
    INTERPRETED_ATTENTION_CASES,
    AttentionCase,
    attend_paged,
    build_attention,
    check_attention,
    reference_attention,
)

SPLIT_CASES = [case for case in INTERPRETED_ATTENTION_CASES if (case.num_splits or 1) > 1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("case", INTERPRETED_ATTENTION_CASES, ids=str)
@pytest.mark.usefixtures("short_pieces")
def test_paged_attention_equals_reference(
    case: AttentionCase, dtype: torch.dtype, interpreter: str
) -> None:
    check_attention(build_attention(case, interpreter, dtype))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        *((case, torch.bfloat16) for case in ATTENTION_CASES),
        *((case, torch.float16) for case in INTERPRETED_ATTENTION_CASES),
        *((case, torch.float32) for case in INTERPRETED_ATTENTION_CASES),
    ],
    ids=str,
)
def test_paged_attention_equals_reference_on_gpu(
    case: AttentionCase, dtype: torch.dtype, gpu: str
) -> None:
    check_attention(build_attention(case, gpu, dtype))


@pytest.mark.gpu
@pytest.mark.parametrize("case", SPLIT_CASES, ids=str)
@pytest.mark.usefixtures("short_pieces")
def test_short_pieces_equal_reference_on_gpu(case: AttentionCase, gpu: str) -> None:
    check_attention(build_attention(case, gpu, torch.bfloat16))


@pytest.mark.usefixtures("short_pieces")
def test_decode_bits_do_not_depend_on_bounds_of_pieces(interpreter: str) -> None:
    alone = build_attention(AttentionCase("alone", ((1, 150),)), interpreter, torch.float32)
    outs = []
    for num_splits, bound in ((3, 150), (9, 150), (None, 150), (None, 2000)):
        arguments = alone.with_fresh_out() | {"num_splits": num_splits, "max_context_len": bound}
        attend_paged(**arguments)
        outs.append(arguments["out"])
    assert all(torch.equal(out, outs[0]) for out in outs[1:])


def listed(lens: list[tuple[int, int]], **options: int) -> list[tuple[int, int]]:
    """Return the (sequence, piece) pairs of a work list; `lens` as in `AttentionCase`."""
    query_lens, context_lens = zip(*lens, strict=True)
    starts = torch.tensor([0, *query_lens]).cumsum(0).int()
    work = plan_decode(
        starts,
        torch.tensor(context_lens, dtype=torch.int32),
        num_heads=4,
        num_kv_heads=2,
        value_width=16,
        max_context_len=max(context_lens),
        num_launches=3,
        **options,
    )
    num_items, *taken = work.counters.flatten().tolist()
    assert taken == [0] * 7
    return [(sequence, piece) for sequence, piece in work.items[:num_items].tolist()]


def test_sliding_window_shortens_decode_work_list(interpreter: str) -> None:
    assert listed([(1, 5000), (1, 100)], sliding_window=64) == [(0, 0), (1, 0)]


def test_pieces_are_longer_if_num_splits_is_small(interpreter: str) -> None:
    assert sorted(listed([(1, 5000)], num_splits=2)) == [(0, 0), (0, 1)]


@pytest.mark.parametrize("lens_seed", range(3))
def test_decode_plan_lists_every_piece_once(
    lens_seed: int, interpreter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode_plan, "SEQUENCES_AT_ONCE", 8)
    generator = torch.Generator().manual_seed(lens_seed)
    query_lens = torch.randint(0, 3, (37,), generator=generator).tolist()
    context_lens = torch.randint(0, 3000, (37,), generator=generator).tolist()
    lens = list(zip(query_lens, context_lens, strict=True))
    expected = [
        (sequence, piece)
        for sequence, (query_len, context_len) in enumerate(lens)
        if query_len == 1
        for piece in range(max(1, -(-context_len // DECODE_PIECE)))
    ]
    assert sorted(listed(lens)) == expected


@pytest.mark.usefixtures("short_pieces")
def test_layers_can_share_a_decode_work_list(interpreter: str) -> None:
    inputs = build_attention(AttentionCase("x", ((1, 150), (3, 70))), interpreter, torch.float32)
    work = plan_decode(
        inputs.arguments["query_starts"],
        inputs.arguments["context_lens"],
        num_heads=4,
        num_kv_heads=2,
        value_width=16,
        max_context_len=150,
        num_launches=2,
    )
    expected = inputs.with_fresh_out()
    reference_attention(**expected)
    for layer in range(2):
        got = inputs.with_fresh_out()
        attend_paged(**got, work=work, launch=layer)
        torch.testing.assert_close(got["out"], expected["out"], atol=1e-5, rtol=1e-5)


def test_work_list_for_another_window_is_refused(interpreter: str) -> None:
    inputs = build_attention(AttentionCase("x", ((1, 9),)), interpreter, torch.float32).arguments
    lengths = inputs["query_starts"], inputs["context_lens"]
    shape = {"num_heads": 4, "num_kv_heads": 2, "value_width": 16}
    work = plan_decode(*lengths, **shape, max_context_len=9, sliding_window=4)
    with pytest.raises(AssertionError, match="window"):
        attend_paged(**inputs | {"work": work})


def test_rows_after_the_last_sequence_are_not_written(interpreter: str) -> None:
    inputs = build_attention(
        AttentionCase("tail", ((3, 9), (1, 5))), interpreter, torch.float32
    ).with_fresh_out()
    inputs["query"] = torch.cat([inputs["query"], torch.full_like(inputs["query"], float("nan"))])
    inputs["out"] = torch.cat([inputs["out"], inputs["out"]])
    attend_paged(**inputs)
    assert inputs["out"][:4].isfinite().all()
    assert inputs["out"][4:].isnan().all()


def test_query_and_out_may_be_slices_of_wider_rows(interpreter: str) -> None:
    inputs = build_attention(AttentionCase("x", ((3, 9), (1, 5))), interpreter, torch.float32)
    expected = inputs.with_fresh_out()
    reference_attention(**expected)
    strided = inputs.with_fresh_out()
    for name in ("query", "out"):
        wide = torch.full((4, 9, 16), float("nan"))
        wide[:, 2:6] = strided[name]
        strided[name] = wide[:, 2:6]
    attend_paged(**strided)
    torch.testing.assert_close(strided["out"], expected["out"], atol=1e-5, rtol=1e-5)


def test_nan_in_one_sequence_does_not_affect_other_sequences(interpreter: str) -> None:
    inputs = build_attention(
        AttentionCase("x", ((1, 40), (3, 40), (1, 20))), interpreter, torch.float32
    ).with_fresh_out()
    slot = int(inputs["block_tables"][1, 0])
    inputs["value_cache"][slot] = float("nan")
    attend_paged(**inputs)
    assert inputs["out"][[0, 4]].isfinite().all()
    assert inputs["out"][1:4].isnan().all()


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("element_bytes", [1, 2, 4])
@pytest.mark.parametrize("widths", [32, 96, 192, 256, 384, 512])
@pytest.mark.parametrize("group", [1, 4, 71, 128])
def test_tiles_divide_pieces_and_hold_groups(
    group: int, widths: int, element_bytes: int, capability: int
) -> None:
    heads = Heads(group, widths, max(2, element_bytes), element_bytes, capability)
    assert tile_tokens(heads, most=128) * widths * element_bytes <= 32 * 2**10
    for config in (decode_config, chunk_config, shared_config):
        shape = config(heads)
        assert DECODE_PIECE % shape.tile == 0
        assert shape.rows >= group
        assert shape.rows & (shape.rows - 1) == 0


def tiles(query_lens: list[int], tokens: int, **bounds: int) -> tuple[ChunkWork, list[list[int]]]:
    """Return the chunk work list for these query lengths, and its items."""
    starts = torch.tensor([0, *query_lens]).cumsum(0).int()
    work = plan_chunks(starts, tokens=tokens, **{"num_tokens": sum(query_lens)} | bounds)
    return work, work.items[: int(work.num_items)].tolist()


def test_chunk_plan_skips_decodes_and_lists_last_tiles_first(interpreter: str) -> None:
    work, items = tiles([1] * 500 + [40, 1, 33, 2, 0], 16, num_tokens=75, max_chunks=3)
    assert items == [[500, 32], [500, 16], [500, 0], [502, 32], [502, 16], [502, 0], [503, 0]]
    assert len(work.items) == 75 // 16 + 3


def test_chunk_plan_lists_every_tile_once(
    interpreter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode_plan, "SEQUENCES_AT_ONCE", 4)
    query_lens = torch.randint(0, 40, (37,), generator=torch.Generator().manual_seed(0)).tolist()
    work, items = tiles(query_lens, 7)
    expected = [
        [sequence, first]
        for sequence, query_len in enumerate(query_lens)
        if query_len > 1
        for first in range(0, query_len, 7)
    ]
    assert sorted(items) == expected
    assert len(work.items) >= len(expected)


def test_chunk_work_list_may_be_longer_than_its_tiles(interpreter: str) -> None:
    """A captured step has such a list, because the list must have room for other query lengths."""
    case = INTERPRETED_ATTENTION_CASES[3]
    arguments = build_attention(case, interpreter, torch.float32).with_fresh_out()
    chunks = plan_chunks(arguments["query_starts"], tokens=5, num_tokens=1000)
    expected = arguments | {"out": torch.empty_like(arguments["out"])}
    attend_paged(**arguments, chunks=chunks)
    reference_attention(**expected)
    torch.testing.assert_close(arguments["out"], expected["out"], atol=1e-5, rtol=1e-5)


def test_int64_rows_give_the_same_bits_as_int32_rows(
    interpreter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = build_attention(INTERPRETED_ATTENTION_CASES[3], interpreter, torch.float32)
    few, many = inputs.with_fresh_out(), inputs.with_fresh_out()
    attend_paged(**few)
    monkeypatch.setattr(attention_loop, "_INT32_ROWS", 0)
    attend_paged(**many)
    assert torch.equal(few["out"], many["out"])


def test_cache_with_another_dtype_than_the_query_is_refused(interpreter: str) -> None:
    inputs = build_attention(ATTENTION_CASES[0], interpreter, torch.float32).arguments
    with pytest.raises(AssertionError, match="dtype"):
        attend_paged(**inputs | {"query": inputs["query"].half()})
