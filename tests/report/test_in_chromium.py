"""Pages in a real browser: nothing in them runs, and nothing is clipped."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.report.pages import page_of

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)
pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="no browser: install Debian's package chromium"
)
LAYOUT = """<pre id="problems"></pre><script>
const problems = [];
for (const e of document.querySelectorAll("body *")) {
  if (!e.getClientRects().length || (e.closest("svg") && e.tagName !== "text")) continue;
  const box = e.getBoundingClientRect(), svg = e.closest("svg");
  const around = svg ? svg.getBoundingClientRect() : {left: 0, right: innerWidth};
  if (box.right > around.right + 1 || box.left < around.left - 1)
    problems.push(`outside: ${e.outerHTML.slice(0, 80)}`);
  const cuts = /hidden|clip|auto|scroll/.test(getComputedStyle(e).overflow);
  if (cuts && e.clientWidth && e.scrollWidth > e.clientWidth + 1)
    problems.push(`clipped: ${e.outerHTML.slice(0, 80)}`);
}
document.getElementById("problems").textContent = JSON.stringify(problems);
</script>"""


def opened(page: str, folder: Path, width: int) -> str:
    """Return the document that Chromium makes from a page."""
    file = folder / "report.html"
    file.write_text(page, encoding="utf-8")
    command = [str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom"]
    command += [f"--user-data-dir={folder}", f"--window-size={width},900", file.as_uri()]
    return subprocess.run(command, capture_output=True, check=True).stdout.decode()


def problems(page: str, folder: Path, width: int) -> list[str]:
    """Return the elements that are clipped, or outside the page or their chart."""
    scripted = re.sub("<meta http-equiv[^>]*>", "", page).replace("</body>", f"{LAYOUT}</body>")
    found = re.search('<pre id="problems">(.*?)</pre>', opened(scripted, folder, width))
    return list(json.loads(html.unescape(found[1])))


def test_hostile_texts_do_nothing(tmp_path: Path) -> None:
    document = opened(page_of("hostile"), tmp_path, 1600)
    assert '<html lang="en">' in document  # a hostile text that runs would set an id
    assert "<h1>" in document


@pytest.mark.parametrize("width", [500, 1600])
@pytest.mark.parametrize("kind", ["hostile", "of days"])
def test_nothing_is_clipped_or_outside_the_page(tmp_path: Path, kind: str, width: int) -> None:
    assert problems(page_of(kind), tmp_path, width) == []
