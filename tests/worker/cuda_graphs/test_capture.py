"""Operations that wait for the device cannot be captured in a graph, and are detected."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from batchinfer.worker.cuda_graphs.sync_watch import SyncWatch
from tests.worker.on_triton import pretend_cuda


@pytest.mark.parametrize(
    ("compute", "waits"),
    [
        (lambda x: x[x > 0], {"index"}),
        (lambda x: torch.where(x > 0), {"where"}),
        (lambda x: x if x.sum() > 0 else -x, {"is_nonzero"}),
        (lambda x: torch.repeat_interleave(x, x.int()), {"repeat_interleave"}),
        (lambda x: torch.repeat_interleave(x.int()), {"repeat_interleave"}),
        (lambda x: x.repeat_interleave(2, dim=-1), set()),
        (lambda x: x.argwhere(), {"argwhere"}),
        (lambda x: torch.where(x > 0, x, -x)[torch.tensor([1, 0])] + x.cumsum(0), set()),
    ],
    ids=["index", "where", "if", "repeats", "indices", "same_repeats", "argwhere", "nothing"],
)
def test_operations_that_wait_are_seen(
    compute: Any, waits: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_cuda(monkeypatch)
    watch = SyncWatch()
    x = torch.tensor([1.0, 2.0])
    with torch.inference_mode(), watch:
        compute(x)
    assert watch.seen == waits


def test_reading_memory_of_the_host_is_no_wait() -> None:
    x = torch.tensor([1.0, 2.0])
    with torch.inference_mode(), SyncWatch() as watch:
        assert x[0].item() < x[1].item()
        assert not torch.equal(x, x[1:])
    assert watch.seen == set()


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
@pytest.mark.parametrize(
    ("compute", "waits"),
    [
        (lambda: torch.ones(2).to("meta"), True),
        (lambda: torch.empty(2, device="meta").copy_(torch.ones(2)), True),
        (lambda: torch.empty(2, device="meta").copy_(torch.empty(2, device="meta")), False),
        (lambda: torch.empty(2, device="meta").float().to(torch.float16), False),
        (lambda: torch.ones(2).to(torch.float16).copy_(torch.tensor([1, 2])), False),
        (lambda: torch.empty(2, device="meta") + torch.tensor(1.0), False),
    ],
    ids=["to", "copy", "on_the_device", "cast", "on_the_host", "number"],
)
def test_copies_to_a_device_from_pageable_memory_are_seen(
    compute: Any, waits: bool, mode: Any
) -> None:
    watch = SyncWatch()
    with mode(), watch:
        compute()
    assert bool(watch.seen) == waits


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_copies_from_pinned_memory_do_not_wait() -> None:
    pinned = torch.ones(2, pin_memory=True)
    with SyncWatch() as watch:
        pinned.to("cuda", non_blocking=True)
    assert not watch.seen
