"""Operations that no graph can hold are seen when they run."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from batchinfer.worker.cuda_graphs.capture import SyncWatch
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
