"""Logits processors passed to calls: their arguments and their effect."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from batchinfer import LLM, SamplingParams

PROMPT = [5, 6, 7]


def run(llm: LLM, *processors: Any, **params: Any) -> Any:
    """Return the samples of a prompt that runs between two prompts without processors."""
    plain = SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True)
    given = SamplingParams(
        **{"max_tokens": 5, "temperature": 0.0, "ignore_eos": True, **params},
        logits_processors=processors,
    )
    before, output, after = llm.generate([PROMPT] * 3, [plain, given, plain], use_tqdm=False)
    assert before.outputs == after.outputs
    return output.outputs


def pick_next(output_token_ids: list[int], logits: Tensor) -> Tensor:
    logits[len(output_token_ids) + 10] = math.inf
    return logits


def test_a_logits_processor_chooses_the_tokens(llm: LLM) -> None:
    (sample,) = run(llm, pick_next, logprobs=2)
    assert sample.token_ids == [10, 11, 12, 13, 14]
    assert sample.cumulative_logprob == 0.0, "log-probability of the returned logits"
    for temperature in (0.7, 1.5):
        samples = run(llm, pick_next, temperature=temperature, n=3, repetition_penalty=1.3)
        assert {tuple(one.token_ids) for one in samples} == {(10, 11, 12, 13, 14)}


def test_a_logits_processor_gets_prompt_output_and_logits(llm: LLM) -> None:
    seen: list[tuple[list[int], list[int], Tensor]] = []

    def watch(prompt: list[int], output: list[int], logits: Tensor) -> Tensor:
        seen.append((prompt, output, logits))
        return logits

    (sample,) = run(llm, watch, logprobs=-1)
    (plain,) = llm.generate(PROMPT, SamplingParams(max_tokens=5, temperature=0, ignore_eos=True))
    assert sample.token_ids == plain.outputs[0].token_ids
    assert [prompt for prompt, _, _ in seen] == [PROMPT] * 5
    assert [output for _, output, _ in seen] == [sample.token_ids[:at] for at in range(5)]
    for (_, _, logits), found in zip(seen, sample.logprobs, strict=True):
        assert logits.dtype == torch.float32
        expected = logits.log_softmax(-1)
        own = torch.tensor([found[token_id].logprob for token_id in range(llm.vocab_size)])
        torch.testing.assert_close(own, expected, atol=1e-4, rtol=0)


def test_logits_processors_run_in_order_before_bans(llm: LLM) -> None:
    def only_two(_: list[int], logits: Tensor) -> Tensor:
        kept = torch.full_like(logits, -math.inf)
        kept[20:22] = logits[20:22]
        return kept

    def prefer(_: list[int], logits: Tensor) -> Tensor:
        assert logits.isfinite().sum() == 2
        logits[20] += 100.0
        return logits

    assert run(llm, only_two, prefer)[0].token_ids == [20] * 5
    banned = run(llm, only_two, prefer, logit_bias={20: -1000.0})
    assert banned[0].token_ids == [21] * 5


@pytest.mark.parametrize(
    ("processor", "error", "message"),
    [
        (lambda _, logits: None, TypeError, "<lambda> returned a NoneType, not a tensor"),
        (lambda _, logits: logits[:3], ValueError, r"of shape \(3,\); .* \(259,\)"),
        (lambda logits: logits, TypeError, r"must take \(output token ids, logits\)"),
        ("x", TypeError, "logits_processors contains 'x'; every entry must be a function"),
        (lambda *_: 1 / 0, ZeroDivisionError, "division"),
    ],
)
def test_invalid_logits_processors_are_refused(
    llm: LLM, processor: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        run(llm, processor)
    assert run(llm, pick_next)[0].token_ids[0] == 10, "the engine still works"
