"""Loads a model's weights, or makes random ones, and fixes its rotary positions."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from batchinfer.errors import DeviceError, ModelError, one_line
from batchinfer.worker.attention.attention import ATTENTION_NAME, register
from batchinfer.worker.model.checkpoint import weight_files
from batchinfer.worker.model.language_model import (
    causal_class,
    is_wrapper,
    language_model_config,
    read_language_model,
)
from batchinfer.worker.model.meta_model import described
from batchinfer.worker.model.quantization import TORCHAO_METHODS, quantize, saved_section
from batchinfer.worker.model.quantized.checkpoint import dequantized_tensors, empty_biases
from batchinfer.worker.model.quantized.formats import Format, choose_format
from batchinfer.worker.model.quiet import quiet_transformers

_SAFETENSORS_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
_NAMES_SHOWN = 3
_SEED = 0
_BUFFER = re.compile(r"\b(attn|attention)\.(masked_)?bias$|\b(inv_freq|position_ids)$")
_LAYER = re.compile(r"layers\.(\d+)\.")


def choose_dtype(wanted: str, values: Mapping[str, Any], saved: Mapping[str, str]) -> str:
    """The dtype to load in, by torch's name.

    Args:
        wanted: ``auto`` or torch's name.
        values: the model's config.
        saved: the dtypes of the tensors in the files, as safetensors writes them.

    Raises:
        ModelError: the model is saved in a dtype that it cannot be run in.
    """
    if wanted != "auto":
        return wanted
    named = values.get("dtype") or values.get("torch_dtype")
    name = str(named or _SAFETENSORS_DTYPES.get(next(iter(saved.values()), ""), "float32"))
    name = name.removeprefix("torch.")
    if name not in _SAFETENSORS_DTYPES.values():
        raise ModelError(
            f"by config.json (dtype) the model is saved as {name[:80]}; give model.dtype: bfloat16 "
            "or float32"
        )
    return name


def load_weights(
    folder: Path,
    config: PreTrainedConfig,
    dtype: str,
    device: torch.device,
    max_model_len: int,
    quantization: str | None = None,
    show_share: Callable[[float], None] = lambda share: None,
    *,
    random: bool = False,
) -> torch.nn.Module:
    """Load transformers' own model of the config from the folder, onto the device.

    Args:
        max_model_len: longest sequence in tokens, by which a LongRoPE model's positions are chosen.
        quantization: a name of ``model.quantization``.
        show_share: called with the share of the weights that is read, from 0 to 1.
        random: take the class's initial weights, the same each time on a device, and no files.

    Raises:
        ModelError: the files cannot be read or belong to another model than the config; or random
            weights would be quantized.
        DeviceError: the weights do not fit the device.
    """
    register()
    saved = saved_section(config.to_dict())
    if random and saved:
        raise ModelError(
            f"{folder}/config.json: its weights are saved quantized (quantization_config), and "
            "random ones are not; take quantization_config out of it"
        )
    saved_as = choose_format(saved)
    with _errors_named(folder, f"the weights cannot be {'made' if random else 'loaded'}"):
        with quiet_transformers(show_share):
            if random:
                model = _make_random(config, dtype, device)
            else:
                model, report, spare = _read(folder, config, dtype, saved_as)
                check_loaded(folder, model, report, spare)
        if quantization in TORCHAO_METHODS:
            quantize(model, quantization, device)
        model = model.to(device)
    assert isinstance(model, torch.nn.Module)
    fix_longrope(model, max_model_len)
    return model.eval().requires_grad_(False)


def _make_random(config: PreTrainedConfig, dtype: str, device: torch.device) -> Any:
    with torch.random.fork_rng([device] if device.type == "cuda" else []), device:
        torch.manual_seed(_SEED)
        return AutoModelForCausalLM.from_config(
            language_model_config(config),
            dtype=getattr(torch, dtype),
            attn_implementation=ATTENTION_NAME,
        )


@contextmanager
def _errors_named(folder: Path, problem: str) -> Iterator[None]:
    """Raise errors of a model's code and its libraries as errors that name the folder."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise DeviceError("the model's weights do not fit the device; use a smaller one") from error
    except SafetensorError as error:
        raise ModelError(
            f"{folder}: the safetensors files are damaged ({one_line(error)}); "
            "fetch the model again"
        ) from error
    except (ModelError, DeviceError):
        raise
    except Exception as error:  # of any kind
        raise ModelError(f"{folder}: {problem}: {described(error)}") from error


def _read(
    folder: Path, config: PreTrainedConfig, dtype: str, saved_as: Format | None
) -> tuple[PreTrainedModel, Mapping[str, Any], set[str]]:
    """The model, transformers' report on loading it, and tensors that it may leave out.

    Args:
        saved_as: the format of quantized weights, which are dequantized one at a time as they are
            loaded; None: transformers reads the files.
    """
    options: dict[str, Any] = {
        "dtype": getattr(torch, dtype),
        "attn_implementation": ATTENTION_NAME,
        "use_safetensors": True,
        "trust_remote_code": False,
        "local_files_only": True,
        "ignore_mismatched_sizes": True,  # they are refused by name
        "output_loading_info": True,
    }
    if saved_as is None:
        read = read_language_model if is_wrapper(config) else AutoModelForCausalLM.from_pretrained
        return *read(folder, config=config, **options), set()
    config = deepcopy(config)
    for part in (config, config.get_text_config()):
        vars(part).pop("quantization_config", None)  # transformers would make layers for it
    paths = [folder / name for name in weight_files(folder)]
    tensors = dequantized_tensors(paths, saved_as, options["dtype"])
    own_class: Any = causal_class(config)
    read = read_language_model if is_wrapper(config) else own_class.from_pretrained
    return *read(None, config=config, state_dict=tensors, **options), empty_biases(tensors)


def _misplaced(model: PreTrainedModel, unused: Collection[str]) -> list[str]:
    """The ``unused`` tensors that lie inside the model's own layers, embeddings and output head:
    without them it would write other text than it was trained to.

    Others are not needed: parts that the model does not have (value heads, classifiers, draft
    layers), masks and rotary frequencies that older versions of transformers saved, and layers
    after the last that predict tokens further ahead (``num_nextn_predict_layers``).
    """
    decoder, prefix = model.base_model, f"{model.base_model_prefix}."
    parts = {name for name, _ in (*decoder.named_children(), *model.named_children())}
    config = model.config.get_text_config()
    num_layers = config.num_hidden_layers
    ahead = range(num_layers, num_layers + (getattr(config, "num_nextn_predict_layers", 0) or 0))

    def is_spare(name: str) -> bool:
        local_name = name.removeprefix(prefix)
        layer = _LAYER.match(local_name)
        return (
            local_name.partition(".")[0] not in parts
            or _BUFFER.search(local_name) is not None
            or (layer is not None and int(layer.group(1)) in ahead)
        )

    return [name for name in unused if not is_spare(name)]


def check_loaded(
    folder: Path,
    model: PreTrainedModel,
    found: Mapping[str, Any],
    spare: Collection[str] = (),
) -> None:
    """Check that every parameter was filled, and no tensor of the model is left over.

    Args:
        found: transformers' report on loading it (``output_loading_info``).
        spare: tensors that it may leave out.

    Raises:
        ModelError: naming tensors.
    """
    unused = _misplaced(model, set(found["unexpected_keys"]) - set(spare))
    remedy = "take config.json and the safetensors files from the same model, or fetch it again"
    mismatched = sorted(found["mismatched_keys"])
    missing = found["missing_keys"] - {name for name, *_ in mismatched}  # these are in both lists
    if missing:
        problem = f"{len(missing)} tensors are missing from the weight files: {_some(missing)}"
    elif mismatched:
        name, saved, wanted = mismatched[0]
        problem = f"{name} is {_shape(saved)}, by config.json it should be {_shape(wanted)}"
    elif unused:
        problem = (
            f"the weight files have {len(unused)} tensors that have no place in the model that "
            f"config.json describes: {_some(unused)}"
        )
        if any(".lora_" in name for name in unused):
            remedy = "merge the adapters into the weights (merge_and_unload in peft) and save again"
    else:
        return
    raise ModelError(f"{folder}: {problem}; {remedy}")


def _some(names: Collection[str]) -> str:
    more = ", ..." if len(names) > _NAMES_SHOWN else ""
    return ", ".join(sorted(names)[:_NAMES_SHOWN]) + more


def _shape(size: Collection[int]) -> str:
    return " x ".join(map(str, size)) or "a single number"


def fix_longrope(model: torch.nn.Module, max_model_len: int) -> None:
    """Choose each LongRoPE set of frequencies from ``max_model_len``, in tokens, and keep it.

    transformers chooses by the longest position in the batch, so that other rows would change a
    row's tokens. Models without LongRoPE stay as they are.

    Raises:
        ModelError: the model chooses in a way that cannot be fixed.
    """
    fixed = 0
    for module in model.modules():
        if getattr(module, "rope_type", None) == "longrope" and hasattr(module, "inv_freq"):
            _fix(module, max_model_len)
            fixed += 1
    if fixed == 0 and uses_longrope(getattr(model, "config", None)):
        raise ModelError("the model's rotary positions (longrope) are not where they are expected")


def _fix(module: torch.nn.Module, max_model_len: int) -> None:
    frequencies = module.inv_freq
    assert isinstance(frequencies, torch.Tensor)
    like = frequencies.new_zeros(1)
    alone = torch.tensor([[0, 1]], device=frequencies.device)
    beside_last = torch.tensor([[0, 1, max_model_len - 1]], device=frequencies.device)
    # One call with the last position makes transformers choose; under another name it stays.
    module(like, position_ids=beside_last)
    module.rope_type = "default"  # type: ignore[assignment]
    beside = module(like, position_ids=beside_last)
    for got, expected in zip(module(like, position_ids=alone), beside, strict=True):
        if not torch.equal(got, expected[:, :2]):
            raise ModelError(
                f"{type(module).__name__} chooses its rotary positions by the longest row in the "
                "batch (longrope) and cannot be fixed; the model cannot be run"
            )


def uses_longrope(config: Any) -> bool:
    """Whether the text part of a config asks for LongRoPE."""
    text = getattr(config, "get_text_config", lambda: config)()
    rope = getattr(text, "rope_parameters", None) or {}
    entries = [rope, *(entry for entry in rope.values() if isinstance(entry, Mapping))]
    return any(entry.get("rope_type") == "longrope" for entry in entries)
