"""Computes the patch embedding of vision towers as a linear layer.

Most towers embed patches with a convolution whose stride equals its kernel size, so patches do not
overlap. Such a convolution equals a linear layer over the numbers of a patch. The linear kernels
are faster: on a CPU, torch's ``Conv3d`` in bfloat16 took 5 % of the time of a Qwen3-VL tower.
"""

from __future__ import annotations

import math
from typing import TypeGuard

import torch
from torch import nn


class PatchLinear(nn.Module):
    """A convolution for which ``has_separate_patches`` is true, computed as a linear layer."""

    def __init__(self, convolution: nn.Conv2d | nn.Conv3d) -> None:
        super().__init__()
        weight = convolution.weight.detach()
        self.patch_size = convolution.kernel_size
        self.linear = nn.Linear(math.prod(weight.shape[1:]), len(weight), bias=False, device="meta")
        self.linear.weight = nn.Parameter(weight.flatten(1), requires_grad=False)
        if convolution.bias is not None:
            self.linear.bias = nn.Parameter(convolution.bias.detach(), requires_grad=False)

    @property
    def weight(self) -> torch.Tensor:
        """The layer's weight, whose dtype and device transformers reads."""
        return self.linear.weight

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return the embeddings [B, out_channels, *patches of each dimension] of images [B,
        in_channels, *sizes]. Pixels after the last whole patch are ignored."""
        batch, channels, *sizes = images.shape
        dims = range(len(sizes))
        split: list[int] = []
        for dim, patch in zip(dims, self.patch_size, strict=True):
            count = sizes[dim] // patch
            images = images.narrow(2 + dim, 0, count * patch)
            split += [count, patch]
        patches = images.reshape(batch, channels, *split)
        counts, inside = [2 + 2 * dim for dim in dims], [3 + 2 * dim for dim in dims]
        patches = patches.permute(0, *counts, 1, *inside).flatten(1 + len(dims))
        embeddings: torch.Tensor = self.linear(patches)
        return embeddings.movedim(-1, 1)


def has_separate_patches(module: nn.Module) -> TypeGuard[nn.Conv2d | nn.Conv3d]:
    """Return True for a convolution whose patches touch, but do not overlap."""
    return (
        isinstance(module, nn.Conv2d | nn.Conv3d)
        and type(module).forward in (nn.Conv2d.forward, nn.Conv3d.forward)
        and module.kernel_size == module.stride
        and module.groups == 1
        and set(module.dilation) == {1}
        and (module.padding == "valid" or set(module.padding) == {0})
    )


def replace_patch_convolutions(model: nn.Module) -> int:
    """Return the number of replaced convolutions."""
    count = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if has_separate_patches(child):
                setattr(parent, name, PatchLinear(child))
                count += 1
    return count
