"""Loads an encoder: a transformers model that computes whole texts in one step."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from types import MappingProxyType
from typing import Any

import torch
from transformers import AutoModel, PreTrainedModel

from batchinfer.config import ModelConfig, attends_both_ways, position_offset
from batchinfer.console.phases import phase
from batchinfer.errors import ModelError
from batchinfer.worker.encoder.attention import (
    ENCODER_ATTENTION,
    pack_mpnet,
    packed_sequences,
    register,
)
from batchinfer.worker.encoder.encoder_config import EncoderDescription, describe_encoder
from batchinfer.worker.encoder.native_layers import TOLERANCE, join_encoder_layers
from batchinfer.worker.linear.kernel_choice import (
    KernelChoice,
    KernelRequirements,
    choose_cuda_kernel,
    choose_kernel,
)
from batchinfer.worker.linear.packed_linear import pack_linears
from batchinfer.worker.memory import model_bytes, return_freed_memory
from batchinfer.worker.model.check_weight_files import file_bytes
from batchinfer.worker.model.meta_model import described
from batchinfer.worker.model.quiet_transformers import quiet_transformers
from batchinfer.worker.model.weights import check_loaded, load_options, loading_errors
from batchinfer.worker.self_test import verify

_ANY_KERNELS = KernelRequirements()
_POOLER = "pooler."
"""Prefix of the weights of BERT's pooler. Hidden states do not depend on BERT's pooler."""
_LENGTHS = (1, 2, 5, 17, 33, 64)
_COUNT = 5
"""Lengths in tokens of the texts that are computed alone and in a batch of ``_COUNT`` texts of each
length."""


class Encoder:
    """A model's body that runs whole sequences in one packed row.

    Args:
        body: transformers' model, with ``ENCODER_ATTENTION``.
        offset: position of a sequence's first token.
        causal: True if tokens do not attend to later tokens.
    """

    def __init__(self, body: PreTrainedModel, offset: int, *, causal: bool = False) -> None:
        self.body, self._offset, self.causal = body, offset, causal
        # GPT-2 has no segment embeddings. If GPT-2 received segments, it would add the embeddings
        # of the tokens with these ids.
        self._num_segments = int(getattr(body.config, "type_vocab_size", 0) or 0)
        self._takes_segments = (
            self._num_segments > 1
            and "token_type_ids" in inspect.signature(body.forward).parameters
        )

    @torch.inference_mode()
    def __call__(
        self,
        token_ids: torch.Tensor,  # [T] int64
        positions: torch.Tensor,  # [T] int64, index of each token in its sequence
        segments: torch.Tensor,  # [T] int64, 1 in the second text of a pair, else 0
        runs: list[tuple[int, int, int]],
    ) -> torch.Tensor:
        """Return the hidden states [T, H], in the model's dtype."""
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

    def states(self, texts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the hidden states [T, H] of texts, each a tensor [L] of token ids, in one packed
        row."""
        runs, start = [], 0
        for length, group in groupby(map(len, texts)):
            count = len(list(group))
            runs.append((start, count, length))
            start += count * length
        positions = torch.cat([torch.arange(len(text)) for text in texts]).to(self.body.device)
        return self(torch.cat([*texts]).to(self.body.device), positions, positions * 0, runs)

    def _places(self, token_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return the index of each token's position embedding, [T].

        In some families, such as RoBERTa, the first token's position is the number after the
        padding position. Padding tokens then get the padding position and do not advance the
        positions of later tokens, as in transformers' ``create_position_ids_from_input_ids``.
        """
        if self._offset == 0:
            return positions
        is_padding = token_ids == self._offset - 1
        before = is_padding.cumsum(0) - is_padding.long()
        starts = torch.arange(len(positions), device=positions.device) - positions
        counted = positions + self._offset - (before - before[starts])
        return counted.masked_fill(is_padding, self._offset - 1)


@dataclass(frozen=True)
class LoadedEncoder:
    description: EncoderDescription
    encoder: Encoder
    kernels: KernelChoice
    kernel_names: Mapping[str, str]
    """Name of the linear layers' kernel, keyed by the weights' dtype."""
    facts: Mapping[str, Any]


def load_encoder(
    choice: ModelConfig, *, device: torch.device, kernels: KernelRequirements = _ANY_KERNELS
) -> LoadedEncoder:
    """Check a model folder (or hub id) and load its weights. No code from the folder is run.

    Raises:
        ModelError: the model cannot be run.
        DeviceError: the weights do not fit into the device's memory, or no kernel meets
            ``kernels``.
    """
    description = describe_encoder(choice, weights_too=True)
    dtype = getattr(torch, description.dtype)
    with phase("loading the model", file_bytes(description.folder), "bytes") as loading:
        body = _read(description, dtype, device, loading.set_share)
    num_parameters = sum(parameter.numel() for parameter in body.parameters())
    with phase("checking the model"):
        encoder = _checked(description, body)
    choose = (
        partial(choose_kernel, body)
        if device.type == "cpu"
        else partial(choose_cuda_kernel, device)
    )
    chosen = choose(dtype, kernels)
    if chosen.kernel is not None:
        with phase("packing weights"):
            if device.type == "cpu":
                texts = _texts(description, 7, 2)
                join_encoder_layers(body, chosen.kernel, dtype, lambda: encoder.states(texts))
            pack_linears(body, chosen.kernel, dtype)
    return_freed_memory()
    return LoadedEncoder(
        description,
        encoder,
        chosen,
        MappingProxyType({description.dtype: chosen.name}),
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
    with loading_errors(folder):
        with quiet_transformers(show_share):
            body, report = AutoModel.from_pretrained(
                folder,
                config=description.pretrained,
                **load_options(dtype, ENCODER_ATTENTION),
            )
        if getattr(body, "pooler", None) is not None:
            body.pooler = None
            missing = {key for key in report["missing_keys"] if not key.startswith(_POOLER)}
            unused = {key for key in report["unexpected_keys"] if _POOLER not in key}
            report = {**report, "missing_keys": missing, "unexpected_keys": unused}
        body.config.use_cache = False
        pack_mpnet(body)
        check_loaded(folder, body, report)
        loaded: PreTrainedModel = body.to(device).eval().requires_grad_(False)
    return loaded


def _checked(description: EncoderDescription, body: PreTrainedModel) -> Encoder:
    """Make an encoder from a body. Check that two short texts get the same hidden states in one
    packed row, alone, and in transformers' forward pass."""
    family = f"{description.folder}/config.json: models of the family {body.config.model_type!r}"
    try:
        causal = not attends_both_ways(description.config)
        encoder = Encoder(body, position_offset(description.config), causal=causal)
        first, second = _texts(description, 3, 2)
        packed, alone = encoder.states([first, second]), encoder.states([second])
        expected = _reference(body, first)
    except Exception as error:  # a model's code may raise any error
        raise ModelError(f"{family} cannot be run: {described(error)}") from error
    if not expected.isfinite().all():  # ``verify`` would skip such rows
        raise ModelError(f"{family} cannot be run: its hidden states are NaN or infinite")
    if not verify(alone, packed[3:], TOLERANCE):
        raise ModelError(f"{family} cannot be run: texts in one packed row affect each other")
    if not verify(expected, packed[:3], TOLERANCE):
        raise ModelError(f"{family} cannot be run: hidden states differ from transformers' states")
    return encoder


def _texts(description: EncoderDescription, *lengths: int) -> list[torch.Tensor]:
    return [torch.arange(4, 4 + length) % description.vocab_size for length in lengths]


@torch.inference_mode()
def _reference(body: PreTrainedModel, token_ids: torch.Tensor) -> torch.Tensor:
    """Compute the hidden states [T, H] of a text with transformers' attention."""
    with quiet_transformers():  # transformers warns if a family's attention cannot be changed
        body.set_attn_implementation("eager")
        try:
            states: torch.Tensor = body(input_ids=token_ids[None].to(body.device)).last_hidden_state
        finally:
            body.set_attn_implementation(ENCODER_ATTENTION)
    return states[0]


def check_encoder_invariance(loaded: LoadedEncoder) -> None:
    """Check that a text's hidden states have the same bits alone and in a step with other texts, as
    ``engine.deterministic`` requires.

    Raises:
        ModelError: the bits differ, or the encoder is on a CUDA device, where equal bits are not
            guaranteed.
    """
    encoder, description = loaded.encoder, loaded.description
    lengths = [length for length in _LENGTHS if length <= description.max_model_len]
    texts = _texts(description, *lengths)
    why = ""
    if encoder.body.device.type == "cuda":
        why = (
            "the last bits of linear layers and attention on a CUDA device depend "
            "on the other texts in the step"
        )
    elif not torch.equal(
        encoder.states([text for text in texts for _ in range(_COUNT)]),
        torch.cat([encoder.states([text]).repeat(_COUNT, 1) for text in texts]),
    ):
        why = "in some layers, the last bits of a text depend on the other texts in the step"
    if why:
        raise ModelError(
            "engine.deterministic is true, but in encoders of the family "
            f"{encoder.body.config.model_type!r}, {why}",
            hint="set engine.deterministic: false",
        )
