import pytest
import torch

from batchinfer.kernels import (
    attention_loop,
    chunk_attention,
    decode_attention,
    decode_plan,
)
from batchinfer.kernels.attention_loop import Heads, tile_tokens
from batchinfer.kernels.chunk_attention import ChunkWork, chunk_config, plan_chunks
from batchinfer.kernels.decode_attention import decode_config
from batchinfer.kernels.decode_plan import DECODE_PIECE, plan_decode
from batchinfer.kernels.split_kv import Partials
from tests.kernels.cases import (
    ATTENTION_CASES,
    INTERPRETED_ATTENTION_CASES,
    AttentionCase,
    attend_paged,
    build_attention,
    reference_attention,
)

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
SPLIT_CASES = [case for case in INTERPRETED_ATTENTION_CASES if (case.num_splits or 1) > 1]


@pytest.fixture
def short_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut contexts of a few tiles into pieces, as long ones are."""
    monkeypatch.setattr(decode_plan, "DECODE_PIECE", 64)


def check(case: AttentionCase, device: str, dtype: torch.dtype) -> None:
    """The output is the reference's, and finite, whatever the dead parts of the cache hold."""
    inputs = build_attention(case, device, dtype)
    got, expected = inputs.with_fresh_out(), inputs.with_fresh_out()
    attend_paged(**got)
    reference_attention(**expected)
    assert expected["out"].isfinite().all()
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(got["out"], expected["out"], atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("case", INTERPRETED_ATTENTION_CASES, ids=str)
@pytest.mark.usefixtures("short_pieces")
def test_equals_its_reference(case: AttentionCase, dtype: torch.dtype, interpreter: str) -> None:
    check(case, interpreter, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("case", ATTENTION_CASES, ids=str)
def test_equals_its_reference_on_a_gpu(case: AttentionCase, gpu: str) -> None:
    check(case, gpu, torch.bfloat16)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("case", INTERPRETED_ATTENTION_CASES, ids=str)
def test_other_dtypes_on_a_gpu(case: AttentionCase, dtype: torch.dtype, gpu: str) -> None:
    check(case, gpu, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("case", SPLIT_CASES, ids=str)
@pytest.mark.usefixtures("short_pieces")
def test_short_pieces_on_a_gpu(case: AttentionCase, gpu: str) -> None:
    check(case, gpu, torch.bfloat16)


def test_pieces_do_not_depend_on_company(interpreter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # A row's bits are the same alone, beside a longer one, and under another bound on the pieces.
    monkeypatch.setattr(decode_plan, "DECODE_PIECE", 64)
    alone = build_attention(AttentionCase("alone", ((1, 150),)), interpreter, torch.float32)
    outs = []
    for num_splits, bound in ((3, 150), (9, 150), (None, 150), (None, 2000)):
        arguments = alone.with_fresh_out() | {"num_splits": num_splits, "max_context_len": bound}
        attend_paged(**arguments)
        outs.append(arguments["out"])
    assert all(torch.equal(out, outs[0]) for out in outs[1:])


def listed(lens: list[tuple[int, int]], **options: int) -> list[tuple[int, int]]:
    """The (sequence, piece) pairs of a work list for (query_len, context_len) of each sequence."""
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


def test_a_window_shortens_the_list(interpreter: str) -> None:
    assert listed([(1, 5000), (1, 100)], sliding_window=64) == [(0, 0), (1, 0)]


def test_pieces_grow_where_there_may_be_few(interpreter: str) -> None:
    assert sorted(listed([(1, 5000)], num_splits=2)) == [(0, 0), (0, 1)]


@pytest.mark.parametrize("lens_seed", range(3))
def test_every_piece_is_listed_once(
    lens_seed: int, interpreter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode_plan, "SEQUENCES_AT_ONCE", 8)  # in several rounds
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


def test_layers_share_a_work_list(interpreter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_plan, "DECODE_PIECE", 64)
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
    layers = [inputs.with_fresh_out() | {"work": work, "launch": layer} for layer in range(2)]
    expected = inputs.with_fresh_out()
    reference_attention(**expected)
    for layer in layers:
        attend_paged(**layer)
        torch.testing.assert_close(layer["out"], expected["out"], atol=1e-5, rtol=1e-5)


def test_refuses_a_work_list_for_another_window(interpreter: str) -> None:
    inputs = build_attention(AttentionCase("x", ((1, 9),)), interpreter, torch.float32).arguments
    lengths = inputs["query_starts"], inputs["context_lens"]
    shape = {"num_heads": 4, "num_kv_heads": 2, "value_width": 16}
    work = plan_decode(*lengths, **shape, max_context_len=9, sliding_window=4)
    with pytest.raises(AssertionError, match="window"):
        attend_paged(**inputs | {"work": work})


def test_leaves_rows_past_the_last_sequence_alone(interpreter: str) -> None:
    inputs = build_attention(
        AttentionCase("tail", ((3, 9), (1, 5))), interpreter, torch.float32
    ).with_fresh_out()
    inputs["query"] = torch.cat([inputs["query"], torch.full_like(inputs["query"], float("nan"))])
    inputs["out"] = torch.cat([inputs["out"], inputs["out"]])
    attend_paged(**inputs)
    assert inputs["out"][:4].isfinite().all()
    assert inputs["out"][4:].isnan().all()


def test_takes_strided_query_and_out(interpreter: str) -> None:
    # A merged q/k/v product hands the query out as a slice of its rows.
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


def test_a_nan_in_one_sequence_stays_there(interpreter: str) -> None:
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
@pytest.mark.parametrize("group", [1, 4, 71])
def test_tiles_divide_pieces_and_hold_groups(
    group: int, widths: int, element_bytes: int, capability: int
) -> None:
    heads = Heads(group, widths, max(2, element_bytes), element_bytes, capability)
    assert tile_tokens(heads, most=128) * widths * element_bytes <= 32 * 2**10
    for config in (decode_config, chunk_config):
        shape = config(heads)
        assert DECODE_PIECE % shape.tile == 0
        assert shape.rows >= group
        assert shape.rows & (shape.rows - 1) == 0


def tiles(query_lens: list[int], tokens: int, **bounds: int) -> tuple[ChunkWork, list[list[int]]]:
    """The list of the chunks among sequences of so many query tokens, and its items."""
    starts = torch.tensor([0, *query_lens]).cumsum(0).int()
    work = plan_chunks(starts, tokens=tokens, **{"num_tokens": sum(query_lens)} | bounds)
    return work, work.items[: int(work.num_items)].tolist()


def test_tiles_are_those_of_chunks_alone_last_ones_first(interpreter: str) -> None:
    # However many decodes there are, the launch is of as many programs as the chunks have tiles.
    work, items = tiles([1] * 500 + [40, 1, 33, 2, 0], 16, num_tokens=75, max_chunks=3)
    assert items == [[500, 32], [500, 16], [500, 0], [502, 32], [502, 16], [502, 0], [503, 0]]
    assert len(work.items) == 75 // 16 + 3


def test_every_tile_is_listed_once(interpreter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunk_attention, "SEQUENCES_AT_ONCE", 4)  # in several rounds
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


@pytest.mark.parametrize("case", [INTERPRETED_ATTENTION_CASES[3]], ids=str)
def test_a_list_of_chunks_is_made_from_what_lies_on_the_device(
    case: AttentionCase, interpreter: str
) -> None:
    # As in a captured step: bounds that fit other lengths too, and programs that find no tile.
    arguments = build_attention(case, interpreter, torch.float32).with_fresh_out()
    chunks = plan_chunks(arguments["query_starts"], tokens=5, num_tokens=1000)
    expected = arguments | {"out": torch.empty_like(arguments["out"])}
    attend_paged(**arguments, chunks=chunks)
    reference_attention(**expected)
    torch.testing.assert_close(arguments["out"], expected["out"], atol=1e-5, rtol=1e-5)


def test_a_pool_of_more_rows_than_an_int32_counts(
    interpreter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = build_attention(INTERPRETED_ATTENTION_CASES[3], interpreter, torch.float32)
    few, many = inputs.with_fresh_out(), inputs.with_fresh_out()
    attend_paged(**few)
    monkeypatch.setattr(attention_loop, "_INT32_ROWS", 0)
    attend_paged(**many)
    assert torch.equal(few["out"], many["out"])


@pytest.mark.parametrize(
    ("context_len", "merged"), [(512, False), (513, True)], ids=["one_piece", "two_pieces"]
)
def test_contexts_of_one_piece_are_not_merged(
    context_len: int, merged: bool, interpreter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched: list[Partials] = []
    monkeypatch.setattr(decode_attention, "merge_partials", lambda p, **_: launched.append(p))
    case = AttentionCase("x", ((1, context_len), (1, 5)))
    attend_paged(**build_attention(case, interpreter, torch.float32).arguments)
    assert bool(launched) == merged


def test_refuses_caches_of_another_dtype(interpreter: str) -> None:
    inputs = build_attention(ATTENTION_CASES[0], interpreter, torch.float32).arguments
    with pytest.raises(AssertionError, match="dtype"):
        attend_paged(**inputs | {"query": inputs["query"].half()})
