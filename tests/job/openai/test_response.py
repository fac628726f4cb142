"""Responses in the format of OpenAI's API."""

from __future__ import annotations

from functools import partial
from typing import Any

from batchinfer.job.input.openai_batch import CHAT
from batchinfer.job.openai.export import Responses
from batchinfer.text.detokenize import token_text
from tests.job.fakes import byte_tokenizer

TEXT = "é €"


def answer(url: str) -> dict[str, Any]:
    """Return the only choice of a row with the sample ``TEXT``, which has a token per byte."""
    tokenizer = byte_tokenizer()
    (ids,) = tokenizer.encode_batch([TEXT], add_special_tokens=False, parse_special_tokens=False)
    tokens = [
        {"token_id": id_, "logprob": -1.0, "top": [{"token_id": id_, "logprob": -1.0}]}
        for id_ in ids.tolist()
    ]
    sample = {"index": 0, "text": TEXT, "finish_reason": "stop", "logprobs": tokens}
    counts = {"num_prompt_tokens": 1, "num_output_tokens": len(tokens)}
    row = {"row_id": 0, "custom_id": "a", "url": url, "body": {}, "error": None}
    row["cached_tokens"] = None
    responses = Responses("f", 0, "echo", partial(token_text, tokenizer))
    line = responses.line([{**row, **counts, "outputs": [sample]}])
    [choice] = line["response"]["body"]["choices"]
    found: dict[str, Any] = choice["logprobs"]
    return found


def test_completion_logprobs_of_a_multi_token_character() -> None:
    found = answer("/v1/completions")
    assert found["tokens"] == ["", "é", " ", "", "", "€"]
    assert found["text_offset"] == [0, 0, 1, 2, 2, 2]
    assert found["top_logprobs"][-1] == {"€": -1.0}


def test_chat_logprobs_of_a_multi_token_character() -> None:
    content = answer(CHAT)["content"]
    assert [token["token"] for token in content] == ["", "é", " ", "", "", "€"]
    assert b"".join(bytes(token["bytes"]) for token in content) == TEXT.encode()
    assert content[-1]["top_logprobs"][0]["token"] == "€"
