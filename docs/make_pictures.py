"""Draw the memory charts of a finished job: ``python docs/make_pictures.py OUT FOLDER``.

Writes ``memory.svg`` (what the rows took, beside what they would have taken) and ``pool.svg`` (what
the pool's blocks held), in the colours of the report's light theme.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from batchinfer.job.output.open import output_at
from batchinfer.report import charts
from batchinfer.report.from_output import from_output


def main(out: str, folder: str) -> None:
    """Draw the job in ``out`` into ``folder``."""
    timeline = from_output(output_at(out), time.time()).timeline
    drawn = {
        "memory.svg": charts.memory_for_the_rows(timeline, charts.WIDE),
        "pool.svg": charts.inside_the_pool(timeline, charts.NARROW),
    }
    for name, svg in drawn.items():
        (Path(folder) / name).write_text(svg + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
