"""Writes first-light.md, which explains the results to readers who do not know the code."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

_Cells = dict[str, dict[str, dict[str, Any]]]
_MOST_FAILED = 20  # largest number of failed cells and tests in the page
_MOST_ERROR = 600  # largest number of characters of an error
_WORKLOADS = {
    "W1": "256 rows with 100 to 1,024 prompt tokens and 100 to 1,024 output tokens",
    "W3": "128 rows that share 2,048 prompt tokens, with 128 more tokens and 8 samples of 128 "
    "tokens each",
}


@dataclass
class StageReport:
    name: str
    shows: str
    limit_s: float
    command: str
    state: str = "waiting"
    seconds: float = 0.0
    error: str = ""
    log: str = ""
    bad_cells: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        return self.state == "ok"

    def begin(self, limit_s: float) -> None:
        self.state, self.limit_s = "running", limit_s

    def end(self, outcome: dict[str, Any], cells: dict[str, dict[str, Any]]) -> None:
        """Record the outcome of the stage's process, and the measured cells."""
        self.seconds, self.log = outcome["seconds"], outcome.get("log", "")
        self.error = outcome.get("error", "")
        self.bad_cells = {name: cell for name, cell in cells.items() if not cell.get("ok", True)}
        if self.error.startswith("not run"):
            self.state = "not run"
        else:
            self.state = "ok" if outcome["ok"] and not self.bad_cells else "FAILED"


def page(
    reports: list[StageReport],
    cells: _Cells,
    *,
    seconds: float,
    deadline_s: float,
    notes: list[str],
    dry_run: bool,
) -> str:
    """Return the text of first-light.md.

    Args:
        cells: results by stage and name.
        seconds: time since the start.
    """
    ok = sum(report.ok for report in reports)
    ended = sum(report.state not in ("waiting", "running") for report in reports)
    device = cells.get("environment", {}).get("device", {}).get("name", "an unknown device")
    lines = [
        f"# First light of batchinfer on {device}",
        "",
        f"**{ok} of {len(reports)} stages are ok**; {ended} have ended. This page is from "
        f"{time.strftime('%Y-%m-%d %H:%M:%S')}, {seconds:.0f} s after the start; the deadline is "
        f"{deadline_s:.0f} s.",
        "",
    ]
    if dry_run:
        lines += ["**A rehearsal on a CPU with tiny models, so the speeds mean nothing.**", ""]
    lines += [
        "batchinfer runs language models over datasets. This run tries its code for NVIDIA GPUs: "
        "first whether its results are right, then how fast it is. Models have real shapes and "
        "random weights.",
        "",
        *_stages(reports),
        *_failures(reports),
        *_speed(cells.get("bench", {})),
        *_attention(cells.get("attention", {})),
        *_tests(cells.get("kernels", {}).get("tests")),
        *_machine(cells),
        "## Files",
        "",
        "`results.json` has every number, `logs.tgz` the output of each stage. Keep "
        "`triton-cache.tgz` in `out/first-light`, so that the next run does not compile the "
        "kernels again.",
        "",
        *notes,
    ]
    return "\n".join(lines).rstrip() + "\n"


def _stages(reports: list[StageReport]) -> list[str]:
    rows = [
        (r.name, r.shows, r.state, f"{r.seconds:.0f} of {r.limit_s:.0f}" if r.seconds else "")
        for r in reports
    ]
    return ["## Stages", "", *_table(("stage", "shows", "result", "seconds"), rows)]


def _failures(reports: list[StageReport]) -> list[str]:
    lines = []
    for report in reports:
        if report.state not in ("FAILED", "not run"):
            continue
        lines += [f"### {report.name}", ""]
        if report.error:
            lines += [f"The stage: {_short(report.error)}", ""]
        for name, cell in list(report.bad_cells.items())[:_MOST_FAILED]:
            lines += [f"- {name}: {_reason(cell)}"]
        if report.bad_cells:
            lines += [""]
        log = f" Its output is in `{report.log}` in `logs.tgz`." if report.log else ""
        lines += [f"Repeat it with `{report.command}`.{log}", ""]
    return ["## What failed", "", *lines] if lines else []


def _reason(cell: dict[str, Any]) -> str:
    """Return the error of a cell, or else its values."""
    if "error" in cell:
        return _short(cell["error"])
    if isinstance(cell.get("failed"), dict):
        return f"{len(cell['failed'])} failed and {cell['passed']} passed"
    return _short(", ".join(f"{name} {_number(value)}" for name, value in cell.items()))


def _speed(bench: dict[str, dict[str, Any]]) -> list[str]:
    runs = {name: cell for name, cell in bench.items() if "output_tokens_per_s" in cell}
    starts = {name.removesuffix(" start"): cell for name, cell in bench.items() if "fuse s" in cell}
    if not starts and not runs:
        return []
    lines = ["## Speed", ""]
    if runs:
        rows = [
            (
                name,
                _number(cell["output_tokens_per_s"]),
                _number(cell["bound_tokens_per_s"]),
                f"{cell['share_of_bound']:.2f}",
                ", ".join(f"{seconds:.2f}" for seconds in cell["all_seconds"]),
                cell["preemptions"],
            )
            for name, cell in runs.items()
        ]
        columns = ("model and workload", "output tokens/s", "bound", "share of the bound",
                   "seconds of each run", "preemptions")  # fmt: skip
        lines += _table(columns, rows)
        lines += [f"{name}: {text}." for name, text in _WORKLOADS.items()]
        lines += [
            "",
            "The bound is the speed of an engine with perfect kernels and no gaps between them, "
            "computed from this device's measured copy bandwidth and speed of matrix products.",
            "",
        ]
    for name, cell in bench.items():
        if name.endswith(" busy") and "share" in cell:
            lines += [f"{name}: a kernel ran in {100 * cell['share']:.1f} % of the time.", ""]
    lines += _pool_order(runs)
    if starts:
        columns = ("start of", "imports", "model", "fuse", "capture", "layers fused",
                   "CUDA graphs captured")  # fmt: skip
        rows = [
            (
                name,
                *(f"{cell.get(f'{part} s', 0):.1f} s" for part in columns[1:5]),
                f"{cell['fused_layers']} of {cell['layers']}",
                f"{cell['graphs_captured']} of {cell['graph_sizes']}",
            )
            for name, cell in starts.items()
        ]
        lines += [*_table(columns, rows), "The times for fusing layers and capturing graphs "
                  "include the compilation of kernels.", ""]  # fmt: skip
    return lines


def _pool_order(runs: dict[str, dict[str, Any]]) -> list[str]:
    for name, cell in runs.items():
        blocks = runs.get(name.replace(" layer-major", ""))
        if " layer-major" in name and blocks is not None:
            layers, blocks_rate = cell["output_tokens_per_s"], blocks["output_tokens_per_s"]
            change = 100 * (layers / blocks_rate - 1)
            return [
                f"Order of the KV pool: layer-major reaches {_number(layers)} tokens/s, "
                f"block-major (the default) {_number(blocks_rate)}: {change:+.1f} %.",
                "",
            ]
    return []


def _attention(cells: dict[str, dict[str, Any]]) -> list[str]:
    rows = [
        (name, f"{cell['bytes_per_s'] / 1e9:,.0f} GB/s", f"{100 * cell['share_of_copy']:.0f} %",
         f"{cell['pool_bytes'] / 1e9:.0f} GB")
        for name, cell in cells.items()
        if "bytes_per_s" in cell and "pool_bytes" in cell
    ]  # fmt: skip
    if not rows:
        return []
    columns = ("attention", "keys and values read", "of copy bandwidth", "pool")
    return ["## Attention", "", *_table(columns, rows)]


def _tests(cell: dict[str, Any] | None) -> list[str]:
    if cell is None or "passed" not in cell:
        return []
    lines = [
        "## Tests",
        "",
        f"Of {cell['tests']} tests, {cell['passed']} passed, {len(cell['failed'])} failed, "
        f"{cell['skipped']} were skipped, and {len(cell['not_run'])} did not run for lack of time.",
        "",
    ]
    for test, error in list(cell["failed"].items())[:_MOST_FAILED]:
        lines += [f"- {_short(error)}. Repeat it with `python3 -m pytest -m gpu '{test}'`."]
    return [*lines, ""] if cell["failed"] else lines


def _machine(cells: _Cells) -> list[str]:
    facts = {**cells.get("environment", {}).get("machine", {})}
    facts |= cells.get("environment", {}).get("device", {})
    for measured in cells.get("machine", {}).values():
        limits = measured["ceilings"]
        facts["copy bandwidth"] = f"{limits['bytes_per_s'] / 1e9:,.0f} GB/s"
        facts["matrix products"] = f"{limits['flop_per_s'] / 1e12:,.0f} TFLOP/s"
    packages = facts.pop("packages", {})
    facts |= {name: version for name, version in packages.items() if version}
    smi = str(facts.pop("nvidia_smi", ""))
    if not facts:
        return []
    rows = [(name, _number(value)) for name, value in facts.items() if name != "ok"]
    lines = ["## Machine", "", *_table(("", ""), rows)]
    return [*lines, "```", smi, "```", ""] if smi else lines


def _table(columns: tuple[str, ...], rows: list[tuple[Any, ...]]) -> list[str]:
    def line(values: Any) -> str:
        return f"| {' | '.join(str(value).replace('|', '/') for value in values)} |"

    return [line(columns), line("---" for _ in columns), *map(line, rows), ""]


def _number(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return str(value)


def _short(text: str) -> str:
    """Return a text in one line, with the middle of a long text left out."""
    text = " ".join(text.split())
    half = _MOST_ERROR // 2
    return text if len(text) <= _MOST_ERROR else f"{text[:half]} [...] {text[-half:]}"
