"""The formats that quantized checkpoints are saved in, chosen by config.json."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from batchinfer.worker.model.quantized.bitsandbytes import BitsAndBytes
from batchinfer.worker.model.quantized.compressed_tensors import CompressedTensors
from batchinfer.worker.model.quantized.config_key import block_of, one_of
from batchinfer.worker.model.quantized.float8 import Float8
from batchinfer.worker.model.quantized.gptq_awq import Awq, Gptq
from batchinfer.worker.model.quantized.mxfp4 import Mxfp4
from batchinfer.worker.model.quantized.stored import Quantized, Stored


class Format(Protocol):
    """A way to save quantized weights. The tensors in the files show which weights are quantized;
    lists of excluded modules are not read."""

    @property
    def name(self) -> str:
        """Name for users and records, such as ``awq``."""
        ...

    @property
    def ends(self) -> Mapping[str, str]:
        """Suffixes of the tensors that belong to a weight, and the replacement of each that gives
        the weight's own name."""
        ...

    def weight(self, name: str, parts: Mapping[str, Stored]) -> Quantized | None:
        """Return the weight that tensors represent; None: it is not quantized, or they are not
        needed.

        Args:
            name: the weight's. parts: its tensors by suffix, one of ``ends``, or "" for the tensor
            with the weight's name.

        Raises:
            ModelError: a tensor is missing, or its shape or dtype contradicts the others or
                config.json.
        """
        ...


def _block_float8(saved: Mapping[str, Any]) -> Format:
    ends = "_scale_inv", "_scale"  # the second is AutoFP8's, one number for all of a weight
    return Float8("fp8", ends, block_of(saved, "weight_block_size"))


def _modelopt(saved: Mapping[str, Any]) -> Format:
    one_of(saved, "quant_algo", ("FP8",))
    return Float8("modelopt FP8", ("_scale",))


_FORMATS: Mapping[str, Callable[[Mapping[str, Any]], Format]] = {
    "awq": Awq,
    "bitsandbytes": lambda saved: BitsAndBytes(),
    "compressed-tensors": CompressedTensors,
    "fbgemm_fp8": lambda saved: Float8("fbgemm_fp8", ("_scale",)),
    "fp8": _block_float8,
    "gptq": Gptq,
    "modelopt": _modelopt,
    "mxfp4": lambda saved: Mxfp4(),
}
METHODS = tuple(_FORMATS)
"""Values of ``quant_method`` in config.json that can be loaded."""


def choose_format(saved: Mapping[str, Any]) -> Format | None:
    """The format of a checkpoint; None: ``quant_method`` is none of ``METHODS``.

    Args:
        saved: config.json's ``quantization_config``.

    Raises:
        ModelError: naming a key whose value is not supported.
    """
    method = saved.get("quant_method")
    make = _FORMATS.get(method) if isinstance(method, str) else None
    return None if make is None else make(saved)
