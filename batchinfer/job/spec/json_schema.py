"""Makes the JSON Schema of the job file, for completion and checks in editors."""

from __future__ import annotations

from typing import Any

from pydantic import TypeAdapter

from batchinfer.config import SAMPLING_ALIASES, SamplingParams
from batchinfer.job.spec.referenced_files import shipped_presets
from batchinfer.job.spec.spec import JobSpec
from batchinfer.job.spec.task_keys import TASK_SPECS, TaskSpec

DIALECT = "https://json-schema.org/draft/2020-12/schema"


def json_schema() -> dict[str, Any]:
    schema = JobSpec.model_json_schema()
    records = schema["$defs"]
    sampling = records["JobSampling"]["properties"]
    # Pydantic does not read docstrings of inherited fields.
    described = {name: value for name, value in sampling.items() if "description" in value}
    sampling |= TypeAdapter(SamplingParams).json_schema()["properties"] | described
    _accept_aliases(records["JobSampling"])
    records["EngineConfig"]["properties"]["preset"] = {
        "type": ["string", "null"],
        "default": None,
        "description": "Name of a shipped preset, or a file of engine keys. Other keys of this "
        "section override it.",
        "examples": list(shipped_presets()),
    }
    schema["required"].remove("sampling")
    schema["allOf"] = [_task_rule(task) for task in TASK_SPECS.values()]
    model = schema["properties"]["model"]
    name = {"type": "string", "minLength": 1}
    schema["properties"]["model"] = {"anyOf": [name, model]}
    paths = {"type": "array", "items": name}
    schema["properties"]["input"] = {"anyOf": [name, paths, schema["properties"]["input"]]}
    for record in records.values():
        # Later paragraphs of a docstring are for readers of the Python code.
        record["description"] = record["description"].split("\n\n")[0]
    return {"$schema": DIALECT, "title": "batchinfer job", **schema}


def _task_rule(task: TaskSpec) -> dict[str, Any]:
    """Return a rule that requires or forbids ``sampling`` for a task, and that forbids the task's
    own section for other tasks."""
    sampling = {"required": ["sampling"]}
    is_default = JobSpec.model_fields["task"].default == task.name
    rule: dict[str, Any] = {
        "if": {
            "properties": {"task": {"const": task.name}},
            **({} if is_default else {"required": ["task"]}),
        },
        "then": sampling if task.draws else {"not": sampling},
    }
    if task.section is not None:
        rule["else"] = {"properties": {task.section: {"type": "null"}}}
    return rule


def _accept_aliases(sampling: dict[str, Any]) -> None:
    keys = sampling["properties"]
    for name in ("stop", "bad_words"):
        keys[name]["anyOf"] = [{"type": "string"}, {"type": "array", "items": keys[name]["items"]}]
        del keys[name]["type"], keys[name]["items"]
    del sampling["required"]
    ways = ["max_tokens"]
    for alias, name in SAMPLING_ALIASES.items():
        keys[alias] = {**keys[name], "title": alias, "description": f"Same as {name}."}
        if name == "max_tokens":
            ways.append(alias)
    sampling["oneOf"] = [{"required": [way]} for way in ways]
