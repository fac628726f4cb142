"""Random models with recurrent layers choose the same tokens as in transformers in any setup."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from random import Random
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from batchinfer.config import ModelConfig
from batchinfer.worker.loader import load_model
from tests.faults.violation import ViolationError
from tests.models import RECURRENT_FAMILIES, tiny_model
from tests.parity import CPU, OUTPUT_TOKENS, Setup, prompts, run, tokens_of
from tests.recurrent_models import draw_changes

MOST_S = 300.0
"""Maximum number of seconds that a model may take."""
SETUPS = 3
"""Number of setups in which each model runs."""
_TIMES_AS_FAR = 5.0
"""Largest allowed ratio of our logits' error to that of transformers, both against float64."""
_TIES = {torch.float32: 1e-3, torch.bfloat16: 0.05}
"""Largest difference of logits that counts as a tie, in standard deviations."""
_MOST_WORSE = {torch.float32: 0.0, torch.bfloat16: 0.05}
"""Share of tokens that may differ from greedy ones, because bfloat16 may choose other experts."""
_MOST_DRAWS = 60


def case(number: int, seed: int, folder: Path) -> str:
    """Run rows through one model in several ways, and compare each token with transformers."""
    disable_progress_bar()
    logging.disable(logging.WARNING)
    family = RECURRENT_FAMILIES[number % len(RECURRENT_FAMILIES)]
    random = Random(f"{seed} recurrent {number}")
    dtype = random.choice([torch.float32, torch.float32, torch.bfloat16])
    for old in folder.glob("*.safetensors"):
        old.unlink()
    for _ in range(_MOST_DRAWS):
        changes = draw_changes(family, random)
        try:
            model: Any = tiny_model(family, seed=random.randrange(1000), **changes).to(dtype)
            model(torch.tensor([[1, 2, 3]]), use_cache=False)
            break
        except Exception:  # transformers does not support this config
            continue
    else:
        raise ViolationError(f"{family}: no model could be drawn")
    model.generation_config.eos_token_id = None
    model.save_pretrained(folder)
    reference = Reference(folder, dtype)
    loaded = load_model(ModelConfig(str(folder)), device=CPU)
    for _ in range(SETUPS):
        setup = draw_setup(random)
        completions, _ = run(loaded, setup)
        where = f"{family} {json.dumps(changes)} {dtype} {setup}"
        if errors := {one.error_code for one in completions.values()} - {None}:
            raise ViolationError(f"{where}: rows failed: {errors}")
        tokens = tokens_of(completions)
        if len(tokens) != len(prompts(setup.longer)) * setup.n:
            raise ViolationError(f"{where}: {len(tokens)} outputs")
        worse = [
            reference.num_worse(prompts(setup.longer)[row], output)
            for (row, _), output in tokens.items()
        ]
        if sum(worse) > _MOST_WORSE[dtype] * OUTPUT_TOKENS * len(worse):
            raise ViolationError(f"{where}: tokens that transformers would not choose: {worse}")
    return f"{family}: equal"


def draw_setup(random: Random) -> Setup:
    """Return a random setup for running rows."""
    max_tokens = random.choice([3, 7, 33, 512])
    longer = random.choice([0, 0, 30])
    return Setup(
        block_size=random.choice([4, 8, 16, 32]),
        pool_tokens=random.choice([128 + longer, 256, 4096]),
        num_states=random.choice([4, 6, 64]),
        max_tokens=max_tokens,
        caching=random.random() < 0.7,
        n=random.choice([1, 1, 2, 4]),
        longer=longer,
        backwards=random.random() < 0.5,
        # Chunks must be long enough for a row to advance before it is preempted again.
        preempt_every=random.choice([0, 0, 4]) if max_tokens >= 33 else 0,
        misleading=random.random() < 0.3,
        num_host_blocks=random.choice([0, 0, 50, 5000]),
    )


class Reference:
    """transformers' model in the dtype of the weights, and in float64.

    Args:
        folder: the saved model.
    """

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        self._models: list[Any] = [
            AutoModelForCausalLM.from_pretrained(
                folder, attn_implementation="eager", experts_implementation="eager", dtype=kind
            ).eval()
            for kind in (dtype, torch.float64)
        ]
        self._tie = _TIES[dtype]
        self._known: dict[tuple[int, ...], int] = {}

    @torch.inference_mode()
    def num_worse(self, prompt: list[int], output: list[int]) -> int:
        """Return how many tokens have a logit farther below the best one than rounding explains."""
        ids = (*prompt, *output)
        if ids not in self._known:
            theirs, exact = (
                model(torch.tensor([ids]), use_cache=False)
                .logits[0, -OUTPUT_TOKENS - 1 : -1]
                .double()
                for model in self._models
            )
            taken = exact[torch.arange(len(output)), torch.tensor(output)]
            allowed = _TIMES_AS_FAR * (theirs - exact).abs().max() + self._tie * exact.std()
            self._known[ids] = int((exact.max(dim=1).values - taken > allowed).sum())
        return self._known[ids]
