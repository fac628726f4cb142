"""Dry runs of models that read texts whole: an ``EncoderEngine`` over roofline times."""

from __future__ import annotations

import numpy as np

from batchinfer.config import EngineConfig
from batchinfer.engine.encoder_engine import EncoderEngine
from batchinfer.engine.encoder_step import EncoderStep
from batchinfer.engine.kv.layout import Config, text_config
from batchinfer.engine.simulate.dry_run import host_seconds
from batchinfer.engine.simulate.roofline import (
    PERFECT,
    WELL_BUILT,
    Device,
    ModelCost,
    StepWork,
    step_seconds,
)
from batchinfer.engine.step import Float32

_PLAIN_MLP = (*("bert", "camembert", "distilbert", "electra", "mpnet", "roberta", "xlm-roberta"),)
"""Families whose MLP is two matrices; the others gate theirs, which takes a third."""
_ELEMENT_BYTES = {"float32": 4}


def encoder_cost(config: Config, dtype: str) -> ModelCost:
    """Read the sizes of a model without KV from its config (``config.to_dict()``).

    Args:
        dtype: of the weights, by name.
    """
    text = text_config(config)

    def size(*names: str) -> int:
        return next((int(text[name]) for name in names if text.get(name)), 0)

    hidden, heads = size("hidden_size", "dim"), size("num_attention_heads", "n_heads")
    inner = size("intermediate_size", "hidden_dim")
    head_dim = size("head_dim") or hidden // heads
    queries, keys = heads * head_dim, (size("num_key_value_heads") or heads) * head_dim
    matrices = 2 if text.get("model_type") in _PLAIN_MLP else 3
    element_bytes = _ELEMENT_BYTES.get(dtype, 2)
    return ModelCost(
        layers=size("num_hidden_layers", "n_layers"),
        hidden=hidden,
        heads=heads,
        attention_width=2 * head_dim,
        attention_parameters=2 * hidden * (queries + keys),
        mlp_parameters=matrices * hidden * inner,
        experts=0,
        experts_per_token=0,
        head_parameters=size("vocab_size") * hidden,  # the embedding: no logits are taken
        tied=True,
        activations=10 * hidden + 4 * queries + 4 * keys + 2 * matrices * inner,
        element_bytes=element_bytes,
        matrix_bytes=float(element_bytes),
        expert_bytes=float(element_bytes),
        head_bytes=float(element_bytes),
        kv_bytes=0,
    )


class DryEncoder:
    """Adds up the time of each step, and gives vectors that mean nothing.

    Args:
        model: what a token costs.
        device: what it runs on.
    """

    def __init__(self, model: ModelCost, device: Device) -> None:
        self.seconds = 0.0
        """Time of all steps, on a well-built engine; the engine's clock."""
        self.bound_s = 0.0
        """Time of all steps at the device's limits."""
        self.samples_drawn = 0
        """Texts so far."""
        self._model, self._device = model, device

    def encode(self, step: EncoderStep) -> Float32:
        """Add the step's time; made-up vectors of width 1."""
        lengths = step.lengths.astype(np.int64)
        pairs = int((lengths * lengths).sum())
        work = StepWork(step.num_tokens, 0, 0, len(lengths), 0, pairs)
        self.seconds += host_seconds(
            work, self._device, step_seconds(self._model, self._device, work, WELL_BUILT)
        )
        self.bound_s += step_seconds(self._model, self._device, work, PERFECT)
        self.samples_drawn += len(lengths)
        return np.ones((len(lengths), 1), np.float32)


def make_dry_encoder(
    config: EngineConfig, model: ModelCost, device: Device, *, max_model_len: int
) -> tuple[EncoderEngine, DryEncoder]:
    """An engine as a run would have it, over a ``DryEncoder`` and on its clock."""
    runner = DryEncoder(model, device)
    engine = EncoderEngine(
        runner,
        max_model_len=max_model_len,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_num_seqs=config.max_num_seqs,
        clock=lambda: runner.seconds,
    )
    return engine, runner
