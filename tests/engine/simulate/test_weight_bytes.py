"""Bytes per weight, computed from the quantization section of config.json."""

from __future__ import annotations

from typing import Any

import pytest

from batchinfer.engine.simulate.model_cost import matrix_bytes
from tests.worker.model.quantized.writers import CASES

_ROUNDED = 0.5 + 5 / 64
_KEPT = {
    **dict.fromkeys(("awq", "gptq", "gptq with zeros", "gptq sorted", "gptq v2"), 0.5 + 5 / 32),
    **dict.fromkeys(("packed int4", "packed int4 with zeros", "packed mxfp4"), 0.5 + 5 / 32),
    **dict.fromkeys((case for case in CASES if case.startswith("nf4")), 0.5 + 5 / 64),
    **dict.fromkeys(("nvfp4", "nvfp4 modelopt"), 0.5 + 1 / 16),
}
"""Bytes per weight in cases that ``int4`` keeps as saved."""
_KEPT_INT8 = {
    **dict.fromkeys(("packed int8", "gptq 8 bits", "gptq 8 bits sorted"), 1 + 5 / 32),
    "int8 in groups": 1 + 5 / 16,
}
"""Bytes per weight in cases that ``int8`` keeps as saved, in groups."""


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("is_of_text", [False, True])
def test_a_weight_takes_the_bytes_of_its_format(case: str, is_of_text: bool) -> None:
    section = {"quantization_config": CASES[case][0]}
    config = {"text_config": section} if is_of_text else section
    assert matrix_bytes(config, None, 2) == 2, "dequantized"
    assert matrix_bytes(config, "fp8", 2) == 1
    assert matrix_bytes(config, "int8", 2, on_cpu=True) == _KEPT_INT8.get(case, 1)
    assert matrix_bytes(config, "int4", 2, on_cpu=True) == _KEPT.get(case, _ROUNDED)
    assert matrix_bytes(config, "int4", 2, on_cpu=True, experts=True) == _KEPT.get(case, _ROUNDED)
    assert matrix_bytes(config, "int8", 2, on_cpu=True, experts=True) == (_KEPT | _KEPT_INT8).get(
        case, 1
    ), "saved 4-bit weights keep 4 bits with int8"
    assert matrix_bytes(config, "fp8", 2, experts=True) == 2
    kept = matrix_bytes(config, "fp8", 2, on_cpu=True, experts=True)
    assert 1 < kept == matrix_bytes(config, "fp8", 2, on_cpu=True) <= 1 + 4 / 32


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"group_size": 128}, 0.5 + 5 / 128),
        ({"group_size": -1}, 0.5),
        ({"group_size": 20}, _ROUNDED),
        ({"bits": 8}, _ROUNDED),
    ],
)
def test_groups_that_are_kept_are_those_the_kernels_take(
    changes: dict[str, Any], expected: float
) -> None:
    section = {"quant_method": "gptq", "bits": 4, "group_size": 64, **changes}
    assert matrix_bytes({"quantization_config": section}, "int4", 2, on_cpu=True) == expected


def test_mxfp4_weights_are_kept_with_any_quantization() -> None:
    config = {"quantization_config": {"quant_method": "mxfp4"}}
    assert [
        matrix_bytes(config, one, 2, on_cpu=True, experts=True) for one in ("int8", "int4", None)
    ] == [
        0.65625,
        0.65625,
        2,
    ]


def test_a_group_without_a_type_has_integers() -> None:
    weights = {"num_bits": 4, "strategy": "group", "group_size": 128}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    section = {"quant_method": "compressed-tensors", "config_groups": groups}
    assert matrix_bytes({"quantization_config": section}, "int4", 2, on_cpu=True) == 0.5 + 5 / 128
