"""Extracts the language model, with its output head, from a multimodal model.

A multimodal wrapper (``Qwen3VLForConditionalGeneration``, ``Mistral3ForConditionalGeneration``) has
a language model and towers for images and sound. Text prompts do not need the towers, so towers are
neither built nor loaded. transformers' wrapper class, without its towers, loads the weights,
because the class knows all tensor names in published checkpoints. The language model is then taken
out of the wrapper and run like any other causal model.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_FOR_MULTIMODAL_LM_MAPPING,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    MODEL_MAPPING,
)

from batchinfer.worker.model.body import body_of
from batchinfer.worker.model.quiet_transformers import quiet_transformers

_WRAPPERS = (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_FOR_MULTIMODAL_LM_MAPPING,
)

_LOGIT_KEYS = ("final_logit_softcapping", "logits_scaling", "logit_scale")


def is_wrapper(config: PreTrainedConfig) -> bool:
    """Return True if the config contains the config of a language model (``text_config``)."""
    text = config.get_text_config()
    return text is not config and text is getattr(config, "text_config", None)


def causal_class(config: PreTrainedConfig) -> type[PreTrainedModel] | None:
    """Return the class of the causal language model to run; None if the model generates no text.

    If transformers has no causal class for a wrapper's language model, a class is made from the
    body and a head, and registered with transformers.
    """
    text = type(config.get_text_config()) if is_wrapper(config) else type(config)
    if is_wrapper(config) and text not in MODEL_FOR_CAUSAL_LM_MAPPING:
        body_class = _body_class(config)
        if body_class is None:
            return None
        AutoModelForCausalLM.register(text, _with_head(body_class, text), exist_ok=True)
    model_class: type[PreTrainedModel] | None = MODEL_FOR_CAUSAL_LM_MAPPING.get(text, None)
    return model_class


def changed_logits(config: PreTrainedConfig) -> str | None:
    """Return the config key that makes a wrapper scale or cap its logits, or None. The result is
    also None if transformers has a causal class for the language model, because only the causal
    classes that this module makes ignore such keys.
    """
    if not getattr(causal_class(config), "has_added_head", False):
        return None
    values: dict[str, Any] = config.get_text_config().to_dict()
    return next((key for key in _LOGIT_KEYS if values.get(key)), None)


def saved_class(config: PreTrainedConfig) -> type[PreTrainedModel] | None:
    """Return the transformers class that the weights were saved from; None if this class generates
    no text."""
    if not is_wrapper(config):
        return causal_class(config)
    listed = [mapping[type(config)] for mapping in _WRAPPERS if type(config) in mapping]
    classes = [c for c in listed if issubclass(type(config), c.config_class)]
    named = set(config.architectures or ())
    return next((c for c in classes if c.__name__ in named), next(iter(classes), None))


def headless_names(config: PreTrainedConfig) -> dict[str, str]:
    """Return the names of the family's classes without an output head: the body and the classifier.
    The values are the tasks that the classes can run. For wrappers, the mapping is empty."""
    if is_wrapper(config):
        return {}
    tasks = {"embed": MODEL_MAPPING, "classify": MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING}
    listed = {task: mapping.get(type(config), None) for task, mapping in tasks.items()}
    return {c.__name__: task for task, c in listed.items() if c is not None}


def language_model_config(config: PreTrainedConfig) -> PreTrainedConfig:
    causal_class(config)  # registers a class if transformers has none
    return config.get_text_config() if is_wrapper(config) else config


def read_language_model(
    folder: Path | None,
    config: PreTrainedConfig,
    change: Callable[[nn.Module], None] | None = None,
    **options: Any,
) -> Any:
    """Load the causal model of a config, without towers. Return the model and transformers' loading
    report.

    Args:
        folder: the model's folder; None if ``options`` contains the tensors (``state_dict``).
        change: changes the new model, whose tensors are on the ``meta`` device, before its weights
            are loaded.
    """
    is_whole = not is_wrapper(config)
    model_class = causal_class(config) if is_whole else saved_class(config)
    assert model_class is not None
    read_class = model_class if is_whole else _without_towers(model_class)
    if change is not None:
        read_class = _changed(read_class, change)
    model, report = read_class.from_pretrained(folder, config=config, **options)
    if is_whole:
        model.__class__ = model_class
    return (model if is_whole else _extract(model)), report


def language_model(wrapper: PreTrainedModel) -> nn.Module:
    """Return a wrapper's language model, without the output head."""
    inner: PreTrainedModel = wrapper.get_decoder()
    return inner if inner.get_output_embeddings() is None else body_of(inner)


def whole_on_meta(config: PreTrainedConfig) -> tuple[PreTrainedModel, str, str]:
    """Build the model, without its towers, whose layer names checkpoints and adapters use.

    Returns:
        The model on the ``meta`` device, the name of its body, and the name of the body in the
        causal model that is run.
    """
    text_config = language_model_config(config)
    with quiet_transformers(), torch.device("meta"):
        causal = AutoModelForCausalLM.from_config(text_config)
        causal_body = _name(causal, body_of(causal))
        if not is_wrapper(config):
            return causal, causal_body, causal_body
        whole_class = saved_class(config)
        assert whole_class is not None
        whole = _without_towers(whole_class)(config)
    return whole, _name(whole, language_model(whole)), causal_body


def _name(model: PreTrainedModel, part: nn.Module) -> str:
    names: dict[int, str] = {id(module): name for name, module in model.named_modules()}
    return names[id(part)]


def _body_class(config: PreTrainedConfig) -> type[PreTrainedModel] | None:
    """Return the class of a wrapper's language model, even if transformers' mappings lack it."""
    listed: type[PreTrainedModel] | None = MODEL_MAPPING.get(type(config.get_text_config()), None)
    wrapper_class = saved_class(config)
    if listed is not None or wrapper_class is None:
        return listed
    with quiet_transformers(), torch.device("meta"):
        body = language_model(wrapper_class(config))
    return type(body) if isinstance(body, PreTrainedModel) else None


def _extract(wrapper: PreTrainedModel) -> PreTrainedModel:
    config = wrapper.config.get_text_config()
    head, embeddings = wrapper.get_output_embeddings(), wrapper.get_input_embeddings()
    config.tie_word_embeddings = head.weight is embeddings.weight
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=wrapper.dtype)
    model.set_submodule(_name(model, body_of(model)), language_model(wrapper))
    model.set_output_embeddings(head)
    return model


def _changed(
    model_class: type[PreTrainedModel], change: Callable[[nn.Module], None]
) -> type[PreTrainedModel]:
    class Changed(model_class):  # type: ignore[misc]
        def __init__(self, config: PreTrainedConfig) -> None:
            super().__init__(config)
            change(self)

    return _named_like(model_class, Changed)


def _named_like(
    model_class: type[PreTrainedModel], subclass: type[PreTrainedModel]
) -> type[PreTrainedModel]:
    """Give a subclass the name and module of ``model_class``, by which transformers looks up the
    rules for renaming tensors."""
    subclass.__name__ = subclass.__qualname__ = model_class.__name__
    subclass.__module__ = model_class.__module__
    return subclass


def _without_towers(wrapper_class: type[PreTrainedModel]) -> type[PreTrainedModel]:
    """Return a subclass that has only the language model and the head."""

    class Wrapper(wrapper_class):  # type: ignore[misc]
        def __init__(self, config: PreTrainedConfig) -> None:
            if not hasattr(config, "pad_token_id"):
                # Llama 4's wrapper reads this attribute, which its config lacks.
                config.pad_token_id = None
            if getattr(config, "vision_config", None) is not None:
                # Vision towers with SAM choose their attention class by this name. Any valid name
                # works, because the towers are deleted below.
                config.vision_config._attn_implementation = "eager"
            super().__init__(config)
            _keep(self, [language_model(self), self.get_output_embeddings()])

    return _named_like(wrapper_class, Wrapper)


def _keep(module: nn.Module, kept: list[nn.Module]) -> bool:
    """Delete submodules, except ``kept`` and their parents. Return True if the module itself is
    kept."""
    if any(module is each for each in kept):
        return True
    for name, child in list(module.named_children()):
        if not _keep(child, kept):
            delattr(module, name)
    return any(True for _ in module.children())


def _with_head(body_class: type[PreTrainedModel], config_class: Any) -> type[PreTrainedModel]:
    family_class: Any = body_class.__base__

    class WithHead(family_class):  # type: ignore[misc]
        has_added_head = True
        _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012
        base_model_prefix = "model"

        def __init__(self, config: PreTrainedConfig) -> None:
            super().__init__(config)
            self.model = body_class(config)
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
            self.post_init()

        def forward(
            self,
            input_ids: torch.Tensor | None = None,
            logits_to_keep: int | torch.Tensor = 0,
            **kwargs: Any,
        ) -> CausalLMOutputWithPast:
            hidden = self.model(input_ids=input_ids, **kwargs)[0]
            if isinstance(logits_to_keep, int):
                hidden = hidden[:, -logits_to_keep:] if logits_to_keep else hidden
            else:
                hidden = hidden[:, logits_to_keep]
            return CausalLMOutputWithPast(logits=self.lm_head(hidden))

    WithHead.config_class = config_class
    WithHead.__name__ = WithHead.__qualname__ = f"{body_class.__name__}ForCausalLM"
    WithHead.__module__ = body_class.__module__
    return WithHead
