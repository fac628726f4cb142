"""One forward pass over a packed row of tokens."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from batchinfer.engine.step import Step
from batchinfer.worker.adapter_batch import step_adapters
from batchinfer.worker.attention.attention import AttentionBackend, ForwardContext, forward_context
from batchinfer.worker.cuda_graphs.step_graphs import StepGraphs
from batchinfer.worker.kv_cache import KVCache
from batchinfer.worker.model.body import body_of, recorded_output
from batchinfer.worker.transfer import to_device
from batchinfer.worker.vision.image_embeddings import ImageEmbeddings


@torch.inference_mode()
def forward(
    model: torch.nn.Module,
    cache: KVCache,
    backend: AttentionBackend,
    step: Step,
    prev_token_ids: torch.Tensor | None = None,
    graphs: StepGraphs | None = None,
    body_outputs: list[Any] | None = None,
    images: ImageEmbeddings | None = None,
) -> torch.Tensor:
    """Copy and swap the blocks that a step lists, then compute its logits.

    Args:
        prev_token_ids: int64 token ids that the previous step sampled, on the pool's device;
            ``step.previous_sample`` indexes them.
        body_outputs: list to which the output of the model's body is appended.

    Returns:
        Logits [R, vocabulary] of ``step.logits_indices``, in the model's dtype.
    """
    cache.host.copy(step.swap_outs, step.swap_ins)
    if len(step.block_copies):
        copies = to_device({"pairs": step.block_copies}, cache.pool.device)
        cache.copy_blocks(copies["pairs"])
    size = None if graphs is None else graphs.size_for(step)
    if graphs is not None and size is not None:
        return graphs.logits(step, size, prev_token_ids, body_outputs)
    adapters, arrays = step_adapters(step), device_arrays(step)
    if adapters is not None:
        arrays |= {"adapter_tokens": adapters.tokens, "adapter_starts": adapters.starts}
    tensors = to_device(arrays, cache.pool.device)
    backend.begin_step(step, tensors)
    records = nullcontext() if body_outputs is None else recorded_output(model, body_outputs)
    token_ids = _input_ids(step, tensors, prev_token_ids)
    inputs, layer_hooks = _inputs(model, step, token_ids, images)
    context = ForwardContext(cache, backend, tensors, adapters, layer_hooks is not None)
    with forward_context(context), records, layer_hooks or nullcontext():
        output = model(
            **inputs,
            position_ids=_position_ids(tensors),
            use_cache=False,
            logits_to_keep=tensors["logits_indices"],
        )
    logits: torch.Tensor = output.logits[0]
    return logits


def _position_ids(tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return the rotary positions [1, T], or [3, 1, T] for images with grids."""
    grids = tensors.get("grid_positions")
    return tensors["positions"][None] if grids is None else grids[:, None]


def _inputs(
    model: Any, step: Step, token_ids: torch.Tensor, images: ImageEmbeddings | None
) -> tuple[dict[str, torch.Tensor], AbstractContextManager[None] | None]:
    """Return the model's arguments for token ids [T]: the ids, or embeddings if the step has images
    or prompt embeddings. Also return a context manager in which DeepStack changes the outputs of
    layers; None without DeepStack.

    Some models (Gemma 4) also look up a separate embedding of each token for every layer. Image
    tokens use the padding token's embeddings.
    """
    if not step.images and not step.prompt_embeds:
        return {"input_ids": token_ids[None]}, None
    embeddings = model.get_input_embeddings()(token_ids.clamp(min=0))
    for each in step.prompt_embeds:
        vectors = torch.from_numpy(each.vectors).to(embeddings.device).view(embeddings.dtype)
        embeddings[each.first : each.first + len(vectors)] = vectors
    layer_hooks = None
    if step.images:
        assert images is not None
        layer_hooks = images.put(step.images, embeddings)
    inputs = {"inputs_embeds": embeddings[None]}
    body: Any = body_of(model)
    if getattr(body, "hidden_size_per_layer_input", None):
        padded = torch.where(token_ids < 0, body.config.pad_token_id, token_ids)
        inputs["per_layer_inputs"] = body.get_per_layer_inputs(padded[None])
    return inputs, layer_hooks


def _input_ids(
    step: Step, tensors: Mapping[str, torch.Tensor], prev_token_ids: torch.Tensor | None
) -> torch.Tensor:
    """Return the step's token ids [T]. Ids that the host does not know yet are copied on the device
    from ``prev_token_ids``."""
    token_ids = tensors["token_ids"]
    if not (step.previous_sample >= 0).any():
        return token_ids
    assert prev_token_ids is not None
    sample = tensors["previous_sample"]
    return torch.where(sample >= 0, prev_token_ids[sample.clamp(min=0)], token_ids)


def device_arrays(step: Step) -> dict[str, npt.NDArray[np.generic]]:
    """Return the arrays that a forward pass reads, in the integer types that torch indexes with."""
    shared, grids = step.shared_prefixes, step.grid_positions
    return {
        **({} if grids is None else {"grid_positions": grids.astype(np.int64)}),
        **({} if step.query_ends is None else {"query_ends": step.query_ends}),
        **({} if step.prompt_lens is None else {"prompt_lens": step.prompt_lens}),
        **({"order": shared.order, "shared_lens": shared.shared_lens} if shared else {}),
        "token_ids": step.token_ids.astype(np.int64),
        "previous_sample": step.previous_sample.astype(np.int64),
        "positions": step.positions.astype(np.int64),
        "logits_indices": step.logits_indices.astype(np.int64),
        "slot_mapping": step.slot_mapping.astype(np.int64, copy=False),
        "query_starts": step.query_starts,
        "context_lens": step.context_lens,
        "block_tables": step.block_tables,
        "other_slots": step.other_slots,
        "other_tables": step.other_tables,
        "state_tables": step.state_tables,
    }
