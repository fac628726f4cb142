"""Prompts of ``LLM.generate`` that are given as embeddings."""

from __future__ import annotations

from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from batchinfer import LLM, BeamSearchParams, EmbedsPrompt, SamplingParams
from batchinfer.errors import NotYetError
from batchinfer.llm.prompt_embeds import PromptEmbeds
from tests.models import make_text_model

GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
IDS = np.random.default_rng(3).integers(3, 250, 60).tolist()
WIDTH = 32


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_text_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return LLM(str(folder), dtype="float32", num_kv_blocks=64, enable_prompt_embeds=True)


@pytest.fixture(scope="module")
def table(folder: Path) -> torch.Tensor:
    """Embeddings of all token ids, [V, H]."""
    return AutoModelForCausalLM.from_pretrained(folder).get_input_embeddings().weight.detach()


def run(llm: LLM, *prompts: Any, params: SamplingParams = GREEDY) -> list[Any]:
    return llm.generate([*prompts], params, use_tqdm=False)


def vectors(seed: int, length: int = 40) -> torch.Tensor:
    return torch.randn(length, WIDTH, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("family", ["gpt2", "gemma3_text", "qwen3_next"])
def test_embeddings_equal_transformers(family: str, tmp_path: Path) -> None:
    folder = make_text_model(tmp_path, family)
    llm = LLM(
        *(str(folder),),
        dtype="float32",
        num_kv_blocks=128,
        max_num_batched_tokens=16,
        enable_prompt_embeds=True,
    )
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    embeds = torch.cat([model.get_input_embeddings()(torch.tensor(IDS)).detach(), vectors(1)])
    expected = model.generate(
        inputs_embeds=embeds[None],
        attention_mask=torch.ones(1, len(embeds), dtype=torch.int64),
        max_new_tokens=8,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )[0]
    batch = [{"prompt_embeds": embeds}, "some text", IDS, {"prompt_embeds": embeds[: len(IDS)]}]
    outputs = run(llm, *batch)
    assert outputs[0].outputs[0].token_ids == expected.tolist()
    assert outputs[3].outputs[0].token_ids == outputs[2].outputs[0].token_ids


def test_samples_logprobs_and_beams_equal_those_of_token_ids(llm: LLM, table: torch.Tensor) -> None:
    embedded = {"prompt_embeds": table[IDS]}
    sampled = {"n": 3, "seed": 5, "logprobs": 2, "max_tokens": 8, "ignore_eos": True}
    for options in (sampled, {"beam_width": 3, "n": 3, "max_tokens": 6}):
        params = SamplingParams(**options)
        by_ids, by_vectors = run(llm, IDS, embedded, params=params)
        assert by_vectors.outputs == by_ids.outputs


def test_outputs_show_zeros_and_the_given_text(llm: LLM) -> None:
    prompt = EmbedsPrompt(prompt_embeds=vectors(2)[None], prompt="what it says")
    (output,) = run(llm, prompt)
    assert (output.prompt, output.prompt_token_ids) == ("what it says", [0] * 40)
    cut = SamplingParams(max_tokens=4, temperature=0.0, truncate_prompt_tokens=30)
    whole, kept = run(llm, {"prompt_embeds": vectors(2)[-30:]}, prompt, params=cut)
    assert kept.outputs == whole.outputs
    assert kept.prompt_token_ids == [0] * 30


def test_only_equal_vectors_share_blocks(llm: LLM) -> None:
    """Prompts share the blocks of a common prefix, and no block of different vectors."""
    one, other = vectors(4), vectors(5)
    mixed = torch.cat([one[:24], other[:16]])
    llm.reset_prefix_cache()
    alone = []
    for embeds in (one, other, mixed):
        alone += run(llm, {"prompt_embeds": embeds})
        llm.reset_prefix_cache()
    again = [run(llm, {"prompt_embeds": embeds})[0] for embeds in (one, other, mixed)]
    assert [output.num_cached_tokens for output in again] == [0, 0, 24]
    assert [output.outputs for output in again] == [output.outputs for output in alone]
    assert len({tuple(output.outputs[0].token_ids) for output in again}) == 3


def test_forgotten_vectors_get_new_ids() -> None:
    reader = PromptEmbeds(WIDTH, torch.float32, count(), remembered=4)
    first = [reader.read(vectors(1, 3), "x", None).token_ids.tolist() for _ in range(2)]
    assert first == [[-1, -2, -3]] * 2
    assert reader.read(vectors(2, 3), "x", None).token_ids.tolist() == [-4, -5, -6]
    assert reader.read(vectors(1, 3), "x", None).token_ids.tolist() == [-7, -8, -9]


@pytest.mark.parametrize(
    ("bad", "error", "message"),
    [
        (vectors(1)[:, :8], ValueError, r"has the shape \[40, 8\]; give a tensor \[tokens, 32\]"),
        (vectors(1)[0], ValueError, r"has the shape \[32\]"),
        (torch.zeros(2, 3, WIDTH), ValueError, r"has the shape \[2, 3, 32\]"),
        (vectors(1).half(), TypeError, "dtype torch.float16; give a tensor .* of torch.float32"),
        (vectors(1).numpy(), TypeError, "has the type ndarray; give a tensor"),
        (vectors(1) * float("nan"), ValueError, "contains NaN or infinity"),
        (vectors(1)[:0], ValueError, "it has no tokens"),
    ],
)
def test_bad_embeddings_are_refused(
    llm: LLM, bad: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=f"^prompt 1: .*{message}"):
        run(llm, IDS, {"prompt_embeds": bad})


def test_other_keys_and_calls_are_refused(llm: LLM, folder: Path) -> None:
    good = {"prompt_embeds": vectors(1)}
    for extra, message in (
        ({"prompt_token_ids": [1]}, "both prompt_embeds and prompt_token_ids"),
        ({"multi_modal_data": {"image": 1}}, "both prompt_embeds and multi_modal_data"),
        ({"promt": "a"}, "prompt 0 has no key promt"),
    ):
        with pytest.raises(ValueError, match=message):
            run(llm, good | extra)
    with pytest.raises(TypeError, match="its prompt is an int; give a string"):
        run(llm, good | {"prompt": 3})
    with pytest.raises(ValueError, match=r"prompt_logprobs cannot be .* prompt_embeds"):
        run(llm, good, params=SamplingParams(max_tokens=1, prompt_logprobs=1))
    with pytest.raises(NotYetError, match="beam_search with prompt_embeds"):
        llm.beam_search(good, BeamSearchParams(beam_width=2, max_tokens=2))
    with pytest.raises(NotYetError, match=r"LLM.embed with prompt_embeds"):
        llm.embed(good)
    plain = LLM(str(folder), dtype="float32", num_kv_blocks=8)
    with pytest.raises(ValueError, match=r"give LLM\(enable_prompt_embeds=True\)"):
        run(plain, good)


def test_a_model_whose_layers_read_token_ids_is_refused(tmp_path: Path) -> None:
    folder = make_text_model(tmp_path, "gemma4_text", vocab_size_per_layer_input=259)
    with pytest.raises(NotYetError, match="layers also read token ids"):
        LLM(str(folder), dtype="float32", num_kv_blocks=8, enable_prompt_embeds=True)
