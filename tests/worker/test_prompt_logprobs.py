"""Log-probabilities of given tokens equal transformers', computed a few rows at a time."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from batchinfer.engine.step import ScoredTokens
from batchinfer.worker.prompt_logprobs import PromptScorer
from tests.models import DECODER_FAMILIES, FAMILIES, VOCAB_SIZE, tiny_model
from tests.worker.test_model_runner import make_runner

TOP = 3


@pytest.mark.parametrize("family", [*FAMILIES, *DECODER_FAMILIES])
def test_log_probabilities_equal_those_of_the_models_logits(family: str) -> None:
    rng = np.random.default_rng(5)
    prompts = [rng.integers(2, VOCAB_SIZE, length).tolist() for length in (23, 11)]
    runner, maker = make_runner(family)
    runner._scorer = PromptScorer(runner._model, rows=4)
    step = maker.step([(maker.sequence(prompt), len(prompt)) for prompt in prompts])
    # Score the first prompt from its second token on, and the second prompt from its sixth.
    rows = [*range(22), *range(23 + 4, 23 + 10)]
    tokens = [*prompts[0][1:], *prompts[1][5:]]
    wanted = [TOP] * 22 + [0] * 6
    asked = ScoredTokens(*(np.array(values, dtype=np.int32) for values in (rows, tokens, wanted)))
    result = runner.submit(replace(step, scored=asked)).result()
    plain = runner.submit(step).result()
    scored = result.scored
    assert plain.scored is None
    assert result.token_ids.tolist() == plain.token_ids.tolist()

    reference = tiny_model(family)
    with torch.no_grad():
        logits = [reference(input_ids=torch.tensor([prompt])).logits[0] for prompt in prompts]
    own = torch.cat([logits[0][:22], logits[1][4:10]]).float().log_softmax(-1)
    of_tokens = own[torch.arange(28), torch.tensor(tokens)]
    np.testing.assert_allclose(scored.logprobs, of_tokens.numpy(), atol=1e-4)
    assert scored.ranks is not None
    nearly = (own > of_tokens[:, None] + 1e-4).sum(1), (own > of_tokens[:, None] - 1e-4).sum(1)
    assert (scored.ranks >= 1 + nearly[0].numpy()).all()
    assert (scored.ranks <= nearly[1].numpy()).all()
    best = own.topk(TOP)
    np.testing.assert_allclose(scored.top_logprobs[:22], best.values[:22].numpy(), atol=1e-4)
    chosen = own[:22].gather(1, torch.from_numpy(scored.top_token_ids[:22].astype(np.int64)))
    np.testing.assert_allclose(chosen.numpy(), best.values[:22].numpy(), atol=1e-4)
    assert not scored.nonfinite.any()


def test_prompt_logprobs_return_named_ids_and_logits() -> None:
    runner, maker = make_runner("llama")
    runner._scorer = PromptScorer(runner._model, rows=4)
    prompt = [3, 4, 5, 6, 7, 8]
    step = maker.step([(maker.sequence(prompt), len(prompt))])
    rows = np.arange(5, dtype=np.int32)
    named = np.array([[9, -1], [10, 11], [-1, -1], [4, 4], [0, 1]], dtype=np.int32)
    as_logits = np.array([False, True, False, False, True])
    asked = ScoredTokens(
        rows, np.array(prompt[1:], dtype=np.int32), np.ones_like(rows), named, as_logits
    )
    scored = runner.submit(replace(step, scored=asked)).result().scored
    with torch.no_grad():
        logits = tiny_model("llama")(input_ids=torch.tensor([prompt])).logits[0, :5]
    own = torch.where(torch.from_numpy(as_logits)[:, None], logits, logits.log_softmax(-1))
    expected = own.gather(1, torch.from_numpy(named).long().clamp(min=0)).numpy()
    there = named >= 0
    np.testing.assert_allclose(scored.named_logprobs[there], expected[there], atol=1e-4)
    assert np.isneginf(scored.named_logprobs[~there]).all()
    of_tokens = own[torch.arange(5), torch.tensor(prompt[1:])]
    np.testing.assert_allclose(scored.logprobs, of_tokens.numpy(), atol=1e-4)
    np.testing.assert_allclose(scored.top_logprobs[:, 0], own.amax(1).numpy(), atol=1e-4)


def test_logits_are_computed_in_pieces_of_the_planned_size() -> None:
    runner, maker = make_runner("llama")
    runner._scorer = PromptScorer(runner._model, rows=5)
    taken: list[int] = []
    head = runner._model.get_output_embeddings()
    head.register_forward_hook(lambda module, args, output: taken.append(output.shape[1]))
    prompt = list(range(2, 35))
    step = maker.step([(maker.sequence(prompt), len(prompt))])
    rows = np.arange(32, dtype=np.int32)
    asked = ScoredTokens(rows, np.array(prompt[1:], dtype=np.int32), np.zeros_like(rows))
    runner.submit(replace(step, scored=asked)).result()
    assert taken == [1, 5, 5, 5, 5, 5, 5, 2]


def test_prompt_logprobs_report_nan_logits() -> None:
    runner, maker = make_runner("llama")
    with torch.no_grad():
        runner._model.get_input_embeddings().weight[99] = torch.nan
    prompt = [3, 4, 99, 5, 6]
    step = maker.step([(maker.sequence(prompt), len(prompt))])
    rows = np.arange(4, dtype=np.int32)
    asked = ScoredTokens(rows, np.array(prompt[1:], dtype=np.int32), np.zeros_like(rows))
    scored = runner.submit(replace(step, scored=asked)).result().scored
    assert scored.nonfinite.tolist()[2:] == [True, True]
    assert (scored.logprobs[scored.nonfinite] == 0).all()
