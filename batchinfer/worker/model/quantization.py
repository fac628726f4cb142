"""Checks the quantization of a checkpoint, and quantizes weights with torchao.

torchao replaces only the weights of transformers' modules, so the logits are the same as in
transformers. The embedding and the output head keep their dtype, as in transformers. Weights in
formats other than torchao's are dequantized by the package ``quantized`` when they are loaded.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, TypeGuard

import torch
from torch import nn

from batchinfer.engine.kv.model_config import text_config
from batchinfer.errors import ModelError, install_command, one_line
from batchinfer.worker.model.quantized.formats import METHODS, choose_format

_SAVED_TYPES = (
    "Int8WeightOnlyConfig",
    "Int8DynamicActivationInt8WeightConfig",
    "IntxWeightOnlyConfig",
    "Int8DynamicActivationIntxWeightConfig",
)
"""torchao configurations whose checkpoints can be loaded, all tested on a CPU."""
_PLAIN_TYPES = ("torch.dtype", "MappingType", "PerRow", "PerGroup", "PerAxis", "PerTensor")
_PARTS = ("Algorithm", "Format", "Preference", "Granularity")
_GROUPS = (128, 64, 32)
_TORCHAO = "torchao"
_MAX_SHOWN = 60
TORCHAO_METHODS = ("int8_weight_only", "int4_weight_only")


def check_quantization(config: Mapping[str, Any], wanted: str | None, device_type: str) -> None:
    """Check the quantization of a config.json before the model is built.

    Args:
        wanted: value of ``model.quantization``.
        device_type: device that the model will run on, ``cpu`` or ``cuda``.

    Raises:
        ModelError: the format cannot be loaded, weights would be quantized twice, the device does
            not support the method, or torchao is not installed.
    """
    if wanted == "int8" and device_type != "cpu":
        raise ModelError(
            "model.quantization: int8 is not yet supported on CUDA devices; use fp8, int4 or "
            "int8_weight_only"
        )
    saved = saved_section(config)
    if not saved:
        if wanted in TORCHAO_METHODS:
            _require_torchao()
        return
    method = saved.get("quant_method")
    saved_as = choose_format(saved)
    if method != _TORCHAO and saved_as is None:
        shown = str(method)[:_MAX_SHOWN] if method else "an unnamed method"
        raise ModelError(
            f"the model's weights are quantized by {shown} (quant_method of "
            "quantization_config in config.json), which is not yet supported; use the original "
            f"checkpoint, or a checkpoint quantized with one of {', '.join((*METHODS, _TORCHAO))}"
        )
    if wanted is not None and (saved_as is None or wanted in TORCHAO_METHODS):
        method = "int8" if device_type == "cpu" else "fp8"
        alternative = "" if saved_as is None else f", or set it to {method}"
        raise ModelError(
            f"model.quantization is {wanted}, but the model's weights are already quantized; "
            f"remove the key{alternative}"
        )
    if saved_as is None:
        _check_torchao(saved)


def _check_torchao(saved: Mapping[str, Any]) -> None:
    kind = _default_type(saved)
    name = kind.get("_type")
    if name not in _SAVED_TYPES:
        raise ModelError(
            f"the model's weights are quantized by torchao's {name}, which is not yet "
            f"supported; the supported types are: {', '.join(_SAVED_TYPES)}"
        )
    for part in _types_in(kind.get("_data")):
        if part not in _PLAIN_TYPES and not part.endswith(_PARTS):
            raise ModelError(f"the model's quantization_config names an unknown class, {part}")
    _require_torchao()


def quantization_of(config: Mapping[str, Any], wanted: str | None) -> str | None:
    """Return a description of a model's quantization: the checkpoint's format and ``wanted``
    (``model.quantization``), or torchao's type. Return None if the model is not quantized."""
    saved = saved_section(config)
    saved_as = choose_format(saved)
    if saved_as is not None:
        return f"{saved_as.name}, {wanted or 'dequantized when loaded'}"
    return wanted or (str(_default_type(saved).get("_type")) if saved else None)


def saved_section(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the ``quantization_config`` of a config or of its language model; empty if not set."""
    of_model = config.get("quantization_config")
    section: Mapping[str, Any] = of_model or text_config(config).get("quantization_config") or {}
    return section


def _default_type(saved: Mapping[str, Any]) -> Mapping[str, Any]:
    kinds = saved.get("quant_type")
    kind = kinds.get("default") if isinstance(kinds, Mapping) else None
    return kind if isinstance(kind, Mapping) else {"_type": kinds}


def quantize(model: Any, method: str, device: torch.device) -> None:
    """Quantize a model's linear layers with torchao, one after another, except the output head.

    Args:
        model: a model whose weights have the dtype that it computes in.
        method: one of ``TORCHAO_METHODS``.
        device: device that each layer is moved to.

    Raises:
        ModelError: the model has no linear layers that can be quantized, or torchao does not
            support their shape or dtype.
    """
    import torchao.quantization as ao

    head = model.get_output_embeddings()
    linears = {
        name: module
        for name, module in model.named_modules()
        if type(module) is nn.Linear and module is not head
    }
    if not linears:
        family = model.config.model_type
        raise ModelError(
            f"model.quantization: models of the family {family!r} have no linear layers that "
            "can be quantized",
            hint="remove the key",
        )
    config = _config(ao, method, device, linears)
    for name, linear in linears.items():
        try:
            ao.quantize_(linear.to(device), config)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # torchao raises errors of any type
            reason = one_line(error, 200)
            raise ModelError(
                f"model.quantization: {method} cannot quantize {name} in "
                f"{linear.weight.dtype}: {reason}",
                hint="remove the key, or choose another method",
            ) from error


def is_plain(linear: object) -> TypeGuard[nn.Linear]:
    """Return True if a module is a ``torch.nn.Linear`` whose weight is not quantized."""
    return type(linear) is nn.Linear and is_plain_weight(linear.weight)


def is_plain_weight(weight: object) -> TypeGuard[nn.Parameter]:
    """Return True if an attribute of a module is a parameter that is not quantized."""
    return type(weight) is nn.Parameter


def plain_tensors(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the tensors that a quantized tensor consists of, or an ordinary tensor itself."""
    if hasattr(tensor, "__tensor_flatten__"):
        names, _ = tensor.__tensor_flatten__()
        for name in names:
            yield from plain_tensors(getattr(tensor, name))
    else:
        yield tensor


def _config(ao: Any, method: str, device: torch.device, linears: Mapping[str, nn.Linear]) -> Any:
    if method == "int8_weight_only":
        return ao.Int8WeightOnlyConfig(version=2)
    assert method == "int4_weight_only"
    widths = {linear.in_features for linear in linears.values()}
    group = next((size for size in _GROUPS if all(width % size == 0 for width in widths)), None)
    if group is None:
        raise ModelError(
            "model.quantization: int4_weight_only needs linear layers whose numbers of inputs are "
            "divisible by 32",
            hint="remove the key, or choose another method",
        )
    if device.type == "cuda":
        return ao.Int4WeightOnlyConfig(group_size=group, int4_packing_format="tile_packed_to_4d")
    from torchao.prototype.quantization.int4 import PrototypeInt4WeightOnlyConfig

    return PrototypeInt4WeightOnlyConfig(group_size=group, set_inductor_config=False)


def _require_torchao() -> None:
    try:
        import torchao  # noqa: F401
    except ImportError:
        raise ModelError(
            f"quantized weights need torchao: {install_command('quantization')}"
        ) from None


def _types_in(value: Any) -> Iterator[str]:
    if isinstance(value, Mapping):
        if "_type" in value:
            yield str(value["_type"])
        for item in value.values():
            yield from _types_in(item)
    elif isinstance(value, list):
        for item in value:
            yield from _types_in(item)
