from __future__ import annotations

import weakref
from collections.abc import Callable

import numpy as np
import pytest
import torch

from batchinfer.engine.runner import OutOfMemory
from batchinfer.worker.oom import raise_out_of_memory

TOO_MUCH = 10**15


def raises(error: Exception) -> Callable[[], None]:
    def compute() -> None:
        raise error

    return compute


@pytest.mark.parametrize(
    "compute",
    [
        lambda: torch.empty(TOO_MUCH),
        lambda: np.empty(TOO_MUCH),
        raises(MemoryError()),
        raises(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB")),
        raises(RuntimeError("CUDA error: out of memory\nCompile with TORCH_USE_CUDA_DSA")),
    ],
    ids=["torch", "numpy", "c_kernel", "cuda", "pinned"],
)
def test_out_of_memory_message_is_one_line(compute: Callable[[], object]) -> None:
    with pytest.raises(OutOfMemory) as caught, raise_out_of_memory():
        compute()
    assert 0 < len(str(caught.value)) <= 200
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("error", [RuntimeError("shapes do not match"), ValueError("memory")])
def test_other_errors_are_not_changed(error: Exception) -> None:
    with pytest.raises(type(error)) as caught, raise_out_of_memory():
        raise error
    assert caught.value is error


def test_tensors_of_the_failed_attempt_are_freed() -> None:
    kept: list[weakref.ref[torch.Tensor]] = []

    def compute() -> torch.Tensor:
        activations = torch.zeros(3)
        kept.append(weakref.ref(activations))
        return activations + torch.empty(TOO_MUCH)

    with pytest.raises(OutOfMemory) as caught, raise_out_of_memory():
        compute()
    assert kept[0]() is None, f"{caught.value} keeps the tensors"


def test_tensors_of_an_earlier_error_are_freed() -> None:
    """The out-of-memory error is raised while an earlier error is handled; the tensors of the
    earlier error must be freed, too."""
    kept: list[weakref.ref[torch.Tensor]] = []

    def fail() -> None:
        activations = torch.zeros(3)
        kept.append(weakref.ref(activations))
        raise ValueError("once more")

    def compute() -> None:
        try:
            fail()
        except ValueError:
            torch.empty(TOO_MUCH)

    with pytest.raises(OutOfMemory) as caught, raise_out_of_memory():
        compute()
    assert kept[0]() is None, f"{caught.value} keeps the tensors"
