"""Finds operations that make the host wait for the device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

# Their results are on the host, or are sized by what is on the device.
_WAITS = frozenset(
    [
        "_local_scalar_dense",
        "_unique2",
        "allclose",
        "bincount",
        "equal",
        "is_nonzero",
        "item",
        "masked_select",
        "nonzero",
        "one_hot",
        "unique_consecutive",
        "unique_dim",
    ]
)


class SyncWatch(TorchDispatchMode):
    """Notes the names of torch's operations that wait, while it is entered."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: set[str] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        result = func(*args, **kwargs)
        if (
            name in _WAITS
            or (name == "where" and len(args) == 1)
            or (name == "repeat_interleave" and kwargs.get("output_size") is None)
            or (name.startswith("index") and _has_mask(args))
            or _comes_to_host(args, result)
        ):
            self.seen.add(name)
        return result


def _has_mask(args: Any) -> bool:
    indices = args[1] if len(args) > 1 and isinstance(args[1], list | tuple) else ()
    return any(isinstance(at, torch.Tensor) and at.dtype is torch.bool for at in indices)


def _comes_to_host(args: Any, result: Any) -> bool:
    first = args[0] if args else None
    if not (isinstance(first, torch.Tensor) and isinstance(result, torch.Tensor)):
        return False
    return first.device.type != "cpu" and result.device.type == "cpu"
