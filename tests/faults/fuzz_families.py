"""Random models of many families give the same logits as transformers, or are refused."""

from __future__ import annotations

import json
import logging
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig
from transformers.utils.logging import disable_progress_bar

from batchinfer.config import ModelConfig
from batchinfer.engine.kv.layout import KVLayout
from batchinfer.errors import ModelError
from batchinfer.worker.attention.attention import make_backend
from batchinfer.worker.forward import forward
from batchinfer.worker.kv_cache import KVCache
from batchinfer.worker.loader import LoadedModel, load_model
from batchinfer.worker.self_test import probe_step
from tests.families import FAMILIES, draw_config
from tests.faults.violation import ViolationError

EQUAL = "equal"
"""The result of a case whose logits equal those of transformers."""
MOST_S = 30.0
"""Maximum number of seconds that a model may take."""
_LENGTH = 70
_BLOCK_SIZE = 16
_TIMES_AS_FAR = 5.0
_MOST_DRAWS = 60
_TOLERANCE = 2e-3
"""Largest error of a row of float32 logits."""


def case(number: int, seed: int, folder: Path) -> str:
    """Compare a model's logits, in chunks and decodes, with those of transformers."""
    disable_progress_bar()
    logging.disable(logging.WARNING)
    family = FAMILIES[number % len(FAMILIES)]
    random = Random(f"{seed} family {number}")
    tokens = [random.randrange(3, 190) for _ in range(_LENGTH)]
    for _ in range(_MOST_DRAWS):
        try:
            config = draw_config(family, random)
            theirs = _theirs(config, random.randrange(1000), tokens, folder)
            break
        except Exception:  # transformers does not support this config
            continue
    else:
        return f"{family}: no model drawn"
    try:
        loaded = load_model(ModelConfig(str(folder)), device=torch.device("cpu"))
    except ModelError as error:
        if f"{folder}/config.json: " not in str(error) or "cannot be run: " not in str(error):
            raise ViolationError(f"{family}: {error}") from error
        return f"{family}: refused"
    ours = _ours(loaded, tokens, random)
    if (off := _off(ours, theirs)) > _TOLERANCE:
        exact = _exact(tokens, folder)  # with some weights, rounding alone changes the logits
        if _off(ours, exact) > _TIMES_AS_FAR * _off(theirs, exact):
            drawn = json.dumps(config.to_diff_dict())
            raise ViolationError(f"{family}: logits are off by {off:.2g}: {drawn}")
    return f"{family}: {EQUAL}"


def _theirs(config: PreTrainedConfig, seed: int, tokens: list[int], folder: Path) -> torch.Tensor:
    """Return logits [T, vocabulary] of a random model in transformers; save it to ``folder``."""
    torch.manual_seed(seed)
    model: Any = AutoModelForCausalLM.from_config(
        config, attn_implementation="eager", dtype=torch.float32
    )
    for name, parameter in model.named_parameters():
        if name.endswith(("sinks", "bias")):
            torch.nn.init.normal_(parameter, std=0.5)
    model.eval()
    for old in folder.glob("*.safetensors"):
        old.unlink()
    model.generation_config.eos_token_id = None
    model.save_pretrained(folder)
    with torch.inference_mode():
        logits: torch.Tensor = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]
    if not logits.isfinite().all():
        raise ValueError("the weights overflow")
    return logits


def _exact(tokens: list[int], folder: Path) -> torch.Tensor:
    """Return logits [T, vocabulary] of the saved model in float64."""
    model = AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", experts_implementation="eager", dtype=torch.float64
    )
    with torch.inference_mode():
        logits: torch.Tensor = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]
    return logits


def _ours(loaded: LoadedModel, tokens: list[int], random: Random) -> torch.Tensor:
    """Return logits [T, vocabulary] from paged attention, in chunks of random lengths."""
    layout = KVLayout.from_config(loaded.config, block_size=_BLOCK_SIZE, dtype=loaded.dtype)
    cache = KVCache(layout, layout.blocks_for(_LENGTH), torch.device("cpu"), torch.float32)
    backend = make_backend(cache, loaded.kernels.kernel)
    ends = sorted({0, _LENGTH, *(random.randrange(_LENGTH) for _ in range(random.randrange(6)))})
    steps = (probe_step(tokens[:stop], layout, start=start) for start, stop in pairwise(ends))
    return torch.cat([forward(loaded.model, cache, backend, step) for step in steps])


def _off(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float(((ours - theirs).norm(dim=-1) / theirs.norm(dim=-1)).max())
