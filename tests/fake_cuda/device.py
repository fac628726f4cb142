"""A fake CUDA device: loads models and runs whole steps, and checks all work queued on it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoModel
from triton.runtime.interpreter import InterpretedFunction

from batchinfer.kernels import fp8
from batchinfer.kernels import launch as launch_settings
from batchinfer.worker import family_check, self_test
from batchinfer.worker.cuda_graphs import capture, step_graphs
from batchinfer.worker.cuda_graphs.capture import CudaCapture, Run
from batchinfer.worker.encoder import loader as encoder_loader
from batchinfer.worker.fusion import fuse, fused_modules, gated_delta_net, mixture
from batchinfer.worker.linear import kernel_choice, packed_experts, packed_linear
from batchinfer.worker.lora.adapter_checkpoint import Adapter
from batchinfer.worker.model import shallow_copy
from tests.fake_cuda.launches import (
    Launch,
    Signature,
    check_on_device,
    check_shared,
    import_kernels,
    launch_of,
)
from tests.fake_cuda.operations import Operations, Phase
from tests.fake_cuda.torch_cuda import PinnedMemory, device_guard, on_the_host, replace_torch_cuda

# Functions that keep the properties of devices.
_CACHED = (
    launch_settings._capability_of,
    launch_settings.num_multiprocessors,
    fp8.converts_fp8,
)


class FakeCuda:
    """A CUDA device whose tensors have no contents, and whose kernels only get checked.

    Args:
        capability: the compute capability, such as 90.
        shared_bytes: bytes of shared memory of each signature that has been compiled for it.
    """

    def __init__(self, capability: int, shared_bytes: Mapping[Signature, int]) -> None:
        self.capability = capability
        self.shared_bytes = shared_bytes
        self.launches: list[Launch] = []
        """Launches since the last call of ``take_launches``."""
        self.num_replays = 0
        """Number of replays of CUDA graphs."""
        self.device = torch.device("cuda:0")
        self._pinned = PinnedMemory()
        self._operations = Operations(self._pinned)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Replace ``torch.cuda`` and Triton's launches inside the ``with`` block."""
        import_kernels()
        with ExitStack() as stack:
            patch = stack.enter_context(pytest.MonkeyPatch.context())
            stack.enter_context(device_guard())
            for cached in _CACHED:
                stack.callback(cached.cache_clear)
            replace_torch_cuda(patch, self.capability, self._pinned)
            self._replace_graphs(patch)
            self._replace_launches(patch)
            _believe_checks(patch)
            _read_weights(patch)
            stack.enter_context(_NoContents(allow_non_fake_inputs=True))
            stack.enter_context(self._operations)
            yield

    @property
    def pinned_bytes(self) -> int:
        """Bytes of pinned memory, of which torch allocates powers of two."""
        return self._pinned.nbytes

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Let the host wait for the device inside the ``with`` block."""
        with self._operations.rules_of(Phase.LOADING):
            yield

    def take_launches(self) -> Counter[str]:
        """Count the launches of each kernel since the last call."""
        counts = Counter(launch.kernel for launch in self.launches)
        self.launches.clear()
        return counts

    def _replace_launches(self, patch: pytest.MonkeyPatch) -> None:
        def run(function: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
            launch = launch_of(function, grid, args, options, self.capability)
            check_on_device(launch)
            check_shared(launch, self.shared_bytes.get(launch.signature, 0), self.capability)
            self.launches.append(launch)
            if self._operations.recording is not None:
                self._operations.recording.launch(launch)

        patch.setattr(InterpretedFunction, "run", run)
        patch.setattr(launch_settings, "INTERPRETED", False)
        patch.setattr(triton.knobs.runtime, "interpret", False)

    def _replace_graphs(self, patch: pytest.MonkeyPatch) -> None:
        device, operations = self, self._operations

        class Graph:
            """A captured graph, which does nothing."""

            def pool(self) -> tuple[int, int]:
                return (0, 1)

            def replay(self) -> None:
                pass

        @contextmanager
        def graph(*_: Any, **__: Any) -> Iterator[None]:
            with operations.recorded() as CheckedCapture.last:
                yield

        class CheckedCapture(CudaCapture):
            """Runs the computation again at each replay, to compare it with the capture."""

            last: Any = None

            def __call__(self, run: Run) -> Run:
                replay = super().__call__(run)
                captured = CheckedCapture.last

                def checked() -> tuple[torch.Tensor, ...]:
                    with operations.recorded() as needed:
                        [result.contiguous() for result in run()]
                    captured.check_equal(needed)
                    device.num_replays += 1
                    return replay()

                return checked

        patch.setattr(torch.cuda, "CUDAGraph", Graph)
        patch.setattr(torch.cuda, "graph", graph)
        patch.setattr(step_graphs, "CudaCapture", CheckedCapture)
        patch.setattr(capture, "_alias", lambda tensor: tensor)


class _NoContents(FakeTensorMode):
    """Makes fake tensors as if torch had no CUDA device, although ``torch.cuda`` says so."""

    avoid_device_init = True


class _NoDifference:
    """What comparisons of results find on a device without contents."""

    def any(self) -> bool:
        return False

    def mean(self) -> float:
        return 0.0

    def float(self) -> _NoDifference:
        return self

    def __getitem__(self, _: Any) -> _NoDifference:
        return self


def _believe_checks(patch: pytest.MonkeyPatch) -> None:
    """Let comparisons find no difference, and take fake weights for plain ones."""
    for module in (self_test, family_check):
        patch.setattr(module, "differing_rows", lambda *_: _NoDifference())
    fusion = (fuse, fused_modules, gated_delta_net, mixture)
    for module in (*fusion, kernel_choice, packed_linear, shallow_copy):
        patch.setattr(module, "is_plain", _is_linear)
    for module in (mixture, packed_experts):
        patch.setattr(module, "is_plain_weight", _is_parameter)


def _read_weights(patch: pytest.MonkeyPatch) -> None:
    """Let weights be read from files to the host, where they have contents."""
    read = on_the_host(AutoModel.from_pretrained)
    patch.setattr(encoder_loader, "AutoModel", SimpleNamespace(from_pretrained=read))
    patch.setattr(Adapter, "factors", on_the_host(Adapter.factors))


def _is_parameter(weight: object) -> bool:
    return isinstance(weight, torch.nn.Parameter)


def _is_linear(module: object) -> bool:
    return type(module) is torch.nn.Linear
