"""The README and the pages of the documentation, and the code blocks in them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A fenced code block."""

    page: Path
    number: int
    language: str
    text: str

    @property
    def name(self) -> str:
        return f"{self.page.stem}-{self.number}-{self.language}"


def blocks(*pages: Path) -> Iterator[Block]:
    """Yield the fenced blocks of pages, in order."""
    for page in pages:
        for number, match in enumerate(_FENCE.finditer(page.read_text(encoding="utf-8"))):
            yield Block(page, number, match[1], match[2])
