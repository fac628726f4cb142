"""Paths that pages and comments name exist in the repository."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.pages import PAGES, ROOT

_PATH = re.compile(r"(?<![\w./<{-])((?:[\w-]+/)+[\w-]+\.(?:py|c|h|inc|css|jinja))\b")
_FOLDER = re.compile(r"`((?:batchinfer|kernels|tests|benchmarks)(?:/\w+)*)/?`")
# Folders that a relative path may start from.
_ABOVE = [
    ROOT,
    ROOT / "batchinfer",
    ROOT / "kernels",
    ROOT / "batchinfer" / "job",
    ROOT / "batchinfer" / "worker",
]
_OTHERS = ("transformers/", "peft/", "v1/", "model_executor/", "lm_eval/", "vllm/")
SOURCES = sorted(
    path
    for folder in ("batchinfer", "kernels", "tests", "benchmarks", "docs", "jobs")
    for suffix in ("py", "c", "h", "inc")
    for path in (ROOT / folder).rglob(f"*.{suffix}")
    if not path.is_relative_to(ROOT / "batchinfer" / "kernels")
)


def named(path: Path) -> Iterator[str]:
    """Yield the paths that a file names, except paths of other projects."""
    text = path.read_text(encoding="utf-8")
    for found in _PATH.findall(text):
        if not found.startswith(_OTHERS) and "://" not in found:
            yield found
    if path.suffix == ".md":
        yield from _FOLDER.findall(text)


def is_there(path: str) -> bool:
    return any((folder / path).exists() for folder in _ABOVE)


@pytest.mark.parametrize(
    "page", [*PAGES, ROOT / "kernels" / "README.md", ROOT / "benchmarks" / "README.md"], ids=str
)
def test_paths_in_pages_exist(page: Path) -> None:
    assert [name for name in named(page) if not is_there(name)] == []


def test_paths_in_comments_exist() -> None:
    missing = {
        (str(path.relative_to(ROOT)), name)
        for path in SOURCES
        for name in named(path)
        if name.split("/")[0] in ("batchinfer", "engine", "worker", "job", "text", "kernels")
        and not is_there(name)
    }
    assert missing == set()
