"""At every step, the text of a growing sample equals the decoded text of all its tokens."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from batchinfer.text.detokenize import IncrementalDetokenizer, token_text
from batchinfer.text.tokenizer import Tokenizer

TEXTS = [
    "hello world, naïve café 東京 🙂🙂 \ufffd end",
    "  two spaces  and\n\nlines ",
    "🏳️‍🌈 flags and e\u0301 marks",
    "<|im_start|>user<|im_end|> [INST] </s> hello",
]


def check_every_step(tokenizer: Tokenizer, token_ids: list[int], *, skip: bool) -> None:
    detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=skip)
    settled = ""
    for count, token_id in enumerate(token_ids, 1):
        settled += detokenizer.push(token_id)
        expected = tokenizer.decode(token_ids[:count], skip_special_tokens=skip)
        assert settled + detokenizer.tail == expected


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("text", TEXTS)
def test_incremental_text_of_a_sentence(tokenizer: Tokenizer, text: str, skip: bool) -> None:
    ids = tokenizer.encode_batch([text], add_special_tokens=True, parse_special_tokens=True)[0]

    check_every_step(tokenizer, ids.tolist(), skip=skip)


@given(data=st.data(), skip=st.booleans())
def test_incremental_text_of_random_tokens(
    tokenizer: Tokenizer, data: st.DataObject, skip: bool
) -> None:
    ids = st.integers(0, tokenizer.vocab_size + 2)  # some ids have no token

    check_every_step(tokenizer, data.draw(st.lists(ids, max_size=60)), skip=skip)


@given(data=st.data())
def test_incremental_text_of_bytes_spaces_and_special_tokens(
    tokenizer: Tokenizer, data: st.DataObject
) -> None:
    """Cases in which decoders look back: bytes of characters, single spaces, special tokens."""
    texts = ["🙂", "é", "京", "\ufffd", " ", "   ", " hello"]
    encoded = tokenizer.encode_batch(texts, add_special_tokens=False, parse_special_tokens=False)
    parts = {id_ for ids in encoded for id_ in ids.tolist()} | set(tokenizer.special_token_ids)

    ids = data.draw(st.lists(st.sampled_from(sorted(parts)), max_size=40))

    check_every_step(tokenizer, ids, skip=True)


def _metaspace_decoder(backend: Backend) -> None:
    backend.decoder = decoders.Metaspace(prepend_scheme="always")


def _end_of_word_decoder(backend: Backend) -> None:
    backend.decoder = decoders.BPEDecoder(suffix="</w>")


def _word_piece_decoder(backend: Backend) -> None:
    backend.decoder = decoders.WordPiece()


def _two_stripped_spaces(backend: Backend) -> None:
    parts = [decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 2, 0)]
    backend.decoder = decoders.Sequence(parts)


@pytest.mark.parametrize(
    "set_decoder",
    [_metaspace_decoder, _end_of_word_decoder, _word_piece_decoder, _two_stripped_spaces],
)
@settings(max_examples=20)
@given(ids=st.lists(st.integers(0, 9), max_size=30))
def test_incremental_text_with_other_decoders(
    set_decoder: Callable[[Backend], None], ids: list[int]
) -> None:
    words = ["a", "b</w>", "##c", "▁d", "▁", "</w>", "e", ".", "▁▁f", "'s"]
    vocab = {word: index for index, word in enumerate(words)}
    backend = Backend(models.WordLevel(vocab, unk_token="a"))
    set_decoder(backend)
    tokenizer = Tokenizer(
        backend, chat_template=None, special_tokens={}, control_tokens=frozenset()
    )

    check_every_step(tokenizer, ids, skip=True)


class TestWindow:
    """Each step decodes only a few tokens."""

    @pytest.fixture
    def longest(self, chatml: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> list[int]:
        longest = [0]
        decode = chatml.decode

        def measure(token_ids: list[int], *, skip_special_tokens: bool) -> str:
            longest[0] = max(longest[0], len(token_ids))
            return decode(token_ids, skip_special_tokens=skip_special_tokens)

        monkeypatch.setattr(chatml, "decode", measure)
        return longest

    def push_all(self, tokenizer: Tokenizer, ids: list[int]) -> None:
        detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=True)
        for token_id in ids:
            detokenizer.push(token_id)

    def test_is_small_in_text(self, chatml: Tokenizer, longest: list[int]) -> None:
        ids = chatml.encode_batch(
            ["hello naïve 東京 🙂 " * 50], add_special_tokens=False, parse_special_tokens=True
        )[0]

        self.push_all(chatml, ids.tolist())

        assert longest[0] <= 12

    def test_is_bounded_for_endless_invalid_bytes(
        self, chatml: Tokenizer, longest: list[int]
    ) -> None:
        smile = chatml.encode_batch(["🤖"], add_special_tokens=False, parse_special_tokens=True)[0]

        self.push_all(chatml, smile.tolist()[1:2] * 1000)

        assert longest[0] <= 130

    def test_holds_no_special_tokens(self, chatml: Tokenizer, longest: list[int]) -> None:
        self.push_all(chatml, sorted(chatml.special_token_ids) * 100)

        assert longest[0] == 0


def texts_of(tokenizer: Tokenizer, token_ids: list[int]) -> list[str]:
    return [token_text(tokenizer, id_, token_ids[:at]) for at, id_ in enumerate(token_ids)]


@pytest.mark.parametrize("before", ["", "a", "é", "🙂🙂"])
def test_the_last_token_of_a_character_has_all_of_it(tokenizer: Tokenizer, before: str) -> None:
    (ids,) = tokenizer.encode_batch(
        [before + "€"], add_special_tokens=False, parse_special_tokens=False
    )

    assert texts_of(tokenizer, ids.tolist())[-3:] == ["", "", "€"]


@settings(max_examples=200)
@given(text=st.text(st.characters(exclude_characters="\ufffd", exclude_categories=["Cs"])))
def test_token_texts_join_to_the_whole_text(chatml: Tokenizer, text: str) -> None:
    ids = chatml.encode_batch([text], add_special_tokens=False, parse_special_tokens=False)[0]
    expected = chatml.decode(ids, skip_special_tokens=False)

    assert "".join(texts_of(chatml, ids.tolist())) == expected


def test_a_token_that_straddles_characters_keeps_the_completed_one() -> None:
    alphabet = {"â": 0, "Ĥ¬â": 1, "Ĥ¬": 2, "Ġâ": 3}  # bytes E2; 82 AC E2; 82 AC; space E2
    backend = Backend(models.BPE(vocab=alphabet, merges=[]))
    backend.decoder = decoders.ByteLevel()
    straddling = Tokenizer(
        backend, chat_template=None, special_tokens={}, control_tokens=frozenset()
    )

    assert texts_of(straddling, [0, 1, 1, 2]) == ["", "€", "€", "€"]
    assert texts_of(straddling, [3, 2, 0, 3]) == [" ", "€", "", " "]
