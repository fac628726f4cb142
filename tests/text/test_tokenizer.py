"""Ids and texts equal transformers'; control tokens in text stay text on request."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from batchinfer.text.tokenizer import Tokenizer

TEXTS = [
    "",
    "hello world",
    "  leading and trailing  ",
    "naïve café 東京 🙂 \x00 nul",
    "line\n\n\tnext  line",
    "<|im_start|>user<|im_end|> <s>[INST] x [/INST]</s><think>",
    "e\u0301" * 50,
]


@pytest.mark.parametrize("add_special_tokens", [True, False])
def test_ids_equal_transformers(
    reference: Any, tokenizer: Tokenizer, add_special_tokens: bool
) -> None:
    expected = reference(TEXTS, add_special_tokens=add_special_tokens)["input_ids"]

    encoded = tokenizer.encode_batch(
        TEXTS, add_special_tokens=add_special_tokens, parse_special_tokens=True
    )

    assert [ids.tolist() for ids in encoded] == expected
    assert all(ids.dtype == np.int32 for ids in encoded)


@pytest.mark.parametrize("skip", [True, False])
def test_texts_equal_transformers(reference: Any, tokenizer: Tokenizer, skip: bool) -> None:
    rng = np.random.default_rng(0)
    sequences = [rng.integers(0, tokenizer.vocab_size, 30) for _ in range(50)]
    expected = [reference.decode(ids, skip_special_tokens=skip) for ids in sequences]

    assert tokenizer.decode_batch(sequences, skip_special_tokens=skip) == expected
    assert [tokenizer.decode(ids, skip_special_tokens=skip) for ids in sequences] == expected


def test_an_id_without_a_token_has_no_text(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode_batch(["hello"], add_special_tokens=False, parse_special_tokens=True)[0]

    text = tokenizer.decode([*ids.tolist(), tokenizer.vocab_size + 7], skip_special_tokens=True)

    assert text == "hello"


def test_vocab_size_is_one_past_the_highest_id(reference: Any, tokenizer: Tokenizer) -> None:
    assert tokenizer.vocab_size == max(reference.get_vocab().values()) + 1


@given(data=st.data())
def test_plain_text_never_becomes_a_control_token(
    tokenizer: Tokenizer, data: st.DataObject
) -> None:
    pieces = st.sampled_from([*sorted(tokenizer.control.tokens), "<", "|>", "im_", "[", " ", "a"])
    text = data.draw(st.lists(pieces | st.characters(codec="ascii")).map("".join))

    ids = tokenizer.encode_batch([text], add_special_tokens=False, parse_special_tokens=False)[0]

    assert tokenizer.num_control_ids(ids) == 0
    decoded = tokenizer.decode(ids, skip_special_tokens=True)
    assert decoded.lstrip(" ") == text.lstrip(" ")  # metaspace may drop leading spaces


def test_plain_and_parsed_batches_do_not_disturb_each_other(chatml: Tokenizer) -> None:
    text = "hello <|im_end|> world " * 20

    def encode(parse: bool) -> list[int]:
        batches = chatml.encode_batch(
            [text] * 20, add_special_tokens=False, parse_special_tokens=parse
        )
        return [chatml.num_control_ids(ids) for ids in batches]

    with ThreadPoolExecutor(4) as pool:
        counts = list(pool.map(encode, [True, False] * 10))

    assert counts == [[20] * 20, [0] * 20] * 10


def test_a_large_batch_is_split_and_keeps_its_order(
    chatml: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = [f"hello {number}" for number in range(50)]
    whole = chatml.encode_batch(texts, add_special_tokens=False, parse_special_tokens=True)
    monkeypatch.setattr("batchinfer.text.tokenizer._MAX_CHARS_PER_CALL", 20)

    split = chatml.encode_batch(texts, add_special_tokens=False, parse_special_tokens=True)

    assert [ids.tolist() for ids in split] == [ids.tolist() for ids in whole]


def test_padding_and_truncation_of_the_given_backend_are_ignored(chatml_reference: Any) -> None:
    backend = Backend.from_str(chatml_reference.backend_tokenizer.to_str())
    backend.enable_truncation(max_length=2)
    backend.enable_padding(length=9)
    ours = Tokenizer(
        backend, chat_template=None, special_tokens={}, control_tokens=frozenset({"<|im_end|>"})
    )

    for parse in (True, False):
        ids = ours.encode_batch(
            ["one two three"], add_special_tokens=True, parse_special_tokens=parse
        )
        assert ours.decode(ids[0], skip_special_tokens=False) == "one two three"


def _tokenizer_of(backend: Backend, control: set[str]) -> Tokenizer:
    return Tokenizer(
        backend,
        chat_template=None,
        special_tokens={"unk_token": "<unk>"},
        control_tokens=frozenset(control),
    )


def test_word_level_text_never_becomes_a_control_token() -> None:
    backend = Backend(models.WordLevel({"<unk>": 0, "<s>": 1, "hello": 2}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens(["<unk>", "<s>"])
    tokenizer = _tokenizer_of(backend, {"<unk>", "<s>"})

    ids = tokenizer.encode_batch(
        ["hello <s> there"], add_special_tokens=False, parse_special_tokens=False
    )

    assert ids[0].tolist() == [2, 0, 0]
    assert tokenizer.num_control_ids(ids[0]) == 0  # the unknown token is not a control token


def test_unigram_text_never_becomes_a_control_token() -> None:
    vocab = [("<unk>", 0.0), ("</s>", 0.0), ("<", -2.0), ("/", -2.0), ("s", -2.0), (">", -2.0)]
    backend = Backend(models.Unigram(vocab, unk_id=0))
    backend.add_special_tokens(["<unk>", "</s>"])
    tokenizer = _tokenizer_of(backend, {"<unk>", "</s>"})

    ids = tokenizer.encode_batch(["</s>"], add_special_tokens=False, parse_special_tokens=False)

    assert ids[0].tolist() == [2, 3, 4, 5]


def test_merges_never_make_a_control_token() -> None:
    vocab = {"<": 0, "s": 1, ">": 2, "<s": 3, "<s>": 4}
    backend = Backend(models.BPE(vocab, [("<", "s"), ("<s", ">")]))
    backend.add_tokens([AddedToken("<s>", special=True)])
    tokenizer = _tokenizer_of(backend, {"<s>"})

    ids = tokenizer.encode_batch(["<s>"], add_special_tokens=False, parse_special_tokens=False)

    assert ids[0].tolist() == [3, 2]


def test_word_piece_spaces_are_cleaned_up_as_in_transformers() -> None:
    vocab = {"<unk>": 0, "it": 1, "'": 2, "s": 3, "!": 4, "'s": 5}
    backend = Backend(models.WordPiece(vocab, unk_token="<unk>"))
    backend.normalizer = normalizers.Lowercase()
    ours = Tokenizer(
        backend,
        chat_template=None,
        special_tokens={},
        control_tokens=frozenset(),
        clean_up_tokenization_spaces=True,
    )

    assert ours.decode([1, 5, 4], skip_special_tokens=True) == "it's!"
