"""Stop strings end a sample's text where a search in the whole text would."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchinfer.config import SamplingParams
from batchinfer.engine.request import SampleOutput
from batchinfer.protocols import StopChecker, StopMatch
from batchinfer.text.detokenize import bad_words_token_ids, output_text
from batchinfer.text.stop_strings import make_stop_checker_factory
from batchinfer.text.tokenizer import Tokenizer


def checker(
    tokenizer: Tokenizer, *stop: str, include: bool = False, skip: bool = True
) -> StopChecker:
    params = SamplingParams(stop=stop, include_stop_str_in_output=include, skip_special_tokens=skip)
    make = make_stop_checker_factory(tokenizer, params)
    assert make is not None
    return make()


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    ids = tokenizer.encode_batch([text], add_special_tokens=False, parse_special_tokens=True)
    return [int(id_) for id_ in ids[0]]


def feed(
    made: StopChecker, token_ids: list[int], *, min_tokens: int = 0
) -> tuple[int, StopMatch | None]:
    """Feed tokens until a stop matches; return their number, and the match or None."""
    for count, token_id in enumerate(token_ids, 1):
        if match := made.on_token(token_id, may_stop=count >= min_tokens):
            return count, match
    return len(token_ids), None


def finished(
    token_ids: list[int], reason: str = "stop", match: StopMatch | None = None
) -> SampleOutput:
    return SampleOutput(0, np.array(token_ids, np.int32), reason, None, match, 0.0, None)


def text_until_stop(tokenizer: Tokenizer, text: str, *stop: str, include: bool = False) -> str:
    ids = encode(tokenizer, text)
    count, match = feed(checker(tokenizer, *stop, include=include), ids)
    sample = finished(ids[:count], "stop" if match else "length", match)
    return output_text(tokenizer, sample, SamplingParams())


@pytest.mark.parametrize(
    ("text", "stop", "kept"),
    [
        ("hello world stop hello", ("stop",), "hello world "),
        ("hello world stopping", ("opp",), "hello world st"),
        ("one two", ("none",), "one two"),
        ("naïve 東京 🙂 end", ("🙂",), "naïve 東京 "),
        ("naïve 東京 🙂 end", ("京 🙂",), "naïve 東"),
        ("abc", ("c", "bc"), "ab"),
        ("abc", ("bc", "c"), "a"),
        ("a\n\nb", ("\n\n",), "a"),
        ("stop", ("stop",), ""),
        ("x x x x END y", ("x x x y", " END y"), "x x x x"),
    ],
)
def test_the_text_ends_before_the_stop_string(
    tokenizer: Tokenizer, text: str, stop: tuple[str, ...], kept: str
) -> None:
    assert text_until_stop(tokenizer, text, *stop) == kept


def test_include_stop_str_in_output_keeps_the_stop_string(tokenizer: Tokenizer) -> None:
    assert text_until_stop(tokenizer, "one. two. three", ".", include=True) == "one."


def test_the_match_that_ends_first_counts(chatml: Tokenizer) -> None:
    ids = encode(chatml, "abcdefgh")

    _, match = feed(checker(chatml, "bcdefg", "cde"), ids)

    assert match == StopMatch("cde", 2)


def test_sample_stops_at_the_token_that_completes_a_stop_string(chatml: Tokenizer) -> None:
    ids = encode(chatml, "hello 🙂 more")
    smile = encode(chatml, "hello 🙂")

    count, match = feed(checker(chatml, "🙂"), ids)

    assert (count, match) == (len(smile), StopMatch("🙂", 6))


def test_a_match_before_min_tokens_never_counts(chatml: Tokenizer) -> None:
    ids = encode(chatml, "a.b.c.d")
    assert len(ids) == 7

    assert feed(checker(chatml, "."), ids, min_tokens=3) == (4, StopMatch(".", 3))
    assert feed(checker(chatml, "b.c"), ids, min_tokens=5) == (5, StopMatch("b.c", 2))
    assert feed(checker(chatml, "b.c"), ids, min_tokens=6) == (7, None)


def test_match_before_min_tokens_stays_ignored_with_a_longer_stop_string(chatml: Tokenizer) -> None:
    ids = encode(chatml, "a.bcd")

    assert feed(checker(chatml, ".", "a long one"), ids, min_tokens=3) == (5, None)


def test_a_character_completed_after_min_tokens_counts(chatml: Tokenizer) -> None:
    ids = encode(chatml, "🤖")
    assert len(ids) > 1

    assert feed(checker(chatml, "🤖"), ids, min_tokens=len(ids)) == (len(ids), StopMatch("🤖", 0))


def test_skipped_special_tokens_do_not_match_stop_strings(chatml: Tokenizer) -> None:
    ids = encode(chatml, "st<|im_start|>op")

    assert feed(checker(chatml, "stop"), ids) == (len(ids), StopMatch("stop", 0))
    assert feed(checker(chatml, "stop", skip=False), ids) == (len(ids), None)
    assert feed(checker(chatml, "im_start", skip=False), ids)[1] == StopMatch("im_start", 4)


def naive(
    tokenizer: Tokenizer, ids: list[int], stop: list[str], include: bool, min_tokens: int
) -> tuple[int, StopMatch | None]:
    """Return what ``feed`` returns, by searching the whole text after every token."""
    ignored = 0
    for count in range(1, len(ids) + 1):
        text = tokenizer.decode(ids[:count], skip_special_tokens=True)
        if count < min_tokens:
            ignored = len(text.rstrip("\ufffd"))
            continue
        ends = [
            (start + len(word), order, word)
            for order, word in enumerate(stop)
            for start in range(len(text))
            if text.startswith(word, start) and start + len(word) > ignored
        ]
        if ends:
            end, _, word = min(ends)
            return count, StopMatch(word, end if include else end - len(word))
    return len(ids), None


@given(data=st.data(), include=st.booleans(), min_tokens=st.integers(0, 6))
def test_matches_equal_a_search_of_the_whole_text(
    tokenizer: Tokenizer, data: st.DataObject, include: bool, min_tokens: int
) -> None:
    alphabet = encode(tokenizer, "ab ba 🙂 é stop  a")
    ids = data.draw(st.lists(st.sampled_from(alphabet), max_size=25))
    stop = data.draw(st.lists(st.text("ab 🙂é", min_size=1, max_size=4), min_size=1, max_size=3))

    found = feed(checker(tokenizer, *stop, include=include), ids, min_tokens=min_tokens)

    assert found == naive(tokenizer, ids, stop, include, min_tokens)


def test_no_stop_checker_without_stop_strings(chatml: Tokenizer) -> None:
    assert make_stop_checker_factory(chatml, SamplingParams()) is None


def test_each_sample_has_its_own_checker(chatml: Tokenizer) -> None:
    make = make_stop_checker_factory(chatml, SamplingParams(stop=("ab",)))
    assert make is not None
    a, b = encode(chatml, "a")[0], encode(chatml, "b")[0]
    first, second = make(), make()

    assert first.on_token(a, may_stop=True) is None
    assert second.on_token(b, may_stop=True) is None
    assert first.on_token(b, may_stop=True) == StopMatch("ab", 0)


def test_a_forked_checker_continues_on_its_own(tokenizer: Tokenizer) -> None:
    """A checker forks after every token. Forks that see other tokens do not change the others."""
    whole, other = encode(tokenizer, "a café, naïve; and 日本 end"), encode(tokenizer, "é日 xyz")
    for stop in ("nd", "本 e", "ve;"):
        made = checker(tokenizer, stop)
        count, match = feed(checker(tokenizer, stop), whole)
        assert match is not None
        for token_id in whole[: count - 1]:
            feed(made.fork(), other)
            before, made = made, made.fork()
            assert made.on_token(token_id, may_stop=True) is None
            feed(before, other)
        assert made.fork().on_token(whole[count - 1], may_stop=True) == match
        assert made.on_token(whole[count - 1], may_stop=True) == match


def test_end_token_is_not_in_the_output_text(chatml: Tokenizer) -> None:
    ids = encode(chatml, "hello.<|im_end|>")

    hidden, shown = SamplingParams(), SamplingParams(skip_special_tokens=False)
    included = replace(shown, include_stop_str_in_output=True)
    assert output_text(chatml, finished(ids), hidden) == "hello."
    assert output_text(chatml, finished(ids, "length"), shown) == "hello.<|im_end|>"
    assert output_text(chatml, finished(ids), included) == "hello.<|im_end|>"
    assert output_text(chatml, finished(ids), shown) == "hello."
    assert output_text(chatml, finished(ids[:-1]), hidden) == "hello"


def test_bad_words_are_banned_with_and_without_a_space(chatml: Tokenizer) -> None:
    banned = bad_words_token_ids(chatml, [" hello", "stop world"])

    texts = [chatml.decode(list(ids), skip_special_tokens=False) for ids in banned]
    assert texts == ["hello", " hello", "stop world", " stop world"]


def test_bad_words_are_not_repeated(sentencepiece: Tokenizer) -> None:
    banned = bad_words_token_ids(sentencepiece, ["hello", "hello"])

    assert len(banned) == 1  # the same ids with or without a leading space
    assert bad_words_token_ids(sentencepiece, []) == ()
