"""The sampling kernel draws the same tokens as its reference, for every filter and logit edit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from batchinfer.kernels import sample, sampling_reference
from batchinfer.kernels.penalties import EditedLogits
from tests.kernels.sample_cases import KINDS, Rows, build_sample

ROWS = (
    Rows(1, apart=2),
    Rows(2, apart=3),
    Rows(45),
    Rows(500, rounded=True),
    Rows(4097, padding=16 - 4097 % 16),
    Rows(9001, padding=3),
)
FLAT = (Rows(9000, 0.0), Rows(20_000, 0.3), Rows(20_000, 1.0, rounded=True))


def check(
    logits: torch.Tensor,
    kinds: list[dict[str, float]],
    device: str = "cpu",
    edits: EditedLogits | None = None,
    **options: Any,
) -> None:
    """Check that tokens and failures are equal, and log-probabilities equal up to rounding."""
    got, expected = (build_sample(logits, kinds, device) | options for _ in range(2))
    sample.sample(**got, edits=edits)
    sampling_reference.sample(**expected, edits=edits)
    for name in ("token_ids", "failures"):
        assert got[name].tolist() == expected[name].tolist(), name
    for name in ("maximum", "max_logprob", "logprobs"):
        torch.testing.assert_close(
            got[name], expected[name], rtol=1e-5, atol=1e-5, equal_nan=True, check_device=False
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("rows", ROWS, ids=str)
def test_sample_equals_reference(rows: Rows, dtype: torch.dtype, interpreter: str) -> None:
    check(rows.logits(len(KINDS), dtype, interpreter), list(KINDS.values()), interpreter)


@pytest.mark.parametrize("rows", FLAT, ids=str)
def test_sample_of_flat_rows_equals_reference(rows: Rows, interpreter: str) -> None:
    kinds = [KINDS[name] for name in ("top-p", "top-k of most", "a high temperature")]
    check(rows.logits(3, torch.float16, interpreter), kinds, interpreter)


def test_sample_equals_reference_if_thousands_of_tokens_are_tied(interpreter: str) -> None:
    """The last kept token is one of thousands of equally likely tokens."""
    logits = torch.zeros(4, 9000)
    logits[:, 100:2000:3] = 2.0
    kinds: list[dict[str, float]] = [
        {"top_k": 5000}, {"top_k": 5000, "top_p": 0.8}, {"top_p": 0.95}, {"top_k": 7000}
    ]  # fmt: skip
    check(logits, kinds, interpreter)


def test_sample_from_a_vocabulary_of_real_size(interpreter: str) -> None:
    kinds = [KINDS[name] for name in ("temperature", "top-k", "top-p")]
    check(Rows(151_936).logits(3, torch.float16, interpreter), kinds, interpreter)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("kind", ["greedy", "temperature", "top-p"])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_row_with_nan_or_infinity_fails_without_affecting_other_rows(
    bad: float, kind: str, interpreter: str
) -> None:
    logits = Rows(300).logits(3, torch.float32, interpreter)
    logits[1, slice(None) if bad == -torch.inf else 123] = bad
    arguments = build_sample(logits, [KINDS[kind]] * 3, interpreter)
    sample.sample(**arguments)
    assert arguments["failures"].reshape(3, 3).tolist() == [[0] * 3, [1] * 3, [0] * 3]
    assert arguments["token_ids"][3:6].tolist() == arguments["logprobs"][3:6].tolist() == [0] * 3
    alone = build_sample(logits[:1], [KINDS[kind]] * 3, interpreter)
    sample.sample(**alone)
    assert alone["token_ids"][6:].tolist() == arguments["token_ids"][6:].tolist()


def edits_of(logits: torch.Tensor, restricted: list[int]) -> EditedLogits:
    """Return edits that add 1 to every fifth logit, with NaN in values that must not be read."""
    present = torch.zeros(logits.shape[0], -(-logits.shape[1] // 32) * 32, dtype=torch.int64)
    present[:, : logits.shape[1] : 5] = 1
    words = (present.view(len(logits), -1, 32) << torch.arange(32)).sum(2)
    values = torch.full(logits.shape, torch.nan)
    values[:, ::5] = logits[:, ::5].float() + 1
    return EditedLogits(
        values, torch.where(words >= 2**31, words - 2**32, words).int(),
        torch.tensor(restricted, dtype=torch.int32),
    )  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("rows", [Rows(45), Rows(9001), Rows(9000, 0.1)], ids=str)
def test_sample_uses_edited_logits(rows: Rows, dtype: torch.dtype, interpreter: str) -> None:
    kinds = [KINDS[name] for name in ("greedy", "temperature", "top-k", "top-p")] * 2
    logits = rows.logits(len(kinds), dtype, interpreter)
    check(logits, kinds, interpreter, edits_of(logits, [0] * 4 + [1] * 4))


@pytest.mark.parametrize("kind", ["greedy", "temperature", "top-k"])
def test_sample_fails_if_edits_forbid_all_tokens(kind: str, interpreter: str) -> None:
    logits = Rows(45).logits(2, torch.float32, interpreter)
    edits = edits_of(logits, [1, 1])
    edits.logits[0].fill_(-torch.inf)
    arguments = build_sample(logits, [KINDS[kind]] * 2, interpreter)
    sample.sample(**arguments, edits=edits)
    assert arguments["failures"].tolist() == [0] * 3 + [sample.NO_TOKEN_LEFT] * 3


@pytest.mark.long
def test_random_number_at_the_border_of_two_tokens_selects_the_second(interpreter: str) -> None:
    """With 2^16 equally likely tokens, the upper 16 of 24 random bits are the token id."""
    count = 600
    arguments = build_sample(torch.zeros(1, 2**16), [{}], interpreter)
    for name in ("seed", "stream", "sample_index", "position", "token_ids", "logprobs", "failures"):
        arguments[name] = arguments[name][:1].repeat(count)
    order = torch.arange(count, dtype=torch.int32)
    arguments |= {"samples": order, "sample_index": order, "starts": torch.tensor([0, count])}
    sample.sample(**arguments, filters=False)
    bits = [
        sampling_reference.random_bits(
            *(arguments[name][k] for name in ("seed", "stream", "sample_index", "position"))
        )
        for k in range(count)
    ]
    assert any(number % 256 == 0 for number in bits)
    assert arguments["token_ids"].tolist() == [number >> 8 for number in bits]


def test_given_tokens_replace_draws(interpreter: str) -> None:
    logits = Rows(45, apart=46).logits(2, torch.float32, interpreter)
    given_ids = torch.tensor([-1, 9, -1, 0, -1, 44], dtype=torch.int32)
    check(logits, [KINDS["top-p"], KINDS["greedy"]], interpreter, given=given_ids)


@pytest.mark.parametrize("kind", ["greedy", "temperature", "min-p"])
def test_launches_without_filters_or_draws_equal_reference(kind: str, interpreter: str) -> None:
    logits = Rows(9001).logits(2, torch.float16, interpreter)
    check(logits, [KINDS[kind]] * 2, interpreter, filters=False, draws=kind != "greedy")


def test_sample_without_distributions(interpreter: str) -> None:
    check(Rows(45).logits(0, torch.float32, interpreter), [], interpreter)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "rows", [*ROWS, *FLAT, Rows(151_936), replace(ROWS[4], vocab=50_257, padding=15)], ids=str
)
def test_sample_equals_reference_on_gpu(rows: Rows, dtype: torch.dtype, gpu: str) -> None:
    """The reference, on the CPU, has the same integer weights except for one in 2^29."""
    logits = rows.logits(len(KINDS), dtype)
    got = build_sample(logits.to(gpu), list(KINDS.values()), gpu)
    expected = build_sample(logits, list(KINDS.values()))
    sample.sample(**got)
    sampling_reference.sample(**expected)
    assert got["token_ids"].tolist() == expected["token_ids"].tolist()
    torch.testing.assert_close(got["logprobs"].cpu(), expected["logprobs"], rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
def test_captured_launch_reads_new_inputs_on_gpu(gpu: str) -> None:
    kinds = list(KINDS.values())
    first, second = (Rows(9001, scale).logits(len(kinds), torch.bfloat16, gpu) for scale in (3, 1))
    arguments = build_sample(first.clone(), kinds, gpu)
    sample.sample(**arguments)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        sample.sample(**arguments)
    arguments["logits"].copy_(second)
    graph.replay()
    eager = build_sample(second, kinds, gpu)
    sample.sample(**eager)
    assert arguments["token_ids"].tolist() == eager["token_ids"].tolist()
