"""Inputs for comparing the sampling kernels with their references."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

KINDS = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 0.8},
    "min-p": {"min_p": 0.05},
    "top-k": {"top_k": 50},
    "top-p": {"top_p": 0.9},
    "both": {"top_k": 50, "top_p": 0.9, "min_p": 0.01, "temperature": 1.3},
    "top-k of one": {"top_k": 1},
    "top-k of most": {"top_k": 4999, "top_p": 0.5},
    "top-k of all": {"top_k": 10**6},
    "nothing of top-p": {"top_p": 0.0},
    "a low temperature": {"temperature": 1e-3, "top_p": 0.99},
    "a high temperature": {"temperature": 1e4, "top_p": 0.7},
}
"""Parameters of distributions; parameters that are not named have no effect."""

SAMPLES_EACH = 3


@dataclass(frozen=True)
class Rows:
    """Rows of normal random logits times `scale`; every `apart`-th logit is -inf."""

    vocab: int
    scale: float = 3.0
    apart: int = 7
    padding: int = 0
    rounded: bool = False

    def logits(self, count: int, dtype: torch.dtype, device: str = "cpu") -> torch.Tensor:
        generator = torch.Generator().manual_seed(self.vocab)
        logits = self.scale * torch.randn(count, self.vocab + self.padding, generator=generator)
        if self.rounded:
            logits = logits.round()  # many equally likely tokens
        logits[:, 1 :: self.apart] = -torch.inf
        logits[:, self.vocab :] = torch.nan
        return logits.to(device, dtype)[:, : self.vocab]


def build_sample(
    logits: torch.Tensor, kinds: list[dict[str, float]], device: str = "cpu"
) -> dict[str, Any]:
    """Return the arguments of `sample`: one distribution per kind, assigned to the rows in turn.

    Samples are in reverse order. Outputs hold invalid values.
    """
    count, samples = len(kinds), len(kinds) * SAMPLES_EACH
    generator = torch.Generator().manual_seed(1)

    def column(name: str, default: float, dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor([kind.get(name, default) for kind in kinds], dtype=dtype)

    def words(size: int) -> torch.Tensor:
        return torch.randint(-(2**63), 2**63 - 1, (size,), generator=generator)

    tensors = {
        "rows": torch.arange(count, dtype=torch.int32) % max(len(logits), 1),
        "temperature": column("temperature", 1.0, torch.float32),
        "min_p": column("min_p", 0.0, torch.float32),
        "top_p": column("top_p", 1.0, torch.float32),
        "top_k": column("top_k", 0, torch.int32),
        "starts": torch.arange(count + 1, dtype=torch.int32) * SAMPLES_EACH,
        "samples": torch.arange(samples, dtype=torch.int32).flip(0),
        "seed": words(samples),
        "stream": words(samples),
        "sample_index": torch.arange(samples, dtype=torch.int32),
        "position": torch.arange(samples, dtype=torch.int32) * 1000,
        "maximum": torch.full((len(logits),), torch.nan),
        "max_logprob": torch.full((len(logits),), torch.nan),
        "token_ids": torch.full((samples,), -7),
        "logprobs": torch.full((samples,), torch.nan),
        "failures": torch.full((samples,), -7, dtype=torch.int32),
    }
    return {"logits": logits} | {name: tensor.to(device) for name, tensor in tensors.items()}


def build_edits(
    logits: torch.Tensor, lists: list[dict[str, Any]], device: str = "cpu"
) -> dict[str, Any]:
    """Return the arguments of `apply_penalties`: one distribution per list of edits."""
    tensors: dict[str, torch.Tensor] = {
        "rows": torch.arange(len(lists), dtype=torch.int32) % len(logits)
    }
    for name in ("bias", "allowed", "prompt", "output"):
        each = [list(edits.get(name, ())) for edits in lists]
        starts = torch.tensor([0, *map(len, each)]).cumsum(0)
        tensors[f"{name}_starts"] = starts.int()
        tensors[f"{name}_ids"] = torch.tensor([i for ids in each for i in ids], dtype=torch.int32)
    values = [value for edits in lists for value in edits.get("bias", {}).values()]
    tensors["bias_values"] = torch.tensor(values, dtype=torch.float32)
    for name, default in (("repetition", 1.0), ("presence", 0.0), ("frequency", 0.0)):
        tensors[name] = torch.tensor([float(edits.get(name, default)) for edits in lists])
    return {"logits": logits} | {name: tensor.to(device) for name, tensor in tensors.items()}
