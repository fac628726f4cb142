"""What a model's modules are called with, recorded."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from batchinfer.worker.probe import record_calls


@pytest.mark.parametrize("clone", [False, True])
def test_copies_keep_what_is_changed_in_place_later(clone: bool) -> None:
    first = nn.Identity()
    model = nn.Sequential(first, nn.ReLU(inplace=True))
    hidden = torch.tensor([-1.0, 2.0])
    with record_calls([first], clone=clone) as calls:
        model(hidden)
    (call,) = calls
    expected = [-1.0, 2.0] if clone else [0.0, 2.0]
    assert [call.arguments[0].tolist(), call.output.tolist()] == [expected] * 2
    assert (call.output is hidden) is not clone
