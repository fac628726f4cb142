"""Finds a quantized checkpoint's format in config.json, and dequantizes its weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from batchinfer.worker.model.quantized.bitsandbytes import BitsAndBytes
from batchinfer.worker.model.quantized.compressed_tensors import CompressedTensors
from batchinfer.worker.model.quantized.config_key import block_of
from batchinfer.worker.model.quantized.float8 import Float8
from batchinfer.worker.model.quantized.gptq_awq import Awq, Gptq
from batchinfer.worker.model.quantized.modelopt import ModelOpt
from batchinfer.worker.model.quantized.mxfp4 import Mxfp4
from batchinfer.worker.model.quantized.stored_tensors import Quantized, Stored, stored_tensors


class Format(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def ends(self) -> Mapping[str, str]:
        """Suffixes of the names of a weight's tensors. Replacing a suffix with its value in this
        mapping gives the weight's name."""
        ...

    def weight(self, name: str, parts: Mapping[str, Stored]) -> Quantized | None:
        """Return the quantized weight that consists of ``parts``, or None if the weight is not
        quantized.

        Args:
            parts: the weight's tensors, keyed by suffix; the key of a tensor with the weight's own
                name is "".

        Raises:
            ModelError: a tensor is missing, or its shape or dtype contradicts other tensors or
                config.json.
        """
        ...


def _block_float8(saved: Mapping[str, Any]) -> Format:
    ends = "_scale_inv", "_scale"  # AutoFP8 uses the second suffix
    return Float8("fp8", ends, block_of(saved, "weight_block_size"))


_FORMATS: Mapping[str, Callable[[Mapping[str, Any]], Format]] = {
    "awq": Awq,
    "bitsandbytes": lambda saved: BitsAndBytes(),
    "compressed-tensors": CompressedTensors,
    "fbgemm_fp8": lambda saved: Float8("fbgemm_fp8", ("_scale",)),
    "fp8": _block_float8,
    "gptq": Gptq,
    "modelopt": ModelOpt,
    "mxfp4": lambda saved: Mxfp4(),
}
METHODS = tuple(_FORMATS)


def choose_format(saved: Mapping[str, Any]) -> Format | None:
    """Return the format of a checkpoint; None if ``quant_method`` is not one of ``METHODS``.

    Args:
        saved: ``quantization_config`` of config.json.

    Raises:
        ModelError: a key has a value that is not supported. The message names the key.
    """
    method = saved.get("quant_method")
    make = _FORMATS.get(method) if isinstance(method, str) else None
    return None if make is None else make(saved)


_ACTIVATION_SCALES = (
    *(".input_scale", ".input_zero_point", ".input_global_scale", ".input_scale_ub"),
    *(".output_scale", ".output_zero_point", "activation_scale"),
    *(".k_scale", ".v_scale", ".q_scale", ".prob_scale"),
)
"""Suffixes of scales for activations or KV. Such scales are ignored, because this project does not
quantize activations or KV with them."""


@dataclass(frozen=True)
class Dequantized:
    """A quantized weight that is dequantized each time it is indexed."""

    weight: Quantized
    dtype: torch.dtype

    def __getitem__(self, index: Any) -> torch.Tensor:
        return self.weight.read(self.dtype)[index]


def dequantized_tensors(
    paths: Iterable[Path], saved_as: Format, dtype: torch.dtype
) -> dict[str, Stored | Dequantized]:
    """Return the tensors of safetensors files, keyed by their names in an unquantized checkpoint.

    Headers are read and checked immediately. A tensor's numbers are read when the tensor is
    indexed.

    Raises:
        ModelError: a weight's tensors are missing or do not match.
    """
    weights: dict[str, dict[str, Stored]] = {}
    for tensor in (each for path in paths for each in stored_tensors(path)):
        if not tensor.name.endswith(_ACTIVATION_SCALES):
            weight, end = _place(tensor.name, saved_as.ends)
            weights.setdefault(weight, {})[end] = tensor
    tensors: dict[str, Stored | Dequantized] = {}
    for name, parts in weights.items():
        quantized = saved_as.weight(name, parts)
        tensors[name] = parts[""] if quantized is None else Dequantized(quantized, dtype)
    return tensors


def empty_biases(tensors: Mapping[str, Stored | Dequantized]) -> set[str]:
    """Return the names of all-zero biases of dequantized layers. GPTQ tools save such biases for
    layers without a bias, so the model need not have parameters for them."""
    names = (
        name.removesuffix("weight") + "bias"
        for name, tensor in tensors.items()
        if isinstance(tensor, Dequantized) and len(tensor.weight.shape) == 2
    )
    return {name for name in names if name in tensors and not tensors[name][...].any()}


def _place(name: str, ends: Mapping[str, str]) -> tuple[str, str]:
    """Split a tensor's name into the name of the weight that it belongs to and the tensor's
    suffix."""
    end = max((end for end in ends if name.endswith(end)), key=len, default="")
    return (name.removesuffix(end) + ends[end], end) if end else (name, "")
