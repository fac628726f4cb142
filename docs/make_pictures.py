"""Draw the memory charts of a finished job: ``python docs/make_pictures.py OUT FOLDER``.

Writes ``memory.svg`` (the memory that the rows used, and the memory that would have been reserved
for full-length answers) and ``pool.svg`` (the blocks of the pool that the rows held), in the colors
of the report's light theme. The pictures in ``docs/gallery`` were made by hand: screenshots of
reports in Chromium, 1,200 pixels wide, and terminal output of runs, as SVG.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from batchinfer.job.output.open import output_at
from batchinfer.report import charts
from batchinfer.report.from_output import from_output
from batchinfer.report.svg import NARROW, WIDE, over_time


def main(out: str, folder: str) -> None:
    """Draw the charts of the job in ``out`` into ``folder``."""
    timeline = from_output(output_at(out), time.time()).timeline
    drawn = {
        "memory.svg": over_time(charts.memory(timeline), WIDE),
        "pool.svg": over_time(charts.held_by_rows(timeline), NARROW),
    }
    for name, svg in drawn.items():
        (Path(folder) / name).write_text(svg + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
