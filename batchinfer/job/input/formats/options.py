"""Options for reading text files."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Literal


@dataclass(frozen=True)
class TextOptions:
    """Keys of the section ``input`` that say how to read text files."""

    encoding: str = "utf-8"
    encoding_errors: Literal["strict", "replace"] = "strict"
    delimiter: str | None = None
    json_field: str | None = None

    def used(self) -> Iterator[str]:
        """Yield the names of the keys that do not have their default values."""
        for key in fields(self):
            if getattr(self, key.name) != key.default:
                yield key.name


DEFAULT_OPTIONS = TextOptions()
