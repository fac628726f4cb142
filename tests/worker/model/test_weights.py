from __future__ import annotations

from typing import Any

import pytest
import torch

from batchinfer.errors import ModelError
from batchinfer.worker.model.weights import fix_longrope
from tests.models import tiny_model

LONGROPE: dict[str, Any] = {
    "original_max_position_embeddings": 64,
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 4,
        "long_factor": [4.0] * 4,
        "original_max_position_embeddings": 64,
    },
}


def logits(model: torch.nn.Module, positions: list[int]) -> torch.Tensor:
    ids = torch.arange(5, 5 + len(positions))[None]
    with torch.inference_mode():
        return model(input_ids=ids, position_ids=torch.tensor([positions]), use_cache=False).logits


@pytest.mark.parametrize(("max_model_len", "reference_length"), [(64, 8), (200, 200)])
def test_longrope_frequencies_follow_max_model_len(
    max_model_len: int, reference_length: int
) -> None:
    short, long = [0, 1, 2], [0, 1, reference_length - 1]
    reference = tiny_model("phi3", **LONGROPE)
    expected = logits(reference, long)
    model = tiny_model("phi3", **LONGROPE)
    fix_longrope(model, max_model_len)
    logits(model, short)
    torch.testing.assert_close(logits(model, long), expected)


def test_longrope_positions_do_not_depend_on_the_batch() -> None:
    model = tiny_model("phi3", **LONGROPE)
    rotary = model.model.rotary_emb
    like = torch.zeros(1)

    def alone_and_together() -> tuple[torch.Tensor, torch.Tensor]:
        alone, _ = rotary(like, position_ids=torch.tensor([[3]]))
        together, _ = rotary(like, position_ids=torch.tensor([[3, 150]]))
        return alone, together[:, :1]

    alone, together = alone_and_together()
    assert not torch.equal(alone, together)
    fix_longrope(model, 512)
    alone, together = alone_and_together()
    assert torch.equal(alone, together)


def test_rotary_classes_that_cannot_be_fixed_are_refused() -> None:
    class Chooser(torch.nn.Module):
        rope_type = "longrope"

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("inv_freq", torch.ones(1))

        def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor]:
            return (position_ids * position_ids.max(),)

    with pytest.raises(ModelError, match=r"Chooser.*cannot make it use the same"):
        fix_longrope(torch.nn.Sequential(Chooser()), 100)


def test_other_models_are_left_alone() -> None:
    model = tiny_model("llama")
    before = logits(model, [0, 1, 2])
    fix_longrope(model, 100)
    assert torch.equal(logits(model, [0, 1, 2]), before)
