"""Draws tiny random models of families with recurrent layers."""

from __future__ import annotations

from random import Random
from typing import Any

from tests.models import RECURRENT_FAMILIES

_SHORT_CONV = ("lfm2", "lfm2_moe", "lfm3")
"""Families with short convolutions."""
_WITHOUT_ATTENTION = ("falcon_mamba", "mamba", "mamba2")
"""Families without attention layers."""
_MAMBA2_IN_HIDDEN = ("bamba", "granitemoehybrid", "zamba2")
"""Families in which the total width of the Mamba-2 heads must be a multiple of the hidden size."""


def draw_changes(family: str, random: Random) -> dict[str, Any]:
    """Return random sizes and layers of a family, as changes for ``tiny_config``.

    transformers may refuse them.
    """
    assert family in RECURRENT_FAMILIES
    kv_heads, group = random.choice([1, 2, 3]), random.choice([1, 2, 3])
    heads, width = kv_heads * group, random.choice([4, 8, 12])
    changes: dict[str, Any] = {
        "num_attention_heads": heads,
        "num_key_value_heads": heads if family in ("kimi_linear", "zamba2") else kv_heads,
        "head_dim": width,
        "hidden_size": heads * width if family in _SHORT_CONV else random.choice([24, 32, 48]),
        "intermediate_size": random.choice([16, 33, 48]),
        "initializer_range": 0.2,
        "rms_norm_eps": random.choice([1e-6, 1e-3]),
        "tie_word_embeddings": random.random() < 0.3,
        **_experts(family, random),
    }
    if family in ("bamba", "granitemoehybrid", "lfm2", "lfm2_moe", "zamba2"):
        changes["hidden_size"] = heads * max(width, 8)  # a multiple of the number of heads
    return changes | _recurrence(family, changes["hidden_size"], random) | _layers(family, random)


def _experts(family: str, random: Random) -> dict[str, Any]:
    if family not in ("kimi_linear", "lfm2_moe", "qwen3_5_moe_text", "qwen3_next", "nemotron_h"):
        return {"num_local_experts": random.choice([0, 4])} if family == "granitemoehybrid" else {}
    number = random.choice([2, 4, 6])
    per_token = random.randint(1, min(3, number))
    return {
        **dict.fromkeys(("num_experts", "n_routed_experts"), number),
        **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token"), per_token),
        "moe_intermediate_size": random.choice([8, 16, 20]),
        "moe_shared_expert_intermediate_size": 16,
        "norm_topk_prob": random.random() < 0.5,
    }


def _recurrence(family: str, hidden: int, random: Random) -> dict[str, Any]:
    conv, width = random.choice([2, 3, 4, 5]), random.choice([4, 7, 8, 16, 24])
    heads = random.choice([1, 2, 3, 4])
    if family in _SHORT_CONV:
        return {"conv_L_cache": conv, "conv_bias": random.random() < 0.5}
    if family in ("falcon_mamba", "mamba"):
        return {
            "conv_kernel": conv,
            "state_size": width,
            "time_step_rank": random.choice([1, 3, 8]),
            "intermediate_size": random.choice([24, 33, 64]),
            "use_bias": random.random() < 0.5,
            "use_conv_bias": random.random() < 0.5,
        }
    if family == "jamba":
        return {
            "mamba_d_conv": conv,
            "mamba_d_state": width,
            "mamba_dt_rank": random.choice([1, 3, 8]),
            "mamba_expand": random.choice([1, 2]),
            "mamba_conv_bias": random.random() < 0.5,
            "mamba_proj_bias": random.random() < 0.5,
        }
    if family == "kimi_linear":
        return {"linear_num_heads": heads, "linear_head_dim": width, "linear_conv_kernel_dim": conv}
    if family in ("olmo_hybrid", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next"):
        per_key = 1 if family == "olmo_hybrid" else random.choice([1, 2, 3])
        return {
            "linear_num_key_heads": heads,
            "linear_num_value_heads": heads * per_key,
            "linear_key_head_dim": width,
            "linear_value_head_dim": random.choice([8, 16, 20, 32, 40]),
            "linear_conv_kernel_dim": conv,
        }
    groups, head_width = random.choice([1, 2]), random.choice([8, 16, 20, 24])
    heads = groups * random.choice([1, 2, 3])
    if family in (*_MAMBA2_IN_HIDDEN, "mamba2"):
        groups, head_width = random.choice([1, 2]), random.choice([4, 8, 16])
        heads = 2 * hidden // head_width
    sizes = (heads, head_width, groups, width, conv)
    names = {
        "mamba2": ("num_heads", "head_dim", "n_groups", "state_size", "conv_kernel"),
        "nemotron_h": (
            *("mamba_num_heads", "mamba_head_dim", "n_groups", "ssm_state_size", "conv_kernel"),
        ),
        "zamba2": (
            *("n_mamba_heads", "mamba_headdim", "mamba_ngroups", "mamba_d_state", "mamba_d_conv"),
        ),
    }
    keys = (*("mamba_n_heads", "mamba_d_head", "mamba_n_groups", "mamba_d_state", "mamba_d_conv"),)
    changes: dict[str, Any] = dict(zip(names.get(family, keys), sizes, strict=True))
    if family == "falcon_h1":
        changes |= {"mamba_d_ssm": heads * head_width, "mamba_rms_norm": random.random() < 0.5}
        changes |= {"mamba_norm_before_gate": random.random() < 0.5}
    return changes | {
        "mamba_conv_bias": random.random() < 0.5,
        "use_conv_bias": random.random() < 0.5,
    }


def _layers(family: str, random: Random) -> dict[str, Any]:
    """Return kinds of layers in a random order, with each kind at least once, or with recurrent
    layers only."""
    number = random.choice([2, 3, 4, 5])
    changes: dict[str, Any] = {"num_hidden_layers": number}
    if family in ("falcon_h1", *_WITHOUT_ATTENTION):
        return changes
    if family == "jamba":
        period = random.choice([1, 2, 3])
        offset = random.randrange(period)
        return changes | {"attn_layer_period": period, "attn_layer_offset": offset}
    recurrent = "conv" if family in _SHORT_CONV else "linear_attention"
    attending = "hybrid" if family == "zamba2" else "full_attention"
    if family != "zamba2" and random.random() < 0.2:
        attending = recurrent
    others = random.choices([recurrent, recurrent, attending], k=number - 2)
    if family == "lfm3":
        others += random.choices(["sliding_attention", attending], k=1)
        changes["num_hidden_layers"] = number + 1
    kinds = [recurrent, attending, *others]
    if family == "nemotron_h":
        kinds += random.choices(["mlp", "moe"], k=2)
        changes["num_hidden_layers"] = len(kinds)
    random.shuffle(kinds)
    if family == "bamba":
        indices = [at for at, kind in enumerate(kinds) if kind == "full_attention"]
        return changes | {"attn_layer_indices": indices}
    return changes | {
        "layers_block_type" if family in ("nemotron_h", "zamba2") else "layer_types": kinds
    }
