"""What workers import before there is work for them, and how."""

from __future__ import annotations

import subprocess
import sys

from batchinfer.process.process import UNUSED

SEES = f"""
import gc, sys
from importlib.machinery import ModuleSpec

class Build:
    "In the place of the module that imports torch."
    def find_spec(self, name, path, target=None):
        return ModuleSpec(name, self) if name == "batchinfer.builders.engine" else None
    def create_module(self, spec):
        return None
    def exec_module(self, module):
        print(gc.isenabled(), [sys.modules.get(name, "may be imported") for name in {UNUSED}])

sys.meta_path.insert(0, Build())
import batchinfer.job.fleet.on_ray.preload
print(gc.isenabled(), "batchinfer.job.fleet.worker" in sys.modules)
"""


def test_workers_import_as_the_program_does() -> None:
    """Without collections and without what is never used: that takes half the time."""
    done = subprocess.run([sys.executable, "-c", SEES], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["False [None, None]", "True True"]
