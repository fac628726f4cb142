"""Checks the reference implementations against torch and against plain Python."""

import math

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from batchinfer.kernels import reference
from tests.kernels.cases import (
    INTERPRETED_ATTENTION_CASES,
    WRITE_CASES,
    AttentionCase,
    WriteCase,
    build_attention,
    build_write,
    reference_attention,
)

PLAIN_CASES = [case for case in INTERPRETED_ATTENTION_CASES if not (case.softcap or case.sinks)]


def run(case: AttentionCase) -> dict[str, torch.Tensor]:
    """Run the reference on a case in float32, and return its arguments."""
    arguments = build_attention(case, "cpu", torch.float32).with_fresh_out()
    reference_attention(**arguments)
    return arguments


def contiguous(
    arguments: dict[str, torch.Tensor], name: str, sequence: int, begin: int
) -> torch.Tensor:  # [Hkv, K, D]
    """Return a sequence's keys or values from position `begin` on."""
    cache, table = arguments[name], arguments["block_tables"][sequence].tolist()
    block_size, end = cache.shape[2], int(arguments["context_lens"][sequence])
    tokens = [cache[table[p // block_size], :, p % block_size] for p in range(begin, end)]
    return torch.stack(tokens, dim=1)


def end_of(position: int, case: AttentionCase, context_len: int) -> int:
    """Return one past the last position that a token sees: every other span is an image."""
    if case.image and position // case.image % 2 == 1:
        return min((position // case.image + 1) * case.image, context_len)
    return position + 1


@pytest.mark.parametrize("case", PLAIN_CASES, ids=str)
def test_reference_attention_equals_torch(case: AttentionCase) -> None:
    arguments = run(case)
    starts = arguments["query_starts"].tolist()
    for sequence, (query_len, context_len) in enumerate(case.lens):
        if query_len == 0 or context_len == 0:
            continue
        first = context_len - query_len
        window = case.sliding_window or context_len
        prompt = case.prompts[sequence] if case.prompts else 0
        begin = 0 if prompt else max(0, first - window + 1)
        mask = torch.tensor(
            [
                [
                    (j < prompt or p - window < j) and j < end_of(p, case, context_len)
                    for j in range(begin, context_len)
                ]
                for p in range(first, context_len)
            ]
        )
        rows = slice(starts[sequence], starts[sequence + 1])
        expected = scaled_dot_product_attention(
            arguments["query"][rows].transpose(0, 1),
            contiguous(arguments, "key_cache", sequence, begin),
            contiguous(arguments, "value_cache", sequence, begin),
            attn_mask=mask,
            scale=case.key_width**-0.5,
            enable_gqa=True,
        ).transpose(0, 1)
        torch.testing.assert_close(arguments["out"][rows], expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("sliding_window", [0, 3])
@pytest.mark.parametrize("softcap", [0.0, 0.7])
@pytest.mark.parametrize("sinks", [False, True])
def test_reference_attention_equals_plain_python(
    sliding_window: int, softcap: float, sinks: bool
) -> None:
    case = AttentionCase(
        "hand", ((3, 6), (1, 5)), num_heads=4, num_kv_heads=2, key_width=3, value_width=2,
        block_size=2, sliding_window=sliding_window, softcap=softcap, sinks=sinks,
    )  # fmt: skip
    arguments = run(case)
    row = 0
    for sequence, (query_len, context_len) in enumerate(case.lens):
        for position in range(context_len - query_len, context_len):
            for head in range(case.num_heads):
                expected = attend_in_plain_python(arguments, case, sequence, position, row, head)
                got = arguments["out"][row, head].tolist()
                assert got == pytest.approx(expected, rel=1e-5, abs=1e-6)
            row += 1


def attend_in_plain_python(
    arguments: dict[str, torch.Tensor],
    case: AttentionCase,
    sequence: int,
    position: int,
    row: int,
    head: int,
) -> list[float]:
    """Compute one output row in Python floats."""
    window = case.sliding_window or position + 1
    numerator, denominator = [0.0] * case.value_width, 0.0
    for j in range(max(0, position - window + 1), position + 1):
        slot = int(arguments["block_tables"][sequence, j // case.block_size])
        place = (slot, head // 2, j % case.block_size)
        query, key = arguments["query"][row, head].tolist(), arguments["key_cache"][place].tolist()
        score = sum(q * k for q, k in zip(query, key, strict=True)) / math.sqrt(case.key_width)
        if case.softcap:
            score = case.softcap * math.tanh(score / case.softcap)
        denominator += math.exp(score)
        for column, value in enumerate(arguments["value_cache"][place].tolist()):
            numerator[column] += math.exp(score) * value
    if case.sinks:
        denominator += math.exp(float(arguments["sinks"][head]))
    return [value / denominator for value in numerator]


def test_reference_attention_without_context_is_zero() -> None:
    out = run(AttentionCase("padding", ((1, 0), (1, 4), (0, 0)), sinks=True))["out"]
    assert (out[0] == 0).all()
    assert out[1].isfinite().all()


@pytest.mark.parametrize("case", WRITE_CASES, ids=str)
def test_reference_kv_write_stores_every_token_in_its_slot(case: WriteCase) -> None:
    pool, arguments = build_write(case, "cpu", torch.float32)
    expected = pool.clone()
    reference.kv_write(**arguments)
    key_elems = case.num_kv_heads * case.block_size * case.key_width
    for token, place in enumerate(arguments["slot_mapping"].tolist()):
        if place < 0:
            continue
        slot, offset = divmod(place, case.block_size)
        for name, start, width in (
            ("key", 0, case.key_width),
            ("value", key_elems, case.value_width),
        ):
            for head in range(case.num_kv_heads):
                first = start + (head * case.block_size + offset) * width
                expected[slot, first : first + width] = arguments[name][token, head]
    torch.testing.assert_close(pool, expected, rtol=0, atol=0, equal_nan=True)
