"""Latent attention (MLA) with absorbed projections, over a cache of latents.

DeepSeek-V2 (2024, arXiv:2405.04434, section 2.1) projects the keys and values of all heads from one
latent ``c`` of a token: ``k_h = W_k,h c`` and ``v_h = W_v,h c``. Because ``<q_h, W_k,h c>`` equals
``<W_k,h^T q_h, c>``, the projection can be applied to queries instead of keys, and to attention's
output instead of values. The cache then holds only the latent and the rotary part of the key for
each token. All heads share both.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from batchinfer.engine.kv.kv_shapes import has_latent
from batchinfer.engine.kv.model_config import Config, text_config
from batchinfer.errors import ModelError

_PROJECTION = "kv_b_proj"


class LatentProjection(nn.Module):
    """The projection from latents to keys and values, applied to queries and to attention's output.

    Args:
        linear: the projection, without a bias; a quantized weight is dequantized.
        num_heads: H.
        key_width: elements of a head's key without its rotary part.
    """

    def __init__(self, linear: nn.Linear, num_heads: int, key_width: int) -> None:
        super().__init__()
        weight: Any = linear.weight.detach()
        if type(weight) is not torch.Tensor:
            weight = weight.dequantize()
        self.weight = nn.Parameter(weight, requires_grad=False)  # [H * (Dk + Dv), rank]
        self._num_heads, self._key_width = num_heads, key_width

    def queries(self, query: torch.Tensor) -> torch.Tensor:
        """Return queries projected to the latents' space, [T, H, rank + rotary width].

        Args:
            query: [H, T, key width + rotary width]; the rotary part is already rotated.
        """
        plain, rotary = query[..., : self._key_width], query[..., self._key_width :]
        of_latent = torch.bmm(plain.contiguous(), self._by_head[:, : self._key_width])
        return torch.cat((of_latent, rotary), dim=2).transpose(0, 1)

    def values(self, attended: torch.Tensor) -> torch.Tensor:
        """Project attended latents [T, H, rank] to the heads' outputs, [T, H, value width]."""
        by_head = attended.transpose(0, 1).contiguous()
        # For few tokens on a CPU, torch takes five times as long if the weight is transposed
        # instead of the input.
        return torch.bmm(self._by_head[:, self._key_width :], by_head.mT).permute(2, 0, 1)

    @property
    def _by_head(self) -> torch.Tensor:
        return self.weight.view(self._num_heads, -1, self.weight.shape[1])


def check_latents(config: Config, device_type: str, adapted: Iterable[str]) -> None:
    """Check that a model with this config can cache latents on a device, ``cpu`` or ``cuda``.

    Args:
        adapted: names of the layers that the model's adapters change.

    Raises:
        ModelError: the model has no latents, the device's kernels do not support the latents'
            width, or an adapter changes the projection from the latent.
    """
    reason, rank = None, text_config(config).get("kv_lora_rank", 0)
    if not has_latent(text_config(config)):
        reason = f"models of the family {config.get('model_type')!r} have no latents to cache"
    elif device_type != "cpu" and (rank < 32 or rank & (rank - 1)):
        reason = f"GPU kernels need latents of 32, 64, 128, ... elements; the model has {rank}"
    elif any(name.endswith(f".{_PROJECTION}") for name in adapted):
        reason = f"an adapter changes {_PROJECTION}, and this change would not be applied"
    if reason is not None:
        raise ModelError(
            f"engine.latent_cache is true, but {reason}", hint="set engine.latent_cache: false"
        )


def keep_latents(model: nn.Module) -> int:
    """Make a model's latent attention layers pass latents, instead of expanded keys and values, to
    paged attention. Return the number of these layers."""
    layers: list[Any] = [layer for layer in model.modules() if _is_latent_attention(layer)]
    for layer in layers:
        layer.kv_b_proj = LatentProjection(layer.kv_b_proj, layer.num_heads, layer.qk_nope_head_dim)
        layer.expand_kv = _latent_as_key_and_value
    return len(layers)


def _is_latent_attention(module: nn.Module) -> bool:
    linear = getattr(module, _PROJECTION, None)
    return isinstance(linear, nn.Linear) and linear.bias is None and hasattr(module, "expand_kv")


def _latent_as_key_and_value(
    latent: torch.Tensor,  # [1, 1, T, rank]
    rotary: torch.Tensor,  # [1, 1, T, rotary width]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the key [1, 1, T, rank + rotary width] and the value [1, 1, T, rank] that all heads
    share."""
    return torch.cat((latent, rotary), dim=-1), latent
