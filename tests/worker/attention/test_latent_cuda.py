"""Latent attention with Triton kernels in the interpreter equals transformers' attention."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from batchinfer.engine.kv.layout import KVLayout
from batchinfer.engine.step import SharedPrefixes
from batchinfer.worker.attention.attention import ATTENTION_NAME, make_cuda_backend, register
from batchinfer.worker.attention.cuda import LatentCudaAttention
from batchinfer.worker.attention.latent import keep_latents
from batchinfer.worker.forward import forward
from batchinfer.worker.kv_cache import KVCache
from tests.models import VOCAB_SIZE, tiny_model
from tests.worker.step_maker import HandSequence, StepMaker

CPU = torch.device("cpu")


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_prefill_a_chunk_and_decodes_that_share_match_eager(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(KVCache, "is_native", False)  # lay out the pool as on CUDA devices
    model, eager = (tiny_model("youtu", kv_lora_rank=32, num_hidden_layers=2) for _ in range(2))
    register()
    model.set_attn_implementation(ATTENTION_NAME)  # type: ignore[operator]
    keep_latents(model)
    layout = KVLayout.from_config(
        model.config.to_dict(),  # type: ignore[union-attr, operator]
        block_size=16,
        dtype="float32",
        latent=True,
    )
    cache = KVCache(layout, 64, CPU, torch.float32)
    cache.pool[:64] = torch.nan
    backend = make_cuda_backend(cache, None)
    assert isinstance(backend, LatentCudaAttention)

    maker, ids = StepMaker(64, 16), np.random.default_rng(1).integers(0, VOCAB_SIZE, 60).tolist()
    first, other = maker.sequence(ids[:50]), maker.sequence(ids[20:60])
    forward(model, cache, backend, maker.step([(first, 33)], every_logit=True))
    second = HandSequence([*ids[:32], *ids[40:49]], first.block_table[:2], 32)
    parts = [(first, 7), (second, 8), (other, 9)]
    got = [forward(model, cache, backend, maker.step(parts, every_logit=True))]
    decodes = [(first, 1), (second, 1), (other, 1)]
    shared = SharedPrefixes(np.array([0, 1, 2], np.int32), np.array([0, 32, 0], np.int32))
    step = replace(maker.step(decodes, every_logit=True), shared_prefixes=shared)
    got.append(forward(model, cache, backend, step))
    for logits, counted in zip(got, (parts, decodes), strict=True):
        last = 0 if counted is decodes else 1
        expected = torch.cat(
            [
                eager(input_ids=torch.tensor([one.token_ids[: one.num_computed - last]]))
                .logits[0, -count:]
                .detach()
                for one, count in counted
            ]
        )
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
