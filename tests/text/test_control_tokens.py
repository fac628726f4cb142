"""Control tokens in a row's text are found quickly, and single characters stand for them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchinfer.text.control_tokens import ControlTokens, Marks

TOKENS = ControlTokens({"<|im_end|>", "<|im_start|>", "<s>", "</s>", "<|im_end|>x"})


@pytest.mark.parametrize("text", ["<s>", "a<|im_end|>b", "<<|im_start|>>", "<|im_<s>"])
def test_control_text_is_found(text: str) -> None:
    assert TOKENS.occur_in(text)
    assert TOKENS.can_form_in(text)


@pytest.mark.parametrize("text", ["", "s", "< s>", "<|IM_END|>", "a <- b"])
def test_other_text_is_not_control_text(text: str) -> None:
    assert not TOKENS.occur_in(text)
    assert not TOKENS.can_form_in(text)


@pytest.mark.parametrize("text", ["ends in <|im_", "ends in <", "m_end|> starts", "> quoted"])
def test_halves_at_the_edges_could_form_control_text(text: str) -> None:
    assert not TOKENS.occur_in(text)
    assert TOKENS.can_form_in(text)


def test_the_longest_token_at_a_position_counts() -> None:
    assert TOKENS.pattern.findall("<|im_end|>x<|im_end|>y") == ["<|im_end|>x", "<|im_end|>"]


def test_no_tokens_match_nothing() -> None:
    assert not ControlTokens(()).can_form_in("<s> anything")


def test_thousands_of_reserved_tokens_make_one_small_pattern() -> None:
    tokens = ControlTokens([f"<unused{number}>" for number in range(6000)])

    assert tokens.pattern.findall("<unused17> <unused6000> <unused5999>") == [
        "<unused17>",
        "<unused5999>",
    ]
    assert not tokens.occur_in("<p>html</p>" * 100_000)


pieces = st.sampled_from(["<", "s", ">", "|im_end|>", "<|im_start|>", "/", "\U00100000", "a", " "])


@given(st.lists(st.lists(pieces).map("".join), min_size=1, max_size=4))
def test_marked_texts_cannot_form_control_text_together_and_restore(texts: list[str]) -> None:
    marks = Marks(TOKENS, texts)

    marked = [marks.mark(text) for text in texts]

    assert not TOKENS.occur_in("".join(marked))
    assert not any(TOKENS.can_form_in(text) for text in marked)
    assert [marks.restore(text) for text in marked] == texts
