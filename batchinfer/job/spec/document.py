"""A job file's unchecked data, with the file and line of each key."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from batchinfer.config import SAMPLING_ALIASES
from batchinfer.console.format import printable
from batchinfer.errors import UsageError
from batchinfer.job.spec.yaml import KeyPath, YamlText, dotted, parse_yaml, plain_scalar

_MISSING = object()
_NAMED_BY = {"model": "name", "input": "path"}
"""Required key of each section with a shorthand: ``model: NAME`` means ``model: {name: NAME}``."""
_JINJA = ("{{", "{%", "{#")


class JobDocument:
    """Nested data with the origin of each key: a line of a file, or a command-line option.

    Shorthands (``model: NAME``, ``input: PATH``) and other tools' names for sampling keys are
    replaced by the full form, so that options and checks see only the full form.
    """

    def __init__(self, text: YamlText, source: str) -> None:
        if not isinstance(text.data, dict):
            raise UsageError(
                f"{source}: a job file must consist of keys and values; "
                "`batchinfer schema` lists the keys"
            )
        self.source = source
        self.data: dict[str, Any] = text.data
        self._origins: dict[KeyPath, str] = {
            path: f"{source}, line {line}" for path, line in text.lines.items()
        }
        self._expand_shorthands()
        self._expand_aliases()

    def get(self, path: KeyPath, default: Any = None) -> Any:
        value: Any = self.data
        for part in path:
            value = _child(value, part)
            if value is _MISSING:
                return default
        return value

    def has(self, path: KeyPath) -> bool:
        """Return True if ``path`` has a value, which may be null."""
        return self.get(path, _MISSING) is not _MISSING

    def set(self, path: KeyPath, value: Any, origin: str) -> None:
        """Set the value at ``path``, creating parent mappings. Raise UsageError if a parent is not
        a mapping."""
        holder: Any = self.data
        for depth, part in enumerate(path[:-1], start=1):
            if holder.get(part) is None:
                holder[part] = {}
                self._origins[path[:depth]] = origin
            holder = holder[part]
            if not isinstance(holder, dict):
                raise UsageError(f"{origin}: {dotted(path[:depth])} is not a section")
        holder[path[-1]] = value
        length = len(path)
        self._origins = {p: o for p, o in self._origins.items() if p[:length] != path}
        self._origins[path] = origin

    def override(self, assignment: str, option: str = "") -> None:
        """Apply ``a.b=value`` from ``--set``, or from an ``option`` that is short for ``--set``.

        The value is YAML; lists and mappings need brackets. A value without quotes or brackets
        is one scalar: ``a: b``, ``# c`` and ``{{ d }}`` are strings.

        Raises:
            UsageError: the text is not an assignment, or its value is empty.
        """
        keys, equals, value = assignment.partition("=")
        shown = f"{keys}=\N{HORIZONTAL ELLIPSIS}" if keys.startswith("on_end") else assignment
        origin = printable(option or f"--set {shown}", 80)
        path: KeyPath = tuple(part.strip() for part in keys.split("."))
        if not equals:
            raise UsageError(f"{origin}: it has no =; write --set {printable(keys, 60)}=VALUE")
        if not all(path):
            raise UsageError(f"{origin}: it has no key before the =; write --set section.key=VALUE")
        if len(path) == 2 and path[0] == "sampling":
            path = ("sampling", SAMPLING_ALIASES.get(str(path[1]), path[1]))
        self.set(path, _set_value(value.strip(), origin), origin)
        self._expand_shorthands()

    def underlay(self, section: str, keys: Mapping[str, Any], text: YamlText, source: str) -> None:
        """Add ``keys`` from another file to ``section``, unless the section sets them already."""
        present = self.get((section,)) or {}
        self.data[section] = {**keys, **present}
        for path, line in text.lines.items():
            if path[0] not in present:
                self._origins[(section, *path)] = f"{source}, line {line}"

    def origin(self, path: KeyPath) -> str:
        """Return where ``path`` or its nearest parent is set: a file and line, or an option."""
        for length in range(len(path), 0, -1):
            if path[:length] in self._origins:
                return self._origins[path[:length]]
        return self.source

    def error(self, path: KeyPath, problem: str) -> UsageError:
        return UsageError(f"{self.origin(path)}: {dotted(path)}{problem}")

    def _expand_shorthands(self) -> None:
        for section, key in _NAMED_BY.items():
            name = self.data.get(section)
            is_list = section == "input" and isinstance(name, list)
            if isinstance(name, str) or is_list:
                self.data[section] = {key: name}
                self._origins[(section, key)] = self.origin((section,))
        sampling = self.data.get("sampling")
        for key in ("stop", "bad_words"):
            if isinstance(sampling, dict) and isinstance(sampling.get(key), str):
                sampling[key] = [sampling[key]]

    def _expand_aliases(self) -> None:
        sampling = self.data.get("sampling")
        if not isinstance(sampling, dict):
            return
        for alias, name in SAMPLING_ALIASES.items():
            if alias not in sampling:
                continue
            if name in sampling:
                raise self.error(("sampling", alias), f" means {name}, which is also set; keep one")
            sampling[name] = sampling.pop(alias)
            self._origins[("sampling", name)] = self.origin(("sampling", alias))


def _set_value(text: str, origin: str) -> Any:
    if not text:
        raise UsageError(f"{origin}: the value is empty; write '', [] or null")
    try:
        if text[0] in "[{\"'" and not text.startswith(_JINJA):
            return parse_yaml(text, origin).data
        return plain_scalar(text)
    except ValueError as error:
        raise UsageError(f"{origin}: {error}") from None
    except UsageError as error:
        raise UsageError(
            f"{error}\na string that begins with a bracket or a quote needs quotes around it, "
            "like --set 'name=\"[a] b\"'"
        ) from None


def _child(value: Any, part: str | int) -> Any:
    if isinstance(value, dict):
        return value.get(part, _MISSING)
    if isinstance(value, list) and isinstance(part, int) and part < len(value):
        return value[part]
    return _MISSING
