"""Which format a config.json says that weights are saved in."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from batchinfer.worker.model.quantized.awq import Awq
from batchinfer.worker.model.quantized.bitsandbytes import BitsAndBytes
from batchinfer.worker.model.quantized.compressed_tensors import CompressedTensors
from batchinfer.worker.model.quantized.config_key import block_of, one_of
from batchinfer.worker.model.quantized.float8 import Float8
from batchinfer.worker.model.quantized.format import Format
from batchinfer.worker.model.quantized.gptq import Gptq
from batchinfer.worker.model.quantized.mxfp4 import Mxfp4


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
"""Values of ``quant_method`` in config.json that are read."""


def choose_format(saved: Mapping[str, Any]) -> Format | None:
    """The format of a checkpoint; None: ``quant_method`` is none of ``METHODS``.

    Args:
        saved: config.json's ``quantization_config``.

    Raises:
        ModelError: naming a key that cannot be read.
    """
    method = saved.get("quant_method")
    make = _FORMATS.get(method) if isinstance(method, str) else None
    return None if make is None else make(saved)
