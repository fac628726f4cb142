"""Conversion of row prompts into engine requests."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from batchinfer.config import SamplingParams
from batchinfer.engine.request import Request
from batchinfer.requests.requests import PromptRow, RequestMaker, RowSampling
from batchinfer.text.prompts import Prompt
from tests.job.fakes import byte_tokenizer, grammars

TOKENIZER = byte_tokenizer()


def ids(text: str) -> Any:
    return TOKENIZER.encode_batch([text], add_special_tokens=False, parse_special_tokens=True)[0]


def prompt(text: str) -> Prompt:
    return Prompt(ids(text), text, truncated=True, has_control_text=True)


def request_of(params: SamplingParams) -> Request:
    maker = RequestMaker(TOKENIZER, frozenset({0}), grammars())
    return maker.make(PromptRow(7, prompt("ask"), RowSampling(params, own_seed=False)))


def test_request_maker_copies_the_jobs_settings() -> None:
    params = SamplingParams(seed=3, stop=("\n",), bad_words=("no",))
    request = request_of(params)
    assert (request.row_id, request.rng_key, request.eos_token_ids) == (7, (3, 7), {0})
    assert request.params is params
    assert np.array_equal(request.prompt_token_ids, ids("ask"))
    assert tuple(ids("no")) in request.bad_words_token_ids
    assert request.make_stop_checker is not None
    assert request_of(SamplingParams(seed=3)).make_stop_checker is None


def test_bad_words_are_tokenized_once_for_all_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = byte_tokenizer()
    maker = RequestMaker(tokenizer, frozenset({0}), grammars())
    sampling = RowSampling(SamplingParams(seed=3, bad_words=("no",)), own_seed=False)
    first = maker.make(PromptRow(7, prompt("ask"), sampling))
    monkeypatch.setattr(tokenizer, "encode_batch", None)
    again = RowSampling(SamplingParams(seed=3, bad_words=("no",), logit_bias={5: 1.0}), True)
    second = maker.make(PromptRow(8, prompt("ask"), again))
    assert second.bad_words_token_ids == first.bad_words_token_ids
