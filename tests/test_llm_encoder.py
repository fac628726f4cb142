"""``LLM.embed`` and ``LLM.score`` with models that read texts whole."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

from batchinfer import LLM, PoolingParams
from tests.encoders import encoder_config, make_encoder, reference_states, save_tokenizer

TEXTS = ["a b c", "of the and", "z"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_encoder(tmp_path_factory.mktemp("encoder"), "bert", max_length=20)


def test_texts_are_embedded_and_compared(folder: Path) -> None:
    llm = LLM(str(folder), dtype="float32", device="cpu", runner="pooling")
    token_ids = AutoTokenizer.from_pretrained(folder)(TEXTS)["input_ids"]
    vectors = [states.mean(0) for states in reference_states(folder, token_ids)]
    vectors = [vector / np.linalg.norm(vector) for vector in vectors]
    outputs = llm.embed(TEXTS, use_tqdm=False)
    assert [output.prompt_token_ids for output in outputs] == token_ids
    for output, vector in zip(outputs, vectors, strict=True):
        np.testing.assert_allclose(output.outputs.embedding, vector, atol=1e-5)
    scores = llm.score(TEXTS[0], TEXTS[1:], use_tqdm=False)
    expected = [float(vectors[0] @ other) for other in vectors[1:]]
    assert [score.outputs.score for score in scores] == pytest.approx(expected, abs=1e-5)
    with pytest.raises(ValueError, match="has 27 tokens, over 20"):
        llm.embed("a " * 25, use_tqdm=False)


@pytest.mark.parametrize("most", [5, -1])
def test_texts_are_cut_as_the_tokenizer_cuts_them(folder: Path, most: int) -> None:
    llm = LLM(str(folder), dtype="float32", device="cpu")
    params = PoolingParams(truncate_prompt_tokens=most)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    texts = ["a b c d e f g h", "a " * 25, "x"]
    longest = 20 if most == -1 else most
    cut = tokenizer(texts, truncation=True, max_length=longest)["input_ids"]
    outputs = llm.embed(texts, pooling_params=params, use_tqdm=False)
    assert [output.prompt_token_ids for output in outputs] == cut
    with pytest.raises(ValueError, match="is 21, more than max_model_len, which is 20"):
        llm.embed("a", pooling_params=PoolingParams(truncate_prompt_tokens=21), use_tqdm=False)


def test_pairs_are_cut_as_the_tokenizer_cuts_them(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = AutoConfig.for_model("bert", num_labels=1, **encoder_config("bert"))
    model = AutoModelForSequenceClassification.from_config(config)
    torch.nn.init.normal_(model.bert.embeddings.token_type_embeddings.weight)
    model.save_pretrained(tmp_path)
    save_tokenizer(tmp_path, 20)
    tokenizer, pair = AutoTokenizer.from_pretrained(tmp_path), ("a b", "c d e f g h")
    cut = tokenizer(
        *pair,
        **{"truncation": "longest_first", "max_length": 7, "return_tensors": "pt"},
    )
    with torch.no_grad():
        expected = model.eval()(**cut).logits.sigmoid()[0, 0].item()
    llm, params = LLM(str(tmp_path), device="cpu"), PoolingParams(truncate_prompt_tokens=7)
    (output,) = llm.score(*pair, pooling_params=params, use_tqdm=False)
    assert output.prompt_token_ids == cut["input_ids"][0].tolist()
    assert output.outputs.score == pytest.approx(expected, abs=1e-5)
