"""Adds features from several depths of the vision tower to the outputs of decoder layers.

Source: DeepStack (Meng et al. 2024, https://arxiv.org/abs/2406.04334), as in transformers'
Qwen3-VL.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import nn


@contextmanager
def deepstack(
    layers: Iterable[nn.Module], indices: torch.Tensor, added: torch.Tensor
) -> Iterator[None]:
    """Change the outputs [1, T, hidden] of the first D layers inside the ``with`` block.

    Args:
        layers: the model's decoder layers.
        indices: indices [I] of the image tokens among the packed tokens.
        added: features [D, I, hidden]; ``added[d]`` is added to the image tokens' hidden states
            after layer d.
    """
    with ExitStack() as hooks:
        for layer, features in zip(layers, added, strict=False):
            hook = layer.register_forward_hook(
                lambda module, inputs, output, features=features: output.index_add_(
                    1, indices, features[None]
                )
            )
            hooks.callback(hook.remove)
        yield
