"""Reasoning is separated from answers in the formats of real models, wherever a sample ends."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchinfer.config import SamplingParams
from batchinfer.errors import UsageError
from batchinfer.text.answers import Answer, AnswerReader
from batchinfer.text.reasoning.formats import find_reasoning_format
from batchinfer.text.reasoning.reasoning_format import Phase
from batchinfer.text.tokenizer import Tokenizer
from tests.text.reasoning.tokenizers import EOS, byte_tokenizer, encode, ended, sample_of

QWEN = byte_tokenizer(added=["<think>", "</think>"])
MISTRAL = byte_tokenizer(special=["[THINK]", "[/THINK]", "[TOOL_CALLS]"])
GEMMA = byte_tokenizer(special=["<|channel>", "<channel|>", "<|turn>"])
OLMO = byte_tokenizer(chat_template="{% if add_generation_prompt %}<think>{% endif %}")
GRANITE = byte_tokenizer(chat_template="First write 'Here is my thought process:', then ...")
HARMONY_TOKENS = ["start", "message", "channel", "end", "return", "call", "constrain"]
GPT_OSS = byte_tokenizer(special=[f"<|{name}|>" for name in HARMONY_TOKENS])


@dataclass(frozen=True)
class Case:
    tokenizer: Tokenizer
    prompt: str
    output: str
    reasoning: str | None
    text: str
    num_tokens: int
    """Number of reasoning tokens, including markers; tokens are bytes and control tokens."""


CASES = {
    "qwen3": Case(QWEN, "hi", "<think>\nhm\n</think>\n\nYes.", "hm", "Yes.", 6),
    "qwen3, thinking off": Case(QWEN, "x<think>\n\n</think>\n\n", "Yes.", None, "Yes.", 0),
    "qwen3, none": Case(QWEN, "hi", "Yes.", None, "Yes.", 0),
    "qwen3, unfinished": Case(QWEN, "hi", "<think>\nhm", "hm", "", 4),
    "r1: the template opens it": Case(QWEN, "hi<think>\n", "hm</think>\nYes.", "hm", "Yes.", 3),
    "r1, unfinished": Case(QWEN, "hi<think>\n", "hm, still", "hm, still", "", 9),
    "r1: nobody opens it": Case(QWEN, "hi", "hm</think>Yes.", "hm", "Yes.", 3),
    "a turn that was thought over": Case(
        QWEN, "<think>a</think>b hi", "<think>c</think>d", "c", "d", 3
    ),
    "a user's question about the marker": Case(
        QWEN, f"what is <think>?{EOS}", "A marker.", None, "A marker.", 0
    ),
    "thinking that is continued": Case(QWEN, "<think>ab", "c</think>d", "c", "d", 2),
    "magistral": Case(MISTRAL, "hi", "[THINK]hm[/THINK]Yes.", "hm", "Yes.", 4),
    "gemma 4": Case(GEMMA, "hi", "<|channel>thought\nhm<channel|>Yes.", "hm", "Yes.", 12),
    "olmo 3: plain text": Case(OLMO, "hi<think>", "hm</think>\nYes.", "hm", "Yes.", 10),
    "plain text, written": Case(OLMO, "hi", "<think>hm</think>é", "hm", "é", 17),
    "granite": Case(
        GRANITE, "hi", "Here is my thought process: hm\nHere is my response: Yes.", "hm", "Yes.", 51
    ),
    "gpt-oss": Case(
        GPT_OSS,
        "<|start|>user<|message|>hi<|end|><|start|>assistant",
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>Yes.",
        "hm",
        "Yes.",
        13,
    ),
    "gpt-oss, twice": Case(
        GPT_OSS,
        "<|start|>assistant",
        "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>commentary<|message|>"
        "b<|end|><|start|>assistant<|channel|>analysis<|message|>c",
        "a\nc",
        "b",
        12 + 21,
    ),
    "gpt-oss, a call": Case(
        GPT_OSS,
        "<|start|>assistant",
        "<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}",
        None,
        "",
        0,
    ),
    "gpt-oss, the answer begun": Case(
        GPT_OSS, "<|start|>assistant<|channel|>final<|message|>", "Yes.", None, "Yes.", 0
    ),
}


def read(case: Case, tokens: int | None = None) -> Answer:
    ids = encode(case.tokenizer, case.output)[:tokens]
    found = find_reasoning_format("auto", case.tokenizer)
    reader = AnswerReader(case.tokenizer, found)
    return reader.read(encode(case.tokenizer, case.prompt), sample_of(ids), SamplingParams())


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_split_of_reasoning_and_answer(case: Case) -> None:
    assert read(case) == Answer(case.text, case.reasoning, case.num_tokens)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_tracker_agrees_with_split(case: Case) -> None:
    """Wherever the sample is cut, the tracker's text is a prefix of the final text."""
    found = find_reasoning_format("auto", case.tokenizer)
    ids = encode(case.tokenizer, case.output)
    tracker = found.tracker(encode(case.tokenizer, case.prompt))
    for count in range(1, len(ids) + 1):
        tracker.take(int(ids[count - 1]))
        cut = read(case, count)
        if tracker.phase is Phase.THINKING:
            assert all(line in case.output for line in cut.reasoning.split("\n"))
            assert cut.text == "" or case.text.startswith(cut.text)
        elif tracker.phase is Phase.ANSWER and case.reasoning is not None:
            assert cut.num_reasoning_tokens <= case.num_tokens
            assert case.text.startswith(cut.text.rstrip("�"))
    assert tracker.num_thinking <= case.num_tokens


@pytest.mark.parametrize("skips", [True, False])
def test_a_stop_string_in_reasoning_or_answer(skips: bool) -> None:
    params = SamplingParams(stop=("m", "s."), skip_special_tokens=skips)
    reader = AnswerReader(QWEN, find_reasoning_format("auto", QWEN))
    prompt = encode(QWEN, "hi")
    within = sample_of(encode(QWEN, "<think>hm"), stop="m", text_end=len("<think>h"))
    assert reader.read(prompt, within, params) == Answer("", "h", 3)
    text = "<think>h</think>Yes."
    behind = sample_of(encode(QWEN, text), stop="s.", text_end=len(text) - 2)
    assert reader.read(prompt, behind, params) == Answer("Ye", "h", 3)


def test_the_end_marker_as_a_stop_string() -> None:
    params = SamplingParams(stop=("</think>",))
    reader = AnswerReader(QWEN, find_reasoning_format("auto", QWEN))
    sample = sample_of(encode(QWEN, "<think>hm</think>"), stop="</think>", text_end=9)
    assert reader.read(encode(QWEN, "hi"), sample, params) == Answer("", "hm", 4)


def test_the_end_token_is_not_in_the_text() -> None:
    reader = AnswerReader(QWEN, find_reasoning_format("auto", QWEN))
    prompt = encode(QWEN, "hi")
    params = SamplingParams(skip_special_tokens=False)
    whole = ended(encode(QWEN, f"<think>a</think>b{EOS}"))
    assert reader.read(prompt, whole, params) == Answer("b", "a", 3)
    thinking = ended(encode(QWEN, f"<think>a{EOS}"))
    assert reader.read(prompt, thinking, params) == Answer("", "a", 3)


@given(
    thought=st.text(alphabet="ab<é>/ \n", max_size=8), answer=st.text(alphabet="é<t ", max_size=5)
)
def test_token_markers_and_text_markers_split_alike(thought: str, answer: str) -> None:
    text = f"<think>{thought}</think>{answer}"
    markers = {"start": "<think>", "end": "</think>"}
    for tokenizer in (QWEN, OLMO):
        found = find_reasoning_format(markers, tokenizer)
        reader = AnswerReader(tokenizer, found)
        sample = sample_of(encode(tokenizer, text))
        read = reader.read(np.empty(0, np.int32), sample, SamplingParams())
        assert (read.reasoning, read.text) == (thought.strip(), answer.lstrip())


@pytest.mark.parametrize("asked", ["auto", {"start": "<a>", "end": "</a>"}])
def test_unknown_markers_are_refused(asked: str | Mapping[str, str]) -> None:
    plain = byte_tokenizer(chat_template="{{ messages }}")
    if asked == "auto":
        with pytest.raises(UsageError, match=r"reasoning is auto.*reasoning markers"):
            find_reasoning_format(asked, plain)
        return
    reader = AnswerReader(plain, find_reasoning_format(asked, plain))
    sample = sample_of(encode(plain, "<a>x</a>y"))
    assert reader.read(np.empty(0, np.int32), sample, SamplingParams()) == Answer("y", "x", 8)


def test_reasoning_none_splits_nothing() -> None:
    assert find_reasoning_format("none", QWEN) is None


@pytest.mark.parametrize("tokenizer", [OLMO, QWEN], ids=["text marker", "token marker"])
def test_images_in_a_prompt_are_no_part_of_a_marker(tokenizer: Tokenizer) -> None:
    found = find_reasoning_format({"start": "<think>", "end": "</think>"}, tokenizer)
    assert found is not None
    image = np.array([-1, -2])
    begun = np.concatenate([encode(tokenizer, "look "), image, encode(tokenizer, "<think>")])
    assert found.tracker(begun).phase is Phase.THINKING
    assert found.tracker(np.concatenate([begun, image, [-3]])).phase is not Phase.ANSWER
    assert found.tracker(image).phase is Phase.BEFORE
