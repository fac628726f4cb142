"""Rows of the output, from completions and errors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from batchinfer.config import SamplingParams
from batchinfer.engine.prompt_logprobs import PromptLogprobs
from batchinfer.engine.request import Completion, Request, SampleOutput, TokenLogprobs
from batchinfer.errors import RowError
from batchinfer.job.rows.finished_row import RowFinisher, failed_row
from batchinfer.job.rows.task import Task
from batchinfer.job.rows.tasks import TASKS
from batchinfer.protocols import StopMatch
from batchinfer.requests.requests import PromptRow
from batchinfer.text.answers import AnswerReader
from batchinfer.text.prompts import Prompt, PromptTooLongError
from tests.job.fakes import byte_tokenizer

TOKENIZER = byte_tokenizer()


def ids(text: str) -> Any:
    return TOKENIZER.encode_batch([text], add_special_tokens=False, parse_special_tokens=True)[0]


def prompt(text: str) -> Prompt:
    return Prompt(ids(text), text, truncated=True, has_control_text=True)


def sample(index: int, text: str, **fields: Any) -> SampleOutput:
    values = {"finish_reason": "length", "stop_reason": None, "stop_match": None, "logprobs": None}
    return SampleOutput(index, ids(text), cumulative_logprob=-1.5, **{**values, **fields})


def request_of(params: SamplingParams) -> Request:
    return Request(7, ids("ask"), params, (3, 7))


def finish(*samples: SampleOutput, include: tuple[str, ...] = (), **params: Any) -> dict[str, Any]:
    completion = Completion(request_of(SamplingParams(seed=3, **params)), list(samples))
    finisher = RowFinisher(AnswerReader(TOKENIZER), include)
    return finisher.finish(PromptRow(7, prompt("ask")), completion).values


def test_a_finished_row() -> None:
    assert finish(sample(0, "first"), sample(1, "second!")) == {
        "row_id": 7,
        "generated_text": "first",
        "outputs": [
            {
                "index": index,
                "text": text,
                "finish_reason": "length",
                "stop_reason": None,
                "num_tokens": len(text),
                "cumulative_logprob": -1.5,
            }
            for index, text in enumerate(["first", "second!"])
        ],
        "num_prompt_tokens": 3,
        "num_output_tokens": 12,
        "truncated": True,
        "status": "ok",
        "error": None,
    }


@pytest.mark.parametrize(
    ("fields", "params", "text", "reason"),
    [
        ({"stop_reason": None}, {}, "one", None),
        ({"stop_reason": 46}, {}, "one", "46"),
        ({"stop_reason": 46}, {"include_stop_str_in_output": True}, "one.", "46"),
        ({"stop_reason": "ne", "stop_match": StopMatch("ne", 1)}, {}, "o", "ne"),
    ],
)
def test_the_text_ends_at_the_stop(fields: Any, params: Any, text: str, reason: str | None) -> None:
    (output,) = finish(sample(0, "one.", finish_reason="stop", **fields), **params)["outputs"]
    assert (output["text"], output["stop_reason"]) == (text, reason)
    assert output["num_tokens"] == 4


def test_samples_finished_before_another_failed_are_kept() -> None:
    completion = Completion(
        request_of(SamplingParams(seed=3)), [sample(1, "kept")], "nan_logits", "not a number"
    )
    finisher = RowFinisher(AnswerReader(TOKENIZER), ())
    values = finisher.finish(PromptRow(7, prompt("ask")), completion).values
    assert values["status"] == "error"
    assert values["error"] == {"code": "nan_logits", "message": "not a number"}
    assert values["generated_text"] is None
    assert [output["text"] for output in values["outputs"]] == ["kept"]
    assert values["num_output_tokens"] == 4


def test_include_adds_columns() -> None:
    logprobs = [TokenLogprobs(5, -0.5, 1, ((5, -0.5), (6, -2.0)))]
    include = ("prompt", "token_ids", "logprobs")
    values = finish(sample(0, "a", logprobs=logprobs), include=include)
    assert values["prompt"] == "ask"
    (output,) = values["outputs"]
    assert np.array_equal(output["token_ids"], ids("a"))
    top = [{"token_id": 5, "logprob": -0.5}, {"token_id": 6, "logprob": -2.0}]
    assert output["logprobs"] == [{"token_id": 5, "logprob": -0.5, "rank": 1, "top": top}]


def test_log_probabilities_of_the_prompt_begin_with_its_second_token() -> None:
    request = request_of(SamplingParams(seed=3, prompt_logprobs=1))
    found = PromptLogprobs(
        np.array([-0.5, -2.0], dtype=np.float32),
        np.array([1, 3], dtype=np.int32),
        np.array([[5], [6]], dtype=np.int32),
        np.array([[-0.5], [-0.25]], dtype=np.float32),
    )
    completion = Completion(request, [sample(0, "a")], prompt_logprobs=found)
    row = PromptRow(7, prompt("ask"))
    values = (
        RowFinisher(AnswerReader(TOKENIZER), ("prompt_logprobs",)).finish(row, completion).values
    )
    _, second, third = ids("ask").tolist()
    assert values["prompt_logprobs"] == [
        None,
        {"token_id": second, "logprob": -0.5, "rank": 1, "top": [_top(5, -0.5)]},
        {"token_id": third, "logprob": -2.0, "rank": 3, "top": [_top(6, -0.25)]},
    ]


def _top(token_id: int, logprob: float) -> dict[str, Any]:
    return {"token_id": token_id, "logprob": logprob}


def test_the_prompt_column_shows_the_truncated_prompt() -> None:
    cut = Prompt(ids("sk"), "ask", truncated=True, has_control_text=False)
    completion = Completion(request_of(SamplingParams(seed=3)), [sample(0, "a")])
    values = (
        RowFinisher(AnswerReader(TOKENIZER), ("prompt",))
        .finish(PromptRow(7, cut), completion)
        .values
    )
    assert values["prompt"] == "sk"
    assert values["num_prompt_tokens"] == 2


def test_the_row_of_a_too_long_prompt_has_its_token_count() -> None:
    values = failed_row(7, PromptTooLongError(300, 255), {}).values
    assert values["error"] == {
        "code": "prompt_too_long",
        "message": "the prompt has 300 tokens; at most 255 fit in max_model_len",
    }
    assert values["num_prompt_tokens"] == 300


@pytest.mark.parametrize("task", TASKS.values(), ids=TASKS)
def test_a_failed_row_has_only_the_columns_of_its_task(task: Task) -> None:
    row = failed_row(7, RowError("empty_prompt", "no text"), task.failed_results)
    assert row.values.keys() == set(task.spec.columns(("reasoning", "tool_calls")))
