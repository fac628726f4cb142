"""Sampling on CUDA draws the same tokens as on a CPU, in few launches and without waiting."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from batchinfer.engine.step import SamplingBatch
from batchinfer.worker.cuda_graphs.sync_watch import SyncWatch
from batchinfer.worker.sampling import on_device
from batchinfer.worker.sampling.logits_processors import forbid_masked
from batchinfer.worker.sampling.logprobs import row_stats
from batchinfer.worker.sampling.on_device import draw_on_device, workspace_bytes
from batchinfer.worker.sampling.output import NO_TOKEN_LEFT, Draws
from batchinfer.worker.sampling.sampler import Sampler
from tests.worker.on_triton import pretend_cuda, traced
from tests.worker.sampling.sampling_batches import Sample, make_batch

PLAIN = [
    Sample(row=0, temperature=0),
    Sample(row=1, stream=1),
    Sample(row=2, stream=2, top_p=0.9, seed=2**63 + 5),
    Sample(row=2, stream=2, index=1, top_p=0.9),
    Sample(row=2, stream=2, index=2, top_p=0.9, top_k=20),
    Sample(row=3, stream=3, top_k=50, position=9),
    Sample(row=4, stream=2**64 - 1, min_p=0.05, temperature=0.6),
]
EDITED = [
    Sample(row=5, stream=5, bias={7: 4.0, 8: -np.inf}, top_p=0.99),
    Sample(row=6, stream=6, presence=1.0, repetition=1.2, prompt=[1, 2, 3], output=[4, 4]),
    Sample(row=6, stream=6, index=1, frequency=0.5, prompt=[1], output=[9, 9, 8]),
    Sample(row=7, stream=7, allowed=[5, 100, 250]),
    Sample(row=8, temperature=0, allowed=[5, 100, 250], bias={5: 1.0}),
    Sample(row=8, allowed=[5], bias={5: -np.inf}),
    Sample(row=9, temperature=0, repetition=3.0, prompt=list(range(1, 290))),
]


def normal(rows: int = 10, vocab: int = 300, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return 3 * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(3)).to(dtype)


def check(draws: Draws, logits: torch.Tensor, batch: SamplingBatch) -> None:
    """Check that the tokens equal the CPU's, and other results up to rounding."""
    expected = Sampler()(logits.clone(), batch).result()
    assert draws.token_ids.tolist() == expected.token_ids.tolist()
    assert (draws.failures != 0).tolist() == expected.nonfinite.tolist()
    assert (draws.failures == NO_TOKEN_LEFT).tolist() == expected.no_token_left.tolist()
    np.testing.assert_allclose(draws.logprobs, expected.logprobs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(
    "samples",
    [PLAIN[:1], PLAIN, EDITED, [*PLAIN, *EDITED]],
    ids=["greedy", "plain", "edited", "all"],
)
def test_tokens_equal_the_cpus(samples: list[Sample], dtype: torch.dtype) -> None:
    logits, batch = normal(dtype=dtype), make_batch(samples)
    check(draw_on_device(logits, batch), logits, batch)
    assert logits.equal(normal(dtype=dtype))


@pytest.mark.parametrize("at_a_time", [1, 3])
def test_small_groups_give_the_same_edited_samples(
    at_a_time: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(on_device, "_EDITED_ELEMENTS", at_a_time * 300)
    batch = make_batch([*EDITED, *PLAIN])
    check(draw_on_device(normal(), batch), normal(), batch)


def test_given_tokens_are_taken() -> None:
    given_ids = np.full(len(PLAIN), -1, np.int32)
    given_ids[[1, 4]] = 17, 299
    batch = dataclasses.replace(make_batch(PLAIN), given_token_ids=given_ids)
    draws = draw_on_device(normal(), batch)
    check(draws, normal(), batch)
    assert draws.token_ids[[1, 4]].tolist() == [17, 299]


@pytest.mark.parametrize("rows", [1, 5])
def test_result_tensors_are_aligned_for_any_number_of_rows(
    rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits = normal(rows)
    drawn = draw_on_device(logits, make_batch([Sample(row=row) for row in range(rows)]))
    pretend_cuda(monkeypatch)
    for stats in (drawn.stats, row_stats(logits, rows)[0]):
        assert [t.data_ptr() % 16 for t in (stats.maximum, stats.max_logprob)] == [0, 0]


def test_masked_tokens_are_not_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, masks = np.array([1, 6], np.int32), np.array([[5, -7], [1, 2]], np.int32)
    batch = dataclasses.replace(make_batch([*PLAIN, *EDITED]), masked_rows=rows, masks=masks)
    expected, got = normal(), normal()
    forbid_masked(expected, rows, masks)
    with traced(monkeypatch) as trace:
        draws = draw_on_device(got, batch)
    assert trace.names[0] == "_token_bitmask_kernel"
    assert torch.equal(got, expected)
    check(draws, normal(), batch)


@pytest.mark.parametrize(
    ("samples", "launches"),
    [
        (PLAIN[:1], ["_sample_kernel"]),
        (PLAIN[:2], ["_sample_kernel"]),
        (PLAIN, ["_sample_kernel", "_sample_rest_kernel"]),
        (EDITED[1:3], ["_penalties_kernel", "_sample_kernel"]),
    ],
    ids=["greedy", "temperature", "filtered", "edited"],
)
def test_launches(
    samples: list[Sample], launches: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    batch, logits = make_batch(samples), normal()
    syncs = SyncWatch()
    with traced(monkeypatch) as trace, syncs:
        draw_on_device(logits, batch)
    assert trace.names == launches
    assert not syncs.seen


@pytest.mark.long
@pytest.mark.parametrize("samples", [PLAIN, EDITED], ids=["plain", "edited"])
def test_sampling_takes_no_more_memory_than_planned(
    samples: list[Sample], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, vocab, taken = 40, 5003, 0
    new_empty = torch.Tensor.new_empty

    def counted(self: torch.Tensor, *size: int, **options: Any) -> torch.Tensor:
        nonlocal taken
        tensor = new_empty(self, *size, **options)
        taken += tensor.nbytes
        return tensor

    batch = make_batch([dataclasses.replace(samples[2], row=row) for row in range(rows)])
    monkeypatch.setattr(torch.Tensor, "new_empty", counted)
    draw_on_device(normal(rows, vocab), batch)
    assert 0.05 * workspace_bytes(rows, vocab) < taken < workspace_bytes(rows, vocab)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("vocab", [5003, 50_257, 151_936])
def test_tokens_equal_the_cpus_on_a_gpu(vocab: int, dtype: torch.dtype) -> None:
    logits = normal(vocab=vocab, dtype=dtype)
    batch = make_batch([dataclasses.replace(s, logprobs=3) for s in [*PLAIN, *EDITED]])
    got = Sampler()(logits.cuda(), batch).result()
    expected = Sampler()(logits, batch).result()
    assert got.token_ids.tolist() == expected.token_ids.tolist()
    assert got.nonfinite.tolist() == expected.nonfinite.tolist()
    np.testing.assert_allclose(got.logprobs, expected.logprobs, rtol=1e-4, atol=1e-4)
    assert got.top_token_ids.tolist() == expected.top_token_ids.tolist()
