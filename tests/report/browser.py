"""A page opened in headless Chromium, asked about by its debugging protocol over a pipe."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any, Self

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)
_FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--disable-dev-shm-usage", "--hide-scrollbars", "--remote-debugging-pipe"),
)

_LAYOUT = """(() => {
  const found = [], boxes = [];
  const wide = document.documentElement.scrollWidth;
  if (wide > innerWidth) found.push(`the page is ${wide} wide`);
  const shown = e => e.getClientRects().length && getComputedStyle(e).visibility !== "hidden";
  for (const e of document.querySelectorAll("body *")) {
    if (!shown(e) || e.closest("svg")) continue;
    const cuts = /hidden|clip|auto|scroll/.test(getComputedStyle(e).overflow);
    if (e.scrollWidth > e.clientWidth + 1 && e.clientWidth && cuts)
      found.push(`clipped: ${e.outerHTML.slice(0, 80)}`);
    const b = e.getBoundingClientRect();
    if (b.right > innerWidth + 1 || b.left < -1) found.push(`outside: ${e.outerHTML.slice(0, 80)}`);
  }
  for (const t of document.querySelectorAll("svg text")) {
    if (!shown(t) || !t.textContent) continue;
    const b = t.getBoundingClientRect(), s = t.closest("svg").getBoundingClientRect();
    const beside = b.left < s.left - 1 || b.right > s.right + 1;
    if (beside || b.top < s.top - 1 || b.bottom > s.bottom + 1)
      found.push(`label outside its chart: ${t.textContent}`);
  }
  const walk = document.createTreeWalker(document.querySelector("main"), NodeFilter.SHOW_TEXT);
  for (let n; (n = walk.nextNode());) {
    if (!n.data.trim() || !shown(n.parentElement)) continue;
    const range = document.createRange();
    range.selectNodeContents(n);
    for (const r of range.getClientRects())
      if (r.width > 1 && r.height > 1) boxes.push([r, n]);
  }
  walk.currentNode = walk.root;
  for (let n; (n = walk.nextNode());) {
    if (!/^\\s*\\w{2,12}\\s*$/.test(n.data) || !shown(n.parentElement)) continue;
    const range = document.createRange();
    range.selectNodeContents(n);
    if (new Set([...range.getClientRects()].map(r => r.top)).size > 1)
      found.push(`broken word: ${n.data}`);
  }
  const depth = 3;
  boxes.sort(([a], [b]) => a.top - b.top);
  for (let i = 0; i < boxes.length; i++) for (let j = i + 1; j < boxes.length; j++) {
    const [a, n] = boxes[i], [b, m] = boxes[j];
    if (b.top >= a.bottom) break;
    if (n === m) continue;
    const x = Math.min(a.right, b.right) - Math.max(a.left, b.left);
    const y = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
    if (x > depth && y > depth)
      found.push(`overlap: ${n.data.slice(0, 40)} | ${m.data.slice(0, 40)}`);
  }
  return found;
})()"""


class Browser:
    """One Chromium with one page; use it as a context manager."""

    def __init__(self) -> None:
        assert CHROMIUM is not None
        self._home = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        to_browser, self._write = os.pipe()
        self._read, from_browser = os.pipe()
        # The protocol's pipe is file descriptors 3 and 4, which a shell makes of higher ones.
        ends = [fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in (to_browser, from_browser)]
        command = [CHROMIUM, *_FLAGS, f"--user-data-dir={self._home.name}", "about:blank"]
        self._process = subprocess.Popen(
            ["bash", "-c", f'exec "$@" 3<&{ends[0]} 4>&{ends[1]}', "bash", *command],
            pass_fds=ends,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "HOME": self._home.name},
        )
        for end in (to_browser, from_browser, *ends):
            os.close(end)
        self._buffer = b""
        self._last_id = 0
        self._session: str | None = None
        self.requests: list[str] = []
        """What the page has asked for, since it was opened."""
        self._loaded: set[str] = set()
        """Documents that are complete."""

    def __enter__(self) -> Self:
        target = None
        while target is None:  # a slow browser answers before it has its page
            targets = self._call("Target.getTargets")["targetInfos"]
            target = next((t["targetId"] for t in targets if t["type"] == "page"), None)
        attached = self._call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Network", "Runtime"):
            self._call(f"{domain}.enable")
        self._call("Page.setLifecycleEventsEnabled", enabled=True)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._write)
        os.close(self._read)
        self._home.cleanup()

    def open(self, path: Path, *, width: int, dark: bool) -> None:
        """Load a file at a width in pixels, in a theme."""
        self.requests = []
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._call("Emulation.setEmulatedMedia", features=[scheme])
        self._call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=900,
            deviceScaleFactor=1,
            mobile=False,
        )
        # Not any page that has loaded: the blank one of the beginning may be late.
        document = self._call("Page.navigate", url=path.resolve().as_uri())["loaderId"]
        while document not in self._loaded:
            self._receive()

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression, in the page."""
        result = self._call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def layout_problems(self) -> list[str]:
        """What is clipped, what is outside the page, and texts that lie on each other."""
        return list(self.evaluate(_LAYOUT))

    def screenshot(self, path: Path) -> None:
        """The whole page, as a PNG."""
        options = {"format": "png", "captureBeyondViewport": True}
        shot = self._call("Page.captureScreenshot", **options)
        path.write_bytes(base64.b64decode(shot["data"]))

    def _call(self, method: str, **params: Any) -> dict[str, Any]:
        self._last_id += 1
        message = {"id": self._last_id, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._write, data) :]
        while True:
            answer = self._receive()
            if answer.get("id") == self._last_id:
                assert "error" not in answer, answer
                return dict(answer["result"])

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            data = os.read(self._read, 1 << 16)
            assert data, "Chromium has ended"
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        if message.get("method") == "Network.requestWillBeSent":
            self.requests.append(message["params"]["request"]["url"])
        if message.get("method") == "Page.lifecycleEvent" and message["params"]["name"] == "load":
            self._loaded.add(message["params"]["loaderId"])
        return message
