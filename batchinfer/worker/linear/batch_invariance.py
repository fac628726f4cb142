"""Checks that a loaded model is batch-invariant, as ``engine.deterministic`` requires.

On any device, the model runs a few tokens alone, in a batch and in chunks, and all logits must have
equal bits. On a CUDA device, this test is not enough: torch chooses the order of sums based on the
number of rows, and may choose another order for an untested number of rows. On CUDA, the names of
torch's operations are therefore checked too. Only operations whose results cannot depend on the
number of rows are allowed: pointwise operations, copies, and reductions in which one block of
threads reduces one row.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from batchinfer.engine.kv.layout import KVLayout
from batchinfer.errors import DeviceError, ModelError
from batchinfer.worker.linear_kernels import LinearKernel
from batchinfer.worker.self_test import Probe, logits_in_chunks

_STEPS = (((3,), (1, 2, 3, 8, 33)), ((3, 7, 5, 3, 11), (1, 2, 5, 13)))
"""Pairs of (tokens of a sequence, numbers of equal sequences to run in one step)."""
_CHUNKS = (1, 2)
"""Sizes in tokens of the chunks in which the test computes a sequence."""
_COPIES = {
    *("arange", "cat", "clone", "constant_pad_nd", "copy_", "dropout", "embedding", "empty"),
    *("empty_like", "empty_strided", "expand_copy", "fill_", "full", "full_like", "gather"),
    *("index", "index_select", "lift_fresh", "new_empty", "new_full", "new_zeros", "ones"),
    *("repeat", "repeat_interleave", "scalar_tensor", "set_", "split_with_sizes_copy", "stack"),
    *("zero_", "zeros", "zeros_like", "_to_copy", "to"),
}
_ONE_BLOCK_PER_ROW = {"layer_norm", "native_layer_norm"}
"""Reductions in which one block of threads reduces one row (torch's
aten/src/ATen/native/cuda/layer_norm_kernel.cu)."""
_MATMULS = {"matmul", "bmm"}
_EXPLANATIONS = {"_grouped_mm": " (all experts of a layer at once)"}


def check_batch_invariance(
    model: torch.nn.Module, layout: KVLayout, kernel: LinearKernel | None = None
) -> None:
    """Check that a sequence gets the same logits alone, in a batch and in chunks.

    Raises:
        ModelError: the logits differ, or, on a CUDA device, an operation does not guarantee equal
            logits.
        DeviceError: torch is set to round the operands of float32 matrix multiplications to TF32.
    """
    if next(model.parameters()).is_cuda:
        check_operations(model, layout, kernel)
    for tokens, counts in _STEPS:
        alone = Probe(model, layout, tokens, kernel=kernel).logits()
        for count in counts:
            batch = Probe(model, layout, tokens, count, kernel=kernel).logits()
            if not torch.equal(batch, alone.repeat(count, 1)):
                raise _refused(
                    model,
                    "in some layers, the last bits of a row depend on the other rows in its batch",
                )
        for size in _CHUNKS:
            ends = (*range(size, len(tokens), size), len(tokens))
            if not torch.equal(logits_in_chunks(model, layout, tokens, ends, kernel), alone):
                raise _refused(
                    model,
                    "the last bits of a token depend on how many tokens of its row "
                    "are computed at once",
                )


def check_operations(
    model: torch.nn.Module, layout: KVLayout, kernel: LinearKernel | None = None
) -> None:
    """Check that every torch operation in a forward pass on a CUDA device is batch-invariant."""
    if torch.backends.cuda.matmul.allow_tf32:
        raise DeviceError(
            "engine.deterministic is true, but torch is set to round float32 matrices to TF32",
            hint='call torch.set_float32_matmul_precision("highest") first',
        )
    probe = Probe(model, layout, _STEPS[-1][0], kernel=kernel)
    with _BatchDependentOperations() as operations:
        probe.logits()
    if operations.names:
        named = (name + _EXPLANATIONS.get(name, "") for name in sorted(operations.names))
        raise _refused(
            model,
            f"torch runs {', '.join(named)}, and on a CUDA device the last bits of the results may "
            "depend on the number of rows",
            hint="set engine.deterministic: false, or engine.device: cpu",
        )


class _BatchDependentOperations(TorchDispatchMode):
    """While active, records the torch operations whose bits may depend on the number of rows."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        is_invariant = (
            func.is_view
            or torch.Tag.pointwise in func.tags
            or name in _COPIES | _ONE_BLOCK_PER_ROW
            # A matrix product with an inner dimension of 1 needs no sum.
            or (name in _MATMULS and args[0].shape[-1] == 1)
        )
        if not is_invariant:
            self.names.add(name)
        return func(*args, **(kwargs or {}))


def _refused(
    model: torch.nn.Module, why: str, *, hint: str = "set engine.deterministic: false"
) -> ModelError:
    config: Any = model.config
    return ModelError(
        f"engine.deterministic is true, but in models of the family {config.model_type!r}, {why}",
        hint=hint,
    )
