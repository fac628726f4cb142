"""A tiny model with step graphs on a CPU, where a replay runs the computation again."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np
import torch

from batchinfer.engine.kv.layout import KVLayout
from batchinfer.engine.step import Step
from batchinfer.kernels import reference
from batchinfer.worker.attention.attention import ATTENTION_NAME, make_cuda_backend, register
from batchinfer.worker.attention.temperature import temper_queries
from batchinfer.worker.cuda_graphs.capture import Capture, Run
from batchinfer.worker.cuda_graphs.graph_sizes import GraphSize, GraphSizes
from batchinfer.worker.cuda_graphs.step_graphs import StepGraphs, kind_of
from batchinfer.worker.forward import forward
from batchinfer.worker.fusion.fuse import fuse
from batchinfer.worker.kv_cache import KVCache
from batchinfer.worker.lora.adapter_checkpoint import read_adapters
from batchinfer.worker.lora.lora_layers import add_adapters
from tests.models import VOCAB_SIZE, tiny_model
from tests.worker.step_maker import HandSequence, StepMaker

MAX_SEQS, MAX_TOKENS, MAX_MODEL_LEN, NUM_BLOCKS, BLOCK_SIZE = 9, 40, 96, 64, 16
NUM_LAYERS = 1


def eager(run: Run) -> Run:
    """Capture nothing: a replay calls ``run`` again, which sees new inputs only in its tensors."""
    return run


@cache
def fused_model(family: str, changes: tuple[tuple[str, Any], ...]) -> torch.nn.Module:
    """Return a fused tiny model with paged attention; each model is made only once."""
    return _fused(family, dict(changes))


def _fused(family: str, changes: dict[str, Any]) -> torch.nn.Module:
    register()
    model = tiny_model(family, **changes)
    model.set_attn_implementation(ATTENTION_NAME)  # type: ignore[operator]
    temper_queries(model)
    fuse(model, _layout(model), MAX_MODEL_LEN)
    return model


def _layout(model: torch.nn.Module) -> KVLayout:
    return KVLayout.from_config(
        model.config.to_dict(),  # type: ignore[union-attr, operator]
        block_size=BLOCK_SIZE,
        dtype="float32",
    )


class Bench:
    """A tiny model and a pool with some prefilled sequences.

    Models without adapters are shared, so tests must undo their changes to them.
    """

    def __init__(
        self,
        family: str = "llama",
        *,
        capture: Capture = eager,
        adapters: Mapping[str, str] | None = None,
        **changes: Any,
    ) -> None:
        changes = {"num_hidden_layers": NUM_LAYERS} | changes
        self.model = (
            _fused(family, changes) if adapters else fused_model(family, tuple(changes.items()))
        )
        self.layout = _layout(self.model)
        read = read_adapters(adapters or {}, self.model.config)  # type: ignore[arg-type]
        if read:
            add_adapters(self.model, self.layout, read)
        self.cache = KVCache(self.layout, NUM_BLOCKS, torch.device("cpu"), torch.float32)
        self.cache.pool[:NUM_BLOCKS] = torch.nan
        self.maker = StepMaker(NUM_BLOCKS, BLOCK_SIZE)
        self.graphs = StepGraphs(
            self.model,
            self.cache,
            max_num_seqs=MAX_SEQS,
            max_graph_tokens=MAX_TOKENS,
            max_model_len=MAX_MODEL_LEN,
            num_adapters=len(read),
            capture=capture,
        )

    def prefilled(self, lengths: list[int], seed: int = 0) -> list[HandSequence]:
        """Return sequences with random keys and values for all but their last token."""
        return self.partly_filled([(length - 1, 1) for length in lengths], seed)

    def partly_filled(self, lengths: list[tuple[int, int]], seed: int = 0) -> list[HandSequence]:
        """Return sequences with random keys and values for their first tokens.

        Args:
            lengths: (tokens with keys and values, tokens without) of each sequence.
        """
        ids = np.random.default_rng(seed)
        sequences = [
            self.maker.sequence(ids.integers(0, VOCAB_SIZE, there + new).tolist())
            for there, new in lengths
        ]
        parts = [(s, there) for s, (there, _) in zip(sequences, lengths, strict=True) if there]
        if parts:
            slots = torch.from_numpy(self.maker.step(parts).slot_mapping)
            for layer in range(self.layout.num_layers):
                caches = self.cache.key(layer), self.cache.value(layer)
                sizes = [(len(slots), cache.shape[1], cache.shape[3]) for cache in caches]
                reference.kv_write(*map(torch.randn, sizes), *caches, slots)
        return sequences

    def plain(self, step: Step, prev_token_ids: torch.Tensor | None = None) -> torch.Tensor:
        """Return the logits of a step computed without graphs."""
        backend = make_cuda_backend(self.cache, None)
        return forward(self.model, self.cache, backend, step, prev_token_ids)

    def size_of(self, step: Step) -> GraphSize:
        """Return the graph size that a step uses if all sizes are captured."""
        size = GraphSizes(self.graphs.sizes).least(
            kind_of(step), step.num_tokens, step.num_sequences
        )
        assert size is not None
        return size

    def replayed(self, step: Step, prev_token_ids: torch.Tensor | None = None) -> torch.Tensor:
        """Return the logits from a graph; capture the graph first if this has not been done."""
        if self.graphs.size_for(step) != self.size_of(step):
            self.graphs.capture(self.size_of(step))
        size = self.graphs.size_for(step)
        assert size is not None
        return self.graphs.logits(step, size, prev_token_ids)

    def compare(self, step: Step, prev_token_ids: torch.Tensor | None = None) -> None:
        """Check that a replay gives the logits of the eager step, and leaves the same pool."""
        before = self.cache.pool.clone()
        expected = self.plain(step, prev_token_ids)
        computed = self.cache.pool.clone()
        self.cache.pool.copy_(before)
        got = self.replayed(step, prev_token_ids)
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
        # equal_nan: slots that must not be written still hold NaN.
        torch.testing.assert_close(self.cache.pool, computed, atol=1e-5, rtol=1e-5, equal_nan=True)
