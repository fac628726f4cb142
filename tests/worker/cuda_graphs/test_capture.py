"""Operations that no graph can hold are seen when they run; a failed capture harms no other."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from batchinfer.worker.cuda_graphs import capture
from batchinfer.worker.cuda_graphs.capture import CudaCapture, SyncWatch
from tests.worker.on_triton import pretend_cuda


@pytest.mark.parametrize(
    ("compute", "waits"),
    [
        (lambda x: x[x > 0], {"index"}),
        (lambda x: torch.where(x > 0), {"where"}),
        (lambda x: x if x.sum() > 0 else -x, {"is_nonzero"}),
        (lambda x: torch.repeat_interleave(x, x.int()), {"repeat_interleave"}),
        (lambda x: torch.where(x > 0, x, -x)[torch.tensor([1, 0])] + x.cumsum(0), set()),
    ],
    ids=["index", "where", "if", "repeats", "nothing"],
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


class Allocator:
    """torch's rules for a pool of graphs: one capture at a time, and it is there while a graph is.

    Rules of `beginAllocateToPool` and `CUDAGraph::capture_end`: an error of CUDA at the end of a
    capture leaves its pool as one that is recorded to.
    """

    def __init__(self) -> None:
        self.recording, self.released, self.streams = set[int](), set[int](), ["default"]

    def graph(self, graph: Graph, pool: int, capture_error_mode: str) -> Any:
        @contextmanager
        def capturing() -> Iterator[None]:
            assert pool not in self.released
            if pool in self.recording:
                raise RuntimeError("beginAllocateToPool: already recording to mempool_id")
            self.recording.add(pool)
            self.streams.append("capturing")
            try:
                yield
            except ZeroDivisionError as error:
                raise RuntimeError("CUDA error: capture was invalidated") from error
            except MemoryError:
                self.released.add(pool)
                graph.ended = True
                self.recording.remove(pool)
                self.streams.pop()
                raise
            graph.ended = True
            self.recording.remove(pool)
            self.streams.pop()

        return capturing()

    @contextmanager
    def stream(self, stream: str) -> Iterator[None]:
        self.streams.append(stream)
        depth = len(self.streams)
        try:
            yield
        finally:
            del self.streams[depth - 1 :]


class Graph:
    ended = False

    def pool(self) -> int:
        if not self.ended:
            raise RuntimeError("without a preceding successful capture")
        return 0

    def replay(self) -> None:
        pass


@pytest.mark.parametrize("failure", [ZeroDivisionError, MemoryError], ids=["CUDA", "memory"])
def test_a_capture_after_one_that_failed_has_a_pool_that_can_be_used(
    failure: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    allocator, pools = Allocator(), itertools.count()
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", allocator.graph)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: next(pools))
    monkeypatch.setattr(torch.cuda, "stream", allocator.stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: allocator.streams[-1])
    monkeypatch.setattr(capture, "_alias", lambda tensor: tensor)

    def fail() -> tuple[torch.Tensor, ...]:
        raise failure

    captures = CudaCapture()
    with pytest.raises((RuntimeError, MemoryError)):
        captures(fail)
    assert allocator.streams == ["default"]
    for _ in range(2):
        (result,) = captures(lambda: (torch.ones(1),))()
        assert result == 1
    assert next(pools) == 2  # those after the failure share theirs
