"""Lines of OpenAI batch files: which ones run, and the error codes of the others."""

from __future__ import annotations

from typing import Any

import pytest

from batchinfer.errors import RowError
from batchinfer.job.input.openai_batch import CustomIds
from batchinfer.job.openai.request import ParsedRequest, generation_requests, is_served
from batchinfer.text.tools.row_tools import RowTools

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "hello"}]


def line(url: str = CHAT, **body: Any) -> dict[str, Any]:
    source = {"messages": MESSAGES} if url == CHAT else {"prompt": "hello"}
    return {"custom_id": "a", "method": "POST", "url": url, "body": {**source, **body}}


def parse(url: str = CHAT, **body: Any) -> ParsedRequest:
    return generation_requests().read(line(url, **body), ["org/model"])


def refusal(request: dict[str, Any]) -> tuple[str, str]:
    with pytest.raises(RowError) as caught:
        generation_requests().read(request, ["org/model"])
    return caught.value.code, caught.value.message


def test_chat_request_is_parsed() -> None:
    request = parse(
        model="org/model",
        max_completion_tokens=5,
        temperature=0.5,
        top_p=0.9,
        n=2,
        stop="END",
        seed=7,
        logprobs=True,
        top_logprobs=3,
        presence_penalty=0.1,
        frequency_penalty=0.2,
        logit_bias={"5": 1},
        top_k=4,
        user="somebody",
        stream=False,
        tools=[],
        store=None,
    )
    assert (request.source, request.value) == ("messages", MESSAGES)
    assert request.sampling == {
        "max_completion_tokens": 5,
        "temperature": 0.5,
        "top_p": 0.9,
        "n": 2,
        "stop": "END",
        "seed": 7,
        "logprobs": 3,
        "presence_penalty": 0.1,
        "frequency_penalty": 0.2,
        "logit_bias": {"5": 1},
        "top_k": 4,
    }


def test_beam_search_of_vllm_has_n_beams() -> None:
    assert parse(use_beam_search=True, n=3).sampling == {"n": 3, "beam_width": 3}
    assert parse(use_beam_search=True, beam_width=4).sampling == {"beam_width": 4}
    assert parse(use_beam_search=False).sampling == {}
    code, message = refusal(line(use_beam_search=1))
    assert (code, message) == (
        "bad_sampling_params",
        "body: use_beam_search is 1; it must be true or false",
    )


@pytest.mark.parametrize(
    ("prompt", "source", "value"),
    [("text", "prompt", "text"), ([1, 2], "token_ids", [1, 2]), ([[1, 2]], "token_ids", [1, 2])],
)
def test_completion_request_prompts_are_parsed(prompt: Any, source: str, value: Any) -> None:
    request = parse(TEXT, prompt=prompt, logprobs=2, best_of=3, n=3)
    assert (request.source, request.value) == (source, value)
    assert request.sampling == {"logprobs": 2, "n": 3}


def test_equal_max_tokens_and_max_completion_tokens_are_accepted() -> None:
    sampling = parse(max_tokens=4, max_completion_tokens=4).sampling
    assert sampling == {"max_tokens": 4}
    sampling = parse(max_tokens=4, max_completion_tokens=5).sampling  # refused later
    assert sampling == {"max_tokens": 4, "max_completion_tokens": 5}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"method": "GET"}, 'method is "GET"; it must be POST'),
        ({"url": "/v1/embeddings"}, 'url is "/v1/embeddings"; it must be /v1/chat/completions'),
        ({"boddy": {}}, 'unknown field "boddy"; did you mean body?'),
        ({"body": {"messages": MESSAGES, "prompt": "x"}}, "body.prompt cannot be used with"),
        ({"body": {"messages": MESSAGES, "model": 5}}, "body.model is 5"),
        (
            {"body": {"messages": MESSAGES, "chat_template_kwargs": {"messages": []}}},
            "body.chat_template_kwargs cannot contain messages",
        ),
        (
            {"url": TEXT, "body": {"prompt": "x", "reasoning_effort": "low"}},
            "body.reasoning_effort can only be used with /v1/chat/completions",
        ),
        (
            {"body": {"messages": [], "tool_choice": "required"}},
            'body.tool_choice is "required", but the request has no tools',
        ),
    ],
)
def test_invalid_request_is_refused(change: dict[str, Any], message: str) -> None:
    code, found = refusal({**line(), **change})
    assert code == "invalid_request"
    assert found.startswith(message)


@pytest.mark.parametrize(
    ("url", "body", "message"),
    [
        (CHAT, {"tools": [{"type": "function"}]}, "body.tools needs output.tool_parser"),
        (TEXT, {"tools": [{"type": "function"}]}, "body.tools cannot be used with /v1/completions"),
        (CHAT, {"temprature": 1}, "body.temprature is not supported; did you mean temperature?"),
        (CHAT, {"prompt_logprobs": 1}, "body.prompt_logprobs is not supported"),
        (TEXT, {"suffix": "end"}, 'body.suffix is "end"'),
        (TEXT, {"best_of": 2}, "body.best_of is not supported"),
    ],
)
def test_unsupported_request_parameter_is_refused(
    url: str, body: dict[str, Any], message: str
) -> None:
    code, found = refusal(line(url, **body))
    assert code == "unsupported_parameter"
    assert found.startswith(message)


@pytest.mark.parametrize(
    ("url", "body"),
    [
        (CHAT, {"logprobs": 2}),
        (CHAT, {"top_logprobs": 2}),
        (TEXT, {"top_logprobs": 2}),
        (TEXT, {"echo": 1}),
        (TEXT, {"guided_regex": "a", "structured_outputs": {"regex": "b"}}),
    ],
)
def test_bad_request_sampling_params_are_refused(url: str, body: dict[str, Any]) -> None:
    assert refusal(line(url, **body))[0] == "bad_sampling_params"


@pytest.mark.parametrize("top", [21, -1, 2.0, True, "3"])
def test_top_logprobs_error_names_the_request_field(top: Any) -> None:
    code, message = refusal(line(logprobs=True, top_logprobs=top))
    assert code == "bad_sampling_params"
    assert message.startswith("body: top_logprobs is ")


def test_guided_fields_become_structured_outputs() -> None:
    sampling = parse(guided_choice=["a", "b"], guided_decoding_backend="xgrammar").sampling
    assert sampling == {"structured_outputs": {"choice": ["a", "b"]}}


def test_request_chat_template_variables() -> None:
    request = parse(chat_template_kwargs={"enable_thinking": False}, reasoning_effort="low")
    assert request.template_variables == {"enable_thinking": False, "reasoning_effort": "low"}


@pytest.mark.parametrize("logprobs", [None, 0, 3])
def test_echo_with_logprobs_requests_prompt_logprobs(logprobs: int | None) -> None:
    sampling = parse(TEXT, prompt="x", echo=True, logprobs=logprobs).sampling
    assert sampling.get("prompt_logprobs") == sampling.get("logprobs") == logprobs


def test_request_for_another_model_is_refused() -> None:
    code, message = refusal(line(model="gpt-4o"))
    assert code == "unknown_model"
    assert message.startswith('body.model is "gpt-4o", but this job runs org/model')


def test_request_model_may_name_an_adapter() -> None:
    adapters = {"styles/short": 1}
    assert (
        generation_requests().read(line(model="styles/short"), ["m"], adapters).model
        == "styles/short"
    )
    with pytest.raises(RowError):
        generation_requests().read(line(model="short"), ["m"], adapters)


@pytest.mark.parametrize(
    ("asked", "served"), [("org/model", True), ("model", True), ("/home/me/org/model", True)]
)
def test_request_model_may_be_the_end_of_a_served_name(asked: str, served: bool) -> None:
    assert is_served(asked, ["x", "/home/me/org/model"]) is served


def test_duplicate_custom_ids() -> None:
    ids = CustomIds()
    ids.add(["a", None, "b"])
    ids.add(["a", None, "row 1", 5, "c", "a", "b"])
    assert [row for row in range(10) if ids.is_repeated(row)] == [3, 8, 9]


FUNCTION = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def parse_tools(**body: Any) -> ParsedRequest:
    return generation_requests(has_tools=True).read(line(**body), ["org/model"])


def test_request_tools_and_tool_choice() -> None:
    named = {"type": "function", "function": {"name": "f"}}
    for given, tools in [
        ({"tools": [FUNCTION]}, RowTools([FUNCTION])),
        ({"tools": [FUNCTION], "tool_choice": named}, RowTools([FUNCTION], named)),
        ({"tools": [FUNCTION], "parallel_tool_calls": False}, RowTools([FUNCTION], several=False)),
        ({"tools": [FUNCTION], "tool_choice": "none"}, None),
        ({"tools": [], "tool_choice": "auto"}, None),
    ]:
        request = parse_tools(**given)
        assert request.tools == tools
        assert request.source == ("messages" if tools is None else "tools")
    for given in ({"tools": [5]}, {"tools": [FUNCTION], "tool_choice": "x"}):
        with pytest.raises(RowError) as caught:
            parse_tools(**given)
        assert caught.value.code == "invalid_request"


@pytest.mark.parametrize(
    ("written", "meant"),
    [('{"a": 1}', {"a": 1}), ("", {}), ("{", "{"), ({"a": 1}, {"a": 1}), (None, None)],
)
def test_tool_call_arguments_are_decoded_for_the_template(written: Any, meant: Any) -> None:
    def talk(arguments: Any) -> list[dict[str, Any]]:
        call = {"id": "1", "function": {"name": "f", "arguments": arguments}}
        return [*MESSAGES, {"role": "assistant", "tool_calls": [call]}]

    assert parse_tools(messages=talk(written)).value == talk(meant)
