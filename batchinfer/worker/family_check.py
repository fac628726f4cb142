"""Refuses models of families that paged attention does not compute as transformers does.

Families are judged by what they compute, never by name. Two checks run on a loaded model:

* The whole model runs two equal sequences in one packed row. Every layer must ask
  for paged attention once, in order, with the layout's shapes and the window of its config; and
  both sequences must get the same logits, which fails if a model ignores the positions it is given
  or mixes neighbors (a convolution, recurrent state, a bias by distance).
* A shallow copy is compared with transformers' own forward pass, with its own attention and masks.
  This finds families that apply a sliding window, for example, only in the attention mask:
  attention does not get it as an argument, and paged attention makes no mask. transformers computes
  a prompt longer than the window at once, paged attention in chunks and a decode.
"""

from __future__ import annotations

from typing import Any

import torch

from batchinfer.engine.kv.layer_groups import layer_windows
from batchinfer.engine.kv.layout import KVLayout, text_config
from batchinfer.errors import ModelError
from batchinfer.worker.attention.attention import ATTENTION_NAME, UnsupportedAttentionError
from batchinfer.worker.attention.latent import keep_latents
from batchinfer.worker.attention.temperature import temper_queries
from batchinfer.worker.model.meta_model import described
from batchinfer.worker.model.quiet import quiet_transformers
from batchinfer.worker.model.shallow_copy import ShallowCopy, shallow_copy
from batchinfer.worker.recurrent.gated_delta_net import page_recurrent_state
from batchinfer.worker.verify import (
    AttentionRecorder,
    Probe,
    differing_rows,
    logits_in_chunks,
    probe_block_size,
    verify,
)

_TOKENS = (3, 7)
_NEIGHBOR_TOLERANCE = 2e-2  # enough for 16-bit weights
_ENDS = (11, 23, 24)
"""Ends of the steps; blocks end elsewhere, and the last step is a decode."""
_BLOCK_SIZE = 8
_TOLERANCE, _LOOSE_TOLERANCE = 1e-3, 0.15
_FEW = 0.5
"""In float32 no row of logits may differ by more than the first tolerance, with fewer bits at most
this share by more than the second: rounding may choose another expert."""


def check_attention(model: torch.nn.Module, layout: KVLayout) -> None:
    """Check how a loaded model asks for attention, and that rows do not change their neighbors.

    Raises:
        ModelError: naming the family and what it does differently.
    """
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
    except Exception as error:  # a model's own code may raise anything on its first call
        raise ModelError(
            f"models of the family {config.model_type!r} cannot be run: {error}"
        ) from error


def _check_calls(layers: list[int], expected: list[int]) -> None:
    for layer, other in zip(layers, expected, strict=False):
        if layer != other:
            raise UnsupportedAttentionError(f"its layers do not attend in order (layer {layer})")
    if len(layers) != len(expected):
        raise UnsupportedAttentionError(
            f"{len(layers)} of its {len(expected)} layers ask for paged attention"
        )


def _check_windows(windows: dict[int, int], config: Any) -> None:
    """Compare the windows that layers ask for with the config's layer types and the blocks kept
    for each layer, which a window must not exceed."""
    kinds = getattr(config.get_text_config(), "layer_types", None) or ()
    num_layers = config.get_text_config().num_hidden_layers
    configured = layer_windows(text_config(config.to_dict()), num_layers)
    for layer, window in windows.items():
        if kinds and (kinds[layer] == "sliding_attention") != (window > 0):
            raise UnsupportedAttentionError(
                f"layer {layer} is of the type {kinds[layer]} and asks for a window of {window}"
            )
        kept = configured[layer]
        if kept and window != kept:
            raise UnsupportedAttentionError(
                f"layer {layer} asks for a window of {window}, its config says {kept}"
            )


def check_against_eager(
    model: Any, max_model_len: int, free_bytes: int, *, latent: bool = False
) -> None:
    """Compare the logits of a shallow copy of the model with those of transformers.

    Args:
        model: transformers' own model, as it was loaded.
        max_model_len: longest sequence, in tokens.
        free_bytes: free memory of the model's device.
        latent: its attention caches latents.

    Raises:
        ModelError: naming the family and what it does that paged attention does not.
    """
    family = f"models of the family {model.config.model_type!r} cannot be run"
    try:
        made = shallow_copy(model, max_model_len, free_bytes)
        token_ids = _token_ids(made.model, max_model_len)
        expected = _eager(made.model, token_ids)
        differing = differing_rows(
            expected,
            _paged(made.model, token_ids, latent=latent),
            _TOLERANCE if made.in_float32 else _LOOSE_TOLERANCE,
        )
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # a model's own code may raise anything
        raise ModelError(
            f"{family}: they cannot be compared with transformers' own attention: "
            f"{described(error)}"
        ) from error
    if differing.any() if made.in_float32 else _are_most(differing[made.window :]):
        raise ModelError(f"{family}: {_reason(differing, made)}")


def _token_ids(model: Any, max_model_len: int) -> list[int]:
    """Token ids with few repetitions."""
    num_ids: int = model.config.get_text_config().vocab_size
    return [place * 7919 % num_ids for place in range(1, 1 + min(_ENDS[-1], max_model_len))]


def _eager(model: Any, token_ids: list[int]) -> torch.Tensor:
    """[T, vocabulary] logits by transformers."""
    model.set_attn_implementation("eager")
    ids = torch.tensor([token_ids], device=next(model.parameters()).device)
    # transformers warns that its recurrent layers run without kernels, which only this check does.
    with torch.inference_mode(), quiet_transformers():
        logits: torch.Tensor = model(input_ids=ids, use_cache=False).logits[0]
    return logits


def _paged(model: Any, token_ids: list[int], *, latent: bool) -> torch.Tensor:
    """[T, vocabulary] logits over a paged pool, in steps."""
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
    return bool(differing.float().mean() > _FEW)


def _reason(differing: torch.Tensor, made: ShallowCopy) -> str:
    if made.window and not _are_most(differing[: made.window]):
        key, window = min(made.windows.items(), key=lambda item: item[1])
        return (
            f"{key} is in their attention mask alone, and not passed to their attention; give "
            f"model.max_model_len: {window} or less"
        )
    return "their logits with paged attention differ from those with transformers' own"
