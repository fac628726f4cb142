"""Reads which layers have recurrent state, and the shape of that state, from a model's config."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from batchinfer.engine.kv.model_config import Config


@dataclass(frozen=True, slots=True)
class RecurrentShape:
    """Shape of a layer's recurrent state: a matrix for each head, and the last inputs of a causal
    convolution."""

    num_heads: int
    """Heads with a matrix; 0: the layer's state consists only of the inputs of its convolution."""
    key_width: int
    """Rows of a head's matrix; 1 without heads."""
    value_width: int
    """Columns of a head's matrix, which do not depend on each other; 1 without heads."""
    num_channels: int
    conv_width: int
    """Number of tokens that the convolution sees, including the current token."""
    num_projected: int
    """Outputs of the input projections plus inputs of the output projection."""
    has_row_decays: bool = False
    """True if each row of a matrix has its own decay."""

    @property
    def num_values(self) -> int:
        """Columns of the matrices of all heads."""
        return self.num_heads * self.value_width


_ATTENDING = frozenset({"attention", "full_attention", "hybrid", "sliding_attention"})
_RECURRENT = frozenset({"conv", "hybrid", "linear_attention", "mamba"})


def is_recurrent(text: Config) -> bool:
    """Return True if a language model has recurrent layers that batchinfer supports."""
    return bool(recurrent_layers(text))


def recurrent_layers(text: Config) -> tuple[int, ...]:
    """Return the numbers of a language model's recurrent layers, if batchinfer supports them."""
    if text.get("model_type") not in _SHAPES:
        return ()
    return tuple(at for at, kind in enumerate(_layer_types(text)) if kind in _RECURRENT)


def layers_without_kv(text: Config) -> tuple[int, ...]:
    """Return the numbers of the layers of a recurrent model that do not attend."""
    if not is_recurrent(text):
        return ()
    return tuple(at for at, kind in enumerate(_layer_types(text)) if kind not in _ATTENDING)


def recurrent_shape(text: Config) -> RecurrentShape:
    """Return the shape of the state of a model's recurrent layers.

    Raises:
        ValueError: a size in the config is invalid.
    """
    return _SHAPES[text["model_type"]](text)


def _layer_types(text: Config) -> list[str]:
    """Return the kind of each layer. Not all families list the kinds in ``layer_types``."""
    types = text.get("layer_types") or text.get("layers_block_type")
    if types:
        return list(types)
    num_layers = text.get("num_hidden_layers") or 0
    if text["model_type"] == "falcon_h1":
        return ["hybrid"] * num_layers
    if text["model_type"] in ("falcon_mamba", "mamba", "mamba2"):
        return ["mamba"] * num_layers
    if text["model_type"] == "jamba":
        period, offset = _number(text, "attn_layer_period"), text["attn_layer_offset"]
        return ["attention" if at % period == offset else "mamba" for at in range(num_layers)]
    if text["model_type"] == "bamba":
        attending = set(text.get("attn_layer_indices") or ())
        return ["attention" if at in attending else "mamba" for at in range(num_layers)]
    return []


def _gated_delta(text: Config) -> RecurrentShape:
    """Return the shape for Gated DeltaNet (Yang et al. 2024, https://arxiv.org/abs/2412.06464)."""
    key_heads, value_heads = (
        _number(text, f"linear_num_{part}_heads") for part in ("key", "value")
    )
    key_width, value_width = (_number(text, f"linear_{part}_head_dim") for part in ("key", "value"))
    if value_heads % key_heads:
        raise ValueError(
            f"linear_num_value_heads is {value_heads}; it must be a multiple of "
            f"linear_num_key_heads, which is {key_heads}"
        )
    values = value_heads * value_width
    channels = 2 * key_heads * key_width + values
    return RecurrentShape(
        num_heads=value_heads,
        key_width=key_width,
        value_width=value_width,
        num_channels=channels,
        conv_width=_number(text, "linear_conv_kernel_dim", least=2),
        num_projected=channels + 2 * values + 2 * value_heads,
    )


def _kimi_delta(text: Config) -> RecurrentShape:
    """Return the shape for Kimi Delta Attention (Kimi Team 2025,
    https://arxiv.org/abs/2510.26692)."""
    num_heads, width = _number(text, "linear_num_heads"), _number(text, "linear_head_dim")
    values = num_heads * width
    second = 2 * width * values // _number(text, "hidden_size")  # second matrices of gate and decay
    return RecurrentShape(
        num_heads=num_heads,
        key_width=width,
        value_width=width,
        num_channels=3 * values,
        conv_width=_number(text, "linear_conv_kernel_dim", least=2),
        num_projected=4 * values + 2 * width + num_heads + second,
        has_row_decays=True,
    )


def _mamba1(
    expand: str, state: str, conv: str, rank: str, channels_key: str = ""
) -> Callable[[Config], RecurrentShape]:
    """Return a function that reads the shape for Mamba-1 from the given config keys.

    See Gu and Dao 2023, https://arxiv.org/abs/2312.00752. The layer has one head. A column of its
    matrix is the state of a channel. If the config has ``channels_key``, its value is the
    number of channels. Without ``channels_key``, the number of channels is ``expand`` times the
    hidden size.
    """

    def shape(text: Config) -> RecurrentShape:
        hidden, state_size = _number(text, "hidden_size"), _number(text, state)
        channels = int(text.get(channels_key) or text[expand] * hidden)
        step_rank = -(-hidden // 16) if text[rank] == "auto" else _number(text, rank)
        within = channels * 2 * (step_rank + state_size)  # parameters of the inner projections
        return RecurrentShape(
            num_heads=1,
            key_width=state_size,
            value_width=channels,
            num_channels=channels,
            conv_width=_number(text, conv, least=2),
            num_projected=3 * channels + within // hidden,
        )

    return shape


def _mamba2(
    heads: str, width: str, groups: str, state: str, conv: str
) -> Callable[[Config], RecurrentShape]:
    """Return a function that reads the shape for Mamba-2 (Dao and Gu 2024,
    https://arxiv.org/abs/2405.21060) from the given config keys."""

    def shape(text: Config) -> RecurrentShape:
        num_heads, head_width, num_groups, state_size = (
            _number(text, key) for key in (heads, width, groups, state)
        )
        if num_heads % num_groups:
            raise ValueError(
                f"{heads} is {num_heads}; it must be a multiple of {groups}, which is {num_groups}"
            )
        values = num_heads * head_width
        channels = values + 2 * num_groups * state_size
        return RecurrentShape(
            num_heads=num_heads,
            key_width=state_size,
            value_width=head_width,
            num_channels=channels,
            conv_width=_number(text, conv, least=2),
            num_projected=channels + 2 * values + num_heads,
        )

    return shape


def _short_conv(text: Config) -> RecurrentShape:
    """Return the shape for LFM2's short convolution: two gates around it, and no matrix."""
    channels = _number(text, "hidden_size")
    return RecurrentShape(
        num_heads=0,
        key_width=1,
        value_width=1,
        num_channels=channels,
        conv_width=_number(text, "conv_L_cache", least=2),
        num_projected=4 * channels,
    )


def _number(text: Config, key: str, least: int = 1) -> int:
    number = int(text[key])
    if number < least:
        raise ValueError(f"{key} is {number}; it must be {least} or more")
    return number


_MAMBA2 = _mamba2(
    "mamba_n_heads", "mamba_d_head", "mamba_n_groups", "mamba_d_state", "mamba_d_conv"
)
_MAMBA1 = _mamba1("expand", "state_size", "conv_kernel", "time_step_rank", "intermediate_size")
_SHAPES: dict[str, Callable[[Config], RecurrentShape]] = {
    "bamba": _MAMBA2,
    "falcon_h1": _MAMBA2,
    "falcon_mamba": _MAMBA1,
    "granitemoehybrid": _MAMBA2,
    "jamba": _mamba1("mamba_expand", "mamba_d_state", "mamba_d_conv", "mamba_dt_rank"),
    "kimi_linear": _kimi_delta,
    "lfm2": _short_conv,
    "lfm2_moe": _short_conv,
    "lfm3": _short_conv,
    "mamba": _MAMBA1,
    "mamba2": _mamba2("num_heads", "head_dim", "n_groups", "state_size", "conv_kernel"),
    "nemotron_h": _mamba2(
        "mamba_num_heads", "mamba_head_dim", "n_groups", "ssm_state_size", "conv_kernel"
    ),
    "olmo_hybrid": _gated_delta,
    "qwen3_5": _gated_delta,
    "qwen3_5_moe": _gated_delta,
    "qwen3_5_moe_text": _gated_delta,
    "qwen3_5_text": _gated_delta,
    "qwen3_next": _gated_delta,
    "zamba2": _mamba2(
        "n_mamba_heads", "mamba_headdim", "mamba_ngroups", "mamba_d_state", "mamba_d_conv"
    ),
}
"""Functions that read the shape from a config, keyed by ``model_type``."""
