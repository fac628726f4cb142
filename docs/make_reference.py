"""Generate the JSON Schema of the job file, and its reference page, from the code.

.venv/bin/python docs/make_reference.py
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from batchinfer.config import SAMPLING_ALIASES
from batchinfer.job.spec.json_schema import json_schema

ROOT = Path(__file__).resolve().parents[1]
SCHEMA = ROOT / "configs" / "job.schema.json"
REFERENCE = ROOT / "docs" / "job-file.md"

_HEAD = """\
# The job file

A job is one YAML 1.2 file. An unknown key is an error that names its line and the nearest known
key. Paths are relative to the job file. In `name` and in paths, `{{ x }}` stands for the variable
`x` of `vars`; in `prompt`, it stands for the row's column `x`.

`batchinfer schema > job.schema.json` writes a JSON Schema that lets your editor complete and check
keys. `batchinfer init` writes it too. The first line of the job file points the editor to it:

```yaml
# yaml-language-server: $schema=job.schema.json
```
"""


def schema_text() -> str:
    """Return ``configs/job.schema.json``, as ``batchinfer schema`` prints it."""
    return json.dumps(json_schema(), indent=2) + "\n"


def reference_text() -> str:
    """Return the text of ``docs/job-file.md``."""
    end = "Generated from the JSON Schema by `docs/make_reference.py`."
    return "\n".join([_HEAD, *_sections(json_schema()), end]) + "\n"


def _sections(schema: Mapping[str, Any]) -> Iterator[str]:
    records: Mapping[str, Any] = schema["$defs"]
    top = {key: _resolved(value, records) for key, value in schema["properties"].items()}
    yield "## Top level\n"
    yield from _table(schema, {k: v for k, v in top.items() if "properties" not in v}, records)
    for key, record in top.items():
        if "properties" not in record:
            continue
        yield f"## `{key}`\n"
        yield f"{_line(record['description'])}{_is_required(schema, key)}\n"
        if key == "model":
            yield (
                "`model: NAME` is short for `model: {name: NAME}`, and `input: PATH` for "
                "`input: {path: PATH}`.\n"
            )
        names = {k: v for k, v in record["properties"].items() if k not in SAMPLING_ALIASES}
        yield from _table(record, names, records)
        if key == "sampling":
            same = ", ".join(f"`{alias}` ({name})" for alias, name in SAMPLING_ALIASES.items())
            yield f"Aliases used by other tools: {same}.\n"


def _table(
    record: Mapping[str, Any], keys: Mapping[str, Any], records: Mapping[str, Any]
) -> Iterator[str]:
    yield "| key | type | default | meaning |"
    yield "|---|---|---|---|"
    for name, value in keys.items():
        required = name in record.get("required", ()) or name == "max_tokens"
        default = "required" if required else f"`{_json(_default(value))}`"
        own = value.get("description")
        meaning = _line(own or _resolved(value, records).get("description", ""))
        yield f"| `{name}` | {_kind(value, records)} | {default} | {meaning} |"
    yield ""


def _resolved(value: Mapping[str, Any], records: Mapping[str, Any]) -> Mapping[str, Any]:
    """Resolve a ``$ref``, even inside ``anyOf``; keys next to the ``$ref`` override those of its
    record."""
    for choice in value.get("anyOf", ()):
        if "$ref" in choice:
            return {**value, **_resolved(choice, records)}
    if "$ref" not in value:
        return value
    return {**records[value["$ref"].rpartition("/")[2]], **value}


def _kind(value: Mapping[str, Any], records: Mapping[str, Any]) -> str:
    if "anyOf" in value:
        return " or ".join(dict.fromkeys(_kind(choice, records) for choice in value["anyOf"]))
    if "$ref" in value:
        record = records[value["$ref"].rpartition("/")[2]]
        return "{" + ", ".join(f"`{name}`" for name in record["properties"]) + "}"
    if "enum" in value:
        return ", ".join(f"`{_json(item)}`" for item in value["enum"])
    if "const" in value:
        return f"`{_json(value['const'])}`"
    if value.get("type") == "array":
        items = value.get("items", {})
        return f"list of {_kind(items, records)}" if items else "list"
    names = {"string": "text", "integer": "whole number", "object": "mapping", "boolean": "bool"}
    kinds = value.get("type", "any")
    kinds = [kinds] if isinstance(kinds, str) else kinds
    return " or ".join(names.get(kind, kind) for kind in kinds) + _range(value)


def _range(value: Mapping[str, Any]) -> str:
    low, high = value.get("minimum"), value.get("maximum")
    if low is None and high is None:
        return ""
    if high is None:
        return f", {low:g} or more"
    return f", {high:g}" if low == high else f", {low:g} to {high:g}"


def _is_required(schema: Mapping[str, Any], key: str) -> str:
    return " Required." if key in schema["required"] else ""


def _default(value: Mapping[str, Any]) -> Any:
    """Return a key's default; the schema omits the default of a mapping, which is an empty one."""
    return value.get("default", {} if value.get("type") == "object" else None)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _line(text: str) -> str:
    """Format a description for one line of a table."""
    text = " ".join(text.split()).replace("``", "`")
    for special in ("|", "<", "{{"):
        if special in text and "`" not in text:
            text = text.replace("|", "\\|").replace("<", "&lt;")
    return text


def main() -> None:
    SCHEMA.write_text(schema_text(), encoding="utf-8")
    REFERENCE.write_text(reference_text(), encoding="utf-8")


if __name__ == "__main__":
    main()
