"""Compares a loaded model with transformers' own forward pass: its own attention, its own masks.

What a family does in its attention mask alone, a sliding window for one, is no argument of its
attention, and paged attention makes no mask: without this comparison it would be left out without a
word. A prompt that leaves the window is computed at once by transformers, and in chunks and a
decode over the paged pool.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch

from batchinfer.engine.kv.layout import KVLayout
from batchinfer.errors import ModelError
from batchinfer.worker.attention.attention import ATTENTION_NAME, make_backend
from batchinfer.worker.attention.latent import keep_latents
from batchinfer.worker.attention.temperature import temper_queries
from batchinfer.worker.forward import forward
from batchinfer.worker.kv_cache import KVCache
from batchinfer.worker.model.meta_model import described
from batchinfer.worker.model.shallow_copy import ShallowCopy, shallow_copy
from batchinfer.worker.probe import chunk_step, probe_block_size

_ENDS = (0, 11, 23, 24)
"""Where one step ends and the next begins; blocks end elsewhere, and the last is a decode."""
_BLOCK_SIZE = 8
_FEW = 0.5
_TOLERANCE, _LOOSE_TOLERANCE = 1e-3, 0.15
"""Of a row of logits: in float32 every row, in fewer bits most of them (an expert more or less)."""


def check_against_eager(
    model: Any, max_model_len: int, free_bytes: int, *, latent: bool = False
) -> None:
    """Compare the logits of a shallow copy of the model.

    Args:
        model: transformers' own model, as it was loaded.
        max_model_len: longest sequence, in tokens.
        free_bytes: of the memory of the device that the model is on.
        latent: its attention keeps latents.

    Raises:
        ModelError: naming the family and what it does that paged attention does not.
    """
    family = f"models of the family {model.config.model_type!r} cannot be run"
    try:
        made = shallow_copy(model, max_model_len, free_bytes)
        token_ids = _token_ids(made.model, max_model_len)
        theirs = _eager(made.model, token_ids)
        ours = _paged(made.model, token_ids, latent=latent)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # whatever a model's own code raises
        raise ModelError(
            f"{family}: they cannot be compared with transformers' own attention: "
            f"{described(error)}"
        ) from error
    wrong = _wrong_rows(ours, theirs, made)
    if _too_many(wrong, made):
        raise ModelError(f"{family}: {_reason(wrong, made)}")


def _eager(model: Any, token_ids: torch.Tensor) -> torch.Tensor:
    """[T, vocabulary] logits by transformers."""
    model.set_attn_implementation("eager")
    with torch.inference_mode():
        logits: torch.Tensor = model(input_ids=token_ids[None], use_cache=False).logits[0]
    return logits


def _paged(model: Any, token_ids: torch.Tensor, *, latent: bool) -> torch.Tensor:
    """[T, vocabulary] logits of the same tokens over a paged pool, in steps."""
    model.set_attn_implementation(ATTENTION_NAME)
    temper_queries(model)
    if latent:
        keep_latents(model)
    weight = next(model.parameters())
    dtype = str(weight.dtype).removeprefix("torch.")
    config = model.config.to_dict()
    block_size = probe_block_size(config, _BLOCK_SIZE)
    layout = KVLayout.from_config(config, block_size=block_size, dtype=dtype, latent=latent)
    cache = KVCache(layout, layout.blocks_for(len(token_ids)), weight.device, weight.dtype)
    backend = make_backend(cache)
    ends = [min(end, len(token_ids)) for end in _ENDS]
    chunks = [(start, stop) for start, stop in pairwise(ends) if start < stop]
    steps = (chunk_step(token_ids.tolist(), start, stop, layout) for start, stop in chunks)
    logits: list[torch.Tensor] = [forward(model, cache, backend, step) for step in steps]
    return torch.cat(logits)


def _token_ids(model: Any, max_model_len: int) -> torch.Tensor:
    """Tokens of which few are alike."""
    length = min(_ENDS[-1], max_model_len)
    places = torch.arange(1, length + 1, device=next(model.parameters()).device)
    num_ids: int = model.config.get_text_config().vocab_size
    return places * 7919 % num_ids


def _wrong_rows(ours: torch.Tensor, theirs: torch.Tensor, made: ShallowCopy) -> torch.Tensor:
    """[T] bool: rows of logits that are further off than rounding explains."""
    ours, theirs = ours.float(), theirs.float()
    off = (ours - theirs).norm(dim=-1) / theirs.norm(dim=-1)
    finite = theirs.isfinite().all(dim=-1)  # weights that overflow: each row finds out by itself
    right: torch.Tensor = off <= (_TOLERANCE if made.in_float32 else _LOOSE_TOLERANCE)
    return finite.logical_and(right.logical_not())


def _too_many(wrong: torch.Tensor, made: ShallowCopy) -> bool:
    if made.in_float32:
        return bool(wrong.any())
    return bool(wrong[made.window :].float().mean() > _FEW)


def _reason(wrong: torch.Tensor, made: ShallowCopy) -> str:
    if made.window and not wrong[: made.window].float().mean() > _FEW:
        key, window = min(made.windows.items(), key=lambda item: item[1])
        return (
            f"{key} is in their attention mask alone, and not passed to their attention; give "
            f"model.max_model_len: {window} or less"
        )
    return "with paged attention they give other logits than with transformers' own"
