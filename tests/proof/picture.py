"""Draws the results of all cells as one picture, and writes them as a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from html import escape
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from tests.proof.cells import Result
from tests.proof.checkpoints import CHECKPOINTS
from tests.proof.faults import FAULTS
from tests.proof.jobs import SCHEDULES

_COLORS = {"equal": "#2f9e6e", "differs": "#d64545", "stuck": "#e8a33d", "not run": "#d5dae1"}
_SQUARE, _GAP, _LEFT, _TOP = 14, 12, 230, 130
"""Sizes in pixels: a cell's square, the space between groups of squares, and the margins."""


def write_table(results: Sequence[Result], path: Path) -> None:
    """Write a Parquet file with a row for each cell."""
    pq.write_table(pa.Table.from_pylist([asdict(result) for result in results]), path)


def draw(results: Sequence[Result]) -> str:
    """Return an SVG picture with a line of squares for each model.

    Each fault has a group of squares, one for each schedule.
    """
    verdicts = {(one.model, one.fault, one.schedule): one for one in results}
    group = len(SCHEDULES) * _SQUARE + _GAP
    width = _LEFT + len(FAULTS) * group + 90
    height = _TOP + len(CHECKPOINTS) * (_SQUARE + 8) + 60
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}"'
        ' font-family="system-ui, sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
    ]
    for column, fault in enumerate(FAULTS):
        x = _LEFT + column * group + group // 2 - 10
        place = f'x="{x}" y="{_TOP - 12}" transform="rotate(-40 {x} {_TOP - 12})"'
        lines.append(f'<text {place} fill="#1f2933">{escape(fault)}</text>')
    for row, (model, checkpoint) in enumerate(CHECKPOINTS.items()):
        y = _TOP + row * (_SQUARE + 8)
        place = f'x="{_LEFT - 12}" y="{y + _SQUARE - 2}" text-anchor="end"'
        lines.append(f'<text {place} fill="#1f2933">{escape(checkpoint.stands_for)}</text>')
        for column, fault in enumerate(FAULTS):
            for at, schedule in enumerate(SCHEDULES):
                result = verdicts.get((model, fault, schedule))
                verdict = "not run" if result is None else result.verdict
                x = _LEFT + column * group + at * _SQUARE
                lines.append(
                    f'<rect x="{x}" y="{y}" width="{_SQUARE - 2}" height="{_SQUARE}" '
                    f'fill="{_COLORS[verdict]}"><title>{model}.{fault}.{schedule}: {verdict}'
                    "</title></rect>"
                )
    return "\n".join([*lines, *_legend(results, height), "</svg>"]) + "\n"


def _legend(results: Sequence[Result], height: int) -> list[str]:
    x, y, lines = _LEFT, height - 34, list[str]()
    total = len(CHECKPOINTS) * len(FAULTS) * len(SCHEDULES)
    counts = dict.fromkeys(_COLORS, 0) | {"not run": total - len(results)}
    for result in results:
        counts[result.verdict] += 1
    for verdict, color in _COLORS.items():
        if counts[verdict] or verdict == "equal":
            lines.append(f'<rect x="{x}" y="{y}" width="12" height="14" fill="{color}"/>')
            label = f"{verdict}: {counts[verdict]} cells"
            lines.append(f'<text x="{x + 18}" y="{y + 12}" fill="#1f2933">{label}</text>')
            x += 130
    squares = "The squares of a group: " + ", ".join(SCHEDULES)
    lines.append(f'<text x="{_LEFT}" y="{y + 30}" fill="#52606d">{squares}</text>')
    return lines
