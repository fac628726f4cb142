"""The language model, with its output head, of a multimodal model.

A multimodal wrapper (``Qwen3VLForConditionalGeneration``, ``Mistral3ForConditionalGeneration``) has
a language model and towers for images and sound. Text prompts do not need the towers, so these are
neither built nor read. transformers' own class reads the weights, as it knows every name that
checkpoints were published with, into a wrapper without its towers; the language model is then taken
out of it, and is a causal model like any other.
"""

from __future__ import annotations

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
from batchinfer.worker.model.quiet import quiet_transformers

_WRAPPERS = (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_FOR_MULTIMODAL_LM_MAPPING,
)

_LOGIT_KEYS = ("final_logit_softcapping", "logits_scaling", "logit_scale")


def is_wrapper(config: PreTrainedConfig) -> bool:
    """Whether the config contains the config of a language model (``text_config``)."""
    text = config.get_text_config()
    return text is not config and text is getattr(config, "text_config", None)


def causal_class(config: PreTrainedConfig) -> type[PreTrainedModel] | None:
    """The class of the causal language model to run for a config; None: it does not write text.

    transformers has no such class for some wrappers' language models; then one with a head is made.
    """
    if not is_wrapper(config):
        plain: type[PreTrainedModel] | None = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
        return plain
    text = type(config.get_text_config())
    if text not in MODEL_FOR_CAUSAL_LM_MAPPING:
        body_class = _body_class(config)
        if body_class is None:
            return None
        AutoModelForCausalLM.register(text, _with_head(body_class, text), exist_ok=True)
    found: type[PreTrainedModel] | None = MODEL_FOR_CAUSAL_LM_MAPPING.get(text, None)
    return found


def changed_logits(config: PreTrainedConfig) -> str | None:
    """The config key with which a wrapper changes its logits after the head, if any; the class made
    for it here would not do that."""
    if not getattr(causal_class(config), "has_own_head", False):
        return None
    values: dict[str, Any] = config.get_text_config().to_dict()
    return next((key for key in _LOGIT_KEYS if values.get(key)), None)


def saved_class(config: PreTrainedConfig) -> type[PreTrainedModel] | None:
    """transformers' class that a folder's weights were saved from; None: it does not write text."""
    if not is_wrapper(config):
        return causal_class(config)
    listed = [mapping[type(config)] for mapping in _WRAPPERS if type(config) in mapping]
    classes = [one for one in listed if issubclass(type(config), one.config_class)]
    named = set(config.architectures or ())
    return next((one for one in classes if one.__name__ in named), next(iter(classes), None))


def headless_names(config: PreTrainedConfig) -> dict[str, str]:
    """Names of transformers' classes for a config's body alone and with a classification head, with
    the task of each; empty for wrappers."""
    if is_wrapper(config):
        return {}
    tasks = {"embed": MODEL_MAPPING, "classify": MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING}
    listed = {task: mapping.get(type(config), None) for task, mapping in tasks.items()}
    return {one.__name__: task for task, one in listed.items() if one is not None}


def language_model_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """The config of the causal model that is built for a config."""
    causal_class(config)  # registers a class of ours with transformers, if it needs one
    return config.get_text_config() if is_wrapper(config) else config


def read_language_model(folder: Path | None, config: PreTrainedConfig, **options: Any) -> Any:
    """Read the causal model of a wrapper, and ``from_pretrained``'s report on loading it.

    Args:
        folder: the wrapper's; None: the tensors are among the options (``state_dict``).
        options: of ``from_pretrained``.
    """
    wrapper_class = saved_class(config)
    assert wrapper_class is not None
    wrapper, found = _without_towers(wrapper_class).from_pretrained(
        folder, config=config, **options
    )
    return _extract(wrapper), found


def language_model(wrapper: PreTrainedModel) -> nn.Module:
    """The language model in a wrapper, without its head."""
    inner: PreTrainedModel = wrapper.get_decoder()
    return inner if inner.get_output_embeddings() is None else body_of(inner)


def whole_on_meta(config: PreTrainedConfig) -> tuple[PreTrainedModel, str, str]:
    """The model whose tensor names a checkpoint or an adapter uses, without its towers, on the
    ``meta`` device; the name of its body in it, and in the causal model that is run."""
    own = language_model_config(config)
    with quiet_transformers(), torch.device("meta"):
        causal = AutoModelForCausalLM.from_config(own)
        own_name = _name(causal, body_of(causal))
        if not is_wrapper(config):
            return causal, own_name, own_name
        whole_class = saved_class(config)
        assert whole_class is not None
        whole = _without_towers(whole_class)(config)
    return whole, _name(whole, language_model(whole)), own_name


def _name(model: PreTrainedModel, part: nn.Module) -> str:
    names: dict[int, str] = {id(module): name for name, module in model.named_modules()}
    return names[id(part)]


def _body_class(config: PreTrainedConfig) -> type[PreTrainedModel] | None:
    """The class of a wrapper's language model, which transformers does not always list."""
    listed: type[PreTrainedModel] | None = MODEL_MAPPING.get(type(config.get_text_config()), None)
    wrapper_class = saved_class(config)
    if listed is not None or wrapper_class is None:
        return listed
    with quiet_transformers(), torch.device("meta"):
        body = language_model(wrapper_class(config))
    return type(body) if isinstance(body, PreTrainedModel) else None


def _extract(wrapper: PreTrainedModel) -> PreTrainedModel:
    """The causal model of the wrapper's language model and head."""
    config = wrapper.config.get_text_config()
    config.tie_word_embeddings = _is_tied(wrapper)
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=wrapper.dtype)
    model.set_submodule(_name(model, body_of(model)), language_model(wrapper))
    model.set_output_embeddings(wrapper.get_output_embeddings())
    return model


def _is_tied(wrapper: PreTrainedModel) -> bool:
    head, embeddings = wrapper.get_output_embeddings(), wrapper.get_input_embeddings()
    return head.weight is embeddings.weight


def _without_towers(wrapper_class: type[PreTrainedModel]) -> type[PreTrainedModel]:
    """The class, reduced to its language model and its head.

    It keeps the class's name and module, by which transformers finds how its tensors were named.
    """

    class Wrapper(wrapper_class):  # type: ignore[misc]
        def __init__(self, config: PreTrainedConfig) -> None:
            if not hasattr(config, "pad_token_id"):
                config.pad_token_id = (
                    None  # Llama 4's wrapper reads it, its config does not have it
                )
            super().__init__(config)
            _keep(self, [language_model(self), self.get_output_embeddings()])

    Wrapper.__name__ = Wrapper.__qualname__ = wrapper_class.__name__
    Wrapper.__module__ = wrapper_class.__module__
    return Wrapper


def _keep(module: nn.Module, kept: list[nn.Module]) -> bool:
    """Delete all submodules that are not kept and contain no kept one; returns whether any
    remain."""
    if any(module is one for one in kept):
        return True
    for name, child in list(module.named_children()):
        if not _keep(child, kept):
            delattr(module, name)
    return any(True for _ in module.children())


def _with_head(body_class: type[PreTrainedModel], config_class: Any) -> type[PreTrainedModel]:
    """A causal language model of a body, with an output head without a bias."""
    family_class: Any = body_class.__base__

    class WithHead(family_class):  # type: ignore[misc]
        has_own_head = True
        _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012
        base_model_prefix = "model"

        def __init__(self, config: PreTrainedConfig) -> None:
            super().__init__(config)
            self.model = body_class(config)
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
            self.post_init()

        def forward(
            self, input_ids: torch.Tensor, logits_to_keep: int | torch.Tensor = 0, **kwargs: Any
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
