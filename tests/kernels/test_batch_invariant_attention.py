"""Batch-invariant attention matches its reference, and a token's bits depend on its context
alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from batchinfer.kernels import batch_invariant_attention as kernel_module
from batchinfer.kernels.batch_invariant_attention import batch_invariant_attention
from batchinfer.kernels.fp8 import FP8
from tests.kernels.batch_invariant_cases import batch_invariant_arguments
from tests.kernels.cases import (
    ATTENTION_CASES,
    INTERPRETED_ATTENTION_CASES,
    TOLERANCE,
    AttentionCase,
    build_attention,
    reference_attention,
)
from tests.kernels.interpreted_dot import sum_rows_alike

SHORT = 64  # positions per piece, so that a piece has few tiles
FEW = (
    *("no_query_and_padding", "window_within_chunk", "sinks", "everything"),
    *("key_wider_than_value", "images_and_window", "prompts"),
)
FEW_CASES = [case for case in INTERPRETED_ATTENTION_CASES if case.name in FEW]
# Fewer cases than for `paged_attention`, because each is compiled
LONG_CASES = [
    case
    for case in ATTENTION_CASES
    if case.name.startswith("many")
    or (case.block_size == 16 and case.num_splits is None and case.name.startswith("long"))
]


def check(case: AttentionCase, device: str, dtype: torch.dtype, piece: int | None = None) -> None:
    inputs = build_attention(case, device, dtype)
    expected = inputs.with_fresh_out()
    reference_attention(**expected)
    got = batch_invariant_arguments(inputs.with_fresh_out(), piece=piece)
    batch_invariant_attention(**got)
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(got["out"], expected["out"], atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("case", FEW_CASES, ids=str)
def test_batch_invariant_attention_equals_reference(case: AttentionCase, interpreter: str) -> None:
    check(case, interpreter, torch.float16, SHORT)


def test_batch_invariant_attention_equals_reference_in_float32(interpreter: str) -> None:
    check(AttentionCase("float32", ((7, 30), (1, 70))), interpreter, torch.float32, SHORT)


@pytest.mark.gpu
@pytest.mark.parametrize("case", [*INTERPRETED_ATTENTION_CASES, *LONG_CASES], ids=str)
def test_batch_invariant_attention_equals_reference_on_gpu(case: AttentionCase, gpu: str) -> None:
    check(case, gpu, torch.bfloat16)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("case", FEW_CASES, ids=str)
def test_batch_invariant_short_pieces_on_gpu(
    case: AttentionCase, dtype: torch.dtype, gpu: str
) -> None:
    check(case, gpu, dtype, SHORT)


def attend_spans(
    arguments: dict[str, Any], spans: list[tuple[int, int]], **plan: Any
) -> torch.Tensor:
    """Compute spans of one sequence's positions in one step; return the output of each position."""
    order = [position for span in spans for position in range(*span)]
    lens, ends = [stop - start for start, stop in spans], [stop for _, stop in spans]
    query = arguments["query"]
    starts = torch.tensor([0, *lens]).cumsum(0)
    step = arguments | {
        "query": query[order],
        "block_tables": arguments["block_tables"].expand(len(spans), -1),
        "query_starts": starts.to(query.device, torch.int32),
        "context_lens": torch.tensor(ends, dtype=torch.int32, device=query.device),
        "out": torch.full_like(arguments["out"][order], float("nan")),
    }
    step = batch_invariant_arguments(step, **plan)
    batch_invariant_attention(**step)
    out = torch.full_like(arguments["out"], float("nan"))
    out[order] = step["out"]
    return out


CONTEXT = 140
PLAIN = {"num_heads": 2, "num_kv_heads": 1, "key_width": 40}
VARIANTS = {
    "window_and_sinks": {**PLAIN, "sliding_window": 70, "sinks": True},
    "everything": {**PLAIN, "sliding_window": 20, "softcap": 3.0, "sinks": True, "block_size": 24},
}
# Spans of positions that one step computes
SPANS = {
    "chunks": [(start, min(start + 33, CONTEXT)) for start in range(0, CONTEXT, 33)],
    "backwards": [(131, 140), (130, 131), (64, 130), (1, 64), (0, 1)],
    "decodes": [(at, at + 1) for at in (0, 19, 63, 64, 65, 127, 139)],
}


def check_spans(shape: dict[str, Any], device: str, dtype: torch.dtype, fp8: bool = False) -> None:
    case = AttentionCase("whole", ((CONTEXT, CONTEXT),), **shape)
    arguments = build_attention(case, device, dtype, FP8 if fp8 else None).arguments
    whole = attend_spans(arguments, [(0, CONTEXT)], piece=SHORT)
    for name, spans in SPANS.items():
        for splits in (True, False) if name == "decodes" else (True,):
            out = attend_spans(arguments, spans, piece=SHORT, splits=splits)
            computed = [position for span in spans for position in range(*span)]
            assert torch.equal(out[computed], whole[computed]), (name, splits)


@pytest.mark.parametrize("shape", VARIANTS.values(), ids=VARIANTS.keys())
def test_bits_do_not_depend_on_chunks(
    shape: dict[str, Any], interpreter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sum_rows_alike(monkeypatch)
    check_spans(shape, interpreter, torch.float16)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shape", VARIANTS.values(), ids=VARIANTS.keys())
def test_bits_do_not_depend_on_chunks_on_gpu(
    shape: dict[str, Any], dtype: torch.dtype, gpu: str
) -> None:
    check_spans(shape, gpu, dtype)
    check_spans({**shape, "num_heads": 8, "num_kv_heads": 2, "key_width": 128}, gpu, dtype)


@pytest.mark.gpu
def test_bits_do_not_depend_on_chunks_with_float8_cache_on_gpu(gpu: str) -> None:
    check_spans({**PLAIN, "key_width": 128}, gpu, torch.bfloat16, fp8=True)


def test_decodes_are_not_split_if_the_workspace_is_too_small(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = AttentionCase("decodes", ((1, 257), (1, 20)))
    arguments = build_attention(case, "cpu", torch.float32).arguments
    assert batch_invariant_arguments(arguments, piece=SHORT)["work"].max_pieces == 5
    monkeypatch.setattr(kernel_module, "MAX_WORKSPACE_BYTES", 100)
    assert batch_invariant_arguments(arguments, piece=SHORT)["work"].max_pieces == 1
