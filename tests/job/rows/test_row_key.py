"""Row keys are equal if and only if everything that decides the answers is equal."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchinfer.config import SamplingParams
from batchinfer.errors import RowError
from batchinfer.job.fingerprint import fingerprint_facts
from batchinfer.job.rows.row_key import KEY_BYTES, RowKeys, canonical_params
from batchinfer.job.spec.spec import JobSpec
from batchinfer.requests.requests import PromptRow, RowSampling
from batchinfer.text.prompts import Prompt
from batchinfer.text.scoring_prompts import ScoredPrompt
from batchinfer.text.tools.row_tools import RowTools

MAX_MODEL_LEN = 16
ADAPTERS = {"a": 1, "same as a": 2, "b": 3}
HELD = {
    "model": {"model.safetensors": [10, "header", "content"]},
    "adapters": {"a": {"w": "x"}, "same as a": {"w": "x"}, "b": {"w": "y"}},
}


def facts(held: dict[str, Any] = HELD, **sections: dict[str, Any]) -> dict[str, Any]:
    fields: dict[str, dict[str, Any]] = {
        "model": {"name": "some/model"},
        "input": {"path": "in.parquet"},
        "sampling": {"max_tokens": 8},
        "output": {"path": "out"},
    }
    for name, values in sections.items():
        fields[name] = {**fields.get(name, {}), **values}
    return fingerprint_facts(JobSpec.model_validate(fields), held)


def keys(max_model_len: int = MAX_MODEL_LEN, **sections: dict[str, Any]) -> RowKeys:
    return RowKeys(facts(**sections), max_model_len, ADAPTERS)


def row(
    token_ids: Any = (1, 2, 3),
    row_id: int = 0,
    own_seed: bool = False,
    adapter: int = 0,
    text: str | None = "abc",
    truncated: bool = False,
    **params: Any,
) -> PromptRow:
    ids = np.array(token_ids, dtype=np.int32)
    sampling = RowSampling(SamplingParams(**{"seed": 0, "max_tokens": 8, **params}), own_seed)
    return PromptRow(row_id, Prompt(ids, text, truncated, False), sampling, adapter=adapter)


PARAMS: st.SearchStrategy[dict[str, Any]] = st.fixed_dictionaries(
    {"max_tokens": st.sampled_from([7, 8, 500]), "temperature": st.sampled_from([0.0, 1.0])},
    optional={
        "seed": st.integers(0, 1),
        "top_p": st.sampled_from([0.5, 1.0]),
        "top_k": st.sampled_from([-1, 0, 1]),
        "n": st.integers(1, 2),
        "stop": st.sampled_from([(), ("a",), ("a", "b"), ("a,b",)]),
        "logit_bias": st.sampled_from([None, {1: 1.0, 2: 2.0}, {2: 2.0, 1: 1.0}]),
        "allowed_token_ids": st.sampled_from([(1, 2), (2, 1, 1), (1,)]),
        "structured_outputs": st.sampled_from([None, {"regex": "a"}, {"regex": "b"}]),
    },
)
ROWS = st.builds(
    row,
    token_ids=st.sampled_from([(1,), (1, 2), (12,), (1,) * 9, (1,) * 10]),
    row_id=st.integers(0, 1),
    own_seed=st.booleans(),
    adapter=st.integers(0, 3),
    text=st.sampled_from([None, "", "a"]),
    truncated=st.booleans(),
)


def decides(one: PromptRow, with_prompt: bool) -> tuple[Any, ...]:
    """Return everything that decides a row's answer."""
    assert isinstance(one.prompt, Prompt)
    params, tokens = one.sampling.params, one.prompt.token_ids.tolist()
    draws = params.temperature > 0
    return (
        tokens,
        one.prompt.truncated,
        one.prompt.text if with_prompt and not one.prompt.truncated else None,
        {0: None, 1: "x", 2: "x", 3: "y"}[one.adapter],
        min(params.max_tokens, MAX_MODEL_LEN - len(tokens)),
        one.rng_key if draws else None,
        (params.top_p, max(params.top_k, 0)) if draws else None,
        params.temperature,
        params.n,
        params.stop,
        params.logit_bias,
        params.allowed_token_ids and set(params.allowed_token_ids),
        params.structured_outputs,
    )


@given(pair=st.tuples(ROWS, ROWS), params=st.tuples(PARAMS, PARAMS), data=st.data())
def test_keys_are_equal_exactly_if_the_answers_are(
    pair: tuple[PromptRow, PromptRow], params: tuple[Any, Any], data: st.DataObject
) -> None:
    one, other = pair
    if data.draw(st.booleans()):  # Hypothesis rarely draws two equal rows
        other = replace(one, row_id=other.row_id)
    changed = dict(params[0])
    if data.draw(st.booleans()):
        changed = params[1]
    elif changed and data.draw(st.booleans()):
        name = data.draw(st.sampled_from(sorted(changed)))
        changed[name] = params[1].get(name, changed[name])
    assert one.sampling is not None
    assert other.sampling is not None
    one = replace(
        one, sampling=replace(one.sampling, params=SamplingParams(**{"seed": 0, **params[0]}))
    )
    other = replace(
        other, sampling=replace(other.sampling, params=SamplingParams(**{"seed": 0, **changed}))
    )
    for include in ((), ("prompt",)):
        made = keys(output={"include": include})
        equal = decides(one, bool(include)) == decides(other, bool(include))
        assert (made.of(one) == made.of(other)) == equal


def test_a_key_is_the_same_in_the_next_process() -> None:
    """Later versions look up keys that are written today, so a row's key must never change."""
    key = keys().of(row(n=2, stop=("\n",)))
    assert len(key) == KEY_BYTES
    assert key.hex() == "790f2e8fc9110fbaf4ad69df85902faf"


@pytest.mark.parametrize(
    "sections",
    [
        {"model": {"dtype": "float16"}},
        {"model": {"quantization": "int8"}},
        {"engine": {"kv_cache_dtype": "fp8"}},
        {"engine": {"deterministic": True}},
        {"output": {"include": ["token_ids"]}},
        {"accept": {"regex": "a"}},
        {"held": {**HELD, "model": {"model.safetensors": [10, "header", "other"]}}},
        {"held": {**HELD, "tokenizer": {"tokenizer.json": "other"}}},
    ],
    ids=str,
)
def test_job_facts_that_change_answers_are_in_every_key(sections: dict[str, Any]) -> None:
    other = RowKeys(facts(**sections), MAX_MODEL_LEN, ADAPTERS)
    assert other.of(row()) != keys().of(row())


@pytest.mark.parametrize(
    "sections",
    [
        {"engine": {"kv_cache_dtype": "auto", "max_num_seqs": 3}},
        {"input": {"limit": 3, "filter": "a = 1", "id_column": "n", "keep_columns": ["n"]}},
        {"prompt": {"on_too_long": "truncate_left", "system": "be kind"}},
        {"output": {"rows_per_part": 3, "explode": True, "rename": {"a": "b"}}},
        {"sampling": {"seed": 9, "temperature": 0.5}},
        {"model": {"max_model_len": 77, "name": "the same weights elsewhere"}},
    ],
    ids=str,
)
def test_job_facts_that_change_no_answer_are_in_no_key(sections: dict[str, Any]) -> None:
    assert keys(**sections).of(row()) == keys().of(row())


def test_a_longer_model_length_keeps_keys_of_rows_it_did_not_truncate() -> None:
    free, cut = row((1,) * 8), row((1,) * 9)
    assert keys(32).of(free) == keys(16).of(free)
    assert keys(32).of(cut) != keys(16).of(cut)
    by_length = [
        RowKeys(facts(), length, ADAPTERS, chosen_by_length=True).of(free) for length in (16, 32)
    ]
    assert by_length[0] != by_length[1]


def test_the_commit_counts_and_not_the_branch() -> None:
    def of(revision: str | None, commit: str | None) -> bytes | None:
        known = {} if commit is None else {"commit": commit}
        held = {"model": {"name": "some/model", "revision": revision, **known}}
        return RowKeys(facts(held), MAX_MODEL_LEN, {}).of(row())

    assert of(None, "c1") == of("main", "c1") != of("main", "c2")
    assert of(None, None) != of("main", None)


def test_scored_rows_have_keys_by_their_completions() -> None:
    def of(*completions: list[int]) -> bytes | None:
        arrays = tuple(np.array(ids, dtype=np.int32) for ids in completions)
        prompt = ScoredPrompt(np.array([1, 2], dtype=np.int32), "ab", False, False, arrays)
        return keys().of(PromptRow(5, prompt))

    found = [of(), of([]), of([3]), of([3], [4]), of([3, 4]), of([4], [3])]
    assert len(set(found)) == len(found)
    assert of([3], [4]) == of([3], [4])


def test_tools_are_part_of_the_key() -> None:
    def of(tools: RowTools | None) -> bytes | None:
        return keys().of(replace(row(), tools=tools))

    tool = {"type": "function", "function": {"name": "f"}}
    found = [
        of(None),
        of(RowTools([tool])),
        of(RowTools([tool, tool])),
        of(RowTools([tool], "required")),
    ]
    assert len(set(found)) == len(found)
    assert of(RowTools([dict(tool)])) == found[1]
    assert found[0] == keys().of(row())


def test_a_row_that_cannot_run_has_no_key() -> None:
    assert keys().of(PromptRow(0, RowError("empty_prompt", ""))) is None


@pytest.mark.parametrize("name", [entry.name for entry in fields(SamplingParams)])
def test_every_parameter_except_seed_and_length_is_in_the_text(name: str) -> None:
    """A new parameter fails here until its author decides whether it affects the answer."""
    changed: dict[str, Any] = {
        "max_tokens": 9,
        "n": 2,
        "min_tokens": 1,
        "temperature": 0.5,
        "top_p": 0.5,
        "top_k": 3,
        "min_p": 0.5,
        "presence_penalty": 1.0,
        "frequency_penalty": 1.0,
        "repetition_penalty": 1.5,
        "no_repeat_ngram_size": 3,
        "stop": ("a",),
        "stop_token_ids": (3,),
        "include_stop_str_in_output": True,
        "ignore_eos": True,
        "skip_special_tokens": False,
        "seed": 3,
        "logprobs": 0,
        "logit_bias": {1: 1.0},
        "allowed_token_ids": (1,),
        "bad_words": ("a",),
        "prompt_logprobs": 0,
        "structured_outputs": {"regex": "a"},
        "beam_width": 1,
        "max_reasoning_tokens": 5,
        "length_penalty": 2.0,
    }
    plain = {"temperature": 1.0} if name != "length_penalty" else {"beam_width": 2}
    texts = [canonical_params(SamplingParams(**plain, **{"max_tokens": 8}))]
    texts.append(
        canonical_params(SamplingParams(**{"max_tokens": 8, **plain, name: changed[name]}))
    )
    assert (texts[0] == texts[1]) == (name in ("seed", "max_tokens"))


def test_the_boundary_of_a_pair_is_part_of_the_key() -> None:
    ids = np.array([1, 2, 3], np.int32)
    pairs = [Prompt(ids, "x", False, False, first_segment=at) for at in (None, 1, 2)]
    assert len({keys().of(PromptRow(0, pair)) for pair in pairs}) == len(pairs)
