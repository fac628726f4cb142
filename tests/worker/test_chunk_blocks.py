"""Models with chunked attention, whose chunks must be multiples of the block size."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from batchinfer.config import ModelConfig
from batchinfer.errors import ModelError
from batchinfer.worker.loader import describe_model, load_model
from tests.models import make_checkpoint


def test_only_the_engines_blocks_must_divide_chunks(tmp_path: Path) -> None:
    """A chunk of 24 tokens is not a multiple of the block size of the trial run on loading."""
    name = str(make_checkpoint("llama4_text", tmp_path, attention_chunk_size=24))
    loaded = load_model(ModelConfig(name=name), device=torch.device("cpu"))
    assert loaded.layout(8).chunks == (24, 0, 24)


def test_blocks_that_do_not_fill_a_chunk_are_an_error_of_the_model(tmp_path: Path) -> None:
    described = describe_model(
        ModelConfig(name=str(make_checkpoint("llama4_text", tmp_path))), "cpu"
    )
    with pytest.raises(ModelError, match=r"config\.json: .*chunks of 32 .* block size 48"):
        described.layout(48)
