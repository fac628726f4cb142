from __future__ import annotations

from pathlib import Path

import pytest
import torch

from batchinfer.builders.engine import build_engine
from batchinfer.config import EngineConfig, ModelConfig
from batchinfer.engine.kv.layout import KVLayout
from batchinfer.kernels.cpu import compiled_library
from batchinfer.kernels.cpu import paged_attention as cpu_attention
from batchinfer.worker.attention.attention import AttentionKernel
from batchinfer.worker.kv_cache import KVCache
from batchinfer.worker.linear_kernels import linear_kernels
from tests.models import make_text_model


def cache(
    dtype: torch.dtype = torch.float32, *, fp8: bool = False, latent: bool = False
) -> KVCache:
    layout = KVLayout(1, 1, 6, 4, block_size=4, element_bytes=4, fp8=fp8, latent=latent)
    return KVCache(layout, 1, torch.device("cpu"), dtype)


@pytest.mark.skipif(not cpu_attention.supports(torch.float32), reason="no C compiler")
def test_c_kernels_are_named_by_their_instructions() -> None:
    fastest = f"own {cpu_attention.available(torch.float32)[0]}"
    for one in (cache(), cache(fp8=True), cache(latent=True)):
        assert AttentionKernel.of(one).line({}) == f"attention uses {fastest}"
    for kernel in linear_kernels(torch.float32):
        name = AttentionKernel.of(cache(), kernel).name
        assert name == (kernel.name if kernel.kind == "own" else fastest)


def test_the_log_says_why_no_c_kernel_attends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_attention, "load", lambda: None)
    monkeypatch.setattr(compiled_library, "why_not", lambda: "there is no C compiler")
    assert AttentionKernel.of(cache()).line({}) == (
        "attention uses torch (no C kernels): there is no C compiler"
    )


def test_the_log_names_caches_without_a_c_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled_library, "why_not", lambda: "")
    for one, kind in (
        (cache(torch.float16), "a cache of float16"),
        (cache(fp8=True, latent=True), "latents of float8_e4m3fn"),
    ):
        line = AttentionKernel.of(one).line({})
        assert line == f"attention uses torch: there is no C kernel for {kind}"


def test_an_engine_logs_and_records_its_attention_kernel(tmp_path: Path) -> None:
    model = ModelConfig(str(make_text_model(tmp_path)), dtype="float32")
    lines: list[str] = []
    context = build_engine(
        model,
        EngineConfig(device="cpu", num_kv_blocks=8),
        log=lines.append,
        pinned_kernels={"attention": "another"},
    )
    [line] = [line for line in lines if line.startswith("attention uses ")]
    assert line.startswith(f"attention uses {context.kernels['attention']}")
    assert line.endswith("earlier runs used another, so bits may differ")
