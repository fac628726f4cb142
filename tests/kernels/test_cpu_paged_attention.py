"""Attention in C matches its reference, and a row's bits depend on its own context alone."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch

from batchinfer.kernels import reference
from batchinfer.kernels.cpu import compiled_library
from batchinfer.kernels.cpu import paged_attention as cpu_attention
from tests.kernels.cases import WRITE_CASES, AttentionCase, WriteCase, build_write
from tests.kernels.cpu_attention_cases import (
    CASES,
    CPU_CASES,
    MLA_CASES,
    ODD_CASES,
    TOLERANCE,
    check_attention,
    check_attention_over_fp8,
    check_mla,
    store,
)
from tests.kernels.mla_cases import MLACase

dtypes = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
pytestmark = pytest.mark.skipif(compiled_library.load() is None, reason="no C compiler here")


@dtypes
@pytest.mark.parametrize("case", CASES, ids=str)
def test_cpu_attention_equals_reference(case: AttentionCase, dtype: torch.dtype) -> None:
    check_attention(case, dtype)


@dtypes
@pytest.mark.parametrize("case", [*CPU_CASES[::3], *ODD_CASES], ids=str)
def test_cpu_attention_over_float8_equals_reference(
    case: AttentionCase, dtype: torch.dtype
) -> None:
    check_attention_over_fp8(case, dtype)


@pytest.mark.parametrize("width", [3, 16, 40])
def test_cpu_attention_converts_every_float8_exactly(width: int) -> None:
    """The output of a token that sees only one position is the value at this position."""
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    values = codes[:, None, None, None].expand(256, 1, 1, width).contiguous()
    table = torch.arange(256, dtype=torch.int32)[:, None]
    starts, lens = torch.arange(257, dtype=torch.int32), torch.ones(256, dtype=torch.int32)
    out = torch.empty(256, 1, width)
    zeros = torch.zeros_like(values.float()).to(values.dtype)
    query = torch.randn(256, 1, width)
    cpu_attention.paged_attention(query, zeros, values, table, starts, lens, scale=1.0, out=out)
    torch.testing.assert_close(out, values[:, 0].float(), rtol=0, atol=0, equal_nan=True)
    cpu_attention.paged_attention(query, values, zeros, table, starts, lens, scale=1.0, out=out)
    assert (out.isnan() == values[:, 0].float().isnan()).all()


@dtypes
@pytest.mark.parametrize(
    "case", [*WRITE_CASES, WriteCase("odd_widths_and_blocks", 7, 3, 13, 11, 3)], ids=str
)
def test_cpu_kv_write_equals_reference(case: WriteCase, dtype: torch.dtype) -> None:
    got, arguments = build_write(case, "cpu", dtype)
    cpu_attention.kv_write(**arguments)
    expected, wanted = build_write(case, "cpu", dtype)
    reference.kv_write(**wanted)
    for name, read in (
        ("key_cache", cpu_attention.read_keys),
        ("value_cache", cpu_attention.read_values),
    ):
        torch.testing.assert_close(
            read(arguments[name]), wanted[name], rtol=0, atol=0, equal_nan=True
        )
        arguments[name].copy_(wanted[name])
    torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("fp8", [False, True])
@dtypes
@pytest.mark.parametrize("block_size", [1, 2, 16])
@pytest.mark.parametrize(
    ("window", "prompt", "width"), [(0, 0, 64), (0, 0, 24), (37, 0, 64), (37, 150, 64)]
)
def test_token_bits_do_not_depend_on_chunks(
    dtype: torch.dtype, block_size: int, window: int, prompt: int, width: int, fp8: bool
) -> None:
    """Compute a prompt at once, in chunks, token by token, and with each token as a sequence."""
    torch.manual_seed(0)
    length, num_heads, num_kv_heads = 300, 6, 2
    blocks = -(-length // block_size)
    pool = torch.randn(blocks, 2, num_kv_heads, block_size, width)
    pool = pool.to(torch.float8_e4m3fn if fp8 else dtype)
    query = torch.randn(length, num_heads, width).to(dtype)
    table = torch.randperm(blocks, dtype=torch.int32)[None]

    def attend(chunk: int) -> torch.Tensor:
        out = torch.empty_like(query)
        for start in range(0, length, chunk):
            stop = min(start + chunk, length)
            cpu_attention.paged_attention(
                query[start:stop],
                pool[:, 0],
                pool[:, 1],
                table,
                torch.tensor([0, stop - start], dtype=torch.int32),
                torch.tensor([stop], dtype=torch.int32),
                scale=0.2,
                out=out[start:stop],
                sliding_window=window,
                prompt_lens=torch.tensor([prompt], dtype=torch.int32) if prompt else None,
            )
        return out

    def attend_as_sequences() -> torch.Tensor:
        out = torch.empty_like(query)
        cpu_attention.paged_attention(
            query,
            pool[:, 0],
            pool[:, 1],
            table.repeat(length, 1),
            torch.arange(length + 1, dtype=torch.int32),
            torch.arange(1, length + 1, dtype=torch.int32),
            scale=0.2,
            out=out,
            sliding_window=window,
            prompt_lens=torch.full((length,), prompt, dtype=torch.int32) if prompt else None,
        )
        return out

    whole = attend(length)
    for chunk in (1, 7, 64):
        assert torch.equal(attend(chunk), whole)
    assert torch.equal(attend_as_sequences(), whole)


@dataclass(frozen=True)
class Branches:
    """Sequences whose shared prefixes form a tree, in the order of the tree."""

    tokens: tuple[tuple[int, int], ...]  # (query tokens, context) of each sequence
    shared: tuple[int, ...]  # tokens shared with the previous sequence
    softcap: float = 0.0
    window: int = 0
    sinks: bool = False
    prompts: tuple[int, ...] | None = None  # of each sequence


_TREE = Branches(
    tokens=((1, 400), (1, 401), (5, 350), (1, 520), (70, 390), (1, 321), (1, 40), (1, 256)),
    shared=(0, 384, 320, 320, 320, 144, 16, 0),
)
BRANCHES = {
    "tree": _TREE,
    "softcap_and_sinks": replace(_TREE, softcap=2.0, sinks=True),
    "window_over_all": replace(_TREE, window=600),
    "window_inside": replace(_TREE, window=100),
    "prompts": replace(_TREE, window=30, prompts=(390, 320, 330, 400, 100, 144, 40, 0)),
    "many": Branches(tuple((1, 300 + i % 7) for i in range(90)), (0, *[256, 256, 288] * 29, 64, 0)),
}


@pytest.mark.parametrize("fp8", [False, True])
@dtypes
@pytest.mark.parametrize("width", [64, 24])
@pytest.mark.parametrize("branches", BRANCHES.values(), ids=BRANCHES.keys())
def test_shared_prefixes_change_no_bits(
    branches: Branches, width: int, dtype: torch.dtype, fp8: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compare runs with and without `order`, and with the sequences reversed."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)  # so that tasks are large
    torch.manual_seed(0)
    block_size, num_heads, num_kv_heads = 16, 6, 2
    query_lens, context_lens = (list(x) for x in zip(*branches.tokens, strict=True))
    tables = tables_of(branches, block_size)
    pool = torch.randn(int(tables.max()) + 1, 2, num_kv_heads, block_size, width)
    pool = pool.to(torch.float8_e4m3fn if fp8 else dtype)
    queries = [torch.randn(n, num_heads, width).to(dtype) for n in query_lens]
    prompts = None if branches.prompts is None else torch.tensor(branches.prompts).int()

    def attend(order: list[int], *, shares: bool) -> list[torch.Tensor]:
        """Return the output of each sequence; ``order`` is their order in the step."""
        query = torch.cat([queries[at] for at in order])
        lens = [query_lens[at] for at in order]
        out = torch.full_like(query, torch.nan)
        place = torch.tensor(order).argsort().int()
        cpu_attention.paged_attention(
            query,
            pool[:, 0],
            pool[:, 1],
            tables[order].contiguous(),
            torch.tensor([0, *lens]).cumsum(0).int(),
            torch.tensor([context_lens[at] for at in order]).int(),
            scale=0.2,
            out=out,
            softcap=branches.softcap,
            sliding_window=branches.window,
            sinks=torch.linspace(-1, 1, num_heads) if branches.sinks else None,
            order=place if shares else None,
            shared_lens=torch.tensor(branches.shared).int() if shares else None,
            prompt_lens=prompts if prompts is None else prompts[order].contiguous(),
        )
        by_place = out.split(lens)
        return [by_place[at] for at in place.tolist()]

    in_order = list(range(len(query_lens)))
    apart = attend(in_order, shares=False)
    for order in (in_order, in_order[::-1]):
        for alone, combined_output in zip(apart, attend(order, shares=True), strict=True):
            assert torch.equal(alone, combined_output)


def tables_of(branches: Branches, block_size: int) -> torch.Tensor:
    """Return block tables [S, width] with the shared blocks that ``branches`` describes."""
    longest = max(context for _, context in branches.tokens)
    width = -(-longest // block_size)
    tables = torch.arange(len(branches.tokens) * width, dtype=torch.int32).view(-1, width)
    for at, shared in enumerate(branches.shared):
        if at:
            tables[at, : shared // block_size] = tables[at - 1, : shared // block_size]
    return tables


@dtypes
def test_nan_in_later_tokens_does_not_affect_earlier_tokens(dtype: torch.dtype) -> None:
    pool = torch.randn(1, 2, 1, 16, 64).to(dtype)
    pool[:, :, :, 9:] = torch.nan
    store(pool[:, 0], pool[:, 1])
    query, out = torch.randn(12, 3, 64).to(dtype), torch.empty(12, 3, 64, dtype=dtype)
    starts, lens = torch.tensor([0, 12]).int(), torch.tensor([12]).int()
    table = torch.zeros(1, 1, dtype=torch.int32)
    cpu_attention.paged_attention(
        query, pool[:, 0], pool[:, 1], table, starts, lens, scale=0.1, out=out
    )
    assert out[:9].isfinite().all()
    assert out[9:].isnan().all()


def test_cpu_attention_with_all_available_instructions() -> None:
    for name in cpu_attention.available(torch.bfloat16):
        check_attention(CASES[0], torch.bfloat16, cpu_attention.kernel_of(torch.bfloat16, name))
    with pytest.raises(ValueError, match="slide rule cannot be used on this machine"):
        cpu_attention.kernel_of(torch.bfloat16, "slide rule")


@dtypes
@pytest.mark.parametrize("case", MLA_CASES, ids=str)
def test_cpu_attention_over_latents_equals_reference(case: MLACase, dtype: torch.dtype) -> None:
    check_mla(case, dtype)
