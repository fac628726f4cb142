"""A cache of float8: what is written, and what attention reads of it."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from batchinfer.kernels import decode_attention, decode_plan, reference
from batchinfer.kernels.attention_loop import Heads
from batchinfer.kernels.block_copy import block_copy
from batchinfer.kernels.fp8 import FP8, converts_fp8, in_float16, narrow, widen
from batchinfer.kernels.fp8_decode_attention import split_float8
from batchinfer.kernels.kv_write import kv_write
from batchinfer.kernels.rotary_write import rotary_write
from tests.kernels.cases import (
    COPY_CASES,
    INTERPRETED_ATTENTION_CASES,
    WRITE_CASES,
    AttentionCase,
    WriteCase,
    attend_paged,
    build_attention,
    build_copy,
    build_write,
    reference_attention,
    transposed,
)
from tests.kernels.gpu_or_interpreter import on_both
from tests.kernels.row_cases import ROTARY_CASES, RotaryCase, build_rotary_write
from tests.kernels.shared_cases import INTERPRETED_SHARED_CASES, SharedCase, build_shared

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
ATTENTION_CASES = [
    case
    for case in INTERPRETED_ATTENTION_CASES
    if case.name in ("decodes_split", "mixed", "no_query_and_padding", "everything", "window_of_1")
]
SHARED = INTERPRETED_SHARED_CASES[1]
SIXTEEN_BIT = [torch.float16, torch.bfloat16]
places = on_both(compiled=SIXTEEN_BIT)


@pytest.fixture(autouse=True)
def short_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut contexts of a few tiles into pieces, as long ones are."""
    monkeypatch.setattr(decode_plan, "DECODE_PIECE", 64)


@triton.jit
def _there_and_back(x_ptr, code_ptr, back_ptr, SIZE: tl.constexpr):  # noqa: N803
    places = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    code = narrow(tl.load(x_ptr + places), tl.uint8)
    tl.store(code_ptr + places, code)
    tl.store(back_ptr + places, widen(code, tl.float32))


def check_formula(device: str) -> None:
    """Every float16, and the middles between neighbours of the format, in float32."""
    halves = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.float16).float()
    codes = torch.arange(127, dtype=torch.uint8).view(FP8).float()
    middles = torch.stack([(codes[1:] + codes[:-1]) / 2 * (1 + e) for e in (-1e-6, 0.0, 1e-6)])
    x = torch.cat([halves, middles.flatten(), -middles.flatten()])
    x = torch.cat([x, torch.zeros(-len(x) % 1024)]).to(device)
    code, back = torch.empty_like(x, dtype=torch.uint8), torch.empty_like(x)
    _there_and_back[(len(x) // 1024,)](x, code, back, SIZE=1024)
    expected = reference.stored(x, FP8)
    assert torch.equal(code.view(FP8).isnan(), x.isnan())
    numbers = ~x.isnan()
    assert torch.equal(code[numbers], expected.view(torch.uint8)[numbers])
    torch.testing.assert_close(back, expected.float(), rtol=0, atol=0, equal_nan=True)


def test_rounds_as_torch_does_and_saturates(interpreter: str) -> None:
    check_formula(interpreter)


@pytest.mark.gpu
def test_rounds_as_torch_does_and_saturates_on_a_gpu(gpu: str) -> None:
    check_formula(gpu)


@triton.jit
def _through_float16(x_ptr, back_ptr, SIZE: tl.constexpr):  # noqa: N803
    places = tl.arange(0, SIZE)[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    half, down = in_float16(tl.load(x_ptr + places))
    tl.store(back_ptr + places, half.to(tl.float32) * down[:, None])


def test_a_bfloat16_query_is_exact_in_float16_beside_its_rows_largest(interpreter: str) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(16, 16, generator=generator)
    x *= 2.0 ** torch.randint(-20, 20, (16, 16), generator=generator)  # within a row
    x *= 2.0 ** torch.arange(-104, 104, 13)[:, None]  # from row to row
    x[3], x[4, 5], x[5, 6] = 0, torch.nan, -torch.inf
    x = x.bfloat16().float().to(interpreter)
    back = torch.empty_like(x)
    _through_float16[(1,)](x, back, SIZE=16)
    finite = x.isfinite().all(1)
    largest = x[finite].abs().amax(1, keepdim=True)
    assert ((back - x)[finite].abs() <= largest * 2.0**-39).all()
    assert back[4, 5].isnan()
    assert not back[5, 6].isfinite()


@triton.jit
def _through_split(x_ptr, back_ptr, CACHE_TYPE: tl.constexpr, SIZE: tl.constexpr):  # noqa: N803
    rows, columns = tl.arange(0, SIZE)[:, None], tl.arange(0, SIZE)[None, :]
    upper, lower, down = split_float8(tl.load(x_ptr + rows * SIZE + columns), CACHE_TYPE)
    back_ptr += rows * SIZE + columns
    upper, lower = upper.to(CACHE_TYPE, bitcast=True), lower.to(CACHE_TYPE, bitcast=True)
    tl.store(back_ptr, widen(upper, tl.float32) * down[:, None])
    tl.store(back_ptr + SIZE * SIZE, widen(lower, tl.float32) * down[:, None])


def check_split(device: str) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(16, 16, generator=generator)
    x *= 2.0 ** torch.randint(-20, 20, (16, 16), generator=generator)  # within a row
    x *= 2.0 ** torch.arange(-104, 104, 13)[:, None]  # from row to row
    x[3], x[4, 5], x[5, 6] = 0, torch.nan, -torch.inf
    x = x.bfloat16().float().to(device)
    back = torch.full((32, 16), torch.nan, device=device)
    stored = tl.float8e4nv if device == "cuda" else tl.uint8
    _through_split[(1,)](x, back, CACHE_TYPE=stored, SIZE=16)
    total = back[:16] + back[16:]
    finite = x.isfinite().all(1)
    largest = x[finite].abs().amax(1, keepdim=True)
    assert ((total - x)[finite].abs() <= largest * 2.0**-17).all()
    near = x[finite].abs() >= largest * 2.0**-9
    assert torch.equal(total[finite][near], x[finite][near])
    assert total[4, 5].isnan()
    assert total[5].isnan().all()


def test_a_bfloat16_query_is_the_sum_of_two_of_float8(interpreter: str) -> None:
    check_split(interpreter)


@pytest.mark.gpu
def test_a_bfloat16_query_is_the_sum_of_two_of_float8_on_a_gpu(gpu: str) -> None:
    if not converts_fp8(torch.device(gpu)):
        pytest.skip("the device has no float8")
    check_split(gpu)


@places
@pytest.mark.parametrize("case", WRITE_CASES, ids=str)
def test_kv_write(case: WriteCase, dtype: torch.dtype, device: str) -> None:
    pools = []
    for write in (kv_write, reference.kv_write):
        pool, arguments = build_write(case, device, dtype, FP8)
        arguments["key"].mul_(300)
        arguments["value"].mul_(0.01)
        arguments["value"][1::2, -1, 3:5] = torch.nan
        write(**arguments)
        pools.append(pool.float())
    torch.testing.assert_close(*pools, rtol=0, atol=0, equal_nan=True)


@places
@pytest.mark.parametrize("case", ROTARY_CASES, ids=str)
def test_rotary_write(case: RotaryCase, dtype: torch.dtype, device: str) -> None:
    pool, got = build_rotary_write(case, device, dtype, FP8)
    expected_pool, expected = build_rotary_write(case, device, dtype, FP8)
    for arguments in (got, expected):
        arguments["qkv"][1::2, -3] = torch.nan  # of the last head's value
    rotary_write(**got)
    reference.rotary_write(**expected)
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(
        got["qkv"], expected["qkv"], rtol=tolerance, atol=tolerance, equal_nan=True
    )
    # Sums that differ in their last bit may round to neighbours.
    pool, expected_pool = pool.float(), expected_pool.float()
    torch.testing.assert_close(pool, expected_pool, rtol=0.126, atol=2**-9, equal_nan=True)
    assert (pool != expected_pool).sum() - pool.isnan().sum() <= 1e-3 * pool.numel()


def check_attention(case: AttentionCase | SharedCase, device: str, dtype: torch.dtype) -> None:
    if isinstance(case, AttentionCase):
        inputs = build_attention(case, device, dtype, FP8)
    else:
        inputs = build_shared(case, device, dtype, FP8)
    got, expected = inputs.with_fresh_out(), inputs.with_fresh_out()
    attend_paged(**got)
    reference_attention(**expected)
    assert expected["out"].isfinite().all()
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(got["out"], expected["out"], atol=tolerance, rtol=tolerance)


@on_both(compiled=())
@pytest.mark.parametrize("case", [*ATTENTION_CASES, SHARED], ids=str)
def test_attention(case: AttentionCase | SharedCase, dtype: torch.dtype, device: str) -> None:
    check_attention(case, device, dtype)


@on_both(interpreted=(), compiled=SIXTEEN_BIT)
@pytest.mark.parametrize("case", [*INTERPRETED_ATTENTION_CASES, *INTERPRETED_SHARED_CASES], ids=str)
def test_attention_on_a_gpu(
    case: AttentionCase | SharedCase, dtype: torch.dtype, device: str
) -> None:
    check_attention(case, device, dtype)


@pytest.mark.parametrize("case", [*ATTENTION_CASES, SHARED], ids=str)
def test_decodes_of_split_queries(
    case: AttentionCase | SharedCase, interpreter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As they are on an H100, with float16 for the bfloat16 that cannot be interpreted."""
    seen, original = [], decode_attention.multiplies_float8

    def multiplies_float8(query: torch.dtype, heads: Heads, *, transposed: bool) -> bool:
        seen.append(original(torch.bfloat16, heads, transposed=transposed))
        return seen[-1]

    monkeypatch.setattr(decode_attention, "multiplies_float8", multiplies_float8)
    if isinstance(case, AttentionCase):
        inputs = build_attention(case, interpreter, torch.float16, FP8)
    else:
        inputs = build_shared(case, interpreter, torch.float16, FP8)
    query = inputs.arguments["query"]
    query.copy_(query.bfloat16())
    got, expected = inputs.with_fresh_out(), inputs.with_fresh_out()
    attend_paged(**got)
    reference_attention(**expected)
    tolerance = TOLERANCE[torch.float16]
    torch.testing.assert_close(got["out"], expected["out"], atol=tolerance, rtol=tolerance)
    assert seen == [True]


def split_at(
    scores: torch.Tensor,
    values: torch.Tensor,
    device: str,
    monkeypatch: pytest.MonkeyPatch,
    num_splits: int | None = 1,
    block_size: int = 16,
) -> torch.Tensor:
    """Output of one head whose scores and values of one column are these."""
    num_slots = len(scores) // block_size
    by_blocks = (num_slots, 1, block_size, 1)
    key_cache = scores.view(by_blocks).repeat(1, 1, 1, 16) / 16
    value_cache = transposed(values.view(by_blocks).repeat(1, 1, 1, 16).to(device, FP8))
    value_cache.copy_(values.view(by_blocks).to(FP8))
    monkeypatch.setattr(decode_attention, "multiplies_float8", lambda *_, **__: True)
    query = torch.full((1, 1, 16), 64.0, dtype=torch.float16, device=device)
    out = torch.full_like(query, torch.nan)
    attend_paged(
        query=query,
        key_cache=key_cache.to(device, FP8),
        value_cache=value_cache,
        block_tables=torch.arange(num_slots, dtype=torch.int32, device=device)[None],
        query_starts=torch.tensor([0, 1], dtype=torch.int32, device=device),
        context_lens=torch.tensor([len(scores)], dtype=torch.int32, device=device),
        scale=1 / 64,
        out=out,
        max_query_len=1,
        max_context_len=len(scores),
        num_splits=num_splits,
    )
    return out[0, 0, 0].float()


@pytest.mark.parametrize(
    ("tile", "block_size"),
    [(32, 16), (64, 16), (128, 16), (256, 16), (256, 8), (128, 2), (64, 24), (32, 128)],
)
def test_split_weights_meet_their_values_in_tiles_of(
    tile: int, block_size: int, interpreter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode_plan, "DECODE_PIECE", tile)
    generator = torch.Generator().manual_seed(0)
    tokens = 512 // block_size * block_size
    scores = torch.randint(-16, 16, (tokens,), generator=generator) / 8
    values = torch.randn(tokens, generator=generator).to(FP8).float()
    out = split_at(scores, values, interpreter, monkeypatch, num_splits=None, block_size=block_size)
    torch.testing.assert_close(out, scores.softmax(0) @ values, rtol=2e-3, atol=1e-4)


@pytest.mark.parametrize("first", [0.0, 12.0, 14.0, 104.0])
def test_split_weights_keep_small_ones_beside_large_ones_of_another_tile(
    first: float, interpreter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the first token of a text often has nearly all of the weight, and many others the rest.

    Of a tile's weights what is below 2^-18 of its largest may be lost, half of it on both sides.
    """
    lost = 64 * 2.0**-19
    scores, values = torch.zeros(512), torch.ones(512)
    scores[0], values[0] = first, 0
    expected = scores.softmax(0) @ values
    out = split_at(scores, values, interpreter, monkeypatch)
    torch.testing.assert_close(out, expected, rtol=2e-3, atol=lost)
    last = split_at(scores.flip(0), values.flip(0), interpreter, monkeypatch)
    torch.testing.assert_close(last, expected, rtol=2e-3, atol=lost)


def test_a_split_query_sees_a_key_of_nan(interpreter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    scores = torch.zeros(128)
    scores[70] = torch.nan
    assert split_at(scores, torch.ones(128), interpreter, monkeypatch).isnan()


def test_blocks_are_copied_bit_by_bit(interpreter: str) -> None:
    arguments = build_copy(COPY_CASES[1], interpreter, FP8)
    expected = arguments["pool"].view(torch.uint8).clone()
    reference.block_copy(expected, arguments["pairs"])
    block_copy(**arguments)
    assert torch.equal(arguments["pool"].view(torch.uint8), expected)
