"""``LLM.embed`` and ``LLM.score`` with models that read texts whole."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from transformers import AutoTokenizer

from batchinfer import LLM
from tests.encoders import make_encoder, reference_states

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
