"""Reasoning models: batches, jobs and Python calls with a tiny random model."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from openai.types.chat import ChatCompletion
from transformers import AutoTokenizer

from batchinfer import LLM, SamplingParams
from tests.models import CHAT_TEMPLATE, make_text_model
from tests.openai_batches import answers, request

TALK = [{"role": "user", "content": "hello"}]
REGEX = {"regex": "[ab]{8}"}
END = len("</think>")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a tiny model whose chat template starts the reasoning."""
    path = make_text_model(tmp_path_factory.mktemp("model") / "tiny")
    tokenizer = AutoTokenizer.from_pretrained(path)
    opens = "{% if add_generation_prompt %}<think>{% endif %}"
    tokenizer.chat_template = CHAT_TEMPLATE + opens
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def llm(model: Path) -> LLM:
    return LLM(str(model), dtype="float32", num_kv_blocks=200, reasoning="auto")


def test_generate_limits_reasoning_tokens(llm: LLM) -> None:
    params = SamplingParams(
        max_tokens=60, n=2, seed=1, max_reasoning_tokens=5, structured_outputs=REGEX, logprobs=0
    )
    free = SamplingParams(max_tokens=12, temperature=0)
    bounded, unbounded = llm.chat([TALK, TALK], [params, free], use_tqdm=False)
    for sample in bounded.outputs:
        assert re.fullmatch("[ab]{8}", sample.text)
        assert sample.num_reasoning_tokens == 5 + END
        assert len(sample.token_ids) == 5 + END + 8 + 1 == len(sample.logprobs or ())
    assert bounded.outputs[0].reasoning != bounded.outputs[1].reasoning
    (sample,) = unbounded.outputs
    assert (sample.text, sample.finish_reason) == ("", "length")
    assert sample.num_reasoning_tokens == 12
    assert sample.reasoning


def test_each_beam_reasons_before_its_structured_answer(llm: LLM) -> None:
    params = SamplingParams(
        max_tokens=60, n=4, beam_width=4, max_reasoning_tokens=5, structured_outputs=REGEX
    )
    (searched,) = llm.chat([TALK], params, use_tqdm=False)
    for beam in searched.outputs:
        assert re.fullmatch("[ab]{8}", beam.text)
        assert beam.num_reasoning_tokens == 5 + END
    assert len({(beam.reasoning, beam.text) for beam in searched.outputs}) == 4
    scores = [beam.score for beam in searched.outputs]
    assert scores == sorted(scores, reverse=True)


def test_reasoning_auto_needs_markers_in_the_template(llm: LLM, model: Path) -> None:
    plain = LLM(str(model), dtype="float32", num_kv_blocks=50)
    with pytest.raises(ValueError, match=r"prompt 0: max_reasoning_tokens needs LLM\(reasoning"):
        plain.generate("x", SamplingParams(max_reasoning_tokens=3), use_tqdm=False)
    with pytest.raises(ValueError, match='reasoning is "yes"; it must be "auto"'):
        LLM(str(model), dtype="float32", num_kv_blocks=50, reasoning="yes")


def test_reasoning_parser_accepts_vllm_names(llm: LLM, model: Path) -> None:
    params = SamplingParams(max_tokens=40, temperature=0, max_reasoning_tokens=5)
    named = LLM(str(model), dtype="float32", num_kv_blocks=50, reasoning_parser="qwen3")
    one, other = (each.chat(TALK, params, use_tqdm=False)[0].outputs[0] for each in (named, llm))
    assert one.reasoning
    assert (one.reasoning, one.text) == (other.reasoning, other.text)
    with pytest.raises(ValueError, match=r"reasoning_parser: 'qwen' is not known.*qwen3"):
        LLM(str(model), reasoning_parser="qwen")
    with pytest.raises(ValueError, match="reasoning and reasoning_parser mean the same"):
        LLM(str(model), reasoning="auto", reasoning_parser="qwen3")


def test_batch_files_separate_reasoning(model: Path, tmp_path: Path) -> None:
    body: dict[str, Any] = {"messages": TALK, "max_tokens": 60, "temperature": 0}
    bodies = [
        {**body, "max_reasoning_tokens": 5, "structured_outputs": REGEX},
        {**body, "max_tokens": 9},
    ]
    requests = [request(str(at), **one) for at, one in enumerate(bodies)]
    found = answers(tmp_path, model, requests, num_kv_blocks=100, reasoning_parser="auto")
    answered = [line["response"]["body"] for line in found.values()]
    whole, cut = map(ChatCompletion.model_validate, answered)
    assert re.fullmatch("[ab]{8}", whole.choices[0].message.content or "")
    thought = answered[0]["choices"][0]["message"]
    assert thought["reasoning"] == thought["reasoning_content"] != ""
    for answer, tokens in ((whole, 5 + END), (cut, 9)):
        assert answer.usage.completion_tokens_details.reasoning_tokens == tokens
    assert (cut.choices[0].message.content, cut.choices[0].finish_reason) == ("", "length")
