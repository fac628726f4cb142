"""Refuses models whose results with paged attention differ from transformers' results.

Two checks run on a loaded model. The checks compare results and never depend on the family's name.

* The whole model runs two equal sequences in one packed row. Each layer must call paged attention
  once, in order, with the layout's shapes and the window in the config. The two equal sequences
  must get equal logits. The logits differ if a model ignores its positions or mixes neighboring
  tokens, for example with a convolution, a recurrent state or a bias that depends on distance.
* A shallow copy of the model is compared with transformers' forward pass, which uses its own
  attention and masks. The comparison finds, for example, families that apply a sliding window only
  in the attention mask: paged attention makes no mask and would ignore such a window. The copy's
  windows are shorter than the prompt. transformers computes the prompt in one pass; paged attention
  computes it in chunks and a decode step.
"""

from __future__ import annotations

from typing import Any

import torch

from batchinfer.engine.kv.layer_groups import layer_windows
from batchinfer.engine.kv.layout import KVLayout
from batchinfer.engine.kv.model_config import text_config
from batchinfer.errors import ModelError
from batchinfer.worker.attention.attention import ATTENTION_NAME, UnsupportedAttentionError
from batchinfer.worker.attention.latent import keep_latents
from batchinfer.worker.attention.temperature import temper_queries
from batchinfer.worker.model.meta_model import described
from batchinfer.worker.model.quiet_transformers import quiet_transformers
from batchinfer.worker.model.shallow_copy import ShallowCopy, shallow_copy
from batchinfer.worker.recurrent.patch_layers import page_recurrent_state
from batchinfer.worker.self_test import (
    AttentionRecorder,
    Probe,
    differing_rows,
    logits_in_chunks,
    probe_block_size,
    verify,
)

_TOKENS = (3, 7)
_NEIGHBOR_TOLERANCE = 2e-2  # far above rounding errors of 16-bit weights
_ENDS = (11, 23, 24)
"""Total number of tokens computed after each step. The chunks end in the middle of blocks. The last
step is a decode."""
_BLOCK_SIZE = 8
_TOLERANCE = 1e-3
"""Tolerance in float32, for every row of logits."""
_LOOSE_TOLERANCE, _MAX_DIFFERING = 0.15, 0.5
"""Tolerance in 16 bits, and the share of rows that may exceed it, because rounding can change which
expert is chosen."""


def check_attention(model: torch.nn.Module, layout: KVLayout) -> None:
    """Check that a loaded model's calls to attention match its config, and that sequences of a
    batch do not affect each other."""
    config: Any = model.config
    try:
        probe = Probe(model, layout, _TOKENS, num_sequences=2)
        attention = AttentionRecorder(probe.backend)
        logits = probe.logits(attention)
        _check_calls([call.layer for call in attention.calls], layout.attention_layers)
        _check_windows(
            {call.layer: call.variant.sliding_window for call in attention.calls}, config
        )
        first, second = logits.view(2, len(_TOKENS), -1)
        if not verify(first, second, _NEIGHBOR_TOLERANCE):
            raise UnsupportedAttentionError(
                "a row depends on its neighbors in the batch (it mixes up positions or rows)"
            )
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # a model's code may raise any error on its first call
        raise ModelError(
            f"a model of the family {config.model_type!r} cannot be run: {error}"
        ) from error


def _check_calls(layers: list[int], expected: list[int]) -> None:
    for layer, expected_layer in zip(layers, expected, strict=False):
        if layer != expected_layer:
            raise UnsupportedAttentionError(
                f"its layers do not call attention in order (layer {layer})"
            )
    if len(layers) != len(expected):
        raise UnsupportedAttentionError(
            f"its {len(expected)} layers with attention must each call paged attention once, but "
            f"{len(layers)} calls were made"
        )


def _check_windows(windows: dict[int, int], config: Any) -> None:
    """Check that each layer passes the window that its layer type and window in the config imply.
    The config decides how many blocks the pool keeps for the layer."""
    kinds = getattr(config.get_text_config(), "layer_types", None) or ()
    num_layers = config.get_text_config().num_hidden_layers
    configured = layer_windows(text_config(config.to_dict()), num_layers)
    for layer, window in windows.items():
        if kinds and (kinds[layer] == "sliding_attention") != (window > 0):
            raise UnsupportedAttentionError(
                f"layer {layer} has the type {kinds[layer]}, but asks for a window of {window}"
            )
        kept = configured[layer]
        if kept and window != kept:
            raise UnsupportedAttentionError(
                f"layer {layer} asks for a window of {window}, but its config says {kept}"
            )


def check_against_eager(
    model: Any, max_model_len: int, free_bytes: int, *, latent: bool = False
) -> None:
    """Compare the logits of a shallow copy of the model with transformers' logits.

    Args:
        model: transformers' model, before its layers are fused.
        max_model_len: longest sequence, in tokens.
        free_bytes: free memory of the model's device.
        latent: True if attention caches latents.

    Raises:
        ModelError: the logits differ, or the copy cannot be run. The message names the family and,
            if known, the feature that paged attention does not support.
    """
    family = f"models of the family {model.config.model_type!r} cannot be run"
    try:
        shallow = shallow_copy(model, max_model_len, free_bytes)
        token_ids = _token_ids(shallow.model, max_model_len)
        differing = differing_rows(
            _eager_logits(shallow.model, token_ids),
            _paged_logits(shallow.model, token_ids, latent=latent),
            _TOLERANCE if shallow.in_float32 else _LOOSE_TOLERANCE,
        )
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # a model's code may raise any error
        raise ModelError(
            f"{family}: they cannot be compared with transformers' attention: {described(error)}"
        ) from error
    if differing.any() if shallow.in_float32 else _are_most(differing[shallow.window :]):
        raise ModelError(f"{family}: {_reason(differing, shallow)}")


def _token_ids(model: Any, max_model_len: int) -> list[int]:
    """Return token ids with few repetitions."""
    num_ids: int = model.config.get_text_config().vocab_size
    return [place * 7919 % num_ids for place in range(1, 1 + min(_ENDS[-1], max_model_len))]


def _eager_logits(model: Any, token_ids: list[int]) -> torch.Tensor:
    model.set_attn_implementation("eager")
    ids = torch.tensor([token_ids], device=next(model.parameters()).device)
    # transformers warns that its recurrent layers run without optimized kernels. The warning would
    # be misleading, because only this check uses transformers' recurrent layers.
    with torch.inference_mode(), quiet_transformers():
        logits: torch.Tensor = model(input_ids=ids, use_cache=False).logits[0]
    return logits


def _paged_logits(model: Any, token_ids: list[int], *, latent: bool) -> torch.Tensor:
    """Return the logits [T, vocabulary] of several steps over a paged pool."""
    model.set_attn_implementation(ATTENTION_NAME)
    temper_queries(model)
    page_recurrent_state(model)
    if latent:
        keep_latents(model)
    config = model.config.to_dict()
    layout = KVLayout.from_config(
        config,
        block_size=probe_block_size(config, _BLOCK_SIZE),
        dtype=str(next(model.parameters()).dtype).removeprefix("torch."),
        latent=latent,
    )
    ends = sorted({min(end, len(token_ids)) for end in _ENDS})
    return logits_in_chunks(model, layout, token_ids, ends)


def _are_most(differing: torch.Tensor) -> bool:
    return bool(differing.float().mean() > _MAX_DIFFERING)


def _reason(differing: torch.Tensor, shallow: ShallowCopy) -> str:
    if shallow.window and not _are_most(differing[: shallow.window]):
        key, window = min(shallow.windows.items(), key=lambda item: item[1])
        return (
            f"they apply {key} only in their attention mask, which paged attention does not use; "
            f"set model.max_model_len to {window} or less"
        )
    return "their logits with paged attention differ from their logits with transformers' attention"
