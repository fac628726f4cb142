"""Loads a model of transformers' own classes that reads texts whole."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from types import MappingProxyType
from typing import Any

import torch
from transformers import AutoModel, PreTrainedModel

from batchinfer.config import ModelConfig, attends_both_ways, position_offset
from batchinfer.console.phases import phase
from batchinfer.errors import DeviceError, ModelError
from batchinfer.worker.encoder.attention import ENCODER_ATTENTION, packed_sequences, register
from batchinfer.worker.encoder.description import EncoderDescription, describe_encoder
from batchinfer.worker.encoder.mpnet import pack_attention
from batchinfer.worker.encoder.native_layers import join_encoder_layers
from batchinfer.worker.free_memory import return_freed_memory
from batchinfer.worker.linear.choice import (
    KernelChoice,
    KernelRequirements,
    choose_cuda_kernel,
    choose_kernel,
)
from batchinfer.worker.linear.packed_linear import pack_linears
from batchinfer.worker.linear_kernels import LinearKernel
from batchinfer.worker.memory import model_bytes
from batchinfer.worker.model.checkpoint import file_bytes
from batchinfer.worker.model.meta_model import described
from batchinfer.worker.model.quiet import quiet_transformers
from batchinfer.worker.model.weights import check_loaded

_ANY_KERNELS = KernelRequirements()
_POOLER = "pooler."
"""A layer over BERT's first token that hidden states do not go through."""
_TOLERANCE = 0.05
"""Of a largest hidden state: far over what rounding does, far under what another text does."""


class Encoder:
    """A model's body, called on whole sequences in one packed row.

    Args:
        body: of transformers' own classes, with ``ENCODER_ATTENTION``.
        offset: position of a sequence's first token.
        causal: no token sees those after it.
    """

    def __init__(self, body: PreTrainedModel, offset: int, *, causal: bool = False) -> None:
        self.body, self._offset, self.causal = body, offset, causal
        # GPT-2 takes segments too, but has no embeddings of them: it would add those of tokens.
        self._num_segments = int(getattr(body.config, "type_vocab_size", 0) or 0)
        self._takes_segments = (
            self._num_segments > 1
            and "token_type_ids" in inspect.signature(body.forward).parameters
        )

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
            options["token_type_ids"] = segments.clamp(max=self._num_segments - 1)[None]
        with packed_sequences(runs, causal=self.causal):
            output = self.body(
                input_ids=token_ids[None],
                position_ids=self._places(token_ids, positions)[None],
                **options,
            )
        hidden_states: torch.Tensor = output.last_hidden_state[0]
        return hidden_states

    def _places(self, token_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Which embedding of a position each token takes, [T]. Where texts begin after padding's,
        tokens of padding take that, and those after them count without them, as in transformers'
        ``create_position_ids_from_input_ids``."""
        if self._offset == 0:
            return positions
        is_padding = token_ids == self._offset - 1
        before = is_padding.cumsum(0) - is_padding.long()
        starts = torch.arange(len(positions), device=positions.device) - positions
        counted = positions + self._offset - (before - before[starts])
        return counted.masked_fill(is_padding, self._offset - 1)


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
    choice: ModelConfig, *, device: torch.device, kernels: KernelRequirements = _ANY_KERNELS
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
    causal = not attends_both_ways(description.config)
    with phase("checking the model"):
        encoder = _tried(description, body, causal=causal)
    if device.type == "cpu":
        product = choose_kernel(body, dtype, kernels)
        if product.kernel is not None:
            with phase("packing weights"):
                _join_layers(description, encoder, product.kernel)
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
        body.config.use_cache = False
        pack_attention(body)
        check_loaded(folder, body, found)
        loaded: PreTrainedModel = body.to(device).eval().requires_grad_(False)
    except torch.OutOfMemoryError as error:
        raise DeviceError("the model's weights do not fit the device; use a smaller one") from error
    except (ModelError, DeviceError):
        raise
    except Exception as error:  # transformers and the libraries below it raise of all kinds
        raise ModelError(f"{folder}: the weights cannot be loaded: {described(error)}") from error
    return loaded


def _tried(description: EncoderDescription, body: PreTrainedModel, *, causal: bool) -> Encoder:
    """The encoder that a body makes, which has run two short texts, beside one another, alone and
    as transformers does: a body whose texts see each other, that makes something else of them, or
    that cannot be run packed is refused.

    Raises:
        ModelError: it cannot be run.
    """
    family = f"{description.folder}/config.json: models of the family {body.config.model_type!r}"
    try:
        encoder = Encoder(body, position_offset(description.config), causal=causal)
        packed, alone = _states(description, encoder, 3, 2), _states(description, encoder, 2)
        expected = _reference(encoder.body, _token_ids(description, encoder, 3))
    except Exception as error:  # whatever a model's own code raises
        raise ModelError(f"{family} cannot be run: {described(error)}") from error
    if not _alike(packed[3:], alone):
        raise ModelError(f"{family} cannot be run: texts in one packed row change each other")
    if not _alike(packed[:3], expected):
        raise ModelError(f"{family} cannot be run: transformers gives other hidden states")
    return encoder


def _join_layers(description: EncoderDescription, encoder: Encoder, kernel: LinearKernel) -> None:
    """Run the layers in one call where that gives the same hidden states."""
    lengths = (7, 2)
    expected = _states(description, encoder, *lengths)

    def gives_the_same() -> bool:
        return _alike(_states(description, encoder, *lengths), expected)

    join_encoder_layers(encoder.body, kernel, expected.dtype, gives_the_same)


def _states(description: EncoderDescription, encoder: Encoder, *lengths: int) -> torch.Tensor:
    """Hidden states of short texts side by side."""
    ids = torch.cat([_token_ids(description, encoder, length) for length in lengths])
    positions = torch.cat([torch.arange(length, device=ids.device) for length in lengths])
    starts = accumulate(lengths, initial=0)
    runs = [(start, 1, length) for start, length in zip(starts, lengths, strict=False)]
    return encoder(ids, positions, positions * 0, runs)


def _token_ids(description: EncoderDescription, encoder: Encoder, length: int) -> torch.Tensor:
    return torch.arange(4, 4 + length, device=encoder.body.device) % description.vocab_size


@torch.inference_mode()
def _reference(body: PreTrainedModel, token_ids: torch.Tensor) -> torch.Tensor:
    """Hidden states [T, H] of a text, by transformers' own attention."""
    with quiet_transformers():  # of families whose attention is no function, it warns of that
        body.set_attn_implementation("eager")
        try:
            states: torch.Tensor = body(input_ids=token_ids[None]).last_hidden_state[0]
        finally:
            body.set_attn_implementation(ENCODER_ATTENTION)
    return states


def _alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    difference = (one - other).float().abs().max()
    return bool(difference <= _TOLERANCE * other.float().abs().max())
