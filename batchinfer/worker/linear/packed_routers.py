"""Makes a token's chosen experts and their weights independent of other tokens, on a CPU.

In transformers, a router is a module that multiplies rows by its parameter ``weight`` with
``torch.nn.functional.linear``, in the model's dtype or in float32. BLAS may add in an order that
depends on the number of rows, so routers use the same C kernel as other linear layers.

``torch.sigmoid`` uses vector instructions, except for the elements after the last whole vector, so
the last bit of an element depends on the size of the tensor. The scores of some routers and the
gates of shared experts are padded to whole vectors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from batchinfer.worker.linear.packed_experts import PackedExperts
from batchinfer.worker.linear.packed_linear import PackedLinear
from batchinfer.worker.linear_kernels import LinearKernel, PackedWeight, linear_kernels

_PADDED = 64
"""A multiple of the number of elements per iteration of torch's vector loops (four AVX-512
vectors)."""
_ONE_THREAD = 1 << 14
"""torch computes up to this number of elements in one thread. With more elements, the boundaries
between threads could fall inside a vector."""
_SIGMOIDS = (torch.sigmoid, torch.Tensor.sigmoid, nn.functional.sigmoid)
_CASTS = (torch.Tensor.type, torch.Tensor.float, torch.Tensor.to)


class Scores(torch.Tensor):
    """Scores whose sigmoid has bits that do not depend on the number of scores."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if func not in _SIGMOIDS:
                result = func(*args, **(kwargs or {}))
                return result.as_subclass(cls) if func in _CASTS else result
            scores = args[0].flatten()
            padded = nn.functional.pad(scores, (0, -len(scores) % _PADDED))
            done = torch.cat([part.sigmoid() for part in torch.split(padded, _ONE_THREAD)])
            return done[: len(scores)].view(args[0].shape)


class RouterWeight(torch.Tensor):
    """A router's weight [experts, hidden]. ``torch.nn.functional.linear`` multiplies by this weight
    with a C kernel; all other functions treat it as an ordinary tensor.
    """

    packed: Mapping[torch.dtype, PackedWeight]
    """The packed weight for each dtype of the multiplied rows."""

    @property
    def all_bytes(self) -> int:
        copies = sum(dtype.itemsize for dtype in self.packed)
        return int(self.numel() * (self.dtype.itemsize + copies))

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is nn.functional.linear:
            return _linear(*args, **kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
        return _with_packed(result, args[0].packed) if func in _CASTS else result


def _with_packed(weight: Any, packed: Mapping[torch.dtype, PackedWeight]) -> Any:
    if not isinstance(weight, torch.Tensor):  # ``type`` without a dtype returns a name
        return weight
    with torch._C.DisableTorchFunctionSubclass():
        made: RouterWeight = torch.Tensor._make_subclass(RouterWeight, weight.detach())
    made.packed = packed
    return made


def _linear(
    rows: torch.Tensor, weight: RouterWeight, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Return ``rows @ weight.T + bias`` for rows [..., hidden] of the dtype of ``weight``."""
    packed = weight.packed.get(rows.dtype)
    if packed is None:
        with torch._C.DisableTorchFunctionSubclass():
            return nn.functional.linear(rows, weight, bias)
    out = packed.times(rows.reshape(-1, rows.shape[-1]), bias)
    return out.view(*rows.shape[:-1], out.shape[-1]).as_subclass(Scores)


def pack_routers(model: nn.Module, kernel: LinearKernel, dtype: torch.dtype) -> int:
    """Pack the routers of layers with packed experts, if ``kernel`` (for rows of ``dtype``) is
    batch-invariant. Return the number of packed routers."""
    count = 0
    for router in list(_routers(model)) if kernel.is_batch_invariant else ():
        weight = router.weight.detach().clone()  # a view would keep the weight file mapped
        kernels = {torch.float32: linear_kernels(torch.float32)[0], dtype: kernel}
        if all(one.is_batch_invariant and one.takes(weight) for one in kernels.values()):
            packed = {rows: one.pack(weight.to(rows)) for rows, one in kernels.items()}
            del router.weight  # a parameter, which hides other attributes of this name
            router.weight = _with_packed(weight, packed)
            count += 1
    for parent in _mixtures(model):
        for child in parent.children():
            if isinstance(child, PackedLinear):  # some routers, and the gate of shared experts
                child.register_forward_hook(lambda module, inputs, out: out.as_subclass(Scores))
    return count


def _mixtures(model: nn.Module) -> Iterator[Any]:
    for parent in model.modules():
        if any(isinstance(child, PackedExperts) for child in parent.children()):
            yield parent


def _routers(model: nn.Module) -> Iterator[Any]:
    for parent in _mixtures(model):
        for child in parent.children():
            weight = getattr(child, "weight", None)
            is_other = type(child) in (nn.Linear, nn.Embedding)
            if type(weight) is nn.Parameter and weight.dim() == 2 and not is_other:
                yield child
