"""The tasks that ``docs/models.md`` lists for models without an output head work."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModel, AutoModelForSequenceClassification, PreTrainedConfig

from batchinfer import LLM
from tests.docs.pages import ROOT
from tests.families import draw_config
from tests.models import DECODER_FAMILIES, FAMILIES, RECURRENT_FAMILIES, tiny_config

_LINES = (ROOT / "docs" / "models.md").read_text().splitlines()
_ROWS = [[cell.strip() for cell in line.split("|")[1:-1]] for line in _LINES if line[:2] == "| "]
CLAIMED = {row[1].strip("`"): row[3].replace("`", "") for row in _ROWS if len(row) == 4}
"""The tasks of each family, read from the page."""
_QUICK = ("gpt2", "llama")
_IDS = [5, 9, 3, 77, 20, 9, 41]


def config_of(family: str, **labels: Any) -> PreTrainedConfig:
    if family in (*FAMILIES, *DECODER_FAMILIES, *RECURRENT_FAMILIES):
        return tiny_config(family, **labels)
    for seed in range(30):
        try:
            config = draw_config(family, Random(seed))
            AutoModel.from_config(config)(torch.tensor([_IDS]))
        except Exception:  # the family may refuse the random config
            continue
        config.num_labels = 3
        return config
    raise AssertionError(f"no config of {family} could be drawn")


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(one, marks=[] if one in _QUICK else pytest.mark.long)
        for one in CLAIMED
        if "embed" in CLAIMED[one]
    ],
)
def test_models_without_head_run_the_documented_tasks(tmp_path: Path, family: str) -> None:
    torch.manual_seed(0)
    config, ids = config_of(family, num_labels=3), torch.tensor([_IDS])
    make: Any = AutoModelForSequenceClassification if "classify" in CLAIMED[family] else AutoModel
    model = make.from_config(config, dtype=torch.float32).eval()
    model.save_pretrained(tmp_path)
    keys: dict[str, Any] = {"dtype": "float32", "device": "cpu", "num_kv_blocks": 64}
    llm = LLM(tmp_path, runner="pooling", skip_tokenizer_init=True, **keys)
    with torch.no_grad():
        state = model.base_model(ids).last_hidden_state[0, -1].numpy()
    (embedded,) = llm.embed([_IDS], use_tqdm=False)
    assert np.dot(embedded.outputs.embedding, state / np.linalg.norm(state)) > 0.99999
    if "classify" in CLAIMED[family]:
        with torch.no_grad():
            expected = model(ids).logits[0].softmax(-1).tolist()
        (labeled,) = llm.classify([_IDS], use_tqdm=False)
        assert labeled.outputs.probs == pytest.approx(expected, abs=1e-4)
