"""Settings of the whole process: OpenMP threads, exit and garbage collection."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys

import pytest

from batchinfer.process.process import SPIN_COUNT, gc_frozen, gc_paused


def environment_after(code: str, **given: str) -> dict[str, str]:
    """Run ``code`` in a new process; return the variables of libgomp afterwards."""
    names = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
    environ = {name: value for name, value in os.environ.items() if name not in names}
    show = "import os, json\nprint(json.dumps(dict(os.environ)))"
    command = [sys.executable, "-c", f"{code}\n{show}"]
    done = subprocess.run(command, env=environ | given, capture_output=True, text=True, check=True)
    after = json.loads(done.stdout.splitlines()[-1])
    return {name: after[name] for name in names if name in after}


BOUND = "from batchinfer.process.process import bound_spinning\nbound_spinning()"
TORCH_LOADED = "import sys; sys.modules['torch'] = None\n"


def test_spinning_is_bounded() -> None:
    assert environment_after(BOUND) == {"GOMP_SPINCOUNT": SPIN_COUNT}


@pytest.mark.parametrize("given", [{"GOMP_SPINCOUNT": "7"}, {"OMP_WAIT_POLICY": "active"}])
def test_environment_variables_override_bounded_spinning(given: dict[str, str]) -> None:
    assert environment_after(BOUND, **given) == given


def test_spinning_is_not_bounded_after_torch_is_loaded() -> None:
    assert environment_after(TORCH_LOADED + BOUND) == {}


@pytest.mark.long
def test_program_and_python_api_bound_spinning_before_they_load_torch() -> None:
    program = """
import sys, batchinfer.cli.commands
from batchinfer import __main__
batchinfer.cli.commands.main = lambda: None
__main__.main()
assert "torch" not in sys.modules
"""
    assert environment_after(program) == {"GOMP_SPINCOUNT": SPIN_COUNT}
    assert environment_after("from batchinfer import LLM") == {"GOMP_SPINCOUNT": SPIN_COUNT}


LEAVES = """
import atexit, sys
from batchinfer.process.process import leaves_at_once
class Slow:
    def __del__(self):
        print("taken apart")
with leaves_at_once():
    slow = Slow()
    atexit.register(print, "asked for at exit")
    sys.stdout.write("said ")
    {ends}
"""


@pytest.mark.parametrize(("ends", "code"), [("sys.exit(7)", 7), ("sys.exit()", 0)])
def test_leaves_at_once_skips_the_tear_down_of_modules(ends: str, code: int) -> None:
    command = [sys.executable, "-c", LEAVES.format(ends=ends)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (code, "said asked for at exit\n")


@pytest.mark.parametrize("ends", ["sys.exit('wrong')", "raise ValueError('wrong')"])
def test_leaves_at_once_lets_python_show_errors(ends: str) -> None:
    command = [sys.executable, "-c", LEAVES.format(ends=ends)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "wrong" in done.stderr


def fails_inside() -> None:
    with gc_frozen():
        assert gc.get_freeze_count() > 0
        raise KeyboardInterrupt


def test_gc_frozen_keeps_objects_of_a_caller_frozen() -> None:
    """Do not compare the number of frozen objects: other threads may free some meanwhile."""
    gc.freeze()
    try:
        made_after: list[list[int]] = [[]]
        with gc_frozen():
            assert any(thing is made_after for thing in gc.get_objects())
        assert gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()


def test_gc_frozen_unfreezes_after_an_error() -> None:
    assert gc.get_freeze_count() == 0
    with pytest.raises(KeyboardInterrupt):
        fails_inside()
    assert gc.get_freeze_count() == 0


def fails_while_put_off() -> None:
    with gc_paused():
        assert not gc.isenabled()
        raise KeyboardInterrupt


def test_gc_paused_enables_gc_after_an_error() -> None:
    assert gc.isenabled()
    with pytest.raises(KeyboardInterrupt):
        fails_while_put_off()
    assert gc.isenabled()


def test_gc_paused_leaves_a_disabled_gc_off() -> None:
    gc.disable()
    try:
        with gc_paused():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_gc_paused_moves_new_objects_to_the_oldest_generation() -> None:
    with gc_paused():
        made = [[i] for i in range(10_000)]
    young = {id(thing) for generation in (0, 1) for thing in gc.get_objects(generation)}
    assert not young & {id(thing) for thing in made}
    assert gc.get_freeze_count() == 0
