"""Routers of mixtures of experts with packed weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from batchinfer.config import ModelConfig, SamplingParams
from batchinfer.kernels.cpu.compiled_library import load
from batchinfer.llm import LLM
from batchinfer.worker.linear.packed_routers import RouterWeight, Scores
from batchinfer.worker.loader import load_model
from batchinfer.worker.memory import model_bytes
from tests.models import make_checkpoint, make_text_model

CPU = torch.device("cpu")
FAMILIES = ("qwen3_moe", "gpt_oss", "deepseek_v3", "qwen3_5_moe_text")
"""Routers in the model's dtype, with a bias, in float32, and beside a shared expert."""
PROMPTS = [f"Row {row} asks for {'more ' * (row % 5)}words" for row in range(24)]

needs_compiler = pytest.mark.skipif(load() is None, reason="needs a C compiler")


@needs_compiler
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
@torch.inference_mode()
def test_routers_equal_those_of_transformers(family: str, dtype: str, tmp_path: Path) -> None:
    folder = make_checkpoint(family, tmp_path)
    model = load_model(ModelConfig(str(folder), dtype=dtype), device=CPU).model
    routers = [one for one in model.modules() if type(getattr(one, "weight", None)) is RouterWeight]
    assert routers
    total, sizes = model_bytes(model), sum(int(router.weight.nbytes) for router in routers)
    for router in routers:
        rows = torch.randn(40, router.weight.shape[1], dtype=getattr(torch, dtype))
        packed = router(rows)
        router.weight = router.weight.as_subclass(torch.Tensor)
        torch.testing.assert_close(packed, router(rows), atol=2e-2, rtol=2e-2)
    assert total - model_bytes(model) >= 2 * sizes, "the weights and their packed copies count"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sigmoid_does_not_depend_on_the_number_of_scores(dtype: torch.dtype) -> None:
    """More scores than one thread computes, and fewer than a vector."""
    scores = torch.randn(265, 256).to(dtype)
    together = scores.as_subclass(Scores).float().sigmoid()
    for row in (0, 127, 264):
        assert torch.equal(together[row], scores[row].as_subclass(Scores).float().sigmoid())
    alone = scores[7, :3].as_subclass(Scores).float()
    assert torch.equal(together[7, :3], torch.sigmoid(alone))
    torch.testing.assert_close(together, scores.float().sigmoid())


@needs_compiler
@pytest.mark.parametrize("family", FAMILIES)
def test_a_row_has_the_same_bits_alone_and_in_company(family: str, tmp_path: Path) -> None:
    model = str(make_text_model(tmp_path, family))
    params = SamplingParams(max_tokens=6, temperature=1.0, seed=1, ignore_eos=True, logprobs=0)
    llm = LLM(model, dtype="float32", enable_prefix_caching=False)
    together = llm.generate(PROMPTS, params, use_tqdm=False)
    for at in (0, 7, 23):
        alone = llm.generate(PROMPTS[at], params, use_tqdm=False)[0].outputs[0]
        company = together[at].outputs[0]
        assert (alone.token_ids, alone.logprobs) == (company.token_ids, company.logprobs)
