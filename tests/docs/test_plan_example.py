"""The plan shown in docs/memory-model.md equals what ``plan`` prints for its job."""

from __future__ import annotations

import re
from typing import Any

import pytest

from batchinfer.console.table import plain
from batchinfer.job.plan.plan import plan_job
from batchinfer.job.plan.plan_summary import plan_facts
from batchinfer.job.spec.load import load_job
from tests.docs.pages import ROOT

PAGE = ROOT / "docs" / "memory-model.md"
PLAN: dict[str, Any] = {
    **{"rows": 2048, "errors": {}, "reused": None, "why_not_reused": [], "truncated": 0},
    **{"prompt_tokens": 425_845, "prompt_computed": 150_796, "output_tokens": 131_072},
    **{"expect_output_tokens": None, "control_text": 0, "sampled": None},
    "model": {"weight_bytes": 6_389_760, "adapter_bytes": 0, "quantization": None},
    **{"device": "cpu", "block_size": 16, "bytes_per_block": 49_152},
    **{"num_blocks": 65_536, "num_host_blocks": 87_381, "peak_used_blocks": 4728},
    **{"rows_in_flight": 611, "preemptions": 0, "swapped_blocks": 0},
    **{"blocks_per_state": 0},
    **{"mean_waste": 0.063, "contiguous_waste": 0.149},
    **{"sharing_saving": 0.512, "prefix_hit_rate": 0.646},
    "sharing": {"planned_rate": 0.650, "deduplicated_rows": 0},
    "images": 0,
    **{"time_s": 17.69, "bound_s": 8.37, "workers": 1, "cost": None, "output_bytes": 726_370},
}
"""The values of ``plan_job`` that the page shows."""


def lines_of_the_page() -> list[str]:
    shown = re.findall(r"^    (.+)$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    start = next(at for at, line in enumerate(shown) if line.startswith("rows "))
    return shown[start : start + len(list(plan_facts(PLAN)))]


def test_plan_example_has_the_lines_of_plan() -> None:
    assert lines_of_the_page() == list(plain(plan_facts(PLAN)))


@pytest.mark.long
def test_plan_example_matches_its_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("batchinfer.builders.simulated_engine.free_host_bytes", lambda: 64 << 30)
    plan = plan_job(load_job(ROOT / "jobs" / "quickstart.yaml"), device="cpu")
    assert list(plain(plan_facts(plan))) == lines_of_the_page()
