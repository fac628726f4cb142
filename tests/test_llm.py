"""The Python API with a tiny random model."""

from __future__ import annotations

import json
import logging
import math
import re
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import batchinfer
import batchinfer.llm.run_prompts
from batchinfer import LLM, BeamSearchParams, RequestOutput, SamplingParams
from batchinfer.worker.model.tokenizer import load_tokenizer
from tests.engine.invariants import check_scheduler

GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)


def test_generate_equals_transformers(llm: LLM, model: Path) -> None:
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


def test_engine_choices_are_logged_and_not_printed(
    model: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    LLM(str(model), num_kv_blocks=8, num_threads=1)
    assert not caplog.messages
    with caplog.at_level(logging.INFO, logger="batchinfer.llm"):
        LLM(str(model), num_kv_blocks=8, num_threads=1)
    threads, linear, *memory = caplog.messages
    assert threads == "1 thread: engine.num_threads"
    assert linear.startswith("linear layers use ")
    assert memory[0].startswith("weights")
    shown = capfd.readouterr()
    assert "engine.num_threads" not in shown.out + shown.err


def test_fp8_has_four_times_the_blocks_of_float32_for_the_memory(model: Path) -> None:
    plain, fp8 = (
        LLM(str(model), dtype="float32", kv_cache_memory="1MiB", kv_cache_dtype=name)
        for name in ("auto", "fp8")
    )
    blocks = [int(llm.stats()["kv"]["num_blocks"]) for llm in (plain, fp8)]
    assert blocks[1] // 4 == blocks[0]
    (output,) = fp8.generate("Hello", GREEDY, use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 8


def test_all_prompt_forms_give_the_same_text(llm: LLM) -> None:
    ids = llm.generate("abc", GREEDY, use_tqdm=False)[0].prompt_token_ids
    forms = [["abc"], {"prompt": "abc"}, ids, [ids], {"prompt_token_ids": ids}]
    texts = {llm.generate(form, GREEDY, use_tqdm=False)[0].outputs[0].text for form in forms}
    assert len(texts) == 1


def test_chat_renders_the_chat_template(llm: LLM, model: Path) -> None:
    conversation = [{"role": "user", "content": "Hi <|im_end|>"}]
    (output,) = llm.chat(conversation, GREEDY, use_tqdm=False)
    text = "<|im_start|>user\nHi <|im_end|><|im_end|>\n<|im_start|>assistant\n"
    assert output.prompt == text
    end = AutoTokenizer.from_pretrained(model).eos_token_id
    assert output.prompt_token_ids.count(end) == 1, "a user's text never becomes a control token"
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


def test_prompt_logprobs_equal_those_of_transformers(llm: LLM, model: Path) -> None:
    prompts = ["a prompt", "a prompt that goes on", "a"]
    params = SamplingParams(max_tokens=1, prompt_logprobs=2)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    reference = AutoModelForCausalLM.from_pretrained(model)
    for output in outputs:
        ids = output.prompt_token_ids
        logits = reference(input_ids=torch.tensor([ids])).logits[0].detach()
        expected = logits.log_softmax(-1)[:-1]
        assert output.prompt_logprobs is not None
        first, *others = output.prompt_logprobs
        assert first is None
        assert len(others) == len(ids) - 1
        for token_id, found, own in zip(ids[1:], others, expected, strict=True):
            for other_id, logprob in found.items():
                assert math.isclose(logprob.logprob, own[other_id], abs_tol=1e-4)
            assert sorted(logprob.rank for logprob in found.values())[:2] == [1, 2]
            assert len(found) == 2 + (found[token_id].rank > 2)
    plain = llm.generate(prompts[:1], SamplingParams(max_tokens=1), use_tqdm=False)
    assert plain[0].prompt_logprobs is None


def test_decoded_tokens_of_a_multi_token_character(llm: LLM) -> None:
    params = SamplingParams(
        max_tokens=12, logprobs=0, prompt_logprobs=0, structured_outputs={"choice": ["é€"]}
    )
    (output,) = llm.generate("a€🙂", params, use_tqdm=False)
    assert output.prompt_logprobs is not None
    _, *prompt = zip(output.prompt_token_ids, output.prompt_logprobs, strict=True)
    assert [found[id_].decoded_token for id_, found in prompt] == ["", "", "€", "", "", "", "🙂"]
    sample = output.outputs[0]
    assert sample.logprobs is not None
    texts = [p[t].decoded_token for t, p in zip(sample.token_ids, sample.logprobs, strict=True)]
    assert texts[:5] == ["", "é", "", "", "€"]


def test_prompt_fails_if_bans_exclude_every_token(llm: LLM) -> None:
    words = ["h", "g"]
    encode = llm.get_tokenizer().encode
    allowed = [encode(word, add_special_tokens=False)[0] for word in words]
    params = [
        SamplingParams(max_tokens=4),
        SamplingParams(max_tokens=4, allowed_token_ids=allowed, bad_words=words),
        SamplingParams(max_tokens=4, structured_outputs={"choice": words}, bad_words=words),
        SamplingParams(max_tokens=4, temperature=0.0),
    ]
    outputs = llm.generate(["a"] * 4, params, use_tqdm=False)
    codes = [output.error and output.error.code for output in outputs]
    assert codes == [None, "no_token_left", "no_token_left", None]
    assert "bad_words" in str(outputs[1].error)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_fp8_kv_cache_gives_the_same_bits_in_any_batch(model: Path, dtype: str) -> None:
    llm = LLM(
        str(model), dtype=dtype, kv_cache_dtype="fp8", num_kv_blocks=64, enable_prefix_caching=False
    )
    params = SamplingParams(max_tokens=8, temperature=0.0, logprobs=1, ignore_eos=True)
    prompts = ["a prompt of some length", "b", "another one that goes on for a while " * 3]
    together = llm.generate(prompts, params, use_tqdm=False)
    alone = [llm.generate(prompt, params, use_tqdm=False)[0] for prompt in prompts]
    for one, other in zip(together, alone, strict=True):
        assert one.error is None
        assert one.outputs[0].logprobs == other.outputs[0].logprobs


def test_errors_argument_raises_or_returns_prompt_errors(llm: LLM) -> None:
    prompts = [[5] * 600, "fine"]
    with pytest.raises(ValueError, match=r"prompt 0: .*length 600.* is longer than the maximum"):
        llm.generate(prompts, GREEDY, use_tqdm=False)
    too_long, good = llm.generate(prompts, GREEDY, use_tqdm=False, errors="return")
    assert too_long.error.code == "prompt_too_long"
    assert too_long.outputs == []
    assert good.error is None


def test_stats_match_summary_and_render_as_a_table(model: Path) -> None:
    llm = LLM(str(model), num_kv_blocks=64)
    llm.generate(["one prompt", "one prompt too"], GREEDY, use_tqdm=False)
    stats = llm.stats()
    assert json.loads(json.dumps(stats)) == dict(stats)
    assert re.search(r"num_blocks +64\n", repr(stats))
    assert "<td style='text-align:left'>num_blocks</td><td>64</td>" in stats._repr_html_()
    tokens, kv = stats["tokens"], stats["kv"]
    assert tokens["output"] == 16
    assert tokens["prompt"] == tokens["prompt_computed"] + tokens["prompt_cached"]
    assert 0 < kv["peak_used_blocks"] <= 64


def test_report_covers_all_calls(model: Path, tmp_path: Path) -> None:
    llm = LLM(model, dtype="float32", num_kv_blocks=64)
    for _ in range(2):
        llm.generate(["Once upon a time"] * 3, GREEDY, use_tqdm=False)
    found = llm._calls.report_data("m", {})
    tokens = llm.stats()["tokens"]
    assert found.lengths.rows == 6
    assert found.lengths.sums["output_tokens"] == tokens["output"]
    assert found.timeline.totals.mean("mean_waste") == pytest.approx(
        llm.stats()["kv"]["mean_waste"]
    )
    path = llm.report(tmp_path / "page.html", price_per_hour=2)
    html = path.read_text()
    assert "<svg" in html
    assert "Calls from Python" in html
    assert "<script" not in html
    llm.reset_stats()
    assert llm._calls.report_data("m", {}).lengths.rows == 0


def test_interrupted_call_frees_its_blocks(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    expected = llm.generate("abc", GREEDY, use_tqdm=False)[0].outputs
    monkeypatch.setattr(llm._context.engine._runner, "submit", interrupt)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["abc", "def", "some more words to fill blocks with"], GREEDY, use_tqdm=False)
    monkeypatch.undo()
    check_scheduler(llm._context.engine.scheduler)
    assert llm.generate("abc", GREEDY, use_tqdm=False)[0].outputs == expected


def test_interrupted_call_is_dropped_before_its_error_is_handled(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    expected = llm.generate(["abc"], GREEDY, use_tqdm=False)[0].outputs
    monkeypatch.setattr("batchinfer.llm.run_prompts.finished", interrupt)
    try:
        short = SamplingParams(max_tokens=1)
        llm.generate(["ends first", "is still running"], [short, GREEDY], use_tqdm=False)
    except KeyboardInterrupt:  # the traceback keeps the interrupted call's objects alive
        monkeypatch.undo()
        assert llm.generate(["abc"], GREEDY, use_tqdm=False)[0].outputs == expected


def test_calls_from_threads_run_one_at_a_time(llm: LLM) -> None:
    prompts = [[f"thread {thread} prompt {at}" for at in range(3)] for thread in range(4)]
    alone = [llm.generate(mine, GREEDY, use_tqdm=False) for mine in prompts]

    def run(mine: list[str]) -> list[RequestOutput]:
        for _ in range(3):
            outputs = llm.generate(mine, GREEDY, use_tqdm=False)
            llm.stats()
        return outputs

    with ThreadPoolExecutor(len(prompts)) as threads:
        combined_output = list(threads.map(run, prompts))
    for found, expected in zip(combined_output, alone, strict=True):
        assert [o.prompt for o in found] == [o.prompt for o in expected]
        assert [o.outputs[0].token_ids for o in found] == [o.outputs[0].token_ids for o in expected]


def test_stats_never_wait_for_a_call(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread and a callback see the statistics of the steps so far."""
    seen: list[float] = []
    elsewhere: list[dict[str, dict[str, float]]] = []
    submit = llm._context.engine._runner.submit

    def look(*arguments: Any) -> Any:
        other = threading.Thread(target=lambda: elsewhere.append(llm.stats()), daemon=True)
        other.start()
        other.join(60)
        here = llm.stats()
        assert elsewhere.pop() == here
        seen.append(here["kv"]["peak_used_blocks"])
        return submit(*arguments)

    llm.reset_stats()
    monkeypatch.setattr(llm._context.engine._runner, "submit", look)
    llm.generate("a", GREEDY, use_tqdm=False)
    assert (seen[0], seen[-1]) == (0, 1)
    assert llm.stats()["tokens"]["output"] == 8
    assert llm.stats()["throughput"]["output_tokens_per_s"] > 0


def test_reset_stats_during_a_call(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    first = iter([True])
    finish = batchinfer.llm.run_prompts.finished

    def reset(*arguments: Any) -> RequestOutput:
        if next(first, False):
            llm.reset_stats()
        return finish(*arguments)

    monkeypatch.setattr("batchinfer.llm.run_prompts.finished", reset)
    long = SamplingParams(max_tokens=5, ignore_eos=True)
    llm.generate(["a", "b"], [SamplingParams(max_tokens=1), long], use_tqdm=False)
    assert llm.stats()["tokens"]["output"] == 5


@pytest.mark.parametrize("prompts", [np.array(["a", "b"]), ({"prompt": "a"}, "b")])
def test_prompts_accept_arrays_and_tuples(llm: LLM, prompts: Any) -> None:
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    assert [output.prompt for output in outputs] == ["a", "b"]


def test_token_ids_may_be_numpy_arrays(llm: LLM) -> None:
    for one in (np.array([5, 6]), [np.int64(5), np.int64(6)], [np.array([5, 6])], (5, 6)):
        (output,) = llm.generate(one, GREEDY, use_tqdm=False)
        assert output.prompt_token_ids == [5, 6]


def test_chat_render_error_fails_only_its_conversation(llm: LLM) -> None:
    good = [{"role": "user", "content": "hi"}]
    bad = [{"role": "user", "content": "\ud800"}]
    outputs = llm.chat([good, bad, []], GREEDY, use_tqdm=False, errors="return")
    codes = [output.error.code if output.error else None for output in outputs]
    assert codes == [None, "invalid_utf8", "empty_prompt"]


@pytest.mark.parametrize(
    ("message", "error"),
    [
        ({"role": "user"}, "conversation 1, message 0 has no content"),
        ({"content": "hi"}, "conversation 1, message 0 has no role"),
    ],
)
def test_chat_errors_name_the_conversation_and_no_column(
    llm: LLM, message: dict[str, str], error: str
) -> None:
    good = [{"role": "user", "content": "hi"}]
    outputs = llm.chat([good, [message]], GREEDY, use_tqdm=False, errors="return")
    assert outputs[1].error.message == error


def test_hostile_template_or_tokenizer_fails_only_its_prompts(model: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(model, tmp_path / "model")
    template = "{{ 'a' * (10 ** 11 if messages[0].content == 'bad' else 1) }}"
    (folder / "chat_template.jinja").write_text(template)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    split = {"type": "Split", "pattern": {"Regex": "(x+x+)+y"}, "behavior": "Isolated"}
    both = [{**split, "invert": False}, tokenizer["pre_tokenizer"]]
    tokenizer["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": both}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    llm = LLM(folder, num_kv_blocks=64)

    talks = [[{"role": "user", "content": text}] for text in ("good", "bad", "fine")]
    options: Any = {"use_tqdm": False, "errors": "return"}
    chats = llm.chat(talks, GREEDY, **options)
    plain = llm.generate(["good", "x" * 60, [5, 6], "fine"], GREEDY, **options)

    errors = [output.error.code if output.error else None for output in (*chats, *plain)]
    assert errors == [None, "template_error", None, None, "tokenizer_error", None, None]
    assert [output.prompt for output in plain] == ["good", None, None, "fine"]


def test_beam_search_returns_best_beam_first(llm: LLM) -> None:
    prompts = ["abc", [1, 2, 3]]
    params = BeamSearchParams(beam_width=3, max_tokens=6, length_penalty=0.5)
    for output in llm.beam_search(prompts, params):
        scores = [beam.score for beam in output.outputs]
        assert scores == sorted(scores, reverse=True)
        assert [beam.index for beam in output.outputs] == [0, 1, 2]
        assert len({tuple(beam.token_ids) for beam in output.outputs}) == 3
        for beam in output.outputs:
            length = len(beam.token_ids)
            assert beam.score == pytest.approx(beam.cumulative_logprob / length**0.5)
    (greedy,) = llm.generate("abc", SamplingParams(max_tokens=6, temperature=0), use_tqdm=False)
    (alone,) = llm.beam_search("abc", BeamSearchParams(beam_width=1, max_tokens=6))
    assert alone.outputs[0].text == greedy.outputs[0].text
    assert greedy.outputs[0].score is None


def test_revision_does_not_apply_to_tokenizer_argument(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def load(name: str, *, revision: str | None, **others: Any) -> Any:
        asked.append(revision)
        return load_tokenizer(name, revision=revision, **others)

    monkeypatch.setattr("batchinfer.builders.tokenizer.load_tokenizer", load)
    names = (None, str(model))
    made = [LLM(model, num_kv_blocks=8, revision="v1", tokenizer=name) for name in names]
    monkeypatch.setattr(
        AutoTokenizer, "from_pretrained", lambda _, revision: asked.append(revision)
    )
    for llm in made:
        llm.get_tokenizer()
    assert asked == ["v1", None, "v1", None]
