"""Models with real weights on the host run on a fake CUDA device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from batchinfer import LLM, SamplingParams
from tests.encoders import make_encoder
from tests.fake_cuda.device import FakeCuda
from tests.models import make_text_model

pytestmark = pytest.mark.long

PROMPTS = [{"prompt_token_ids": [7] * length} for length in (20, 3)]
GREEDY = SamplingParams(temperature=0, max_tokens=3)
SMALL: dict[str, Any] = {
    "device": "cuda",
    "max_num_seqs": 2,
    "max_num_batched_tokens": 16,
    "num_kv_blocks": 64,
    "swap_space": 0,
}


@pytest.fixture(scope="module")
def text_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model with a tokenizer."""
    return make_text_model(tmp_path_factory.mktemp("text_model"), "qwen3")


def load(fake_cuda: FakeCuda, folder: Path, **settings: Any) -> LLM:
    with fake_cuda.loading():
        return LLM(folder, **SMALL | settings)


def test_grammars_mask_tokens_on_the_device(fake_cuda: FakeCuda, text_model: Path) -> None:
    llm = load(fake_cuda, text_model, load_format="dummy")
    regex = SamplingParams(temperature=0, max_tokens=3, structured_outputs={"regex": "[a-z]+"})
    llm.generate(PROMPTS, [regex, GREEDY], use_tqdm=False)
    assert fake_cuda.take_launches()["_token_bitmask_kernel"] > 0
    assert fake_cuda.num_replays > 0


def test_embeddings_are_last_hidden_states(fake_cuda: FakeCuda, text_model: Path) -> None:
    llm = load(fake_cuda, text_model, runner="pooling", load_format="dummy")
    assert len(llm.embed(PROMPTS, use_tqdm=False)) == 2
    assert fake_cuda.take_launches()["_chunk_kernel"] > 0
    assert fake_cuda.num_replays == 2


@pytest.fixture(scope="module", params=["bert", "modernbert", "mpnet", "gemma3_text"])
def encoder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_encoder(tmp_path_factory.mktemp("encoder"), request.param)


def test_encoders_wait_only_for_their_results(encoder: Path, fake_cuda: FakeCuda) -> None:
    llm = load(fake_cuda, encoder, runner="pooling")
    outputs = llm.embed([*PROMPTS, PROMPTS[0]], use_tqdm=False)
    assert [len(output.outputs.embedding) for output in outputs] == [32] * 3
