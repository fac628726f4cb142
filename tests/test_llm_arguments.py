"""vLLM's arguments, classes and results in the Python API."""

from __future__ import annotations

import copy
import json
import math
import time
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tqdm.auto import tqdm
from transformers import AutoTokenizer

import batchinfer
from batchinfer import (
    LLM,
    BeamSearchOutput,
    BeamSearchParams,
    FlatLogprobs,
    RequestOutput,
    RequestOutputKind,
    SamplingParams,
    StructuredOutputsParams,
    TextPrompt,
    TokensPrompt,
)
from batchinfer.config import sampling
from batchinfer.config.settings_base import parse_size
from batchinfer.llm.arguments import dtype_name, engine_config

GREEDY = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
QUIET: dict[str, Any] = {"use_tqdm": False}


def run(llm: LLM, prompt: Any, params: sampling.SamplingParams, **options: Any) -> Any:
    """Return the first output of one prompt."""
    return llm.generate(prompt, params, **QUIET, **options)[0]


@pytest.mark.parametrize(
    ("arguments", "warning"),
    [
        ({"max_loras": 2, "enforce_eager": True}, "max_loras, enforce_eager have"),
        ({"trust_remote_code": True, "model_impl": "transformers"}, "trust_remote_code, model_"),
        ({"data_parallel_backend": "ray"}, "data_parallel_backend has"),
        ({"enable_chunked_prefill": False}, "enable_chunked_prefill has"),
        ({"trust_remote_code": False, "priority": None, "cpu_offload_gb": 0}, None),
        ({"tokenizer_mode": "auto", "max_lora_rank": 16, "disable_log_stats": True}, None),
        ({"enforce_eager": False, "allowed_local_media_path": "", "offload_params": set()}, None),
    ],
)
def test_llm_arguments_without_effect_give_one_warning(
    arguments: dict[str, Any], warning: str | None
) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        engine_config(arguments)
    assert len(caught) == (warning is not None)
    assert all(str(entry.message).startswith(f"LLM: {warning}") for entry in caught)


def test_generate_warns_once_per_line_about_arguments_without_effect(llm: LLM) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(3):
            run(llm, "a", GREEDY, priority=[1])
    assert [str(warning.message) for warning in caught] == [
        "LLM.generate: priority has no effect in batchinfer"
    ]
    assert caught[0].filename == __file__
    with pytest.warns(UserWarning, match="SamplingParams: stream_interval has no effect"):
        run(llm, "a", replace(GREEDY, stream_interval=2))


def test_llm_accepts_vllm_names_of_pool_sizes_and_dtypes() -> None:
    engine = engine_config({"kv_cache_memory_bytes": 3_000_000, "num_gpu_blocks_override": 7})
    assert engine.kv_cache_memory is not None
    assert parse_size(engine.kv_cache_memory, "kv_cache_memory") == 3_000_000
    assert engine.num_kv_blocks == 7
    assert list(map(dtype_name, ["half", "float", torch.float16])) == [
        *("float16", "float32", "float16")
    ]


def test_llm_seed_makes_calls_repeatable(model: Path) -> None:
    params = SamplingParams(max_tokens=12, ignore_eos=True)

    def two_calls(seed: int | None) -> list[list[int]]:
        llm = LLM(model, num_kv_blocks=16, seed=seed)
        return [run(llm, "a", params).outputs[0].token_ids for _ in range(2)]

    first, second = two_calls(7), two_calls(7)
    assert first == second
    assert first[0] != first[1]
    assert two_calls(8) != first


def test_max_tokens_none_fills_the_model_length(model: Path) -> None:
    llm = LLM(model, num_kv_blocks=16, max_model_len=24)
    params = replace(GREEDY, max_tokens=None)
    outputs = llm.generate([[5], [5] * 20], params, **QUIET)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [23, 4]
    assert outputs[0].outputs[0].finish_reason == "length"


def test_min_tokens_beyond_the_model_length_is_refused(llm: LLM) -> None:
    longest = llm.max_model_len
    params = SamplingParams(max_tokens=None, min_tokens=2**31)
    message = f"min_tokens must be less than or equal to max_tokens, which is {longest - 2}"
    with pytest.raises(ValueError, match=f"prompt 0: min_tokens is 2147483648; {message}"):
        run(llm, [5, 6], params)
    (output,) = llm.generate([[5, 6]], params, errors="return", **QUIET)
    assert output.error.code == "bad_sampling_params"


def test_logprobs_minus_one_returns_the_whole_vocabulary(llm: LLM) -> None:
    params = replace(GREEDY, max_tokens=2, logprobs=-1, prompt_logprobs=-1)
    output = run(llm, [5, 6, 7], params)
    for found in (*output.prompt_logprobs[1:], *output.outputs[0].logprobs):
        assert len(found) == llm.vocab_size
        assert sorted(entry.rank for entry in found.values()) == [*range(1, 260)]
        total = sum(math.exp(entry.logprob) for entry in found.values())
        assert total == pytest.approx(1.0, abs=1e-5)


def test_logprobs_list_the_sampled_token_first(llm: LLM) -> None:
    params = SamplingParams(max_tokens=8, temperature=2.0, seed=3, logprobs=3, ignore_eos=True)
    sample = run(llm, "a", params).outputs[0]
    assert [next(iter(entries)) for entries in sample.logprobs] == sample.token_ids
    assert (
        max(entries[at].rank for entries, at in zip(sample.logprobs, sample.token_ids, strict=True))
        > 3
    )
    for token_id, entries in zip(sample.token_ids, sample.logprobs, strict=True):
        others = [entry.rank for other, entry in entries.items() if other != token_id]
        assert others == sorted(others)


def test_flat_logprobs_equal_the_dicts(llm: LLM) -> None:
    params = replace(GREEDY, max_tokens=4, logprobs=2, prompt_logprobs=3)
    dicts = run(llm, [5, 6, 7], params)
    flat = run(llm, [5, 6, 7], replace(params, flat_logprobs=True))
    own, of_prompt = flat.outputs[0].logprobs, flat.prompt_logprobs
    assert isinstance(own, FlatLogprobs)
    assert isinstance(of_prompt, FlatLogprobs)
    assert list(own) == dicts.outputs[0].logprobs
    assert [entries or None for entries in of_prompt] == dicts.prompt_logprobs
    assert own[-1] == dicts.outputs[0].logprobs[-1]
    assert list(own[1:3]) == dicts.outputs[0].logprobs[1:3]
    assert own[1:3].start_indices[0] == 0
    assert len(own.token_ids) == len(own.ranks) == len(own.decoded_tokens) == own.end_indices[-1]
    assert of_prompt.start_indices[:2] == of_prompt.end_indices[:1] * 2  # the first token has none
    with pytest.raises(IndexError):
        own[4]


@pytest.mark.parametrize("name", ["logprobs", "prompt_logprobs"])
def test_max_logprobs_limits_logprobs(model: Path, llm: LLM, name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} is 21, but max_logprobs is 20"):
        run(llm, "a", SamplingParams(**{name: 21}))
    few, many = (LLM(model, num_kv_blocks=8, max_logprobs=most) for most in (2, -1))
    for wanted in (3, -1):
        with pytest.raises(ValueError, match=f"{name} is {wanted}, but max_logprobs is 2"):
            run(few, "a", SamplingParams(**{name: wanted}))
    output = run(many, "ab", SamplingParams(max_tokens=1, **{name: 30}))
    found = output.outputs[0].logprobs if name == "logprobs" else output.prompt_logprobs[1:]
    assert 30 <= len(found[0]) <= 31


def test_detokenize_false_returns_no_text(llm: LLM) -> None:
    params = replace(GREEDY, detokenize=False, logprobs=1, prompt_logprobs=1)
    output = run(llm, "abc", params)
    (sample,) = output.outputs
    assert sample.text == ""
    assert sample.token_ids == run(llm, "abc", GREEDY).outputs[0].token_ids
    for found in (*output.prompt_logprobs[1:], *sample.logprobs):
        assert {entry.decoded_token for entry in found.values()} == {None}


def test_skip_tokenizer_init_runs_on_token_ids(model: Path, tmp_path: Path, llm: LLM) -> None:
    for name in ("config.json", "generation_config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((model / name).read_bytes())
    bare = LLM(tmp_path, num_kv_blocks=16, skip_tokenizer_init=True)
    params = replace(GREEDY, prompt_logprobs=True)
    output = run(bare, TokensPrompt(prompt_token_ids=[5, 6, 7]), params)
    assert output.prompt is None
    assert output.outputs[0].text == ""
    assert output.outputs[0].token_ids == run(llm, [5, 6, 7], GREEDY).outputs[0].token_ids
    assert output.prompt_logprobs[1][6].decoded_token is None
    (beams,) = bare.beam_search([[5]], BeamSearchParams(2, 3))
    assert beams.sequences[0].text is None
    with pytest.raises(ValueError, match="cannot pass text prompts when skip_tokenizer_init is"):
        run(bare, "abc", GREEDY)
    with pytest.raises(ValueError, match="need a tokenizer"):
        run(bare, [5], SamplingParams(structured_outputs={"regex": "a"}))
    with pytest.raises(ValueError, match=r"LLM\.chat needs a tokenizer"):
        bare.chat([{"role": "user", "content": "hi"}])
    with pytest.raises(ValueError, match="this LLM has no tokenizer"):
        bare.get_tokenizer()


def test_max_model_len_minus_one_fits_the_kv_pool(model: Path) -> None:
    llm = LLM(model, num_kv_blocks=4, block_size=8, max_model_len=-1)
    assert llm.max_model_len == 33, "the last token is never fed back"
    output = run(llm, [5] * 20, replace(GREEDY, max_tokens=None))
    assert len(output.outputs[0].token_ids) == 13
    with pytest.raises(ValueError, match=r"length 33.* maximum model length of 33\."):
        run(llm, [5] * 33, GREEDY)
    assert LLM(model, num_kv_blocks=512, max_model_len=-1).max_model_len == 512


def test_truncate_prompt_tokens_keeps_the_end_of_prompts(llm: LLM) -> None:
    whole = [*range(3, 60)]
    for kept, expected in ((5, whole[-5:]), (99, whole), (-1, whole)):
        output = run(llm, whole, replace(GREEDY, truncate_prompt_tokens=kept))
        assert output.prompt_token_ids == expected
    too_long = [5] * 600
    output = run(llm, too_long, replace(GREEDY, truncate_prompt_tokens=-1))
    assert len(output.prompt_token_ids) == llm.max_model_len - 1
    with pytest.raises(
        ValueError,
        match="prompt 0: truncate_prompt_tokens is 600; it must be at most max_model_len",
    ):
        run(llm, "a", replace(GREEDY, truncate_prompt_tokens=600))
    params = [replace(GREEDY, truncate_prompt_tokens=kept) for kept in (5, 600)]
    fine, bad = llm.generate(["a", "a"], params, errors="return", **QUIET)
    assert fine.error is None
    assert bad.error is not None
    assert bad.error.code == "bad_sampling_params"
    talk = [{"role": "user", "content": "x" * 600}]
    (chat,) = llm.chat(talk, replace(GREEDY, truncate_prompt_tokens=9), **QUIET)
    assert len(chat.prompt_token_ids) == 9


def test_default_params_come_from_generation_config(model: Path, tmp_path: Path) -> None:
    for file in model.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = {"temperature": 0.5, "top_k": 7, "max_new_tokens": 3, "do_sample": True}
    path = tmp_path / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    llm = LLM(tmp_path, num_kv_blocks=8)
    params = llm.get_default_sampling_params()
    assert (params.temperature, params.top_k, params.max_tokens) == (0.5, 7, 3)
    params.max_tokens = 5
    assert len(llm.generate("a", **QUIET)[0].outputs[0].token_ids) <= 3
    neutral = LLM(
        tmp_path,
        num_kv_blocks=8,
        generation_config="vllm",
        override_generation_config={"top_p": 0.5},
    )
    assert neutral.get_default_sampling_params() == SamplingParams(top_p=0.5)


def test_outputs_have_request_metrics(llm: LLM) -> None:
    began = time.time()
    outputs = llm.generate(["a", "bc"], replace(GREEDY, temperature=1.0, n=2), **QUIET)
    for output in outputs:
        found = output.metrics
        assert began <= found.arrival_time <= time.time()
        assert 0 <= found.time_in_queue <= found.first_token_latency
        assert found.queued_ts <= found.scheduled_ts <= found.first_token_ts <= found.last_token_ts
        assert found.first_token_time <= found.finished_time
        assert found.num_generation_tokens == 12


def test_request_output_drops_unknown_fields_with_a_warning() -> None:
    with pytest.warns(UserWarning, match="RequestOutput: kv_events has no effect"):
        made = RequestOutput("7", "abc", [1, 2], None, outputs=[], finished=True, kv_events=[])
    assert made == RequestOutput("7", "abc", [1, 2], None, outputs=[], finished=True)


def test_beam_search_returns_vllm_sequences(llm: LLM, model: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model)
    params = BeamSearchParams(beam_width=3, max_tokens=8)
    (output,) = llm.beam_search([TextPrompt(prompt="abc")], params)
    assert isinstance(output, BeamSearchOutput)
    assert len(output.sequences) == len(output.outputs) == 3
    for sequence, beam in zip(output.sequences, output.outputs, strict=True):
        ended = beam.finish_reason == "stop"
        expected = output.prompt_token_ids + beam.token_ids[: -1 if ended else None]
        assert sequence.tokens == expected
        assert sequence.text == tokenizer.decode(expected)
        assert sequence.cum_logprob == beam.cumulative_logprob
    (kept,) = llm.beam_search("abc", replace(params, include_stop_str_in_output=True))
    for sequence, beam in zip(kept.sequences, kept.outputs, strict=True):
        assert sequence.tokens[len(kept.prompt_token_ids) :] == beam.token_ids
    (plain,) = llm.beam_search("abc", replace(params, skip_special_tokens=True))
    assert [one.text for one in plain.sequences] == [
        tokenizer.decode(one.tokens, skip_special_tokens=True) for one in plain.sequences
    ]
    held = replace(params, structured_outputs=StructuredOutputsParams(choice=["yes", "no"]))
    (answers,) = llm.beam_search("a", held)
    assert {beam.text for beam in answers.outputs} == {"yes", "no"}
    (some,) = llm.beam_search("a", replace(params, allowed_token_ids=(5, 6)))
    assert {token for beam in some.outputs for token in beam.token_ids} == {5, 6}
    with pytest.warns(UserWarning, match="concurrency_limit has no effect"):
        llm.beam_search("a", params, concurrency_limit=1)


TALK = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes, "}]
OPENED = "<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("arguments", "ending"),
    [
        ({}, OPENED + "Yes, "),
        ({"continue_final_message": True, "add_generation_prompt": False}, OPENED + "Yes, "),
        ({"add_generation_prompt": True}, "Yes, <|im_end|>\n" + OPENED),
        ({"add_generation_prompt": False}, "Yes, <|im_end|>\n"),
        ({"chat_template": "{{ messages[0].content }}!"}, "Hi!"),
    ],
)
def test_chat_generation_prompt_and_continuation(
    llm: LLM, model: Path, arguments: dict[str, Any], ending: str
) -> None:
    if "chat_template" in arguments:
        (output,) = llm.chat(TALK[:1], GREEDY, **QUIET, **arguments)
        assert output.prompt == ending
        return
    (output,) = llm.chat(messages=TALK, sampling_params=GREEDY, **QUIET, **arguments)
    assert output.prompt.endswith(ending)
    tokenizer = AutoTokenizer.from_pretrained(model)
    if arguments:
        given = {"add_generation_prompt": True, "continue_final_message": False, **arguments}
        if given["continue_final_message"]:
            given["add_generation_prompt"] = False
        assert output.prompt == tokenizer.apply_chat_template(TALK, tokenize=False, **given)


def test_llm_chat_template_applies_to_chats(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "template.jinja"
    file.write_text("{{ messages[0].content }}!")
    messages = [{"role": "user", "content": "hi"}]
    for template in (file, str(file), file.read_text()):
        llm = LLM(model, num_kv_blocks=16, chat_template=template)
        assert llm.chat(messages, GREEDY, **QUIET)[0].prompt == "hi!"
        assert llm.chat(messages, GREEDY, chat_template="{{ 1 }}", **QUIET)[0].prompt == "1"
    for bad, error in ((3, TypeError), (tmp_path / "none.jinja", ValueError)):
        with pytest.raises(error, match=r"^chat_template"):
            LLM(model, chat_template=bad)


def test_get_metrics_uses_vllm_names(model: Path) -> None:
    llm = LLM(model, num_kv_blocks=32)
    prompts = [[5] * 40, [5] * 40, [6] * 3]
    outputs = [run(llm, prompt, GREEDY) for prompt in prompts]
    metrics = {metric.name: metric for metric in llm.get_metrics()}
    values = {name: metric.value for name, metric in metrics.items()}  # type: ignore[attr-defined]
    assert values == {
        "vllm:prompt_tokens": 83,
        "vllm:generation_tokens": sum(len(output.outputs[0].token_ids) for output in outputs),
        "vllm:prefix_cache_queries": 83,
        "vllm:prefix_cache_hits": outputs[1].num_cached_tokens,
        "vllm:num_preemptions": 0,
        "vllm:num_requests_running": 0.0,
        "vllm:num_requests_waiting": 0.0,
    }
    assert outputs[1].num_cached_tokens == 39
    assert metrics["vllm:prompt_tokens"].labels["model_name"] == str(model)
    llm.reset_stats()
    assert next(iter(llm.get_metrics())).value == 0  # type: ignore[attr-defined]


def test_llm_engine_exposes_vllm_configs(llm: LLM, model: Path) -> None:
    engine = llm.llm_engine
    assert engine.model_config is engine.get_model_config() is llm.model_config
    assert engine.model_config.model == str(model)
    assert engine.model_config.max_model_len == llm.max_model_len
    assert engine.model_config.get_vocab_size() == llm.vocab_size
    assert engine.vllm_config.cache_config.num_gpu_blocks == 128
    assert engine.cache_config.enable_prefix_caching
    assert engine.vllm_config.scheduler_config.max_num_seqs == 1024
    assert engine.get_num_unfinished_requests() == 0
    assert not engine.has_unfinished_requests()


def test_generate_accepts_prompt_types_of_vllm(llm: LLM) -> None:
    ids = run(llm, "abc", GREEDY).prompt_token_ids
    shown = run(llm, TokensPrompt(prompt_token_ids=ids, prompt="what it says"), GREEDY)
    assert (shown.prompt, shown.prompt_token_ids) == ("what it says", ids)
    with pytest.warns(UserWarning, match="prompt 0: cache_salt has no effect"):
        run(llm, {"prompt": "abc", "cache_salt": "x"}, GREEDY)
    with pytest.raises(TypeError, match="an image has the type int"):
        run(llm, {"prompt": "abc", "multi_modal_data": {"image": 1}}, GREEDY)


def test_use_tqdm_accepts_a_progress_bar_function(llm: LLM) -> None:
    made = []

    def bar(**arguments: Any) -> Any:
        made.append(tqdm(**arguments, disable=True))
        return made[-1]

    llm.generate(["a", "b"], GREEDY, use_tqdm=bar)
    assert [one.total for one in made] == [2]


def test_reset_prefix_cache(llm: LLM) -> None:
    prompt = [7] * 64
    assert [run(llm, prompt, GREEDY).num_cached_tokens for _ in range(2)] == [0, 63]
    assert llm.reset_prefix_cache()
    assert run(llm, prompt, GREEDY).num_cached_tokens == 0


def test_best_of_must_equal_n(llm: LLM) -> None:
    assert len(run(llm, "a", SamplingParams(n=2, best_of=2)).outputs) == 2
    with pytest.raises(ValueError, match=r"best_of is 3, .* equal to n \(2\) .*; draw n=3"):
        run(llm, "a", SamplingParams(n=2, best_of=3))


def test_changed_sampling_params_are_validated() -> None:
    params = SamplingParams(stop="a", logprobs=True, seed=-1)
    assert (params.stop, params.logprobs, params.seed) == (("a",), 1, None)
    copied = params.clone()
    params.max_tokens = 64
    params.stop = ["b"]  # type: ignore[assignment]
    assert (params.max_tokens, params.stop) == (64, ("b",))
    assert (copied.max_tokens, copied.stop) == (16, ("a",))
    with pytest.raises(ValueError, match="top_p is 2"):
        params.top_p = 2.0
    assert params.top_p == 1.0
    with pytest.raises(AttributeError, match="no parameter max_token"):
        params.max_token = 3  # type: ignore[attr-defined]
    assert copy.copy(params) == params


def test_sampling_params_from_optional() -> None:
    assert SamplingParams.from_optional() == SamplingParams()
    found = SamplingParams.from_optional(
        n=None, max_tokens=None, temperature=None, stop=None, logit_bias={"5": 900.0, 6: -1.0}
    )
    assert found == SamplingParams(max_tokens=None, logit_bias={5: 100.0, 6: -1.0})
    for bias, shown in (("x", '"x"'), (float("nan"), "NaN"), (True, "true")):
        with pytest.raises(ValueError, match=f"has {shown} for token 5; it must be a number"):
            SamplingParams.from_optional(logit_bias={5: bias})
    infinite = SamplingParams.from_optional(logit_bias={5: float("-inf"), 6: float("inf")})
    assert infinite.logit_bias == {5: -100.0, 6: 100.0}
    with pytest.raises(ValueError, match='logit_bias has "a"; its keys must be token ids'):
        SamplingParams.from_optional(logit_bias={"a": 1.0})
    assert SamplingParams(output_kind=RequestOutputKind.FINAL_ONLY).max_tokens == 16


def test_package_exports_its_names() -> None:
    assert all(hasattr(batchinfer, name) for name in batchinfer.__all__)
