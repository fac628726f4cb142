"""Engine presets: the shipped ones and the user's own."""

from __future__ import annotations

from pathlib import Path

import pytest

from batchinfer.config import EngineConfig
from batchinfer.errors import UsageError
from batchinfer.job.spec.files import read_preset, shipped_presets


@pytest.mark.parametrize("name", shipped_presets())
def test_every_shipped_preset_is_a_valid_engine(name: str, tmp_path: Path) -> None:
    text, source = read_preset(name, tmp_path)
    engine = EngineConfig(**text.data)
    assert engine.device == ("cpu" if name == "cpu" else "cuda")
    assert name in source


@pytest.mark.parametrize("name", ["h300", "no/such.yaml", "nul\0", "", "x" * 5000])
def test_an_unknown_preset_lists_the_shipped_ones(name: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="shipped: a100-80g, cpu, h100, h200, l40s, rtx-4090"):
        read_preset(name, tmp_path)


def test_a_preset_must_be_keys_and_values(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("- 1\n")
    with pytest.raises(UsageError, match=r"mine\.yaml: a preset must be keys"):
        read_preset("mine.yaml", tmp_path)
