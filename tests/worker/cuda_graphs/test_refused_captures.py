"""Captures that CUDA refuses to end leave torch's allocator as it was, and are not repeated."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch

from batchinfer.worker.cuda_graphs.capture import CaptureRefusedError, CudaCapture, Run
from tests.worker.cuda_graphs.graph_bench import Bench
from tests.worker.on_triton import pretend_cuda

REFUSAL = "operation failed due to a previous error during capture"


class Allocator:
    """Torch's allocator: a pool's users, and the pools to which captures allocate."""

    def __init__(self) -> None:
        self.captures_underway: list[Any] = []
        self.users: dict[Any, int] = {}

    def begin(self, pool: Any) -> None:
        assert pool not in self.captures_underway, "already recording to this pool"
        self.captures_underway.append(pool)
        self.users[pool] = self.users.get(pool, 0) + 1

    def end(self, _: int, pool: Any) -> None:
        if pool not in self.captures_underway:
            raise RuntimeError("not currently recording to this pool")
        self.captures_underway.remove(pool)

    def release(self, _: int, pool: Any) -> None:
        self.users[pool] -= 1


@pytest.fixture
def allocator(monkeypatch: pytest.MonkeyPatch) -> Allocator:
    """Replace CUDA graphs: CUDA refuses to end a capture that raised an error."""
    made = Allocator()
    handles = iter((0, number) for number in range(1, 100))

    class Graph:
        ended = False

        def pool(self) -> None:
            if not self.ended:
                raise RuntimeError("the capture has not ended")

    @contextmanager
    def capturing(graph: Graph, *, pool: Any, capture_error_mode: str) -> Iterator[None]:
        made.begin(pool)
        try:
            yield
        except RuntimeError:
            raise RuntimeError(REFUSAL) from None
        made.end(0, pool)
        graph.ended = True

    replaced = {
        "CUDAGraph": Graph,
        "graph": capturing,
        "graph_pool_handle": lambda: next(handles),
        "stream": lambda _: nullcontext(),
        "current_stream": lambda: None,
        "current_device": lambda: 0,
    }
    for name, function in replaced.items():
        monkeypatch.setattr(torch.cuda, name, function)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", made.end, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_releasePool", made.release, raising=False)
    monkeypatch.setattr("batchinfer.worker.cuda_graphs.capture._alias", lambda tensor: tensor)
    return made


def works() -> tuple[torch.Tensor]:
    return (torch.ones(2),)


def fails() -> tuple[torch.Tensor]:
    raise RuntimeError("operation not permitted when stream is capturing")


@pytest.mark.parametrize("before", [0, 1])
def test_the_allocator_stops_recording_and_frees_the_memory(
    allocator: Allocator, before: int
) -> None:
    capture = CudaCapture()
    for _ in range(before):
        capture(works)
    with pytest.raises(CaptureRefusedError, match=REFUSAL):
        capture(fails)
    assert allocator.captures_underway == []
    assert sum(allocator.users.values()) == before
    capture(works)
    assert sum(allocator.users.values()) == before + 1
    assert len([users for users in allocator.users.values() if users]) == 1  # all share a pool


def test_after_two_refusals_no_capture_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_cuda(monkeypatch)
    tried: list[Run] = []

    def refuse(run: Run) -> Run:
        tried.append(run)
        raise CaptureRefusedError(REFUSAL)

    bench, lines = Bench(capture=refuse), list[str]()
    monkeypatch.setattr(bench.graphs, "_forward", lambda size: (torch.ones(2),))
    bench.graphs.capture_all(lines.append)
    assert len(tried) == 2
    assert lines[0] == f"CUDA graphs: only 2 of {len(bench.graphs.sizes)} sizes were tried"
    assert REFUSAL in lines[1]
