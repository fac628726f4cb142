"""A float8 KV cache: conversions, writes, and attention."""

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
    TOLERANCE,
    WRITE_CASES,
    AttentionCase,
    AttentionInputs,
    WriteCase,
    attend_paged,
    build_attention,
    build_copy,
    build_write,
    check_attention,
    transposed,
)
from tests.kernels.gpu_or_interpreter import on_both, on_both_devices
from tests.kernels.row_cases import ROTARY_CASES, RotaryCase, build_rotary_write
from tests.kernels.shared_cases import INTERPRETED_SHARED_CASES, SharedCase, build_shared

ATTENTION_CASES = [
    case
    for case in INTERPRETED_ATTENTION_CASES
    if case.name in ("decodes_split", "mixed", "no_query_and_padding", "everything", "window_of_1")
]
SHARED = INTERPRETED_SHARED_CASES[1]
SIXTEEN_BIT = [torch.float16, torch.bfloat16]
float16_on_both = on_both(compiled=SIXTEEN_BIT)


pytestmark = pytest.mark.usefixtures("short_pieces")


@triton.jit
def _there_and_back(x_ptr, code_ptr, back_ptr, SIZE: tl.constexpr):  # noqa: N803
    places = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    code = narrow(tl.load(x_ptr + places), tl.uint8)
    tl.store(code_ptr + places, code)
    tl.store(back_ptr + places, widen(code, tl.float32))


@on_both_devices
def test_float8_conversion_rounds_like_torch_and_saturates(device: str) -> None:
    """Convert all float16 numbers, and midpoints between adjacent float8 numbers, as float32."""
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


def rows_of_many_sizes() -> torch.Tensor:
    """Return bfloat16 numbers as float32 [16, 16], with a row of 0, a NaN and an infinity."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(16, 16, generator=generator)
    x *= 2.0 ** torch.randint(-20, 20, (16, 16), generator=generator)  # within a row
    x *= 2.0 ** torch.arange(-104, 104, 13)[:, None]  # from row to row
    x[3], x[4, 5], x[5, 6] = 0, torch.nan, -torch.inf
    return x.bfloat16().float()


@triton.jit
def _through_float16(x_ptr, back_ptr, SIZE: tl.constexpr):  # noqa: N803
    places = tl.arange(0, SIZE)[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    half, down = in_float16(tl.load(x_ptr + places))
    tl.store(back_ptr + places, half.to(tl.float32) * down[:, None])


def test_bfloat16_query_in_float16_is_exact_relative_to_its_row_maximum(interpreter: str) -> None:
    x = rows_of_many_sizes().to(interpreter)
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


@on_both_devices
def test_bfloat16_query_is_a_sum_of_two_float8(device: str) -> None:
    if device == "cuda" and not converts_fp8(torch.device(device)):
        pytest.skip("the device has no float8")
    x = rows_of_many_sizes().to(device)
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


@float16_on_both
@pytest.mark.parametrize("case", WRITE_CASES, ids=str)
def test_kv_write_to_float8_equals_reference(
    case: WriteCase, dtype: torch.dtype, device: str
) -> None:
    pools = []
    for write in (kv_write, reference.kv_write):
        pool, arguments = build_write(case, device, dtype, FP8)
        arguments["key"].mul_(300)
        arguments["value"].mul_(0.01)
        arguments["value"][1::2, -1, 3:5] = torch.nan
        write(**arguments)
        pools.append(pool.float())
    torch.testing.assert_close(*pools, rtol=0, atol=0, equal_nan=True)


@float16_on_both
@pytest.mark.parametrize("case", ROTARY_CASES, ids=str)
def test_rotary_write_to_float8_equals_reference(
    case: RotaryCase, dtype: torch.dtype, device: str
) -> None:
    pool, got = build_rotary_write(case, device, dtype, FP8)
    expected_pool, expected = build_rotary_write(case, device, dtype, FP8)
    for arguments in (got, expected):
        arguments["qkv"][1::2, -3] = torch.nan  # NaN in the last head's value
    rotary_write(**got)
    reference.rotary_write(**expected)
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(
        got["qkv"], expected["qkv"], rtol=tolerance, atol=tolerance, equal_nan=True
    )
    # Sums that differ in their last bit may round to adjacent float8 numbers.
    pool, expected_pool = pool.float(), expected_pool.float()
    torch.testing.assert_close(pool, expected_pool, rtol=0.126, atol=2**-9, equal_nan=True)
    assert (pool != expected_pool).sum() - pool.isnan().sum() <= 1e-3 * pool.numel()


def build_inputs(
    case: AttentionCase | SharedCase, device: str, dtype: torch.dtype
) -> AttentionInputs:
    if isinstance(case, AttentionCase):
        return build_attention(case, device, dtype, FP8)
    return build_shared(case, device, dtype, FP8)


@on_both(compiled=())
@pytest.mark.parametrize("case", [*ATTENTION_CASES, SHARED], ids=str)
def test_attention_over_float8_equals_reference(
    case: AttentionCase | SharedCase, dtype: torch.dtype, device: str
) -> None:
    check_attention(build_inputs(case, device, dtype))


@on_both(interpreted=(), compiled=SIXTEEN_BIT)
@pytest.mark.parametrize("case", [*INTERPRETED_ATTENTION_CASES, *INTERPRETED_SHARED_CASES], ids=str)
def test_attention_over_float8_equals_reference_on_gpu(
    case: AttentionCase | SharedCase, dtype: torch.dtype, device: str
) -> None:
    check_attention(build_inputs(case, device, dtype))


@pytest.mark.parametrize("case", [*ATTENTION_CASES, SHARED], ids=str)
def test_decodes_with_float8_gemms_equal_reference(
    case: AttentionCase | SharedCase, interpreter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decode as on an H100, but in float16: Triton's interpreter computes bfloat16 wrongly."""
    seen, original = [], decode_attention.multiplies_float8

    def multiplies_float8(query: torch.dtype, heads: Heads, *, transposed: bool) -> bool:
        seen.append(original(torch.bfloat16, heads, transposed=transposed))
        return seen[-1]

    monkeypatch.setattr(decode_attention, "multiplies_float8", multiplies_float8)
    inputs = build_inputs(case, interpreter, torch.float16)
    query = inputs.arguments["query"]
    query.copy_(query.bfloat16())
    check_attention(inputs)
    assert seen == [True]


def split_at(
    scores: torch.Tensor,
    values: torch.Tensor,
    device: str,
    monkeypatch: pytest.MonkeyPatch,
    num_splits: int | None = 1,
    block_size: int = 16,
) -> torch.Tensor:
    """Return the output of one head with these scores; all columns of its values are `values`."""
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
def test_float8_weights_match_their_values_for_all_tile_and_block_sizes(
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
def test_float8_weights_keep_small_weights_if_another_tile_has_large_ones(
    first: float, interpreter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first token of a text often has nearly all the attention weight.

    Weights are rounded to multiples of 2^-18 of the largest weight in their tile, so each may be
    off by half of that.
    """
    lost = 64 * 2.0**-19
    scores, values = torch.zeros(512), torch.ones(512)
    scores[0], values[0] = first, 0
    expected = scores.softmax(0) @ values
    out = split_at(scores, values, interpreter, monkeypatch)
    torch.testing.assert_close(out, expected, rtol=2e-3, atol=lost)
    last = split_at(scores.flip(0), values.flip(0), interpreter, monkeypatch)
    torch.testing.assert_close(last, expected, rtol=2e-3, atol=lost)


def test_float8_gemms_propagate_nan_of_a_key(
    interpreter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    scores = torch.zeros(128)
    scores[70] = torch.nan
    assert split_at(scores, torch.ones(128), interpreter, monkeypatch).isnan()


def test_block_copy_keeps_float8_bits(interpreter: str) -> None:
    arguments = build_copy(COPY_CASES[1], interpreter, FP8)
    expected = arguments["pool"].view(torch.uint8).clone()
    reference.block_copy(expected, arguments["pairs"])
    block_copy(**arguments)
    assert torch.equal(arguments["pool"].view(torch.uint8), expected)
