"""What a model in a local folder can do, by its config.json."""

from __future__ import annotations

import json
import os
from pathlib import Path

from batchinfer.config import attends_both_ways
from batchinfer.job.spec.tasks import TaskName

_WITH_OUTPUT_HEAD = "LMHeadModel"
"""As GPT-2's class that writes text ends; classes without a head end in ``Model``."""


def task_of(model: str | None) -> tuple[TaskName, str]:
    """The task that a model is for, and why: ``generate``, unless its folder says that it writes
    no text. Of a hub id nothing is known before it is fetched; what is wrong with a folder is
    told by the run."""
    config = Path(os.path.expanduser(model or ""), "config.json")
    try:
        values = json.loads(config.read_bytes())
        name = str(values["architectures"][0])
    except (OSError, ValueError, LookupError, TypeError):
        return "generate", ""
    if name.endswith("ForSequenceClassification"):
        return "classify", f"the model is a {name}, which has a head that classifies"
    if name.endswith("Model") and not name.endswith(_WITH_OUTPUT_HEAD):
        return "embed", f"the model is a {name}, which has no output head"
    if attends_both_ways(values):
        return "embed", f"the model is a {name}, which reads texts whole"
    return "generate", ""
