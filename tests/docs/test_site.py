"""The documentation site builds without warnings, and its internal links work."""

from __future__ import annotations

import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from tests.docs.pages import ROOT

_LINK = re.compile(r"\]\(([^)\s]+)\)")


class _Links(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []
        self.ids: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("href", "src") and value:
                self.links.append(value)
            elif name == "id" and value:
                self.ids.add(value)


def _parsed(path: Path) -> _Links:
    parser = _Links()
    parser.feed(path.read_text(encoding="utf-8"))
    return parser


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "-d", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_site_links_exist(site: Path) -> None:
    pages = {path: _parsed(path) for path in site.glob("*.html") if path.name != "404.html"}
    assert len(pages) >= len(list((ROOT / "docs").glob("*.md")))
    for page, parsed in pages.items():
        for link in parsed.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc or link == "#":
                continue
            target = page if not parts.path else (page.parent / unquote(parts.path)).resolve()
            target = target / "index.html" if target.is_dir() else target
            assert target.exists(), f"{page.name}: {link}"
            if parts.fragment and target in pages:
                assert parts.fragment in pages[target].ids, f"{page.name}: {link}"


@pytest.mark.parametrize(
    "name",
    [
        str(name)
        for name in sorted(path.relative_to(ROOT) for path in ROOT.rglob("*.md"))
        if not {".venv", "out", "work"} & set(name.parts)
    ],
)
def test_repository_links_exist(name: str) -> None:
    page = ROOT / name
    for link in _LINK.findall(page.read_text(encoding="utf-8")):
        parts = urlsplit(link)
        if not parts.scheme and parts.path:
            assert (page.parent / unquote(parts.path)).exists(), link
