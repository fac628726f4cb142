from __future__ import annotations

from dataclasses import replace
from datetime import datetime
from decimal import Decimal
from typing import Any

import pytest

from batchinfer.config import SamplingParams
from batchinfer.errors import RowError, UsageError
from batchinfer.job.rows.sampling_params import RowParams
from batchinfer.requests.requests import RowSampling
from batchinfer.text.structured.compiled_grammar import GrammarCompiler
from tests.job.fakes import byte_tokenizer, grammars

JOB = SamplingParams(max_tokens=8, temperature=0.5, seed=0)
PARAMS = RowParams(JOB, 100, grammars())


def sampling(value: object) -> RowSampling:
    found = PARAMS.of(value)
    assert isinstance(found, RowSampling), found
    return found


def test_a_row_without_params_uses_those_of_the_job() -> None:
    assert sampling(None).params is JOB
    assert sampling(None).rng_key(7) == (0, 7)


@pytest.mark.parametrize(
    "value",
    [b'{"max_new_tokens": 3, "stop": "x"}', {"max_tokens": 3, "stop": [b"x"], "top_p": None}],
)
def test_a_row_overrides_some_params(value: object) -> None:
    params = sampling(value).params
    assert (params.max_tokens, params.stop, params.temperature) == (3, ("x",), 0.5)


def test_a_seed_of_the_row_replaces_its_id() -> None:
    assert sampling({"seed": 5}).rng_key(7) == (5, 0)
    assert sampling({"n": 2}).rng_key(7) == (0, 7)


def test_null_keeps_the_value_of_the_job() -> None:
    found = sampling(b'{"seed": null, "temperature": null, "max_new_tokens": null, "n": 2}')
    assert (found.params.max_tokens, found.params.temperature, found.params.n) == (8, 0.5, 2)
    assert found.rng_key(7) == (0, 7)
    assert sampling(b'{"max_tokens": 3, "max_new_tokens": null}').params.max_tokens == 3


@pytest.mark.parametrize("value", [{"max_tokens": 2.0, "n": 3.0}, b'{"max_tokens": 2.0, "n": 3}'])
def test_numbers_may_have_other_types_than_the_parameter(value: object) -> None:
    params = sampling(value).params
    assert (params.max_tokens, params.n) == (2, 3)
    assert isinstance(params.max_tokens, int)
    assert sampling({"stop_token_ids": [7.0], "temperature": 1.0}).params.stop_token_ids == (7,)
    assert sampling({"temperature": Decimal("0.25")}).params.temperature == 0.25
    assert sampling({"logit_bias": [(3, 1.5)]}).params.logit_bias == {3: 1.5}
    assert isinstance(PARAMS.of({"max_tokens": 2.5}), RowError)
    assert isinstance(PARAMS.of({"max_tokens": 1e300}), RowError)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (b"{", "not JSON"),
        (b"[1]", "must be a JSON object"),
        (b"\xff", "UTF-8"),
        (b'{"max_tokens": "3"}', 'max_tokens is "3"; it must be a whole number'),
        (b'{"temprature": 1}', "unknown parameter temprature; did you mean temperature?"),
        (b'{"max_tokens": 3, "max_new_tokens": 4}', "max_tokens and max_new_tokens mean the same"),
        (b'{"n": 1, "n": 2}', "n is given twice"),
        ({"logit_bias": [(3, 1.5), (3, 2.5)]}, "3 is given twice"),
        (b'{"logprobs": 2}', "logprobs is given, but needs sampling.logprobs"),
        (b'{"stop": [1]}', "stop[0] is 1; it must be a string"),
        (b'{"logit_bias": {"a": 1}}', 'logit_bias has the key "a"; its keys must be token ids'),
        (b'{"logit_bias": {"7": 100, "7.0": -100}}', 'logit_bias has the key "7.0"'),
        ({"logit_bias": [(b"5", 1.5), (b"05", 2.5)]}, 'logit_bias has the key "05"'),
        ({"logit_bias": [(7.0, 1.5)]}, 'logit_bias has the key "7.0"'),
        (b'{"logit_bias": {"5": "x"}}', 'logit_bias.5 is "x"; it must be a number'),
        (b'{"logit_bias": [5]}', "logit_bias is [5]; it must be a mapping of keys to values"),
        (RowError("template_error", "a time that cannot be read"), "a time that cannot be read"),
        ({"temperature": -1.0}, "temperature"),
        ({"beam_width": 2, "top_p": 0.5}, "sampling.top_p cannot be combined with beam_width"),
        ({"prompt_logprobs": 2}, "needs sampling.prompt_logprobs and output.include"),
        ({"stop_token_ids": [100]}, "below 100"),
        (b'{"x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "sampling_params"),
        (b'{"temperature": NaN}', "sampling_params"),
        ({"temperature": datetime(2026, 11, 20)}, "a parameter cannot be a datetime"),
        (b'{"stop": ["\\ud800"]}', "sampling_params"),
        (b'{"\\u0000": 1}', r"sampling_params: unknown parameter \x00"),
    ],
)
def test_invalid_params_are_row_errors(value: Any, message: str) -> None:
    found = PARAMS.of(value)
    assert isinstance(found, RowError)
    assert found.code == "bad_sampling_params"
    assert message in found.message


def test_the_jobs_own_token_ids_are_checked() -> None:
    with pytest.raises(UsageError, match=r"sampling\.logit_bias has token id 100"):
        RowParams(SamplingParams(seed=0, logit_bias={100: 1.0}), 100, grammars())


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (b'{"structured_outputs": {"regex": "("}}', "structured_outputs: a regular expression is"),
        (b'{"guided_decoding": {"json": {"type": "strnig"}}}', "Invalid type: strnig"),
        ({"structured_outputs": {"json": b"{"}}, "structured_outputs json is not JSON"),
        (b'{"response_format": {"type": "json_schema"}}', "needs json_schema: {schema: ...}"),
        (
            {"structured_outputs": {"choice": None, "regex": None}},
            "has no constraint; give exactly one of json",
        ),
        (b'{"structured_outputs": {"regx": "a"}}', 'key "regx"; did you mean regex?'),
        (b'{"structured_outputs": {"x": "a"}}', 'has the unknown key "x"; known: json'),
    ],
)
def test_invalid_grammars_have_their_own_error_code(value: Any, message: str) -> None:
    found = PARAMS.of(value)
    assert isinstance(found, RowError)
    assert found.code == "invalid_structured_output"
    assert message in found.message


def test_a_row_sets_its_structured_output() -> None:
    cell = (
        b'{"response_format": {"type": "json_schema", "json_schema": {"schema": {"b": 1, "a": 2}}}}'
    )
    assert sampling(cell).params.structured_outputs == {"json": '{"b": 1, "a": 2}'}
    assert sampling({"structured_outputs": {"choice": [b"a", b"b"], "regex": None}}).params == (
        replace(JOB, structured_outputs={"choice": ["a", "b"]})
    )


def test_the_grammar_of_the_job_must_work_with_the_model() -> None:
    job = SamplingParams(seed=0, structured_outputs={"regex": "a"})
    without_end = GrammarCompiler(byte_tokenizer(), frozenset(), 257)
    with pytest.raises(UsageError, match=r"sampling\.structured_outputs: the model has no end"):
        RowParams(job, 257, without_end)
