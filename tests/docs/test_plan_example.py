"""What the page on memory shows of a plan has the words and units of a plan."""

from __future__ import annotations

import re

from batchinfer.console.table import plain
from batchinfer.job.plan.estimate import plan_facts
from batchinfer.job.plan.plan import plan_job
from batchinfer.job.spec.load import load_job
from tests.docs.pages import ROOT

_PAGE = ROOT / "docs" / "memory-model.md"
_AMOUNT = re.compile(r"\d[\d,.]*( (bytes|KiB|MiB|GiB|ms|s|min|h)\b)?")


def test_the_lines_of_the_example_are_those_of_a_plan() -> None:
    spec = load_job(ROOT / "jobs" / "quickstart.yaml", overrides=["input.limit=16"])
    told = list(plain(plan_facts(plan_job(spec, device="cpu"))))
    shown = re.findall(r"^    (.+)$", _PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    start = next(at for at, line in enumerate(shown) if line.startswith("rows "))
    example = shown[start : start + len(told)]
    assert [_AMOUNT.sub("#", line) for line in example] == [_AMOUNT.sub("#", x) for x in told]
