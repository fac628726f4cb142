"""Tokens that would repeat an n-gram are those that transformers bans."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, NoRepeatNGramLogitsProcessor

from batchinfer import LLM, SamplingParams
from batchinfer.engine.step_io.ngrams import repeating_tokens
from tests.models import make_text_model
from tests.parity import TIE

IMAGE = 3


def found(prompt: list[int], output: list[int], size: int) -> set[int]:
    return repeating_tokens(np.array(prompt, np.int32), output, size)


def banned(tokens: list[int], size: int) -> set[int]:
    """Return the tokens that transformers bans."""
    scores = NoRepeatNGramLogitsProcessor(size)(torch.tensor([tokens]), torch.zeros(1, 8))
    return set(scores[0].isinf().nonzero()[:, 0].tolist())


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_banned_tokens_equal_transformers(size: int) -> None:
    rng = np.random.default_rng(size)
    for length in range(1, 60):
        tokens = rng.integers(0, 3, length).tolist()
        split = int(rng.integers(1, length + 1))
        assert found(tokens[:split], tokens[split:], size) == banned(tokens, size)


def test_all_images_have_the_same_token() -> None:
    """Different images have different negative ids."""
    assert found([-1, 5, -2], [], 2) == banned([IMAGE, 5, IMAGE], 2) == {5}
    assert found([5, -1, 5], [], 2) == set()


def test_drawn_tokens_are_the_best_that_transformers_allows(tmp_path: Path) -> None:
    size = 2
    folder = make_text_model(tmp_path)
    llm = LLM(str(folder), dtype="float32", num_kv_blocks=64)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    prompts = [[5, 6, 5, 6, 5], [7, 7, 7], [9]]
    greedy = SamplingParams(
        max_tokens=24, temperature=0.0, ignore_eos=True, no_repeat_ngram_size=size
    )
    drawn = SamplingParams(
        max_tokens=24, n=2, seed=1, top_k=2, ignore_eos=True, no_repeat_ngram_size=size
    )
    for output in llm.generate(prompts, greedy, use_tqdm=False):
        ids = torch.tensor([[*output.prompt_token_ids, *output.outputs[0].token_ids]])
        with torch.no_grad():
            logits = model(ids).logits[0]
        for at in range(len(output.prompt_token_ids), ids.shape[1]):
            scores = NoRepeatNGramLogitsProcessor(size)(ids[:, :at], logits[None, at - 1])[0]
            assert scores.max() - scores[ids[0, at]] < TIE
    for output in llm.generate(prompts[1:], drawn, use_tqdm=False):
        prompt = output.prompt_token_ids
        for sample in output.outputs:
            pairs = list(pairwise([*prompt, *sample.token_ids]))[max(len(prompt) - 1, 0) :]
            assert len(set(pairs)) == len(pairs)
            assert not {*pairwise(prompt)} & {*pairs}
