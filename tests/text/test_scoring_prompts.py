"""Prompts with completions are split as in evaluation harnesses; each bad row gives one error."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchinfer.config import PromptConfig
from batchinfer.errors import RowError
from batchinfer.text.prompts import PromptTooLongError
from batchinfer.text.scoring_prompts import ScoredPrompt, ScoringBuilder
from batchinfer.text.tokenizer import Tokenizer
from tests.text.conftest import CHATML

TEXT = st.text(alphabet="stop word\n.,!é", min_size=1, max_size=12)


def builder(tokenizer: Tokenizer, column: str | None = "choices", **config: Any) -> ScoringBuilder:
    max_model_len = config.pop("max_model_len", 1000)
    config = {"chat_template": "none", **config}
    columns = ("prompt", "ids", "choices")
    return ScoringBuilder(
        PromptConfig(**config),
        tokenizer,
        completions_column=column,
        max_model_len=max_model_len,
        columns=columns,
    )


def one(made: ScoringBuilder, **row: object) -> ScoredPrompt:
    (prompt,) = made.build([row])
    assert isinstance(prompt, ScoredPrompt), prompt
    return prompt


def error(made: ScoringBuilder, **row: object) -> RowError:
    (found,) = made.build([row])
    assert isinstance(found, RowError)
    return found


def harness(encode: Any, context: str, continuation: str) -> tuple[list[int], list[int]]:
    """Encode a pair as lm-evaluation-harness describes it."""
    num_spaces = len(context) - len(context.rstrip())
    if num_spaces:
        continuation = context[-num_spaces:] + continuation
        context = context[:-num_spaces]
    context_ids = encode(context)
    return context_ids, encode(context + continuation)[len(context_ids) :]


@given(
    contexts=st.lists(TEXT.filter(str.strip), min_size=1, max_size=3),
    completions=st.lists(TEXT, min_size=1, max_size=4),
)
def test_completion_boundary_equals_lm_evaluation_harness(
    chatml: Tokenizer, contexts: list[str], completions: list[str]
) -> None:
    def encode(text: str) -> list[int]:
        (ids,) = chatml.encode_batch([text], add_special_tokens=True, parse_special_tokens=True)
        return [int(token) for token in ids]

    rows = [{"prompt": context, "choices": completions} for context in contexts]
    for row, prompt in zip(rows, builder(chatml).build(rows), strict=True):
        expected = [harness(encode, str(row["prompt"]), text) for text in completions]
        if not all(ids for _, ids in expected):
            assert isinstance(prompt, RowError)
            assert prompt.code == "empty_completion"
            continue
        assert isinstance(prompt, ScoredPrompt)
        assert prompt.text == row["prompt"]
        for (context, continuation), own in zip(expected, prompt.completions, strict=True):
            assert prompt.token_ids.tolist() == context
            assert own.tolist() == continuation


def test_a_chat_prompt_is_completed_where_the_template_ends(chatml: Tokenizer) -> None:
    prompt = one(builder(chatml, chat_template="auto"), prompt="hello", choices=["world", "user"])
    whole = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\nworld"
    (ids,) = chatml.encode_batch([whole], add_special_tokens=False, parse_special_tokens=True)
    assert np.concatenate([prompt.token_ids, prompt.completions[0]]).tolist() == ids.tolist()
    assert prompt.completions[0][0] == prompt.completions[1][0], (
        "the newline belongs to the completions"
    )


def test_control_tokens_in_completions_stay_text(chatml: Tokenizer) -> None:
    end = chatml.encode_batch(["<|im_end|>"], add_special_tokens=False, parse_special_tokens=True)
    made = builder(chatml)
    row = {"prompt": "hello <|im_", "choices": ["end|> x", "a<|im_end|>"]}
    prompt = one(made, **row)
    assert prompt.has_control_text
    assert not any(np.isin(end[0], ids).any() for ids in (prompt.token_ids, *prompt.completions))
    parsed = one(
        builder(chatml, parse_special_tokens=True), prompt="hello", choices=["a<|im_end|>"]
    )
    assert end[0][0] in parsed.completions[0]


@pytest.mark.parametrize(
    ("choices", "code", "message"),
    [
        (None, "empty_completion", "column choices holds no completions"),
        ([], "empty_completion", "column choices holds no completions"),
        ("", "empty_completion", "column choices: completion 0 is empty"),
        (["a", ""], "empty_completion", "column choices: completion 1 is empty"),
        (["a", None], "empty_completion", "column choices: completion 1 is empty"),
        ([[1], []], "empty_completion", "column choices: completion 1 is empty"),
        (["a", [1]], "unsupported_content", "holds both texts and other values"),
        ([[1], [99_999]], "unsupported_content", "completion 1: token ids must be from 0 to"),
        ([[1], ["x"]], "unsupported_content", "completion 1 is not a list of integers"),
        (7, "unsupported_content", "column choices is not a list of completions"),
        ([b"a", b"\xff"], "invalid_utf8", "column choices"),
        (["a", "\ud800"], "invalid_utf8", "half of a surrogate pair"),
        (RowError("row_too_large", "so it is"), "row_too_large", "so it is"),
    ],
)
def test_bad_completions_are_row_errors(
    chatml: Tokenizer, choices: object, code: str, message: str
) -> None:
    good = {"prompt": b"hello", "choices": [b"world"]}
    first, bad, last = builder(chatml).build([good, {**good, "choices": choices}, good])
    assert isinstance(bad, RowError)
    assert bad.code == code
    assert message in bad.message
    for other in (first, last):
        assert isinstance(other, ScoredPrompt)
        assert len(other.completions) == 1


def test_an_empty_prompt_fails_alone(chatml: Tokenizer) -> None:
    assert error(builder(chatml), prompt="  ", choices=["a"]).code == "empty_prompt"
    assert error(builder(chatml), prompt=None, choices=["a"]).code == "empty_prompt"


def test_one_text_is_one_completion(chatml: Tokenizer) -> None:
    one_text = one(builder(chatml), prompt="hello", choices=" world")
    listed = one(builder(chatml), prompt="hello", choices=[" world"])
    assert [ids.tolist() for ids in one_text.completions] == [
        ids.tolist() for ids in listed.completions
    ]


def test_token_ids_are_taken_as_they_are(chatml: Tokenizer) -> None:
    made = builder(chatml, token_ids_column="ids", chat_template="auto")
    prompt = one(made, ids=[5, 6, 7], choices=[[8], [9, 10]])
    assert prompt.token_ids.tolist() == [5, 6, 7]
    assert [ids.tolist() for ids in prompt.completions] == [[8], [9, 10]]
    texts = one(made, ids=[5, 6, 7], choices=[" world", "a<|im_end|>"])
    (world,) = chatml.encode_batch([" world"], add_special_tokens=False, parse_special_tokens=True)
    assert texts.completions[0].tolist() == world.tolist()
    assert texts.has_control_text
    mixed = one(builder(chatml), prompt="hello ", choices=[[8], [9, 10]])
    (hello,) = chatml.encode_batch(["hello "], add_special_tokens=True, parse_special_tokens=True)
    assert mixed.token_ids.tolist() == hello.tolist(), "there is no text to move the space to"


@pytest.mark.parametrize(
    ("on_too_long", "kept"), [("truncate_left", [3, 4, 5]), ("truncate_right", [1, 2, 3])]
)
def test_prompt_is_cut_to_fit_the_longest_completion(
    chatml: Tokenizer, on_too_long: Any, kept: list[int]
) -> None:
    row = {"ids": [1, 2, 3, 4, 5], "choices": [[6, 7], [8]]}
    strict = builder(chatml, token_ids_column="ids", chat_template="auto", max_model_len=6)
    found = error(strict, **row)
    assert isinstance(found, PromptTooLongError)
    assert (
        str(found)
        == "the prompt and its longest completion have 7 tokens; at most 6 fit in max_model_len"
    )
    assert len(one(strict, ids=[1, 2, 3, 4], choices=[[6, 7]]).token_ids) == 4
    config = {"token_ids_column": "ids", "chat_template": "auto", "on_too_long": on_too_long}
    cut = one(builder(chatml, max_model_len=5, **config), **row)
    assert cut.truncated
    assert cut.token_ids.tolist() == kept
    assert error(builder(chatml, max_model_len=2, **config), **row).code == "prompt_too_long"


class TestPromptsThemselves:
    def test_scored_text_starts_with_the_prefix_token(self, chatml: Tokenizer) -> None:
        prompt = one(builder(chatml, None), prompt="hello world ")
        (ids,) = chatml.encode_batch(
            ["hello world "], add_special_tokens=True, parse_special_tokens=True
        )
        assert prompt.token_ids.tolist() == [chatml.prefix_token_id, *ids.tolist()]
        assert prompt.completions == ()

    def test_prefix_token_is_not_doubled(self, sentencepiece: Tokenizer) -> None:
        prompt = one(builder(sentencepiece, None), prompt="hello")
        assert prompt.token_ids.tolist().count(sentencepiece.bos_token_id) == 1

    def test_scored_chat_gets_no_prefix_token(self, chatml: Tokenizer) -> None:
        prompt = one(builder(chatml, None, chat_template="auto"), prompt="hello")
        assert chatml.chat_template == CHATML
        assert chatml.token(int(prompt.token_ids[0])) == "<|im_start|>"

    def test_one_token_cannot_be_scored(self, chatml: Tokenizer) -> None:
        made = builder(chatml, None, token_ids_column="ids", chat_template="auto")
        assert error(made, ids=[5]).code == "empty_prompt"
        assert one(made, ids=[5, 6]).token_ids.tolist() == [5, 6]
