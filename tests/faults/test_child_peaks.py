from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults.child_peaks import ChildPeaks

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/status").exists(), reason="reads peaks from /proc"
)

FAT_BYTES = 2**27
WAIT = "import sys; print(flush=True); sys.stdin.read()"
BLOAT = f"kept = bytes({FAT_BYTES}).replace(b'\\0', b'x'); del kept; {WAIT}"
GRANDCHILD = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {BLOAT!r}])"


def peak_beside(code: str) -> int:
    """Run code in a Python process that prints a line and waits; return its peak memory."""
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdin
        assert child.stdout
        child.stdout.readline()
        peaks = ChildPeaks()
        peaks.look()
        child.stdin.close()
    return peaks.most_bytes


@pytest.mark.parametrize("code", [BLOAT, GRANDCHILD])
def test_a_childs_earlier_peak_counts(code: str) -> None:
    assert FAT_BYTES < peak_beside(code) < 2 * FAT_BYTES + 2**26


def test_a_parents_memory_does_not_count() -> None:
    kept = b"x" * FAT_BYTES
    assert 0 < peak_beside(WAIT) < FAT_BYTES
    assert len(kept) == FAT_BYTES
