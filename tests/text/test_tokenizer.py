"""Ids and texts are transformers' own; control tokens in text stay text where asked."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
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


@settings(deadline=None, max_examples=50)
@given(data=st.data())
def test_plain_text_never_becomes_a_control_token(tokenizer: Tokenizer, data: st.DataObject) -> None:
    pieces = st.sampled_from([*sorted(tokenizer.control.tokens), "<", "|>", "im_", "[", " ", "a", "é"])
    text = data.draw(st.lists(pieces | st.text(max_size=3)).map("".join))

    ids = tokenizer.encode_batch([text], add_special_tokens=False, parse_special_tokens=False)[0]

    assert tokenizer.num_control_ids(ids) == 0
    expected = tokenizer.encode_batch(
        [text.translate(str.maketrans("<[|]>", "(((((")) if False else text],
        add_special_tokens=False,
        parse_special_tokens=False,
    )[0]
    assert ids.tolist() == expected.tolist()
