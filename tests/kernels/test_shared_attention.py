"""Decodes that share prefixes match the reference, and list each shared piece once."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from batchinfer.kernels import decode_plan
from batchinfer.kernels.decode_plan import DecodeWork, plan_decode
from tests.kernels.cases import (
    TOLERANCE,
    AttentionCase,
    attend_paged,
    check_attention,
    reference_attention,
)
from tests.kernels.shared_cases import (
    INTERPRETED_SHARED_CASES,
    LONG_SHARED_CASES,
    SharedCase,
    build_shared,
)

PIECE = 64


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("case", INTERPRETED_SHARED_CASES, ids=str)
@pytest.mark.usefixtures("short_pieces")
def test_shared_prefixes_equal_reference(
    case: SharedCase, dtype: torch.dtype, interpreter: str
) -> None:
    check_attention(build_shared(case, interpreter, dtype))


@pytest.mark.gpu
@pytest.mark.parametrize("case", INTERPRETED_SHARED_CASES, ids=str)
@pytest.mark.usefixtures("short_pieces")
def test_shared_short_pieces_equal_reference_on_gpu(case: SharedCase, gpu: str) -> None:
    check_attention(build_shared(case, gpu, torch.bfloat16))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("case", LONG_SHARED_CASES, ids=str)
def test_shared_prefixes_equal_reference_on_gpu(
    case: SharedCase, dtype: torch.dtype, gpu: str
) -> None:
    check_attention(build_shared(case, gpu, dtype))


def plan(case: SharedCase, **options: Any) -> DecodeWork:
    query_lens, context_lens = zip(*case.attention.lens, strict=True)
    return plan_decode(
        torch.tensor([0, *query_lens]).cumsum(0).int(),
        torch.tensor(context_lens, dtype=torch.int32),
        order=torch.tensor(case.order, dtype=torch.int32),
        shared_lens=torch.tensor(case.shared_lens, dtype=torch.int32),
        num_heads=case.attention.num_heads,
        num_kv_heads=case.attention.num_kv_heads,
        value_width=16,
        max_context_len=max(context_lens),
        num_launches=2,
        **options,
    )


def listed(work: DecodeWork) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Return the single items (sequence, piece), and the shared items (place in order, piece)."""
    (num_single, *taken), (num_shared, *taken_shared) = work.counters.tolist()
    assert taken == taken_shared == [0, 0]
    items = [(int(first), int(piece)) for first, piece in work.items[: num_single + num_shared]]
    return items[:num_single], items[num_single:]


@pytest.mark.usefixtures("short_pieces", "interpreter")
def test_shared_piece_is_listed_once_per_tile() -> None:
    # With groups of 20 heads, a tile has 3 sequences. Sequences 3, 1, 2 and 0 share pieces.
    lens = ((1, 150), (1, 200), (1, 150), (1, 129), (1, 70))
    attention = AttentionCase("x", lens, num_heads=20, num_kv_heads=1)
    single, shared = listed(plan(SharedCase(attention, (3, 1, 2, 0, 4), (0, 128, 128, 64, 0))))
    assert shared == [(0, 0), (3, 0), (0, 1)]
    assert sorted(single) == [(0, 1), (0, 2), (1, 2), (1, 3), (2, 2), (3, 2), (4, 0), (4, 1)]


@pytest.mark.usefixtures("short_pieces", "interpreter")
@pytest.mark.parametrize("case", INTERPRETED_SHARED_CASES, ids=str)
def test_single_and_shared_items_cover_every_piece_once(
    case: SharedCase, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode_plan, "SEQUENCES_AT_ONCE", 4)
    window, splits = case.attention.sliding_window, case.attention.num_splits
    work = plan(case, sliding_window=window, num_splits=splits)
    single, shared = listed(work)
    computed = list(single)
    for place, piece in shared:
        tile = case.order[place : place + work.tile_sequences]
        lens = work.decode_shared[place + 1 : place + len(tile)].tolist()
        alike = next((i for i, n in enumerate(lens) if n < (piece + 1) * PIECE), len(lens))
        computed += [(sequence, piece) for sequence in tile[: alike + 1]]
    alone = plan(replace(case, shared_lens=(0,) * len(case.order)), num_splits=splits,
                 sliding_window=window)  # fmt: skip
    assert sorted(computed) == sorted(listed(alone)[0])
    assert bool(shared) == (case.attention.name not in ("window", "longer_pieces"))


@pytest.mark.usefixtures("short_pieces", "interpreter")
def test_work_list_follows_tensor_contents_as_in_a_captured_step() -> None:
    first = INTERPRETED_SHARED_CASES[3]
    second = replace(first, order=first.order[::-1], shared_lens=(0, 64, 0, 192, 160, 32))
    held = build_shared(first, "cpu", torch.float32)
    pools = {"key_cache", "value_cache"}
    for case in (first, second):
        fresh = build_shared(case, "cpu", torch.float32)
        for name, tensor in fresh.arguments.items():
            if isinstance(tensor, torch.Tensor) and name not in pools:
                held.arguments[name].copy_(tensor)
        held.pool.copy_(fresh.pool)
        got, expected = held.with_fresh_out(), fresh.with_fresh_out()
        attend_paged(**got)
        reference_attention(**expected)
        torch.testing.assert_close(got["out"], expected["out"], atol=1e-5, rtol=1e-5)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy warns of NaN in a maximum
@pytest.mark.usefixtures("short_pieces")
def test_nan_in_one_sequence_does_not_affect_sequences_that_share_its_prefix(
    interpreter: str,
) -> None:
    inputs = build_shared(INTERPRETED_SHARED_CASES[3], interpreter, torch.float32)
    arguments = inputs.with_fresh_out()
    slot = int(arguments["block_tables"][4, 6])  # after the shared prefix
    arguments["value_cache"][slot] = float("nan")
    arguments["query"][1] = float("nan")
    attend_paged(**arguments)
    assert arguments["out"].isnan().flatten(1).all(1).tolist() == [i in (1, 4) for i in range(6)]
    assert arguments["out"][[0, 2, 3, 5]].isfinite().all()
