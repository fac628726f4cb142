"""The Python API, over a real (tiny, random) model and its tokenizer."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from batchinfer import LLM, BeamSearchParams, SamplingParams
from batchinfer.errors import NotYetError
from tests.models import make_text_model

GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_text_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def llm(model: Path) -> LLM:
    return LLM(str(model), num_kv_blocks=256)


def test_generate_continues_raw_text_as_transformers_does(llm: LLM, model: Path) -> None:
    reference = AutoModelForCausalLM.from_pretrained(model)
    tokenizer = AutoTokenizer.from_pretrained(model)
    prompts = ["Hello", "a longer prompt <|im_end|> with a control token"]
    for prompt, output in zip(prompts, llm.generate(prompts, GREEDY, use_tqdm=False), strict=True):
        inputs = tokenizer(prompt, return_tensors="pt")
        ids = reference.generate(
            **inputs, max_new_tokens=8, min_new_tokens=8, do_sample=False, eos_token_id=-1
        )[0]
        assert output.prompt == prompt
        assert output.prompt_token_ids == inputs["input_ids"][0].tolist()
        (sample,) = output.outputs
        assert sample.token_ids == ids[len(output.prompt_token_ids) :].tolist()
        assert sample.text == tokenizer.decode(sample.token_ids, skip_special_tokens=True)
        assert sample.finish_reason == "length"


def test_all_forms_of_a_prompt_mean_the_same(llm: LLM) -> None:
    ids = llm.generate("abc", GREEDY, use_tqdm=False)[0].prompt_token_ids
    forms = [["abc"], {"prompt": "abc"}, ids, [ids], {"prompt_token_ids": ids}]
    texts = {llm.generate(form, GREEDY, use_tqdm=False)[0].outputs[0].text for form in forms}
    assert len(texts) == 1


def test_chat_writes_the_conversation_out_with_the_template(llm: LLM, model: Path) -> None:
    conversation = [{"role": "user", "content": "Hi <|im_end|>"}]
    (output,) = llm.chat(conversation, GREEDY, use_tqdm=False)
    text = "<|im_start|>user\nHi <|im_end|><|im_end|>\n<|im_start|>assistant\n"
    assert output.prompt == text
    end = AutoTokenizer.from_pretrained(model).eos_token_id
    assert output.prompt_token_ids.count(end) == 1, "what a user writes is never a control token"
    assert llm.chat([conversation] * 2, GREEDY, use_tqdm=False)[1].prompt == text


def test_each_prompt_may_have_its_own_params(llm: LLM) -> None:
    params = [SamplingParams(max_tokens=count, ignore_eos=True) for count in (1, 5)]
    outputs = llm.generate(["a", "b"], params, use_tqdm=False)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [1, 5]
    with pytest.raises(ValueError, match="2 prompts, but 1 sampling"):
        llm.generate(["a", "b"], params[:1], use_tqdm=False)


def test_equal_prompts_with_equal_seeds_get_equal_samples(llm: LLM) -> None:
    seeded = SamplingParams(max_tokens=12, n=2, seed=3, ignore_eos=True)
    first, second = llm.generate(["same", "same"], seeded, use_tqdm=False)
    assert [s.token_ids for s in first.outputs] == [s.token_ids for s in second.outputs]
    assert first.outputs[0].token_ids != first.outputs[1].token_ids
    unseeded = SamplingParams(max_tokens=12, ignore_eos=True)
    one, other = llm.generate(["same", "same"], unseeded, use_tqdm=False)
    assert one.outputs[0].token_ids != other.outputs[0].token_ids


def test_logprobs_name_each_token_and_its_alternatives(llm: LLM) -> None:
    params = SamplingParams(max_tokens=3, temperature=0.0, logprobs=2, ignore_eos=True)
    (sample,) = llm.generate("abc", params, use_tqdm=False)[0].outputs
    assert sample.logprobs is not None
    for token_id, logprobs in zip(sample.token_ids, sample.logprobs, strict=True):
        assert logprobs[token_id].rank == 1
        assert len(logprobs) == 2
    total = sum(p[t].logprob for t, p in zip(sample.token_ids, sample.logprobs, strict=True))
    assert math.isclose(sample.cumulative_logprob, total, abs_tol=1e-4)


def test_a_bad_prompt_fails_alone(llm: LLM) -> None:
    too_long, good = llm.generate([[5] * 600, "fine"], GREEDY, use_tqdm=False)
    assert too_long.error is not None
    assert too_long.error.code == "prompt_too_long"
    assert too_long.outputs == []
    assert good.error is None


def test_stats_are_those_of_the_summary(model: Path) -> None:
    llm = LLM(str(model), num_kv_blocks=64)
    llm.generate(["one prompt", "one prompt too"], GREEDY, use_tqdm=False)
    tokens, kv = llm.stats()["tokens"], llm.stats()["kv"]
    assert tokens["output"] == 16
    assert tokens["prompt"] == tokens["prompt_computed"] + tokens["prompt_cached"]
    assert 0 < kv["peak_used_blocks"] <= 64


def test_an_interrupted_call_leaves_nothing_behind(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    expected = llm.generate("abc", GREEDY, use_tqdm=False)[0].outputs
    monkeypatch.setattr(llm._built.engine._runner, "run", interrupt)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["abc", "def", "some more words to fill blocks with"], GREEDY, use_tqdm=False)
    monkeypatch.undo()
    llm._built.engine.scheduler.check_invariants()
    assert llm.generate("abc", GREEDY, use_tqdm=False)[0].outputs == expected


def test_what_is_not_built_is_refused_by_name(llm: LLM, model: Path) -> None:
    with pytest.raises(NotYetError, match="beam_search"):
        llm.beam_search(["a"], BeamSearchParams(beam_width=2, max_tokens=4))
    with pytest.raises(NotYetError, match="tensor_parallel_size"):
        LLM(str(model), tensor_parallel_size=2)
    with pytest.raises(ValueError, match="below"):
        llm.generate("a", SamplingParams(stop_token_ids=[10_000]), use_tqdm=False)


def test_the_tokenizer_is_transformers_own(llm: LLM) -> None:
    assert llm.get_tokenizer().decode(llm.get_tokenizer()("abc")["input_ids"]).endswith("abc")
