"""Loads a model's weights, or makes random weights, and fixes the LongRoPE frequencies."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from batchinfer.errors import DeviceError, ModelError, one_line
from batchinfer.worker.attention.attention import ATTENTION_NAME, register
from batchinfer.worker.model.check_weight_files import weight_files
from batchinfer.worker.model.language_model import (
    headless_names,
    language_model_config,
    read_language_model,
)
from batchinfer.worker.model.meta_model import described
from batchinfer.worker.model.quantization import TORCHAO_METHODS, quantize, saved_section
from batchinfer.worker.model.quantized.formats import (
    choose_format,
    dequantized_tensors,
    empty_biases,
)
from batchinfer.worker.model.quiet_transformers import quiet_transformers

_SAFETENSORS_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
_MAX_NAMES_SHOWN = 3
_SEED = 0
_BUFFER = re.compile(r"\b(attn|attention)\.(masked_)?bias$|\b(inv_freq|position_ids)$")
_LAYER = re.compile(r"layers\.(\d+)\.")
_SEPARATE_EXPERT = re.compile(r"\bexperts\.\d+\.")


class LaterWeights(Protocol):
    def are_in(self, tensor: str) -> bool: ...

    def take_out(self, model: torch.nn.Module) -> None:
        """Remove the modules from a new model on the ``meta`` device."""
        ...


def choose_dtype(wanted: str, values: Mapping[str, Any], saved: Mapping[str, str]) -> str:
    """Return torch's name of the dtype to load weights in.

    Args:
        wanted: ``auto`` or torch's name of a dtype.
        values: values of the model's config.json.
        saved: dtype of each tensor in the weight files, as safetensors writes it.

    Raises:
        ModelError: the model is saved in a dtype in which models cannot be run.
    """
    if wanted != "auto":
        return wanted
    named = values.get("dtype") or values.get("torch_dtype")
    name = str(named or _SAFETENSORS_DTYPES.get(next(iter(saved.values()), ""), "float32"))
    name = name.removeprefix("torch.")
    if name not in _SAFETENSORS_DTYPES.values():
        raise ModelError(
            f"config.json says that the model is saved as {name[:80]} (dtype); set model.dtype to "
            "bfloat16 or float32"
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
    later: LaterWeights | None = None,
) -> torch.nn.Module:
    """Load transformers' causal language model from the folder, onto the device.

    Args:
        max_model_len: longest sequence in tokens, which determines the LongRoPE frequencies.
        quantization: value of ``model.quantization``.
        show_share: called with the share of the weights that is loaded, from 0 to 1.
        random: True to use random initial weights instead of the folder's files. The random weights
            are the same in every run on a device.
        later: modules whose weights are not loaded now.

    Raises:
        ModelError: the files cannot be read or do not match the config, or ``random`` is set for a
            quantized checkpoint.
        DeviceError: the weights do not fit into the device's memory.
    """
    register()
    saved = saved_section(config.to_dict())
    if random and saved:
        raise ModelError(
            f"{folder}/config.json has a quantization_config, but random weights "
            "cannot be quantized; remove quantization_config"
        )
    with loading_errors(folder):
        with quiet_transformers(show_share):
            if random:
                model = _make_random(config, dtype, device)
            else:
                model, report, optional = read_weights(
                    read_language_model, folder, config, dtype, later=later
                )
                check_loaded(folder, model, report, optional)
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
def loading_errors(folder: Path) -> Iterator[None]:
    """Turn errors inside the ``with`` block into errors that name the folder."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise DeviceError(
            "the model's weights do not fit into the device's memory; use a smaller model"
        ) from error
    except SafetensorError as error:
        raise ModelError(
            f"{folder}: the safetensors files are damaged ({one_line(error)}); "
            "fetch the model again"
        ) from error
    except (ModelError, DeviceError):
        raise
    except Exception as error:  # transformers and its libraries raise errors of any type
        raise ModelError(f"{folder}: the weights cannot be loaded: {described(error)}") from error


def load_options(dtype: torch.dtype, attention: str) -> dict[str, Any]:
    """Return ``from_pretrained`` options with which only safetensors files are loaded and no code
    is run."""
    return {
        "dtype": dtype,
        "attn_implementation": attention,
        "use_safetensors": True,
        "trust_remote_code": False,
        "local_files_only": True,
        "ignore_mismatched_sizes": True,  # ``check_loaded`` reports wrong shapes
        "output_loading_info": True,
    }


def read_weights(
    read: Callable[..., Any],
    folder: Path,
    config: PreTrainedConfig,
    dtype: str,
    attention: str = ATTENTION_NAME,
    later: LaterWeights | None = None,
) -> tuple[PreTrainedModel, Mapping[str, Any], set[str]]:
    """Read a model from its weight files. Weights in a format of ``METHODS`` are dequantized one at
    a time while they are loaded; transformers reads all other weights itself.

    Args:
        read: ``from_pretrained`` of the model's class.
        attention: name of the attention function in transformers.
        later: modules of a quantized checkpoint whose weights are not read yet.

    Returns:
        The model, transformers' loading report, and the names of tensors that the model may lack.
    """
    options = load_options(getattr(torch, dtype), attention)
    saved_as = choose_format(saved_section(config.to_dict()))
    if saved_as is None:
        return *read(folder, config=config, **options), set()
    config = deepcopy(config)
    for part in (config, config.get_text_config()):
        # With this attribute, transformers would make quantized layers.
        vars(part).pop("quantization_config", None)
    paths = [folder / name for name in weight_files(folder)]
    tensors = dequantized_tensors(paths, saved_as, options["dtype"])
    if later is not None:
        tensors = {name: tensor for name, tensor in tensors.items() if not later.are_in(name)}
        options["change"] = later.take_out
    return *read(None, config=config, state_dict=tensors, **options), empty_biases(tensors)


def _unused_head(model: PreTrainedModel) -> set[str]:
    """Return the names of the output head's tensors if a model was saved without a head. In
    families whose head cannot be tied to the embeddings, transformers reports these tensors as
    missing, although the model's task does not use the head."""
    saved = model.config.architectures or [""]
    if saved[0] not in headless_names(model.config):
        return set()
    head = getattr(model.get_output_embeddings(), "weight", None)  # encoders have no head
    return {name for name, part in model.named_parameters() if part is head}


def _misplaced(model: PreTrainedModel, unused: Collection[str]) -> list[str]:
    """Return the ``unused`` tensors that belong to the model's layers, embeddings or output head.
    If layers, embeddings or the head lack saved tensors, the model's output is wrong.

    Other unused tensors do not matter: value heads, classifiers and draft layers; masks and rotary
    frequencies that older versions of transformers saved; and extra layers that predict later
    tokens (``num_nextn_predict_layers``).
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
    report: Mapping[str, Any],
    optional: Collection[str] = (),
) -> None:
    """Check that weight files have all parameters of a model, and no other tensors for its layers.

    Args:
        report: transformers' report on loading the model (``output_loading_info``).
        optional: names of tensors that the model may lack.

    Raises:
        ModelError: tensors are missing, superfluous or have the wrong shape. The message names
            some of them.
    """
    unused = _misplaced(model, set(report["unexpected_keys"]) - set(optional))
    remedy = "take config.json and the safetensors files from the same model, or fetch it again"
    mismatched = sorted(report["mismatched_keys"])
    # transformers also lists mismatched tensors as missing.
    missing = report["missing_keys"] - {name for name, *_ in mismatched} - _unused_head(model)
    if missing:
        problem = f"{len(missing)} tensors are missing from the weight files: {_some(missing)}"
        has_separate = any(map(_SEPARATE_EXPERT.search, report["unexpected_keys"]))
        if has_separate and all(".experts." in name for name in missing):
            remedy = (
                "the files have separate tensors for each expert, which transformers "
                f"cannot join for models of the family {model.config.model_type!r}; use a "
                "checkpoint with one tensor for all experts of a layer"
            )
    elif mismatched:
        name, saved, wanted = mismatched[0]
        problem = (
            f"{name} is {_shape(saved)}, but according to config.json it should be {_shape(wanted)}"
        )
    elif unused:
        problem = (
            f"the weight files have {len(unused)} tensors that the model in "
            f"config.json does not have: {_some(unused)}"
        )
        if any(".lora_" in name for name in unused):
            remedy = (
                "merge the adapters into the weights (merge_and_unload in peft) and "
                "save the model again"
            )
    else:
        return
    raise ModelError(f"{folder}: {problem}; {remedy}")


def _some(names: Collection[str]) -> str:
    more = ", ..." if len(names) > _MAX_NAMES_SHOWN else ""
    return ", ".join(sorted(names)[:_MAX_NAMES_SHOWN]) + more


def _shape(size: Collection[int]) -> str:
    return " x ".join(map(str, size)) or "a single number"


def fix_longrope(model: torch.nn.Module, max_model_len: int) -> None:
    """Choose the LongRoPE frequencies for ``max_model_len`` tokens, once for all steps.
    transformers chooses the frequencies by the largest position in a batch, so other rows of the
    batch could change a row's output. Models without LongRoPE do not change.

    Raises:
        ModelError: the frequencies depend on the longest row.
    """
    fixed = 0
    for module in model.modules():
        if getattr(module, "rope_type", None) == "longrope" and hasattr(module, "inv_freq"):
            _fix(module, max_model_len)
            fixed += 1
    if fixed == 0 and uses_longrope(getattr(model, "config", None)):
        raise ModelError("the model uses longrope, but none of its modules has rotary frequencies")


def _fix(module: torch.nn.Module, max_model_len: int) -> None:
    frequencies = module.inv_freq
    assert isinstance(frequencies, torch.Tensor)
    like = frequencies.new_zeros(1)
    alone = torch.tensor([[0, 1]], device=frequencies.device)
    with_last = torch.tensor([[0, 1, max_model_len - 1]], device=frequencies.device)
    # A call with the last position makes transformers choose the frequencies. Once the rope_type is
    # "default", transformers keeps these frequencies.
    module(like, position_ids=with_last)
    module.rope_type = "default"  # type: ignore[assignment]
    expected = module(like, position_ids=with_last)
    for actual, wanted in zip(module(like, position_ids=alone), expected, strict=True):
        if not torch.equal(actual, wanted[:, :2]):
            raise ModelError(
                f"the model cannot be run: {type(module).__name__} chooses rotary "
                "frequencies by the longest row in the batch (longrope), and batchinfer "
                "cannot make it use the same frequencies for every batch"
            )


def uses_longrope(config: Any) -> bool:
    text = getattr(config, "get_text_config", lambda: config)()
    rope = getattr(text, "rope_parameters", None) or {}
    entries = [rope, *(entry for entry in rope.values() if isinstance(entry, Mapping))]
    return any(entry.get("rope_type") == "longrope" for entry in entries)
