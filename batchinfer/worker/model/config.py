"""Reads a model's config.json, and refuses families that cannot be run."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import transformers
from transformers import AutoConfig, PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from batchinfer.config import Runner
from batchinfer.engine.kv.layout import KVLayout
from batchinfer.engine.kv.model_config import max_positions, text_config
from batchinfer.engine.kv.unsupported_models import refuse_unsupported
from batchinfer.errors import ModelError
from batchinfer.worker.model.config_values import (
    BadValueError,
    check_derived,
    check_values,
    readable,
)
from batchinfer.worker.model.language_model import (
    causal_class,
    changed_logits,
    headless_names,
    saved_class,
)
from batchinfer.worker.model.meta_model import blame
from batchinfer.worker.model.model_folder import read_config, read_json
from batchinfer.worker.model.quantization import saved_section
from batchinfer.worker.model.quantized.formats import choose_format
from batchinfer.worker.model.quiet_transformers import quiet_transformers

_PREAMBLE = re.compile(r"^Validation error for field '\w+': \w+: ")


def check_family(folder: Path, raw: Mapping[str, Any]) -> str:
    """Return the ``model_type`` of a folder's config.json.

    Raises:
        ModelError: the key is missing, or transformers does not have the family.
    """
    family = raw.get("model_type")
    if not isinstance(family, str):
        raise ModelError(
            f"{folder}/config.json has no model_type, so the model's family is unknown; "
            "fetch the model again"
        )
    if family not in CONFIG_MAPPING:
        raise ModelError(
            f"{folder}/config.json: transformers {transformers.__version__} does "
            f"not support the model_type {family[:80]!r}; a later version may "
            "support it"
        )
    return family


def config_of(folder: Path) -> Any:
    """Let transformers read a folder's config. Errors may be of any type."""
    with quiet_transformers():
        return AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)


def load_config(folder: Path, runner: Runner = "generate") -> PreTrainedConfig:
    """Return the folder's config, and check that its family can be run.

    The runner ``pooling`` also accepts a body that was saved without an output head, or with a
    classification head. The token embeddings then serve as the output head, whose logits are not
    used.

    Raises:
        ModelError: config.json is missing or broken, or the family cannot be run.
    """
    raw = read_config(folder)
    check_family(folder, raw)
    try:
        check_values(raw)
        refuse_unsupported(raw)
    except (BadValueError, ValueError) as error:
        raise ModelError(f"{folder}/config.json: {readable(error)}") from None
    try:
        config: PreTrainedConfig = config_of(folder)
        _check_filled(config)
    except Exception as error:  # a config's validation raises errors of several libraries
        reason = _reason(error)
        key = "" if any(key in reason for key in raw) else blame(folder, _check_filled)
        raise ModelError(f"{folder}/config.json: {key}{reason}") from error
    _check_class(folder, config, runner)
    _add_quantization(folder, config)
    return config


def _add_quantization(folder: Path, config: PreTrainedConfig) -> None:
    """Add the missing ``quantization_config`` to the config of a checkpoint by an older ModelOpt,
    which describes the quantization only in hf_quant_config.json."""
    path = folder / "hf_quant_config.json"
    if saved_section(config.to_dict()) or (saved := read_json(path)) is None:
        return
    section = saved.get("quantization")
    if not isinstance(section, Mapping):
        raise ModelError(f"{path} has no object at the key quantization; fetch the model again")
    if section.get("quant_algo") is None:
        return  # only KV is quantized
    section = {"quant_method": "modelopt", **section}
    try:
        choose_format(section)
    except ModelError as error:
        raise ModelError(f"{path}, read as quantization_config in config.json: {error}") from error
    config.quantization_config = section


def _check_filled(config: PreTrainedConfig) -> None:
    values = config.to_dict()
    check_values(values)
    layout = _layout(values)
    heads = text_config(values).get("num_attention_heads", layout.num_kv_heads)
    check_derived(heads, layout, max_positions(values))


def _layout(values: Mapping[str, Any]) -> KVLayout:
    return KVLayout.from_config(values, block_size=1, dtype="float32")


def _reason(error: Exception) -> str:
    """Return an error's text on one line. A validator's report is cut to its first sentence."""
    text = " ".join(str(error).split())
    return readable(_PREAMBLE.sub("", text).partition(". Errors:")[0])


def _check_class(folder: Path, config: PreTrainedConfig, runner: Runner) -> None:
    """Refuse models that do not generate text, and classes whose attention cannot be replaced."""
    family = f"{folder}/config.json: models of the family {config.model_type!r}"
    model_class, whole_class = causal_class(config), saved_class(config)
    if model_class is None or whole_class is None:
        raise ModelError(f"{family} cannot be run: they do not generate text")
    if key := changed_logits(config):
        raise ModelError(f"{family} cannot be run: they scale or cap their logits ({key})")
    saved = config.architectures or [whole_class.__name__]
    if hasattr(config, "auto_map"):  # architectures names code that is never run
        saved = [whole_class.__name__]
    task = headless_names(config).get(saved[0])
    if whole_class.__name__ not in saved and task is not None:
        if runner != "pooling":
            raise ModelError(
                f"{folder}/config.json: the model's class (architectures) is "
                f"{saved[0]!r}, which has no output head and generates no text; "
                f"set task: {task} to run it"
            )
        config.tie_word_embeddings = True
    elif whole_class.__name__ not in saved:
        raise ModelError(
            f"{folder}/config.json: the model's class (architectures) is "
            f"{saved[0][:80]!r}; the only class of this family that generates text "
            f"is {whole_class.__name__}"
        )
    replaceable = hasattr(sys.modules[model_class.__module__], "ALL_ATTENTION_FUNCTIONS")
    replaceable |= not _layout(config.to_dict()).attention_layers
    if not replaceable or "logits_to_keep" not in inspect.signature(model_class.forward).parameters:
        raise ModelError(
            f"{family} cannot be run: transformers {transformers.__version__} does "
            "not allow their attention to be replaced"
        )
