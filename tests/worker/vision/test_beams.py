"""Beam search over rows with images finds the beams that transformers finds."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForImageTextToText

from batchinfer.config import ModelConfig, SamplingParams
from batchinfer.worker.loader import load_model
from tests.parity import CPU, TIE, Setup, make_engine, run_engine
from tests.vision_models import IMAGE_TOKEN, make_vision_checkpoint
from tests.worker.vision.test_images import Row, embeddings

WIDTH, TOKENS = 3, 6
NUMBERS = (1, 2, 3, 9, 10)
"""Rows with at most one image each: transformers mixes up several images of beams."""


@pytest.mark.long
@pytest.mark.parametrize("family", ["llava", "qwen3_vl"])
@pytest.mark.parametrize("setup", [Setup(), Setup(max_tokens=7, block_size=4)], ids=["plain", "7"])
def test_beams_equal_transformers(family: str, setup: Setup, tmp_path: Path) -> None:
    folder = make_vision_checkpoint(family, tmp_path)
    loaded = load_model(ModelConfig(str(folder)), device=CPU)
    engine, scheduler = make_engine(loaded, setup, embeddings(loaded))
    params = SamplingParams(max_tokens=TOKENS, beam_width=WIDTH, n=WIDTH, ignore_eos=True)
    for number in NUMBERS:
        engine.add_request(Row(family, number).request(number, params))
    completions, _ = run_engine(engine, scheduler, setup)
    assert len(completions) == len(NUMBERS)
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    for number, completion in completions.items():
        row = Row(family, number)
        ids = torch.from_numpy(np.where(row.token_ids < 0, IMAGE_TOKEN, row.token_ids))[None]
        features = row.features()
        if "image_grid_thw" in features:
            features["mm_token_type_ids"] = (ids == IMAGE_TOKEN).int()
        found = model.generate(
            input_ids=ids.long(),
            attention_mask=torch.ones_like(ids),
            **features,
            num_beams=WIDTH,
            num_return_sequences=WIDTH,
            do_sample=False,
            early_stopping=False,
            max_new_tokens=TOKENS,
            eos_token_id=None,
            return_dict_in_generate=True,
            output_scores=True,
        )
        beams = found.sequences[:, ids.shape[1] :].tolist()
        scores = found.sequences_scores.tolist()
        for output, token_ids, score in zip(completion.outputs, beams, scores, strict=True):
            assert output.score == pytest.approx(score, abs=TIE), number
            near = [
                ids for ids, other in zip(beams, scores, strict=True) if abs(other - score) < TIE
            ]
            assert output.token_ids.tolist() in [token_ids, *near], number
