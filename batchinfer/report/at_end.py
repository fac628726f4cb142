"""The report at the end of a run: written by a process of its own, and never in the run's way.

Charts are drawn by a JavaScript engine, which may end its process where memory is short or address
space is limited. A job that has all its answers must not be lost to that.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from batchinfer.console.format import printable
from batchinfer.errors import UsageError
from batchinfer.job.output.directory import OutputDir
from batchinfer.report.write import check_installed

_TIMEOUT_S = 300.0
_PACKAGE = Path(__file__).parents[1]


def report_at_end(out: OutputDir, tell: Callable[[str], None]) -> bool:
    """Write the report on a job that has just ended.

    Args:
        out: its output directory.
        tell: told, in a line, why there is no report.

    Returns:
        Whether it is there.
    """
    try:
        check_installed()
    except UsageError as error:
        tell(f"no report: {': '.join(str(error).splitlines())}")
        return False
    command = [sys.executable, "-P", "-m", "batchinfer", "report", str(out.root)]
    paths = [str(_PACKAGE.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_TIMEOUT_S,
            check=False,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        )
    except (OSError, subprocess.SubprocessError) as error:
        tell(f"no report: {printable(str(error))}")
        return False
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip().splitlines()
        reason = said[0] if said else f"its process ended with {done.returncode}"
        tell(f"no report: {printable(reason)}")
    return done.returncode == 0
