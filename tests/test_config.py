"""Configs made in Python check the types and ranges of their values."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from batchinfer.config import EngineConfig, ModelConfig, PromptConfig, SamplingParams, field_names
from batchinfer.config.options import (
    BATCH_ENGINE_KEYS,
    BENCH_ENGINE_KEYS,
    MODEL_KEYS,
    BatchOptions,
    BenchOptions,
)


@pytest.mark.parametrize(
    ("options", "config", "keys"),
    [
        (BatchOptions, ModelConfig, MODEL_KEYS),
        (BatchOptions, EngineConfig, BATCH_ENGINE_KEYS),
        (BenchOptions, EngineConfig, BENCH_ENGINE_KEYS),
    ],
)
def test_options_named_like_keys_reach_the_job(
    options: type, config: type, keys: tuple[str, ...]
) -> None:
    both = set(field_names(options)) & set(field_names(config))
    assert set(keys) == both - {"deterministic"}, (
        "bench runs without engine.deterministic, then with it"
    )


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_tokens": None}, "max_tokens is None; it must be a whole number"),
        ({"n": True}, "n is True; it must be a whole number"),
        ({"temperature": "0.5"}, "temperature is '0.5'; it must be a number"),
        ({"temperature": 10**400}, "it must be a number"),
        ({"ignore_eos": 1}, "ignore_eos is 1; it must be True or False"),
        ({"logprobs": True}, "logprobs is True; it must be a whole number or None"),
        ({"stop": [b"x"]}, "stop is .*; it must be a list of strings"),
        ({"stop_token_ids": [1.0]}, "stop_token_ids is .*; it must be a list of whole numbers"),
        ({"allowed_token_ids": ["a"]}, "it must be a list of whole numbers or None"),
        ({"logit_bias": {"5": 1.0}}, "a dict that maps whole numbers to numbers or None"),
    ],
)
def test_sampling_parameter_of_wrong_type_is_named(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        SamplingParams(**fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"temperature": float("nan")}, "temperature is (nan|NaN); it must be from 0 to"),
        ({"logit_bias": {5: float("inf")}}, "logit_bias is .*; it must be"),
        ({"logit_bias": {5: float("nan")}}, "logit_bias is .*; it must be"),
        (
            {"structured_outputs": {"regex": "a", "choice": ["b"]}},
            "has regex and choice; give exactly one",
        ),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs json is not JSON: Expecting"),
        ({"structured_outputs": {"json": {"a": float("nan")}}}, "json is not JSON: Out of range"),
        (
            {"structured_outputs": {"choice": []}},
            r"choice is \[\]; it must be a non-empty list of strings",
        ),
        ({"structured_outputs": {"regex": "\ud800"}}, "regex contains half of a surrogate pair"),
        (
            {"structured_outputs": {"regex": "a" * 2**21}},
            "regex has more than 1,048,576 characters",
        ),
        ({"structured_outputs": {"json_object": False}}, "json_object is false; it must be true"),
        ({"structured_outputs": {"type": "xml"}}, 'type is "xml"; it must be text, json_object'),
        (
            {"structured_outputs": {"regex": "a", "whitespace_pattern": " "}},
            "whitespace_pattern can be combined with json, but not with regex",
        ),
        (
            {"structured_outputs": {"regex": "a"}, "ignore_eos": True},
            "ignore_eos cannot be combined with",
        ),
        (
            {"bad_words": ["\ud800"]},
            "bad_words is .*; it must be non-empty strings of valid Unicode",
        ),
        ({"stop": ["a", ""]}, "stop is .*; it must be non-empty strings"),
        ({"beam_width": 0}, "beam_width is 0; it must be from 1 to 256"),
        ({"beam_width": 2, "n": 3}, "n is 3; it must be at most beam_width, which is 2"),
        (
            {"beam_width": 2, "length_penalty": 99},
            "length_penalty is 99.0; it must be from -32 to 32",
        ),
        (
            {"length_penalty": 2},
            "length_penalty is 2.0; it must be left out unless beam_width is set",
        ),
        ({"prompt_logprobs": 21}, "prompt_logprobs is 21; it must be from 0 to 20"),
        ({"beam_width": 2, "top_k": 5}, "top_k cannot be combined with beam_width, because beam"),
    ],
)
def test_sampling_parameter_out_of_range_is_named(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SamplingParams(**fields)


def test_beam_search_ignores_the_temperature() -> None:
    params = SamplingParams(beam_width=4, n=2, temperature=0.7, top_k=-1, stop_token_ids=[3])
    assert (params.temperature, params.beam_width, params.n) == (0.0, 4, 2)


def test_equivalent_sampling_values_are_normalized() -> None:
    loose = SamplingParams(
        max_tokens=np.int64(8),  # type: ignore[arg-type]
        temperature=1,
        top_p=np.float64(0.5),
        stop="x",  # type: ignore[arg-type]
        stop_token_ids=[np.int32(3)],  # type: ignore[arg-type]
        bad_words=None,  # type: ignore[arg-type]
        logit_bias={np.int64(3): 1},  # type: ignore[dict-item]
    )
    strict = SamplingParams(
        max_tokens=8,
        temperature=1.0,
        top_p=0.5,
        stop=("x",),
        stop_token_ids=(3,),
        logit_bias={3: 1.0},
    )
    assert loose == strict
    assert type(loose.max_tokens) is int
    assert type(loose.temperature) is float


def test_other_settings_check_their_types() -> None:
    with pytest.raises(TypeError, match="order is 'random'; it must be prefix or input"):
        EngineConfig(order="random")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="kv_cache_memory is True; it must be a string or a whole"):
        EngineConfig(kv_cache_memory=True)
    with pytest.raises(TypeError, match="column is 3; it must be a string or None"):
        PromptConfig(column=3)  # type: ignore[arg-type]
