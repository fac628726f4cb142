"""Transfers give the same results on a device whose streams run late and out of step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random

import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import _disable_current_modes

from batchinfer.worker.cuda_graphs.graph_sizes import GraphSize
from batchinfer.worker.cuda_graphs.step_inputs import StepInputs
from batchinfer.worker.host_blocks import HostBlocks
from batchinfer.worker.sampling.output import SampleHandle
from batchinfer.worker.sampling.sampler import Sampler
from batchinfer.worker.transfer import HostCopy, to_device
from tests.fake_cuda.queues import Event, LateCuda, Stream
from tests.worker.sampling.sampling_batches import Sample, make_batch
from tests.worker.step_maker import StepMaker

STEPS, WIDTH = 12, 5
Check = Callable[[LateCuda], None]


def check_steps(device: LateCuda) -> None:
    """Steps read arrays of the host and samples of the step before. The host reads the samples one
    step later."""
    rng = np.random.default_rng(0)
    previous = torch.zeros(WIDTH, dtype=torch.int64, device=device.device)
    expected, pending = np.zeros(WIDTH, dtype=np.int64), None
    for _ in range(STEPS):
        rows, scale = rng.permutation(WIDTH), rng.integers(1, 9, WIDTH)
        on = to_device({"rows": rows, "scale": scale}, device.device)
        previous = (previous[on["rows"]] * 3 + on["scale"]) % 97
        handle = SampleHandle(previous, previous.float() / 2, previous < 0)
        if pending is not None:
            np.testing.assert_array_equal(pending.result().token_ids, expected)
        expected, pending = (expected[rows] * 3 + scale) % 97, handle
    result = handle.result()
    np.testing.assert_array_equal(result.token_ids, expected)
    np.testing.assert_array_equal(result.logprobs, expected / 2)


def check_swaps(device: LateCuda) -> None:
    """Steps change blocks, and swap some of them out, and others in."""
    rng = np.random.default_rng(1)
    pool = torch.zeros(6, 2, WIDTH, device=device.device)
    host, swapped = HostBlocks(pool, 4), np.zeros((4, 2, WIDTH), np.float32)
    expected = np.zeros(pool.shape, np.float32)
    for step in range(STEPS):
        slots, host_slots = rng.permutation(6)[:4], rng.permutation(4)
        outs = np.stack([slots[:2], host_slots[:2]], axis=1).astype(np.int32)
        ins = np.stack([host_slots[1:], slots[1:]], axis=1).astype(np.int32)
        ins = ins[: 3 if step else 0]
        host.copy(outs, ins)
        swapped[outs[:, 1]] = expected[outs[:, 0]]
        expected[ins[:, 1]] = swapped[ins[:, 0]]
        pool.mul_(2).add_(step)
        expected = expected * 2 + step
    np.testing.assert_array_equal(HostCopy(pool).wait(), expected)


def check_draws(device: LateCuda) -> None:
    """Steps draw samples from logits that they compute on the device, and edit them."""
    samples = [
        Sample(row=0, stream=2, top_p=0.9, seed=5),
        Sample(row=1, temperature=0, bias={7: 4.0, 8: -np.inf}),
        Sample(row=2, presence=1.0, repetition=1.2, prompt=[1, 2, 3], output=[4, 4]),
    ]
    logits = np.random.default_rng(2).normal(size=(3, 40)).astype(np.float32) * 3
    on, pending = to_device({"logits": logits}, device.device)["logits"], []
    for step in range(3):
        batch = make_batch([replace(sample, position=step) for sample in samples])
        batch.num_logprobs[:] = step
        pending.append((Sampler()(on + 0, batch), batch))
    results = [(handle.result(), batch) for handle, batch in pending]
    with _disable_current_modes():
        for result, batch in results:
            expected = Sampler()(torch.from_numpy(logits), batch).result()
            assert result.token_ids.tolist() == expected.token_ids.tolist()
            np.testing.assert_allclose(result.logprobs, expected.logprobs, rtol=1e-5, atol=1e-5)


def check_step_inputs(device: LateCuda) -> None:
    """Steps overwrite the arrays that the graph of the step before reads."""
    size = GraphSize("mixed", 16, 4)
    inputs = [StepInputs(size, 8, where) for where in (device.device, torch.device("cpu"))]
    maker, pending = StepMaker(64, 4), []
    previous = np.arange(4) + 70
    for first in (10, 30, 50):
        sequences = [maker.sequence([first + number] * 3) for number in range(4)]
        step = maker.step([(sequence, 3) for sequence in sequences])
        step.previous_sample[0] = first // 20
        arrays = []
        for of, where in zip(inputs, (device.device, torch.device("cpu")), strict=True):
            of.load(step, size, to_device({"ids": previous}, where)["ids"])
            tensors = of.of(size)
            arrays.append([HostCopy(tensors[name] + 0) for name in ("token_ids", "block_tables")])
        pending += zip(*arrays, strict=True)
    for got, expected in pending:
        np.testing.assert_array_equal(got.wait(), expected.wait())


def run(check: Check, random: Random, *, waits_for_copies: bool = True) -> None:
    device = LateCuda(random)
    device.memory.waits_for_copies = waits_for_copies
    with device.active(), torch.inference_mode():
        check(device)


@pytest.mark.parametrize("check", [check_steps, check_swaps])
@settings(max_examples=20, deadline=None, phases=[Phase.generate])
@given(random=st.randoms(use_true_random=False))
def test_results_do_not_depend_on_the_order_of_streams(check: Check, random: Random) -> None:
    run(check, random)


@pytest.mark.parametrize(
    "check", [check_step_inputs, pytest.param(check_draws, marks=pytest.mark.long)]
)
@settings(max_examples=4, deadline=None, phases=[Phase.generate])
@given(random=st.randoms(use_true_random=False))
def test_results_of_kernels_do_not_depend_on_it(check: Check, random: Random) -> None:
    run(check, random)


def fails(check: Check, *, waits_for_copies: bool = True) -> bool:
    """Return true if some order of streams changes the results."""
    for seed in range(20):
        try:
            run(check, Random(seed), waits_for_copies=waits_for_copies)
        except (AssertionError, IndexError):  # wrong results, or wrong indices
            return True
    return False


def test_a_result_that_is_read_before_its_event_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Event, "synchronize", lambda _: None)
    assert fails(check_steps)


@pytest.mark.parametrize("check", [check_steps, check_step_inputs])
def test_pinned_memory_that_is_reused_before_its_event_is_seen(check: Check) -> None:
    assert fails(check, waits_for_copies=False)


@pytest.mark.parametrize("left_out", [0, 1], ids=["before", "after"])
def test_a_swap_that_does_not_wait_is_seen(left_out: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A swap waits for earlier steps, and later steps wait for the swap."""
    calls, wait_stream = [0], Stream.wait_stream

    def wait(stream: Stream, other: Stream) -> None:
        calls[0] += 1
        if calls[0] % 2 != 1 - left_out:
            wait_stream(stream, other)

    monkeypatch.setattr(Stream, "wait_stream", wait)
    assert fails(check_swaps)
