"""A mistake in a call to the Python API gives one clear message before a model runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from batchinfer import LLM, BeamSearchParams, SamplingParams
from batchinfer.errors import DeviceError, ModelError, NotYetError
from batchinfer.llm.arguments import engine_config

GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([[1, 2], [1.5]], "prompt 1: element 0 is a float; token ids are whole numbers"),
        ([[3, True]], "prompt 0: element 1 is a bool"),
        ([[5, 10_000]], "prompt 0: token id 10000 is out of vocabulary; .* 0 to 258"),
        ({"promt": "a"}, "prompt 0 has no key promt; did you mean prompt?"),
        ([{"prompt": "a", "zork": 3}], "prompt 0 has no key zork; known: prompt, "),
        ({}, "prompt 0 must have prompt or prompt_token_ids"),
        ([""], "prompt 0: the decoder prompt cannot be empty"),
        ({"prompt": [1]}, "prompt 0: its prompt is a list; give a string"),
        ({"prompt_token_ids": "a"}, "its prompt_token_ids is a str; give a list of token ids"),
        (["fine", None], "prompt 1 is None; give a string"),
        (b"a", "prompts is a bytes; give a string"),
        ({"a", "b"}, "prompts is a set; give a string"),
        ((text for text in "ab"), "prompts is a generator; .*put them into a list first"),
        (["fine", "a\ud800"], r"prompt 1 is not valid text: character 1 is half .*U\+D800"),
    ],
)
def test_invalid_prompts_are_refused_before_anything_runs(
    llm: LLM, prompts: Any, message: str
) -> None:
    before = llm.stats()["tokens"]
    with pytest.raises((TypeError, ValueError), match=message):
        llm.generate(prompts, GREEDY, use_tqdm=False)
    assert llm.stats()["tokens"] == before


@pytest.mark.parametrize(
    ("conversations", "message"),
    [
        ("hi", "conversations is a str; give a list of messages"),
        ([["hi"]], "message 0 of conversation 0 is a str; give {'role'"),
        ([{"role": "user", "content": "hi"}, "ho"], "message 1 of conversation 0 is a str"),
        ([{"role": "user"}], "conversation 0, message 0 has no content"),
        (
            [{"role": "user", "content": "a\ud800"}],
            r"the prompt is not valid text: character \d+ is half .*U\+D800",
        ),
    ],
)
def test_invalid_conversations_are_refused(llm: LLM, conversations: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        llm.chat(conversations, GREEDY, use_tqdm=False)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"max_tokens": 3}, "sampling_params is a dict; give SamplingParams"),
        ([{"max_tokens": 3}], "sampling_params 0 is a dict; give SamplingParams"),
        (BeamSearchParams(2, 3), "sampling_params is a BeamSearchParams; give SamplingParams"),
    ],
)
def test_invalid_sampling_params_objects_are_refused(llm: LLM, params: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        llm.generate(["a"], params, use_tqdm=False)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"tensor_parallel_size": 2}, NotYetError, "tensor_parallel_size"),
        ({"quantization": "awq"}, NotYetError, "LLM.quantization.* not yet"),
        ({"quantization": "int3"}, NotYetError, "use one of int8, int4, fp8"),
        ({"preset": "cpu"}, NotYetError, "LLM.preset.* not yet"),
        ({"adapters": {"a": "/nope"}}, ModelError, "model.adapters.a: there is no folder /nope"),
        ({"adapters": ["a"]}, TypeError, "adapters is .'a'.; it must be"),
        ({"blocksize": 16}, TypeError, "LLM has no argument blocksize; did you mean block_size?"),
        ({"zzz": 16}, TypeError, "LLM has no argument zzz; known: adapters, .* block_size"),
        (
            {"tokenizer_mode": "mistral"},
            ValueError,
            r"mode='mistral'\) is not supported; leave it out",
        ),
        ({"load_format": "gguf"}, NotYetError, r"LLM\(load_format='gguf'\) is not yet"),
        ({"task": "transcription"}, NotYetError, r"LLM\(task='transcription'\) is not yet"),
        ({"runner": "pooling", "task": "generate"}, ValueError, "leave one of them out"),
        ({"hf_overrides": {"classifier_from_token": ["a"]}}, ValueError, "it must be two tokens"),
        ({"hf_token": "x"}, TypeError, "no argument hf_token; set the environment variable HF"),
        ({"device": "gpu"}, TypeError, "device is 'gpu'; it must be auto or cpu or cuda"),
        ({"max_model_len": 0}, ValueError, "max_model_len is 0; it must be 1 or more"),
        ({"max_model_len": 1}, ModelError, "max_model_len is 1; .* 2 or more"),
        ({"tokenizer": 3}, TypeError, "tokenizer is 3; it must be a string or None"),
        ({"max_logprobs": -5}, ValueError, "max_logprobs is -5; it must be 0 or more, or -1"),
        ({"seed": 1.5}, TypeError, "seed is 1.5; it must be a whole number or None"),
        ({"enable_lora": "no"}, TypeError, "enable_lora is 'no'; it must be True or False"),
        ({"generation_config": 5}, TypeError, "generation_config is 5; it must be a string"),
        ({"override_generation_config": [1]}, TypeError, "config is .1.; it must be a dict that"),
        ({"tokenizer": "/nope"}, ModelError, "model.tokenizer: there is no folder /nope"),
        ({"kv_cache_memory": "1KiB"}, DeviceError, "is 1KiB; set it to at least 6KiB"),
    ],
)
def test_invalid_llm_arguments_are_named(
    model: Path, arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        LLM(str(model), **arguments)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"lora_request": "a"}, TypeError, r"lora_request is a str; give LoRARequest\(...\), or"),
        (
            {"adapter": "a"},
            ValueError,
            r"there is no adapter 'a'; the loaded adapters are: \(none\)",
        ),
        ({"adapter": 3}, TypeError, "adapter is an int; give a name, or a list"),
        ({"adapter": [None, None]}, ValueError, "1 prompts, but 2 adapters"),
        ({"errors": "keep"}, ValueError, "errors is 'keep'; it must be 'raise' or 'return'"),
        ({"prompt_token_ids": [[5]]}, TypeError, "prompt_token_ids; give the token ids as prompts"),
        ({"use_tdqm": False}, TypeError, r"LLM\.generate has no argument use_tdqm; .*use_tqdm"),
    ],
)
def test_invalid_generate_arguments_are_named(
    llm: LLM, arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        llm.generate("a", GREEDY, **arguments)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"tools": [{}]}, ValueError, r"tools\[0\] is not {type: function"),
        (
            {"continue_final_message": True, "add_generation_prompt": True},
            ValueError,
            "add_generation_prompt starts a new message; keep only one",
        ),
        ({"messages": []}, TypeError, "give conversations or messages"),
        ({"zork": 1}, TypeError, r"LLM\.chat has no argument zork; known: sampling_params, "),
    ],
)
def test_invalid_chat_arguments_are_named(
    llm: LLM, arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        llm.chat([{"role": "user", "content": "hi"}], GREEDY, **arguments)


def test_model_argument_must_be_string_or_path() -> None:
    with pytest.raises(TypeError, match=r"model is 5; it must be a string"):
        LLM(5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"model is ''; give a hub id or a folder"):
        LLM("")


def test_invalid_beam_search_arguments_are_named(llm: LLM) -> None:
    with pytest.raises(ValueError, match="beam_width is 0"):
        llm.beam_search("a", BeamSearchParams(beam_width=0, max_tokens=4))
    with pytest.raises(TypeError, match="params must be BeamSearchParams"):
        llm.beam_search("a", SamplingParams())  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="has no argument beams; known: sampling_params"):
        llm.beam_search("a", BeamSearchParams(beam_width=2, max_tokens=4), beams=2)


def test_nested_call_is_refused(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def call_again(*_: object) -> None:
        llm.generate("b", GREEDY, use_tqdm=False)

    monkeypatch.setattr(llm._context.engine._runner, "submit", call_again)
    with pytest.raises(RuntimeError, match="generate was called during another call"):
        llm.generate("a", GREEDY, use_tqdm=False)
    monkeypatch.undo()
    assert len(llm.generate("a", GREEDY, use_tqdm=False)) == 1


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"pipeline_parallel_size": 2}, NotYetError, "pipeline_parallel_size"),
        (
            {"prompt_embeds": torch.ones(3)},
            TypeError,
            r"give {'prompt_embeds': tensor} as a prompt",
        ),
        (
            {"num_gpu_blocks_override": 7, "num_kv_blocks": 7},
            ValueError,
            "num_gpu_blocks_override and num_kv_blocks mean the same",
        ),
    ],
)
def test_unsupported_llm_arguments_are_refused(
    arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        engine_config(arguments)


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("sleep", "delete the LLM"),
        ("collective_rpc", "an LLM has one process"),
        ("zork", "LLM has no attribute zork"),
    ],
)
def test_missing_llm_methods_name_the_alternative(llm: LLM, name: str, instead: str) -> None:
    with pytest.raises(AttributeError, match=instead):
        getattr(llm, name)
    assert not hasattr(llm, name)
    with pytest.raises(NotYetError, match=r"LLM\.reward is not yet"):
        llm.reward(["a"])


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"n": 2, "temperature": 0.0}, ValueError, "n is 2; n must be 1 when using greedy"),
        (
            {"stop": "a", "detokenize": False},
            ValueError,
            "stop strings cannot be combined with detok",
        ),
        ({"logprobs": -2}, ValueError, "logprobs is -2; it must be 0 or more, or -1"),
        (
            {"min_tokens": 4, "max_tokens": 3},
            ValueError,
            "min_tokens is 4; min_tokens must be less",
        ),
        ({"repetition_penalty": 1e-300}, ValueError, "it must be from 1e-30 to 1e.30"),
        ({"truncate_prompt_tokens": 0}, ValueError, "truncate_prompt_tokens is 0"),
        ({"early_stopping": True}, TypeError, "early_stopping; LLM.beam_search stops as transf"),
        ({"use_beam_search": True}, TypeError, "use_beam_search; call LLM.beam_search"),
        ({"max_token": 3}, TypeError, "has no parameter max_token; did you mean max_tokens?"),
    ],
)
def test_invalid_sampling_params_are_refused_by_name(
    arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        SamplingParams(**arguments)
