"""Loads a model of transformers' own classes that reads texts whole."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from transformers import AutoModel, PreTrainedModel

from batchinfer.config import ModelConfig, position_offset
from batchinfer.console.phases import phase
from batchinfer.errors import DeviceError, ModelError
from batchinfer.worker.encoder.attention import ENCODER_ATTENTION, packed_sequences, register
from batchinfer.worker.encoder.description import EncoderDescription, describe_encoder
from batchinfer.worker.free_memory import return_freed_memory
from batchinfer.worker.memory import model_bytes
from batchinfer.worker.model.checkpoint import file_bytes
from batchinfer.worker.model.meta_model import described
from batchinfer.worker.model.quiet import quiet_transformers
from batchinfer.worker.model.weights import check_loaded
from batchinfer.worker.products.choice import (
    KernelChoice,
    KernelWish,
    choose_cuda_kernel,
    choose_kernel,
)
from batchinfer.worker.products.linear import pack_linears

_ANY_KERNELS = KernelWish()
_POOLER = "pooler."
"""A layer over BERT's first token that hidden states do not go through."""
_TOLERANCE = 0.05
"""Of a largest hidden state: far over what rounding does, far under what another text does."""


class Encoder:
    """A model's body, called on whole sequences in one packed row.

    Args:
        body: of transformers' own classes, with ``ENCODER_ATTENTION``.
        offset: position of a sequence's first token.
    """

    def __init__(self, body: PreTrainedModel, offset: int) -> None:
        self.body, self._offset = body, offset
        self._takes_segments = "token_type_ids" in inspect.signature(body.forward).parameters
        self._num_segments = int(getattr(body.config, "type_vocab_size", 0) or 0)

    @torch.inference_mode()
    def __call__(
        self,
        token_ids: torch.Tensor,  # [T] int64
        positions: torch.Tensor,  # [T] int64 of each token in its sequence
        segments: torch.Tensor,  # [T] int64 1 in the second text of a pair
        runs: list[tuple[int, int, int]],
    ) -> torch.Tensor:
        """Hidden states [T, H], in the model's dtype.

        Args:
            runs: as ``EncoderStep.runs``.
        """
        options: dict[str, Any] = {}
        if self._takes_segments:
            most = max(self._num_segments - 1, 0)
            options["token_type_ids"] = segments.clamp(max=most)[None]
        with packed_sequences(runs):
            output = self.body(
                input_ids=token_ids[None],
                position_ids=(positions + self._offset)[None],
                **options,
            )
        hidden_states: torch.Tensor = output.last_hidden_state[0]
        return hidden_states


@dataclass(frozen=True)
class LoadedEncoder:
    """An encoder on its device, and what the other planes need to know about it."""

    description: EncoderDescription
    encoder: Encoder
    kernels: KernelChoice
    kernel_names: Mapping[str, str]
    """What multiplies, by the dtype of the weights."""
    facts: Mapping[str, Any]
    """For the summary."""


def load_encoder(
    choice: ModelConfig, *, device: torch.device, kernels: KernelWish = _ANY_KERNELS
) -> LoadedEncoder:
    """Check a model folder (or hub id) and load its weights.

    Raises:
        ModelError: in one line with what to do; nothing from the folder is executed.
        DeviceError: the weights do not fit the device, or no such kernels are there.
    """
    description = describe_encoder(choice, weights_too=True)
    dtype = getattr(torch, description.dtype)
    with phase("loading the model", file_bytes(description.folder), "bytes") as loading:
        body = _read(description, dtype, device, loading.set_share)
    num_parameters = sum(parameter.numel() for parameter in body.parameters())
    encoder = Encoder(body, position_offset(description.config))
    with phase("checking the model"):
        _try(description, encoder)
    if device.type == "cpu":
        product = choose_kernel(body, dtype, kernels)
        if product.kernel is not None:
            with phase("packing weights"):
                pack_linears(body, product.kernel, dtype)
        return_freed_memory()
    else:
        product = choose_cuda_kernel(device, dtype, kernels)
        if product.kernel is not None:
            pack_linears(body, product.kernel, dtype)
    return LoadedEncoder(
        description,
        encoder,
        product,
        MappingProxyType({description.dtype: product.name}),
        {
            "name": choice.name,
            "revision": choice.revision,
            "family": description.pretrained.model_type,
            "dtype": description.dtype,
            "quantization": None,
            "parameters": num_parameters,
            "weight_bytes": model_bytes(body),
            "adapter_bytes": 0,
            "max_model_len": description.max_model_len,
        },
    )


def _read(
    description: EncoderDescription, dtype: torch.dtype, device: torch.device, show_share: Any
) -> PreTrainedModel:
    register()
    folder = description.folder
    try:
        with quiet_transformers(show_share):
            body, found = AutoModel.from_pretrained(
                folder,
                config=description.pretrained,
                dtype=dtype,
                attn_implementation=ENCODER_ATTENTION,
                use_safetensors=True,
                trust_remote_code=False,
                local_files_only=True,
                ignore_mismatched_sizes=True,  # they are refused by name
                output_loading_info=True,
            )
        if getattr(body, "pooler", None) is not None:
            body.pooler = None
            missing = {key for key in found["missing_keys"] if not key.startswith(_POOLER)}
            unused = {key for key in found["unexpected_keys"] if _POOLER not in key}
            found = {**found, "missing_keys": missing, "unexpected_keys": unused}
        check_loaded(folder, body, found)
        loaded: PreTrainedModel = body.to(device).eval().requires_grad_(False)
    except torch.OutOfMemoryError as error:
        raise DeviceError("the model's weights do not fit the device; use a smaller one") from error
    except (ModelError, DeviceError):
        raise
    except Exception as error:  # transformers and the libraries below it raise of all kinds
        raise ModelError(f"{folder}: the weights cannot be loaded: {described(error)}") from error
    return loaded


def _try(description: EncoderDescription, encoder: Encoder) -> None:
    """Run two short texts, beside one another and alone: a body whose texts see each other, or
    that cannot be run packed at all, is refused.

    Raises:
        ModelError: it cannot be run.
    """
    device = encoder.body.device
    ids = torch.tensor([1, 2, 3, 2, 3], device=device) % description.vocab_size
    positions = torch.tensor([0, 1, 2, 0, 1], device=device)
    family = (
        f"{description.folder}/config.json: models of the family {encoder.body.config.model_type!r}"
    )
    try:
        packed = encoder(ids, positions, positions * 0, [(0, 1, 3), (3, 1, 2)])
        alone = encoder(ids[3:], positions[3:], positions[3:] * 0, [(0, 1, 2)])
    except Exception as error:  # whatever a model's own code raises
        raise ModelError(f"{family} cannot be run: {described(error)}") from error
    difference = (packed[3:] - alone).float().abs().max()
    if not difference <= _TOLERANCE * alone.float().abs().max():
        raise ModelError(f"{family} cannot be run: texts in one packed row change each other")
